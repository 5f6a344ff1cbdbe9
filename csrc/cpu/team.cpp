#include "team.h"

#include <thread>
#include <vector>

#if defined(FASTRNN_OPENMP)
#include <pthread.h>

// OpenMP's runtime as GCC's compiler calls it (libgomp manual, "Implementing PARALLEL construct"); LLVM's and Intel's
// runtimes accept these calls too. Calling it directly lets objects of every compiler use the one runtime that torch
// has loaded.
extern "C" {
void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned flags);
int omp_get_thread_num();
int omp_get_num_threads();
}
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fr::cpu {

namespace {

void run_on_new_threads(int threads, void (*body)(void*, int, int), void* context) {
  std::vector<std::thread> others;
  for (int index = 1; index < threads; ++index) others.emplace_back(body, context, index, threads);
  body(context, 0, threads);
  for (std::thread& other : others) other.join();
}

#if defined(FASTRNN_OPENMP)
// A process that forks after OpenMP was used leaves the child a team whose threads do not exist there: the runtime
// would wait for them forever. Whether it was used cannot be queried, so a forked process never uses OpenMP. The flag
// is set up when the library is loaded, because a fork may come before the first call.
std::atomic<bool> forked{false};
[[maybe_unused]] const int watching = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

bool openmp_is_safe() { return !forked.load(std::memory_order_relaxed); }

struct Job {
  void (*body)(void*, int, int);
  void* context;
};
#endif

}  // namespace

void run_team(int threads, void (*body)(void*, int, int), void* context) {
  if (threads <= 1) return body(context, 0, 1);
#if defined(FASTRNN_OPENMP)
  if (openmp_is_safe()) {
    Job job{body, context};
    const auto run = [](void* data) {
      const Job& job = *static_cast<const Job*>(data);
      job.body(job.context, omp_get_thread_num(), omp_get_num_threads());
    };
    return GOMP_parallel(run, &job, static_cast<unsigned>(threads), 0);
  }
#endif
  run_on_new_threads(threads, body, context);
}

void Barrier::wait(int parties) {
  if (parties <= 1) return;
  const uint32_t seen = generation.load(std::memory_order_acquire);
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == parties) {
    arrived.store(0, std::memory_order_relaxed);
    generation.fetch_add(1, std::memory_order_release);
    generation.notify_all();
    return;
  }
  // About 20 us: longer than the imbalance of any balanced step, far shorter than a scheduler's time slice.
  for (int spin = 0; spin < 1000; ++spin) {
    if (generation.load(std::memory_order_acquire) != seen) return;
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  while (generation.load(std::memory_order_acquire) == seen) generation.wait(seen, std::memory_order_acquire);
}

}  // namespace fr::cpu
