// Backpropagation through time on the CPU: one thread's part of a layer, over one range of steps. It computes the
// gradients of the gates and of the states; those of weights, biases and input follow from them (outer.h,
// input_gradient.h). Called through the tables in kernels.h.
//
// The loop is software-pipelined: step t first finishes the product of the step processed before, d_recurrent times the
// recurrent weights, which completes d_h unit by unit, and takes the cell's gradient on the same tile. The last step's
// product comes after the loop. A cell without a product leaves d_h complete after each step.
//
// Sync: parts that share rows (units split) wait at the barrier after each phase. Parts with rows of their own never
// wait.
#pragma once

#include <limits>

#include "forward.h"

namespace fr::cpu {

template <class Isa, class Cell, class S>
struct Backward {
  using T = StateOf<S>;
  using O = Operand<Isa, S>;
  using V = Vec<T, Isa>;
  using Transposed = Product<Isa, S, 1>;
  using N = Numbers<Cell>;
  static constexpr int kLanes = V::kLanes, kGates = N::kGates, kCells = Cell::kCells;

  static void pack(const DirectionWork& work, int index, int count) {
    if constexpr (N::kMultiplies) pack_share<Transposed>(work.first_transposed, index, count);
    pack_share<Transposed>(work.input_transposed, index, count);
    if constexpr (N::kTwoPhases) pack_share<Transposed>(work.second_transposed, index, count);
  }

  static void run(const Call& call, const GradientDirection& direction, const DirectionWork& work, const Part& part,
      const Scratch& scratch) {
    Backward self{call, direction, work, part, scratch};
    const TileScope<Isa> tiles;
    self.run();
  }

 private:
  const Call& call;
  const GradientDirection& direction;
  const DirectionWork& work;
  const Part& part;
  const Scratch& scratch;

  const int64_t batch = call.shape.batch, hidden = call.shape.hidden, width = call.shape.width();
  const UnitRange units = unit_range(part, hidden, kLanes);     // of H
  const UnitRange out_units = unit_range(part, width, kLanes);  // of R
  T* const tile = static_cast<T*>(scratch.tile);
  // operands of the pending product, still to be added to d_h
  const O** const pending = reinterpret_cast<const O**>(scratch.pointers);
  const O** const second = reinterpret_cast<const O**>(scratch.pointers + batch);
  int64_t* const pending_rows = scratch.indices;
  int64_t* const rows = scratch.indices + batch;
  int64_t pending_count = 0;
  int64_t pending_step = 0;
  const Clips<V> clips{V(T(call.options.cell_clip)), V(T(call.options.proj_clip)), call.options.cell_clip > 0,
      call.options.proj_clip > 0};
  // If the mask acts only on a product's operand, the pointwise part needs no noise code for it.
  const NoiseParams noise{call.options.noise,
      N::kMultiplies && !UnitNoise<V>::template kEntersHere<Cell> ? nullptr : direction.weights.state_mask};
  const Drawer<V> drawer{noise};
  const T* const mask = static_cast<const T*>(direction.weights.state_mask);
  const bool clips_gradient = call.options.gradient_clip <= std::numeric_limits<double>::max();
  const bool cuts_gradient = call.options.gradient_clip == 0;
  const V gradient_clip{T(call.options.gradient_clip)};

  template <class Element>
  const Element* in_all(const Rows& rows, int64_t t, int64_t b) const {
    return static_cast<const Element*>(rows.data) + call.offset(rows, t, b);
  }
  T* d_h(int64_t b) const { return static_cast<T*>(work.d_h) + b * width; }
  T* d_c(int64_t b) const { return static_cast<T*>(work.d_c) + b * kCells * hidden; }

  void run() { run_from(0); }

  // All steps from the index-th on.
  void run_from(int64_t index) {
    constexpr int64_t kBetween = 64;  // steps between looks at the watch
    const int64_t steps = call.last_step - call.first_step;
    Watch watch;
    for (int64_t looks = 0; index < steps; ++index) {
      if constexpr (N::kMultiplies)
        if (part.parts > 1 && index % kBetween == 0 && work.barrier->leaves(looks++, watch.held_up_lately()))
          return leave_to_first(index);
      step(direction.reverse ? call.first_step + index : call.last_step - 1 - index);
    }
    if (N::kMultiplies && work.wants_initial)
      for_each_panel(false, [this](int64_t panel, int64_t next) { add_pending(panel, next); });
  }

