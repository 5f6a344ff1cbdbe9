// The pointwise phases of a step, on one unit of one row: load the fields of Unit that cells/cell.h names for the
// phase, call the cell, store the results. All strategies share them.
//
// Noise in the state (cells/noise.h) is a branch here, the same for all threads, so every strategy has it without
// kernels of its own. A unit draws a Philox block for each decision; the seed is read from memory. Dropout of the state
// is different: the product then reads not the output but a masked copy, which forward writes beside the output
// (`entering`). Backward multiplies the product and h_prev by the mask. Only `step` and block/elementwise.cuh have that
// code (kDropsState), because it would take registers from the other kernels.
#pragma once

#include "device.cuh"
#include "params.h"

namespace fr::FR_TARGET {

// Copies a struct with all threads of the block, each thread some of its words. An assignment by one thread would take
// a register for each word.
template <class T>
FR_DEVICE void copy_words(T& to, const T& from, int thread) {
  static_assert(sizeof(T) % sizeof(uint64_t) == 0);
#pragma unroll 1
  for (int i = thread; i < static_cast<int>(sizeof(T) / sizeof(uint64_t)); i += block_threads())
    reinterpret_cast<uint64_t*>(&to)[i] = reinterpret_cast<const uint64_t*>(&from)[i];
}

// A row's role in a step, which decides what state it starts from. After a reset (cut): zero, or with reset_to_initial
// the initial state. Otherwise: the state of the step before, or the initial state if there is none (!has_before).
struct RowState {
  bool active, has_before, cut, last;
};

FR_DEVICE RowState row_state(const StepRows& rows, bool reverse, const int64_t* lengths, int64_t b) {
  if (rows.alike) return {true, rows.has_before, false, rows.last};
  const int64_t t = rows.step, length = lengths ? lengths[b] : t + 2;
  RowState state;
  state.active = b < rows.rows && t < length;
  const bool active_after = b < rows.rows_after && t + 1 < length;
  state.has_before = reverse ? active_after : t > 0;
  state.last = reverse ? t == 0 : !active_after;
  state.cut = state.active &&
              (reverse ? rows.resets_after && active_after && rows.resets_after[b] : rows.resets && rows.resets[b]);
  return state;
}

template <class T>
FR_DEVICE T& element(const Matrix& matrix, int64_t row, int64_t column) {
  return global(static_cast<T*>(matrix.data))[row * matrix.row_stride + column];
}

// The bounds that a call clips with.
template <class V>
FR_DEVICE Clips<V> clips_of(const StepParams& p) {
  using State = typename V::Lane;
  return {V(p.clips_cells ? static_cast<State>(p.cell_clip) : State(0)),
      V(p.clips_projected ? static_cast<State>(p.proj_clip) : State(0)), p.clips_cells, p.clips_projected};
}

// The old state's row; null means zero.
template <class T>
FR_DEVICE const T* old_row(
    const RowState& state, bool reset_to_initial, const Matrix& before, const void* initial, int64_t width, int64_t b) {
  if (state.cut ? !reset_to_initial : false) return nullptr;
  if (!state.cut && state.has_before) return global(static_cast<const T*>(before.data)) + b * before.row_stride;
  return initial ? global(static_cast<const T*>(initial)) + b * width : nullptr;
}

// Whether every row of the batch continues from the step before and into the step after, and no option acts on its
// state. Most steps of padded input are plain; Element then makes no decisions for single rows.
template <bool kBackward>
FR_DEVICE bool is_plain(const StepParams& p, const StepDirection& d) {
  return d.here.goes_on && (!kBackward || d.pending.goes_on) && !p.acts_on_state;
}

// One element of one phase. sums(m) is the product of gate row m, without bias. Kernels that keep operands of later
// products on the chip get them by sums.keep(i, stored): in backward the gradient of gate i, in forward, with i = 1,
// the operand of the second product. kPlain: is_plain holds for this step.
template <class Math, class Sums, bool kPlain = false>
struct Element {
  using Storage = typename Math::Storage;
  using State = typename Math::State;
  using V = Scalar<State, Math::kTensor>;
  using M = StepMatrix;

  const StepParams& p;
  const StepDirection& d;
  const Clips<V>& clips_of_call;
  int64_t b, j;
  const Sums& sums;
  mutable Storage kept{};  // the new state of an active row, for kernels that keep it on the chip
  Clips<V> no_clips{V(0), V(0), false, false};
  NoiseParams no_noise{};
  RowState row{}, after{};  // the row's roles in this step and, in backward, in the pending one; inactive: it has none

