// The persistent kernel: a whole sequence in one launch, the recurrent weights of a direction spread once over a group of
// blocks, which exchange the operand of each step (the state; in backward the gate gradients) through global memory. For
// arithmetic on tensor cores. Launched by persistent.cpp as persistent_partition.h says; shares the pointwise phases with
// step.cuh, and so every option.
#pragma once

#include "../cells/gru.h"
#include "../cells/lstm.h"
#include "../cells/rnn.h"
#include "launch.cuh"
#include "persistent_params.h"
#include "step_phases.cuh"
#include "tile.cuh"

namespace fr::FR_TARGET {

// work    grid (blocks of a group, groups, directions), all resident together but for clusters. A step has one or two phases, a
//         product and its pointwise part each. Of a product a block computes `gates` gate rows of 16 * unit_warps units for its group's
//         rows, 16 at a time (a chunk); the depth is cut in slices of 128 bytes, which depth_warps warps take in turn, a slice
//         a round, and whose sums are added in the order of the warps.
//         forward: gates = kGates in phase 0; backward and phase 1: one gate row.
// memory  registers: 16 * kGates a resident slice of weights, 8 * kGates sums. shared: addresses of two steps, row pointers;
//         resident weights; a ring of kPersistentStages rounds of the operand; partial sums. global, a step, chunk and block:
//         the operand's rows whole, from L2; streamed slices of weights.
// lanes   A lane multiplies 16-byte pieces as they lie in memory: lane 4 g + t takes pieces t and t + 4 of a slice, of the
//         weights of units g and g + 8 and of the operand's rows g. So mma's depth index means another element of the depth
//         than in its own order, for both operands alike, and no ldmatrix is needed. Piece q of row r lies at piece
//         q ^ (4 * (r % 2)) of its 128 bytes: the 8 lanes that read at once fall on different banks.
// sync    flags: block i of a group publishes, after each chunk, how many it has done; a chunk waits until all blocks of the
//         group have done the same chunk one phase earlier (store_release after a block_sync, load_acquire before one).
//         block_sync: before the operand is loaded (flags seen, row pointers written); in every round if several warps share
//         a slice, else warp_sync; before partial sums are added, and after the pointwise part.
template <class Math, int kGates, bool kBackward>
struct PersistentKernel {
  static constexpr const char* kName = "persistent_kernel";
  static constexpr int kMaxThreads = 256;
  static constexpr bool kCooperative = true;  // but for clusters: launch.cuh
  static constexpr int kChunk = kPersistentChunk, kTiles = kChunk / 8, kHalves = 2;
  static constexpr int kRegisterSlices = persistent_register_slices(kGates);
  static constexpr bool kTwoPhases = kBackward || kGates == 2 || kGates == 4;  // cells with two products are among those served
  static constexpr int kOutputBefore = 2, kCellsBefore = 5;  // in the order of StepDirection
  using Params = PersistentParams;
  using Storage = typename Math::Storage;
  using State = typename Math::State;
  using V = Scalar<State>;
  static constexpr int kSliceDepth = kRowBytes / sizeof(Storage), kPieceDepth = kPieceBytes / sizeof(Storage);

  // A lane's weights of one gate row in half a slice: its pieces of units g and g + 8.
  struct Fragment { uint32_t word[2][4]; };
  union alignas(kPieceBytes) Piece {
    Storage value[kPieceDepth];
    uint32_t word[4];
  };

  FR_DEVICE static int operand_offset(int row, int piece) { return row * kRowBytes + ((piece ^ ((row & 1) * 4)) * kPieceBytes); }

  // 16 bytes of a row; elements from `left` on are zero.
  FR_DEVICE static void load_piece(Piece& piece, const Storage* from, int64_t left, bool aligned) {
    if (aligned && left >= kPieceDepth) {
      piece = *reinterpret_cast<const Piece*>(from);
      return;
    }
#pragma unroll
    for (int e = 0; e < kPieceDepth; ++e) {
      if (e < left) piece.value[e] = from[e];
      else set(piece.value[e], State(0));
    }
  }

