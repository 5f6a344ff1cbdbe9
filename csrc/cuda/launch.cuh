// The one place where kernels are launched. A kernel is a type with kName, kMaxThreads, kCooperative, Params,
// run(Params) and FR_ENTRY; its launch is plain data. On CUDA every launch result is checked; on the host
// emulation::run takes the launch.
#pragma once

#include <atomic>
#if !defined(__CUDACC__)
#include <stdexcept>
#include <string>
#include <typeinfo>
#endif

#include "device.cuh"
#include "kernels.h"

// FR_GLOBAL(name) defines the __global__ function under which profilers list a template's kernels; FR_ENTRY(name)
// inside such a kernel makes launch() call it.
#if defined(__CUDACC__)
#define FR_GLOBAL(name) \
  template <class Kernel> \
  __global__ void __launch_bounds__(Kernel::kMaxThreads, 1) name(const __grid_constant__ typename Kernel::Params p) { \
    Kernel::run(p); \
  }
#define FR_ENTRY(name) \
  template <class Kernel> \
  static auto entry() { \
    return &name<Kernel>; \
  }
#else
#define FR_GLOBAL(name)
#define FR_ENTRY(name)
#endif

namespace fr::FR_TARGET {

#if defined(__CUDACC__)

// Throws std::runtime_error unless the result is success. Defined in rnn_cuda.cpp, because files compiled by nvcc use
// no types of the C++ library, so that they can be linked with another version of it (tools/wheel.sh).
void check_launch(cudaError_t result, const char* call, const char* kernel, const LaunchShape& shape);

// The result of a call of the CUDA runtime, and which call it was.
struct Outcome {
  cudaError_t result = cudaSuccess;
  const char* call = "";
};

// A kernel must opt in to more than 48 KiB of shared memory and to clusters of more than 8 blocks. This is done once
// per kernel and device, for the device's maximum, because opting in takes longer than launching.
template <class Kernel>
Outcome ask_for_limits(const LaunchShape& shape) {
  constexpr int kWithoutAsking = 48 * 1024, kDevices = 64;
  static std::atomic<bool> granted[2][kDevices];
  const bool clusters = shape.cluster > 1;
  if (shape.shared_bytes <= kWithoutAsking && !clusters) return {};
  int device = 0, most = 0;
  if (const auto result = cudaGetDevice(&device); result != cudaSuccess) return {result, "cudaGetDevice"};
  if (device < kDevices && granted[clusters][device].load(std::memory_order_relaxed)) return {};
  if (const auto result = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
      result != cudaSuccess)
    return {result, "cudaDeviceGetAttribute"};
  const void* const kernel = reinterpret_cast<const void*>(Kernel::template entry<Kernel>());
  auto result = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  if (result == cudaSuccess && clusters)
    result = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (result != cudaSuccess) return {result, "cudaFuncSetAttribute"};
  if (device < kDevices) granted[clusters][device].store(true, std::memory_order_relaxed);
  return {};
}

template <class Kernel>
void launch(const LaunchShape& shape, const typename Kernel::Params& params, void* stream) {
  const Outcome asked = ask_for_limits<Kernel>(shape);
  check_launch(asked.result, asked.call, Kernel::kName, shape);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.x, shape.y, shape.z);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  // A cluster's blocks are scheduled together (CUDA programming guide, "Thread Block Clusters") and never wait for
  // another cluster, so only launches without clusters need to be cooperative.
  if (Kernel::kCooperative && shape.cluster == 0) {
    cudaLaunchAttribute& cooperative = attributes[config.numAttrs++];
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  check_launch(cudaLaunchKernelEx(&config, Kernel::template entry<Kernel>(), params), "launch", Kernel::kName, shape);
}

// Whether this binary has code for the current device.
template <class Kernel>
bool has_code() {
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(Kernel::template entry<Kernel>())) ==
      cudaSuccess)
    return true;
  (void)cudaGetLastError();
  return false;
}

// How many clusters of `blocks` blocks, one block an SM, the current device holds at once; 0 if it has no such
// clusters. See the runtime API's cudaOccupancyMaxActiveClusters: more than 8 blocks need
// cudaFuncAttributeNonPortableClusterSizeAllowed, and the count depends on how many SMs each GPC of the part has.
template <class Kernel>
int active_clusters(int blocks) {
  const LaunchShape shape{blocks, 1, 1, Kernel::kMaxThreads, INT64_MAX, blocks};
  if (ask_for_limits<Kernel>(shape).result !=
      cudaSuccess) {  // no clusters of more than 8 blocks, or no code for the device
    (void)cudaGetLastError();
    return 0;
  }
  int device = 0, most = 0, clusters = 0;
  check_launch(cudaGetDevice(&device), "cudaGetDevice", Kernel::kName, shape);
  check_launch(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute",
      Kernel::kName, shape);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(blocks);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks), config.blockDim = dim3(Kernel::kMaxThreads);
  config.dynamicSmemBytes = static_cast<size_t>(most);
  config.attrs = &cluster, config.numAttrs = 1;
  if (cudaOccupancyMaxActiveClusters(
          &clusters, reinterpret_cast<const void*>(Kernel::template entry<Kernel>()), &config) == cudaSuccess)
    return clusters;
  (void)cudaGetLastError();
  return 0;
}

#else

template <class Kernel>
void launch(const LaunchShape& shape, const typename Kernel::Params& params, void* stream) {
  if (shape.threads > Kernel::kMaxThreads)
    throw std::logic_error(std::string(Kernel::kName) + ": more threads than it allows");
  if (shape.y > kMostBlocksY) throw std::logic_error(std::string(Kernel::kName) + ": more blocks in y than a grid has");
  const auto entry = [](const void* p) { Kernel::run(*static_cast<const typename Kernel::Params*>(p)); };
  const auto other =
      emulation::substitute ? emulation::substitute(typeid(Kernel).name(), sizeof(params), shape.threads) : nullptr;
  emulation::run(Kernel::kName, other ? other : entry, &params,
      {{shape.x, shape.y, shape.z}, shape.threads, static_cast<size_t>(shape.shared_bytes),
          shape.cluster > 0 ? shape.cluster : 1, Kernel::kCooperative},
      *static_cast<emulation::Schedule*>(stream));
}

#endif

}  // namespace fr::FR_TARGET
