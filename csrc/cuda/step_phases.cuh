// The pointwise phases of a step on one unit of one row: loads the fields of Unit that the phase of cells/cell.h names,
// calls the cell, stores what came out. Called by step.cuh for every element of a block's tile.
#pragma once

#include "device.cuh"
#include "step_params.h"

namespace fr::FR_TARGET {

// What a row does at a step. The state before the step: initial if cut (or zero), `before` if it has one, else initial.
struct RowState {
  bool active, has_before, cut, last;
};

FR_DEVICE RowState row_state(const StepRows& rows, bool reverse, const int64_t* lengths, int64_t b) {
  const int64_t t = rows.step, length = lengths ? lengths[b] : t + 2;
  RowState state;
  state.active = b < rows.rows && t < length;
  const bool active_after = b < rows.rows_after && t + 1 < length;
  state.has_before = reverse ? active_after : t > 0;
  state.last = reverse ? t == 0 : !active_after;
  state.cut = state.active && (reverse ? rows.resets_after && active_after && rows.resets_after[b]
                                       : rows.resets && rows.resets[b]);
  return state;
}

template <class T>
FR_DEVICE T& element(const Matrix& matrix, int64_t row, int64_t column) {
  return static_cast<T*>(matrix.data)[row * matrix.row_stride + column];
}

// The row of the old state, or null: zero.
template <class T>
FR_DEVICE const T* old_row(const RowState& state, bool reset_to_initial, const Matrix& before, const void* initial, int64_t width,
                           int64_t b) {
  if (state.cut ? !reset_to_initial : false) return nullptr;
  if (!state.cut && state.has_before) return static_cast<const T*>(before.data) + b * before.row_stride;
  return initial ? static_cast<const T*>(initial) + b * width : nullptr;
}

// One element of one phase. Sums: sums(m) is the product of gate row m, without bias; keep(i, value) gets what later products
// read, for a kernel that keeps it on the chip: backward the gradient of gate i, forward as 1 the second product's operand.
template <class Math, class Sums>
struct Element {
  using Storage = typename Math::Storage;
  using State = typename Math::State;
  using V = Scalar<State>;

  const StepParams& p;
  const StepDirection& d;
  const Clips<V>& clips;
  int64_t b, j;
  const Sums& sums;
  mutable V kept{};  // the new state of an active row, for a kernel that keeps it on the chip

  FR_DEVICE V load(const Matrix& matrix, int64_t column) const { return V(to_state(element<Storage>(matrix, b, column))); }
  FR_DEVICE V load_state(const Matrix& matrix, int64_t column) const { return V(element<State>(matrix, b, column)); }
  FR_DEVICE void store(const Matrix& matrix, int64_t column, V v) const { set(element<Storage>(matrix, b, column), v.value); }
  FR_DEVICE V recurrent(int m) const {
    const State sum = sums(m);
    if (!d.product.bias) return V(sum);
    return V(sum + to_state(static_cast<const Storage*>(d.product.bias)[m * d.product.gate_rows + j]));
  }
  FR_DEVICE V h_prev(const RowState& row) const {
    const Storage* from = old_row<Storage>(row, p.reset_to_initial, d.output_before, d.h0, p.width, b);
    return from ? V(to_state(from[j])) : V(0);
  }
  FR_DEVICE V c_prev(const RowState& row) const {
    const State* from = old_row<State>(row, p.reset_to_initial, d.cells_before, d.c0, p.hidden, b);
    return from ? V(from[j]) : V(0);
  }

  FR_DEVICE void store_h(const RowState& row, V h) const {
    kept = h;
    if (!d.output.data) return;  // rebuilding gates
    store(d.output, j, h);
    if (row.last) set(static_cast<Storage*>(d.h_n)[b * p.width + j], h.value);
  }

  // An inactive row: its output is zero; inactive at step 0 means length 0, and its final state is the initial one.
  FR_DEVICE void rest_h() const {
    if (!d.output.data || b >= d.here.rows) return;  // packed: the other direction's step may have more rows
    store(d.output, j, V(0));
    if (d.here.step != 0) return;
    const int64_t i = b * p.width + j;
    set(static_cast<Storage*>(d.h_n)[i], d.h0 ? to_state(static_cast<const Storage*>(d.h0)[i]) : State(0));
  }

