// The scratch memory of one call, allocated as one block.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fr::cpu {

// Keeps one block per process for the next call: the largest that a call has freed. Fresh pages cost more than
// packing the weights into them: for ELMo's layer 19,000 faults of 4 KiB pages, 44 ms of system time. Huge pages cost
// about the same, because the system must clear them. MADV_FREE lets the system reclaim the kept pages when memory runs
// short.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (!block_.data) return;
    if (kSmallest <= block_.bytes && block_.bytes <= kLargest) {
#if defined(__linux__) && defined(MADV_FREE)
      madvise(block_.data, block_.bytes, MADV_FREE);
#endif
      const std::lock_guard<std::mutex> lock(mutex_);
      if (kept_.bytes < block_.bytes) std::swap(kept_, block_);
    }
    std::free(block_.data);
  }
  char* take(int64_t bytes) {
    if (bytes >= kSmallest) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (kept_.bytes >= bytes) std::swap(kept_, block_);
    }
    if (!block_.data) {
      const int64_t alignment = bytes < kSmallest ? 64 : kHugePage,
                    rounded = (bytes + alignment - 1) / alignment * alignment;
      block_ = {static_cast<char*>(std::aligned_alloc(alignment, rounded)), rounded};
      if (!block_.data) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
      if (alignment == kHugePage) madvise(block_.data, rounded, MADV_HUGEPAGE);  // fewer page faults and TLB misses
#endif
    }
    return block_.data;
  }

 private:
  static constexpr int64_t kHugePage = 2 << 20, kSmallest = 2 * kHugePage, kLargest = 512 << 20;
  struct Block {
    char* data;
    int64_t bytes;
  };
  Block block_{};
  static inline Block kept_{};
  static inline std::mutex mutex_;
};

class Arena {
 public:
  Arena() { wants_.reserve(32); }
  // Registers `to`, to point to `bytes` bytes after allocate().
  template <class Pointer>
  void want(Pointer*& to, int64_t bytes) {
    wants_.push_back({reinterpret_cast<void**>(&to), size_});
    size_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  void allocate() {
    char* memory = memory_.take(size_ + kAlignment);
    for (const auto& [to, offset] : wants_) *to = memory + offset;
  }

 private:
  static constexpr int64_t kAlignment = 64;
  std::vector<std::pair<void**, int64_t>> wants_;
  int64_t size_ = 0;
  Memory memory_;
};

}  // namespace fr::cpu
