// Runs the structs of rnn.h as launches of one target's kernels (gpu: rnn_cuda.cpp, host: emulation/rnn_emulated.cpp).
// It makes no CUDA call itself. run.cpp checks the arguments, and passes the call on to the folder of its strategy:
// persistent/launch.cpp, block/launch.cpp or step/launch.cpp.
#pragma once

#include <cstdint>

#include "kernels.h"
#include "persistent/params.h"

namespace fr {

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Bytes of scratch memory that a call needs. The caller allocates them, aligned to 256.
int64_t forward_workspace(const ForwardArgs& args);
int64_t backward_workspace(const BackwardArgs& args);

// A range of steps of a forward call: [first, last) in processing order, which for a reverse direction counts from the
// end. last == 0 means all steps. `input_gates` holds only the rows of the range, beginning with its first step in
// time; all other arguments are those of the whole call. The ranges are called in order, with the same arguments.
struct StepRange {
  int64_t first = 0, last = 0;
};

// How a call runs.
struct Run {
  bool block = false;       // try `block`; what it cannot run (block/launch.h) runs step by step
  bool persistent = false;  // try the persistent strategies (persistent/partition.h) on a device with these limits
  PersistentLimits limits;
  bool tf32 = false;
  int64_t shared_limit = 0;  // shared memory that a block may have, in bytes
  void* workspace = nullptr;
  void* stream = nullptr;
  unsigned long long* status = nullptr;  // the device can write it (persistent/timeout.h); null: no timeout
  unsigned long long timeout_ns = 0;     // of a block that waits for others; 0: none
};

// Throw std::invalid_argument for a broken contract, and std::runtime_error if an earlier call timed out (run.status).
void run_forward(const ForwardArgs& args, const StepRange& range, const Run& run, const Kernels& kernels);
void run_backward(const BackwardArgs& args, const Run& run, const Kernels& kernels);
// A step of the cells with layer normalisation, forward or backward, on args.stream. Throws std::invalid_argument.
void run_layer_norm(const LayerNormArgs& args, bool backward, const Kernels& kernels);

Math math_of(Type type, bool tf32);

}  // namespace fr
