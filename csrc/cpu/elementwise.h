// The recurrence of a cell without a product whose only value is h, for one row and a few successive steps (forward.h).
// The state stays in registers between these steps. While the input part of the gates is cheap, it is made here too,
// instead of being stored and read again: such a cell does so little else that memory would set its pace.
#pragma once

#include "call.h"

namespace fr::cpu {

// Where a row's values of kSteps successive steps lie. S: the storage type.
template <class S, class O, int kSteps>
struct RowSteps {
  const StateOf<S>* gates[kSteps];  // the input part of the caller's units, or null: make it from `input`
  const O* input[kSteps];
  S* output[kSteps];
  const O* before;  // the state before the first step
  O* after;         // the state after the last one, if the output is no operand
};

// Every sum has the order of the product (product.h), so both ways to make the input part give the same bits.
// Steps are passed by value: no store can change the copy, so the compiler keeps the addresses in registers. Flattened,
// because a call for each vector would cost more than the formulas.
template <class Isa, class Cell, class S, class Input, bool kMakesInput, int kSteps>
[[gnu::noinline, gnu::flatten]] void advance_row(const RowSteps<S, Operand<Isa, S>, kSteps> steps, const void* panels,
    const void* unit_weights, int64_t depth, int64_t hidden, UnitRange units, Clips<Vec<StateOf<S>, Isa>> clips) {
  using T = StateOf<S>;
  using O = Operand<Isa, S>;
  using V = Vec<T, Isa>;
  constexpr int kLanes = V::kLanes, kWide = Input::kSlice, kUnits = kWide * kLanes;
  static_assert(Input::kGates == 1 && kUnits == Input::kSliceColumns);

  const auto slice = [&](int64_t unit, auto whole) {
    const auto lanes = [&](int i) { return whole.value ? kLanes : lanes_left<V>(hidden - unit - i * kLanes); };
    V sum[kSteps][kWide], h[kWide], weight[kWide];
    if (!kMakesInput || steps.gates[0]) {
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step)
#pragma GCC unroll 4
        for (int i = 0; i < kWide; ++i)
          sum[step][i] = load_full<V>(steps.gates[step] + unit - units.begin + i * kLanes);
    } else if constexpr (kMakesInput) {
      const char* const panel = static_cast<const char*>(panels) + unit / Input::kUnits * Input::panel_bytes(depth);
      const T* const bias = reinterpret_cast<const T*>(panel) + unit % Input::kUnits;
      const O* w = reinterpret_cast<const O*>(panel + Input::kColumns * sizeof(T)) + unit % Input::kUnits * depth;
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step)
#pragma GCC unroll 4
        for (int i = 0; i < kWide; ++i) sum[step][i] = load_full<V>(bias + i * kLanes);
      for (int64_t k = 0; k < depth; ++k, w += kUnits)
#pragma GCC unroll 4
        for (int step = 0; step < kSteps; ++step) {
          const V operand(steps.input[step][k]);
#pragma GCC unroll 4
          for (int i = 0; i < kWide; ++i) sum[step][i] = sum[step][i] + operand * load_full<V>(w + i * kLanes);
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kWide; ++i) {
      h[i] = load<V>(steps.before + unit + i * kLanes, lanes(i));
      weight[i] = load<V>(static_cast<const S*>(unit_weights) + unit + i * kLanes, lanes(i));
    }
#pragma GCC unroll 4
    for (int step = 0; step < kSteps; ++step)
#pragma GCC unroll 4
      for (int i = 0; i < kWide; ++i) {
        Unit<V, Cell> u;
        u.input[0] = sum[step][i], u.h_prev = h[i], u.unit_weight[0] = weight[i];
        Cell::forward0(u, clips);
        S* const out = steps.output[step] + unit + i * kLanes;
        store(out, u.h, lanes(i));
        if constexpr (std::is_same_v<S, T>) h[i] = u.h;
        else h[i] = load<V>(out, lanes(i));
      }
    if constexpr (!std::is_same_v<O, S>)
#pragma GCC unroll 4
      for (int i = 0; i < kWide; ++i) store(steps.after + unit + i * kLanes, h[i], lanes(i));
  };
  int64_t unit = units.begin;
  for (; unit + kUnits <= units.end; unit += kUnits) slice(unit, std::true_type{});
  if (unit < units.end) slice(unit, std::false_type{});
}

}  // namespace fr::cpu
