// Always compiled without sanitizers: see scheduler.h.
#undef _FORTIFY_SOURCE  // its longjmp refuses to change stacks
#include "scheduler.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <utility>
#include <vector>

extern "C" {
void* __tsan_create_fiber(unsigned flags) __attribute__((weak));
void __tsan_destroy_fiber(void* fiber) __attribute__((weak));
void* __tsan_get_current_fiber() __attribute__((weak));
void __tsan_switch_to_fiber(void* fiber, unsigned flags) __attribute__((weak));
void __tsan_acquire(void* address) __attribute__((weak));
void __tsan_release(void* address) __attribute__((weak));
void __tsan_write_range(void* address, size_t size) __attribute__((weak));
void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom, size_t size) __attribute__((weak));
void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom, size_t* size) __attribute__((weak));
void __asan_poison_memory_region(void const volatile* address, size_t size) __attribute__((weak));
void __asan_unpoison_memory_region(void const volatile* address, size_t size) __attribute__((weak));
}

namespace fr::emulation {
namespace {

constexpr size_t kStackBytes = 256 * 1024;  // reserved, touched only as far as a kernel goes; ASan needs large frames
constexpr int kWarp = 32;
constexpr int kMaxCopies = 256;               // in flight a thread
constexpr long kPollsWithoutProgress = 2000;  // rounds over all runnable threads after which the launch counts as
                                              // deadlocked,
constexpr long kPollsOfWaiting = 4;           // and after which a stalled block resumes
constexpr size_t kMaxTsanFibers = 4096;  // distinct fibers a launch, if one wave needs no more; the runtime has room
                                         // for about 8000
constexpr unsigned char kPoison = 0xFF;  // NaN in every type
constexpr unsigned kNoSync = 1;          // __tsan_switch_to_fiber_no_sync

bool has_tsan() { return __tsan_create_fiber != nullptr; }
bool has_asan() { return __asan_unpoison_memory_region != nullptr; }
void acquire(void* address) {
  if (__tsan_acquire) __tsan_acquire(address);
}
void release(void* address) {
  if (__tsan_release) __tsan_release(address);
}

struct Block;

struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  unsigned char* stack = nullptr;
  bool started = false, done = false;
  void* tsan = nullptr;  // ThreadSanitizer's fiber; lives as long as the stack, which it takes for this fiber's alone
  void* fake_stack = nullptr;
  Block* block = nullptr;
  int thread = 0;
  const char* wait = nullptr;  // what it waits for; null: runnable
  const char* file = nullptr;
  int line = 0;
  std::unique_ptr<Copy[]> copies{new Copy[kMaxCopies]};  // a ring buffer; never moved, so that ThreadSanitizer sees no
                                                         // memmove
  unsigned first_copy = 0, end_copy = 0;
  int group = 0;
};

struct Warp {
  int arrived = 0;
  Collective kind = Collective::kNone;
  const char* file = nullptr;
  int line = 0;
  unsigned generation = 0;
  void* parts[kWarp];
  char order[2];  // addresses for ThreadSanitizer, by parity of the generation
};

// A barrier of a block's threads, or of a cluster's.
struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
  char order[2];
};

struct Block {
  Dim index;
  std::unique_ptr<unsigned char, void (*)(void*)> shared{nullptr, std::free};
  int threads = 0, returned = 0;
  Barrier barrier;
  std::vector<Warp> warps;
  bool any[2] = {};  // of block_sync_any, by parity of the generation
  std::vector<Fiber*> fibers;
  char return_order;
  Block* lead = nullptr;    // first block of the cluster; the others follow it in memory
  Barrier cluster_barrier;  // only the lead's is used
  // Where a peer last called peer_shared for this block, and how many cluster barriers had passed.
  const char* asked_file = nullptr;
  int asked_line = 0;
  unsigned asked_generation = 0;
  bool has_left() const { return returned == threads; }
};

