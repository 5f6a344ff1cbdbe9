// One product of a step of a persistent launch, from one thread's view: the weights that its warp keeps, how the
// operand reaches shared memory, and the sums, on tensor cores or with FMA. The layout is explained in kernel.cuh.
//
// Strict float32 (FMA) is bound by arithmetic: 60 TFLOP/s at 60 % are 0.14 M multiply-adds a us and SM on an H100. A
// piece of the operand (LDS.128, counted as 512 bytes though its lanes share addresses) serves 4 FMA for each gate row
// and unit of the lane: 16 FMA a read for an LSTM, 8 in backward, 16 with two tiles of units. A piece of weights serves
// 16 FMA a tile of 4 rows. In bytes a multiply-add that is 1 for an LSTM, 1.3 for a GRU, 2 in backward (two tiles: 1).
// Shared memory at 225 KB/us would feed 0.23, 0.17 and 0.11 M (two tiles: 0.23), so only backward's single tile is
// bound by its reads. At the end of a product there are 3 shuffles a gate row and tile of rows (8 lanes: 7): 48 a lane
// for an LSTM's 16 rows, 0.2 us an SM, 0.05 us for 4 rows. The plan's model leaves them out.
#pragma once

#include "rows.cuh"
#include "../tile.cuh"

namespace fr::FR_TARGET {

// kGates: gate rows of a step's first product. kTwoPhases: there may be a second product, with one gate row.
// kUnitTiles: kGates counts a warp's tiles of units, side by side, instead of gate rows. kHeldSlices: most slices of
// weights in registers. kStreams: weights that are neither there nor in shared memory are read from L2; if false there
// are none.
template <class Math, int kGates, bool kTwoPhases, bool kUnitTiles,
    int kHeldSlices = persistent_register_slices(kGates), bool kStreams = true>
struct PersistentProduct {
  static constexpr bool kTensor = Math::kTensor;
  static constexpr int kBand = kPersistentBand, kUnits = persistent_units(kTensor),
                       kTileRows = persistent_row_tile(kTensor);
  static constexpr int kTiles = kBand / kTileRows;
  // kUnitLanes: lanes that share a unit. kHalves: parts of a slice that they take in turn, a piece a lane. kHigh: units
  // a lane.
  static constexpr int kUnitLanes = persistent_unit_lanes(kTensor, kGates), kHalves = kRowPieces / kUnitLanes,
                       kHigh = kUnits * kUnitLanes / 32;
  static constexpr int kRegisterSlices = kHeldSlices;
  // rows end in padding: backward's transposed weights; the launcher streams no others that end within a piece
  static constexpr bool kPaddedRows = kUnitTiles || kGates == 1;
  using Storage = typename Math::Storage;
  using State = typename Math::State;
  static constexpr int kSliceDepth = kRowBytes / sizeof(Storage), kPieceDepth = kPieceBytes / sizeof(Storage);

  // A lane's weights of one gate row in one part of a slice: a piece for each of its units. FMA: word[unit][]. Tensor
  // cores: word[mma][], as the mma takes them, which must be neighbours in registers: else each mma needs 4 moves.
  struct Fragment {
    uint32_t word[kHigh][4];
    FR_DEVICE void set(int high, const uint32_t (&piece)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) (kTensor ? word[i / 2][i % 2 * 2 + high] : word[high][i]) = piece[i];
    }
  };
  static_assert(!kTensor || kHigh == 2);
  // A lane's sums: mma's accumulators, or for FMA all rows and units over the lane's part of the depth.
  using WarpSums = State[kGates][kTiles][kTensor ? 4 : kTileRows * kHigh];
  union alignas(kPieceBytes) Piece {
    Storage value[kPieceDepth];
    uint32_t word[4];
  };

  FR_DEVICE static int operand_offset(int row, int piece) {
    return row * kRowBytes + ((piece ^ ((row & 1) * 4)) * kPieceBytes);
  }

