// The forward pass of one thread's part of a layer on the CPU: the input product for a few steps at a time, then for
// each step the recurrent product with the cell's formulas on its tile. Called through the tables in kernels.h.
//
// Sync: parts that share rows (units split) wait at the barrier after each product's phase. Parts with rows of their
// own never wait, nor do parts of a cell without a product.
#pragma once

#include "call.h"
#include "draws.h"
#include "elementwise.h"

namespace fr::cpu {

// The products of storage type S with weights of type W.
template <class Isa, class S, class W>
struct Products {
  template <int kGates>
  using Of = Product<Isa, S, kGates, W>;
};

// W: the type of the weights in the panels. Prepared weights may have another type than the operands; they serve only
// inference without noise.
template <class Isa, class Cell, class S, class W = Operand<Isa, S>>
struct Forward {
  using T = StateOf<S>;
  using O = Operand<Isa, S>;
  using V = Vec<T, Isa>;
  using N = Numbers<Cell>;
  using Input = typename Products<Isa, S, W>::template Of<N::kGates>;
  using First = typename Products<Isa, S, W>::template Of<N::kFirstGates>;
  using Second = typename Products<Isa, S, W>::template Of<N::kTwoPhases ? N::kSecondRows : 1>;
  static constexpr bool kTrains = std::is_same_v<W, O>;
  // A cell with `output` (cell.h) runs in two passes over a tile. In one, a unit's last function would wait for its
  // first ones with too few other units to fill the time. Only where it helps: not with float32 weights, whose products
  // take most of the time.
  static constexpr bool kTwoPasses = !kTrains && !N::kTwoPhases && requires { Cell::kPassedOn; };
  static constexpr int kFirstPassed = [] {
    if constexpr (kTwoPasses) return Cell::kPassedOn;
    else return N::kSaved;
  }();
  static constexpr int kLanes = V::kLanes, kGates = N::kGates, kCells = Cell::kCells;
  static constexpr bool kOutputIsOperand = std::is_same_v<O, S>;

  // Bytes of the operand rows that the products need, for this many rows of inputs and of states.
  static int64_t operand_bytes(const Shape& s, int64_t inputs) {
    const int64_t width = s.width() > s.hidden ? s.width() : s.hidden;
    const int64_t input = Input::operand_bytes(inputs, s.input), state = First::operand_bytes(s.batch, width);
    return input > state ? input : state;
  }

  // Packs one thread's share of the weights, and converts its share of the initial state.
  static void pack(const Call& call, const DirectionWork& work, const void* h0, int index, int count) {
    pack_share<Input>(work.input, index, count);
    if constexpr (N::kMultiplies) pack_share<First>(work.first, index, count);
    if constexpr (N::kTwoPhases) pack_share<Second>(work.second, index, count);
    if constexpr (!kOutputIsOperand) {
      const int64_t size = call.shape.batch * call.shape.width();
      if (h0)
        for (int64_t i = size * index / count, end = size * (index + 1) / count; i < end; ++i)
          static_cast<O*>(work.initial)[i] = to_float(static_cast<const S*>(h0)[i]);
    }
  }

  // gates_only: every step starts from the saved states, and only `gates` is written. Backward rebuilds gates this way.
  static void run(const Call& call, const ForwardDirection& direction, const DirectionWork& work, const Part& part,
      const Scratch& scratch, bool gates_only) {
    Forward self{call, direction, work, part, scratch, gates_only};
    const TileScope<Isa> tiles;
    self.run();
  }

 private:
  const Call& call;
  const ForwardDirection& direction;
  const DirectionWork& work;
  const Part& part;
  const Scratch& scratch;
  const bool gates_only;