struct Launch {
  const char* kernel;
  Entry entry;
  const void* params;
  Size size;
  uint64_t seed, random;
  unsigned long long nanoseconds, poll_nanoseconds;
  int stall_left;  // publications until `stalled` stops; negative: never
  Dim stalled;
  Fiber* standing = nullptr;
  std::vector<Block> blocks;
  std::vector<std::vector<Block>> former;  // kept until the launch ends, because ThreadSanitizer counts freeing as an
                                           // access
  std::vector<Fiber*> runnable;            // a ring buffer, in order of becoming runnable
  size_t head = 0, count = 0;
  long polls = 0;
  std::string fault;
  char start_token, end_token;
  ucontext_t main_context;
  jmp_buf main_jump;
  void* main_tsan = nullptr;
  size_t fibers = 0;  // taken from the pool
  void* main_fake_stack = nullptr;
  const void* main_stack = nullptr;
  size_t main_stack_size = 0;
  Fiber* current = nullptr;
};

thread_local Launch* g_launch = nullptr;
thread_local std::vector<std::unique_ptr<Fiber>> g_pool;

uint64_t next_random(Launch& l) {
  l.random ^= l.random << 13, l.random ^= l.random >> 7, l.random ^= l.random << 17;
  return l.random;
}

void make_runnable(Launch& l, Fiber* fiber) {
  fiber->wait = nullptr;
  l.runnable[(l.head + l.count++) % l.runnable.size()] = fiber;
}

Fiber* next_runnable(Launch& l) {
  if (l.count == 0) return std::exchange(l.standing, nullptr);
  if (l.seed != 0) std::swap(l.runnable[l.head], l.runnable[(l.head + next_random(l) % l.count) % l.runnable.size()]);
  Fiber* fiber = l.runnable[l.head];
  l.head = (l.head + 1) % l.runnable.size();
  --l.count;
  return fiber;
}

void finish_switch(Launch& l, void* fake_stack, bool from_main) {
  if (__sanitizer_finish_switch_fiber)
    __sanitizer_finish_switch_fiber(
        fake_stack, from_main ? &l.main_stack : nullptr, from_main ? &l.main_stack_size : nullptr);
}

[[noreturn]] void leave(Launch& l, Fiber* self);
void stall(Launch& l, Fiber* self);
void leave_cluster(Launch& l, Block& block);

[[gnu::noinline]] void fiber_main() {
  Launch& l = *g_launch;
  Fiber* self = l.current;
  finish_switch(l, nullptr, l.main_stack == nullptr);
  acquire(&l.start_token);
  stall(l, self);
  l.entry(l.params);
  release(&self->block->return_order);
  self->done = true;
  l.polls = 0;
  if (++self->block->returned == self->block->threads && l.size.cluster > 1) leave_cluster(l, *self->block);
  release(&l.end_token);
  leave(l, self);
}

// Switches from `from` to `to` (null: main). Sanitizer builds use swapcontext, which the sanitizers understand. Plain
// builds jump, which saves two system calls a switch.
void switch_fiber(Launch& l, Fiber* from, Fiber* to) {
  if (from == to) return;
  l.current = to;
  if (__sanitizer_start_switch_fiber) {
    void** save = from ? (from->done ? nullptr : &from->fake_stack) : &l.main_fake_stack;
    if (to) __sanitizer_start_switch_fiber(save, to->stack, kStackBytes);
    else __sanitizer_start_switch_fiber(save, l.main_stack, l.main_stack_size);
  }
  if (has_tsan()) __tsan_switch_to_fiber(to ? to->tsan : l.main_tsan, kNoSync);
  if (has_tsan() || has_asan()) {
    ucontext_t& save = from ? from->context : l.main_context;
    ucontext_t& load = to ? to->context : l.main_context;
    if (to) to->started = true;
    swapcontext(&save, &load);
  } else if (_setjmp(from ? from->jump : l.main_jump) == 0) {
    if (!to) _longjmp(l.main_jump, 1);
    if (to->started) _longjmp(to->jump, 1);
    to->started = true;
    setcontext(&to->context);
  }
  // the fiber resumes here
  finish_switch(l, from ? from->fake_stack : l.main_fake_stack, false);
}

