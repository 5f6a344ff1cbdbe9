// One call as its threads see it: what each direction needs beyond its arguments (packed weights, shared buffers), each
// thread's part of the work, and where a row's state comes from at each step. Built by rnn_cpu.cpp, read by forward.h
// and backward.h.
#pragma once

#include "../rnn.h"
#include "product.h"
#include "team.h"

namespace fr::cpu {

// Where a row's state before a step comes from.
enum class Origin { kInitial, kZero, kStep };

struct Call {
  Shape shape;
  Options options;
  const int64_t* active;  // [B]: steps in which row b is active, by lengths and packing together
  int64_t first_step, last_step;

  int64_t batch_at(int64_t t) const { return shape.batch_sizes ? shape.batch_sizes[t] : shape.batch; }
  int64_t row(int64_t t, int64_t b) const { return shape.step_offset ? shape.step_offset[t] + b : t * shape.batch + b; }
  int64_t offset(const Rows& rows, int64_t t, int64_t b) const {
    return shape.step_offset ? (shape.step_offset[t] + b) * rows.row_stride
                             : t * rows.step_stride + b * rows.row_stride;
  }
  // The row's index in a buffer that holds only the range's rows.
  int64_t range_row(int64_t t, int64_t b) const { return row(t, b) - row(first_step, 0); }
  bool is_active(int64_t t, int64_t b) const { return t < active[b]; }
  bool reset(int64_t t, int64_t b) const { return shape.resets && shape.resets[row(t, b)]; }