  const int64_t batch = call.shape.batch, hidden = call.shape.hidden, width = call.shape.width();
  const UnitRange units = unit_range(part, hidden, kLanes);                      // of H
  const UnitRange out_units = unit_range(part, width, kLanes);                   // of R
  const int64_t own = Input::panels(units.end - units.begin) * Input::kColumns;  // values in a row of scratch.gates
  T* const tile = static_cast<T*>(scratch.tile);
  T* const input_gates = static_cast<T*>(scratch.gates);
  const O** const current = reinterpret_cast<const O**>(scratch.pointers);  // [B]: where each row's state lies
  const T** const c_current = reinterpret_cast<const T**>(scratch.pointers + batch);
  const O** const operand = reinterpret_cast<const O**>(scratch.pointers + 2 * batch);  // of the active rows
  const O** const inner_operand = reinterpret_cast<const O**>(scratch.pointers + 3 * batch);
  // [chunk rows], the active ones
  const O** const input_rows = reinterpret_cast<const O**>(scratch.pointers + 4 * batch);
  int64_t* const rows = scratch.indices;  // the active rows of a step
  const Clips<V> clips{V(T(call.options.cell_clip)), V(T(call.options.proj_clip)), call.options.cell_clip > 0,
      call.options.proj_clip > 0};
  // If the mask acts only on a product's operand, the pointwise part needs no noise code for it.
  static constexpr bool kDropsInProduct = N::kMultiplies && !UnitNoise<V>::template kEntersHere<Cell>;
  // Rebuilt gates depend on noise only through the states, which are already stored.
  const NoiseParams noise =
      gates_only ? NoiseParams{}
                 : NoiseParams(call.options.noise, kDropsInProduct ? nullptr : direction.weights.state_mask);
  const Drawer<V> drawer{noise};
  const T* const mask = static_cast<const T*>(direction.weights.state_mask);
  const bool drops_state = N::kMultiplies && mask;

  template <class Element>
  static Element* at(const Rows& rows, int64_t offset) {
    return static_cast<Element*>(rows.data) + offset;
  }
  const O* initial_h(int64_t b) const {
    const void* base = kOutputIsOperand ? direction.h0 : work.initial;
    return direction.h0 ? static_cast<const O*>(base) + b * width : static_cast<const O*>(work.zeros);
  }
  const T* initial_c(int64_t b) const {
    return direction.c0 ? static_cast<const T*>(direction.c0) + b * kCells * hidden : static_cast<const T*>(work.zeros);
  }
  O* state_buffer(int64_t t, int64_t b) const { return static_cast<O*>(work.operands) + ((t & 1) * batch + b) * width; }
  // Dropout of the state: what enters the product after step t of row b, and before the first step.
  O* entering(int64_t t, int64_t b) const { return static_cast<O*>(work.entering) + ((t & 1) * batch + b) * width; }
  O* entering_initial(int64_t b) const { return static_cast<O*>(work.entering_initial) + b * width; }
  const O* entering_before(int64_t t, int64_t b) const {
    switch (call.origin(direction.reverse, t, b)) {
      case Origin::kInitial: return entering_initial(b);
      case Origin::kZero: return static_cast<const O*>(work.zeros);
      case Origin::kStep: break;
    }
    return entering(direction.reverse ? t + 1 : t - 1, b);
  }
  void drop_initial() const {
    for (int64_t b = part.row_begin; b < part.row_end; ++b)
      for (int64_t unit = out_units.begin; unit < out_units.end; unit += kLanes) {
        const int n = lanes_left<V>(width - unit);
        store_operand<S>(
            entering_initial(b) + unit, load<V>(initial_h(b) + unit, n) * load<V>(mask + b * width + unit, n), n);
      }
    work.barrier->wait(part.parts);
  }
  int64_t step_at(int64_t index) const {
    return direction.reverse ? call.last_step - 1 - index : call.first_step + index;
  }