// Runs another fiber; returns when this one is picked again.
void yield(Launch& l, Fiber* self) { switch_fiber(l, self, next_runnable(l)); }

// Schedule::stall_after.
void stall(Launch& l, Fiber* self) {
  const Dim at = self->block->index, stalled = l.stalled;
  if (self->thread != 0 || at.x != stalled.x || at.y != stalled.y || at.z != stalled.z || l.stall_left-- != 0) return;
  l.standing = self;
  yield(l, self);
}

void wait_for(Launch& l, Fiber* self, const char* what, const char* file, int line) {
  self->wait = what, self->file = file, self->line = line;
  yield(l, self);
}

std::string place(const Block& block) {
  const Dim b = block.index;
  return "block (" + std::to_string(b.x) + "," + std::to_string(b.y) + "," + std::to_string(b.z) + ")";
}
std::string place(const Fiber& fiber) {
  return place(*fiber.block) + " warp " + std::to_string(fiber.thread / kWarp) + " lane " +
         std::to_string(fiber.thread % kWarp);
}

const char* base_name(const char* file) {
  const char* name = file;
  for (const char* p = file; *p; ++p)
    if (*p == '/') name = p + 1;
  return name;
}

// A text for deadlocks: which threads wait where, grouped.
std::string waiting_report(const Launch& l) {
  std::map<std::string, std::pair<int, std::string>> groups;
  int returned = 0;
  for (const Block& block : l.blocks)
    for (const Fiber* fiber : block.fibers) {
      if (fiber->done) {
        ++returned;
        continue;
      }
      const std::string where =
          fiber->wait ? std::string(fiber->wait) + " at " + base_name(fiber->file) + ":" + std::to_string(fiber->line)
                      : std::string("nothing (runnable)");
      auto& group = groups[where];
      if (group.first++ == 0) group.second = place(*fiber);
    }
  std::string text = "a wait that can never end:";
  for (const auto& [where, group] : groups)
    text += "\n  " + std::to_string(group.first) + " threads wait for " + where + ", first " + group.second;
  if (returned) text += "\n  " + std::to_string(returned) + " threads have returned";
  return text;
}

Fiber* take_fiber(size_t index) {
  while (g_pool.size() <= index) {
    auto fiber = std::make_unique<Fiber>();
    void* stack =
        mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) throw std::bad_alloc();
    fiber->stack = static_cast<unsigned char*>(stack);
    g_pool.push_back(std::move(fiber));
  }
  return g_pool[index].get();
}

void prepare(Launch& l, Fiber* fiber, Block* block, int thread) {
  fiber->started = fiber->done = false;
  fiber->fake_stack = nullptr;
  fiber->block = block, fiber->thread = thread;
  fiber->wait = nullptr;
  fiber->first_copy = fiber->end_copy = 0, fiber->group = 0;
  if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(fiber->stack, kStackBytes);
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, fiber_main, 0);
  if (has_tsan() && !fiber->tsan) fiber->tsan = __tsan_create_fiber(0);
  make_runnable(l, fiber);
}

// A block's shared memory ends with the block. From now on a peer's access to it is an error that every build detects:
// the memory is poisoned, and ThreadSanitizer sees a write, which races with every access not ordered before it by a
// cluster_sync.
void leave_cluster(Launch& l, Block& block) {
  if (block.asked_file && block.asked_generation == block.lead->cluster_barrier.generation)
    fail("a block returns while a peer may still use its shared memory: no cluster_sync since peer_shared",
        block.asked_file, block.asked_line);
  if (!block.shared) return;
  acquire(&block.return_order);
  if (__tsan_write_range) __tsan_write_range(block.shared.get(), l.size.shared_bytes);
  std::fill_n(block.shared.get(), l.size.shared_bytes, kPoison);
  if (__asan_poison_memory_region) __asan_poison_memory_region(block.shared.get(), l.size.shared_bytes);
}