  FR_DEVICE static Matrix at(const PersistentParams& p, const MovingRows& rows, int64_t t) {
    if (!rows.base || t < 0 || t >= p.total_steps) return {};
    const int64_t position = p.offsets ? p.offsets[t] : t;
    return {reinterpret_cast<void*>(rows.base + static_cast<uintptr_t>(position * rows.bytes)), rows.row_stride};
  }

  FR_DEVICE static StepRows rows_at(const PersistentParams& p, int64_t t) {
    StepRows rows;
    if (t < 0 || t >= p.total_steps) return rows;
    const auto first_row = [&](int64_t step) { return p.offsets ? p.offsets[step] : step * p.batch; };
    const bool has_after = t + 1 < p.total_steps;
    rows.step = t;
    rows.rows = first_row(t + 1) - first_row(t);
    if (has_after) rows.rows_after = first_row(t + 2) - first_row(t + 1);
    if (p.resets) {
      rows.resets = p.resets + first_row(t);
      if (has_after) rows.resets_after = p.resets + first_row(t + 1);
    }
    return rows;
  }

  FR_DEVICE static StepDirection* steps() {  // [2][2] addresses: of two steps in turn, for each phase
    return reinterpret_cast<StepDirection*>(shared_memory(0, 4 * sizeof(StepDirection)));
  }

  // One phase as this thread sees it.
  struct Part {
    const PersistentParams& p;
    const PersistentPhase& phase;
    const StepProduct& product;
    int number, lane, unit_warp, depth_warp;
    int unit0;  // the warp's first unit

    FR_DEVICE Part(const PersistentParams& params, int index, int direction, int block, int thread)
        : p(params), phase(params.phase[index]), product(phase.product[direction]), number(index) {
      lane = thread % 32, unit_warp = thread / 32 % phase.unit_warps, depth_warp = thread / 32 / phase.unit_warps;
      unit0 = (block * phase.unit_warps + unit_warp) * kWarpUnits;
    }

    // Gate rows: kGates in phase 0, 1 in phase 1.
    FR_DEVICE bool has_gate(int m) const { return m == 0 || !kTwoPhases || m < phase.gates; }
    FR_DEVICE int round_bytes() const { return phase.gates * kWarpUnits * kRowBytes; }  // of a warp's weights
    FR_DEVICE int warps() const { return phase.unit_warps * phase.depth_warps; }
    FR_DEVICE const Storage*& table(int segment, int row) const {  // operand rows, null: zero
      return reinterpret_cast<const Storage**>(
          shared_memory(4 * sizeof(StepDirection), 2 * kChunk * sizeof(void*)))[segment * kChunk + row];
    }
    // The warp's slice of the operand in a round, kChunk rows: in the ring, or in a cluster's operand from `first` on.
    FR_DEVICE unsigned char* stage(int round, int first) const {
      const int place = p.cluster ? first + slice_of(round) * p.operand_rows * kRowBytes
                                  : p.ring_offset + round % kPersistentStages * p.stage_bytes + depth_warp * kChunk * kRowBytes;
      return shared_memory(place, kChunk * kRowBytes);
    }
    FR_DEVICE int slice_of(int round) const { return round * phase.depth_warps + depth_warp; }

    FR_DEVICE void load_weights(Fragment& to, int slice, int half, int m) const {
      const int segment = slice >= phase.first_slices ? 1 : 0;
      const int64_t k = static_cast<int64_t>(slice - segment * phase.first_slices) * kSliceDepth +
                        (4 * half + lane % 4) * kPieceDepth;
      const auto* weight = static_cast<const Storage*>(product.weight[segment]);
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int unit = unit0 + lane / 4 + 8 * high;
        const int64_t left = unit < phase.units && slice < phase.slices ? product.depth[segment] - k : 0;
        Piece piece;
        load_piece(piece, left > 0 ? weight + (m * product.gate_rows + unit) * product.weight_stride[segment] + k : nullptr, left,
                   product.copy_weight[segment]);
        Math::prepare(piece.word);
#pragma unroll
        for (int i = 0; i < 4; ++i) to.word[high][i] = piece.word[i];
      }
    }

