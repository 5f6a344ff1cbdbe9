// See run.h.
#include "run.h"

#include <algorithm>
#include <array>
#include <stdexcept>
#include <string>
#include <vector>

#include "layout.h"
#include "persistent/launch.h"

namespace fr {

Math math_of(Type type, bool tf32) {
  switch (type) {
    case Type::kFloat32: return tf32 ? Math::kTf32 : Math::kFloat32;
    case Type::kFloat64: return Math::kFloat64;
    case Type::kBFloat16: return Math::kBFloat16;
    case Type::kFloat16: return Math::kFloat16;
  }
  throw std::invalid_argument("type: no such code: " + std::to_string(static_cast<int>(type)));
}

namespace {

constexpr int64_t kRowBytes = 128, kStages = 2, kPad = 4;  // as in tile.cuh and step/kernel.cuh

int64_t table_bytes(const StepTile& tile) { return 2 * 8 * 32 * tile.row_warps; }

}  // namespace

int64_t step_shared_bytes(const StepTile& tile, int gates, Type type) {
  const int64_t units = 16 * tile.unit_warps, rows = 32 * tile.row_warps;
  const int64_t stages = kStages * tile.depth_warps * (gates * units + rows) * kRowBytes;
  const int64_t partial = tile.depth_warps * gates * rows * (units + kPad) * state_bytes(type);
  return table_bytes(tile) + std::max(stages, partial);
}

StepTile step_tile(int gates, Type type, int64_t depth_bytes, int64_t rows, int64_t shared_limit) {
  StepTile tile;
  const int64_t slices = divide_up(depth_bytes, kRowBytes);
  tile.depth_warps = slices >= 8 ? 4 : slices >= 2 ? 2 : 1;  // from the depth alone: see StepTile
  const auto fits = [&](int unit_warps, int row_warps) {
    StepTile wider = tile;
    wider.unit_warps = unit_warps, wider.row_warps = row_warps;
    return wider.threads() <= 256 && step_shared_bytes(wider, gates, type) <= shared_limit;
  };
  while (rows > 32 * tile.row_warps && tile.row_warps < 4 && fits(tile.unit_warps, 2 * tile.row_warps)) tile.row_warps *= 2;
  if (rows > 64 && fits(2, tile.row_warps)) tile.unit_warps = 2;  // wider tiles read the operand less often; small
                                                                  // batches need more blocks instead
  return tile;
}

namespace {

struct Launcher {
  const Layout& layout;
  Math math;
  int64_t shared_limit;
  const StepKernels& kernels;
  void* stream;
  int directions;

