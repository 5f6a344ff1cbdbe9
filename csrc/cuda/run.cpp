// See run.h.
#include "run.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "block/launch.h"
#include "layout.h"
#include "persistent/launch.h"
#include "step/launch.h"

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

// With dropout of the state the product does not read the output itself. Such a call runs step by step.
bool drops_state(const Layout& l, const Weights& weights) { return weights.state_mask && l.cell.multiplies(); }

// ---- checks ---------------------------------------------------------------------------------------------------------

void check(bool condition, const char* what) {
  if (!condition) throw std::invalid_argument(what);
}

void check_shape(const Shape& shape, int directions) {
  check(directions == 1 || directions == 2, "directions: expected 1 or 2");
  check(shape.steps >= 0 && shape.batch >= 0 && shape.hidden > 0, "steps, batch, hidden: expected sizes");
  check(!shape.batch_sizes == !shape.step_offset, "batch_sizes and step_offset: expected both or none");
  check(facts_of(shape.cell).projects() == (shape.projection > 0),
      "projection: expected with a cell that projects, and only there");
}

void check_forward(const Layout& l, const ForwardDirection& from, bool drops) {
  check(!drops || (from.entering.data && !from.h0 == !from.h0_entering),
      "entering, h0_entering: expected with state_mask");
  check((from.weights.hh || !l.cell.multiplies()) && from.input_gates.data && from.output.data && from.h_n,
      "weight_hh, input_gates, output, h_n: expected");
  check(!l.cell.unit_weights || from.weights.unit, "weight_unit: expected for a cell with weights of a unit");
  check(!l.cell.cells || from.c_n, "c_n: expected for a cell with a cell state");
  check((l.cell.saved == 0 || !from.gates.data) || !l.cell.cells || from.cells.data, "cells: expected with gates");
}

void check_backward(
    const Layout& l, const BackwardArgs& args, const BackwardDirection& from, bool rebuilds, bool drops) {
  check((from.weights.hh || !l.cell.multiplies()) && from.output.data && from.d_gates.data && from.d_h,
      "weight_hh, output, d_gates, d_h: expected");
  check(!l.cell.cells || (from.cells.data && from.d_c), "cells, d_c: expected for a cell with a cell state");
  check(!l.cell.unit_weights || from.weights.unit, "weight_unit: expected for a cell with weights of a unit");
  check(l.cell.split_gate < 0 || from.d_recurrent.data, "d_recurrent: expected for this cell");
  check(!l.cell.projects() || from.d_projected.data, "d_projected: expected with projection");
  if (!rebuilds) return;
  check(from.input_gates.data, "input_gates: expected where gates are rebuilt");
  check(l.shape.step_offset || args.last_step - args.first_step < 2 ||
            from.input_gates.step_stride == l.shape.batch * from.input_gates.row_stride,
      "input_gates: expected without gaps between steps where gates are rebuilt");
  check(!drops, "gates: expected with state_mask");
}

// ---- what all steps of a call share ---------------------------------------------------------------------------------

StepParams forward_params(const Layout& l, const ForwardArgs& args, Workspace& workspace) {
  StepParams p = l.params(args.options, args.direction[0].weights.state_mask);
  p.noise.first_direction = args.first_direction;
  for (int i = 0; i < args.directions; ++i) {
    const ForwardDirection& from = args.direction[i];
    p.state_mask[i] = from.weights.state_mask, p.unit_weights[i] = from.weights.unit;
    StepDirection& d = p.direction[i];
    d.reverse = from.reverse;
    d.h0 = from.h0, d.c0 = from.c0, d.h_n = from.h_n, d.c_n = from.c_n, d.h0_entering = from.h0_entering;
    const InnerBuffers buffers(l, args.shape.batch, workspace);
    d.matrix[StepMatrix::kInner] = buffers.inner, d.carry = buffers.carry;
  }
  return p;
}

StepParams backward_params(const Layout& l, const BackwardArgs& args) {
  StepParams p = l.params(args.options, args.direction[0].weights.state_mask);
  p.noise.first_direction = args.first_direction;
  for (int i = 0; i < args.directions; ++i) {
    const BackwardDirection& from = args.direction[i];
    p.unit_weights[i] = from.weights.unit, p.d_unit[i] = from.d_unit, p.state_mask[i] = from.weights.state_mask;
    StepDirection& d = p.direction[i];
    d.reverse = from.reverse;
    d.h0 = from.h0, d.c0 = from.c0;
    d.d_h = from.d_h, d.d_c = from.d_c;
    if (args.options.reset_to_initial) d.d_h0_reset = from.d_h0_reset, d.d_c0_reset = from.d_c0_reset;
  }
  return p;
}

// The extra iteration only finishes the last step's gradients, if the gradient of the initial state is wanted. With
// resets it always runs for d_c: a reset at the last step processed still has to be applied.
BackwardSteps steps_of(const Layout& l, const BackwardArgs& args) {
  bool finish = l.cell.cells && args.shape.resets;
  for (int i = 0; i < args.directions; ++i) finish = finish || args.direction[i].wants_initial;
  return {args.last_step - args.first_step, finish};
}

}  // namespace

