// What forward and backward share between the public entry points (rnn_cpu.cpp) and the instruction sets' tables
// (kernels.h): argument checks, the division of work among threads, and a call's scratch memory.
//
// Threads split directions first, then batch rows for the whole sequence (no barrier), and hidden units only if rows
// are few. The result never depends on the split: every sum has one fixed order (product.h, outer.h).
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "arena.h"
#include "kernels.h"

namespace fr::cpu {

// The table of the instruction set in use for a cell and type.
const CellKernels& choose_kernels(Cell cell, Type type);
// The table for prepared weights. Throws if there is none.
const CellKernels& choose_serving(Cell cell, Form form);

// ---- argument checks ----

[[noreturn]] void refuse(const char* argument, const std::string& expected);
// expected: a text, or a function that returns one and is called only if the check fails. A call makes dozens of
// checks; composing all their texts would take about as long as a single step.
template <class Text>
void require(bool holds, const char* argument, const Text& expected) {
  if (holds) [[likely]]
    return;
  if constexpr (std::is_invocable_v<Text>) refuse(argument, expected());
  else refuse(argument, expected);
}
void check_address(const void* data, int64_t alignment, const char* argument, bool needed);

// Checks the arguments that forward and backward have in common.
template <class Args>
const CellFacts& check(const Args& args) {
  const Shape& s = args.shape;
  const CellFacts& cell = facts_of(s.cell);
  const int type = static_cast<int>(s.type);
  require(type >= 0 && type <= 3, "type", [&] { return "a code from 0 to 3, got " + std::to_string(type); });
  require(s.steps >= 0 && s.batch >= 0 && s.input >= 0 && s.hidden > 0 && s.projection >= 0, "shape",
      "sizes that are not negative and hidden > 0");
  require(cell.projects() == (s.projection > 0), "projection", [&] {
    return "a size above zero for the cell with projection and zero for all others, got " +
           std::to_string(s.projection);
  });
  const NoiseOptions& noise = args.options.noise;
  for (const double p : {noise.zoneout_h, noise.zoneout_c, noise.candidate})
    require(p >= 0 && p < 1, "noise", [&] { return "probabilities in [0, 1), got " + std::to_string(p); });
  require(cell.zones_cells || noise.zoneout_c == 0, "zoneout_c", "0: the cell has no state to keep");
  require(cell.drops_candidate || noise.candidate == 0, "candidate_dropout", "0: the cell has no candidate");
  check_address(noise.seed, 8, "seed", false);
  require(args.options.gradient_clip >= 0, "gradient_clip",
      [&] { return "a bound that is not negative, got " + std::to_string(args.options.gradient_clip); });
  require(args.directions > 0 && static_cast<size_t>(args.directions) == args.direction.size(), "direction", [&] {
    return "at least one, got " + std::to_string(args.directions) + " of " + std::to_string(args.direction.size());
  });
  require((s.batch_sizes == nullptr) == (s.step_offset == nullptr), "step_offset",
      "a value exactly where batch_sizes has one");
  const bool rows = s.steps > 0 && s.batch > 0;
  const int64_t storage = storage_bytes(s.type), state = state_bytes(s.type);
  for (int d = 0; d < args.directions; ++d) {
    const auto& x = args.direction[d];
    const bool reads = rows && !x.weights.prepared;
    check_address(x.weights.ih, storage, "weight_ih", reads && s.input > 0);
    check_address(x.weights.hh, storage, "weight_hh", reads && cell.multiplies());
    check_address(x.weights.hr, storage, "weight_hr", reads && s.projection > 0);
    check_address(x.weights.unit, storage, "weight_unit", rows && cell.unit_weights > 0);
    require((x.weights.bias_ih && cell.multiplies()) == (x.weights.bias_hh != nullptr), "bias_hh",
        "a bias exactly where bias_ih has one and the cell a weight_hh");
    require(x.weights.prepared ||
                (x.weights.ih_stride >= s.input && (!cell.multiplies() || x.weights.hh_stride >= s.width()) &&
                    (!s.projection || x.weights.hr_stride >= s.hidden)),
        "weight strides", "rows that do not overlap");
    check_address(x.output.data, storage, "output", rows);
    check_address(x.cells.data, state, "cells", false);
    check_address(x.h0, storage, "h0", false);
    check_address(x.c0, state, "c0", false);
    check_address(x.gates.data, storage, "gates", false);
    check_address(x.weights.state_mask, state, "state_mask", false);
    require(x.output.row_stride >= s.width(), "output", "rows that do not overlap");
  }
  return cell;
}

// Throws unless the prepared weights are of this layer, in the form of the first direction's (`first`; null: it has
// none) and for the instruction set in use.
void check_prepared(const ForwardDirection& direction, const Shape& shape, const Prepared* first);

// ---- sharing the work ----

struct Sharing {
  int directions;
  bool by_units;

