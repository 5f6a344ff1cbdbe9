// Prepares the workspace of a persistent launch (kernel.cuh): zeroes its flags and stores the offsets of packed
// steps. The offsets come as kernel parameters, so that no host memory is read after the call returns. Launched by
// launch.cpp.
#pragma once

#include "../launch.cuh"
#include "params.h"

namespace fr::FR_TARGET {

FR_GLOBAL(prepare_kernel)

// work    one block, whose threads take flags and values in turn. memory: global only. sync: none.
struct PrepareKernel {
  static constexpr const char* kName = "prepare_kernel";
  FR_ENTRY(prepare_kernel)
  static constexpr int kMaxThreads = 256;
  static constexpr bool kCooperative = false;
  using Params = PrepareParams;

  FR_DEVICE static void run(const PrepareParams& p) {
    for (int64_t i = thread_index(); i < p.flag_count; i += block_threads()) p.flags[i] = 0;
    for (int i = thread_index(); i < p.count; i += block_threads()) p.to[i] = p.value[i];
  }
};

inline void launch_prepare(const PrepareParams& params, void* stream) {
  launch<PrepareKernel>({1, 1, 1, PrepareKernel::kMaxThreads, 0}, params, stream);
}

}  // namespace fr::FR_TARGET