  template <class Cell>
  FR_DEVICE void forward_first() const {
    const RowState row = row_state(d.here, d.reverse, p.lengths, b);
    if (!row.active) {
      if constexpr (Cell::kProducts == 1) rest_h();
      if constexpr (Cell::kStates == 2) {
        if (d.c_n && d.here.step == 0)
          static_cast<State*>(d.c_n)[b * p.hidden + j] = d.c0 ? static_cast<const State*>(d.c0)[b * p.hidden + j] : State(0);
      }
      return;
    }
    Unit<V> u;
    for (int gate = 0; gate < Cell::kFirstGates; ++gate) {
      u.input[gate] = load_state(d.input_gates, gate * p.hidden + j);
      u.recurrent[gate] = recurrent(gate);
    }
    if constexpr (Cell::kReadsHidden) u.h_prev = h_prev(row);
    if constexpr (Cell::kStates == 2) u.c_prev = c_prev(row);
    Cell::forward0(u, clips);
    constexpr int kSavedHere = Cell::kProducts == 1 ? Cell::kSaved : Cell::kFirstGates;
    if (d.gates.data)
      for (int i = 0; i < kSavedHere; ++i) store(d.gates, i * p.hidden + j, u.saved[i]);
    if constexpr (Cell::kStates == 2) {
      if (d.cells.data) element<State>(d.cells, b, j) = u.c.value;
      if (d.c_n && (row.last || !d.cells.data)) static_cast<State*>(d.c_n)[b * p.hidden + j] = u.c.value;
    }
    if constexpr (Cell::kProducts == 1) {
      store_h(row, u.h);
    } else {
      store_if(d.inner, u.inner);  // null: not wanted in memory
      sums.keep(1, u.inner.value);
      if constexpr (Cell::kReadsHidden) static_cast<State*>(d.carry)[b * p.hidden + j] = u.saved[1].value;
    }
  }

  template <class Cell>
  FR_DEVICE void forward_second() const {
    const RowState row = row_state(d.here, d.reverse, p.lengths, b);
    if (!row.active) {
      rest_h();
      return;
    }
    Unit<V> u;
    if constexpr (Cell::kReadsHidden) {
      u.h_prev = h_prev(row);
      u.saved[1] = V(static_cast<const State*>(d.carry)[b * p.hidden + j]);
    }
    if constexpr (Cell::kFirstGates == Cell::kGates) {
      u.recurrent[0] = recurrent(0);
    } else {
      for (int gate = Cell::kFirstGates; gate < Cell::kGates; ++gate) {
        u.input[gate] = load_state(d.input_gates, gate * p.hidden + j);
        u.recurrent[gate] = recurrent(gate - Cell::kFirstGates);
      }
    }
    Cell::forward1(u, clips);
    if (d.gates.data)
      for (int i = Cell::kFirstGates; i < Cell::kSaved; ++i) store(d.gates, i * p.hidden + j, u.saved[i]);
    store_h(row, u.h);
  }

  // kSplitGate: the gate whose gradient is not what the product reads.
  template <int kSplitGate>
  FR_DEVICE void store_gate_gradient(int gate, V v) const {
    store(d.d_gates, gate * p.hidden + j, v);
    if (gate != kSplitGate) sums.keep(gate, v.value);
  }

  // The gradient that arrives at the state between the pending step and this one; a reset between them sends it to the
  // initial state, or nowhere.
  FR_DEVICE V arriving(void* buffer, void* reset_buffer, int64_t width, State product) const {
    V gradient = V(static_cast<const State*>(buffer)[b * width + j]);
    if (d.pending.step < 0) return gradient;
    const RowState after = row_state(d.pending, d.reverse, p.lengths, b);
    if (!after.active) return gradient;
    gradient = gradient + V(product);
    if (!after.cut) return gradient;
    if (reset_buffer) static_cast<State*>(reset_buffer)[b * width + j] += gradient.value;
    return V(0);
  }
  FR_DEVICE void leave(void* buffer, int64_t width, V gradient) const {
    static_cast<State*>(buffer)[b * width + j] = gradient.value;
  }
  FR_DEVICE void store_if(const Matrix& matrix, V v) const {
    if (matrix.data) store(matrix, j, v);
  }

  template <class Cell>
  FR_DEVICE void load_saved(Unit<V>& u, const RowState& row) const {
    for (int i = 0; i < Cell::kSaved; ++i) u.saved[i] = load(d.gates, i * p.hidden + j);
    if constexpr (Cell::kReadsHidden) u.h_prev = h_prev(row);
  }
  template <class Cell>
  FR_DEVICE void load_cells(Unit<V>& u, const RowState& row) const {
    u.c = load_state(d.cells, j);
    u.c_prev = c_prev(row);
  }