  // Threads that share a direction if `count` threads run. If they divide evenly, each direction has threads of its
  // own, or each thread whole directions. Otherwise all threads share every direction.
  int group(int count) const {
    return count % directions == 0 ? count / directions : directions % count == 0 ? 1 : count;
  }
};

struct Team {
  Call call;
  Sharing sharing;
  int threads, product_threads;              // for steps; for the products of backward, which have no barriers
  std::vector<int64_t> active, work_before;  // [B], [B + 1]: sums of active over the rows before
  std::unique_ptr<Barrier[]> barriers;       // one a direction
};

// Fills the team for a call over all steps.
void prepare(Team& team, const Shape& shape, const Options& options, int directions, int threads, const CellFacts& cell,
    const CellKernels& kernels, bool forward);

// Calls work(part) for each part of thread `index` of `count`.
template <class Work>
void for_each_part(const Team& team, int index, int count, Work work) {
  const Sharing& sharing = team.sharing;
  const std::vector<int64_t>& work_before = team.work_before;
  const int64_t batch = team.call.shape.batch;
  const int group = sharing.group(count), member = index % group;
  const int groups = count / group, each = sharing.directions / groups, first = index / group * each;
  // The first row of a share, so that shares have about equal numbers of active steps.
  const auto boundary = [&](int share) -> int64_t {
    if (share == 0 || share == group) return share == 0 ? 0 : batch;
    const int64_t target = work_before[batch] * share / group;
    int64_t row = 0;
    while (row < batch && work_before[row] < target) ++row;
    return row;
  };
  for (int direction = first; direction < first + each; ++direction) {
    if (sharing.by_units && group > 1) work(Part{direction, 0, batch, member, group});
    else work(Part{direction, boundary(member), boundary(member + 1), 0, 1});
  }
}

// ---- packed weights and scratch ----

MatrixSource transposed_source(const void* data, int64_t stride, int64_t units, int64_t depth);

// Whether weights are packed ahead. Weights that are used once are packed block by block when they are used, in cache.
bool packs(int64_t steps, int64_t batch);

// Sets the sources of one direction's weights.
void set_sources(DirectionWork& work, const Shape& s, const CellFacts& cell, const Weights& w);

// Points the panels into prepared weights, from `first` on, and returns their bytes.
int64_t place_panels(DirectionWork& work, const CellKernels& kernels, const CellFacts& cell, void* first);

// Registers all buffers that the forward pass of one direction needs, except `zeros`.
void want_forward(Arena& arena, DirectionWork& work, const CellKernels& kernels, const Shape& s, const CellFacts& cell,
    const Weights& w, bool pack, bool pack_input);
void want_zeros(Arena& arena, DirectionWork& work, const Shape& s);
void clear_zeros(const DirectionWork& work, const Shape& s);

// The number of steps whose input product is computed together, at most `most`, and the rows of these steps.
struct Chunk {
  int64_t steps, rows;
};
Chunk chunk_of(const Team& team, const CellKernels& kernels, const CellFacts& cell, int64_t most);

// Whether input weights are packed ahead: not if one chunk covers all steps and no other thread needs them for other
// rows.
bool packs_input(const Team& team, Chunk chunk);

void want_scratch(
    Arena& arena, Scratch& scratch, const CellKernels& kernels, const Team& team, const CellFacts& cell, Chunk chunk);

}  // namespace fr::cpu
