// The `block` strategy: a whole sequence in one launch. One block holds the recurrent weights of a direction in
// registers and serves 8 batch rows; blocks never communicate, so the launch need not be cooperative. For cells with
// one product, tensor-core arithmetic, at most 128 units and 256 bytes of state a row (H <= 128 in 16 bit, 64 in TF32),
// and padded rows. Launched by launch.cpp. The pointwise phases are those of phases.cuh, so every option but dropout
// of the state works here too.
#pragma once

#include "steps.cuh"
#include "../launch.cuh"
#include "../tile.cuh"

namespace fr::FR_TARGET {

FR_GLOBAL(block_kernel)

// work    grid (row tiles of 8, 1, directions). Warp w computes kGates gate rows of units [16 w, 16 w + 16) for 8 rows:
//         in each step kGates * 4 mma a slice of 128 bytes of depth, then the pointwise phase for 4 elements a lane.
//         Forward: the depth is the state (2 slices), kGates the cell's. Backward: the depth is all gate gradients (up
//         to 8 slices), kGates = 1.
// memory  registers: kSlices * 16 * kGates for weights (128 for an LSTM of 128 units), 4 * kGates sums. shared: two
//         copies of StepDirection; two buffers of the operand, slices * 8 rows * 128 bytes each; partial sums, 640
//         bytes a warp and gate. Before the first step the same space stages the weights, slice by slice. global: a
//         step reads the input part of the gates and writes the output (training: gates and cells too) of its rows.
// sync    two block_syncs a slice of weights at the start, then one a step. It separates step s's reads of operand
//         buffer and StepDirection s % 2 from the writes for step s + 2, and makes those for step s + 1 visible.
//         Partial sums stay within a warp: warp_sync before and after they are read.
// cost    start: 128 KiB of weights through L2 and shared memory, about 3 us a call. A step of LSTM 128 in 16 bit
//         forward: 32 mma a warp, in 4 independent chains of 8 at about 20 cycles each: 0.1 us; one barrier, 0.05 us.
//         Backward: 32 mma in one chain, about 0.35 us. A whole step of forward, measured on an H200: 2.0 us with one
//         row, 3.6 us with 8.
template <class Math, int kGates, int kSlices, bool kBackward>
struct BlockKernel {
  static constexpr const char* kName = "block_kernel";
  FR_ENTRY(block_kernel)
  static constexpr int kMaxThreads = 256;
  static constexpr bool kCooperative = false;
  static constexpr int kRows = kBlockRows, kPitch = kWarpUnits + kSumsPad,
                       kSteps = kRowPieces / 2;  // kSteps: mma a slice
  static constexpr int kHeaderBytes = (2 * sizeof(StepDirection) + kRowBytes - 1) / kRowBytes * kRowBytes;
  using Params = BlockParams;
  using Storage = typename Math::Storage;
  using State = typename Math::State;
  using V = Scalar<State, Math::kTensor>;
  static constexpr int kSliceDepth = kRowBytes / sizeof(Storage), kPieceDepth = kPieceBytes / sizeof(Storage);

  // Where element k of an operand row lies in a slice; the operand is a list of slices of kRows rows each.
  FR_DEVICE static Storage* place(unsigned char* operand, int slice, int row, int k) {
    return reinterpret_cast<Storage*>(operand + slice * kRows * kRowBytes + piece_offset(row, k / kPieceDepth)) +
           k % kPieceDepth;
  }

  struct Sums {
    static constexpr bool kDropsState = false, kStoresEntering = false;
    const State* partial;    // of this element; null: no product yet
    unsigned char* operand;  // the operand that the next step reads
    int row, unit, gate_slices;
    FR_DEVICE State operator()(int m) const { return partial ? partial[m * kRows * kPitch] : State(0); }
    FR_DEVICE void keep(int gate, Storage v) const {
      *place(operand, gate * gate_slices + unit / kSliceDepth, row, unit % kSliceDepth) = v;
    }
  };

