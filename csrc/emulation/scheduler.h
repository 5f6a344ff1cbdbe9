// Runs a CUDA kernel on the host: every CUDA thread is a fiber (ucontext), clusters, blocks and warps are sets of fibers with
// counted barriers, shared memory is one heap buffer a block of exactly the launched size, filled with NaN. Used by device.h (the
// fr:: words) and launch.cuh; nothing else sees it.
//
// scheduler.cpp is compiled without sanitizers in every build, so that its own bookkeeping is invisible to ThreadSanitizer;
// it finds the runtimes of AddressSanitizer and ThreadSanitizer through weak symbols and tells them of every switch. The
// ordering a kernel may rely on (barriers, release and acquire) is told to ThreadSanitizer, the scheduler's own is not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fr::emulation {

struct Dim {
  int x = 1, y = 1, z = 1;
};

// How the threads of a launch are interleaved: seed 0 runs them in order; others pick the next thread at random. The device's
// clock stands still but for poll_nanoseconds a poll (wait_until) of any thread: at 0, a wait that can never end is reported as
// a fault instead of running into a kernel's deadline.
struct Schedule {
  uint64_t seed = 0;
  unsigned long long poll_nanoseconds = 0;
  // Of every launch that has such a block: its first thread stands still from the moment it has published (store_release) so
  // many times, until no other thread can run or, where the clock stands still, all others but wait: so they are as far ahead as a
  // kernel lets them be. Negative: none does.
  int stall_after = -1;
  Dim stalled = {0, 0, 0};
};

// A launch. cooperative: all blocks are resident together (they may wait for each other); otherwise a few at a time, in an order
// that the seed decides. The blocks of a cluster are neighbours in x and always resident together.
struct Size {
  Dim grid;
  int threads;
  size_t shared_bytes;
  int cluster;
  bool cooperative;
};

// What a kernel did wrong: a wait that can never end, a broken fr::expect, warps that diverge at a collective. The text
// names kernel, block, thread, file and line.
struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// One lane's part in a warp collective; `line` and `file` say where it waits.
enum class Collective : int { kNone, kSync, kShuffle, kMatrix, kMma };

using Entry = void (*)(const void* params);

// Another build of a kernel to run in place of the host's, or null: by the kernel's type (typeid), the bytes of its parameters and
// how many threads it is launched with. Set by tests, which run the kernels' PTX (tests/ptx).
using Substitute = Entry (*)(const char* type, size_t param_bytes, int threads);
inline Substitute substitute = nullptr;

// Runs `entry(params)` once per thread of the grid and returns when all have returned.
void run(const char* kernel, Entry entry, const void* params, const Size& size, Schedule schedule);
// Launches of this process so far, for tests that count them.
int64_t launches();

// ---- called by the words, on a fiber ------------------------------------------------------------------------------------
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

// Every lane of the warp arrives with a pointer to its part; the last one calls compute(parts), then all go on. Orders memory
// only if ordering is set (warp_sync): a shuffle or an mma does not.
void warp_collective(Collective kind, void* part, void (*compute)(void** parts), bool ordering, const char* file, int line);

// Lets other threads run while this one polls; after too many polls without progress anywhere the launch ends as a Fault.
void pause(const char* file, int line);
// Something others may wait for has happened: for the watchdog, and for Schedule::stall_after.
void progress();

[[noreturn]] void fail(const std::string& what, const char* file, int line);

// Asynchronous copies of this thread, in order of issue. take_copy returns the oldest one of a group older than the newest
// `groups_left` committed groups, or null.
struct Copy {
  void* to;
  const void* from;
  int bytes, valid;  // bytes beyond `valid` are written as zero
  int group;
};
void put_copy(const Copy& copy, const char* file, int line);
void commit_copies();
const Copy* take_copy(int groups_left);
// The seed's choice of early (at issue) or late (at the wait) for one copy: hardware may do either.
bool copy_is_early();

}  // namespace fr::emulation
