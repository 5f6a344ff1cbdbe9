// The one place where kernels start. A kernel is a type with kName, kMaxThreads, kCooperative, Params and run(Params); its
// launch is plain data. CUDA: a <<<>>> launch with every result checked; host: emulation::run.
#pragma once

#include <stdexcept>
#include <string>

#include "device.cuh"
#include "step_params.h"

namespace fr::FR_TARGET {

#if defined(__CUDACC__)

template <class Kernel>
__global__ void __launch_bounds__(Kernel::kMaxThreads, 1) entry(const __grid_constant__ typename Kernel::Params params) {
  Kernel::run(params);
}

inline void check(cudaError_t result, const char* call, const char* kernel, const LaunchShape& shape) {
  if (result == cudaSuccess) return;
  (void)cudaGetLastError();  // a launch error is not sticky: the next call starts clean
  throw std::runtime_error(std::string(call) + " of " + kernel + ": " + cudaGetErrorName(result) + ": " +
                           cudaGetErrorString(result) + "; grid (" + std::to_string(shape.x) + ", " + std::to_string(shape.y) +
                           ", " + std::to_string(shape.z) + "), " + std::to_string(shape.threads) + " threads, " +
                           std::to_string(shape.shared_bytes) + " bytes of shared memory");
}

template <class Kernel>
void launch(const LaunchShape& shape, const typename Kernel::Params& params, void* stream) {
  constexpr int kSharedWithoutAsking = 48 * 1024;
  if (shape.shared_bytes > kSharedWithoutAsking)
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(&entry<Kernel>), cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(shape.shared_bytes)),
          "cudaFuncSetAttribute", Kernel::kName, shape);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.x, shape.y, shape.z);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  config.attrs = &cooperative;
  config.numAttrs = Kernel::kCooperative ? 1 : 0;
  check(cudaLaunchKernelEx(&config, entry<Kernel>, params), "launch", Kernel::kName, shape);
}

#else

template <class Kernel>
void launch(const LaunchShape& shape, const typename Kernel::Params& params, void* stream) {
  if (shape.threads > Kernel::kMaxThreads) throw std::logic_error(std::string(Kernel::kName) + ": more threads than it allows");
  const auto entry = [](const void* p) { Kernel::run(*static_cast<const typename Kernel::Params*>(p)); };
  emulation::run(Kernel::kName, entry, &params, {shape.x, shape.y, shape.z}, shape.threads,
                 static_cast<size_t>(shape.shared_bytes), Kernel::kCooperative, *static_cast<emulation::Schedule*>(stream));
}

#endif

}  // namespace fr::FR_TARGET