// After a launch with clusters: checks that nobody wrote to the memory of a block that had returned.
void check_left(Launch& l) {
  for (const Block& block : l.blocks) {
    if (!block.shared || !block.has_left()) continue;
    if (__asan_unpoison_memory_region) __asan_unpoison_memory_region(block.shared.get(), l.size.shared_bytes);
    const unsigned char *begin = block.shared.get(), *end = begin + l.size.shared_bytes;
    const auto touched = std::find_if(begin, end, [](unsigned char byte) { return byte != kPoison; });
    if (touched != end && l.fault.empty())
      l.fault = "a peer wrote at " + std::to_string(touched - begin) + " of the shared memory of " + place(block) +
                " after that block had returned";
  }
}

// Runs the clusters [first, last) of `order` together.
void run_wave(Launch& l, const std::vector<int>& order, size_t first, size_t last) {
  if (has_tsan()) l.former.push_back(std::move(l.blocks));
  const size_t cluster = l.size.cluster;
  l.blocks = std::vector<Block>((last - first) * cluster);
  l.runnable.assign(l.blocks.size() * l.size.threads, nullptr);
  l.head = l.count = 0, l.polls = 0;
  // Waves reuse the same fibers in sequence. Under ThreadSanitizer each thread of a launch has a fiber of its own, as
  // far as there is room, so that it sees no order between blocks that the kernel does not create. Launches are ordered
  // anyway.
  if (!has_tsan() || l.fibers + l.runnable.size() > kMaxTsanFibers) l.fibers = 0;
  for (size_t i = 0; i < l.blocks.size(); ++i) {
    Block& block = l.blocks[i];
    const int index = static_cast<int>(order[first + i / cluster] * cluster + i % cluster);
    const Dim grid = l.size.grid;
    block.index = {index % grid.x, index / grid.x % grid.y, index / grid.x / grid.y};
    block.lead = &l.blocks[i / cluster * cluster];
    block.threads = l.size.threads;
    block.warps.resize((block.threads + kWarp - 1) / kWarp);
    if (l.size.shared_bytes) {
      block.shared.reset(static_cast<unsigned char*>(std::malloc(l.size.shared_bytes)));
      if (!block.shared) throw std::bad_alloc();
      std::fill_n(block.shared.get(), l.size.shared_bytes, kPoison);
    }
    for (int thread = 0; thread < block.threads; ++thread) {
      Fiber* fiber = take_fiber(l.fibers++);
      block.fibers.push_back(fiber);
      prepare(l, fiber, &block, thread);
    }
  }
  release(&l.start_token);
  switch_fiber(l, nullptr, next_runnable(l));
  bool all_done = true;
  for (const Block& block : l.blocks) all_done = all_done && block.returned == block.threads;
  if (l.fault.empty() && !all_done) l.fault = waiting_report(l);
  if (cluster > 1) check_left(l);
  if (has_tsan() && !l.fault.empty()) {  // these fibers stopped in the middle of their functions
    for (const auto& fiber : g_pool)
      if (fiber->tsan) __tsan_destroy_fiber(std::exchange(fiber->tsan, nullptr));
  }
}

void leave(Launch& l, Fiber* self) {
  switch_fiber(l, self, next_runnable(l));
  __builtin_unreachable();
}

}  // namespace

namespace {
std::atomic<int64_t> g_launches{0};
}  // namespace

int64_t launches() { return g_launches; }

