// See launch.h.
#include "launch.h"

#include <algorithm>
#include <string>

namespace fr {
namespace {

constexpr int kMostUnits = 128, kMostStateBytes = 256;  // of a layer whose weights fit the registers of kernel.cuh

int64_t units_of(int64_t hidden) { return divide_up(hidden, kWarpUnits) * kWarpUnits; }

int64_t shared_bytes_of(bool backward, int gates, int64_t units, int64_t slices) {
  const int64_t header = divide_up(2 * sizeof(StepDirection), kRowBytes) * kRowBytes;
  const int64_t rows = backward ? 1 : gates, staged = rows * units * kRowBytes;
  const int64_t sums = units / kWarpUnits * rows * kBlockRows * (kWarpUnits + kSumsPad) * 4;
  const int64_t working = 2 * slices * kBlockRows * kRowBytes + sums;
  return header + std::max(staged, working);
}

// Where the rows of one of StepDirection's matrices lie in all steps, and the size of its elements. If rows.data is
// null, its address stays the same in all steps.
struct StepsOfMatrix {
  Rows rows{};
  int64_t element = 0;
};
struct StepsOfDirection {
  StepsOfMatrix matrix[StepMatrix::kCount];
  Weights weights;
};

// Fills the parameters of direction i.
void set_direction(const Layout& l, bool backward, int i, const StepsOfDirection& from, BlockParams& block) {
  StepDirection& d = block.step.direction[i];
  const int64_t forward = d.reverse != backward ? -1 : 1;
  const auto stride = [&](int k) { return from.matrix[k].rows.step_stride * from.matrix[k].element; };
  for (int k = 0; k < StepMatrix::kCount; ++k) block.advance[i][k] = from.matrix[k].rows.data ? forward * stride(k) : 0;
  // The address one step back. It may lie outside the buffer: kernels advance it before they read it.
  const auto before = [&](int k) {
    const Matrix& here = d.matrix[k];
    const auto bytes = static_cast<uintptr_t>(d.reverse ? -stride(k) : stride(k));
    return Matrix{reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(here.data) - bytes), here.row_stride};
  };
  d.matrix[StepMatrix::kOutputBefore] = before(StepMatrix::kOutput);
  if (from.matrix[StepMatrix::kCells].rows.data) d.matrix[StepMatrix::kCellsBefore] = before(StepMatrix::kCells);
  block.weight[i] = from.weights.hh, block.weight_stride[i] = from.weights.hh_stride;
}

// p describes the first step in processing order. count: steps; last: the last iteration.
void launch_block(const Launcher& launch, bool backward, int64_t count, int64_t last,
    const StepsOfDirection (&directions)[2], StepParams& p) {
  const Layout& l = launch.layout;
  BlockParams block{};
  p.rows = l.shape.batch, p.units = l.shape.hidden;
  block.step = p;
  block.count = count, block.last = last;
  block.total_steps = l.shape.steps, block.batch = l.shape.batch;
  block.resets = l.shape.resets;
  block.gate_slices = static_cast<int>(divide_up(l.shape.hidden * l.element, kRowBytes));
  block.slices = backward ? block.gate_slices * l.cell.gates : block.gate_slices;
  block.prefetched = backward ? l.cell.saved : l.cell.gates;
  for (int i = 0; i < launch.directions; ++i) set_direction(l, backward, i, directions[i], block);
  if (!l.cell.multiplies()) {
    const int blocks = static_cast<int>(divide_up(l.shape.batch * l.shape.hidden, kElementThreads));
    const LaunchShape shape{
        blocks, 1, launch.directions, kElementThreads, 2 * static_cast<int64_t>(sizeof(StepDirection))};
    return launch.kernels.elementwise(l.shape.type, backward, shape, block, launch.stream);
  }
  const int64_t units = units_of(l.shape.hidden);
  const LaunchShape shape{static_cast<int>(divide_up(l.shape.batch, kBlockRows)), 1, launch.directions,
      static_cast<int>(units / kWarpUnits * 32), shared_bytes_of(backward, l.cell.gates, units, block.slices)};
  launch.kernels.block[static_cast<int>(launch.math)](backward, l.cell.gates, shape, block, launch.stream);
}

}  // namespace

