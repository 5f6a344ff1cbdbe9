// The CUDA kernels on the host (scheduler.h), behind the structs of rnn.h: a slow backend for tests that runs the very
// sources that ship. Arguments are as for the GPU: the input part of the gates comes in `input_gates`.
#pragma once

#include <cstdint>
#include <string>

#include "../cuda/persistent/params.h"
#include "../layer_norm.h"
#include "../rnn.h"
#include "scheduler.h"

namespace fr {

// The device that the persistent strategies see: 16 SMs, blocks of two warps, one slice of weights in a warp's
// registers. It is so small that the shapes of tests spread over blocks and groups, and over registers, shared memory
// and (streaming) L2.
inline PersistentLimits emulated_limits() {
  PersistentLimits limits;
  limits.sms = 16, limits.warps = 2, limits.register_slices = 1;
  limits.shared_per_block = 99 * 1024, limits.max_cluster = 16;
  return limits;
}

struct EmulationOptions {
  std::string strategy = "step";     // step, block, cluster, grid or streaming; what a kernel cannot run falls back
                                     // to step
  uint64_t seed = 0;                 // decides the order in which threads and blocks run
  bool tf32 = false;                 // float32 products on (emulated) tensor cores
  int64_t first = 0, last = 0;       // range of the steps of a forward call (StepRange in cuda/run.h)
  int64_t shared_limit = 99 * 1024;  // shared memory of a block: that of the smallest supported card
  PersistentLimits limits = emulated_limits();
  unsigned long long* status = nullptr;  // as in CudaOptions; the clock advances only if a block is to stall
  unsigned long long timeout_ns = 0;
  int stall_after = -1;  // as in Schedule
  emulation::Dim stalled = {0, 0, 0};
};

// Throw std::invalid_argument for a broken contract, and fr::emulation::Fault for a kernel's error.
void emulated_forward(const ForwardArgs& args, const EmulationOptions& options);
void emulated_backward(const BackwardArgs& args, const EmulationOptions& options);
void emulated_layer_norm(const LayerNormArgs& args, const EmulationOptions& options);
void emulated_layer_norm_gradients(const LayerNormArgs& args, const EmulationOptions& options);

}  // namespace fr
