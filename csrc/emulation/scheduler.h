// Runs a CUDA kernel on the host. Every CUDA thread is a fiber (ucontext). Clusters, blocks and warps are sets of
// fibers with counted barriers. A block's shared memory is one heap buffer of exactly the launched size, filled with
// NaN. Only device.h and launch.cuh use this.
//
// scheduler.cpp is compiled without sanitizers in every build, so that its own bookkeeping is invisible to
// ThreadSanitizer. It finds the runtimes of AddressSanitizer and ThreadSanitizer through weak symbols and reports every
// fiber switch to them. For ThreadSanitizer it annotates the ordering that a kernel may rely on (barriers, release and
// acquire), but not the order in which the scheduler happens to run fibers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fr::emulation {

struct Dim {
  int x = 1, y = 1, z = 1;
};

// How the threads of a launch interleave: seed 0 runs them in order, others pick the next thread at random. The
// device's clock advances only by poll_nanoseconds for each poll (wait_until) of any thread. With 0 the clock stands
// still, so that a wait that can never end is reported as a fault before the kernel's timeout can hide it.
struct Schedule {
  uint64_t seed = 0;
  unsigned long long poll_nanoseconds = 0;
  // Stalls block `stalled` of every launch that has it: its first thread stops after so many publications
  // (store_release). It resumes when no other thread can run or, while the clock stands still, when all others only
  // poll. By then they are as far ahead as the kernel allows. Negative: no stall.
  int stall_after = -1;
  Dim stalled = {0, 0, 0};
};

// A launch. cooperative: all blocks are resident together and may wait for each other. Otherwise a few run at a time,
// in an order that the seed decides. The blocks of a cluster are neighbours in x and always resident together.
struct Size {
  Dim grid;
  int threads;
  size_t shared_bytes;
  int cluster;
  bool cooperative;
};

// An error of a kernel: a wait that can never end, a failed fr::expect, warps that diverge at a collective. The text
// names kernel, block, thread, file and line.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The kinds of warp collectives.
enum class Collective : int { kNone, kSync, kShuffle, kMatrix, kMma };

using Entry = void (*)(const void* params);

// Returns another build of a kernel to run in place of the host's, or null. It is found by the kernel's type (typeid),
// the bytes of its parameters and its number of threads. Set by tests that run the kernels' PTX (tests/kernels/ptx).
using Substitute = Entry (*)(const char* type, size_t param_bytes, int threads);
inline Substitute substitute = nullptr;

// Runs `entry(params)` once for each thread of the grid, and returns when all have returned.
void run(const char* kernel, Entry entry, const void* params, const Size& size, Schedule schedule);
// Launches of this process so far, for tests that count them.
int64_t launches();

// ---- called by the fr:: functions, on a fiber -----------------------------------------------------------------------
int thread_index();
int block_threads();
Dim block_index();
Dim grid_size();
unsigned char* shared_memory();
size_t shared_bytes();

unsigned long long nanoseconds();

void block_sync(const char* file, int line);
bool block_sync_any(bool value, const char* file, int line);

int cluster_rank();
int cluster_size();
void cluster_sync(const char* file, int line);
unsigned char* peer_shared(unsigned char* own, size_t bytes, int rank, const char* file, int line);

// Every lane of the warp arrives with a pointer to its part. The last one calls compute(parts), then all continue.
// Memory is ordered only if `ordering` is set (warp_sync); a shuffle or an mma orders nothing.
void warp_collective(
    Collective kind, void* part, void (*compute)(void** parts), bool ordering, const char* file, int line);

// Lets other threads run while this one polls. After too many polls without progress anywhere the launch ends as a
// Fault.
void pause(const char* file, int line);
// Reports an event that other threads may wait for. The watchdog and Schedule::stall_after count these.
void progress();

[[noreturn]] void fail(const std::string& what, const char* file, int line);

// Asynchronous copies of this thread, in order of issue. take_copy removes and returns the oldest copy, unless it
// belongs to the newest `groups_left` committed groups or there is none; then null.
struct Copy {
  void* to;
  const void* from;
  int bytes, valid;  // bytes beyond `valid` are written as zero
  int group;
};
void put_copy(const Copy& copy, const char* file, int line);
void commit_copies();
const Copy* take_copy(int groups_left);
// Whether one copy is performed early (at issue) or late (at the wait), chosen by the seed: hardware may do either.
bool copy_is_early();

}  // namespace fr::emulation