  // Loads 16 bytes of a row that nothing writes meanwhile; elements from `left` on are zero. Word by word: what one
  // instruction loads stays together in registers, and weights must lie in another order there (Fragment).
  FR_DEVICE static void load_piece(Piece& piece, const Storage* from, int64_t left, bool aligned) {
    if (aligned && left >= kPieceDepth)
      for (int i = 0; i < 4; ++i) piece.word[i] = load_constant(reinterpret_cast<const uint32_t*>(from) + i);
    else load_elements(piece.word, from, static_cast<int>(left < kPieceDepth ? left : kPieceDepth));
  }

  const PersistentParams& p;
  const PersistentPhase& phase;
  const StepProduct& product;
  int number, lane, unit_warp, depth_warp;
  int unit0;  // the warp's first unit

  FR_DEVICE PersistentProduct(const PersistentParams& params, int index, int direction, int block, int thread)
      : p(params), phase(params.phase[index]), product(phase.product[direction]), number(index) {
    const int warp = thread / 32;
    lane = thread % 32, unit_warp = warp & (phase.unit_warps - 1), depth_warp = warp >> (phase.unit_bits - kTileBits);
    unit0 = (block * phase.unit_warps + unit_warp) * kTileUnits;
  }

  // Gate rows: kGates in phase 0, 1 in phase 1. A number that the compiler knows wherever there is one phase.
  static constexpr bool kGatesVary = kTwoPhases && kGates > 1;
  FR_DEVICE int gates() const { return kGatesVary ? phase.gates : kGates; }
  FR_DEVICE bool has_gate(int m) const { return m == 0 || !kGatesVary || m < phase.gates; }
  static constexpr int kTileUnits = kUnitTiles ? kUnits * kGates : kUnits;
  static constexpr int kTileBits = kTileUnits == 8 ? 3 : kTileUnits == 16 ? 4 : 5;
  static_assert(kTileUnits == 1 << kTileBits);
  static constexpr int kSums = kUnitTiles ? 1 : kGates;  // of a unit, at most
  FR_DEVICE int sum_gates() const { return kUnitTiles ? 1 : gates(); }
  FR_DEVICE int block_units() const { return kTileUnits * phase.unit_warps; }
  FR_DEVICE int unit_of(int m, int high) const {
    return unit0 + lane / kUnitLanes + 32 / kUnitLanes * high + (kUnitTiles ? kUnits * m : 0);
  }
  FR_DEVICE int64_t weight_row(int m, int unit) const { return kUnitTiles ? unit : m * product.gate_rows + unit; }
  FR_DEVICE int round_bytes() const { return gates() * kUnits * kRowBytes; }  // of a warp's weights
  FR_DEVICE int warps() const { return phase.unit_warps * phase.depth_warps; }
  FR_DEVICE const Storage*& table(int segment, int row) const {  // addresses of operand rows; null: zero
    return reinterpret_cast<const Storage**>(
        shared_memory(4 * sizeof(StepDirection), 2 * kBand * sizeof(void*)))[segment * kBand + row];
  }
  // The warp's slice of the operand in a round, kBand rows of it: in the ring, or in a cluster's operand that begins
  // at `first`.
  FR_DEVICE unsigned char* stage(int round, int first) const {
    const int place = p.cluster
                          ? first + slice_of(round) * kBand * kRowBytes
                          : p.ring_offset + round % kPersistentStages * p.stage_bytes + depth_warp * kBand * kRowBytes;
    return shared_memory(place, kBand * kRowBytes);
  }
  FR_DEVICE int slice_of(int round) const { return round * phase.depth_warps + depth_warp; }

  FR_DEVICE void load_weights(Fragment& to, int slice, int half, int m) const {
    const int segment = slice >= phase.first_slices ? 1 : 0;
    const int64_t k = static_cast<int64_t>(slice - segment * phase.first_slices) * kSliceDepth +
                      (kUnitLanes * half + lane % kUnitLanes) * kPieceDepth;
    const auto* weight = static_cast<const Storage*>(product.weight[segment]);
#pragma unroll
    for (int high = 0; high < kHigh; ++high) {
      const int unit = unit_of(m, high);
      const int64_t left = unit < phase.units && slice < phase.slices ? product.depth[segment] - k : 0;
      Piece piece;
      load_piece(piece, left > 0 ? weight + weight_row(m, unit) * product.weight_stride[segment] + k : nullptr, left,
          product.copy_weight[segment]);
      Math::prepare(piece.word);
      to.set(high, piece.word);
    }
  }

