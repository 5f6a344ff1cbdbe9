#include "team.h"

#include <time.h>

#include <algorithm>
#include <system_error>
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
int omp_get_num_procs();
// Only LLVM's and Intel's runtimes have it.
[[gnu::weak]] void __kmpc_fork_call();
}
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace fr::cpu {

Pretence pretence;

namespace {

constexpr int64_t kMicrosecond = 1000, kMillisecond = 1000 * kMicrosecond;

int64_t read_clock(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return int64_t{time.tv_sec} * 1000 * kMillisecond + time.tv_nsec;
}
int64_t now() { return read_clock(CLOCK_MONOTONIC); }

thread_local int64_t slept = 0;  // at barriers
int64_t own_time() { return read_clock(CLOCK_THREAD_CPUTIME_ID) + slept; }

// Time that threads lost lately, as it was at the last loss; until when the cores count as busy, and for how long they
// did. Threads may overwrite each other's values; no harm.
std::atomic<int64_t> lost_lately{0}, last_loss{0}, busy_until{0}, busy_for{0};

void note_lost(int64_t lost) {
  constexpr int64_t kShortest = 50 * kMillisecond, kLongest = 2000 * kMillisecond;
  const int64_t time = now(), passed = time - last_loss.load(std::memory_order_relaxed);
  // Losses fade: short work of the system now and then, or less than a quarter of the time, is not worth a change.
  const int64_t before = lost_lately.load(std::memory_order_relaxed) - passed / 4;
  if (before > 0) lost += before;
  last_loss.store(time, std::memory_order_relaxed);
  lost_lately.store(std::min(lost, 20 * kMillisecond), std::memory_order_relaxed);
  if (lost < 10 * kMillisecond) return;
  const int64_t until = busy_until.load(std::memory_order_relaxed), last = busy_for.load(std::memory_order_relaxed);
  // Held up again soon after the cores counted as busy: now for longer.
  const int64_t next = time < until + last ? std::min(2 * last, kLongest) : kShortest;
  busy_for.store(next, std::memory_order_relaxed);
  busy_until.store(time + next, std::memory_order_relaxed);
}

// Whether the thread's last team took long. Reading the processor time would slow down short calls; those that are held
// up take long.
thread_local bool was_long = false;

// One member's call of the body.
void run_member(int64_t since, void (*body)(void*, int, int), void* context, int index, int count) {
  Watch watch(since, was_long);
  body(context, index, count);
  watch.finish();
}

void run_on_new_threads(int threads, void (*body)(void*, int, int), void* context) {
  const int64_t since = now();
  std::vector<std::thread> others;
  for (int index = 1; index < threads; ++index) others.emplace_back(run_member, since, body, context, index, threads);
  run_member(since, body, context, 0, threads);
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
  int64_t since;
};

// After its part of a team, and at the team's end, a thread of libgomp spins for up to 300,000 rounds, milliseconds. On
// a busy machine that uses up the slices which the work then lacks, and a thread that is off its core while it spins
// starts late. With more threads than processors libgomp spins 100 rounds (its manual, GOMP_SPINCOUNT). So while the
// cores are busy a thread keeps a second team, which sleeps; it ends with the thread.
void keep_waits_short(int threads) {
  static std::atomic<bool> kept{false};
  const int processors = omp_get_num_procs();
  // Teams of fewer threads than half the processors have other cores to go to.
  if (__kmpc_fork_call || 2 * threads < processors || kept.exchange(true, std::memory_order_relaxed)) return;
  const unsigned others = static_cast<unsigned>(std::max(processors - threads, 0)) + 2;
  try {
    std::thread([others] {
      GOMP_parallel([](void*) {}, nullptr, others, 0);
      while (cores_are_busy()) {
        const timespec pause{0, 100 * kMillisecond};
        nanosleep(&pause, nullptr);
      }
      kept.store(false, std::memory_order_relaxed);
    }).detach();
  } catch (const std::system_error&) { kept.store(false, std::memory_order_relaxed); }
}
#endif

}  // namespace

bool cores_are_busy() {
  const int pretended = pretence.busy.load(std::memory_order_relaxed);
  return pretended >= 0 ? pretended : now() < busy_until.load(std::memory_order_relaxed);
}

Watch::Watch(int64_t since, bool exact) : since_(since), delay_(now() - since), own_(exact ? own_time() : -1) {}

bool Watch::held_up(int64_t time) const {
  const int pretended = pretence.held_up.load(std::memory_order_relaxed);
  if (pretended >= 0) return pretended;
  const int64_t all = time - since_, lost = own_ < 0 ? delay_ : all - (own_time() - own_);
  if (lost < kMillisecond || 8 * lost < all) return false;
  note_lost(lost);
  return true;
}

bool Watch::held_up_lately() {
  const int64_t time = now();
  if (since_ == 0) *this = Watch(time, was_long);
  if (time < since_ + 64 * kMillisecond && pretence.held_up.load(std::memory_order_relaxed) < 0) return false;
  const bool held = held_up(time);
  *this = Watch(time, true);
  return held;
}

void Watch::finish() const {
  const int64_t time = now();
  was_long = time > since_ + 2 * kMillisecond;
  if (was_long) held_up(time);
}

void run_team(int threads, void (*body)(void*, int, int), void* context) {
  if (threads <= 1) return body(context, 0, 1);
#if defined(FASTRNN_OPENMP)
  if (openmp_is_safe()) {
    if (cores_are_busy()) keep_waits_short(threads);
    Job job{body, context, now()};
    const auto run = [](void* data) {
      const Job& job = *static_cast<const Job*>(data);
      run_member(job.since, job.body, job.context, omp_get_thread_num(), omp_get_num_threads());
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
    if (sleepers.load(std::memory_order_relaxed)) released.store(now(), std::memory_order_relaxed);
    generation.fetch_add(1, std::memory_order_release);
    generation.notify_all();
    return;
  }
  // 20 us are longer than the imbalance of any balanced step, and far shorter than a scheduler's time slice. Most waits
  // are too short to read the clock.
  int64_t begin = 0, asleep = 0;
  while (asleep <= begin + 20 * kMicrosecond) {
    for (int spin = 0; spin < 32; ++spin) {
      if (generation.load(std::memory_order_acquire) != seen) return;
#if defined(__x86_64__)
      _mm_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
    asleep = now();
    if (begin == 0) begin = asleep;
  }
  sleepers.fetch_add(1, std::memory_order_relaxed);
  while (generation.load(std::memory_order_acquire) == seen) generation.wait(seen, std::memory_order_acquire);
  sleepers.fetch_sub(1, std::memory_order_relaxed);
  // The rest of the time was lost waiting for a core.
  slept += std::clamp(released.load(std::memory_order_relaxed), asleep, now()) - asleep;
}

}  // namespace fr::cpu