  // Loads one slice of the weights into shared memory: row m * units + unit, depth along the row, zero outside the
  // matrix. Complete after wait_copies and a block_sync.
  FR_DEVICE static void stage_weights(const BlockParams& p, int direction, int slice, int units, unsigned char* to) {
    const auto* weight = static_cast<const Storage*>(p.weight[direction]);
    const int64_t stride = p.weight_stride[direction], hidden = p.step.hidden;
    union alignas(kPieceBytes) Piece {
      Storage value[kPieceDepth];
      uint32_t word[4];
    };
    if constexpr (kBackward) {  // row: unit j of the state; depth: unit k of a gate. The weights of all j for one k are
                                // contiguous in memory, so a piece is spread over as many rows
      const int pieces = units / kPieceDepth;
      for (int i = thread_index(); i < pieces * kSliceDepth; i += block_threads()) {
        const int piece = i % pieces, k = i / pieces;
        const int64_t unit = static_cast<int64_t>(slice % p.gate_slices) * kSliceDepth + k, j = piece * kPieceDepth;
        Piece values{};
        if (unit < hidden && j < hidden)
          values = *reinterpret_cast<const Piece*>(weight + (slice / p.gate_slices * hidden + unit) * stride + j);
        for (int e = 0; e < kPieceDepth; ++e)
          reinterpret_cast<Storage*>(to + piece_offset(piece * kPieceDepth + e, k / kPieceDepth))[k % kPieceDepth] =
              values.value[e];
      }
    } else {
      for (int i = thread_index(); i < kGates * units * kRowPieces; i += block_threads()) {
        const int row = i / kRowPieces, piece = i % kRowPieces;
        const int64_t unit = row % units, depth = static_cast<int64_t>(slice) * kSliceDepth + piece * kPieceDepth;
        const Storage* from = weight + (row / units * hidden + unit) * stride + depth;
        const bool some = unit < hidden && depth < hidden;  // even a copy of no bytes needs a valid address
        copy_async(to + piece_offset(row, piece), some ? from : weight, some ? kPieceBytes : 0);
      }
      commit_copies();
    }
  }

  // Prefetches the next step's rows from global memory, a line a lane: the input part of the gates, or in backward the
  // saved values.
  FR_DEVICE static void prefetch_rows(
      const BlockParams& p, const StepDirection& d, int direction, int64_t row0, int64_t unit, int lane) {
    const int64_t b = row0 + lane % kRows, block = lane / kRows;
    constexpr int kRead = kBackward ? StepMatrix::kGates : StepMatrix::kInputGates;
    const Matrix& matrix = d.matrix[kRead];
    const int64_t advance = p.advance[direction][kRead], element = kBackward ? sizeof(Storage) : sizeof(State);
    if (!matrix.data || b >= p.step.rows || unit >= p.step.hidden || block >= p.prefetched) return;
    prefetch(static_cast<const char*>(matrix.data) + advance +
             (b * matrix.row_stride + block * p.step.hidden + unit) * element);
  }

  template <class Element>
  FR_DEVICE static void pointwise(const Element& element, Cell cell) {
    switch (cell) {
#define FR_CELL(name, Type) \
  case Cell::name: \
    if constexpr (Numbers<Type>::kTwoPhases || !Numbers<Type>::kMultiplies) break; \
    else if constexpr (kBackward) element.template backward_first<Type>(); \
    else if constexpr (Numbers<Type>::kGates == kGates) element.template forward_first<Type>(); \
    break;
#include "../../cells/cells.inc"
#undef FR_CELL
    }
  }

  using Weights = uint32_t[kSlices][kSteps][kGates][4];

  // Loads the warp's weights into registers, slice by slice through shared memory.
  FR_DEVICE static void load_weights(const BlockParams& p, int direction, int units, Weights& weights) {
    const int lane = thread_index() % 32, line = lane % 8, matrix = lane / 8, unit0 = thread_index() / 32 * kWarpUnits;
    unsigned char* staged = shared_memory(kHeaderBytes, kGates * units * kRowBytes);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice >= p.slices) break;
      stage_weights(p, direction, slice, units, staged);
      wait_copies<0>();
      block_sync();
#pragma unroll
      for (int k = 0; k < kSteps; ++k)
#pragma unroll
        for (int m = 0; m < kGates; ++m) {
          const int row = m * units + unit0 + matrix % 2 * 8 + line;
          load_matrix_x4(weights[slice][k][m], staged + piece_offset(row, 2 * k + matrix / 2));
          Math::prepare(weights[slice][k][m]);
        }
      block_sync();
    }
  }

  // Multiplies the operand by the warp's weights and stores the sums in `partial`.
  FR_DEVICE static void multiply(
      const BlockParams& p, const Weights& weights, const unsigned char* operand, State* partial) {
    const int lane = thread_index() % 32, line = lane % 8, matrix = lane / 8;
    State sums[kGates][4] = {};
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice >= p.slices) break;
#pragma unroll
      for (int k = 0; k < kSteps; k += 2) {
        uint32_t words[4];  // matrices: pieces 2k .. 2k + 3 of the rows, enough for two mma
        load_matrix_x4(words, operand + slice * kRows * kRowBytes + piece_offset(line, 2 * k + matrix));
        Math::prepare(words);
        const uint32_t b[2][2] = {{words[0], words[1]}, {words[2], words[3]}};
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int m = 0; m < kGates; ++m) Math::multiply(sums[m], weights[slice][k + half][m], b[half]);
      }
    }