  void run() {
    for (int64_t b = part.row_begin; b < part.row_end; ++b) {
      current[b] = initial_h(b);
      if constexpr (kCells > 0) c_current[b] = initial_c(b);
    }
    if (drops_state) drop_initial();
    if constexpr (kFuses)
      if (fuses()) {
        const int64_t steps = call.last_step - call.first_step;
        for (int64_t index = 0; index < steps; index += kTogether)
          for (int64_t b = part.row_begin; b < part.row_end; ++b)
            fused_steps(b, index, index + kTogether < steps ? index + kTogether : steps);
        return finish();
      }
    run_from(0);
  }

  // All steps from the index-th on.
  void run_from(int64_t index) {
    const int64_t steps = call.last_step - call.first_step;
    Watch watch;
    for (int64_t chunk = 0; index < steps; index += scratch.chunk_steps, ++chunk) {
      if constexpr (N::kMultiplies)
        if (part.parts > 1 && work.barrier->leaves(chunk, watch.held_up_lately())) return leave_to_first(index);
      const int64_t end = index + scratch.chunk_steps < steps ? index + scratch.chunk_steps : steps;
      input_product(index, end);
      T* gates = input_gates;
      for (int64_t i = index; i < end; ++i) gates += step(step_at(i), gates) * own;
    }
    if (!gates_only) finish();
  }

  // On a busy machine: the first of the threads that share rows does the rest of their work.
  [[gnu::noinline]] void leave_to_first(int64_t index) {
    const Part whole{part.direction, part.row_begin, part.row_end, 0, 1};
    if (part.part == 0) Forward(call, direction, work, whole, scratch, gates_only).run_from(index);
    work.barrier->wait(part.parts);
  }

  // ---- the input part of the gates for the active rows of steps [begin, end), in processing order ----

  // Calls function(t, b) for these rows.
  template <class Function>
  void for_each_active(int64_t begin, int64_t end, Function function) const {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = step_at(i), here = call.batch_at(t);
      for (int64_t b = part.row_begin; b < part.row_end && b < here; ++b)
        if (call.is_active(t, b)) function(t, b);
    }
  }

  // Uses the caller's product: only reorders its values.
  void place_input_gates(int64_t begin, int64_t end) const {
    T* to = input_gates;
    for_each_active(begin, end, [&](int64_t t, int64_t b) {
      const T* from = at<const T>(direction.input_gates, call.offset(direction.input_gates, t, b));
      for (int64_t unit = units.begin; unit < units.end; unit += kLanes)
        for (int gate = 0; gate < kGates; ++gate)
          store_full(to + place(unit, gate), load<V>(from + gate * hidden + unit, lanes_left<V>(hidden - unit)));
      to += own;
    });
  }

  // The input of row b at step t as an operand: as it lies, or converted into row `slot` of scratch.
  const O* input_operand(int64_t t, int64_t b, [[maybe_unused]] int64_t slot) const {
    const S* from = at<const S>(direction.input, call.offset(direction.input, t, b));
    if constexpr (kOutputIsOperand) return from;
    else {
      O* to = static_cast<O*>(scratch.converted) + slot * call.shape.input;
      for (int64_t k = 0; k < call.shape.input; k += kLanes) {
        const int n = lanes_left<V>(call.shape.input - k);
        store(to + k, load<V>(from + k, n), n);
      }
      return to;
    }
  }

  void input_product(int64_t begin, int64_t end) {
    if (direction.input_gates.data) return place_input_gates(begin, end);
    int64_t count = 0;
    for_each_active(begin, end, [&](int64_t t, int64_t b) {
      input_rows[count] = input_operand(t, b, count);
      ++count;
    });
    if (count == 0 || units.begin >= units.end) return;
    const int64_t panel0 = units.begin / Input::kUnits;
    const typename Input::Row* const operands = Input::operands(input_rows, count, call.shape.input, scratch.quantised);
    for (int64_t panel = 0; panel < own / Input::kColumns; ++panel)
      Input::run(
          work.input, panel0 + panel, operands, count, input_gates + panel * Input::kColumns, own, panel0 + panel + 1);
  }

