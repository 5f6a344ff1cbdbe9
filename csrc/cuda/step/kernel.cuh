// The `step` kernel: one product of one time step, then the pointwise phase, for any shape. launch.cpp launches it once
// or twice a step through launch_step, at the end of this file. Each arithmetic is instantiated in its own inst/*.cu.
#pragma once

#include "../launch.cuh"
#include "../phases.cuh"
#include "../tile.cuh"

namespace fr::FR_TARGET {

FR_GLOBAL(step_kernel)

// work    grid (unit tiles, row tiles, directions). A block computes kGates gate rows of 16 * unit_warps units for 32 *
//         row_warps rows over the whole depth. depth_warps groups of warps take the slices (128 bytes of depth) in
//         turn; their sums are added in the order of the groups. Then every thread runs the pointwise phase for its
//         elements.
// memory  registers: 16 * kGates accumulators a thread (double: twice that). shared: 2 row tables of 8 bytes a row,
//         then 2 stages of depth_warps * (16 * kGates * unit_warps + 32 * row_warps) rows of 128 bytes; the partial
//         sums reuse the stages. The smallest tile takes at most 96.5 KiB, which every card from sm_80 on has. global:
//         each block reads its weight rows and operand rows once.
// sync    one block_sync after the row tables. One in each iteration: the stage has arrived, and all warps have left
//         the stage that is filled next. One before the partial sums overwrite the stages, one after they are written.
// shapes  any. Rows that are not 16-byte aligned are loaded element by element, not by asynchronous copies.
// cost    a step reads G*H*R*s bytes of weights from L2 for each direction and row tile: 8 MiB at H = 1024 in bf16,
//         about 3 us on 64 SMs. In backward one launch does the product of the step processed before and the pointwise
//         phase of this step, so that d_h needs no launch of its own.
template <class Math, int kGates>
struct StepKernel {
  static constexpr const char* kName = "step_kernel";
  FR_ENTRY(step_kernel)
  static constexpr int kMaxThreads = 256;
  static constexpr bool kCooperative = false;
  using Params = StepParams;
  using Storage = typename Math::Storage;
  using State = typename Math::State;
  static constexpr int kSliceDepth = kRowBytes / sizeof(Storage), kPieceDepth = kPieceBytes / sizeof(Storage);

  struct Block {
    const StepParams& p;
    const StepDirection& d;
    int tile_units, tile_rows, slice_rows;  // slice_rows: rows of one slice in shared memory, weights first, then
                                            // operands
    int64_t unit0, row0;
    const Storage** table;  // [2][tile_rows] addresses of operand rows; null: zero
    unsigned char* stages;
    int64_t first_slices = 0, slices = 0;  // of segment 0, of both segments

    // Fills one piece of a row, by asynchronous copy if `aligned`. Elements from `left` on become zero. `mapped`: any
    // valid address, which even a copy of zero bytes needs.
    FR_DEVICE static void fill(
        unsigned char* to, const Storage* from, int64_t left, bool aligned, const Storage* mapped) {
      const int valid = from == nullptr || left <= 0 ? 0 : left < kPieceDepth ? static_cast<int>(left) : kPieceDepth;
      if (aligned) {
        copy_async(to, valid > 0 ? from : mapped, valid * static_cast<int>(sizeof(Storage)));
        return;
      }
      Storage* elements = reinterpret_cast<Storage*>(to);
      for (int i = 0; i < kPieceDepth; ++i) {
        if (i < valid) elements[i] = from[i];
        else set(elements[i], State(0));
      }
    }

    // Loads the slice that this group of warps multiplies.
    FR_DEVICE void load(int64_t slice, unsigned char* to, int thread, int threads) const {
      if (slice >= slices) return;
      const int segment = slice >= first_slices ? 1 : 0;
      const int64_t k0 = (segment ? slice - first_slices : slice) * kSliceDepth;
      const StepProduct& product = d.product;
      const auto* weight = static_cast<const Storage*>(product.weight[segment]);
      const auto* mapped =
          reinterpret_cast<const Storage*>(reinterpret_cast<uintptr_t>(weight) / kPieceBytes * kPieceBytes);
      const int weight_rows = kGates * tile_units;
      for (int item = thread; item < slice_rows * kRowPieces; item += threads) {
        const int row = item / kRowPieces, piece = item % kRowPieces;
        const int64_t k = k0 + piece * kPieceDepth, left = product.depth[segment] - k;
        const Storage* from = nullptr;
        bool aligned;
        if (row < weight_rows) {
          const int64_t unit = unit0 + row % tile_units;
          if (unit < p.units)
            from = weight + (row / tile_units * product.gate_rows + unit) * product.weight_stride[segment] + k;
          aligned = product.copy_weight[segment];
        } else {
          from = table[segment * tile_rows + row - weight_rows];
          if (from) from += k;
          aligned = product.copy_operand[segment];
        }
        fill(to + piece_offset(row, piece), from, left, aligned, mapped);
      }
    }

    FR_DEVICE void fill_table(int thread, int threads) const {
      for (int i = thread; i < 2 * tile_rows; i += threads) {
        const int segment = i / tile_rows;
        const int64_t b = row0 + i % tile_rows;
        const Storage* from = nullptr;
        if (segment < d.product.segments && b < d.product.operand_rows) {
          if (segment == 0 && d.product.operand_is_state) {
            const RowState row = row_state(d.here, d.reverse, p.lengths, b);
            const bool drops = d.entering.data;
            if (row.active)
              from = old_row<Storage>(row, p.reset_to_initial,
                  drops ? d.entering_before : d.matrix[StepMatrix::kOutputBefore], drops ? d.h0_entering : d.h0,
                  p.width, b);
          } else {
            const Matrix& operand = d.product.operand[segment];
            from = static_cast<const Storage*>(operand.data) + b * operand.row_stride;
          }
        }
        table[i] = from;
      }
    }
  };