  // Must come before a phase. For all cells together, because the code is long and each cell has its own.
  FR_DEVICE void read_roles(bool backward) {
    if (exists()) row = role(d.here);
    if (backward && (kPlain || d.pending.step >= 0)) after = role(d.pending);
  }

  FR_DEVICE const Clips<V>& clips() const { return kPlain ? no_clips : clips_of_call; }
  FR_DEVICE const NoiseParams& noise_params() const { return kPlain ? no_noise : p.noise; }
  FR_DEVICE RowState role(const StepRows& rows) const {
    if constexpr (kPlain) return {true, true, false, false};
    else return row_state(rows, d.reverse, p.lengths, b);
  }
  // Whether the step has a row b. Packed steps differ in their rows, and the extra iteration has none.
  FR_DEVICE bool exists() const { return kPlain || (d.here.step >= 0 && b < d.here.rows); }

  // H, hidden from the optimiser. Otherwise the compiler would keep the offsets of all gates in registers from step to
  // step.
  FR_DEVICE int units() const { return made_anew(static_cast<int>(p.hidden)); }
  template <class T>
  FR_DEVICE T* at(const Matrix& matrix) const {
    return &element<T>(matrix, b, j);
  }
  FR_DEVICE V load(const Matrix& matrix, int64_t column) const {
    return V(to_state(element<Storage>(matrix, b, column)));
  }
  FR_DEVICE V load_state(const Matrix& matrix, int64_t column) const { return V(element<State>(matrix, b, column)); }
  FR_DEVICE static Storage stored(V v) {
    Storage value;
    set(value, v.value);
    return value;
  }
  FR_DEVICE void store(const Matrix& matrix, int64_t column, V v) const {
    element<Storage>(matrix, b, column) = stored(v);
  }
  // Stores the products of the phase's kRows gate rows, with their bias.
  template <int kRows>
  FR_DEVICE void load_products(V* to) const {
    if (d.product.bias) {
      const Storage* bias = global(static_cast<const Storage*>(d.product.bias)) + j;
      for (int m = 0; m < kRows; ++m, bias += d.product.gate_rows) to[m] = V(sums(m) + to_state(*bias));
    } else {
      for (int m = 0; m < kRows; ++m) to[m] = V(sums(m));
    }
  }
  FR_DEVICE V h_prev() const {
    const Storage* from = old_row<Storage>(row, p.reset_to_initial, d.matrix[M::kOutputBefore], d.h0, p.width, b);
    return kPlain || from ? V(to_state(global(from)[j])) : V(0);
  }

  FR_DEVICE V mask() const {
    if constexpr (Sums::kDropsState)
      if (const void* of = p.state_mask[block_z()]) return V(global(static_cast<const State*>(of))[b * p.width + j]);
    return V(1);
  }

  FR_DEVICE void store_h(V h) const {
    kept = stored(h);
    if (!d.matrix[M::kOutput].data) return;  // null while gates are rebuilt
    *at<Storage>(d.matrix[M::kOutput]) = kept;
    if constexpr (Sums::kStoresEntering)
      if (d.entering.data) store(d.entering, j, load(d.matrix[M::kOutput], j) * mask());
    if (row.last) global(static_cast<Storage*>(d.h_n))[b * p.width + j] = kept;
  }

  // An inactive row has a zero output. If it is inactive even at step 0, its length is 0, and its final state is the
  // initial one.
  FR_DEVICE void rest_h() const {
    if (!d.matrix[M::kOutput].data || b >= d.here.rows)
      return;  // packed: the other direction's step, in the same launch, may have more rows
    store(d.matrix[M::kOutput], j, V(0));
    if (d.here.step != 0) return;
    const int64_t i = b * p.width + j;
    set(global(static_cast<Storage*>(d.h_n))[i],
        d.h0 ? to_state(global(static_cast<const Storage*>(d.h0))[i]) : State(0));
  }

