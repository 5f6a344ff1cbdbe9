// The CUDA backend: the structs of rnn.h with device pointers, run on args.stream of the current device. rnn_cuda.cpp, or
// no_cuda.cpp in a build without CUDA, where every call but cuda_status throws.
#pragma once

#include <cstdint>
#include <string>

#include "../rnn.h"
#include "plan.h"

namespace fr {

struct CudaOptions {
  bool tf32 = false;           // float32 products may round their operands to TF32
  std::string strategy;        // "": the plan chooses
  int64_t first = 0, last = 0; // of a forward call: a piece of the steps (Piece in step.h)
  void* workspace = nullptr;   // device memory, aligned to 256, free for others once the stream has passed the call
  // A word of pinned host memory for all calls on the device, 0 at first: where a kernel says that it gave up a wait (deadline.h).
  // The next call reads it, without a CUDA call, throws std::runtime_error, and clears it. Null: waits have no deadline.
  unsigned long long* status = nullptr;
  unsigned long long patience = 0;  // ns that a block waits for others, 0: without end
};

// Bytes of workspace that the call below with the same arguments needs; reads no device memory.
int64_t cuda_forward_workspace(const ForwardArgs& args);
int64_t cuda_backward_workspace(const BackwardArgs& args);

// Throw std::invalid_argument for a broken contract, before anything is launched, and std::runtime_error with call, code and
// text for what CUDA refuses. Nothing waits for the device; CUDA graphs can capture the calls.
void cuda_forward(const ForwardArgs& args, const CudaOptions& options);
void cuda_backward(const BackwardArgs& args, const CudaOptions& options);

// "" if the device can run the kernels, else one sentence that says why not.
std::string cuda_status(int device);
// What the plan needs to know of a device.
DeviceLimits cuda_limits(int device);

}  // namespace fr