  // Where the input part of a unit's gate lies in a row of scratch.gates.
  int64_t place(int64_t unit, int gate) const {
    const int64_t own_unit = unit - units.begin;
    return own_unit / Input::kUnits * Input::kColumns +
           (gate * Input::kGroups + own_unit % Input::kUnits / kLanes) * kLanes;
  }

  // ---- one step; `gates`: the input part for its active rows; returns their number ----

  int64_t step(int64_t t, T* gates) {
    const int64_t here = call.batch_at(t);
    int64_t count = 0;
    bool all_zero = true;  // no row has a state, so the product is its bias
    for (int64_t b = part.row_begin; b < part.row_end; ++b) {
      if (b < here && call.is_active(t, b)) {
        locate_state(t, b);
        operand[count] = drops_state ? entering_before(t, b) : current[b];
        all_zero = all_zero && operand[count] == work.zeros;
        rows[count++] = b;
      } else if (b < here && !gates_only) {
        S* out = at<S>(direction.output, call.offset(direction.output, t, b));
        std::memset(static_cast<void*>(out + out_units.begin), 0, (out_units.end - out_units.begin) * sizeof(S));
      }
    }
    // When gates are rebuilt, each part that shares rows has converted only its own units of the states: wait for the
    // others.
    if (N::kMultiplies && !kOutputIsOperand && gates_only) work.barrier->wait(part.parts);
    if constexpr (N::kMultiplies) {
      for_each_tile<First>(
          work.first, units, operand, count, tile, scratch.quantised,
          [&](int64_t panel, int64_t row0, int64_t size) {
            if constexpr (kTrains)
              if (noise.on) return noisy_first_tile(t, panel, row0, size, gates);
            // A call for each vector would cost as much as the formulas of a single gate.
            if constexpr (First::kGates == 1) flattened_tile(t, panel, row0, size, gates);
            else plain_tile(t, panel, row0, size, gates);
            if constexpr (kTwoPasses) second_pass(t, panel, row0, size);
          },
          t & 1, all_zero);
    } else {
      for (int64_t row = 0; row < count; ++row) {
        if (noise.on) {
          noisy_row(t, rows[row], gates + row * own);
          continue;
        }
        if constexpr (kAlone) elementwise_row(t, rows[row], gates + row * own);
        else plain_row(t, rows[row], gates + row * own);
      }
    }
    if constexpr (N::kTwoPhases) {
      work.barrier->wait(part.parts);
      for (int64_t row = 0; row < count; ++row)
        inner_operand[row] = static_cast<const O*>(work.inner) + rows[row] * hidden;
      for_each_tile<Second>(
          work.second, out_units, inner_operand, count, tile, scratch.quantised,
          [&](int64_t panel, int64_t row0, int64_t size) {
            if constexpr (kTrains)
              if (noise.on) return noisy_second_tile(t, panel, row0, size, gates);
            for (int64_t row = 0; row < size; ++row) {
              const int64_t b = rows[row0 + row];
              for (int group = 0; group < Second::kGroups; ++group) {
                const int64_t unit = panel * Second::kUnits + group * kLanes;
                if (unit >= out_units.end) break;
                second_phase(t, b, unit, group, tile + row * Second::kColumns, gates + (row0 + row) * own);
              }
            }
          },
          t & 1);
    }
    for (int64_t row = 0; row < count && !gates_only; ++row) {
      const int64_t b = rows[row];
      if constexpr (kOutputIsOperand) current[b] = at<const O>(direction.output, call.offset(direction.output, t, b));
      else current[b] = state_buffer(t, b);
      if constexpr (kCells > 0) c_current[b] = static_cast<const T*>(work.cell) + b * kCells * hidden;
    }
    if constexpr (N::kMultiplies) work.barrier->wait(part.parts);
    return count;
  }