  // On a busy machine: the first of the threads that share rows does the rest of their work.
  [[gnu::noinline]] void leave_to_first(int64_t index) {
    const Part whole{part.direction, part.row_begin, part.row_end, 0, 1};
    if (part.part == 0) {
      Backward alone(call, direction, work, whole, scratch);
      alone.pending_count = pending_count, alone.pending_step = pending_step;
      alone.run_from(index);
    }
    work.barrier->wait(part.parts);
  }

  // ---- d_h += d_recurrent W_hh of the step processed before, for one panel of units; `next`: the panel after it ----

  void add_pending(int64_t panel, int64_t next) {
    for (int64_t row0 = 0; row0 < pending_count; row0 += Transposed::kBlockRows) {
      const int64_t size =
          pending_count - row0 < Transposed::kBlockRows ? pending_count - row0 : Transposed::kBlockRows;
      Transposed::run(work.first_transposed, panel, pending + row0, size, tile, Transposed::kColumns, next);
      for (int64_t row = 0; row < size; ++row) {
        const int64_t b = pending_rows[row0 + row];
        // rows reset to zero are not pending, so a row that is cut here was reset to the initial state
        const bool to_initial = call.is_cut(direction.reverse, pending_step, b);
        for (int group = 0; group < Transposed::kGroups; ++group) {
          const int64_t unit = panel * Transposed::kUnits + group * kLanes;
          if (unit >= out_units.end) break;
          const int n = lanes_left<V>(width - unit);
          V product = load_full<V>(tile + row * Transposed::kColumns + group * kLanes);
          if (mask) product = product * load<V>(mask + b * width + unit, n);
          V sum = load<V>(d_h(b) + unit, n) + product;
          if (clips_gradient) sum = clipped(sum, gradient_clip);
          if (to_initial && work.d_h0_reset) {
            T* d_h0 = static_cast<T*>(work.d_h0_reset) + b * width + unit;
            store(d_h0, load<V>(d_h0, n) + sum, n);
          }
          store(d_h(b) + unit, to_initial ? V(0) : sum, n);
        }
      }
    }
  }

  // Calls function(panel, next panel) for the panels of out_units, in alternating order as in for_each_tile.
  template <class Function>
  void for_each_panel(bool back, Function function) const {
    if (out_units.begin >= out_units.end) return;
    const int64_t begin = out_units.begin / Transposed::kUnits, end = Transposed::panels(out_units.end);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t panel = back ? begin + end - 1 - index : index;
      function(panel, index + 1 == end ? panel : back ? panel - 1 : panel + 1);
    }
  }

  // ---- one step ----

  void step(int64_t t) {
    const int64_t here = call.batch_at(t);
    int64_t count = 0;
    for (int64_t b = part.row_begin; b < part.row_end && b < here; ++b)
      if (call.is_active(t, b)) rows[count++] = b;
    if constexpr (N::kMultiplies) {
      for_each_panel(t & 1, [&](int64_t panel, int64_t next) {
        add_pending(panel, next);
        if (noise.on) return noisy_first_phase(t, panel, count);
        const int64_t begin = panel * Transposed::kUnits, end = begin + Transposed::kUnits;
        for (int64_t row = 0; row < count; ++row) {
          const Place place = at_row(t, rows[row]);
          for (int64_t unit = begin; unit < end && unit < out_units.end; unit += kLanes) first_phase(place, unit);
        }
      });
    } else {  // whole rows: memory delivers them faster than panels
      for (int64_t row = 0; row < count; ++row) {
        const Place place = at_row(t, rows[row]);
        if (noise.on) {
          noisy_row(t, place);
          continue;
        }
        for (int64_t unit = out_units.begin; unit < out_units.end; unit += kLanes) first_phase(place, unit);
      }
    }
    if constexpr (N::kTwoPhases) {
      work.barrier->wait(part.parts);
      for (int64_t row = 0; row < count; ++row) second[row] = second_operand(gradients(t, rows[row]));
      for_each_tile<Transposed>(
          work.second_transposed, units, second, count, tile, nullptr,
          [&](int64_t panel, int64_t row0, int64_t size) {
            if (noise.on) return noisy_second_phase(t, panel, row0, size);
            for (int64_t row = 0; row < size; ++row)
              for (int group = 0; group < Transposed::kGroups; ++group) {
                const int64_t unit = panel * Transposed::kUnits + group * kLanes;
                if (unit >= units.end) break;
                second_phase(at_row(t, rows[row0 + row]), unit, tile + row * Transposed::kColumns + group * kLanes);
              }
          },
          t & 1);
    }
    if constexpr (N::kMultiplies) {
      // Rows whose state was cut to zero before this step pass no gradient on; with a gradient clip of 0 no row does.
      pending_count = 0;
      pending_step = t;
      for (int64_t row = 0; row < count; ++row) {
        if (cuts_gradient || call.origin(direction.reverse, t, rows[row]) == Origin::kZero) continue;
        pending[pending_count] = gradients(t, rows[row]);
        pending_rows[pending_count++] = rows[row];
      }
      work.barrier->wait(part.parts);
    }
  }