  // Cell states of this unit.
  template <class Cell>
  FR_DEVICE void load_old_cells(Unit<V, Cell>& u) const {
    if constexpr (Cell::kCells > 0) {
      const State* from =
          old_row<State>(row, p.reset_to_initial, d.matrix[M::kCellsBefore], d.c0, Cell::kCells * p.hidden, b);
      for (int i = 0; i < Cell::kCells; ++i) u.c_prev[i] = kPlain || from ? V(global(from)[i * p.hidden + j]) : V(0);
    }
  }
  template <class Cell>
  FR_DEVICE void load_unit_weights(Unit<V, Cell>& u) const {
    if constexpr (Cell::kUnitWeights > 0) {
      const auto* from = global(static_cast<const Storage*>(p.unit_weights[block_z()]));
      for (int i = 0; i < Cell::kUnitWeights; ++i) u.unit_weight[i] = V(to_state(from[i * p.hidden + j]));
    }
  }
  template <class Cell>
  FR_DEVICE void add_unit_gradients(const Unit<V, Cell>& u) const {
    if constexpr (Cell::kUnitWeights > 0) {
      auto* to = static_cast<State*>(p.d_unit[block_z()]);
      if (!to) return;
      for (int i = 0; i < Cell::kUnitWeights; ++i)
        to[(b * Cell::kUnitWeights + i) * p.hidden + j] += u.d_unit_weight[i].value;
    }
  }
  template <class Cell>
  FR_DEVICE State& cell_of(void* states, int i) const {
    return global(static_cast<State*>(states))[(b * Cell::kCells + i) * p.hidden + j];
  }

  template <class Cell>
  FR_DEVICE UnitNoise<V> noise() const {
    V factor(1);
    if constexpr (UnitNoise<V>::template kEntersHere<Cell>) factor = mask();
    return {noise_params(),
        {static_cast<uint32_t>(j), static_cast<uint32_t>(b), static_cast<uint32_t>(d.here.step),
            static_cast<uint32_t>(p.noise.first_direction + block_z())},
        factor};
  }

  template <class Cell>
  FR_DEVICE void forward_first() const {
    using N = Numbers<Cell>;
    if (!row.active) {
      if constexpr (!N::kTwoPhases) rest_h();
      if constexpr (Cell::kCells > 0) {
        if (d.c_n && d.here.step == 0)
          for (int i = 0; i < Cell::kCells; ++i)
            cell_of<Cell>(d.c_n, i) = d.c0 ? cell_of<Cell>(const_cast<void*>(d.c0), i) : State(0);
      }
      return;
    }
    Unit<V, Cell> u;
    const int hidden = units();
    const State* input = at<State>(d.matrix[M::kInputGates]);
    for (int gate = 0; gate < N::kFirstGates; ++gate, input += hidden) u.input[gate] = V(*input);
    if constexpr (N::kMultiplies) load_products<N::kFirstGates>(u.recurrent);
    if constexpr (Cell::kReadsHidden) u.h_prev = h_prev();
    load_old_cells(u);
    load_unit_weights(u);
    if constexpr (!Cell::kReadsHidden && !N::kTwoPhases)
      if (noise_params().on) u.h_prev = h_prev();
    this->template noise<Cell>().forward0(u, clips());
    if constexpr (N::kFirstSaved > 0) {
      if (d.matrix[M::kGates].data) {
        Storage* to = at<Storage>(d.matrix[M::kGates]);
        for (int i = 0; i < N::kFirstSaved; ++i, to += hidden) set(*to, u.saved[i].value);
      }
    }
    if constexpr (Cell::kCells > 0)
      for (int i = 0; i < Cell::kCells; ++i) {
        if (d.matrix[M::kCells].data) element<State>(d.matrix[M::kCells], b, i * p.hidden + j) = u.c[i].value;
        if (d.c_n && (row.last || !d.matrix[M::kCells].data)) cell_of<Cell>(d.c_n, i) = u.c[i].value;
      }
    if constexpr (!N::kTwoPhases) {
      store_h(u.h);
    } else {
      store_if(d.matrix[M::kInner], u.inner);  // null: needed on the chip only
      sums.keep(1, stored(u.inner));
      if constexpr (N::kCarried > 0)
        for (int i = 0; i < N::kCarried; ++i) carried<Cell>(i) = u.carried[i].value;
    }
  }
  template <class Cell>
  FR_DEVICE State& carried(int i) const {
    return global(static_cast<State*>(d.carry))[(b * Numbers<Cell>::kCarried + i) * p.hidden + j];
  }