  template <class Cell>
  FR_DEVICE void backward_first() const {
    Unit<V> u;
    u.d_h = arriving(d.d_h, d.d_h0_reset, p.width, sums(0));
    constexpr bool kHasCell = Cell::kStates == 2 && Cell::kProducts == 1;
    if constexpr (kHasCell) u.d_c = arriving(d.d_c, d.d_c0_reset, p.hidden, State(0));
    const bool exists = d.here.step >= 0 && b < d.here.rows;
    RowState row{};
    if (exists) row = row_state(d.here, d.reverse, p.lengths, b);
    if (!row.active) {
      leave(d.d_h, p.width, u.d_h);
      if constexpr (kHasCell) leave(d.d_c, p.hidden, u.d_c);
      if (!exists) return;
      store_if(d.h_prev, V(0));
      if constexpr (Cell::kProducts == 1) {
        for (int gate = 0; gate < Cell::kGates; ++gate) store(d.d_gates, gate * p.hidden + j, V(0));
        if constexpr (Cell::kSplitGate >= 0) store(d.d_recurrent, j, V(0));
      } else if constexpr (Cell::kFirstGates == Cell::kGates) {
        store(d.d_projected, j, V(0));
      } else {
        for (int gate = 1; gate < Cell::kGates; ++gate) store(d.d_gates, gate * p.hidden + j, V(0));
      }
      return;
    }
    if (d.d_output.data) u.d_h = u.d_h + load(d.d_output, j);
    if (d.h_prev.data) store(d.h_prev, j, h_prev(row));
    if constexpr (Cell::kProducts == 1) {
      load_saved<Cell>(u, row);
      if constexpr (Cell::kReadsOutput) u.h = load(d.output, j);
      if constexpr (kHasCell) load_cells<Cell>(u, row);
      Cell::backward0(u, clips);
      for (int gate = 0; gate < Cell::kGates; ++gate) store_gate_gradient<Cell::kSplitGate>(gate, u.d_input[gate]);
      if constexpr (Cell::kSplitGate >= 0) {
        store(d.d_recurrent, j, u.d_recurrent[Cell::kSplitGate]);
        sums.keep(Cell::kSplitGate, u.d_recurrent[Cell::kSplitGate].value);
      }
      if constexpr (kHasCell) leave(d.d_c, p.hidden, u.d_c);
    } else if constexpr (Cell::kFirstGates == Cell::kGates) {  // projection
      u.h = load(d.output, j);
      Cell::backward1(u, clips);
      store(d.d_projected, j, u.d_recurrent[0]);
    } else {
      load_saved<Cell>(u, row);
      Cell::backward1(u, clips);
      for (int gate = 1; gate < Cell::kGates; ++gate) store_gate_gradient<Cell::kSplitGate>(gate, u.d_input[gate]);
    }
    leave(d.d_h, p.width, u.d_h_prev);
  }

  template <class Cell>
  FR_DEVICE void backward_second() const {
    constexpr bool kHasCell = Cell::kStates == 2;
    Unit<V> u;
    if constexpr (kHasCell) u.d_c = arriving(d.d_c, d.d_c0_reset, p.hidden, State(0));
    const bool exists = d.here.step >= 0 && b < d.here.rows;
    RowState row{};
    if (exists) row = row_state(d.here, d.reverse, p.lengths, b);
    constexpr int kGatesHere = kHasCell ? Cell::kGates : 1;
    if (!row.active) {
      if constexpr (kHasCell) leave(d.d_c, p.hidden, u.d_c);
      if (!exists) return;
      store_if(d.inner, V(0));
      for (int gate = 0; gate < kGatesHere; ++gate) store(d.d_gates, gate * p.hidden + j, V(0));
      return;
    }
    load_saved<Cell>(u, row);
    u.d_inner = V(sums(0));
    if constexpr (kHasCell) load_cells<Cell>(u, row);
    else u.d_h_prev = V(static_cast<const State*>(d.d_h)[b * p.width + j]);
    Cell::backward0(u, clips);
    for (int gate = 0; gate < kGatesHere; ++gate) store_gate_gradient<Cell::kSplitGate>(gate, u.d_input[gate]);
    store_if(d.inner, u.inner);
    if constexpr (kHasCell) leave(d.d_c, p.hidden, u.d_c);
    else leave(d.d_h, p.width, u.d_h_prev);
  }

  template <class Cell, int kGates>
  FR_DEVICE void run() const {
    if constexpr (Cell::kFirstGates == kGates)
      if (p.phase == Phase::kForwardFirst) return forward_first<Cell>();
    if constexpr (kGates == 1) {
      if (p.phase == Phase::kBackwardFirst) return backward_first<Cell>();
      if constexpr (Cell::kProducts == 2) {
        if (p.phase == Phase::kForwardSecond) return forward_second<Cell>();
        if (p.phase == Phase::kBackwardSecond) return backward_second<Cell>();
      }
    }
    expect(false, "a phase that this kernel has");
  }
};

}  // namespace fr::FR_TARGET