  // The row's gradients, which begin with the operand of the first product.
  O* gradients(int64_t t, int64_t b) const {
    return static_cast<O*>(work.gradients) + call.range_row(t, b) * work.columns.stride;
  }
  O* second_operand(O* gradients) const {
    return gradients + (N::kProjects ? work.columns.projected : work.columns.gates + N::kFirstGates * hidden);
  }

  // Where a row's values of one step lie, found once for all its units.
  struct Place {
    int64_t b;
    Origin origin;
    bool cut;
    const S *d_output, *output, *h_prev, *gates;  // d_output, h_prev: null if zero
    const T *cells, *c_prev, *d_cells;            // c_prev, d_cells: likewise
    O* gradients;
    T* d_h;
  };
  Place at_row(int64_t t, int64_t b) const {
    Place row{};
    const int64_t before = direction.reverse ? t + 1 : t - 1;
    row.b = b, row.origin = call.origin(direction.reverse, t, b), row.cut = call.is_cut(direction.reverse, t, b);
    const bool steps = row.origin == Origin::kStep, starts = row.origin == Origin::kInitial;
    if (direction.d_output.data) row.d_output = in_all<S>(direction.d_output, t, b);
    if constexpr (Cell::kReadsOutput || N::kProjects) row.output = in_all<S>(direction.output, t, b);
    if constexpr (Cell::kReadsHidden) {
      if (steps) row.h_prev = in_all<S>(direction.output, before, b);
      else if (starts && direction.h0) row.h_prev = static_cast<const S*>(direction.h0) + b * width;
    }
    if constexpr (N::kSaved > 0) {
      row.gates = static_cast<const S*>(work.rebuilt_gates) + call.range_row(t, b) * N::kSaved * hidden;
      if (direction.gates.data) row.gates = in_all<S>(direction.gates, t, b);
    }
    if constexpr (kCells > 0) {
      row.cells = in_all<T>(direction.cells, t, b);
      if (steps) row.c_prev = in_all<T>(direction.cells, before, b);
      else if (starts && direction.c0) row.c_prev = static_cast<const T*>(direction.c0) + b * kCells * hidden;
      if (direction.d_cells.data) row.d_cells = in_all<T>(direction.d_cells, t, b);
    }
    row.gradients = gradients(t, b), row.d_h = d_h(b);
    return row;
  }