  template <class Cell>
  FR_DEVICE void forward_second() const {
    using N = Numbers<Cell>;
    if (!row.active) {
      rest_h();
      return;
    }
    Unit<V, Cell> u;
    if constexpr (N::kProjects) {
      load_products<1>(&u.projected);
    } else {
      if constexpr (Cell::kReadsHidden) u.h_prev = h_prev();
      load_unit_weights(u);
      if constexpr (N::kCarried > 0)
        for (int i = 0; i < N::kCarried; ++i) u.carried[i] = V(carried<Cell>(i));
      for (int gate = N::kFirstGates; gate < N::kGates; ++gate)
        u.input[gate] = load_state(d.matrix[M::kInputGates], gate * p.hidden + j);
      load_products<N::kGates - N::kFirstGates>(u.recurrent + N::kFirstGates);
    }
    if constexpr (!Cell::kReadsHidden || N::kProjects)
      if (noise_params().on) u.h_prev = h_prev();
    this->template noise<Cell>().forward1(u, clips());
    if constexpr (N::kFirstSaved < N::kSaved) {
      if (d.matrix[M::kGates].data)
        for (int i = N::kFirstSaved; i < N::kSaved; ++i) store(d.matrix[M::kGates], i * p.hidden + j, u.saved[i]);
    }
    store_h(u.h);
  }

  // Stores the gradients of gates [kBegin, kEnd). For the split gate the product reads the gradient of the recurrent
  // part instead.
  template <int kBegin, int kEnd, class Cell>
  FR_DEVICE void store_gate_gradients(const Unit<V, Cell>& u) const {
    const int hidden = units();
    Storage* to = at<Storage>(d.matrix[M::kDGates]) + kBegin * hidden;
    for (int gate = kBegin; gate < kEnd; ++gate, to += hidden) {
      const Storage gradient = stored(u.d_input[gate]);
      *to = gradient;
      if (gate != Cell::kSplitGate) sums.keep(gate, gradient);
    }
    if constexpr (Cell::kSplitGate >= kBegin && Cell::kSplitGate < kEnd) {
      store(d.matrix[M::kDRecurrent], j, u.d_split);
      sums.keep(Cell::kSplitGate, stored(u.d_split));
    }
  }
  template <int kBegin, int kEnd, class Cell>
  FR_DEVICE void clear_gate_gradients() const {
    for (int gate = kBegin; gate < kEnd; ++gate) store(d.matrix[M::kDGates], gate * p.hidden + j, V(0));
    if constexpr (Cell::kSplitGate >= kBegin && Cell::kSplitGate < kEnd) store(d.matrix[M::kDRecurrent], j, V(0));
  }

  // The gradient that reaches the state between the pending step and this one. If a reset cuts between the two, it goes
  // to the initial state, or nowhere.
  template <bool kOfH>
  FR_DEVICE V arriving(void* buffer, void* reset_buffer, int64_t place, State product) const {
    V gradient = V(global(static_cast<const State*>(buffer))[place]);
    if (!after.active) return gradient;
    if constexpr (kOfH) {
      if constexpr (Sums::kDropsState) product = (V(product) * mask()).value;
      gradient = gradient + V(product);
      if (!kPlain && p.clips_gradients) gradient = clipped(gradient, V(static_cast<State>(p.gradient_clip)));
    }
    if (!after.cut) return gradient;
    if (reset_buffer) global(static_cast<State*>(reset_buffer))[place] += gradient.value;
    return V(0);
  }
  // Leaves the state's gradient for `arriving` of the next iteration.
  FR_DEVICE void leave_h(V gradient) const { global(static_cast<State*>(d.d_h))[b * p.width + j] = gradient.value; }
  FR_DEVICE void store_if(const Matrix& matrix, V v) const {
    if (matrix.data) store(matrix, j, v);
  }

  template <class Cell>
  FR_DEVICE void load_saved(Unit<V, Cell>& u) const {
    if constexpr (Numbers<Cell>::kSaved > 0) {
      const int hidden = units();
      const Storage* from = at<Storage>(d.matrix[M::kGates]);
      for (int i = 0; i < Numbers<Cell>::kSaved; ++i, from += hidden) u.saved[i] = V(to_state(*from));
    }
    if constexpr (Cell::kReadsHidden) u.h_prev = h_prev();
    load_unit_weights(u);
  }
  template <class Cell>
  FR_DEVICE void load_cells(Unit<V, Cell>& u) const {
    if constexpr (Cell::kCells > 0)
      for (int i = 0; i < Cell::kCells; ++i) {
        u.c[i] = load_state(d.matrix[M::kCells], i * p.hidden + j);
        if (d.matrix[M::kDCells].data) u.d_c[i] = u.d_c[i] + load_state(d.matrix[M::kDCells], i * p.hidden + j);
      }
    load_old_cells(u);
  }
  template <class Cell>
  FR_DEVICE void arriving_at_cells(Unit<V, Cell>& u) const {
    if constexpr (Cell::kCells > 0)
      for (int i = 0; i < Cell::kCells; ++i)
        u.d_c[i] = arriving<false>(d.d_c, d.d_c0_reset, (b * Cell::kCells + i) * p.hidden + j, State(0));
  }
  template <class Cell>
  FR_DEVICE void leave_cells(const Unit<V, Cell>& u) const {
    if constexpr (Cell::kCells > 0)
      for (int i = 0; i < Cell::kCells; ++i) cell_of<Cell>(d.d_c, i) = u.d_c[i].value;
  }

