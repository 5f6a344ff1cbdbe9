// The kernels of one target, as a table of the functions that launch them. inst/*.cu define these functions: in
// fr::gpu, compiled by nvcc, `stream` is a cudaStream_t; in fr::host, emulated, it is an emulation::Schedule.
#pragma once

#include "../layer_norm.h"
#include "params.h"

namespace fr {

constexpr int kMostBlocksY = 65535;  // limit of a grid's y and z (CUDA programming guide, compute capabilities)

struct LaunchShape {
  int x, y, z;
  int threads;
  int64_t shared_bytes;
  int cluster = 0;  // blocks of a thread-block cluster, neighbours in x; divides x; 0: no clusters
};

struct PersistentParams;  // persistent/params.h
struct PrepareParams;
struct StatesBeforeParams;

// gates: gate rows of the product. The launch_* function at the end of each kernel's file says which.
using StepLauncher = void(int gates, const LaunchShape& shape, const StepParams& params, void* stream);
using BlockLauncher = void(bool backward, int gates, const LaunchShape& shape, const BlockParams& params, void* stream);
using PersistentLauncher = void(
    bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream);
using ElementwiseLauncher = void(
    Type type, bool backward, const LaunchShape& shape, const BlockParams& params, void* stream);
using PrepareLauncher = void(const PrepareParams& params, void* stream);
using StatesBeforeLauncher = void(int element_bytes, int directions, const StatesBeforeParams& params, void* stream);
using TransposeLauncher = void(int element_bytes, const TransposeParams& params, void* stream);
using LayerNormLauncher = void(bool backward, const LayerNormArgs& args);  // on args.stream

// Indexed by Math; null: no kernel for this arithmetic.
struct Kernels {
  StepLauncher* step[kMathCount];
  BlockLauncher* block[kMathCount];
  PersistentLauncher* persistent[kMathCount];
  PersistentLauncher* projected[kMathCount];
  ElementwiseLauncher* elementwise;
  PrepareLauncher* prepare;
  StatesBeforeLauncher* states_before;
  TransposeLauncher* transpose;
  LayerNormLauncher* layer_norm;
};

#define FR_KERNELS \
  StepLauncher step_bf16, step_fp16, step_tf32, step_fp32, step_fp64; \
  BlockLauncher block_bf16, block_fp16, block_tf32; \
  PersistentLauncher persistent_bf16, persistent_fp16, persistent_tf32, persistent_fp32; \
  PersistentLauncher projected_bf16, projected_fp16, projected_tf32, projected_fp32; \
  ElementwiseLauncher elementwise; \
  PrepareLauncher prepare; \
  StatesBeforeLauncher states_before; \
  TransposeLauncher transpose; \
  LayerNormLauncher layer_norm; \
  inline constexpr Kernels kKernels{{step_bf16, step_fp16, step_tf32, step_fp32, step_fp64}, \
      {block_bf16, block_fp16, block_tf32, nullptr, nullptr}, \
      {persistent_bf16, persistent_fp16, persistent_tf32, persistent_fp32, nullptr}, \
      {projected_bf16, projected_fp16, projected_tf32, projected_fp32, nullptr}, elementwise, prepare, states_before, \
      transpose, layer_norm};
namespace gpu {
FR_KERNELS
int persistent_active_clusters(int blocks);  // active_clusters and has_code (launch.cuh) of a persistent kernel
bool persistent_has_code();
}  // namespace gpu
namespace host {
FR_KERNELS
}  // namespace host
#undef FR_KERNELS

}  // namespace fr
