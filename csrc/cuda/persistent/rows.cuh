// Where the rows of a step lie in a persistent launch, which iterates over the steps itself. Used by kernel.cuh,
// projected.cuh and rebuild.cuh.
#pragma once

#include "params.h"
#include "../phases.cuh"

namespace fr::FR_TARGET {

// The parameters by an address that is hidden from the optimiser. Otherwise it would read what only options need ahead
// of the loop over elements, in plain steps too.
FR_DEVICE const PersistentParams& read_again(const PersistentParams& p) { return (&p)[made_anew(0)]; }

FR_DEVICE Matrix rows_of_step(const PersistentParams& p, const MovingRows& rows, int64_t t) {
  if (!rows.base || t < 0 || t >= p.total_steps) return {};
  const int64_t position = p.offsets ? p.offsets[t] : t;
  return {reinterpret_cast<void*>(rows.base + static_cast<uintptr_t>(position * rows.bytes)), rows.row_stride};
}

FR_DEVICE StepRows step_rows(const PersistentParams& p, bool reverse, int64_t t) {
  StepRows rows;
  if (t < 0 || t >= p.total_steps) return rows;
  const auto first_row = [&](int64_t step) { return p.offsets ? p.offsets[step] : step * p.batch; };
  const bool has_after = t + 1 < p.total_steps;
  rows.step = t;
  rows.rows = p.offsets ? p.offsets[t + 1] - p.offsets[t] : p.batch;
  if (has_after) rows.rows_after = p.offsets ? p.offsets[t + 2] - p.offsets[t + 1] : p.batch;
  rows.alike = !p.step.lengths && !p.resets && rows.rows == p.batch && (!has_after || rows.rows_after == p.batch);
  rows.has_before = reverse ? has_after : t > 0, rows.last = reverse ? t == 0 : !has_after;
  rows.goes_on = rows.alike && rows.has_before && !rows.last;
  if (p.resets) {
    rows.resets = p.resets + first_row(t);
    if (has_after) rows.resets_after = p.resets + first_row(t + 1);
  }
  return rows;
}

FR_DEVICE StepDirection* placed_steps() {  // [2][2]: addresses of two consecutive steps, for each phase
  return reinterpret_cast<StepDirection*>(shared_memory(0, 4 * sizeof(StepDirection)));
}

// Computes the addresses and active rows of iteration s, for each phase; `from` has those of the iteration before. One
// warp takes the matrices; the rows are left to the next one, if there is one.
template <bool kBackward>
FR_DEVICE void place_step(
    const PersistentParams& p, int direction, StepDirection* to, const StepDirection* from, int64_t s, int thread) {
  constexpr int kWords = sizeof(StepRows) / sizeof(uint64_t);
  static_assert(sizeof(StepRows) % sizeof(uint64_t) == 0 && StepMatrix::kCount + 1 + kWords <= 32);
  const int lane = thread % 32, of_rows = block_threads() > 32 ? 1 : 0;
  if (thread >= 64) return;
  const bool reverse = p.step.direction[direction].reverse;
  const int64_t t = p.first_step[direction] + (reverse != kBackward ? -s : s);
  if (thread < StepMatrix::kCount) {
    const bool before = lane == StepMatrix::kOutputBefore || lane == StepMatrix::kCellsBefore;
    const Matrix rows = rows_of_step(p, p.rows[direction][lane], before ? (reverse ? t + 1 : t - 1) : t);
    for (int phase = 0; phase < p.phases; ++phase) to[phase].matrix[lane] = rows;
  }
  if (thread / 32 != of_rows) return;
  if (lane == StepMatrix::kCount) {
    const StepRows rows = s < p.count ? step_rows(p, reverse, t) : StepRows{};
    for (int phase = 0; phase < p.phases; ++phase) {
      to[phase].here = rows;
      if (kBackward && s == 0) to[phase].pending = StepRows{};
    }
  } else if (kBackward && s > 0 && lane > StepMatrix::kCount && lane <= StepMatrix::kCount + kWords) {
    const int word = lane - StepMatrix::kCount - 1;
    const uint64_t value = reinterpret_cast<const uint64_t*>(&from->here)[word];
    for (int phase = 0; phase < p.phases; ++phase) reinterpret_cast<uint64_t*>(&to[phase].pending)[word] = value;
  }
}

// Prefetches the rows that a band's pointwise part will read: the input part of the gates, or the saved values.
template <class Math, bool kBackward>
FR_DEVICE void prefetch_rows(
    const PersistentParams& p, const StepDirection& d, int row0, int end, int unit0, int unit_bits, int thread) {
  const Matrix& matrix = d.matrix[kBackward ? StepMatrix::kGates : StepMatrix::kInputGates];
  constexpr int kElement = kBackward ? sizeof(typename Math::Storage) : sizeof(typename Math::State),
                kLine = kPersistentSlice / kElement;
  if (!matrix.data || d.here.step < 0) return;
  constexpr int kLineBits = kLine == 32 ? 5 : 6;
  static_assert(kLine == 1 << kLineBits);
  // log2 of the lines that this block's units take in each of the row's `prefetched` blocks of H values
  const int line_bits = unit_bits > kLineBits ? unit_bits - kLineBits : 0;
  const int items = kPersistentBand * p.prefetched << line_bits;
  for (int i = thread; i < items; i += block_threads()) {
    const int b = row0 + i % kPersistentBand, line = i / kPersistentBand;
    const int unit = unit0 + (line & ((1 << line_bits) - 1)) * kLine;
    if (b < end && b < d.here.rows && unit < p.step.hidden)
      prefetch(static_cast<const char*>(matrix.data) +
               (b * matrix.row_stride + (line >> line_bits) * p.step.hidden + unit) * kElement);
  }
}

}  // namespace fr::FR_TARGET