  // Backward of the last phase, over R. With two phases the first phase's backward handles the cell states.
  template <class Cell>
  FR_DEVICE void backward_first() const {
    using N = Numbers<Cell>;
    constexpr int kBegin = N::kTwoPhases ? N::kFirstGradients : 0;
    Unit<V, Cell> u;
    u.d_h = arriving<true>(d.d_h, d.d_h0_reset, b * p.width + j, sums(0));
    if constexpr (!N::kTwoPhases) arriving_at_cells(u);
    if (!row.active) {
      leave_h(u.d_h);
      if constexpr (!N::kTwoPhases) leave_cells(u);
      if (!exists()) return;
      store_if(d.matrix[M::kHPrev], V(0));
      if constexpr (N::kProjects) store(d.matrix[M::kDProjected], j, V(0));
      clear_gate_gradients<kBegin, N::kGates, Cell>();
      return;
    }
    if (d.matrix[M::kDOutput].data) u.d_h = u.d_h + load(d.matrix[M::kDOutput], j);
    if (d.matrix[M::kHPrev].data) store(d.matrix[M::kHPrev], j, h_prev() * mask());
    if constexpr (!N::kProjects) load_saved(u);
    if constexpr (Cell::kReadsOutput || N::kProjects) u.h = load(d.matrix[M::kOutput], j);
    if constexpr (!N::kTwoPhases) {
      load_cells(u);
      this->template noise<Cell>().backward0(u, clips());
    } else {
      this->template noise<Cell>().backward1(u, clips());
      if constexpr (N::kProjects) store(d.matrix[M::kDProjected], j, u.d_projected);
    }
    store_gate_gradients<kBegin, N::kGates>(u);
    if constexpr (!N::kProjects) add_unit_gradients(u);
    if constexpr (!N::kTwoPhases) leave_cells(u);
    leave_h(u.d_h_prev);
  }

  // Backward of the first of two phases, once d_inner is known.
  template <class Cell>
  FR_DEVICE void backward_second() const {
    using N = Numbers<Cell>;
    Unit<V, Cell> u;
    arriving_at_cells(u);
    if (!row.active) {
      leave_cells(u);
      if (!exists()) return;
      store_if(d.matrix[M::kInner], V(0));
      clear_gate_gradients<0, N::kFirstGradients, Cell>();
      return;
    }
    load_saved(u);
    u.d_inner = V(sums(0));
    load_cells(u);
    if constexpr (!N::kProjects) u.d_h_prev = V(global(static_cast<const State*>(d.d_h))[b * p.width + j]);
    this->template noise<Cell>().backward0(u, clips());
    store_gate_gradients<0, N::kFirstGradients>(u);
    add_unit_gradients(u);
    store_if(d.matrix[M::kInner], u.inner);
    leave_cells(u);
    if constexpr (!N::kProjects) leave_h(u.d_h_prev);
  }

  template <class Cell, int kGates>
  FR_DEVICE void run() const {
    using N = Numbers<Cell>;
    if constexpr (N::kFirstGates == kGates)
      if (p.phase == Phase::kForwardFirst) return forward_first<Cell>();
    if constexpr (N::kSecondRows == kGates)
      if (p.phase == Phase::kForwardSecond) return forward_second<Cell>();
    if constexpr (kGates == 1) {
      if (p.phase == Phase::kBackwardFirst) return backward_first<Cell>();
      if constexpr (N::kTwoPhases)
        if (p.phase == Phase::kBackwardSecond) return backward_second<Cell>();
    }
    expect(false, "a phase that this kernel has");
  }
};

}  // namespace fr::FR_TARGET
