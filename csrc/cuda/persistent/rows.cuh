// Where the rows of a step lie in a persistent launch, which iterates over the steps itself. Used by kernel.cuh,
// projected.cuh and rebuild.cuh.
#pragma once

#include "params.h"
#include "../phases.cuh"

namespace fr::FR_TARGET {

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
  rows.rows = first_row(t + 1) - first_row(t);
  if (has_after) rows.rows_after = first_row(t + 2) - first_row(t + 1);
  rows.alike = !p.step.lengths && !p.resets && rows.rows == p.batch && (!has_after || rows.rows_after == p.batch);
  rows.has_before = reverse ? has_after : t > 0, rows.last = reverse ? t == 0 : !has_after;
  if (p.resets) {
    rows.resets = p.resets + first_row(t);
    if (has_after) rows.resets_after = p.resets + first_row(t + 1);
  }
  return rows;
}

FR_DEVICE StepDirection* placed_steps() {  // [2][2]: addresses of two consecutive steps, for each phase
  return reinterpret_cast<StepDirection*>(shared_memory(0, 4 * sizeof(StepDirection)));
}

// Computes the addresses and active rows of iteration s, for each phase.
template <bool kBackward>
FR_DEVICE void place_step(const PersistentParams& p, int direction, StepDirection* to, int64_t s, int thread) {
  if (thread > StepMatrix::kCount + 1) return;  // a third of a warp; what follows would cost the others 50 instructions
  const bool reverse = p.step.direction[direction].reverse;
  const int64_t forward = reverse != kBackward ? -1 : 1, t = p.first_step[direction] + s * forward;
  for (int phase = 0; phase < p.phases; ++phase) {
    StepDirection& d = to[phase];
    if (thread < StepMatrix::kCount) {
      const bool before = thread == StepMatrix::kOutputBefore || thread == StepMatrix::kCellsBefore;
      d.matrix[thread] = rows_of_step(p, p.rows[direction][thread], before ? (reverse ? t + 1 : t - 1) : t);
    } else if (thread == StepMatrix::kCount) {
      d.here = s < p.count ? step_rows(p, reverse, t) : StepRows{};
    } else if (thread == StepMatrix::kCount + 1) {
      d.pending = kBackward && s > 0 ? step_rows(p, reverse, t - forward) : StepRows{};
    }
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
  const int line_bits = unit_bits > kLineBits ? unit_bits - kLineBits : 0;  // log2 of the lines of a block of H values
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