// ---- the calls ------------------------------------------------------------------------------------------------------

int64_t forward_workspace(const ForwardArgs& args) {
  const Layout layout(args.shape);
  Workspace workspace(nullptr);
  const PersistentBuffers memory(layout, args.directions, workspace);
  for (int i = 0; i < args.directions; ++i) {
    InnerBuffers(layout, args.shape.batch, workspace);
    WholeWeights(layout, args.direction[i].weights, workspace);
  }
  return workspace.used();
}

int64_t backward_workspace(const BackwardArgs& args) {
  const Layout layout(args.shape);
  Workspace workspace(nullptr);
  const PersistentBuffers memory(layout, args.directions, workspace);
  for (int i = 0; i < args.directions; ++i) {
    WholeWeights(layout, args.direction[i].weights, workspace);
    BackwardBuffers(layout, args, args.direction[i], workspace);
  }
  return workspace.used();
}

void run_forward(const ForwardArgs& args, const StepRange& range, const Run& run, const Kernels& kernels) {
  raise_if_timed_out(run.status, run.timeout_ns);
  check_shape(args.shape, args.directions);
  const Layout l(args.shape);
  const StepRange steps{range.first, range.last > 0 ? range.last : l.shape.steps};
  check(0 <= steps.first && steps.first <= steps.last && steps.last <= l.shape.steps,
      "first, last: expected a range of the steps");
  const bool drops = drops_state(l, args.direction[0].weights);
  for (int i = 0; i < args.directions; ++i) check_forward(l, args.direction[i], drops);
  const Launcher launch{l, math_of(l.shape.type, run.tf32), run.shared_limit, kernels, run.stream, args.directions};
  Workspace workspace(run.workspace);
  const PersistentBuffers memory(l, args.directions, workspace);
  StepParams p = forward_params(l, args, workspace);
  if (steps.first == steps.last) return;
  std::vector<WholeWeights> weights;
  for (int i = 0; i < args.directions; ++i) weights.emplace_back(l, args.direction[i].weights, workspace);
  if (run.persistent && !drops && persistent_forward(l, args, weights, steps, run, kernels, memory, p)) return;
  if (run.block && !drops && serves_block(l, run)) block_forward(launch, args, weights, steps, p);
  else step_forward(launch, args, steps, p);
}

void run_backward(const BackwardArgs& args, const Run& run, const Kernels& kernels) {
  raise_if_timed_out(run.status, run.timeout_ns);
  check_shape(args.shape, args.directions);
  check(0 <= args.first_step && args.first_step <= args.last_step && args.last_step <= args.shape.steps,
      "first_step, last_step: expected a range of steps");
  const Layout l(args.shape);
  const Launcher launch{l, math_of(l.shape.type, run.tf32), run.shared_limit, kernels, run.stream, args.directions};
  Workspace workspace(run.workspace);
  const PersistentBuffers memory(l, args.directions, workspace);
  std::vector<BackwardBuffers> buffers;
  std::vector<WholeWeights> weights;
  for (int i = 0; i < args.directions; ++i) {
    weights.emplace_back(l, args.direction[i].weights, workspace);
    buffers.emplace_back(l, args, args.direction[i], workspace);
  }
  const bool drops = drops_state(l, args.direction[0].weights), block = run.block && !drops && serves_block(l, run);
  bool rebuilds = false;
  for (int i = 0; i < args.directions; ++i) {
    check_backward(l, args, args.direction[i], buffers[i].rebuilds(), drops);
    rebuilds = rebuilds || buffers[i].rebuilds();
  }
  StepParams p = backward_params(l, args);
  const BackwardSteps steps = steps_of(l, args);
  if (steps.count == 0) return;
  if (!block)
    for (int i = 0; i < args.directions; ++i)
      buffers[i].weights.fill(l, args.direction[i].weights, kernels, run.stream);
  if (rebuilds) rebuild_gates(launch, args, buffers, p, memory);
  if (run.persistent && !drops && persistent_backward(l, args, steps.finish, run, kernels, memory, buffers, p)) return;
  if (block) block_backward(launch, args, weights, buffers, steps, p);
  else step_backward(launch, args, buffers, steps, p);
}

void run_layer_norm(const LayerNormArgs& args, bool backward, const Kernels& kernels) {
  check(args.type == Type::kFloat32 || args.type == Type::kFloat64, "type: expected float32 or float64");
  check(args.rows >= 0 && args.hidden > 0, "rows, hidden: expected sizes");
  check(args.units && (!backward || (args.d_units && args.d_shift)), "units, d_units, d_shift: expected");
  const bool rows = args.rows > 0;
  check(
      !rows || (args.product && args.gates && args.moments && args.state), "product, gates, moments, state: expected");
  check(!rows || args.gru || args.c, "c: expected for an LSTM");
  if (backward) {
    check(!rows || (args.d_h && args.d_input && args.d_product && args.d_state && args.scratch),
        "d_h, d_input, d_product, d_state, scratch: expected");
    check(!rows || args.gru || args.d_c, "d_c: expected for an LSTM");
  } else {
    check(!rows || (args.input && args.h), "input, h: expected");
  }
  kernels.layer_norm(backward, args);
}

}  // namespace fr
