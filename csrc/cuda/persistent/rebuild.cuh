// Gathers the state that each row of a range of steps started from, out of what forward wrote. With these states gates
// can be rebuilt for all rows at once, as if they belonged to a single first step. Launched by launch.cpp.
//
// Cost, for an LSTM of 1024 units, B = 16, T = 1024 in bf16: one more product of forward's size, without its exchanges.
// That is 137 GFLOP in tiles of 64 gate rows x 64 rows, 32 FLOP for each byte read: 0.8 ms at L2's 5.5 TB/s, beside
// 5.5 ms predicted for forward and backward. It saves 8 KiB a row (128 MiB) between forward and backward. Scratch
// memory: R*s + H*4 bytes of states a row and direction, beside the gates.
//
// The caller cuts the sequence into ranges whose buffers take at most 128 MiB (fastrnn/_core/backward.py). For that
// LSTM a row takes 12 KiB, or 42 KiB with rebuilt gates (gates 8, their input part 16, old states 6): ranges of 682 or
// 195 steps. A range costs about 15 us: it transposes the weights (16 MiB through L2), loads them again, and takes
// three launches more, five with rebuilt gates. That is under 3 % of the time of its steps.
#pragma once

#include "../launch.cuh"
#include "rows.cuh"

namespace fr::FR_TARGET {

FR_GLOBAL(states_before_kernel)

// work    grid (rows / 8, 1, directions): a warp copies a row's old states h and c, or zeros if the row is inactive.
// memory  global only: R + kCells*H elements read and written a row. sync: none.
// H, C: unsigned integers as wide as an element of storage and of state; bits are copied.
template <class H, class C>
struct StatesBeforeKernel {
  static constexpr const char* kName = "states_before_kernel";
  FR_ENTRY(states_before_kernel)
  static constexpr int kMaxThreads = 256;
  static constexpr bool kCooperative = false;
  static constexpr int kRows = kMaxThreads / 32;
  using Params = StatesBeforeParams;

  // The step that the row at this position belongs to.
  FR_DEVICE static int64_t step_of(const StatesBeforeParams& p, int64_t position) {
    const PersistentParams& sequence = p.sequence;
    if (!sequence.offsets) return position / sequence.batch;
    int64_t low = p.first_step, high = p.last_step;  // invariant: offsets[low] <= position < offsets[high]
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      if (sequence.offsets[middle] <= position) low = middle;
      else high = middle;
    }
    return low;
  }

  template <class T>
  FR_DEVICE static void copy(T* to, const T* from, int64_t count) {
    for (int64_t i = thread_index() % 32; i < count; i += 32) to[i] = from ? from[i] : T(0);
  }

  FR_DEVICE static void run(const StatesBeforeParams& p) {
    const PersistentParams& sequence = p.sequence;
    const int64_t r = static_cast<int64_t>(block_x()) * kRows + thread_index() / 32;
    if (r >= p.rows) return;
    const StepDirection& d = sequence.step.direction[block_z()];
    const int64_t t = step_of(p, p.first_row + r), before = d.reverse ? t + 1 : t - 1;
    const int64_t b = p.first_row + r - (sequence.offsets ? sequence.offsets[t] : t * sequence.batch);
    const RowState row = row_state(step_rows(sequence, d.reverse, t), d.reverse, sequence.step.lengths, b);
    const auto from = [&](auto type, int matrix, const void* initial, int64_t width) {
      using T = decltype(type);
      return row.active ? old_row<T>(row, sequence.step.reset_to_initial,
                              rows_of_step(sequence, sequence.rows[block_z()][matrix], before), initial, width, b)
                        : nullptr;
    };
    copy(static_cast<H*>(p.h[block_z()]) + r * sequence.step.width,
        from(H(), StepMatrix::kOutputBefore, d.h0, sequence.step.width), sequence.step.width);
    if (p.c[block_z()])
      copy(static_cast<C*>(p.c[block_z()]) + r * p.cells, from(C(), StepMatrix::kCellsBefore, d.c0, p.cells), p.cells);
  }
};

template <class H, class C>
void launch_states_before(int directions, const StatesBeforeParams& params, void* stream) {
  using Kernel = StatesBeforeKernel<H, C>;
  const auto blocks = static_cast<int>((params.rows + Kernel::kRows - 1) / Kernel::kRows);
  launch<Kernel>({blocks, 1, directions, Kernel::kMaxThreads, 0}, params, stream);
}

}  // namespace fr::FR_TARGET