  // Points current[b] and c_current[b] at the state that row b's step t starts from.
  void locate_state(int64_t t, int64_t b) {
    const Origin origin = call.origin(direction.reverse, t, b);
    if (origin == Origin::kInitial) {
      current[b] = initial_h(b);
      if constexpr (kCells > 0) c_current[b] = initial_c(b);
    } else if (origin == Origin::kZero) {
      current[b] = static_cast<const O*>(work.zeros);
      if constexpr (kCells > 0) c_current[b] = static_cast<const T*>(work.zeros);
    } else if (gates_only) {
      const int64_t before = direction.reverse ? t + 1 : t - 1;
      const S* saved = at<const S>(direction.output, call.offset(direction.output, before, b));
      if constexpr (kOutputIsOperand) {
        current[b] = saved;
      } else {
        // Each part converts its own units; step() waits for all before the product reads the row.
        O* to = state_buffer(t, b);
        for (int64_t k = 0; k < width; k += kLanes) {
          const int n = lanes_left<V>(width - k);
          if (k >= out_units.begin && k < out_units.end) store(to + k, load<V>(saved + k, n), n);
        }
        current[b] = to;
      }
      if constexpr (kCells > 0) c_current[b] = at<const T>(direction.cells, call.offset(direction.cells, before, b));
    }
  }

  void load_cells(int64_t b, int64_t unit, int n, Unit<V, Cell>& u) const {
    if constexpr (kCells > 0)
      for (int value = 0; value < kCells; ++value) u.c_prev[value] = load<V>(c_current[b] + value * hidden + unit, n);
  }
  void store_cells(int64_t t, int64_t b, int64_t unit, int n, const Unit<V, Cell>& u) const {
    if constexpr (kCells > 0) {
      if (gates_only) return;
      for (int value = 0; value < kCells; ++value) {
        store(static_cast<T*>(work.cell) + (b * kCells + value) * hidden + unit, u.c[value], n);
        if (direction.cells.data)
          store(at<T>(direction.cells, call.offset(direction.cells, t, b)) + value * hidden + unit, u.c[value], n);
      }
    }
  }

  // ---- cells without a product and with h as their only value: the states of a row pass through registers ----

  static constexpr bool kAlone =
      !N::kMultiplies && kGates == 1 && kCells == 0 && N::kSaved == 0 && Cell::kUnitWeights == 1;
  // Whether the input part can be made beside the recurrence, a few steps at a time, instead of being stored and read.
  static constexpr bool kFuses = kAlone && kTrains && !std::is_same_v<O, BFloat16>;
  static constexpr int kTogether = Isa::kAccumulators < 12 ? 2 : 4;
  // Input weights that stay in L1 beside the states.
  static constexpr int64_t kFusedBytes = 16 << 10;
  bool fuses() const {
    return !noise.on && work.input.panels && !direction.input_gates.data &&
           call.shape.input * hidden * static_cast<int64_t>(sizeof(O)) <= kFusedBytes;
  }

  template <int kSteps>
  using Steps = RowSteps<S, O, kSteps>;
  template <int kSteps>
  void advance(const Steps<kSteps>& steps) const {
    advance_row<Isa, Cell, S, Input, kFuses>(
        steps, work.input.panels, direction.weights.unit, call.shape.input, hidden, units, clips);
  }

