// See launch.h.
#include "launch.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace fr {
namespace {

using M = StepMatrix;

// Most blocks of a launch, one an SM. It has a flag for each block and for each group: at most twice as many.
constexpr int64_t kMostFlags = 1024;

PersistentPartition partition_of(const Layout& l, int directions, bool backward, const Run& run) {
  PersistentRequest request;
  request.cell = l.shape.cell, request.type = l.shape.type, request.tf32 = run.tf32;
  request.batch = l.shape.batch, request.hidden = l.shape.hidden, request.projection = l.shape.projection;
  request.directions = directions, request.backward = backward;
  PersistentPartition partition = persistent_partition(request, run.limits);
  if (partition.refusal.empty() && !partition.cluster &&
      static_cast<int64_t>(partition.blocks) * partition.groups * partition.directions > kMostFlags)
    partition.refusal = "more blocks than flags";
  return partition;
}

// Zeroes the flags and, for packed rows, stores the offsets that steps [first, last) and their neighbours need.
void prepare(const Layout& l, const PersistentBuffers& memory, int64_t flags, int64_t first, int64_t last,
    const Kernels& kernels, void* stream) {
  PrepareParams params{};
  params.flags = memory.flags, params.flag_count = flags;
  int64_t at = std::max<int64_t>(0, first - 1);
  const int64_t end = memory.offsets ? std::min(l.shape.steps + 1, last + 2) : at;
  do {
    params.to = memory.offsets + at;
    params.count = static_cast<int>(std::min<int64_t>(PrepareParams::kValues, end - at));
    for (int i = 0; i < params.count; ++i, ++at)
      params.value[i] = at < l.shape.steps ? l.first_row(at) : l.rows_between(0, l.shape.steps);
    kernels.prepare(params, stream);
    params.flag_count = 0;
  } while (at < end);
}

// Where the rows of each step lie, or `standing`: a matrix that all steps share. origin: the step whose rows come first
// in the buffer.
MovingRows moving(const Layout& l, const Rows& rows, int64_t element, int64_t origin = 0) {
  if (!rows.data) return {};
  const int64_t bytes = (l.shape.step_offset ? rows.row_stride : rows.step_stride) * element;
  const int64_t position = l.shape.step_offset ? l.shape.step_offset[origin] : origin;
  return {reinterpret_cast<uintptr_t>(rows.data) - static_cast<uintptr_t>(position * bytes), bytes, rows.row_stride};
}
MovingRows standing(const Matrix& matrix) { return {reinterpret_cast<uintptr_t>(matrix.data), 0, matrix.row_stride}; }

// Whether every row of every step is 16-byte aligned.
bool aligned(const Layout& l, const MovingRows& rows) {
  return rows.base % 16 == 0 && rows.bytes % 16 == 0 && rows.row_stride * l.element % 16 == 0;
}

// One launch: directions [first, first + directions) of a call.
struct Launch {
  bool backward;
  int first, directions;
  int64_t count, last;
  PersistentParams params;
};

void set_params(Launch& launch, const Layout& l, const PersistentPartition& partition, const Run& run,
    const PersistentBuffers& memory, const StepParams& p) {
  PersistentParams& params = launch.params;
  params.step = p, params.first_direction = launch.first;
  params.step.noise.first_direction = p.noise.first_direction + launch.first;
  for (int i = 0; i < launch.directions; ++i) {
    params.step.direction[i] = p.direction[launch.first + i];
    params.step.unit_weights[i] = p.unit_weights[launch.first + i], params.step.d_unit[i] = p.d_unit[launch.first + i];
  }
  params.phases = partition.phases;
  for (int i = 0; i < partition.phases; ++i) {
    const PhasePartition& from = partition.phase[i];
    PersistentPhase& phase = params.phase[i];
    phase.units = static_cast<int>(from.units);
    phase.gates = from.gates * from.tiles;
    phase.unit_warps = from.unit_warps, phase.depth_warps = from.depth_warps;
    while (int64_t{1} << phase.unit_bits < from.block_units()) ++phase.unit_bits;
    phase.first_slices = from.first_slices, phase.slices = from.slices;
    phase.rounds = from.rounds, phase.register_rounds = from.register_rounds, phase.shared_rounds = from.shared_rounds;
    phase.weights_offset = static_cast<int>(partition.weights_offset[i]);
    phase.operand_pending = launch.backward && i == 0;
    // What the pointwise part broadcasts in a cluster. Forward: the last phase gives the state, the one before `inner`.
    // Backward: each phase gives the gradients of its gates, and the cell's last phase runs first.
    const bool last = i + 1 == partition.phases;
    const int gradients = l.cell.phase[0].gradients;  // gate gradients of the cell's first phase, which backward runs
                                                      // last
    if (launch.backward)
      phase.sent_first = last ? 0 : gradients, phase.sent_last = last && i > 0 ? gradients : l.cell.gates;
    else phase.sent_first = last ? 0 : 1, phase.sent_last = phase.sent_first + 1;
  }
  params.count = static_cast<int>(launch.count), params.last = static_cast<int>(launch.last);
  params.total_steps = l.shape.steps, params.batch = l.shape.batch;
  params.resets = l.shape.resets;
  params.offsets = memory.offsets;
  params.groups = partition.groups, params.rows_per_group = static_cast<int>(partition.rows_per_group);
  params.bands = static_cast<int>(divide_up(partition.rows_per_group, kPersistentBand));
  params.prefetched = launch.backward ? l.cell.saved : l.cell.gates;
  params.cluster = partition.cluster;
  // The first product's operand holds its values one after the other; those of the split gate have slices of their own,
  // behind all others. The second product's operand holds a single value.
  const int second = partition.phases == 1 ? -1 : launch.backward ? l.cell.phase[0].gates : 1;
  for (int number = 0; number < 4; ++number) {
    ClusterValue& value = params.value[number];
    for (int odd = 0; odd < 2; ++odd) value.at[odd] = static_cast<int>(partition.operand_at[number == second][odd]);
    if (launch.backward && number == l.cell.split_gate)
      value.first_byte = partition.phase[0].first_slices * kPersistentSlice;
    else if (number != second) value.first_byte = static_cast<int>(number * l.shape.hidden * l.element);
  }
  for (int i = 0; i < 2; ++i)
    for (int odd = 0; odd < 2; ++odd) params.operand_at[i][odd] = static_cast<int>(partition.operand_at[i][odd]);
  params.operand_bytes = static_cast<int>(partition.partial_offset - partition.ring_offset);
  params.ring_offset = static_cast<int>(partition.ring_offset),
  params.stage_bytes = static_cast<int>(partition.stage_bytes);
  params.partial_offset = static_cast<int>(partition.partial_offset);
  params.partial_bytes = static_cast<int>(partition.shared_bytes - partition.partial_offset);
  params.flags = memory.flags;
  params.timeout_ns = run.status ? run.timeout_ns : 0, params.status = run.status;
  params.sums = memory.sums, params.slots = partition.slots, params.own_offset = static_cast<int>(partition.own_offset);
}

// See PersistentPhase::held.
void find_held_phases(Launch& launch, const Layout& l) {
  for (int i = 0; i < launch.params.phases; ++i) {
    PersistentPhase& phase = launch.params.phase[i];
    bool whole = phase.slices % phase.depth_warps == 0 && phase.first_slices % phase.depth_warps == 0;
    for (int direction = 0; direction < launch.directions; ++direction) {
      const StepProduct& product = phase.product[direction];
      for (int segment = 0; segment < product.segments; ++segment)
        if (!product.copy_operand[segment] || product.depth[segment] * l.element % kPersistentSlice != 0) whole = false;
    }
    phase.first_rounds = phase.first_slices / phase.depth_warps;
    phase.held = phase.rounds == phase.register_rounds && (launch.params.cluster || whole);
  }
}

void run_launch(const Layout& l, const Launch& launch, const PersistentPartition& partition, const Run& run,
    const Kernels& kernels) {
  const PersistentParams& params = launch.params;
  const int64_t flags =
      partition.cluster ? 0 : static_cast<int64_t>(partition.blocks + 1) * partition.groups * launch.directions;
  int64_t first = l.shape.steps, last = 0;
  for (int i = 0; i < launch.directions; ++i) {
    const bool down = params.step.direction[i].reverse != launch.backward;  // whether t decreases
    const int64_t from = params.first_step[i], to = down ? from - launch.count + 1 : from + launch.count - 1;
    first = std::min({first, from, to}), last = std::max({last, from + 1, to + 1});
  }
  prepare(l, {params.flags, const_cast<int64_t*>(params.offsets)}, flags, first, last, kernels, run.stream);
  const LaunchShape shape{partition.blocks, partition.groups, launch.directions, 32 * partition.warps,
      partition.shared_bytes, partition.cluster ? partition.blocks : 0};
  const auto& launchers = partition.slots > 0 ? kernels.projected : kernels.persistent;
  launchers[static_cast<int>(math_of(l.shape.type, run.tf32))](
      launch.backward, params.phase[0].gates, shape, params, run.stream);
}

Launch forward_launch(const Layout& l, const ForwardArgs& args, const std::vector<Weights>& weights,
    int first_direction, const StepRange& range, const PersistentPartition& partition, const Run& run,
    const PersistentBuffers& memory, const StepParams& p) {
  Launch launch{
      false, first_direction, partition.directions, range.last - range.first, range.last - range.first - 1, {}};
  set_params(launch, l, partition, run, memory, p);
  PersistentParams& params = launch.params;
  for (int i = 0; i < launch.directions; ++i) {
    const ForwardDirection& from = args.direction[launch.first + i];
    const StepDirection& d = params.step.direction[i];
    params.first_step[i] = from.reverse ? l.shape.steps - 1 - range.first : range.first;
    const MovingRows output = moving(l, from.output, l.element), cells = moving(l, from.cells, l.state);
    MovingRows* rows = params.rows[i];
    const int64_t origin = from.reverse ? l.shape.steps - range.last : range.first;
    rows[M::kInputGates] = moving(l, from.input_gates, l.state, origin);
    rows[M::kOutput] = rows[M::kOutputBefore] = output;
    rows[M::kGates] = moving(l, from.gates, l.element);
    rows[M::kCells] = cells;
    rows[M::kCellsBefore] = cells.base ? cells : standing({from.c_n, l.cell.cells * l.shape.hidden});
    if (partition.slots == 0) rows[M::kInner] = standing(d.matrix[M::kInner]);
    PersistentPhase* phase = params.phase;
    phase[0].product[i] = forward_first_product(l, weights[launch.first + i], d);
    phase[0].product[i].copy_operand[0] = aligned(l, output) && l.copies(d.h0, l.width);
    if (partition.phases == 1) continue;
    phase[1].product[i] = forward_second_product(l, weights[launch.first + i], d);
    phase[1].operand[i][0] = rows[M::kInner];
  }
  find_held_phases(launch, l);
  return launch;
}

Launch backward_launch(const Layout& l, const BackwardArgs& args, int first_direction, bool finish,
    const PersistentPartition& partition, const Run& run, const PersistentBuffers& memory,
    const std::vector<BackwardBuffers>& buffers, const StepParams& p) {
  const int64_t count = args.last_step - args.first_step, first = args.first_step;
  Launch launch{true, first_direction, partition.directions, count, finish ? count : count - 1, {}};
  set_params(launch, l, partition, run, memory, p);
  PersistentParams& params = launch.params;
  for (int i = 0; i < launch.directions; ++i) {
    const BackwardDirection& from = args.direction[launch.first + i];
    const BackwardBuffers& buffer = buffers[launch.first + i];
    params.first_step[i] = from.reverse ? first : args.last_step - 1;
    const MovingRows output = moving(l, from.output, l.element), cells = moving(l, from.cells, l.state);
    const MovingRows d_gates = moving(l, from.d_gates, l.element, first),
                     d_recurrent = moving(l, from.d_recurrent, l.element, first);
    const MovingRows d_projected = moving(l, from.d_projected, l.element, first);
    MovingRows* rows = params.rows[i];
    rows[M::kOutput] = rows[M::kOutputBefore] = output;
    rows[M::kGates] = buffer.rebuilds() ? moving(l, buffer.gates, l.element, first) : moving(l, from.gates, l.element);
    rows[M::kCells] = rows[M::kCellsBefore] = cells;
    rows[M::kDOutput] = moving(l, from.d_output, l.element);
    rows[M::kDGates] = d_gates;
    rows[M::kDRecurrent] = d_recurrent;
    rows[M::kHPrev] = moving(l, from.h_prev, l.element, first);
    rows[M::kDProjected] = d_projected;
    rows[M::kInner] = moving(l, from.inner, l.element, first);
    rows[M::kDCells] = moving(l, from.d_cells, l.state);
    const auto segment = [&](int phase, int number, const BackwardWeights::Transposed& weight,
                             const MovingRows& operand) {
      StepProduct& product = params.phase[phase].product[i];
      set_segment(l, product, number, weight, {});
      product.copy_operand[number] = aligned(l, operand);
      params.phase[phase].operand[i][number] = operand;
    };
    segment(0, 0, buffer.weights.first[0], d_gates);
    if (l.cell.split_gate >= 0) segment(0, 1, buffer.weights.first[1], d_recurrent);
    if (partition.phases == 1) continue;
    MovingRows operand = d_projected;
    if (!l.cell.projects()) {
      operand = d_gates;
      operand.base += static_cast<uintptr_t>(l.cell.phase[0].gates * l.shape.hidden * l.element);
    }
    segment(1, 0, buffer.weights.second, operand);
  }
  find_held_phases(launch, l);
  return launch;
}

}  // namespace

