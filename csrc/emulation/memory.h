// A registry of the global memory that kernels may touch. The host build of a kernel leaves bounds to AddressSanitizer.
// A kernel's PTX (tests/kernels/ptx) checks each access itself, against this registry.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

namespace fr::emulation {

inline std::map<uint64_t, uint64_t>& registered_memory() {  // end of each buffer, by its begin
  static std::map<uint64_t, uint64_t> all;
  return all;
}

// Registers a buffer for this object's lifetime. Once any buffer is registered, kernels may touch nothing else.
class Registered {
 public:
  Registered(const void* begin, size_t bytes) : begin_(reinterpret_cast<uint64_t>(begin)) {
    if (begin && bytes > 0) registered_memory()[begin_] = begin_ + bytes;
    else begin_ = 0;
  }
  Registered(const Registered&) = delete;
  Registered(Registered&& other) noexcept : begin_(std::exchange(other.begin_, 0)) {}
  Registered& operator=(Registered&& other) noexcept {
    std::swap(begin_, other.begin_);
    return *this;
  }
  ~Registered() {
    if (begin_ != 0) registered_memory().erase(begin_);
  }

 private:
  uint64_t begin_;
};

// Whether a kernel may touch these bytes. Sets [begin, end) to the buffer that the address lies in.
inline bool may_touch(uint64_t address, size_t bytes, uint64_t& begin, uint64_t& end) {
  const auto& all = registered_memory();
  begin = address, end = address + bytes;
  if (all.empty()) return true;
  auto next = all.upper_bound(address);
  if (next == all.begin()) return false;
  --next;
  begin = next->first, end = next->second;
  return address + bytes <= end;
}

}  // namespace fr::emulation