  // For a row b that is active at t: is_first: whether t is the first step processed; is_cut: whether the state is cut
  // before it. The step processed before t is t-1, or t+1 in the reverse direction. There a segment that starts at t+1
  // cuts the state between the two.
  bool is_first(bool reverse, int64_t t, int64_t b) const { return reverse ? !is_active(t + 1, b) : t == 0; }
  bool is_cut(bool reverse, int64_t t, int64_t b) const {
    return reverse ? is_active(t + 1, b) && reset(t + 1, b) : reset(t, b);
  }
  Origin origin(bool reverse, int64_t t, int64_t b) const {
    if (is_cut(reverse, t, b)) return options.reset_to_initial ? Origin::kInitial : Origin::kZero;
    return is_first(reverse, t, b) ? Origin::kInitial : Origin::kStep;
  }
};

// Gradients of one row at one step, in the operand type. Layout of a row: d_recurrent n (GRU reset-after), gates,
// inner, projected. n comes first so that the recurrent gradients are contiguous: d_recurrent n, then r and z, the
// first two gates. inner: operand of a cell's second product (o*tanh(c), or r*h). projected: gradient of the projection
// before its clip.
struct GradientColumns {
  int64_t gates, inner, projected;  // offsets; the recurrent gradients begin at 0
  int64_t stride;                   // from row to row
};

// What the threads of one direction share.
struct DirectionWork {
  PackedMatrix input, first, second;                                   // forward, and rebuilding gates
  PackedMatrix first_transposed, second_transposed, input_transposed;  // backward
  void* operands;  // [2][B][R] operand type: states of even and odd steps, if the output itself cannot be an operand
                   // (16 bit without native dot)
  void* initial;   // [B][R] operand type: h0 converted, likewise
  void* entering;  // dropout of the state, [2][B][R] operand type: masked states of even and odd steps
  void* entering_initial;  // [B][R] operand type: the masked initial state
  void* inner;             // [B][H] operand type: operand of the second product
  void* cell;              // [B][kCells*H] state type
  void* zeros;             // [max(R, H, kCells*H)], of any type
  void* rebuilt_gates;     // [range rows][kSaved*H] storage type, if the caller saved no gates
  void* gradients;         // [range rows][columns.stride] operand type, written where a row is active
  GradientColumns columns;
  void* d_h;         // [B][R] state type; in: gradient of the state after the range; out: of the state before it
  void* d_c;         // [B][kCells*H] likewise
  void* d_h0_reset;  // [B][R] state type: accumulates what reaches the initial state through resets (reset_to_initial);
                     // or null
  void* d_c0_reset;  // [B][kCells*H] likewise
  void* d_unit;      // [B][kUnitWeights*H] state type: accumulates the gradients of the unit weights; or null
  bool wants_initial;  // d_h is wanted after the range; false skips one product
  Barrier* barrier;
};

// A thread's part of the work: these rows of one direction and, if units are split, the `part`-th of `parts` shares of
// them.
struct Part {
  int direction;
  int64_t row_begin, row_end;
  int part, parts;
};

struct UnitRange {
  int64_t begin, end;
};

// Shares are multiples of the widest panel of units, so that a thread has the same units in every product of that
// width.
inline UnitRange unit_range(const Part& part, int64_t units, int64_t lanes) {
  const int64_t block = 4 * lanes, blocks = (units + block - 1) / block;
  const int64_t begin = blocks * part.part / part.parts * block, end = blocks * (part.part + 1) / part.parts * block;
  return {begin < units ? begin : units, end < units ? end : units};
}

// Stores a value as an operand, rounded to the storage type S like every operand that comes from the caller.
template <class S, class O, class V>
inline void store_operand(O* to, V value, int n) {
  if constexpr (!std::is_same_v<O, S>) {
    S rounded[V::kLanes];
    store_full(rounded, value);
    value = load_full<V>(rounded);
  }
  store(to, value, n);
}

// Loads the weights of a single unit.
template <class S, class V, class Cell>
inline void load_unit_weights(const Weights& weights, int64_t hidden, int64_t unit, int n, Unit<V, Cell>& u) {
  if constexpr (Cell::kUnitWeights > 0)
    for (int i = 0; i < Cell::kUnitWeights; ++i)
      u.unit_weight[i] = load<V>(static_cast<const S*>(weights.unit) + i * hidden + unit, n);
}

template <class P>
void pack_share(const PackedMatrix& matrix, int index, int count) {
  if (!matrix.panels) return;
  const int64_t panels = P::panels(matrix.source.units);
  P::pack_panels(matrix, panels * index / count, panels * (index + 1) / count);
}

// Calls pointwise(panel, row0, rows, tile) for every panel of the unit range and every block of rows.
// Steps alternate the order of panels (`back`), so that a step begins with those still in cache when not all fit. If all
// operands are `zero`, no weights are read.
template <class P, class Pointwise>
inline void for_each_tile(const PackedMatrix& matrix, UnitRange units, const typename P::O* const* operands,
    int64_t count, typename P::T* tile, void* memory, Pointwise pointwise, bool back = false, bool zero = false) {
  if (units.begin >= units.end) return;
  const typename P::Row* const rows = zero ? nullptr : P::operands(operands, count, matrix.source.depth, memory);
  const int64_t begin = units.begin / P::kUnits, end = (units.end + P::kUnits - 1) / P::kUnits;
  for (int64_t index = begin; index < end; ++index) {
    const int64_t panel = back ? begin + end - 1 - index : index;
    const int64_t next = index + 1 == end ? panel : back ? panel - 1 : panel + 1;
    for (int64_t row0 = 0; row0 < count; row0 += P::kBlockRows) {
      const int64_t size = count - row0 < P::kBlockRows ? count - row0 : P::kBlockRows;
      if (zero) P::run_zero(matrix, panel, size, tile, P::kColumns);
      else P::run(matrix, panel, rows + row0, size, tile, P::kColumns, next);
      pointwise(panel, row0, size);
    }
  }
}

// The memory of one thread.
struct Scratch {
  void* tile;             // [kTileRows][max columns] state type
  void* gates;            // [chunk rows][panels of own units][columns] state type: input product of the chunk's steps
  void* quantised;        // quantised operands, for int8 weights (quantised.h)
  void* converted;        // [chunk rows][I] operand type: the converted input, only for 16 bit without native dot
  const void** pointers;  // [4 * B + chunk rows]
  int64_t* indices;       // [2 * B]
  int64_t chunk_steps;
};

}  // namespace fr::cpu