void run(const char* kernel, Entry entry, const void* params, const Size& size, Schedule schedule) {
  ++g_launches;
  if (g_launch) throw std::logic_error("a kernel cannot launch a kernel");
  if (size.cluster < 1 || size.grid.x % size.cluster != 0)
    throw std::logic_error(std::string(kernel) + ": " + std::to_string(size.grid.x) +
                           " blocks in x are no clusters of " + std::to_string(size.cluster));
  Launch l{};
  l.kernel = kernel, l.entry = entry, l.params = params, l.size = size;
  l.seed = schedule.seed, l.random = schedule.seed * 0x9E3779B97F4A7C15ull + 1;
  l.poll_nanoseconds = schedule.poll_nanoseconds;
  l.stall_left = schedule.stall_after, l.stalled = schedule.stalled;
  const size_t clusters = static_cast<size_t>(size.grid.x) * size.grid.y * size.grid.z / size.cluster;
  std::vector<int> order(clusters);
  for (size_t i = 0; i < clusters; ++i) order[i] = static_cast<int>(i);
  if (l.seed != 0)
    for (size_t i = clusters; i > 1; --i) std::swap(order[i - 1], order[next_random(l) % i]);
  const size_t together = size.cooperative ? clusters : 2;
  if (has_tsan()) l.main_tsan = __tsan_get_current_fiber();
  g_launch = &l;
  for (size_t first = 0; first < clusters && l.fault.empty(); first += together) {
    try {
      run_wave(l, order, first, std::min(clusters, first + together));
    } catch (...) {
      g_launch = nullptr;
      throw;
    }
  }
  g_launch = nullptr;
  acquire(&l.end_token);
  if (!l.fault.empty()) throw Fault(std::string(kernel) + ": " + l.fault);
}

int thread_index() { return g_launch->current->thread; }
int block_threads() { return g_launch->size.threads; }
Dim block_index() { return g_launch->current->block->index; }
Dim grid_size() { return g_launch->size.grid; }
unsigned char* shared_memory() { return g_launch->current->block->shared.get(); }
size_t shared_bytes() { return g_launch->size.shared_bytes; }
unsigned long long nanoseconds() { return g_launch->nanoseconds; }
int cluster_rank() { return static_cast<int>(g_launch->current->block - g_launch->current->block->lead); }
int cluster_size() { return g_launch->size.cluster; }

namespace {

// The running thread arrives at a barrier of all threads of `count` blocks, and continues when all have arrived.
void meet(Barrier& barrier, Block* blocks, int count, const char* what, const char* file, int line) {
  Launch& l = *g_launch;
  Fiber* self = l.current;
  char* order = &barrier.order[barrier.generation & 1];
  release(order);
  if (++barrier.arrived == count * l.size.threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    l.polls = 0;
    for (Block* block = blocks; block < blocks + count; ++block)
      for (Fiber* fiber : block->fibers)
        if (fiber != self) make_runnable(l, fiber);
    if (l.seed != 0) {  // the last to arrive need not be the first to go on
      make_runnable(l, self);
      yield(l, self);
    }
  } else {
    wait_for(l, self, what, file, line);
  }
  acquire(order);
}

}  // namespace

void block_sync(const char* file, int line) {
  Block* block = g_launch->current->block;
  meet(block->barrier, block, 1, "block_sync", file, line);
}

bool block_sync_any(bool value, const char* file, int line) {
  Block* block = g_launch->current->block;
  bool& any = block->any[block->barrier.generation & 1];
  any = (block->barrier.arrived > 0 && any) || value;
  block_sync(file, line);
  return any;
}

void cluster_sync(const char* file, int line) {
  Block* lead = g_launch->current->block->lead;
  meet(lead->cluster_barrier, lead, g_launch->size.cluster, "cluster_sync", file, line);
}

unsigned char* peer_shared(unsigned char* own, size_t bytes, int rank, const char* file, int line) {
  const Launch& l = *g_launch;
  Block& block = *l.current->block;
  const unsigned char* memory = block.shared.get();
  if (rank < 0 || rank >= l.size.cluster)
    fail(
        "peer_shared: rank " + std::to_string(rank) + " of a cluster of " + std::to_string(l.size.cluster), file, line);
  if (!memory || own < memory || own + bytes > memory + l.size.shared_bytes)
    fail("peer_shared: an address that is not in this block's " + std::to_string(l.size.shared_bytes) +
             " bytes of shared memory",
        file, line);
  Block& peer = block.lead[rank];
  if (&peer == &block) return own;
  const unsigned generation = block.lead->cluster_barrier.generation;
  if (generation == 0) fail("peer_shared before the first cluster_sync: the peer may not have started", file, line);
  if (peer.has_left()) fail("peer_shared: the block of rank " + std::to_string(rank) + " has returned", file, line);
  peer.asked_file = file, peer.asked_line = line, peer.asked_generation = generation;
  return peer.shared.get() + (own - memory);
}

