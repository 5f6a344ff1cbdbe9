// The CUDA kernels on the host (scheduler.h), behind the structs of rnn.h: a slow backend for tests, which runs the very
// sources that ship. Operands as for the GPU: the input part of the gates comes in `input_gates`.
#pragma once

#include <cstdint>
#include <string>

#include "../cuda/persistent_params.h"
#include "../rnn.h"
#include "scheduler.h"

namespace fr {

// The device that the persistent strategies see: small, so that small shapes spread over blocks and groups, and over registers,
// shared memory and (streaming) L2: 16 SMs, blocks of two warps, one slice of weights in a warp's registers.
inline PersistentLimits emulated_limits() {
  PersistentLimits limits;
  limits.sms = 16, limits.warps = 2, limits.register_slices = 1;
  limits.shared_per_block = 99 * 1024, limits.max_cluster = 16;
  return limits;
}

struct EmulationOptions {
  std::string strategy = "step";       // or block, cluster, grid, streaming: where the kernel does not serve, step runs
  uint64_t seed = 0;                   // of the order in which threads and blocks run
  bool tf32 = false;                   // float32 products on (emulated) tensor cores
  int64_t first = 0, last = 0;         // of a forward call: a piece of the steps (Piece in cuda/step.h)
  int64_t shared_limit = 99 * 1024;    // of a block, as the smallest card served has it
  PersistentLimits limits = emulated_limits();
  unsigned long long* status = nullptr;  // as CudaOptions has them; the clock goes only while a block is to stand still
  unsigned long long patience = 0;
  int stall_after = -1;                  // of Schedule
  emulation::Dim stalled = {0, 0, 0};
};

// Throw std::invalid_argument for a broken contract, fr::emulation::Fault for what a kernel did wrong.
void emulated_forward(const ForwardArgs& args, const EmulationOptions& options);
void emulated_backward(const BackwardArgs& args, const EmulationOptions& options);

}  // namespace fr