  // The same for weights that are streamed in each step; their rows are 16-byte aligned. Units beyond the last read the
  // last unit's row, and their sums are never used. The product's description is read from shared memory, so that the
  // addresses are recomputed instead of kept in registers.
  FR_DEVICE void stream_weights(Fragment& to, int slice, int half, int m) const {
    const StepProduct& product = placed_steps()[number].product;
    const int segment = slice >= phase.first_slices ? 1 : 0;
    const int k =
        (slice - segment * phase.first_slices) * kSliceDepth + (kUnitLanes * half + lane % kUnitLanes) * kPieceDepth;
    const int left = static_cast<int>(product.depth[segment]) - k;
#pragma unroll
    for (int high = 0; high < kHigh; ++high) {
      const int unit = unit_of(m, high);
      const int of_units = unit < phase.units ? unit : phase.units - 1;
      const int64_t row = kUnitTiles ? of_units : m * product.gate_rows + of_units;
      Piece piece{};
      if (left > 0)
        piece = *reinterpret_cast<const Piece*>(
            static_cast<const Storage*>(product.weight[segment]) + row * product.weight_stride[segment] + k);
      if (kPaddedRows && left < kPieceDepth) {  // the end of a padded row
        constexpr int kWordDepth = 4 / sizeof(Storage);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (i * kWordDepth >= left) piece.word[i] = 0;
          else if ((i + 1) * kWordDepth > left) piece.word[i] &= 0xFFFFu;
        }
      }
      Math::prepare(piece.word);
      to.set(high, piece.word);
    }
  }

  // Where resident weights lie in shared memory. Lanes lie side by side, and a lane reads only what it wrote itself.
  FR_DEVICE Piece* resident_piece(int shared_round, int half, int m, int high) const {
    const int warp = depth_warp * phase.unit_warps + unit_warp;
    return reinterpret_cast<Piece*>(
        shared_memory(phase.weights_offset + (shared_round * warps() + warp) * round_bytes() +
                          (((half * gates() + m) * kHigh + high) * 32 + lane) * kPieceBytes,
            kPieceBytes));
  }
  FR_DEVICE void fill_resident() const {
    for (int round = 0; round < phase.shared_rounds; ++round)
      for (int half = 0; half < kHalves; ++half)
        for (int m = 0; m < gates(); ++m) {
          Fragment fragment;
          load_weights(fragment, slice_of(phase.register_rounds + round), half, m);
#pragma unroll
          for (int high = 0; high < kHigh; ++high) {
            Piece piece;
#pragma unroll
            for (int i = 0; i < 4; ++i) piece.word[i] = fragment.word[high][i];
            *resident_piece(round, half, m, high) = piece;
          }
        }
  }

  // With three and four gate rows weights and sums leave few registers: cheap expressions are recomputed for each
  // round.
  FR_DEVICE static int anew(int value) { return kGates > 2 ? made_anew(value) : value; }

  // A lane copies the same piece of every kRows-th row. kRows is even, so the piece's place in a row stays the same.
  static constexpr int kRows = 32 / kRowPieces;
  // The addresses of a lane's rows, read from the table once for all rounds of a segment, where registers are left and a
  // warp copies its slices alone.
  struct KeptRows {
    const Storage* row[kTensor && kGates <= 2 ? kBand / kRows : 1];
    int segment = -1;
  };

  // Loads the operand of a round; the warps that share its slice do so together. A slice beyond the last is zero.
  FR_DEVICE void issue(int round, int rows, KeptRows& kept) const {
    const int slice = slice_of(round), segment = slice >= phase.first_slices ? 1 : 0;
    const int lane = anew(this->lane);
    const int piece = lane % kRowPieces, row0 = kRows * unit_warp + lane / kRowPieces, step = kRows * phase.unit_warps;
    const int k = (slice - segment * phase.first_slices) * kSliceDepth + piece * kPieceDepth;
    const int left = static_cast<int>(product.depth[segment]) - k;
    const int valid = left < 0 ? 0 : left < kPieceDepth ? left : kPieceDepth;
    unsigned char* to = stage(round, 0) + operand_offset(row0, piece);
    const Storage** from = &table(segment, row0);
    if (product.copy_operand[segment]) {
      const int bytes = valid * static_cast<int>(sizeof(Storage));
      const auto copy = [&](const Storage* row, int away) {
        const bool some = row && bytes > 0;  // a copy of no bytes needs a valid address: any
        copy_async(to + away * kRowBytes, some ? static_cast<const void*>(row + k) : p.flags, some ? bytes : 0);
      };
      if (kTensor && kGates <= 2 && phase.unit_warps == 1) {
        // `rows` is kTileRows or kBand here, and no lane has fewer rows than another.
        const auto each = [&](auto take) {
#pragma unroll
          for (int i = 0; i < kBand; i += kRows) {
            if (i >= kTileRows && rows <= kTileRows) break;
            take(kept.row[i / kRows], i);
          }
        };
        if (kept.segment != segment) each([&](const Storage*& row, int away) { row = from[away]; });
        kept.segment = segment;
        each([&](const Storage* row, int away) { copy(row, away); });
      } else {
#pragma unroll 1
        for (int away = 0; row0 + away < rows; away += step) copy(from[away], away);
      }
    } else {
      for (int row = row0; row < rows; row += step, from += step, to += step * kRowBytes) {
        const bool some = *from && valid > 0;
        Piece values;
        load_piece(values, some ? *from + k : nullptr, some ? valid : 0, false);
        *reinterpret_cast<Piece*>(to) = values;
      }
    }
  }

  // Multiplies a slice. Tensor cores: for each half of the slice load the operand's pieces of all tiles, then go gate
  // row by gate row. FMA: load the weights of all gate rows, then go row by row of the operand.
  template <class Weights>
  FR_DEVICE void multiply(WarpSums& sums, const unsigned char* from, int tiles, Weights weights) const {
    if constexpr (!kTensor) return multiply_fma(sums, from, tiles, weights);
    else multiply_mma<0, kTiles>(sums, from, tiles, weights);
  }
  // With weights in registers a tile need not share their loads with another one. Each by itself has no branch between
  // its mma, so those of independent gates interleave.
  template <class Weights>
  FR_DEVICE void multiply_held(WarpSums& sums, const unsigned char* from, int tiles, Weights weights) const {
    if constexpr (!kTensor) return multiply_fma(sums, from, tiles, weights);
    else {
      multiply_mma<0, 1>(sums, from, tiles, weights);
      if (tiles > 1) multiply_mma<1, kTiles>(sums, from, tiles, weights);
    }
  }
  template <class Weights>
  FR_DEVICE void multiply_fma(WarpSums& sums, const unsigned char* from, int tiles, Weights weights) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      Fragment a[kGates];
