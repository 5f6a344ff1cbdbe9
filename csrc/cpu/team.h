// Threads of the CPU backend: a team that runs one function, and a barrier for the members that share rows.
#pragma once

#include <atomic>
#include <cstdint>

namespace fr::cpu {

// Calls body(context, index, count) on count <= threads threads, index 0 on the caller's, and returns when all are
// done. The runtime may grant fewer threads than asked for (a nested call gets one), so body must work for any count.
void run_team(int threads, void (*body)(void* context, int index, int count), void* context);

// The last of `parties` threads to arrive releases the others. A waiter spins briefly, then sleeps in the kernel: on a
// busy machine, or under a container's CPU quota, the thread it waits for may not be running, and spinning could hold
// the very core it needs.
struct alignas(64) Barrier {
  std::atomic<int32_t> arrived{0};
  alignas(64) std::atomic<uint32_t> generation{0};

  void wait(int parties);
};

}  // namespace fr::cpu