  // Steps [index, end) of row b.
  void fused_steps(int64_t b, int64_t index, int64_t end) {
    while (index < end) {
      const int64_t t = step_at(index);
      if (b >= call.batch_at(t)) {
        ++index;
        continue;
      }
      if (!call.is_active(t, b)) {
        S* out = at<S>(direction.output, call.offset(direction.output, t, b));
        std::memset(static_cast<void*>(out + units.begin), 0, (units.end - units.begin) * sizeof(S));
        ++index;
        continue;
      }
      locate_state(t, b);
      const auto follows = [&](int64_t next) {
        return b < call.batch_at(next) && call.is_active(next, b) &&
               call.origin(direction.reverse, next, b) == Origin::kStep;
      };
      int64_t last = index + 1;
      while (last < end && follows(step_at(last))) ++last;
      if (last - index == kTogether) {
        advance(fused<kTogether>(index, b));
        index = last;
      } else {
        advance(fused<1>(index++, b));
      }
    }
  }
  template <int kSteps>
  Steps<kSteps> fused(int64_t index, int64_t b) {
    Steps<kSteps> steps{};
    for (int i = 0; i < kSteps; ++i) {
      const int64_t t = step_at(index + i);
      steps.input[i] = input_operand(t, b, i);
      steps.output[i] = at<S>(direction.output, call.offset(direction.output, t, b));
    }
    pass_on(step_at(index + kSteps - 1), b, steps);
    return steps;
  }
  void elementwise_row(int64_t t, int64_t b, const T* gates) {
    Steps<1> steps{};
    steps.gates[0] = gates;
    steps.output[0] = at<S>(direction.output, call.offset(direction.output, t, b));
    pass_on(t, b, steps);
    advance(steps);
  }
  // Reads current[b] and points it at the state after step t.
  template <int kSteps>
  void pass_on(int64_t t, int64_t b, Steps<kSteps>& steps) {
    steps.before = current[b];
    if constexpr (kOutputIsOperand) current[b] = steps.output[kSteps - 1];
    else current[b] = steps.after = state_buffer(t, b);
  }

  // Flattened, because a call for each vector would cost more than the formulas.
  [[gnu::noinline, gnu::flatten]] void plain_row(int64_t t, int64_t b, T* input) {
    for (int64_t unit = units.begin; unit < units.end; unit += kLanes) first_phase(t, b, unit, 0, nullptr, input);
  }

  void plain_tile(int64_t t, int64_t panel, int64_t row0, int64_t size, T* gates) {
    for (int64_t row = 0; row < size; ++row) {
      const int64_t b = rows[row0 + row];
      for (int group = 0; group < First::kGroups; ++group) {
        const int64_t unit = panel * First::kUnits + group * kLanes;
        if (unit >= units.end) break;
        first_phase(t, b, unit, group, tile + row * First::kColumns, gates + (row0 + row) * own);
      }
    }
  }
  [[gnu::noinline, gnu::flatten]] void flattened_tile(int64_t t, int64_t panel, int64_t row0, int64_t size, T* gates) {
    plain_tile(t, panel, row0, size, gates);
  }

  // Tiles and rows with noise. Not inlined, so that the code without noise stays as it is.
  using Words = NoiseSource<V>;
  [[gnu::noinline]] void noisy_first_tile(int64_t t, int64_t panel, int64_t row0, int64_t size, T* gates) {
    const auto pointwise = [&](int64_t row, int64_t unit, int group, const Words& words) {
      first_phase(t, rows[row0 + row], unit, group, tile + row * First::kColumns, gates + (row0 + row) * own, &words);
    };
    noisy_tile<First>(t, panel, row0, size, units.end, pointwise);
  }
  [[gnu::noinline]] void noisy_second_tile(int64_t t, int64_t panel, int64_t row0, int64_t size, const T* gates) {
    const auto pointwise = [&](int64_t row, int64_t unit, int group, const Words& words) {
      second_phase(t, rows[row0 + row], unit, group, tile + row * Second::kColumns, gates + (row0 + row) * own, &words);
    };
    noisy_tile<Second>(t, panel, row0, size, out_units.end, pointwise);
  }
  template <class P, class Pointwise>
  void noisy_tile(int64_t t, int64_t panel, int64_t row0, int64_t size, int64_t end, Pointwise pointwise) {
    const auto unit_of = [&](int64_t i) { return panel * P::kUnits + i % P::kGroups * kLanes; };
    const auto place = [&](int64_t i) {
      return noise_place<V>(part.direction, t, rows[row0 + i / P::kGroups], unit_of(i));
    };
    drawer.for_each(size * P::kGroups, place, [&](int64_t i, const Words& words) {
      if (unit_of(i) < end) pointwise(i / P::kGroups, unit_of(i), static_cast<int>(i % P::kGroups), words);
    });
  }
  [[gnu::noinline, gnu::flatten]] void noisy_row(int64_t t, int64_t b, T* input) {
    const auto unit_of = [&](int64_t i) { return units.begin + i * kLanes; };
    const auto place = [&](int64_t i) { return noise_place<V>(part.direction, t, b, unit_of(i)); };
    drawer.for_each((units.end - units.begin + kLanes - 1) / kLanes, place,
        [&](int64_t i, const Words& words) { first_phase(t, b, unit_of(i), 0, nullptr, input, &words); });
  }

