// Threads of the CPU backend: a team that runs one function, a barrier for the members that share rows, and whether
// other work holds the team up.
//
// On a busy machine a thread that is ready may wait a time slice, some milliseconds, for a core. Where threads meet at
// every step, each such wait stops them all. So every member measures the time that it was kept from running. After
// much of it the cores count as busy for a while, at first 50 ms and up to 2 s if they stay so: core.cpp then plans
// without barriers, and waits of OpenMP's threads are kept short (team.cpp). Only speed depends on this.
#pragma once

#include <atomic>
#include <cstdint>

namespace fr::cpu {

// Calls body(context, index, count) on count <= threads threads, index 0 on the caller's, and returns when all are
// done. The runtime may grant fewer threads than asked for (a nested call gets one), so body must work for any count.
void run_team(int threads, void (*body)(void* context, int index, int count), void* context);

// Whether teams were held up lately.
bool cores_are_busy();

// Measures how long the thread that made it was ready but had no core: time that passed, less its processor time, less
// its sleep at barriers until it was released.
class Watch {
 public:
  // To be asked with held_up_lately().
  Watch() = default;
  // For a member of a team that was called at `since` (ns). Unless `exact` only the delay until now counts: reading the
  // processor time takes a microsecond or two, too long for short calls.
  Watch(int64_t since, bool exact);

  // Whether the thread was held up for more than an eighth of the time lately. For a thread that asks again and again:
  // it looks at periods of at least 64 ms.
  bool held_up_lately();
  // The member's work is done.
  void finish() const;

 private:
  bool held_up(int64_t time) const;
  // ns; delay_: until the thread began; own_: its processor time and sleep before, if they are read
  int64_t since_ = 0, delay_ = 0, own_ = -1;
};

// The last of `parties` threads to arrive releases the others. A waiter spins briefly, then sleeps in the kernel: on a
// busy machine, or under a container's CPU quota, the thread it waits for may not be running, and spinning could hold
// the very core it needs.
struct alignas(64) Barrier {
  std::atomic<int32_t> arrived{0};
  std::atomic<bool> votes[2]{};
  std::atomic<int32_t> sleepers{0};
  std::atomic<int64_t> released{0};  // when (ns), if there were sleepers
  alignas(64) std::atomic<uint32_t> generation{0};

  void wait(int parties);

  // Whether one of the threads that meet here has voted to leave the rest of the work to the first of them. All call it
  // at the same points of their work, numbered from 0, with a wait between any two. They get the same answer, as one
  // point's votes are counted at the next.
  bool leaves(int64_t point, bool vote) {
    const bool answer = votes[(point + 1) & 1].load(std::memory_order_relaxed);
    if (vote) votes[point & 1].store(true, std::memory_order_relaxed);
    return answer;
  }
};

// For tests: what to say instead of what is measured. -1: nothing.
struct Pretence {
  std::atomic<int> busy{-1};     // cores_are_busy()
  std::atomic<int> held_up{-1};  // Watch
};
extern Pretence pretence;

}  // namespace fr::cpu