int64_t block_shared_bytes(Cell cell, Type type, int64_t hidden) {
  if (!facts_of(cell).multiplies()) return 2 * sizeof(StepDirection);
  const int gates = facts_of(cell).gates;
  const int64_t units = units_of(hidden), slices = divide_up(hidden * storage_bytes(type), kRowBytes);
  return std::max(shared_bytes_of(false, gates, units, slices), shared_bytes_of(true, gates, units, slices * gates));
}

std::string block_refusal(Cell cell, Type type, bool tf32, int64_t hidden, int64_t shared_limit) {
  const CellFacts& facts = facts_of(cell);
  const int64_t bytes = hidden * storage_bytes(type);
  if (!facts.multiplies()) return "";  // elementwise.cuh takes any type and size
  if (facts.two_phases())
    return "cells with two products a step have no block kernel: a cluster of one block serves those that it can hold";
  if (facts.gates == 2) return "cells of two gates have no block kernel, a cluster of one block serves them";
  if (type == Type::kFloat64 || (type == Type::kFloat32 && !tf32))
    return "products without tensor cores have no block kernel, a cluster of one block serves them";
  if (hidden > kMostUnits || bytes > kMostStateBytes)
    return "a state of " + std::to_string(hidden) + " units and " + std::to_string(bytes) +
           " bytes a row, block serves " + std::to_string(kMostUnits) + " and " + std::to_string(kMostStateBytes);
  const int64_t shared = block_shared_bytes(cell, type, hidden);
  if (shared > shared_limit)
    return "a block needs " + std::to_string(shared) + " bytes of shared memory, the device gives " +
           std::to_string(shared_limit);
  return "";
}

bool serves_block(const Layout& l, const Run& run) {
  return !l.shape.batch_sizes &&
         block_refusal(l.shape.cell, l.shape.type, run.tf32, l.shape.hidden, run.shared_limit).empty();
}

void block_forward(const Launcher& launch, const ForwardArgs& args, const std::vector<WholeWeights>& weights,
    const StepRange& range, StepParams& p) {
  const Layout& l = launch.layout;
  place_forward_step(l, args, range, range.first, p);
  StepsOfDirection directions[2];
  for (int i = 0; i < args.directions; ++i) {
    const ForwardDirection& from = args.direction[i];
    StepsOfMatrix* matrix = directions[i].matrix;
    directions[i].weights = weights[i].fill(l, launch.kernels, launch.stream);
    matrix[StepMatrix::kInputGates] = {from.input_gates, l.state};
    matrix[StepMatrix::kOutput] = matrix[StepMatrix::kOutputBefore] = {from.output, l.element};
    matrix[StepMatrix::kGates] = {from.gates, l.element};
    matrix[StepMatrix::kCells] = matrix[StepMatrix::kCellsBefore] = {from.cells, l.state};
  }
  launch_block(launch, false, range.last - range.first, range.last - range.first - 1, directions, p);
}

void block_backward(const Launcher& launch, const BackwardArgs& args, const std::vector<WholeWeights>& weights,
    const std::vector<BackwardBuffers>& buffers, const BackwardSteps& steps, StepParams& p) {
  const Layout& l = launch.layout;
  place_backward_step(l, args, buffers, steps, 0, p);
  StepsOfDirection directions[2];
  for (int i = 0; i < args.directions; ++i) {
    const BackwardDirection& from = args.direction[i];
    StepsOfMatrix* matrix = directions[i].matrix;
    directions[i].weights = weights[i].fill(l, launch.kernels, launch.stream);
    matrix[StepMatrix::kOutput] = matrix[StepMatrix::kOutputBefore] = {from.output, l.element};
    matrix[StepMatrix::kGates] = {buffers[i].rebuilds() ? buffers[i].gates : from.gates, l.element};
    matrix[StepMatrix::kCells] = matrix[StepMatrix::kCellsBefore] = {from.cells, l.state};
    matrix[StepMatrix::kDOutput] = {from.d_output, l.element};
    matrix[StepMatrix::kDGates] = {from.d_gates, l.element};
    matrix[StepMatrix::kDRecurrent] = {from.d_recurrent, l.element};
    matrix[StepMatrix::kHPrev] = {from.h_prev, l.element};
    matrix[StepMatrix::kDCells] = {from.d_cells, l.state};
  }
  launch_block(launch, true, steps.count, steps.last(), directions, p);
}

}  // namespace fr