  // `words`: a pointer to the words of noise, or nothing.
  template <class... Pointer>
  void first_phase(int64_t t, int64_t b, int64_t unit, [[maybe_unused]] int group, [[maybe_unused]] T* sums, T* input,
      Pointer... words) {
    constexpr bool kNoise = sizeof...(words) > 0;
    const int n = lanes_left<V>(hidden - unit);
    Unit<V, Cell> u;
#pragma GCC unroll 4  // GCC 12 puts the values into memory otherwise
    for (int gate = 0; gate < First::kGates; ++gate) {
      u.input[gate] = load_full<V>(input + place(unit, gate));
      if constexpr (N::kMultiplies) u.recurrent[gate] = load_full<V>(sums + (gate * First::kGroups + group) * kLanes);
    }
    if constexpr ((Cell::kReadsHidden && !kTwoPasses) || (kNoise && !N::kTwoPhases))
      u.h_prev = load<V>(current[b] + unit, n);
    load_cells(b, unit, n, u);
    load_unit_weights<S>(direction.weights, hidden, unit, n, u);
    if constexpr (kNoise) noise_at<Cell>(noise, mask, width, b, unit, *words...).forward0(u, clips);
    else if constexpr (kTwoPasses) Cell::begin(u, clips);
    else Cell::forward0(u, clips);
    store_cells(t, b, unit, n, u);
    if constexpr (kTwoPasses) {
#pragma GCC unroll 4
      for (int value = kFirstPassed; value < N::kSaved; ++value)
        store_full(passed_on(sums, value, group), u.saved[value]);
      return;
    }
    save<0, N::kFirstSaved>(t, b, unit, n, u);
    if constexpr (N::kTwoPhases) {
      store_operand<S>(static_cast<O*>(work.inner) + b * hidden + unit, u.inner, n);
      // Carried values overwrite input parts of gates that are no longer needed.
      if constexpr (N::kCarried > 0)
        for (int value = 0; value < N::kCarried; ++value) store_full(input + place(unit, value), u.carried[value]);
    } else {
      finish_unit<kNoise>(t, b, unit, n, u.h);
    }
  }

  // Where a saved value waits for the second pass: in place of a sum.
  static T* passed_on(T* sums, int value, int group) {
    static_assert(!kTwoPasses || N::kSaved - kFirstPassed <= First::kGates);
    return sums + ((value - kFirstPassed) * First::kGroups + group) * kLanes;
  }
  void second_pass(int64_t t, int64_t panel, int64_t row0, int64_t size) {
    for (int64_t row = 0; row < size; ++row) {
      const int64_t b = rows[row0 + row];
      for (int group = 0; group < First::kGroups; ++group) {
        const int64_t unit = panel * First::kUnits + group * kLanes;
        if (unit >= units.end) break;
        const int n = lanes_left<V>(hidden - unit);
        Unit<V, Cell> u;
#pragma GCC unroll 4
        for (int value = kFirstPassed; value < N::kSaved; ++value)
          u.saved[value] = load_full<V>(passed_on(tile + row * First::kColumns, value, group));
        if constexpr (Cell::kReadsHidden) u.h_prev = load<V>(current[b] + unit, n);
        if constexpr (kCells > 0)
          for (int value = 0; value < kCells; ++value)
            u.c[value] = load<V>(static_cast<const T*>(work.cell) + (b * kCells + value) * hidden + unit, n);
        finish_unit<false>(t, b, unit, n, Cell::output(u));
      }
    }
  }

