// Parameters of one `step` launch: a product of one step, for all units and rows of one or two directions, and the
// pointwise phase that follows it. run.cpp fills them, step/kernel.cuh reads them. They are plain data, with the
// addresses of the step already resolved, so the kernel does not know whether rows are padded or packed.
#pragma once

#include <cstdint>

#include "../rnn.h"

namespace fr {

// The arithmetic of a product: the storage type and, for float32, whether tensor cores may round operands to TF32.
enum class Math : int { kBFloat16, kFloat16, kTf32, kFloat32, kFloat64 };
constexpr int kMathCount = 5;

enum class Phase : int {
  kForwardFirst,    // W_hh h_prev, then forward0
  kForwardSecond,   // cells with two phases: the second product, then forward1
  kBackwardFirst,   // d_h from the d_gates of the step processed before, then backward0 (two phases: backward1)
  kBackwardSecond,  // cells with two phases: d_inner, then backward0
};

// Rows of one step. Row b lies at data + b * row_stride, counted in elements of the matrix's own type.
struct Matrix {
  void* data = nullptr;
  int64_t row_stride = 0;
};

// Which rows are active in a step, and where their old states come from. step < 0: there is no such step.
struct StepRows {
  int64_t step = -1;
  int64_t rows = 0;                      // batch_at(step)
  int64_t rows_after = 0;                // batch_at(step + 1); 0 after the last step
  const uint8_t* resets = nullptr;       // [rows] of this step, or null
  const uint8_t* resets_after = nullptr; // [rows_after] of step + 1, or null
  // Set by the kernels that iterate over steps: all rows of the batch are active in this step and the next, and neither
  // is reset. Then all rows have the same role (RowState).
  bool alike = false, has_before = false, last = false;
};

// sums[m][b][j] = sum over segments and k of weight[m * gate_rows + j][k] * operand[b][k]. The depth has two segments
// if the operand lies in two matrices: backward of GRU reset-after reads d_gates (r, z) and d_recurrent (n).
struct StepProduct {
  int segments = 0;  // 0: no product, the sums are zero
  const void* weight[2] = {};
  int64_t weight_stride[2] = {};
  int64_t depth[2] = {};
  Matrix operand[2];
  int64_t operand_rows = 0;       // rows from here on count as zero
  bool operand_is_state = false;  // segment 0 is each row's old state: a row of `output_before`, of `h0`, or zero
  bool copy_weight[2] = {};       // every row is 16-byte aligned, so asynchronous copies can load it
  bool copy_operand[2] = {};
  int64_t gate_rows = 0;
  const void* bias = nullptr;     // [m * gate_rows + j], added to the sums; or null
};

constexpr int kStepMatrices = 13;
struct StepDirection {
  bool reverse = false;
  StepRows here;     // the step whose pointwise phase runs
  StepRows pending;  // backward: the step whose product this launch computes, which is the one processed just before
  StepProduct product;
  // This step's rows of kStepMatrices matrices. They are contiguous members, because kernels address them by index
  // (block/kernel.cuh, persistent/rows.cuh).
  Matrix input_gates, output, output_before, gates, cells, cells_before;
  Matrix d_output, d_gates, d_recurrent, h_prev, d_projected;
  Matrix inner;  // forward: [B, H], operand of the second product; backward: this step's rows of rnn.h's inner, or null
  Matrix d_cells;
  Matrix entering, entering_before;  // rnn.h's `entering` of this step and of the step before; null: the output itself
                                     // enters the product
  const void* h0_entering = nullptr;
  const void* h0 = nullptr;
  const void* c0 = nullptr;
  void* h_n = nullptr;
  void* c_n = nullptr;
  void* carry = nullptr;  // [B, kCarried*H] in the state type: values that the first phase passes to the second
  void* d_h = nullptr;
  void* d_c = nullptr;
  void* d_h0_reset = nullptr;
  void* d_c0_reset = nullptr;
};

// How the warps of a block share its tile. A warp covers 16 units (all gates) x 32 rows. depth_warps depends on the
// depth alone, so that sums are added in the same order in any batch.
struct StepTile {
  int unit_warps = 1, row_warps = 1, depth_warps = 1;
  int threads() const { return 32 * unit_warps * row_warps * depth_warps; }
};

struct StepParams {
  Phase phase;
  Cell cell;
  StepTile tile;
  int64_t units;           // units of this launch: H or R
  int64_t rows;            // rows of this launch: the most that any of its steps has
  int64_t hidden, width;   // H, R
  const int64_t* lengths;  // [B] or null
  double cell_clip, proj_clip, gradient_clip;
  bool clips_cells, clips_projected, clips_gradients;  // whether the values above are bounds
  bool reset_to_initial;
  StepDirection direction[2];
  const void* unit_weights[2];  // of each direction: [kUnitWeights*H] in the storage type
  void* d_unit[2];              // [B, kUnitWeights*H] in the state type, or null
  const void* state_mask[2];    // [B, R] in the state type, or null; read only by kernels whose Sums have kDropsState
  NoiseParams noise;
};

// A whole sequence, or a range of its steps, in one launch (block/kernel.cuh). `step` describes the first step in
// processing order.
struct BlockParams {
  StepParams step;
  int64_t advance[2][kStepMatrices];  // bytes from a direction's matrix at one step to the next in processing order;
                                      // negative if that is back in time
  int64_t count;                      // steps to process
  int64_t last;                       // last iteration: count - 1; in backward `count` if the gradient of the initial
                                      // state is wanted
  int64_t total_steps, batch;         // T, B
  const uint8_t* resets;              // [T, B] or null
  const void* weight[2];              // W_hh of each direction
  int64_t weight_stride[2];
  bool aligned[2];                    // rows of weights are 16-byte aligned
  int prefetched;                     // blocks of H values a row that the next step reads and this one prefetches:
                                      // gates, or saved values
  int gate_slices, slices;            // slices of 128 bytes of depth: of one gate's operand, of the whole operand
};

constexpr int kMostBlocksY = 65535;  // limit of a grid's y and z (CUDA programming guide, compute capabilities)

struct LaunchShape {
  int x, y, z;
  int threads;
  int64_t shared_bytes;
  int cluster = 0;  // blocks of a thread-block cluster, neighbours in x; divides x; 0: no clusters
};

struct TransposeParams {
  const void* from;  // [rows, columns], from_stride elements from row to row
  void* to;          // [columns, rows], to_stride elements from row to row
  int64_t from_stride, to_stride, rows, columns;
};

// The kernels of one target. gpu: compiled by nvcc, `stream` is a cudaStream_t. host: emulated, `stream` is a Schedule.
using StepLauncher = void (*)(int gates, const LaunchShape& shape, const StepParams& params, void* stream);
using BlockLauncher = void (*)(bool backward, int gates, const LaunchShape& shape, const BlockParams& params, void* stream);
struct PersistentParams;  // persistent/params.h
struct PrepareParams;
struct StatesBeforeParams;
using PersistentLauncher = void (*)(bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream);
using PrepareLauncher = void (*)(const PrepareParams& params, void* stream);
using StatesBeforeLauncher = void (*)(int element_bytes, int directions, const StatesBeforeParams& params, void* stream);
using ElementwiseLauncher = void (*)(Type type, bool backward, const LaunchShape& shape, const BlockParams& params, void* stream);
using TransposeLauncher = void (*)(int element_bytes, const TransposeParams& params, void* stream);
struct StepKernels {
  StepLauncher step[kMathCount];
  BlockLauncher block[kMathCount];  // null: no kernel for this arithmetic
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
int persistent_active_clusters(int blocks);  // active_clusters and has_code (launch.cuh) of a persistent kernel
bool persistent_has_code();
}
namespace host { FR_STEP_LAUNCHERS }
#undef FR_STEP_LAUNCHERS

}  // namespace fr