  // The phases with noise. Not inlined, so that the code without noise stays as it is.
  using Words = NoiseSource<V>;
  [[gnu::noinline]] void noisy_first_phase(int64_t t, int64_t panel, int64_t count) {
    noisy_panel(t, panel, 0, count, out_units.end,
        [&](const Place& row, int64_t, int64_t unit, const Words& words) { first_phase(row, unit, &words); });
  }
  [[gnu::noinline]] void noisy_second_phase(int64_t t, int64_t panel, int64_t row0, int64_t size) {
    noisy_panel(t, panel, row0, size, units.end, [&](const Place& row, int64_t i, int64_t unit, const Words& words) {
      second_phase(row, unit, tile + i * kLanes, &words);
    });
  }
  [[gnu::noinline, gnu::flatten]] void noisy_row(int64_t t, const Place& row) {
    const auto unit_of = [&](int64_t i) { return out_units.begin + i * kLanes; };
    const auto place = [&](int64_t i) { return noise_place<V>(part.direction, t, row.b, unit_of(i)); };
    drawer.for_each((out_units.end - out_units.begin + kLanes - 1) / kLanes, place,
        [&](int64_t i, const Words& words) { first_phase(row, unit_of(i), &words); });
  }
  // Calls pointwise(row, i, unit, words), i numbering the vectors of the tile.
  template <class Pointwise>
  void noisy_panel(int64_t t, int64_t panel, int64_t row0, int64_t size, int64_t end, Pointwise pointwise) const {
    constexpr int kGroups = Transposed::kGroups;
    static_assert(kGroups * kLanes == Transposed::kColumns);
    Place row{};
    const auto unit_of = [&](int64_t i) { return panel * Transposed::kUnits + i % kGroups * kLanes; };
    const auto place = [&](int64_t i) {
      return noise_place<V>(part.direction, t, rows[row0 + i / kGroups], unit_of(i));
    };
    drawer.for_each(size * kGroups, place, [&](int64_t i, const Words& words) {
      if (i % kGroups == 0) row = at_row(t, rows[row0 + i / kGroups]);
      if (unit_of(i) < end) pointwise(row, i, unit_of(i), words);
    });
  }

  // Backward of the last phase, over R. With one phase this is a unit's whole gradient. `words`: a pointer to the words
  // of noise, or nothing.
  template <class... Pointer>
  void first_phase(const Place& row, int64_t unit, Pointer... words) {
    constexpr bool kNoise = sizeof...(words) > 0;
    const int n = lanes_left<V>(width - unit);
    Unit<V, Cell> u;
    u.d_h = load<V>(row.d_h + unit, n);
    if (row.d_output) u.d_h = u.d_h + load<V>(row.d_output + unit, n);
    if constexpr (!N::kProjects) load_previous(row, unit, n, u);
    if constexpr (Cell::kReadsOutput || N::kProjects) u.h = load<V>(row.output + unit, n);
    if constexpr (!N::kProjects) {
      load_saved(row, unit, n, u);
      load_unit_weights<S>(direction.weights, hidden, unit, n, u);
    }
    if constexpr (!N::kTwoPhases) {
      load_cells(row, unit, n, u);
      if constexpr (kNoise) noise_at<Cell>(noise, mask, width, row.b, unit, *words...).backward0(u, clips);
      else Cell::backward0(u, clips);
      store_gates<0, kGates>(row, unit, n, u);
      pass_cells_on(row, unit, n, u);
    } else {
      if constexpr (kNoise) noise_at<Cell>(noise, mask, width, row.b, unit, *words...).backward1(u, clips);
      else Cell::backward1(u, clips);
      if constexpr (N::kProjects) store(second_operand(row.gradients) + unit, u.d_projected, n);
      store_gates<N::kFirstGradients, kGates>(row, unit, n, u);
    }
    if constexpr (!N::kProjects) add_unit_gradients(row.b, unit, n, u);
    pass_hidden_on(row, unit, n, u.d_h_prev);
  }

  // Backward of the first of two phases, over H, once d_inner is known.
  template <class... Pointer>
  void second_phase(const Place& row, int64_t unit, const T* sums, Pointer... words) {
    constexpr bool kNoise = sizeof...(words) > 0;
    const int n = lanes_left<V>(hidden - unit);
    Unit<V, Cell> u;
    u.d_inner = load_full<V>(sums);
    load_saved(row, unit, n, u);
    load_previous(row, unit, n, u);
    load_cells(row, unit, n, u);
    load_unit_weights<S>(direction.weights, hidden, unit, n, u);
    if constexpr (!N::kProjects) u.d_h_prev = load<V>(row.d_h + unit, n);
    if constexpr (kNoise) noise_at<Cell>(noise, mask, width, row.b, unit, *words...).backward0(u, clips);
    else Cell::backward0(u, clips);
    store_operand<S>(row.gradients + work.columns.inner + unit, u.inner, n);
    store_gates<0, N::kFirstGradients>(row, unit, n, u);
    add_unit_gradients(row.b, unit, n, u);
    pass_cells_on(row, unit, n, u);
    if constexpr (!N::kProjects) pass_hidden_on(row, unit, n, u.d_h_prev);
  }