void warp_collective(
    Collective kind, void* part, void (*compute)(void** parts), bool ordering, const char* file, int line) {
  static const char* const kNames[] = {"", "warp_sync", "a shuffle", "load_matrix", "mma"};
  Launch& l = *g_launch;
  Fiber* self = l.current;
  Block& block = *self->block;
  Warp& warp = block.warps[self->thread / kWarp];
  if (warp.arrived == 0) {
    warp.kind = kind, warp.file = file, warp.line = line;
  } else if (warp.kind != kind || warp.line != line) {
    fail(std::string("lanes of a warp meet at different collectives: ") + kNames[static_cast<int>(kind)] + " here, " +
             kNames[static_cast<int>(warp.kind)] + " at " + base_name(warp.file) + ":" + std::to_string(warp.line),
        file, line);
  }
  char* order = &warp.order[warp.generation & 1];
  if (ordering) release(order);
  warp.parts[self->thread % kWarp] = part;
  if (++warp.arrived == std::min(kWarp, block.threads - self->thread / kWarp * kWarp)) {
    if (compute) compute(warp.parts);
    warp.arrived = 0;
    ++warp.generation;
    const int first = self->thread / kWarp * kWarp;
    for (int thread = first; thread < std::min(first + kWarp, block.threads); ++thread)
      if (block.fibers[thread] != self) make_runnable(l, block.fibers[thread]);
  } else {
    wait_for(l, self, kNames[static_cast<int>(kind)], file, line);
  }
  if (ordering) acquire(order);
}

void progress() {
  g_launch->polls = 0;
  stall(*g_launch, g_launch->current);
}

void pause(const char* file, int line) {
  Launch& l = *g_launch;
  Fiber* self = l.current;
  l.nanoseconds += l.poll_nanoseconds;
  ++l.polls;
  if (l.standing && l.poll_nanoseconds == 0 && l.polls > kPollsOfWaiting * static_cast<long>(l.count + 1)) {
    l.polls = 0;
    make_runnable(l, std::exchange(l.standing, nullptr));
  }
  if (l.polls > kPollsWithoutProgress * static_cast<long>(l.count + 1)) {
    self->wait = "a signal", self->file = file, self->line = line;
    l.fault = waiting_report(l);
    switch_fiber(l, self, nullptr);
  }
  make_runnable(l, self);
  self->wait = "a signal", self->file = file, self->line = line;
  yield(l, self);
  self->wait = nullptr;
}

void fail(const std::string& what, const char* file, int line) {
  Launch& l = *g_launch;
  l.fault = what + " (" + base_name(file) + ":" + std::to_string(line) + ", " + place(*l.current) + ")";
  switch_fiber(l, l.current, nullptr);
  __builtin_unreachable();
}

void put_copy(const Copy& copy, const char* file, int line) {
  Fiber* self = g_launch->current;
  if (self->end_copy - self->first_copy == kMaxCopies)
    fail("more asynchronous copies pending than a thread should have", file, line);
  Copy& place = self->copies[self->end_copy++ % kMaxCopies];
  place = copy;
  place.group = self->group;
}

void commit_copies() { ++g_launch->current->group; }

const Copy* take_copy(int groups_left) {
  Fiber* self = g_launch->current;
  if (self->first_copy == self->end_copy) return nullptr;
  const Copy* copy = &self->copies[self->first_copy % kMaxCopies];
  if (copy->group >= self->group - groups_left) return nullptr;
  ++self->first_copy;
  return copy;
}

bool copy_is_early() { return g_launch->seed != 0 && (next_random(*g_launch) & 4) != 0; }

}  // namespace fr::emulation
