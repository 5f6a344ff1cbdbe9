// Threads of the CPU backend: a team that runs one function, and a barrier for the parts of a team that share rows.
#pragma once

#include <atomic>
#include <cstdint>

namespace fr::cpu {

// Calls body(context, index, count) on `count` <= threads threads, index 0 on the caller's; returns when all are done. The
// runtime may grant fewer threads than asked for (a nested call gets one), so the body must work for any count.
void run_team(int threads, void (*body)(void* context, int index, int count), void* context);

// Lets the last of `parties` threads release the others. A waiter spins briefly and then sleeps in the kernel: when the thread
// it waits for is not running (a busy machine, a container's CPU quota), spinning would take the very core that thread needs.
struct alignas(64) Barrier {
  std::atomic<int32_t> arrived{0};
  alignas(64) std::atomic<uint32_t> generation{0};

  void wait(int parties);
};

}  // namespace fr::cpu