  // Launches p.phase over `units`. The product's depth is direction 0's, the same in both.
  void operator()(StepParams& p, Phase phase, int gates, int64_t units) const {
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
    const LaunchShape shape{static_cast<int>(divide_up(units, 16 * p.tile.unit_warps)),
                            static_cast<int>(divide_up(p.rows, 32 * p.tile.row_warps)), directions, p.tile.threads(),
                            step_shared_bytes(p.tile, gates, layout.shape.type)};
    kernels.step[static_cast<int>(math)](gates, shape, p, stream);
  }
};

// ---- the block strategy: one launch ---------------------------------------------------------------------------------
constexpr int kElementThreads = 256;  // elements of a block of block/elementwise.cuh
constexpr int kBlockRows = 8, kBlockUnits = 128, kBlockStateBytes = 256;  // as in block/kernel.cuh

int64_t block_shared_bytes(bool backward, int gates, int64_t units, int64_t slices) {
  const int64_t header = divide_up(2 * sizeof(StepDirection), kRowBytes) * kRowBytes;
  const int64_t rows = backward ? 1 : gates, staged = rows * units * kRowBytes;
  const int64_t working = 2 * slices * kBlockRows * kRowBytes + units / 16 * rows * kBlockRows * (16 + kPad) * 4;
  return header + std::max(staged, working);
}

bool serves_block(const Layout& l, const Run& run) {
  return !l.shape.batch_sizes && block_refusal(l.shape.cell, l.shape.type, run.tf32, l.shape.hidden, run.shared_limit).empty();
}

// With dropout of the state the product does not read the output itself. Such a call runs step by step.
bool drops_state(const Layout& l, const Weights& weights) { return weights.state_mask && l.cell.multiplies(); }

// The matrices of StepDirection, in its order, with their element sizes. Those with null rows do not advance.
struct BlockMatrix {
  Rows rows{};
  int64_t element = 0;
};
using BlockRows = std::array<BlockMatrix, kStepMatrices>;

struct BlockCall {
  bool backward;
  int64_t count, last;
};

// p describes the first step in processing order; rows(i) are the matrices of direction i.
template <class RowsOf>
void launch_block(const Launcher& launch, StepParams& p, const Weights* const (&weights)[2], const BlockCall& call, RowsOf rows) {
  const Layout& l = launch.layout;
  BlockParams block{};
  block.count = call.count, block.last = call.last;
  block.total_steps = l.shape.steps, block.batch = l.shape.batch;
  block.resets = l.shape.resets;
  block.gate_slices = static_cast<int>(divide_up(l.shape.hidden * l.element, kRowBytes));
  block.slices = call.backward ? block.gate_slices * l.cell.gates : block.gate_slices;
  block.prefetched = call.backward ? l.cell.saved : l.cell.gates;
  p.rows = l.shape.batch, p.units = l.shape.hidden;
  for (int i = 0; i < launch.directions; ++i) {
    StepDirection& d = p.direction[i];
    const BlockRows of = rows(i);
    const int64_t forward = d.reverse != call.backward ? -1 : 1;
    for (int k = 0; k < kStepMatrices; ++k)
      block.advance[i][k] = of[k].rows.data ? forward * of[k].rows.step_stride * of[k].element : 0;
    // The address one step back. It may lie outside the buffer: kernels advance it before they read it.
    const auto before = [&](const Matrix& here, int64_t bytes) {
      const auto address = reinterpret_cast<uintptr_t>(here.data) - static_cast<uintptr_t>(d.reverse ? -bytes : bytes);
      return Matrix{reinterpret_cast<void*>(address), here.row_stride};
    };
    const auto stride = [&](int k) { return of[k].rows.step_stride * of[k].element; };
    if (call.backward) d.output = l.at(of[1].rows, l.element, d.here.step);
    d.output_before = before(d.output, stride(1));
    if (of[4].rows.data) d.cells_before = before(d.cells, stride(4));
    block.weight[i] = weights[i]->hh, block.weight_stride[i] = weights[i]->hh_stride;
    block.aligned[i] = l.copies(weights[i]->hh, weights[i]->hh_stride);
  }
  block.step = p;
  if (!l.cell.multiplies()) {  // block/elementwise.cuh
    const LaunchShape shape{static_cast<int>(divide_up(l.shape.batch * l.shape.hidden, kElementThreads)), 1, launch.directions, kElementThreads,
                            static_cast<int64_t>(2 * sizeof(StepDirection))};
    return launch.kernels.elementwise(l.shape.type, call.backward, shape, block, launch.stream);
  }
  const int64_t units = divide_up(l.shape.hidden, 16) * 16;
  const LaunchShape shape{static_cast<int>(divide_up(l.shape.batch, kBlockRows)), 1, launch.directions,
                          static_cast<int>(units / 16 * 32), block_shared_bytes(call.backward, l.cell.gates, units, block.slices)};
  launch.kernels.block[static_cast<int>(launch.math)](call.backward, l.cell.gates, shape, block, launch.stream);
}

void check(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

void check_shape(const Shape& shape, int directions) {
  check(directions == 1 || directions == 2, "directions: expected 1 or 2");
  check(shape.steps >= 0 && shape.batch >= 0 && shape.hidden > 0, "steps, batch, hidden: expected sizes");
  check(!shape.batch_sizes == !shape.step_offset, "batch_sizes and step_offset: expected both or none");
  check(facts_of(shape.cell).projects() == (shape.projection > 0), "projection: expected with a cell that projects, and only there");
}

}  // namespace

int64_t block_shared_bytes(Cell cell, Type type, int64_t hidden) {
  if (!facts_of(cell).multiplies()) return 2 * sizeof(StepDirection);
  const int gates = facts_of(cell).gates;
  const int64_t units = divide_up(hidden, 16) * 16, slices = divide_up(hidden * storage_bytes(type), kRowBytes);
  return std::max(block_shared_bytes(false, gates, units, slices), block_shared_bytes(true, gates, units, slices * gates));
}

std::string block_refusal(Cell cell, Type type, bool tf32, int64_t hidden, int64_t shared_limit) {
  const CellFacts& facts = facts_of(cell);
  const int64_t bytes = hidden * storage_bytes(type);
  if (!facts.multiplies()) return "";  // block/elementwise.cuh takes any type and size
  if (facts.two_phases()) return "cells with two products a step have no block kernel: a cluster of one block serves those that it can hold";
  if (facts.gates == 2) return "cells of two gates have no block kernel, a cluster of one block serves them";
  if (type == Type::kFloat64 || (type == Type::kFloat32 && !tf32)) return "products without tensor cores have no block kernel, a cluster of one block serves them";
  if (hidden > kBlockUnits || bytes > kBlockStateBytes)
    return "a state of " + std::to_string(hidden) + " units and " + std::to_string(bytes) + " bytes a row, block serves " +
           std::to_string(kBlockUnits) + " and " + std::to_string(kBlockStateBytes);
  const int64_t shared = block_shared_bytes(cell, type, hidden);
  if (shared > shared_limit)
    return "a block needs " + std::to_string(shared) + " bytes of shared memory, the device gives " + std::to_string(shared_limit);
  return "";
}

int64_t step_forward_workspace(const ForwardArgs& args) {
  const Layout layout(args.shape);
  Workspace workspace(nullptr);
  const PersistentBuffers memory(layout, args.directions, workspace);
  for (int i = 0; i < args.directions; ++i) InnerBuffers(layout, args.shape.batch, workspace);
  return workspace.used();
}

void step_forward(const ForwardArgs& args, const StepRange& range, const Run& run, const StepKernels& kernels) {
  raise_if_timed_out(run.status, run.timeout_ns);
  check_shape(args.shape, args.directions);
  const int64_t last = range.last > 0 ? range.last : args.shape.steps;
  check(0 <= range.first && range.first <= last && last <= args.shape.steps, "first, last: expected a range of the steps");
  const Layout l(args.shape);
  const Launcher launch{l, math_of(args.shape.type, run.tf32), run.shared_limit, kernels, run.stream, args.directions};
  Workspace workspace(run.workspace);
  const PersistentBuffers memory(l, args.directions, workspace);
  StepParams p = l.params(args.options, args.direction[0].weights.state_mask);
  p.noise.first_direction = args.first_direction;
  const bool drops = drops_state(l, args.direction[0].weights);
  for (int i = 0; i < args.directions; ++i) {
    const ForwardDirection& from = args.direction[i];
    check(!drops || (from.entering.data && !from.h0 == !from.h0_entering), "entering, h0_entering: expected with state_mask");
    p.state_mask[i] = from.weights.state_mask;
    check((from.weights.hh || !l.cell.multiplies()) && from.input_gates.data && from.output.data && from.h_n,
          "weight_hh, input_gates, output, h_n: expected");
    check(!l.cell.unit_weights || from.weights.unit, "weight_unit: expected for a cell with weights of a unit");
    p.unit_weights[i] = from.weights.unit;
    check(!l.cell.cells || from.c_n, "c_n: expected for a cell with a cell state");
    check((l.cell.saved == 0 || !from.gates.data) || !l.cell.cells || from.cells.data, "cells: expected with gates");
    StepDirection& d = p.direction[i];
    d.reverse = from.reverse;
    d.h0 = from.h0, d.c0 = from.c0, d.h_n = from.h_n, d.c_n = from.c_n, d.h0_entering = from.h0_entering;
    const InnerBuffers buffers(l, args.shape.batch, workspace);
    d.inner = buffers.inner, d.carry = buffers.carry;
  }
  if (run.persistent && !drops && last > range.first && persistent_forward(l, args, {range.first, last}, run, kernels, memory, p)) return;
  for (int64_t s = range.first; s < last; ++s) {
    for (int i = 0; i < args.directions; ++i) {
      const ForwardDirection& from = args.direction[i];
      StepDirection& d = p.direction[i];
      const int64_t t = from.reverse ? args.shape.steps - 1 - s : s, before = from.reverse ? t + 1 : t - 1;
      d.here = l.step(t);
      d.input_gates = l.at(from.input_gates, l.state, t, from.reverse ? args.shape.steps - last : range.first);
      d.output = l.at(from.output, l.element, t);
      d.output_before = l.at(from.output, l.element, before);
      d.entering = l.at(from.entering, l.element, t), d.entering_before = l.at(from.entering, l.element, before);
      d.gates = l.at(from.gates, l.element, t);
      d.cells = l.at(from.cells, l.state, t);
      d.cells_before = from.cells.data ? l.at(from.cells, l.state, before) : Matrix{from.c_n, l.cell.cells * args.shape.hidden};
      d.product = forward_first_product(l, from.weights, d);
    }
    if (run.block && !drops && serves_block(l, run)) {
      const Weights* weights[2] = {&args.direction[0].weights, &args.direction[1].weights};
      return launch_block(launch, p, weights, {false, last - range.first, last - range.first - 1}, [&](int i) {
        const ForwardDirection& from = args.direction[i];
        return BlockRows{{{from.input_gates, l.state}, {from.output, l.element}, {from.output, l.element},
                          {from.gates, l.element}, {from.cells, l.state}, {from.cells, l.state}}};
      });
    }
    launch(p, Phase::kForwardFirst, l.cell.phase[0].gates, args.shape.hidden);
    if (!l.cell.two_phases()) continue;
    for (int i = 0; i < args.directions; ++i)
      p.direction[i].product = forward_second_product(l, args.direction[i].weights, p.direction[i]);
    launch(p, Phase::kForwardSecond, l.cell.second_rows(), l.width);
  }
}

namespace {

// Rebuilds the gates that forward did not keep, for all rows of the range at once: every row's old state is known, so
// nothing recurs. To the kernels they are the rows of one first step that starts from those states. Inactive rows hold
// garbage that is never read.
void rebuild_gates(const Layout& l, const BackwardArgs& args, const std::vector<BackwardBuffers>& buffers, const StepParams& call,
                   const PersistentBuffers& memory, const Launcher& launch) {
  constexpr int64_t kMostRows = int64_t{1} << 20;  // rows of one launch: a grid has at most 65535 tiles of them
  const int64_t first_row = l.first_row(args.first_step), all = l.rows_between(args.first_step, args.last_step);
  const auto at = [](const Matrix& matrix, int64_t row, int64_t bytes) {
    return Matrix{matrix.data ? static_cast<char*>(matrix.data) + row * matrix.row_stride * bytes : nullptr, matrix.row_stride};
  };
  const auto state_at = [](void* data, int64_t elements, int64_t bytes) { return data ? static_cast<char*>(data) + elements * bytes : nullptr; };
  const int64_t hidden = l.shape.hidden;
  for (int64_t row = 0; row < all; row += kMostRows) {
    const int64_t rows = std::min(all - row, kMostRows);
    GatheredStates states[2];
    StepParams p = l.params(args.options, nullptr);
    p.lengths = nullptr;
    p.noise = {};  // noise acts on the states, which forward stored with it applied, not on the gates
    for (int i = 0; i < args.directions; ++i) {
      const BackwardBuffers& to = buffers[i];
      states[i] = {state_at(to.states.h, row * l.width, l.element), state_at(to.states.c, row * l.cell.cells * hidden, l.state)};
      StepDirection& d = p.direction[i];
      p.unit_weights[i] = args.direction[i].weights.unit;
      d.here.step = 0, d.here.rows = rows;
      d.h0 = states[i].h, d.c0 = states[i].c;
      d.input_gates = at({args.direction[i].input_gates.data, args.direction[i].input_gates.row_stride}, row, l.state);
      d.gates = at({to.gates.data, to.gates.row_stride}, row, l.element);
      d.inner = at(to.inner.inner, row, l.element), d.carry = state_at(to.inner.carry, row * l.cell.carried() * hidden, l.state);
      d.product = forward_first_product(l, args.direction[i].weights, d);
    }
    gather_states_before(l, args, first_row + row, rows, states, call, memory, launch.kernels, launch.stream);
    launch(p, Phase::kForwardFirst, l.cell.phase[0].gates, hidden);
    if (!l.cell.two_phases() || !l.cell.phase[1].saved) continue;
    for (int i = 0; i < args.directions; ++i) p.direction[i].product = forward_second_product(l, args.direction[i].weights, p.direction[i]);
    launch(p, Phase::kForwardSecond, l.cell.second_rows(), l.width);
  }
}

}  // namespace

int64_t step_backward_workspace(const BackwardArgs& args) {
  const Layout layout(args.shape);
  Workspace workspace(nullptr);
  const PersistentBuffers memory(layout, args.directions, workspace);
  for (int i = 0; i < args.directions; ++i) BackwardBuffers(layout, args, args.direction[i], workspace);
  return workspace.used();
}

void step_backward(const BackwardArgs& args, const Run& run, const StepKernels& kernels) {
  raise_if_timed_out(run.status, run.timeout_ns);
  check_shape(args.shape, args.directions);
  check(0 <= args.first_step && args.first_step <= args.last_step && args.last_step <= args.shape.steps,
        "first_step, last_step: expected a range of steps");
  const Layout l(args.shape);
  const Launcher launch{l, math_of(args.shape.type, run.tf32), run.shared_limit, kernels, run.stream, args.directions};
  Workspace workspace(run.workspace);
  const PersistentBuffers memory(l, args.directions, workspace);
  const bool drops = drops_state(l, args.direction[0].weights);
  const bool block = run.block && serves_block(l, run) && !drops;
  std::vector<BackwardBuffers> buffers;
  for (int i = 0; i < args.directions; ++i) buffers.emplace_back(l, args, args.direction[i], workspace);
  StepParams p = l.params(args.options, args.direction[0].weights.state_mask);
  p.noise.first_direction = args.first_direction;
  bool rebuild = false;
  for (int i = 0; i < args.directions; ++i) {
    const BackwardDirection& from = args.direction[i];
    check((from.weights.hh || !l.cell.multiplies()) && from.output.data && from.d_gates.data && from.d_h,
          "weight_hh, output, d_gates, d_h: expected");
    check(!l.cell.cells || (from.cells.data && from.d_c), "cells, d_c: expected for a cell with a cell state");
    check(!l.cell.unit_weights || from.weights.unit, "weight_unit: expected for a cell with weights of a unit");
    p.unit_weights[i] = from.weights.unit, p.d_unit[i] = from.d_unit, p.state_mask[i] = from.weights.state_mask;
    check(l.cell.split_gate < 0 || from.d_recurrent.data, "d_recurrent: expected for this cell");
    check(!l.cell.projects() || from.d_projected.data, "d_projected: expected with projection");
    const bool rebuilt = buffers[i].gates.data != nullptr;
    check(!rebuilt || from.input_gates.data, "input_gates: expected where gates are rebuilt");
    check(!rebuilt || l.shape.step_offset || args.last_step - args.first_step < 2 || from.input_gates.step_stride == l.shape.batch * from.input_gates.row_stride,
          "input_gates: expected without gaps between steps where gates are rebuilt");
    check(!rebuilt || !drops, "gates: expected with state_mask");
    rebuild = rebuild || rebuilt;
    if (!block) buffers[i].weights.fill(l, from.weights, kernels, run.stream);
    StepDirection& d = p.direction[i];
    d.reverse = from.reverse;
    d.h0 = from.h0, d.c0 = from.c0;
    d.d_h = from.d_h, d.d_c = from.d_c;
    if (args.options.reset_to_initial) d.d_h0_reset = from.d_h0_reset, d.d_c0_reset = from.d_c0_reset;
  }
  if (rebuild) rebuild_gates(l, args, buffers, p, memory, launch);

  const int64_t count = args.last_step - args.first_step, hidden = args.shape.hidden;
  // The extra iteration s == count only finishes the last step's gradients, if the gradient of the initial state is
  // wanted. With resets it always runs for d_c: a reset at the last step processed still has to be applied.
  bool finish = l.cell.cells && args.shape.resets;
  for (int i = 0; i < args.directions; ++i) finish = finish || args.direction[i].wants_initial;
  if (run.persistent && !drops && count > 0 && persistent_backward(l, args, finish, run, kernels, memory, buffers, p)) return;
  for (int64_t s = 0; s < count + (finish ? 1 : 0) && count > 0; ++s) {
    for (int i = 0; i < args.directions; ++i) {
      const BackwardDirection& from = args.direction[i];
      StepDirection& d = p.direction[i];
      const int64_t t = from.reverse ? args.first_step + s : args.last_step - 1 - s;
      const int64_t before = from.reverse ? t + 1 : t - 1, after = from.reverse ? t - 1 : t + 1;
      d.here = s < count ? l.step(t) : StepRows{};
      d.pending = s > 0 ? l.step(after) : StepRows{};
      d.product = StepProduct{};
      if (s > 0 && l.cell.multiplies()) {
        d.product.operand_rows = d.pending.rows;
        set_segment(l, d.product, 0, buffers[i].weights.first[0], l.at(from.d_gates, l.element, after, args.first_step));
        if (l.cell.split_gate >= 0)
          set_segment(l, d.product, 1, buffers[i].weights.first[1], l.at(from.d_recurrent, l.element, after, args.first_step));
      }
      if (s == count) continue;
      const Rows& gates = buffers[i].gates.data ? buffers[i].gates : from.gates;
      d.output = l.at(from.output, l.element, t);
      d.output_before = l.at(from.output, l.element, before);
      d.cells = l.at(from.cells, l.state, t);
      d.cells_before = l.at(from.cells, l.state, before);
      d.gates = l.at(gates, l.element, t, buffers[i].gates.data ? args.first_step : 0);
      d.d_output = l.at(from.d_output, l.element, t);
      d.d_gates = l.at(from.d_gates, l.element, t, args.first_step);
      d.d_recurrent = l.at(from.d_recurrent, l.element, t, args.first_step);
      d.h_prev = l.at(from.h_prev, l.element, t, args.first_step);
      d.inner = l.at(from.inner, l.element, t, args.first_step);
      d.d_projected = l.at(from.d_projected, l.element, t, args.first_step);
      d.d_cells = l.at(from.d_cells, l.state, t);
    }
    if (block) {
      const Weights* weights[2] = {&args.direction[0].weights, &args.direction[1].weights};
      return launch_block(launch, p, weights, {true, count, finish ? count : count - 1}, [&](int i) {
        const BackwardDirection& from = args.direction[i];
        const Rows& gates = buffers[i].gates.data ? buffers[i].gates : from.gates;
        return BlockRows{{{}, {from.output, l.element}, {from.output, l.element}, {gates, l.element}, {from.cells, l.state},
                          {from.cells, l.state}, {from.d_output, l.element}, {from.d_gates, l.element},
                          {from.d_recurrent, l.element}, {from.h_prev, l.element}, {}, {}, {from.d_cells, l.state}}};
      });
    }
    launch(p, Phase::kBackwardFirst, 1, l.width);
    if (!l.cell.two_phases() || (s == count && !l.cell.cells)) continue;
    for (int i = 0; i < args.directions; ++i) {
      StepDirection& d = p.direction[i];
      d.product = StepProduct{};
      if (s == count) continue;  // only the reset of the cell state is left to apply
      d.product.operand_rows = d.here.rows;
      const Matrix operand = l.cell.projects() ? d.d_projected
                                               : Matrix{static_cast<char*>(d.d_gates.data) + l.cell.phase[0].gates * hidden * l.element,
                                                        d.d_gates.row_stride};
      set_segment(l, d.product, 0, buffers[i].weights.second, operand);
    }
    launch(p, Phase::kBackwardSecond, 1, hidden);
  }
}

}  // namespace fr
