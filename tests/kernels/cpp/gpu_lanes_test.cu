// Checks the lane maps of lane_maps.cuh on a real GPU: prints "0 failures" if the hardware agrees with the tables of
// the PTX manual. Built and run by benchmarks/gpu_check.py.
#include <cstdio>
#include <stdexcept>

#include "lane_maps.cuh"

// rnn_cuda.cpp defines it for the module; this program is one file.
void fr::gpu::check_launch(cudaError_t result, const char* call, const char* kernel, const LaunchShape&) {
  if (result != cudaSuccess)
    throw std::runtime_error(std::string(call) + " " + kernel + ": " + cudaGetErrorString(result));
}

int main() {
  int failures = 0;
  const auto allocate = [](int bytes) {
    void* memory = nullptr;  // 1.5 KiB in all, visible to host and device, freed with the process
    fr::gpu::check_launch(cudaMallocHost(&memory, bytes), "cudaMallocHost", "", {});
    return memory;
  };
  const auto wait = [] { fr::gpu::check_launch(cudaDeviceSynchronize(), "cudaDeviceSynchronize", "", {}); };
  try {
    fr::gpu::check_lane_maps(nullptr, allocate, wait, [&](bool condition, const std::string& what) {
      if (!condition) ++failures, std::printf("FAIL %s\n", what.c_str());
    });
  } catch (const std::exception& error) {
    std::printf("FAIL %s\n", error.what());
    return 1;
  }
  std::printf("%d failures\n", failures);
  return failures ? 1 : 0;
}