#pragma unroll
      for (int m = 0; m < kGates; ++m) {
        if (!has_gate(m)) break;
        a[m] = weights(half, m);
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile >= tiles) break;
#pragma unroll
        for (int row = 0; row < kTileRows; ++row) {
          const Piece b = *reinterpret_cast<const Piece*>(
              from + operand_offset(kTileRows * tile + row, kUnitLanes * half + lane % kUnitLanes));
#pragma unroll
          for (int m = 0; m < kGates; ++m) {
            if (!has_gate(m)) break;
#pragma unroll
            for (int high = 0; high < kHigh; ++high)
#pragma unroll
              for (int k = 0; k < kPieceDepth; ++k)
                sums[m][tile][row + kTileRows * high] += bits_to_float(a[m].word[high][k]) * b.value[k];
          }
        }
      }
    }
  }
  // Tiles [kFirst, kEnd) of rows, of which all but the first may be missing.
  template <int kFirst, int kEnd, class Weights>
  FR_DEVICE void multiply_mma(WarpSums& sums, const unsigned char* from, int tiles, Weights weights) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      Piece b[kTiles];
#pragma unroll
      for (int tile = kFirst; tile < kEnd; ++tile) {
        if (tile > kFirst && tile >= tiles) break;
        b[tile] = *reinterpret_cast<const Piece*>(from + operand_offset(8 * tile + lane / 4, 4 * half + lane % 4));
        Math::prepare(b[tile].word);
      }