#pragma unroll
    for (int m = 0; m < kGates; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        partial[(m * kRows + lane % 4 * 2 + i % 2) * kPitch + lane / 4 + i / 2 * 8] = sums[m][i];
  }

  // Writes the state that (b, unit) starts the step of `rows` from into the operand. `kept` is the state that this
  // thread has just computed for the step before; null: none.
  FR_DEVICE static void put_state(const StepParams& step, const StepDirection& d, const StepRows& rows,
      unsigned char* operand, int64_t b, int row, int unit, const Storage* kept) {
    const RowState state = row_state(rows, step.direction[block_z()].reverse, step.lengths, b);
    Storage value{};
    if (state.active) {
      if (kept && state.has_before && !state.cut) {
        value = *kept;
      } else {
        const Storage* from =
            old_row<Storage>(state, step.reset_to_initial, d.matrix[StepMatrix::kOutputBefore], d.h0, step.hidden, b);
        if (from) value = from[unit];
      }
    }
    *place(operand, unit / kSliceDepth, row, unit % kSliceDepth) = value;
  }

  FR_DEVICE static void run(const BlockParams& p) {
    const StepParams& step = p.step;
    const int thread = thread_index(), warp = thread / 32, lane = thread % 32, direction = block_z();
    const StepDirection& first = step.direction[direction];
    const int64_t row0 = static_cast<int64_t>(block_x()) * kRows, hidden = step.hidden;
    const int operand_bytes = p.slices * kRows * kRowBytes, partial_bytes = kGates * kRows * kPitch * sizeof(State);
    StepDirection* current = reinterpret_cast<StepDirection*>(shared_memory(0, kHeaderBytes));
    unsigned char* operands = shared_memory(kHeaderBytes, 2 * operand_bytes);
    State* partial =
        reinterpret_cast<State*>(shared_memory(kHeaderBytes + 2 * operand_bytes + warp * partial_bytes, partial_bytes));
    Weights weights;
    load_weights(p, direction, kWarpUnits * (block_threads() / 32), weights);

    for (int i = thread; i < 2 * operand_bytes / 4; i += block_threads()) reinterpret_cast<uint32_t*>(operands)[i] = 0;
    copy_words(current[0], first, thread);
    block_sync();
    const int64_t t0 = first.here.step, forward = first.reverse != kBackward ? -1 : 1;
    if constexpr (!kBackward)
      for (int i = lane; i < kRows * kWarpUnits; i += 32) {
        const int row = i / kWarpUnits, unit = warp * kWarpUnits + i % kWarpUnits;
        if (row0 + row < step.rows && unit < hidden)
          put_state(step, first, rows_at(p, t0), operands, row0 + row, row, unit, nullptr);
      }
    block_sync();

    const Clips<V> clips = clips_of<V>(step);
    const int64_t last = p.last;
    for (int64_t s = 0; s <= last; ++s) {
      const StepDirection& d = current[s % 2];
      unsigned char* next_operand = operands + (1 - s % 2) * operand_bytes;
      const bool product = !kBackward || s > 0;
      if (product) multiply(p, weights, operands + s % 2 * operand_bytes, partial);
      const bool plain = is_plain<kBackward>(step, d);
      if (s + 1 < p.count) prefetch_rows(p, d, direction, row0, warp * kWarpUnits, lane);
      warp_sync();
      [[maybe_unused]] const StepRows next_rows = rows_at(p, t0 + (s + 1) * forward);
      for (int i = lane; i < kRows * kWarpUnits; i += 32) {
        const int row = i / kWarpUnits, unit = warp * kWarpUnits + i % kWarpUnits;
        const int64_t b = row0 + row;
        if (b >= step.rows || unit >= hidden) continue;
        const Sums sums{
            product ? partial + row * kPitch + i % kWarpUnits : nullptr, next_operand, row, unit, p.gate_slices};
        if (plain) {
          Element<Math, Sums, true> element{step, d, clips, b, unit, sums};
          element.read_roles(kBackward);
          pointwise(element, step.cell);
          if constexpr (!kBackward) *place(next_operand, unit / kSliceDepth, row, unit % kSliceDepth) = element.kept;
        } else {
          Element<Math, Sums> element{step, d, clips, b, unit, sums};
          element.read_roles(kBackward);
          pointwise(element, step.cell);
          if constexpr (!kBackward)
            if (s < last) put_state(step, d, next_rows, next_operand, b, row, unit, &element.kept);
        }
      }
      if (s < last) next_step<kBackward>(p, current, s, t0, thread);
      warp_sync();
      block_sync();
    }
  }
};

// gates: the cell's in forward, ignored in backward.
template <class Math>
void launch_block(bool backward, int gates, const LaunchShape& shape, const BlockParams& params, void* stream) {
  if (backward) return launch<BlockKernel<Math, 1, 8, true>>(shape, params, stream);
  switch (gates) {
    case 1: return launch<BlockKernel<Math, 1, 2, false>>(shape, params, stream);
    case 3: return launch<BlockKernel<Math, 3, 2, false>>(shape, params, stream);
    case 4: return launch<BlockKernel<Math, 4, 2, false>>(shape, params, stream);
  }
}

}  // namespace fr::FR_TARGET