void raise_if_timed_out(unsigned long long* status, unsigned long long nanoseconds) {
  if (!status || __atomic_load_n(status, __ATOMIC_ACQUIRE) == 0) return;
  const unsigned long long word = __atomic_exchange_n(status, 0ull, __ATOMIC_ACQ_REL);
  if (word == 0) return;  // another thread has taken it and throws
  const TimeoutReport g = report_of(word);
  const auto number = [](int64_t value) { return std::to_string(value); };
  throw std::runtime_error(
      "an earlier call on this device came to no end: its " + std::string(g.backward ? "backward" : "forward") +
      " kernel timed out in direction " + number(g.direction) + ", group " + number(g.group) + ", block " +
      number(g.block) + ", which at " + (g.step < 0 ? "the end" : "step " + number(g.step)) + ", product " +
      number(g.phase) + ", had waited " + number(static_cast<int64_t>(nanoseconds / 1000000000)) +
      " s for other blocks. What that call had not finished is NaN: run it again. Something kept blocks off the "
      "device's multiprocessors (another process, a debugger, a MIG slice or MPS limit); if that is to be expected, "
      "FASTRNN_PLAN=cuda:step takes kernels whose blocks wait for no others");
}

PersistentBuffers::PersistentBuffers(const Layout& l, int directions, Workspace& workspace)
    : flags(static_cast<unsigned*>(workspace.take(2 * kMostFlags * sizeof(unsigned)))),
      offsets(
          l.shape.step_offset ? static_cast<int64_t*>(workspace.take((l.shape.steps + 1) * sizeof(int64_t))) : nullptr),
      sums(static_cast<float*>(workspace.take(
          persistent_sums_bytes(l.shape.cell, l.shape.batch, l.shape.hidden, l.shape.projection, directions)))) {}

