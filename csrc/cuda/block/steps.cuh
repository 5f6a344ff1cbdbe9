// The steps of a launch that runs a whole sequence of padded rows. A block keeps the addresses of two steps in shared
// memory, in turn. Used by kernel.cuh and elementwise.cuh.
#pragma once

#include "../phases.cuh"

namespace fr::FR_TARGET {

FR_DEVICE StepRows rows_at(const BlockParams& p, int64_t t) {
  StepRows rows;
  if (t < 0 || t >= p.total_steps) return rows;
  rows.step = t;
  rows.rows = p.batch, rows.rows_after = t + 1 < p.total_steps ? p.batch : 0;
  rows.resets = p.resets ? p.resets + t * p.batch : nullptr;
  rows.alike = !p.step.lengths && !p.resets;
  const bool has_after = t + 1 < p.total_steps, reverse = p.step.direction[block_z()].reverse;
  rows.has_before = reverse ? has_after : t > 0, rows.last = reverse ? t == 0 : !has_after;
  rows.goes_on = rows.alike && rows.has_before && !rows.last;
  rows.resets_after = p.resets && t + 1 < p.total_steps ? p.resets + (t + 1) * p.batch : nullptr;
  return rows;
}

// Computes the addresses of iteration s + 1 from those of iteration s, which are current[s % 2]. t0: the step of
// iteration 0.
template <bool kBackward>
FR_DEVICE void next_step(const BlockParams& p, StepDirection* current, int64_t s, int64_t t0, int thread) {
  const StepDirection& d = current[s % 2];
  StepDirection& next = current[1 - s % 2];
  if (s == 0 && thread == StepMatrix::kCount) {  // what all steps share, once
    next.reverse = d.reverse;
    next.h0 = d.h0, next.c0 = d.c0, next.h_n = d.h_n, next.c_n = d.c_n;
    next.d_h = d.d_h, next.d_c = d.d_c, next.d_h0_reset = d.d_h0_reset, next.d_c0_reset = d.d_c0_reset;
    next.product.bias = d.product.bias, next.product.gate_rows = d.product.gate_rows;
  }
  if (thread < StepMatrix::kCount) {
    const Matrix& from = d.matrix[thread];
    next.matrix[thread] = {static_cast<char*>(from.data) + p.advance[block_z()][thread], from.row_stride};
  }
  if (thread == StepMatrix::kCount + 1) {
    next.pending = d.here;
    next.here =
        kBackward && s + 1 == p.count ? StepRows{} : rows_at(p, t0 + (s + 1) * (d.reverse != kBackward ? -1 : 1));
  }
}

}  // namespace fr::FR_TARGET