    // The same for weights that are read in each step: rows 16-byte aligned. What units beyond the last get does not matter. The
    // product's description is read from shared memory: addresses made of it are made anew, where kept they would take registers.
    FR_DEVICE void stream_weights(Fragment& to, int slice, int half, int m) const {
      const StepProduct& product = steps()[number].product;
      const int segment = slice >= phase.first_slices ? 1 : 0;
      const int k = (slice - segment * phase.first_slices) * kSliceDepth + (4 * half + lane % 4) * kPieceDepth;
      const int left = static_cast<int>(product.depth[segment]) - k;
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int unit = unit0 + lane / 4 + 8 * high;
        const int64_t row = m * product.gate_rows + (unit < phase.units ? unit : phase.units - 1);
        Piece piece{};
        if (left > 0)
          piece = *reinterpret_cast<const Piece*>(static_cast<const Storage*>(product.weight[segment]) +
                                                  row * product.weight_stride[segment] + k);
        if (left < kPieceDepth) {  // a padded row's end
          constexpr int kWordDepth = 4 / sizeof(Storage);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (i * kWordDepth >= left) piece.word[i] = 0;
            else if ((i + 1) * kWordDepth > left) piece.word[i] &= 0xFFFFu;
          }
        }
        Math::prepare(piece.word);
#pragma unroll
        for (int i = 0; i < 4; ++i) to.word[high][i] = piece.word[i];
      }
    }

    // The resident weights' place: lanes side by side, so that a lane reads only what it wrote itself.
    FR_DEVICE Piece* resident_piece(int shared_round, int half, int m, int high) const {
      const int warp = depth_warp * phase.unit_warps + unit_warp;
      return reinterpret_cast<Piece*>(shared_memory(phase.weights_offset + (shared_round * warps() + warp) * round_bytes() +
                                                        ((half * phase.gates + m) * 2 + high) * 32 * kPieceBytes + lane * kPieceBytes,
                                                    kPieceBytes));
    }
    FR_DEVICE void fill_resident() const {
      for (int round = 0; round < phase.shared_rounds; ++round)
        for (int half = 0; half < kHalves; ++half)
          for (int m = 0; m < phase.gates; ++m) {
            Fragment fragment;
            load_weights(fragment, slice_of(phase.register_rounds + round), half, m);
#pragma unroll
            for (int high = 0; high < 2; ++high) {
              Piece piece;
#pragma unroll
              for (int i = 0; i < 4; ++i) piece.word[i] = fragment.word[high][i];
              *resident_piece(round, half, m, high) = piece;
            }
          }
    }

    // The warps that share a slice load their round's operand.
    FR_DEVICE void issue(int round, int rows) const {
      const int slice = slice_of(round), segment = slice >= phase.first_slices ? 1 : 0;
      if (slice >= phase.slices) return;
      const int64_t k0 = static_cast<int64_t>(slice - segment * phase.first_slices) * kSliceDepth;
      const bool aligned = product.copy_operand[segment];
      unsigned char* to_stage = stage(round, 0);
      for (int item = unit_warp * 32 + lane; item < rows * kRowPieces; item += 32 * phase.unit_warps) {
        const int row = item / kRowPieces, piece = item % kRowPieces;
        const int64_t k = k0 + piece * kPieceDepth, left = product.depth[segment] - k;
        const Storage* from = table(segment, row);
        unsigned char* to = to_stage + operand_offset(row, piece);
        const int valid = !from || left <= 0 ? 0 : left < kPieceDepth ? static_cast<int>(left) : kPieceDepth;
        if (aligned) {  // a copy of no bytes may name any mapped address
          copy_async(to, valid > 0 ? static_cast<const void*>(from + k) : p.flags, valid * static_cast<int>(sizeof(Storage)));
        } else {
          Piece values;
          load_piece(values, valid > 0 ? from + k : nullptr, valid, false);
          *reinterpret_cast<Piece*>(to) = values;
        }
      }
    }

    // Half a slice: the operand's pieces of all tiles, then a gate row after the other.
    template <class Weights>
    FR_DEVICE void multiply(State (&sums)[kGates][kTiles][4], int round, int first, int tiles, Weights weights) const {
      const unsigned char* from = stage(round, first);
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        Piece b[kTiles];
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          if (tile >= tiles) break;
          b[tile] = *reinterpret_cast<const Piece*>(from + operand_offset(8 * tile + lane / 4, 4 * half + lane % 4));
          Math::prepare(b[tile].word);
        }