  // ---- loads ----

  void load_previous(const Place& row, int64_t unit, int n, Unit<V, Cell>& u) const {
    if constexpr (Cell::kReadsHidden) u.h_prev = row.h_prev ? load<V>(row.h_prev + unit, n) : V(0);
  }
  void load_saved(const Place& row, int64_t unit, int n, Unit<V, Cell>& u) const {
    if constexpr (N::kSaved > 0)
      for (int value = 0; value < N::kSaved; ++value) u.saved[value] = load<V>(row.gates + value * hidden + unit, n);
  }
  void load_cells(const Place& row, int64_t unit, int n, Unit<V, Cell>& u) const {
    if constexpr (kCells > 0)
      for (int value = 0; value < kCells; ++value) {
        u.c[value] = load<V>(row.cells + value * hidden + unit, n);
        u.d_c[value] = load<V>(d_c(row.b) + value * hidden + unit, n);
        if (row.d_cells) u.d_c[value] = u.d_c[value] + load<V>(row.d_cells + value * hidden + unit, n);
        u.c_prev[value] = row.c_prev ? load<V>(row.c_prev + value * hidden + unit, n) : V(0);
      }
  }

  // ---- stores ----

  template <int kBegin, int kEnd>
  void store_gates(const Place& row, int64_t unit, int n, const Unit<V, Cell>& u) const {
    O* const to = row.gradients + unit;
    for (int gate = kBegin; gate < kEnd; ++gate) store(to + work.columns.gates + gate * hidden, u.d_input[gate], n);
    if constexpr (Cell::kSplitGate >= kBegin && Cell::kSplitGate < kEnd) store(to, u.d_split, n);
  }
  // Row by row, so that the sum over rows has one order, whatever the number of threads.
  void add_unit_gradients(int64_t b, int64_t unit, int n, const Unit<V, Cell>& u) const {
    if constexpr (Cell::kUnitWeights > 0)
      for (int i = 0; i < Cell::kUnitWeights; ++i) {
        T* const to = static_cast<T*>(work.d_unit) + (b * Cell::kUnitWeights + i) * hidden + unit;
        store(to, load<V>(to, n) + u.d_unit_weight[i], n);
      }
  }
  // The gradient that reaches the old state on elementwise paths. The next step adds the product's part.
  void pass_hidden_on(const Place& row, int64_t unit, int n, V d_h_prev) const {
    // with a product, add_pending clips the sum
    if (!N::kMultiplies && clips_gradient) d_h_prev = clipped(d_h_prev, gradient_clip);
    const bool cut = N::kMultiplies ? row.origin == Origin::kZero : row.cut;
    if (!N::kMultiplies && cut && work.d_h0_reset) {  // with a product, add_pending does this
      T* d_h0 = static_cast<T*>(work.d_h0_reset) + row.b * width + unit;
      store(d_h0, load<V>(d_h0, n) + d_h_prev, n);
    }
    store(row.d_h + unit, cut || cuts_gradient ? V(0) : d_h_prev, n);
  }
  void pass_cells_on(const Place& row, int64_t unit, int n, const Unit<V, Cell>& u) const {
    if constexpr (kCells > 0) {
      const bool to_initial = row.cut && call.options.reset_to_initial && work.d_c0_reset;
      for (int value = 0; value < kCells; ++value) {
        if (to_initial) {
          T* d_c0 = static_cast<T*>(work.d_c0_reset) + (row.b * kCells + value) * hidden + unit;
          store(d_c0, load<V>(d_c0, n) + u.d_c[value], n);
        }
        store(d_c(row.b) + value * hidden + unit, row.cut ? V(0) : u.d_c[value], n);
      }
    }
  }

  Backward(const Call& c, const GradientDirection& d, const DirectionWork& w, const Part& p, const Scratch& s)
      : call(c), direction(d), work(w), part(p), scratch(s) {}
};

}  // namespace fr::cpu
