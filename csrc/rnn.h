// The C++ interface of one recurrent layer (one or two directions, or their heads), forward and backward. The other
// parts of the core have cross_entropy.h and layer_norm.h.
//
// The core knows nothing of torch and owns nothing that a caller sees; from call to call it keeps only scratch memory
// (cpu/arena.h). The caller (fastrnn/_core: raw.py, backward.py) allocates every buffer. Each pointer below is given
// with shape and type. It must stay valid until the call returns, on CUDA until the stream has run the call.
//
// Letters: T steps, B batch, I input, H hidden, P projection, G gates, R = P if projected else H (the width of the
// state that recurs and of the output), D directions, N rows (T*B for padded input, the sum of batch_sizes for packed
// input).
//
// Heads: with a block-diagonal W_hh each head of a direction is an independent recurrence. The core sees it as a
// direction of its own (fastrnn/_core/heads.py): D below then counts the heads of all directions, H and R are the sizes
// of one head.
//
// Types: "storage" is the type of input, weights and output (float32, float64, bfloat16, float16). "state" is float, or
// double with float64. Pre-activations, cell states and all sums are kept in the state type.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "cells/cells.h"
#include "cells/noise.h"

namespace fr {

enum class Type : int { kFloat32 = 0, kFloat64 = 1, kBFloat16 = 2, kFloat16 = 3 };

// Bytes of an element of each type.
constexpr int64_t storage_bytes(Type type) { return type == Type::kFloat64 ? 8 : type == Type::kFloat32 ? 4 : 2; }
constexpr int64_t state_bytes(Type type) { return type == Type::kFloat64 ? 8 : 4; }

// Sizes, and where a step's rows lie. Step t takes the rows row(t, b) for b in [0, batch_at(t)):
//   padded: row(t, b) = t * batch + b,          batch_at(t) = batch
//   packed: row(t, b) = step_offset[t] + b,     batch_at(t) = batch_sizes[t]   (non-increasing in t)
struct Shape {
  Cell cell;
  Type type;
  int64_t steps;               // T
  int64_t batch;               // B, the largest batch_at
  int64_t input;               // I
  int64_t hidden;              // H
  int64_t projection;          // P, 0 if the cell has none
  const int64_t* batch_sizes;  // [T] on the host; null: padded
  const int64_t* step_offset;  // [T] on the host, exclusive sums of batch_sizes; null: padded
  const int64_t* lengths;      // [B] or null: a row's state stops at its length; its outputs beyond are zero
  // [N] by row, or null. Nonzero: a new segment starts at this step of this row. The state is reset before the step
  // (forward), or after it, between steps t and t-1 (reverse direction)
  const uint8_t* resets;
  int64_t width() const { return projection > 0 ? projection : hidden; }  // R
};

struct Options {
  double cell_clip;       // clips the stored cell state to [-cell_clip, cell_clip]; 0: off
  double proj_clip;       // likewise the projected state; 0: off
  bool reset_to_initial;  // a reset restores the initial state, instead of zero
  NoiseOptions noise;     // the same in forward and backward; the seed lies on the kernels' device
  // Clips the gradient of h that a step passes to the previous step to [-gradient_clip, gradient_clip]. 0: passes none;
  // infinity: no clip.
  double gradient_clip = std::numeric_limits<double>::infinity();
};

// Where the element (t, b, 0) of a matrix of rows lies: padded: t*step_stride + b*row_stride; packed: row(t,
// b)*row_stride. Strides are in elements; the last dimension is always contiguous.
struct Rows {
  void* data;
  int64_t step_stride;
  int64_t row_stride;
};

// Weights of one direction, as torch.nn lays them out. Gate order: LSTM i,f,g,o; GRU r,z,n.
struct Weights {
  const void* ih;       // [G*H, I] storage, ih_stride elements from row to row
  const void* hh;       // [G*H, R] storage, hh_stride elements from row to row
  const void* hr;       // [P, H] storage, hr_stride elements from row to row; or null
  const void* bias_ih;  // [G*H] storage, or null
  const void* bias_hh;  // [G*H] storage, or null. Both biases or none, but a cell without a product has neither hh nor
                        // bias_hh
  int64_t ih_stride, hh_stride, hr_stride;
  const void* unit;        // [kUnitWeights*H] storage, or null
  const void* state_mask;  // [B, R] state type, or null. Dropout of the state: h times this enters the recurrence, at
                           // all steps
  const void* prepared;    // what cpu_prepare wrote, or null. CPU, forward, float32: read in place of all matrices and
                           // biases
  int64_t ih_gate_rows;    // rows of ih, and values of bias_ih, from one gate of a unit to the next; 0: H. Other values
                           // only in the CPU's forward
};

// One direction, forward. In inference `gates` and `cells` may be null: nothing is kept.
struct ForwardDirection {
  bool reverse;
  Weights weights;
  Rows input;        // [N, I] storage, read; null: the input part comes in `input_gates`, as always on CUDA
  Rows input_gates;  // [N, G*H] state type: x W_ih^T + b_ih, if the caller has this product; else null
  Rows output;       // [N, R] storage, written; zero beyond a row's length
  const void* h0;    // [B, R] storage, contiguous, or null: zero
  const void* c0;    // [B, kCells*H] state type, contiguous, or null: zero
  void* h_n;         // [B, R] storage, contiguous, written: the state after a row's last step
  void* c_n;         // [B, kCells*H] state type, contiguous, written (cells with cell states only)
  Rows gates;        // [N, kSaved*H] storage, written where the row is active: what backward needs (cells/cell.h)
  Rows cells;        // [N, kCells*H] state type, written where the row is active: the cell states after each step
  Rows entering;     // [N, R] storage, written: the output times the mask. CUDA with a state_mask and a product; else
                     // null
  const void* h0_entering;  // [B, R] storage, read, likewise: h0 times the mask; null: zero
};

struct ForwardArgs {
  Shape shape;
  Options options;
  int directions;                           // CPU: any number; CUDA: 1 or 2
  std::vector<ForwardDirection> direction;  // [directions]
  int threads;                              // CPU: at most this many; the result does not depend on it
  void* stream;                             // CUDA: the stream to run on
  int first_direction = 0;                  // CUDA: index of direction[0] in the layer, which has its noise drawn by it
};

// One direction, backward over steps [first_step, last_step), for the kernels. The caller may cut the sequence into
// ranges: last range in processing order first, with d_h and d_c carried from one to the next. Buffers marked "range"
// hold only the range's rows: row(first_step, 0) is their row 0. The caller computes the time-parallel products
// (d_input, weight and bias gradients).
struct BackwardDirection {
  bool reverse;
  Weights weights;
  Rows input_gates;  // range [*, G*H] state type, read only to rebuild gates; else null
  Rows output;       // [N, R] storage: what forward wrote
  const void* h0;    // as in forward
  const void* c0;    // as in forward
  Rows gates;        // [N, kSaved*H] storage as forward wrote it; null data: rebuild from input_gates, output and cells
  Rows cells;        // [N, kCells*H] state type: what forward wrote
  Rows d_output;     // [N, R] storage, or null: zero
  Rows d_cells;      // [N, kCells*H] state type, likewise: of the cell states after each step
  bool wants_initial;  // d_h is wanted. False skips one product when h0 needs no gradient; it may be false only for the
                       // range processed last, because the others pass d_h on
  void* d_h;           // [B, R] state type; in: gradient of the state after the range; out: of the state before it
  void* d_c;           // [B, kCells*H] state type, likewise
  void* d_h0_reset;  // [B, R] state type: accumulates what reaches the initial state through resets (reset_to_initial);
                     // or null
  void* d_c0_reset;  // [B, kCells*H] likewise
  void* d_unit;      // [B, kUnitWeights*H] state type: accumulates the gradients of the unit weights, row by row; or
                     // null
  Rows d_gates;      // range [*, G*H] storage, written: gradient of the input part of the gates; zero where inactive
  Rows d_recurrent;  // range [*, H] storage, written: gradient of the recurrent part of the gate where it differs from
                     // d_gates' (GRU reset-after: d_gates's n block times r); else null
  Rows h_prev;       // range [*, R] storage, written: the state each step started from; zero where inactive
  Rows inner;        // range [*, H] storage, written: operand of a cell's second product (o*tanh(c), or r*h); else null
  Rows d_projected;  // range [*, P] storage, written: gradient of the projection before its clip; else null
};

struct BackwardArgs {
  Shape shape;
  Options options;
  int64_t first_step, last_step;
  int directions;  // 1 or 2
  BackwardDirection direction[2];
  void* stream;
  int first_direction = 0;  // as in forward
};

// One direction, the whole of backward in one call (CPU). Every gradient that is not null is written, contiguous and in
// the storage type. Nothing beyond a row's length is read; d_input is zero there.
struct GradientDirection {
  bool reverse;
  Weights weights;
  Rows input;      // [N, I] storage
  Rows output;     // [N, R] storage: what forward wrote
  const void* h0;  // as in forward
  const void* c0;  // as in forward
  Rows gates;      // [N, kSaved*H] storage as forward wrote it; null data: rebuild from input, output and cells
  Rows cells;      // [N, kCells*H] state type: what forward wrote
  Rows d_output;   // [N, R] storage, or null: zero
  Rows d_cells;    // [N, kCells*H] state type, likewise: of the cell states after each step
  Rows entering;   // [N, R] storage: the output times the mask, with a state_mask and a product; else null
  const void* h0_entering;  // [B, R] storage, likewise: h0 times the mask; null: zero
  const void* d_h_n;        // [B, R] storage, contiguous, or null: zero
  const void* d_c_n;        // [B, kCells*H] storage, likewise
  void* d_input;            // [N, I]; directions with the same address add up
  void* d_h0;               // [B, R]
  void* d_c0;               // [B, kCells*H]
  void* d_weight_ih;        // shapes as in Weights, contiguous
  void* d_weight_hh;
  void* d_weight_hr;
  void* d_bias_ih;
  void* d_bias_hh;
  void* d_weight_unit;  // [kUnitWeights*H]
};

struct GradientArgs {
  Shape shape;
  Options options;
  int64_t range_bytes;  // most bytes for the gradients of gates: the sequence is cut into ranges of steps to keep to it
  int directions;       // any number. Those with the same d_input add up in it; unless it is that of the first
                        // direction, they must all be forward or all be reverse
  std::vector<GradientDirection> direction;  // [directions]
  int threads;                               // at most this many; the result does not depend on it
};

// Both throw std::invalid_argument for a broken contract, before anything is written.
void cpu_forward(const ForwardArgs& args);
void cpu_backward(const GradientArgs& args);

// Draws Weights::state_mask for several directions, or heads of directions: [streams][B][R] in the state type, each 0
// with probability p, else 1 / (1 - p).
void cpu_state_mask(Type state, double p, const uint64_t* seed, int streams, int64_t batch, int64_t width, void* mask);

// ---- weights prepared once, for inference on the CPU in float32 ----

// The form of a prepared weight. kFloat32: as it is. kBFloat16: rounded to 16 bits, multiplied and summed in float.
// kInt8: an 8-bit integer; inputs and states become integers from -100 to 100, row by row and step by step, and the
// products are summed without overflow or rounding.
enum class Form : int { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2 };

// Header of one direction's prepared weights, 64 bytes. The panels follow (cpu/product.h, cpu/quantised.h), each
// aligned to 64 bytes: W_ih with b_ih, then the first product's rows of W_hh with b_hh, then the second product's
// weights. Their layout depends on `lanes` and `tile_vectors` of the instruction set; a set with other values cannot
// read them.
struct Prepared {
  int32_t version, form, cell, lanes, tile_vectors, has_bias;
  int64_t input, hidden, projection, bytes, reserved;
};
constexpr int kPreparedVersion = 3;

// Bytes of one direction's prepared weights. Reads only cell, input, hidden and projection of the Shape.
int64_t cpu_prepared_bytes(const Shape& shape, Form form);
// Prepares one direction's weights, which are float32. kInt8: they are integers within the bounds of Int8
// (cpu/storage.h), to be multiplied by their row's scale. Scales: ih and hh [G*H], hr [P] or null. Writes
// cpu_prepared_bytes(shape, form) bytes to `to`.
struct Scales {
  const float *ih, *hh, *hr;
};
void cpu_prepare(const Shape& shape, Form form, const Weights& weights, const Scales& scales, void* to);
// Whether the instruction set in use can read these weights. Throws if they are not prepared weights.
bool cpu_reads(const Prepared& prepared);

// The instruction sets compiled in, best first, and the one in use: the best that this machine has, unless another was
// chosen. Throws if it has none of them.
std::string cpu_instruction_sets();
std::string cpu_chosen_instruction_set();
// Chooses the instruction set for all later calls, so that tests can compare them. "": the best. Throws if the name is
// unknown or the machine lacks the set.
void cpu_choose_instruction_set(const std::string& name);

}  // namespace fr
