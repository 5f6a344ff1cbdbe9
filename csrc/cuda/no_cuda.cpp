// The CUDA backend of a build without CUDA: every entry point fails with the reason.
#include <stdexcept>

#include "rnn_cuda.h"

namespace fr {
namespace {
constexpr const char* kWhy =
    "fastrnn was built without CUDA: reinstall it where an nvcc is on PATH, or set FASTRNN_CUDA=on to see why not";
}

int64_t cuda_forward_workspace(const ForwardArgs&) { throw std::runtime_error(kWhy); }
int64_t cuda_backward_workspace(const BackwardArgs&) { throw std::runtime_error(kWhy); }
void cuda_forward(const ForwardArgs&, const CudaOptions&) { throw std::runtime_error(kWhy); }
void cuda_backward(const BackwardArgs&, const CudaOptions&) { throw std::runtime_error(kWhy); }
void cuda_layer_norm(const LayerNormArgs&) { throw std::runtime_error(kWhy); }
void cuda_layer_norm_gradients(const LayerNormArgs&) { throw std::runtime_error(kWhy); }
std::string cuda_status(int) { return kWhy; }
DeviceLimits cuda_limits(int) { throw std::runtime_error(kWhy); }

}  // namespace fr