#pragma unroll
      for (int m = 0; m < kGates; ++m) {
        if (!has_gate(m)) break;
        const Fragment a = weights(half, m);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int tile = kFirst; tile < kEnd; ++tile) {
            if (tile > kFirst && tile >= tiles) break;
            const uint32_t values[2] = {b[tile].word[2 * step], b[tile].word[2 * step + 1]};
            Math::multiply(sums[m][tile], a.word[step], values);
          }
        }
      }
    }
  }

  // The whole product of a band. Every warp multiplies in every round: a slice beyond the last is zero. first: where a
  // cluster's operand begins.
  FR_DEVICE void run(WarpSums& sums, int first, int rows, const Fragment (*held)[kHalves][kGates]) const {
    const int tiles = (rows + kTileRows - 1) / kTileRows;
    KeptRows kept;
    if (!p.cluster) {
#pragma unroll
      for (int round = 0; round < kPersistentStages - 1; ++round) {
        if (round < phase.rounds) issue(round, kTileRows * anew(tiles), kept);
        commit_copies();
      }
    }
    const auto begin = [&](int round) {  // waits for the round's operand; frees the stage that is filled next
      if (p.cluster) return;
      wait_copies<kPersistentStages - 2>();
      if (phase.unit_warps > 1) block_sync();
      else warp_sync();
      if (round + kPersistentStages - 1 < phase.rounds)
        issue(round + kPersistentStages - 1, kTileRows * anew(tiles), kept);
      commit_copies();
    };
#pragma unroll
    for (int round = 0; round < kRegisterSlices; ++round) {
      if (round >= phase.register_rounds) break;
      begin(round);
      multiply_held(sums, stage(round, first), tiles, [&](int half, int m) { return held[round][half][m]; });
    }
    const int streamed = phase.register_rounds + phase.shared_rounds;
#pragma unroll 1
    for (int round = phase.register_rounds; round < streamed; ++round) {
      begin(round);
      if (slice_of(round) >= phase.slices) continue;
      multiply(sums, stage(round, first), tiles, [&](int half, int m) {
        Fragment a;
#pragma unroll
        for (int high = 0; high < kHigh; ++high) {
          const Piece piece = *resident_piece(round - phase.register_rounds, half, m, high);
#pragma unroll
          for (int i = 0; i < 4; ++i) a.word[high][i] = piece.word[i];
        }
        return a;
      });
    }
    if (!kStreams || streamed == phase.rounds) return;
    // Fragments read ahead: on tensor cores one, with FMA one for each gate row.
    constexpr int kAhead = kTensor ? 1 : kGates;
    Fragment next[kAhead];
#pragma unroll
    for (int m = 0; m < kAhead; ++m)
      if (has_gate(m)) stream_weights(next[m], slice_of(streamed), 0, m);
#pragma unroll 1
    for (int round = streamed; round < phase.rounds; ++round) {
      begin(round);
      if (slice_of(round) >= phase.slices) continue;
      multiply(sums, stage(round, first), tiles, [&](int half, int m) {  // warp_sync keeps the loads in this order
        const Fragment a = next[m % kAhead];
        const bool more = kTensor && has_gate(m + 1) && m + 1 < kGates, last = !more && half == kHalves - 1;
        stream_weights(next[m % kAhead], slice_of(last ? round + 1 : round), more ? half : (half + 1) % kHalves,
            more      ? m + 1
            : kTensor ? 0
                      : m);
        warp_sync();
        return a;
      });
    }
  }

  // Stores the addresses of the band's operand rows.
  FR_DEVICE void fill_table(const StepDirection& d, int direction, int row0, int end, int thread) const {
    if (thread >= 2 * kBand) return;
    const int segment = thread / kBand;
    const int b = row0 + thread % kBand;
    const StepRows& step = phase.operand_pending ? d.pending : d.here;
    const Storage* from = nullptr;
    if (segment < product.segments && b < end && b < step.rows) {
      if (product.operand_is_state) {
        const RowState row = row_state(step, d.reverse, p.step.lengths, b);
        if (row.active)
          from = old_row<Storage>(
              row, p.step.reset_to_initial, d.matrix[StepMatrix::kOutputBefore], d.h0, p.step.width, b);
      } else {
        const Matrix operand = rows_of_step(p, phase.operand[direction][segment], step.step);
        from = static_cast<const Storage*>(operand.data) + b * operand.row_stride;
      }
    }
    table(segment, thread % kBand) = from;
  }

  // Partial sums in shared memory: [unit_warps][depth_warps][gates][kBand][kPitch]. All but the first two numbers are
  // known when compiling, so that most of an address is an offset in the instruction.
  static constexpr int kPitch = kTileUnits + kPersistentPitch, kGateSums = kBand * kPitch;
  FR_DEVICE State* partial(int unit_warp, int depth_warp) const {
    return reinterpret_cast<State*>(shared_memory(p.partial_offset, p.partial_bytes)) +
           (unit_warp * phase.depth_warps + depth_warp) * sum_gates() * kGateSums;
  }

  // Adds to a unit's sums of each gate, in one row, those of the depth warps in their order.
  FR_DEVICE void add_partial(State (&sums)[kSums], int row, int unit) const {
    const State* from = partial(unit / kTileUnits, 0) + row * kPitch + unit % kTileUnits;
    const auto add = [&](int warp) {
#pragma unroll
      for (int m = 0; m < kSums; ++m)
        if (has_gate(m)) sums[m] += from[(warp * sum_gates() + m) * kGateSums];
    };
    constexpr int kMost = 8;
    if (phase.depth_warps == kMost) {
#pragma unroll
      for (int warp = 0; warp < kMost; ++warp) add(warp);
    } else {
#pragma unroll 1
      for (int warp = 0; warp < phase.depth_warps; ++warp) add(warp);
    }
  }

  // FMA: adds up the values over the lanes that share units. Lane n of them gets the sum of value n.
  FR_DEVICE State shared_sum(State (&values)[kTileRows * kHigh]) const {
    static_assert(kTileRows * kHigh == kUnitLanes);
#pragma unroll
    for (int half = kUnitLanes / 2; half > 0; half /= 2) {
      const bool upper = lane & half;
#pragma unroll
      for (int i = 0; i < half; ++i)
        values[i] =
            (upper ? values[i + half] : values[i]) + warp_shuffle(upper ? values[i] : values[i + half], lane ^ half);
    }
    return values[0];
  }

  FR_DEVICE void store_partial(WarpSums& sums, int rows) const {
    State* to = partial(unit_warp, depth_warp);
    const auto place = [&](int m, int row, int unit) {
      return to + row * kPitch + unit + m * (kUnitTiles ? kUnits : kGateSums);
    };
#pragma unroll
    for (int m = 0; m < kGates; ++m) {
      if (!has_gate(m)) break;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (tile > 0 && kTileRows * tile >= rows) break;
        if constexpr (kTensor) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            *place(m, 8 * tile + lane % 4 * 2 + i % 2, lane / 4 + i / 2 * 8) = sums[m][tile][i];
        } else {
          const State sum = shared_sum(sums[m][tile]);
          const int value = lane % kUnitLanes;
          *place(m, kTileRows * tile + value % kTileRows, lane / kUnitLanes + 32 / kUnitLanes * (value / kTileRows)) =
              sum;
        }
      }
    }
  }
};

}  // namespace fr::FR_TARGET