#pragma unroll
        for (int m = 0; m < kGates; ++m) {
          if (!has_gate(m)) break;
          const Fragment a = weights(half, m);
#pragma unroll
          for (int step = 0; step < 2; ++step) {
            const uint32_t words[4] = {a.word[0][2 * step], a.word[1][2 * step], a.word[0][2 * step + 1], a.word[1][2 * step + 1]};
#pragma unroll
            for (int tile = 0; tile < kTiles; ++tile) {
              if (tile >= tiles) break;
              const uint32_t values[2] = {b[tile].word[2 * step], b[tile].word[2 * step + 1]};
              Math::multiply(sums[m][tile], words, values);
            }
          }
        }
      }
    }

    // The whole product of a chunk. first: where its rows of a cluster's operand begin.
    FR_DEVICE void run(State (&sums)[kGates][kTiles][4], int first, int rows, const Fragment (*held)[kHalves][kGates]) const {
      const int tiles = (rows + 7) / 8, loaded = 8 * tiles;
      for (int round = 0; round < kPersistentStages - 1 && !p.cluster; ++round) {
        if (round < phase.rounds) issue(round, loaded);
        commit_copies();
      }
      const auto begin = [&](int round) {  // its operand has come, and all have left the stage that is filled next
        if (p.cluster) return slice_of(round) < phase.slices;
        wait_copies<kPersistentStages - 2>();
        if (phase.unit_warps > 1) block_sync();
        else warp_sync();
        if (round + kPersistentStages - 1 < phase.rounds) issue(round + kPersistentStages - 1, loaded);
        commit_copies();
        return slice_of(round) < phase.slices;
      };
#pragma unroll
      for (int round = 0; round < kRegisterSlices; ++round) {
        if (round >= phase.register_rounds) break;
        if (begin(round)) multiply(sums, round, first, tiles, [&](int half, int m) { return held[round][half][m]; });
      }
      const int streamed = phase.register_rounds + phase.shared_rounds;
#pragma unroll 1
      for (int round = phase.register_rounds; round < streamed; ++round) {
        if (!begin(round)) continue;
        multiply(sums, round, first, tiles, [&](int half, int m) {
          Fragment a;
#pragma unroll
          for (int high = 0; high < 2; ++high) {
            const Piece piece = *resident_piece(round - phase.register_rounds, half, m, high);
#pragma unroll
            for (int i = 0; i < 4; ++i) a.word[high][i] = piece.word[i];
          }
          return a;
        });
      }
      if (streamed == phase.rounds) return;
      Fragment next;
      stream_weights(next, slice_of(streamed), 0, 0);
#pragma unroll 1
      for (int round = streamed; round < phase.rounds; ++round) {
        if (!begin(round)) continue;
        multiply(sums, round, first, tiles, [&](int half, int m) {  // one fragment ahead; warp_sync keeps the loads in this order
          const Fragment a = next;
          const bool more = has_gate(m + 1) && m + 1 < kGates, last = !more && half == kHalves - 1;
          stream_weights(next, slice_of(last ? round + 1 : round), more ? half : 1 - half, more ? m + 1 : 0);
          warp_sync();
          return a;
        });
      }
    }

    // Where the chunk's operand rows lie.
    FR_DEVICE void fill_table(const StepDirection& d, int direction, int row0, int end, int thread) const {
      if (thread >= 2 * kChunk) return;
      const int segment = thread / kChunk;
      const int b = row0 + thread % kChunk;
      const StepRows& step = phase.operand_pending ? d.pending : d.here;
      const Storage* from = nullptr;
      if (segment < product.segments && b < end && b < step.rows) {
        if (product.operand_is_state) {
          const RowState row = row_state(step, d.reverse, p.step.lengths, b);
          if (row.active) from = old_row<Storage>(row, p.step.reset_to_initial, d.output_before, d.h0, p.step.width, b);
        } else {
          const Matrix operand = at(p, phase.operand[direction][segment], step.step);
          from = static_cast<const Storage*>(operand.data) + b * operand.row_stride;
        }
      }
      table(segment, thread % kChunk) = from;
    }

    FR_DEVICE State* partial() const { return reinterpret_cast<State*>(shared_memory(p.partial_offset, p.partial_bytes)); }
    FR_DEVICE int pitch() const { return kWarpUnits * phase.unit_warps + kPersistentPitch; }

    FR_DEVICE void store_partial(const State (&sums)[kGates][kTiles][4]) const {
      State* to = partial();
#pragma unroll
      for (int m = 0; m < kGates; ++m) {
        if (!has_gate(m)) break;
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            to[((depth_warp * phase.gates + m) * kChunk + 8 * tile + lane % 4 * 2 + i % 2) * pitch() + unit_warp * kWarpUnits + lane / 4 +
               i / 2 * 8] = sums[m][tile][i];
      }
    }
  };

  // Element k of row `row` of a cluster's operand whose buffer begins at `buffer`; k counts from the segment's first slice.
  FR_DEVICE static Storage* operand_place(const PersistentParams& p, int buffer, int first_slice, int k, int row) {
    const int slice = first_slice + k / kSliceDepth, depth = k % kSliceDepth;
    const int place = buffer + (slice * p.operand_rows + row) * kRowBytes;
    return reinterpret_cast<Storage*>(shared_memory(place, kRowBytes) + operand_offset(row, depth / kPieceDepth) - row * kRowBytes) +
           depth % kPieceDepth;
  }
  FR_DEVICE static void tell_peers(Storage* place, State value) {
    for (int rank = 0; rank < cluster_size(); ++rank) set(*peer_shared(place, rank), value);
  }

  // Sums of one element, those of the depth warps added in their order.
  struct Sums {
    const State* partial;  // null: no product
    int gate_step, warp_step, warps;
    const PersistentParams& p;
    int buffer, row, unit;  // of the cluster's operand that the next step reads
    FR_DEVICE void keep(int gate, State value) const {
      if (!kBackward || !p.cluster) return;
      const bool split = gate == p.split_gate;
      tell_peers(operand_place(p, buffer, split ? p.phase[0].first_slices : 0, split ? unit : gate * static_cast<int>(p.step.hidden) + unit, row),
                 value);
    }
    FR_DEVICE State operator()(int m) const {
      State sum = 0;
      if (partial)
        for (int warp = 0; warp < warps; ++warp) sum += partial[warp * warp_step + m * gate_step];
      return sum;
    }
  };

  // The addresses and rows of iteration s, for each phase.
  FR_DEVICE static void place_step(const PersistentParams& p, int direction, StepDirection* to, int64_t s, int thread) {
    const bool reverse = p.step.direction[direction].reverse;
    const int64_t forward = reverse != kBackward ? -1 : 1, t = p.first_step[direction] + s * forward;
    for (int phase = 0; phase < p.phases; ++phase) {
      StepDirection& d = to[phase];
      if (thread < kStepMatrices) {
        const bool before = thread == kOutputBefore || thread == kCellsBefore;
        (&d.input_gates)[thread] = at(p, p.rows[direction][thread], before ? (reverse ? t + 1 : t - 1) : t);
      } else if (thread == kStepMatrices) {
        d.here = s < p.count ? rows_at(p, t) : StepRows{};
      } else if (thread == kStepMatrices + 1) {
        d.pending = kBackward && s > 0 ? rows_at(p, t - forward) : StepRows{};
      }
    }
  }

  // What the pointwise part of a chunk will read of the step's rows: the input part of the gates, or the saved values.
  FR_DEVICE static void prefetch_rows(const PersistentParams& p, const StepDirection& d, int row0, int end, int unit0, int units,
                                      int thread) {
    const Matrix& matrix = kBackward ? d.gates : d.input_gates;
    constexpr int kElement = kBackward ? sizeof(Storage) : sizeof(State), kLine = kRowBytes / kElement;
    if (!matrix.data || d.here.step < 0) return;
    const int lines = (units + kLine - 1) / kLine, items = kChunk * p.prefetched * lines;
    for (int i = thread; i < items; i += block_threads()) {
      const int b = row0 + i % kChunk, unit = unit0 + i / kChunk % lines * kLine;
      if (b < end && b < d.here.rows && unit < p.step.hidden)
        prefetch(static_cast<const char*>(matrix.data) +
                 (b * matrix.row_stride + i / kChunk / lines * p.step.hidden + unit) * kElement);
    }
  }

  template <int kPhase, class Element>
  FR_DEVICE static void pointwise(const Element& element, Cell cell) {
    switch (cell) {
#define FR_CELL(name, Type)                                                                     \
  case Cell::name:                                                                              \
    if constexpr (kBackward && kPhase == 0) element.template backward_first<Type>();            \
    else if constexpr (kBackward && Type::kProducts == 2) element.template backward_second<Type>(); \
    else if constexpr (!kBackward && kPhase == 0 && Type::kFirstGates == kGates) element.template forward_first<Type>(); \
    else if constexpr (!kBackward && Type::kProducts == 2 && Type::kFirstGates == kGates) element.template forward_second<Type>(); \
    break;
#include "../cells/cells.inc"
#undef FR_CELL
    }
  }

  // In a cluster, forward: the state that element (b, j) starts the step of `d` from, if the step before gave `kept`, goes to the
  // operand.
  FR_DEVICE static State first_state(const PersistentParams& p, const StepDirection& d, int b, int j, const V* kept) {
    const RowState row = row_state(d.here, d.reverse, p.step.lengths, b);
    if (!row.active) return State(0);
    if (kept && row.has_before && !row.cut) return kept->value;
    const Storage* from = old_row<Storage>(row, p.step.reset_to_initial, d.output_before, d.h0, p.step.width, b);
    return from ? to_state(from[j]) : State(0);
  }

  // Sums, if there is a product, and the pointwise part of one chunk; all rows lie in [row0, end).
  template <class Meanwhile>
  FR_DEVICE static void chunk(const Part& part, const StepDirection& d, const Fragment (*held)[kHalves][kGates], bool product,
                              int block_unit0, int row0, int end, int buffer, int next_buffer, const StepDirection* next,
                              Meanwhile meanwhile, int thread) {
    const PersistentParams& p = part.p;
    const int rows = end - row0 < kChunk ? end - row0 : kChunk;
    const int units = kWarpUnits * part.phase.unit_warps;
    if (product) {
      State sums[kGates][kTiles][4] = {};
      part.run(sums, buffer, rows, held);
      part.store_partial(sums);
    }
    meanwhile();
    block_sync();
    const Clips<V> clips{V(static_cast<State>(p.step.cell_clip)), V(static_cast<State>(p.step.proj_clip)), p.step.cell_clip > 0,
                         p.step.proj_clip > 0};
    for (int i = thread; i < rows * units; i += block_threads()) {
      const int row = i / units, unit = i % units;
      const int b = row0 + row, j = block_unit0 + unit;
      if (j >= part.phase.units) continue;
      const Sums sums{product ? part.partial() + row * part.pitch() + unit : nullptr, kChunk * part.pitch(),
                      part.phase.gates * kChunk * part.pitch(), part.phase.depth_warps, p, next_buffer, row, j};
      const Element<Math, Sums> element{p.step, d, clips, b, j, sums};
      if (part.number == 0) pointwise<0>(element, p.step.cell);
      else if constexpr (kTwoPhases) pointwise<1>(element, p.step.cell);
      if (!kBackward && p.cluster && next) tell_peers(operand_place(p, next_buffer, 0, j, row), first_state(p, *next, b, j, &element.kept));
    }
    block_sync();
  }

  FR_DEVICE static void run(const PersistentParams& p) {
    const int thread = thread_index(), direction = block_z(), block = block_x(), blocks = grid_x();
    const int row0 = block_y() * p.rows_per_group, batch = static_cast<int>(p.batch);
    const int end = row0 + p.rows_per_group < batch ? row0 + p.rows_per_group : batch;
    const int chunks = (end - row0 + kChunk - 1) / kChunk;
    unsigned* flags = p.flags + (static_cast<int64_t>(direction) * p.groups + block_y()) * blocks;
    StepDirection* current = steps();

    const auto part_of = [&](int index) { return Part(p, index, direction, block, thread); };
    const Part first = part_of(0);
    Fragment weights[kRegisterSlices][kHalves][kGates];
#pragma unroll
    for (int round = 0; round < kRegisterSlices; ++round) {
      if (round >= first.phase.register_rounds) break;
#pragma unroll
      for (int half = 0; half < kHalves; ++half)
#pragma unroll
        for (int m = 0; m < kGates; ++m) first.load_weights(weights[round][half][m], first.slice_of(round), half, m);
    }
    first.fill_resident();
    if (kTwoPhases && p.phases > 1) part_of(1).fill_resident();
    if (thread < 4) {
      current[thread] = p.step.direction[direction];
      current[thread].product = p.phase[thread % 2].product[direction];
    }
    block_sync();
    place_step(p, direction, current, 0, thread);
    block_sync();

    if (p.cluster) {  // each block makes the first operand itself, whole; then all have started
      const int rows = end - row0, hidden = static_cast<int>(p.step.hidden);
      unsigned char* operand = shared_memory(p.ring_offset, 2 * p.stage_bytes);
      for (int i = thread; i < 2 * p.stage_bytes / 4; i += block_threads()) reinterpret_cast<uint32_t*>(operand)[i] = 0;
      block_sync();
      if (!kBackward)
        for (int i = thread; i < rows * hidden; i += block_threads())
          set(*operand_place(p, p.ring_offset, 0, i % hidden, i / hidden), first_state(p, current[0], row0 + i / hidden, i % hidden, nullptr));
      cluster_sync();
    }

    unsigned done = 0;  // phases
    for (int s = 0; s <= p.last; ++s) {
      const StepDirection* d = current + s % 2 * 2;
      for (int index = 0; index < p.phases; ++index) {
        const bool product = !kBackward || (index == 0 ? s > 0 : s < p.count);
        const Part part = part_of(index);
        const int unit0 = block * kWarpUnits * part.phase.unit_warps;
        for (int c = 0; c < chunks; ++c) {
          const int chunk_row0 = row0 + c * kChunk;
          if (product && !p.cluster) {
            part.fill_table(d[index], direction, chunk_row0, end, thread);
            if (done > 0) {
              const unsigned wanted = (done - 1) * chunks + c + 1;
              for (int i = thread; i < blocks; i += block_threads()) wait_until([&] { return load_acquire(flags + i) >= wanted; });
            }
            block_sync();
          }
          if (index == 0) prefetch_rows(p, d[0], chunk_row0, end, unit0, kWarpUnits * part.phase.unit_warps, thread);
          const int chunk_bytes = c * kChunk * kRowBytes;  // the operand of an odd step is the second
          chunk(part, d[index], weights, product, unit0, chunk_row0, end, p.ring_offset + s % 2 * p.stage_bytes + chunk_bytes,
                p.ring_offset + (1 - s % 2) * p.stage_bytes + chunk_bytes, s < p.last ? current + (1 - s % 2) * 2 : nullptr, [&] {
            // Read from the next step on; its place was last read a step ago.
            if (index == 0 && c == 0 && s < p.last) place_step(p, direction, current + (1 - s % 2) * 2, s + 1, thread);
          }, thread);
          if (thread == 0 && !p.cluster) store_release(flags + block, done * chunks + c + 1);
        }
        if (p.cluster) cluster_sync();
        ++done;
      }
    }
  }
};

// gates: the first product's gate rows in forward, ignored in backward.
template <class Math>
void launch_persistent(bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream) {
  if (backward) return launch<PersistentKernel<Math, 1, true>>(shape, params, stream);
  switch (gates) {
    case 1: return launch<PersistentKernel<Math, 1, false>>(shape, params, stream);
    case 2: return launch<PersistentKernel<Math, 2, false>>(shape, params, stream);
    case 3: return launch<PersistentKernel<Math, 3, false>>(shape, params, stream);
    case 4: return launch<PersistentKernel<Math, 4, false>>(shape, params, stream);
  }
}

}  // namespace fr::FR_TARGET
