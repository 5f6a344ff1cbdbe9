// The CUDA backend: runs the structs of rnn.h, with device pointers, on args.stream of the current device. Implemented
// by rnn_cuda.cpp, or by no_cuda.cpp in a build without CUDA, where every call but cuda_status throws.
#pragma once

#include <cstdint>
#include <string>

#include "../layer_norm.h"
#include "../rnn.h"
#include "plan.h"

namespace fr {

struct CudaOptions {
  bool tf32 = false;            // float32 products may round their operands to TF32
  std::string strategy;         // "": the plan chooses
  int64_t first = 0, last = 0;  // range of the steps of a forward call (StepRange in run.h)
  void* workspace = nullptr;    // device memory, aligned to 256; may be reused once the stream has passed the call
  // A word of pinned host memory, shared by all calls on the device and 0 at first. A kernel whose wait times out
  // reports there (persistent/timeout.h). The next call reads the word, without a CUDA call, clears it and throws
  // std::runtime_error. Null: no timeout.
  unsigned long long* status = nullptr;
  unsigned long long timeout_ns = 0;  // of a block that waits for others; 0: none
};

// Bytes of workspace that a call with the same arguments needs. Reads no device memory.
int64_t cuda_forward_workspace(const ForwardArgs& args);
int64_t cuda_backward_workspace(const BackwardArgs& args);

// Throw std::invalid_argument for a broken contract, before anything is launched, and std::runtime_error with call,
// code and text for a CUDA error. They never wait for the device, and CUDA graphs can capture them.
void cuda_forward(const ForwardArgs& args, const CudaOptions& options);
void cuda_backward(const BackwardArgs& args, const CudaOptions& options);
void cuda_layer_norm(const LayerNormArgs& args);
void cuda_layer_norm_gradients(const LayerNormArgs& args);

// "" if the device can run the kernels, else one sentence that says why not.
std::string cuda_status(int device);
// A device as the plan sees it.
DeviceLimits cuda_limits(int device);

}  // namespace fr
