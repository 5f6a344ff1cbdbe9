// What one launch of the `step` strategy is told: a product of one step for all units and rows of up to two directions, and
// the pointwise phase that follows it. Filled by step.cpp, read by step.cuh; plain data, resolved to the addresses of the
// step, so that the kernel knows neither padded nor packed layouts.
#pragma once

#include <cstdint>

#include "../rnn.h"

namespace fr {

// The arithmetic of a product: storage type and, for float32, whether tensor cores may round operands to TF32.
enum class Math : int { kBFloat16, kFloat16, kTf32, kFloat32, kFloat64 };
constexpr int kMathCount = 5;

enum class Phase : int {
  kForwardFirst,    // W_hh h_prev, forward0
  kForwardSecond,   // the second product of a cell with two phases, forward1
  kBackwardFirst,   // d_h of this step from the d_gates of the step after it, then backward0 (backward1 if two phases)
  kBackwardSecond,  // d_inner, then backward0 of a cell with two phases
};

// Rows of one step: row b lies at data + b * row_stride (elements of the matrix's own type).
struct Matrix {
  void* data = nullptr;
  int64_t row_stride = 0;
};

// Which rows take part in a step and where their states come from; step < 0: no such step.
struct StepRows {
  int64_t step = -1;
  int64_t rows = 0;                      // batch_at(step)
  int64_t rows_after = 0;                // batch_at(step + 1), 0 after the last step
  const uint8_t* resets = nullptr;       // [rows] of this step, or null
  const uint8_t* resets_after = nullptr; // [rows_after] of step + 1, or null
};

// sums[m][b][j] = sum over segments and k of weight[m * gate_rows + j][k] * operand[b][k].
struct StepProduct {
  int segments = 0;  // 0: no product, sums are zero
  const void* weight[2] = {};
  int64_t weight_stride[2] = {};
  int64_t depth[2] = {};
  Matrix operand[2];
  int64_t operand_rows = 0;       // rows beyond count as zero
  bool operand_is_state = false;  // segment 0 is the old state: `output_before`, `h0` or zero, row by row
  bool copy_weight[2] = {};       // 16-byte aligned throughout: asynchronous copies
  bool copy_operand[2] = {};
  int64_t gate_rows = 0;
  const void* bias = nullptr;     // [m * gate_rows + j], added to the sums, or null
};

constexpr int kStepMatrices = 13;
struct StepDirection {
  bool reverse = false;
  StepRows here;     // the step whose pointwise phase runs
  StepRows pending;  // backward: the step whose product this launch computes (processed just before)
  StepProduct product;
  // Matrices of this step's rows, kStepMatrices of them in one block (block.cuh moves them all from step to step).
  Matrix input_gates, output, output_before, gates, cells, cells_before;
  Matrix d_output, d_gates, d_recurrent, h_prev, d_projected;
  Matrix inner;  // forward: [B, H] operand of the second product; backward: this step's rows of the range, or null
  Matrix d_cells;
  Matrix entering, entering_before;  // rnn.h's, of this step's rows and of the one before; null: the output itself enters
  const void* h0_entering = nullptr;
  const void* h0 = nullptr;
  const void* c0 = nullptr;
  void* h_n = nullptr;
  void* c_n = nullptr;
  void* carry = nullptr;  // [B, kCarried*H] state type: what the first of two phases hands to the second
  void* d_h = nullptr;
  void* d_c = nullptr;
  void* d_h0_reset = nullptr;
  void* d_c0_reset = nullptr;
};

// How the warps of a block share its tile; a warp covers 16 units (all gates) x 32 rows. The split of the depth is a
// function of the depth alone: sums are added in the same order whatever the batch.
struct StepTile {
  int unit_warps = 1, row_warps = 1, depth_warps = 1;
  int threads() const { return 32 * unit_warps * row_warps * depth_warps; }
};

struct StepParams {
  Phase phase;
  Cell cell;
  StepTile tile;
  int64_t units;           // of this launch: H or R
  int64_t rows;            // of this launch: the largest number of rows that any of its steps has
  int64_t hidden, width;   // H, R
  const int64_t* lengths;  // [B] or null
  double cell_clip, proj_clip, gradient_clip;
  bool reset_to_initial;
  StepDirection direction[2];
  const void* unit_weights[2];  // of each direction, [kUnitWeights*H] storage
  void* d_unit[2];              // [B, kUnitWeights*H] state type, or null
  const void* state_mask[2];    // [B, R] state type, or null; of kernels whose Sums are of kDropsState
  NoiseParams noise;
};

// A whole sequence (or a piece of it) in one launch: block.cuh. `step` describes the first step in processing order.
struct BlockParams {
  StepParams step;
  int64_t advance[2][kStepMatrices];  // bytes that each matrix of a direction moves by a step (backward in time: negative)
  int64_t count;                      // steps to process
  int64_t last;                       // last iteration: count - 1, or count in backward if the state before is wanted
  int64_t total_steps, batch;         // T, B
  const uint8_t* resets;              // [T, B] or null
  const void* weight[2];              // W_hh of each direction
  int64_t weight_stride[2];
  bool aligned[2];                    // 16-byte aligned rows of weights
  int prefetched;                     // blocks of H values a row that the next step reads: gates, or saved values
  int gate_slices, slices;            // slices of 128 bytes of depth: of one gate's operand, of all
};

constexpr int kMostBlocksY = 65535;  // of a grid, in y and z (CUDA programming guide, compute capabilities)

struct LaunchShape {
  int x, y, z;
  int threads;
  int64_t shared_bytes;
  int cluster = 0;  // blocks that are neighbours in x, share their shared memory and wait for no other; a divisor of x; 0: none
};

struct TransposeParams {
  const void* from;  // [rows, columns], from_stride elements apart
  void* to;          // [columns, rows], to_stride elements apart
  int64_t from_stride, to_stride, rows, columns;
};

// The kernels of one target. gpu: compiled by nvcc, `stream` is a cudaStream_t; host: emulation, `stream` is a Schedule.
using StepLauncher = void (*)(int gates, const LaunchShape& shape, const StepParams& params, void* stream);
using BlockLauncher = void (*)(bool backward, int gates, const LaunchShape& shape, const BlockParams& params, void* stream);
struct PersistentParams;  // persistent_params.h
struct PrepareParams;
struct StatesBeforeParams;
using PersistentLauncher = void (*)(bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream);
using PrepareLauncher = void (*)(const PrepareParams& params, void* stream);
using StatesBeforeLauncher = void (*)(int element_bytes, int directions, const StatesBeforeParams& params, void* stream);
using ElementwiseLauncher = void (*)(Type type, bool backward, const LaunchShape& shape, const BlockParams& params, void* stream);
using TransposeLauncher = void (*)(int element_bytes, const TransposeParams& params, void* stream);
struct StepKernels {
  StepLauncher step[kMathCount];
  BlockLauncher block[kMathCount];  // null: this arithmetic has none
  PersistentLauncher persistent[kMathCount];
  PersistentLauncher projected[kMathCount];
  ElementwiseLauncher elementwise;
  PrepareLauncher prepare;
  StatesBeforeLauncher states_before;
  TransposeLauncher transpose;
};

#define FR_STEP_LAUNCHERS                                                                         \
  void step_bf16(int gates, const LaunchShape& shape, const StepParams& params, void* stream);    \
  void step_fp16(int gates, const LaunchShape& shape, const StepParams& params, void* stream);    \
  void step_tf32(int gates, const LaunchShape& shape, const StepParams& params, void* stream);    \
  void step_fp32(int gates, const LaunchShape& shape, const StepParams& params, void* stream);    \
  void step_fp64(int gates, const LaunchShape& shape, const StepParams& params, void* stream);    \
  void block_bf16(bool backward, int gates, const LaunchShape& shape, const BlockParams& params, void* stream); \
  void block_fp16(bool backward, int gates, const LaunchShape& shape, const BlockParams& params, void* stream); \
  void block_tf32(bool backward, int gates, const LaunchShape& shape, const BlockParams& params, void* stream); \
  void persistent_bf16(bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream); \
  void persistent_fp16(bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream); \
  void persistent_tf32(bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream); \
  void persistent_fp32(bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream); \
  void projected_bf16(bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream);  \
  void projected_fp16(bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream);  \
  void projected_tf32(bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream);  \
  void projected_fp32(bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream);  \
  void elementwise(Type type, bool backward, const LaunchShape& shape, const BlockParams& params, void* stream); \
  void prepare(const PrepareParams& params, void* stream);                                        \
  void states_before(int element_bytes, int directions, const StatesBeforeParams& params, void* stream); \
  void transpose(int element_bytes, const TransposeParams& params, void* stream);                 \
  inline constexpr StepKernels kStepKernels{                                                      \
      {step_bf16, step_fp16, step_tf32, step_fp32, step_fp64},                                    \
      {block_bf16, block_fp16, block_tf32, nullptr, nullptr},                                     \
      {persistent_bf16, persistent_fp16, persistent_tf32, persistent_fp32, nullptr},              \
      {projected_bf16, projected_fp16, projected_tf32, projected_fp32, nullptr}, elementwise, prepare, states_before, transpose};
namespace gpu {
FR_STEP_LAUNCHERS
int persistent_active_clusters(int blocks);  // active_clusters and has_code of launch.cuh, of a persistent kernel
bool persistent_has_code();
}
namespace host { FR_STEP_LAUNCHERS }
#undef FR_STEP_LAUNCHERS

}  // namespace fr