void gather_states_before(const Layout& l, const BackwardArgs& args, int64_t first_row, int64_t rows,
    const GatheredStates (&to)[2], const StepParams& p, const PersistentBuffers& memory, const Kernels& kernels,
    void* stream) {
  StatesBeforeParams params{};
  params.sequence.step = p;
  params.sequence.total_steps = l.shape.steps, params.sequence.batch = l.shape.batch;
  params.sequence.resets = l.shape.resets, params.sequence.offsets = memory.offsets;
  params.first_row = first_row, params.rows = rows;
  params.first_step = args.first_step, params.last_step = args.last_step;
  params.cells = l.cell.cells * l.shape.hidden;
  for (int i = 0; i < args.directions; ++i) {
    params.sequence.rows[i][StepMatrix::kOutputBefore] = moving(l, args.direction[i].output, l.element);
    params.sequence.rows[i][StepMatrix::kCellsBefore] = moving(l, args.direction[i].cells, l.state);
    params.h[i] = to[i].h, params.c[i] = to[i].c;
  }
  if (memory.offsets) prepare(l, memory, 0, args.first_step, args.last_step, kernels, stream);
  kernels.states_before(static_cast<int>(l.element), args.directions, params, stream);
}

bool persistent_forward(const Layout& l, const ForwardArgs& args, const std::vector<WholeWeights>& whole,
    const StepRange& range, const Run& run, const Kernels& kernels, const PersistentBuffers& memory,
    const StepParams& p) {
  const PersistentPartition partition = partition_of(l, args.directions, false, run);
  if (!partition.refusal.empty()) return false;
  std::vector<Weights> weights;
  for (const WholeWeights& of : whole) weights.push_back(of.fill(l, kernels, run.stream));
  for (int first = 0; first < args.directions; first += partition.directions)
    run_launch(l, forward_launch(l, args, weights, first, range, partition, run, memory, p), partition, run, kernels);
  return true;
}

bool persistent_backward(const Layout& l, const BackwardArgs& args, bool finish, const Run& run, const Kernels& kernels,
    const PersistentBuffers& memory, const std::vector<BackwardBuffers>& buffers, const StepParams& p) {
  const PersistentPartition partition = partition_of(l, args.directions, true, run);
  if (!partition.refusal.empty()) return false;
  // Streamed partial products read the weights of each gate in pieces of 16 bytes.
  if (partition.slots > 0 && partition.streamed_bytes > 0 && l.shape.hidden * l.element % 16 != 0) return false;
  for (int first = 0; first < args.directions; first += partition.directions)
    run_launch(l, backward_launch(l, args, first, finish, partition, run, memory, buffers, p), partition, run, kernels);
  return true;
}

}  // namespace fr
