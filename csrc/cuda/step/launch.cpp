// See launch.h.
#include "launch.h"

#include <algorithm>

#include "../persistent/launch.h"

namespace fr {

int64_t step_shared_bytes(const StepTile& tile, int gates, Type type) {
  const int64_t units = kWarpUnits * tile.unit_warps, rows = kWarpRows * tile.row_warps;
  const int64_t table = 2 * static_cast<int64_t>(sizeof(void*)) * rows;
  const int64_t stages = kStages * tile.depth_warps * (gates * units + rows) * kRowBytes;
  const int64_t partial = tile.depth_warps * gates * rows * (units + kSumsPad) * state_bytes(type);
  return table + std::max(stages, partial);
}

StepTile step_tile(int gates, Type type, int64_t depth_bytes, int64_t rows, int64_t shared_limit) {
  StepTile tile;
  const int64_t slices = divide_up(depth_bytes, kRowBytes);
  tile.depth_warps = slices >= 8 ? 4 : slices >= 2 ? 2 : 1;  // must not depend on the rows: see StepTile
  const auto fits = [&](int unit_warps, int row_warps) {
    StepTile wider = tile;
    wider.unit_warps = unit_warps, wider.row_warps = row_warps;
    return wider.threads() <= 256 && step_shared_bytes(wider, gates, type) <= shared_limit;
  };
  while (rows > kWarpRows * tile.row_warps && tile.row_warps < 4 && fits(tile.unit_warps, 2 * tile.row_warps))
    tile.row_warps *= 2;
  // Wider tiles read the operand less often; small batches need more blocks instead.
  if (rows > 64 && fits(2, tile.row_warps)) tile.unit_warps = 2;
  return tile;
}

void Launcher::operator()(StepParams& p, Phase phase, int gates, int64_t units) const {
  p.phase = phase;
  p.units = units;
  p.rows = 0;
  for (int i = 0; i < directions; ++i)
    p.rows = std::max({p.rows, p.direction[i].here.rows, p.direction[i].pending.rows});
  const StepProduct& product = p.direction[0].product;
  int64_t depth = 0;
  for (int i = 0; i < 2; ++i) depth += product.depth[i];
  p.tile = step_tile(gates, layout.shape.type, depth * layout.element, p.rows, shared_limit);
  if (p.rows == 0) return;
  const LaunchShape shape{static_cast<int>(divide_up(units, kWarpUnits * p.tile.unit_warps)),
      static_cast<int>(divide_up(p.rows, kWarpRows * p.tile.row_warps)), directions, p.tile.threads(),
      step_shared_bytes(p.tile, gates, layout.shape.type)};
  kernels.step[static_cast<int>(math)](gates, shape, p, stream);
}

// ---- forward --------------------------------------------------------------------------------------------------------

void place_forward_step(const Layout& l, const ForwardArgs& args, const StepRange& range, int64_t s, StepParams& p) {
  using M = StepMatrix;
  for (int i = 0; i < args.directions; ++i) {
    const ForwardDirection& from = args.direction[i];
    StepDirection& d = p.direction[i];
    const int64_t t = from.reverse ? l.shape.steps - 1 - s : s, before = from.reverse ? t + 1 : t - 1;
    const int64_t origin = from.reverse ? l.shape.steps - range.last : range.first;
    d.here = l.step(t);
    d.matrix[M::kInputGates] = l.at(from.input_gates, l.state, t, origin);
    d.matrix[M::kOutput] = l.at(from.output, l.element, t);
    d.matrix[M::kOutputBefore] = l.at(from.output, l.element, before);
    d.entering = l.at(from.entering, l.element, t), d.entering_before = l.at(from.entering, l.element, before);
    d.matrix[M::kGates] = l.at(from.gates, l.element, t);
    d.matrix[M::kCells] = l.at(from.cells, l.state, t);
    d.matrix[M::kCellsBefore] =
        from.cells.data ? l.at(from.cells, l.state, before) : Matrix{from.c_n, l.cell.cells * l.shape.hidden};
    d.product = forward_first_product(l, from.weights, d);
  }
}

namespace {

// The phases of a step that has been placed.
void forward_phases(const Launcher& launch, const Weights* const (&weights)[2], bool second, StepParams& p) {
  const Layout& l = launch.layout;
  launch(p, Phase::kForwardFirst, l.cell.phase[0].gates, l.shape.hidden);
  if (!second) return;
  for (int i = 0; i < launch.directions; ++i)
    p.direction[i].product = forward_second_product(l, *weights[i], p.direction[i]);
  launch(p, Phase::kForwardSecond, l.cell.second_rows(), l.width);
}

}  // namespace

void step_forward(const Launcher& launch, const ForwardArgs& args, const StepRange& range, StepParams& p) {
  const Weights* weights[2] = {};
  for (int i = 0; i < args.directions; ++i) weights[i] = &args.direction[i].weights;
  for (int64_t s = range.first; s < range.last; ++s) {
    place_forward_step(launch.layout, args, range, s, p);
    forward_phases(launch, weights, launch.layout.cell.two_phases(), p);
  }
}

// ---- backward -------------------------------------------------------------------------------------------------------

void place_backward_step(const Layout& l, const BackwardArgs& args, const std::vector<BackwardBuffers>& buffers,
    const BackwardSteps& steps, int64_t s, StepParams& p) {
  using M = StepMatrix;
  for (int i = 0; i < args.directions; ++i) {
    const BackwardDirection& from = args.direction[i];
    StepDirection& d = p.direction[i];
    const int64_t t = from.reverse ? args.first_step + s : args.last_step - 1 - s;
    const int64_t before = from.reverse ? t + 1 : t - 1, after = from.reverse ? t - 1 : t + 1;
    const auto in_range = [&](const Rows& rows, int64_t step) { return l.at(rows, l.element, step, args.first_step); };
    d.here = s < steps.count ? l.step(t) : StepRows{};
    d.pending = s > 0 ? l.step(after) : StepRows{};
    d.product = StepProduct{};
    if (s > 0 && l.cell.multiplies()) {
      d.product.operand_rows = d.pending.rows;
      set_segment(l, d.product, 0, buffers[i].weights.first[0], in_range(from.d_gates, after));
      if (l.cell.split_gate >= 0)
        set_segment(l, d.product, 1, buffers[i].weights.first[1], in_range(from.d_recurrent, after));
    }
    if (s == steps.count) continue;
    d.matrix[M::kOutput] = l.at(from.output, l.element, t);
    d.matrix[M::kOutputBefore] = l.at(from.output, l.element, before);
    d.matrix[M::kCells] = l.at(from.cells, l.state, t);
    d.matrix[M::kCellsBefore] = l.at(from.cells, l.state, before);
    d.matrix[M::kGates] = buffers[i].rebuilds() ? in_range(buffers[i].gates, t) : l.at(from.gates, l.element, t);
    d.matrix[M::kDOutput] = l.at(from.d_output, l.element, t);
    d.matrix[M::kDGates] = in_range(from.d_gates, t);
    d.matrix[M::kDRecurrent] = in_range(from.d_recurrent, t);
    d.matrix[M::kHPrev] = in_range(from.h_prev, t);
    d.matrix[M::kInner] = in_range(from.inner, t);
    d.matrix[M::kDProjected] = in_range(from.d_projected, t);
    d.matrix[M::kDCells] = l.at(from.d_cells, l.state, t);
  }
}

namespace {

// The second product of a step that has been placed: d_inner.
void place_second_product(
    const Layout& l, const std::vector<BackwardBuffers>& buffers, bool extra, int directions, StepParams& p) {
  for (int i = 0; i < directions; ++i) {
    StepDirection& d = p.direction[i];
    d.product = StepProduct{};
    if (extra) continue;  // only the reset of the cell state is left to apply
    d.product.operand_rows = d.here.rows;
    const Matrix& gates = d.matrix[StepMatrix::kDGates];
    const int64_t skipped = l.cell.phase[0].gates * l.shape.hidden * l.element;
    const Matrix operand = l.cell.projects() ? d.matrix[StepMatrix::kDProjected]
                                             : Matrix{static_cast<char*>(gates.data) + skipped, gates.row_stride};
    set_segment(l, d.product, 0, buffers[i].weights.second, operand);
  }
}

}  // namespace

void step_backward(const Launcher& launch, const BackwardArgs& args, const std::vector<BackwardBuffers>& buffers,
    const BackwardSteps& steps, StepParams& p) {
  const Layout& l = launch.layout;
  for (int64_t s = 0; s <= steps.last(); ++s) {
    const bool extra = s == steps.count;
    place_backward_step(l, args, buffers, steps, s, p);
    launch(p, Phase::kBackwardFirst, 1, l.width);
    if (!l.cell.two_phases() || (extra && !l.cell.cells)) continue;
    place_second_product(l, buffers, extra, launch.directions, p);
    launch(p, Phase::kBackwardSecond, 1, l.shape.hidden);
  }
}

void rebuild_gates(const Launcher& launch, const BackwardArgs& args, const std::vector<BackwardBuffers>& buffers,
    const StepParams& call, const PersistentBuffers& memory) {
  constexpr int64_t kMostRows = int64_t{1} << 20;  // rows of one launch: a grid has at most 65535 tiles of them
  const Layout& l = launch.layout;
  const int64_t first_row = l.first_row(args.first_step), all = l.rows_between(args.first_step, args.last_step);
  const auto at = [](const auto& matrix, int64_t row, int64_t bytes) {
    char* const data = static_cast<char*>(matrix.data);
    return Matrix{data ? data + row * matrix.row_stride * bytes : nullptr, matrix.row_stride};
  };
  const auto offset = [](void* data, int64_t elements, int64_t bytes) {
    return data ? static_cast<char*>(data) + elements * bytes : nullptr;
  };
  const int64_t hidden = l.shape.hidden;
  const Weights* weights[2] = {};
  for (int64_t row = 0; row < all; row += kMostRows) {
    const int64_t rows = std::min(all - row, kMostRows);
    GatheredStates states[2];
    StepParams p = l.params(args.options, nullptr);
    p.lengths = nullptr;
    p.noise = {};  // noise acts on states, not on gates, and forward stored the states with noise applied
    for (int i = 0; i < args.directions; ++i) {
      const BackwardDirection& from = args.direction[i];
      const BackwardBuffers& to = buffers[i];
      weights[i] = &from.weights;
      states[i] = {
          offset(to.states.h, row * l.width, l.element), offset(to.states.c, row * l.cell.cells * hidden, l.state)};
      StepDirection& d = p.direction[i];
      p.unit_weights[i] = from.weights.unit;
      d.here.step = 0, d.here.rows = rows;
      d.h0 = states[i].h, d.c0 = states[i].c;
      d.matrix[StepMatrix::kInputGates] = at(from.input_gates, row, l.state);
      d.matrix[StepMatrix::kGates] = at(to.gates, row, l.element);
      d.matrix[StepMatrix::kInner] = at(to.inner.inner, row, l.element);
      d.carry = offset(to.inner.carry, row * l.cell.carried() * hidden, l.state);
      d.product = forward_first_product(l, from.weights, d);
    }
    gather_states_before(l, args, first_row + row, rows, states, call, memory, launch.kernels, launch.stream);
    forward_phases(launch, weights, l.cell.two_phases() && l.cell.phase[1].saved, p);
  }
}

}  // namespace fr