  template <class... Pointer>
  void second_phase(int64_t t, int64_t b, int64_t unit, int group, const T* sums, const T* input, Pointer... words) {
    constexpr bool kNoise = sizeof...(words) > 0;
    const int n = lanes_left<V>(width - unit);
    Unit<V, Cell> u;
    const auto sum = [&](int gate) { return load_full<V>(sums + (gate * Second::kGroups + group) * kLanes); };
    if constexpr (Cell::kReadsHidden || kNoise) u.h_prev = load<V>(current[b] + unit, n);
    if constexpr (N::kProjects) {
      u.projected = sum(0);
    } else {
      constexpr int kBefore = N::kFirstGates;
#pragma GCC unroll 4
      for (int gate = kBefore; gate < kGates; ++gate) {
        u.input[gate] = load_full<V>(input + place(unit, gate));
        u.recurrent[gate] = sum(gate - kBefore);
      }
      if constexpr (N::kCarried > 0)
        for (int value = 0; value < N::kCarried; ++value) u.carried[value] = load_full<V>(input + place(unit, value));
      load_unit_weights<S>(direction.weights, hidden, unit, n, u);
    }
    if constexpr (kNoise) noise_at<Cell>(noise, mask, width, b, unit, *words...).forward1(u, clips);
    else Cell::forward1(u, clips);
    save<N::kFirstSaved, N::kSaved>(t, b, unit, n, u);
    finish_unit<kNoise>(t, b, unit, n, u.h);
  }

  template <int kBegin, int kEnd>
  void save(int64_t t, int64_t b, int64_t unit, int n, const Unit<V, Cell>& u) {
    if constexpr (kTrains && kBegin < kEnd) {
      if (!direction.gates.data) return;
      const int64_t offset =
          gates_only ? call.range_row(t, b) * direction.gates.row_stride : call.offset(direction.gates, t, b);
      S* to = at<S>(direction.gates, offset) + unit;
      for (int value = kBegin; value < kEnd; ++value) store(to + value * hidden, u.saved[value], n);
    }
  }

  template <bool kNoise>
  void finish_unit(int64_t t, int64_t b, int64_t unit, int n, V h) {
    if (gates_only) return;
    S* out = at<S>(direction.output, call.offset(direction.output, t, b)) + unit;
    store(out, h, n);
    if constexpr (!kOutputIsOperand) store(state_buffer(t, b) + unit, load<V>(out, n), n);
    if constexpr (kDropsInProduct || (kNoise && N::kMultiplies))
      if (drops_state) [[unlikely]]
        store_operand<S>(entering(t, b) + unit, load<V>(out, n) * load<V>(mask + b * width + unit, n), n);
  }

  void finish() {
    for (int64_t b = part.row_begin; b < part.row_end; ++b) {
      for (int64_t unit = out_units.begin; unit < out_units.end; unit += kLanes) {
        const int n = lanes_left<V>(width - unit);
        store(static_cast<S*>(direction.h_n) + b * width + unit, load<V>(current[b] + unit, n), n);
      }
      if constexpr (kCells > 0)
        for (int64_t unit = units.begin; unit < units.end; unit += kLanes) {
          const int n = lanes_left<V>(hidden - unit);
          for (int64_t value = 0; value < kCells; ++value)
            store(static_cast<T*>(direction.c_n) + (b * kCells + value) * hidden + unit,
                load<V>(c_current[b] + value * hidden + unit, n), n);
        }
    }
  }

  Forward(const Call& c, const ForwardDirection& d, const DirectionWork& w, const Part& p, const Scratch& s, bool g)
      : call(c), direction(d), work(w), part(p), scratch(s), gates_only(g) {}
};

}  // namespace fr::cpu
