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

// Geometry that the kernels share with the code that sizes their launches.
constexpr int kRowBytes = 128;                  // a row of a tile in shared memory: a slice of the depth (tile.cuh)
constexpr int kWarpUnits = 16, kWarpRows = 32;  // a warp's tile
constexpr int kStages = 2;                      // of shared memory, in `step`
constexpr int kSumsPad = 4;                     // of a row of partial sums, in elements: spreads an accumulator's rows
                                                // over banks
constexpr int kBlockRows = 8;                   // batch rows of a block, in `block`
constexpr int kElementThreads = 256;            // elements of a block, in block/elementwise.cuh

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
  int64_t rows = 0;                       // batch_at(step)
  int64_t rows_after = 0;                 // batch_at(step + 1); 0 after the last step
  const uint8_t* resets = nullptr;        // [rows] of this step, or null
  const uint8_t* resets_after = nullptr;  // [rows_after] of step + 1, or null
  // Set by the kernels that iterate over steps: all rows of the batch are active in this step and the next, and neither
  // is reset. Then all rows have the same role (RowState).
  bool alike = false, has_before = false, last = false;
  bool goes_on = false;  // alike, and every row goes on from the step before and to the one after
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
  const void* bias = nullptr;  // [m * gate_rows + j], added to the sums; or null
};

// The matrices of which a step reads or writes rows: indices of StepDirection::matrix and of the tables from which
// kernels compute a step's addresses, a matrix a thread (block/steps.cuh, persistent/rows.cuh).
struct StepMatrix {
  enum : int {
    kInputGates,
    kOutput,
    kOutputBefore,
    kGates,
    kCells,
    kCellsBefore,
    kDOutput,
    kDGates,
    kDRecurrent,
    kHPrev,
    kDProjected,
    kInner,  // forward: [B, H], operand of the second product; backward: this step's rows of rnn.h's inner, or null
    kDCells,
    kCount
  };
};

struct StepDirection {
  bool reverse = false;
  StepRows here;     // the step whose pointwise phase runs
  StepRows pending;  // backward: the step whose product this launch computes, which is the one processed just before
  StepProduct product;
  Matrix matrix[StepMatrix::kCount];  // this step's rows
  // rnn.h's `entering` of this step and of the step before; null: the output itself enters the product
  Matrix entering, entering_before;
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
  bool acts_on_state;                                  // whether an option does: one of these, or noise
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
  int64_t advance[2]
                 [StepMatrix::kCount];  // bytes from a direction's matrix at one step to the next in processing order;
                                        // negative if that is back in time
  int64_t count;                        // steps to process
  int64_t last;                         // last iteration: count - 1; in backward `count` if the gradient of the initial
                                        // state is wanted
  int64_t total_steps, batch;           // T, B
  const uint8_t* resets;                // [T, B] or null
  const void* weight[2];                // W_hh of each direction
  int64_t weight_stride[2];
  int prefetched;           // blocks of H values a row that the next step reads and this one prefetches:
                            // gates, or saved values
  int gate_slices, slices;  // slices of 128 bytes of depth: of one gate's operand, of the whole operand
};

struct TransposeParams {
  const void* from;  // [rows, columns], from_stride elements from row to row
  void* to;          // [columns, rows], or [rows, columns] if transposes is false; to_stride elements from row to row
  int64_t from_stride, to_stride, rows, columns;
  bool transposes;
};

}  // namespace fr
