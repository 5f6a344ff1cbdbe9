// The `step` strategy: one or two launches a time step, for any shape. run.cpp turns the structs of rnn.h into
// launches of one target's kernels (gpu: rnn_cuda.cpp, host: emulation/rnn_emulated.cpp). It makes no CUDA call itself.
#pragma once

#include <cstdint>
#include <string>

#include "persistent/params.h"
#include "params.h"

namespace fr {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of scratch memory that a call needs. The caller allocates them, aligned to 256.
int64_t step_forward_workspace(const ForwardArgs& args);
int64_t step_backward_workspace(const BackwardArgs& args);

// A range of steps of a forward call: [first, last) in processing order, which for a reverse direction counts from the
// end. last == 0 means all steps. `input_gates` holds only the rows of the range, beginning with its first step in
// time; all other arguments are those of the whole call. The ranges are called in order, with the same arguments.
struct StepRange {
  int64_t first = 0, last = 0;
};

// "" if the `block` strategy (block/kernel.cuh: a sequence in one launch) can run such a layer, else the reason.
std::string block_refusal(Cell cell, Type type, bool tf32, int64_t hidden, int64_t shared_limit);

// Shared memory that the `block` strategy needs.
int64_t block_shared_bytes(Cell cell, Type type, int64_t hidden);

// How a call runs. shared_limit is the shared memory that a block may have, in bytes.
struct Run {
  bool block = false;       // try the block strategy; packed rows, and what block_refusal refuses, still run step by
                            // step
  bool persistent = false;  // try the persistent strategies (persistent/partition.h) on a device with these limits
  PersistentLimits limits;
  bool tf32 = false;
  int64_t shared_limit = 0;
  void* workspace = nullptr;
  void* stream = nullptr;
  unsigned long long* status = nullptr;  // the device can write it (persistent/timeout.h); null: no timeout
  unsigned long long timeout_ns = 0;     // of a block that waits for others; 0: none
};

// Throw std::invalid_argument for a broken contract, and std::runtime_error if an earlier call timed out (run.status).
void step_forward(const ForwardArgs& args, const StepRange& range, const Run& run, const StepKernels& kernels);
void step_backward(const BackwardArgs& args, const Run& run, const StepKernels& kernels);

Math math_of(Type type, bool tf32);

// The tile of a launch, and its shared memory as step/kernel.cuh lays it out.
StepTile step_tile(int gates, Type type, int64_t depth_bytes, int64_t rows, int64_t shared_limit);
int64_t step_shared_bytes(const StepTile& tile, int gates, Type type);

}  // namespace fr