  // One element's sums.
  struct Sums {
    static constexpr bool kDropsState = true, kStoresEntering = true;
    State value[kGates];
    FR_DEVICE void keep(int, Storage) const {}
    FR_DEVICE State operator()(int m) const { return value[m]; }
  };

  FR_DEVICE static void run(const StepParams& p) {
    const StepTile tile = p.tile;
    const int tile_units = kWarpUnits * tile.unit_warps, tile_rows = kWarpRows * tile.row_warps;
    const StepDirection& d = p.direction[block_z()];
    const int slice_rows = kGates * tile_units + tile_rows;
    const int thread = thread_index(), threads = block_threads(), warp = thread / 32, lane = thread % 32;
    const int group_warps = tile.unit_warps * tile.row_warps, group_threads = 32 * group_warps;
    const int group = warp / group_warps, warp_unit = warp % group_warps % tile.unit_warps * kWarpUnits;
    const int warp_row = warp % group_warps / tile.unit_warps * kWarpRows;
    const int64_t table_bytes = 2 * tile_rows * static_cast<int64_t>(sizeof(void*));
    const int slice_bytes = slice_rows * kRowBytes, stage_bytes = slice_bytes * tile.depth_warps;

    Block block{p, d, tile_units, tile_rows, slice_rows, static_cast<int64_t>(block_x()) * tile_units,
        static_cast<int64_t>(block_y()) * tile_rows, nullptr, nullptr};
    int groups = 0;
    const int partial_pitch = tile_units + kSumsPad;
    if (d.product.segments > 0) {
      groups = tile.depth_warps;
      block.first_slices = (d.product.depth[0] + kSliceDepth - 1) / kSliceDepth;
      block.slices = block.first_slices;
      if (d.product.segments > 1) block.slices += (d.product.depth[1] + kSliceDepth - 1) / kSliceDepth;
      block.table = reinterpret_cast<const Storage**>(shared_memory(0, table_bytes));
      block.stages = shared_memory(table_bytes, kStages * static_cast<int64_t>(stage_bytes));
      block.fill_table(thread, threads);
      block_sync();

      Accumulators<State, kGates> sums{};
      const int64_t iterations = (block.slices + groups - 1) / groups;
      block.load(group, block.stages + group * slice_bytes, thread % group_threads, group_threads);
      commit_copies();
      for (int64_t i = 0; i < iterations; ++i) {
        wait_copies<0>();
        block_sync();
        const int stage = static_cast<int>(i % kStages);
        if (i + 1 < iterations)
          block.load((i + 1) * groups + group, block.stages + (1 - stage) * stage_bytes + group * slice_bytes,
              thread % group_threads, group_threads);
        commit_copies();
        if (i * groups + group < block.slices) {
          const unsigned char* weights = block.stages + stage * stage_bytes + group * slice_bytes;
          multiply_slice<Math, kGates>(
              sums, weights, tile_units, warp_unit, weights + kGates * tile_units * kRowBytes, warp_row, lane);
        }
      }
      block_sync();
      auto* partial = reinterpret_cast<State*>(shared_memory(
          table_bytes, sizeof(State) * groups * kGates * tile_rows * static_cast<int64_t>(partial_pitch)));
#pragma unroll
      for (int m = 0; m < kGates; ++m)
#pragma unroll
        for (int row_tile = 0; row_tile < kRowTiles; ++row_tile)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int unit = warp_unit + lane / 4 + i / 2 * 8, row = warp_row + row_tile * 8 + lane % 4 * 2 + i % 2;
            partial[((group * kGates + m) * tile_rows + row) * partial_pitch + unit] = sums.value[m][row_tile][i];
          }
      block_sync();
    }

    using V = Scalar<State, Math::kTensor>;
    const Clips<V> clips = clips_of<V>(p);
    for (int i = thread; i < tile_rows * tile_units; i += threads) {
      const int row = i / tile_units, unit = i % tile_units;
      const int64_t b = block.row0 + row, j = block.unit0 + unit;
      if (b >= p.rows || j >= p.units) continue;
      Sums sums{};
      const State* partial =
          groups ? reinterpret_cast<const State*>(block.stages) + row * partial_pitch + unit : nullptr;
#pragma unroll 1
      for (int of = 0; of < groups; ++of)  // partial sums: [depth group][gate][row][unit]
#pragma unroll
        for (int m = 0; m < kGates; ++m, partial += tile_rows * partial_pitch) sums.value[m] += *partial;
      Element<Math, Sums> element{p, d, clips, b, j, sums};
      element.read_roles(p.phase == Phase::kBackwardFirst || p.phase == Phase::kBackwardSecond);
      switch (p.cell) {
#define FR_CELL(name, Type) \
  case Cell::name: \
    element.template run<Type, kGates>(); \
    break;
#include "../../cells/cells.inc"
#undef FR_CELL
      }
    }
  }
};

// gates: gate rows of the product. Forward: those of the cell's phase; backward: 1.
template <class Math>
void launch_step(int gates, const LaunchShape& shape, const StepParams& params, void* stream) {
  switch (gates) {
    case 1: return launch<StepKernel<Math, 1>>(shape, params, stream);
    case 2: return launch<StepKernel<Math, 2>>(shape, params, stream);
    case 3: return launch<StepKernel<Math, 3>>(shape, params, stream);
    case 4: return launch<StepKernel<Math, 4>>(shape, params, stream);
  }
}

}  // namespace fr::FR_TARGET
