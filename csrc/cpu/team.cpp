#include "team.h"

#if defined(_OPENMP)
#include <omp.h>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif
#else
#include <thread>
#include <vector>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fr::cpu {

#if defined(_OPENMP)
namespace {

// A process forked after a team ran inherits the runtime's record of a team whose threads did not come along, and would wait
// for them for ever: it computes alone.
std::atomic<bool> team_ran{false}, forked{false};

void watch_forks() {
#if defined(__unix__) || defined(__APPLE__)
  static const int watching = pthread_atfork(nullptr, nullptr, [] { forked.store(team_ran.load()); });
  static_cast<void>(watching);
#endif
  team_ran.store(true, std::memory_order_relaxed);
}

}  // namespace

void run_team(int threads, void (*body)(void*, int, int), void* context) {
  if (threads <= 1 || forked.load(std::memory_order_relaxed)) return body(context, 0, 1);
  watch_forks();
#pragma omp parallel num_threads(threads)
  body(context, omp_get_thread_num(), omp_get_num_threads());
}
#else
void run_team(int threads, void (*body)(void*, int, int), void* context) {
  std::vector<std::thread> others;
  for (int index = 1; index < threads; ++index) others.emplace_back(body, context, index, threads);
  body(context, 0, threads < 1 ? 1 : threads);
  for (std::thread& other : others) other.join();
}
#endif

void Barrier::wait(int parties) {
  if (parties <= 1) return;
  const uint32_t seen = generation.load(std::memory_order_acquire);
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == parties) {
    arrived.store(0, std::memory_order_relaxed);
    generation.fetch_add(1, std::memory_order_release);
    generation.notify_all();
    return;
  }
  // About 20 us: longer than any balanced step's imbalance, far shorter than a scheduler's time slice.
  for (int spin = 0; spin < 1000; ++spin) {
    if (generation.load(std::memory_order_acquire) != seen) return;
#if defined(__x86_64__)
    _mm_pause();
#endif
  }
  while (generation.load(std::memory_order_acquire) == seen) generation.wait(seen, std::memory_order_acquire);
}

}  // namespace fr::cpu
