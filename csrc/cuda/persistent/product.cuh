// One product of a step of a persistent launch, from one thread's view: the weights that its warp keeps, how the
// operand reaches shared memory, and the sums, on tensor cores or with FMA. The layout is explained in kernel.cuh.
//
// Strict float32 (FMA) is bound by arithmetic, except in backward with a single tile of units. An SM of an H100 does
// 0.14 M multiply-adds a us, at 60 % of the card's 60 TFLOP/s. Its shared memory gives 225 KB a us. A lane multiplies
// the 4 values of an operand piece by the weights of each of its gate rows and units. So its reads of the operand allow
//   LSTM                      16 FMA a piece   1 byte an FMA     0.23 M FMA a us
//   GRU                       12               1.3               0.17 M
//   backward                  8                2                 0.11 M
//   backward, two unit tiles  16               1                 0.23 M
// A read is counted as 512 bytes a warp, though lanes share addresses. A piece of weights that is read from shared
// memory serves 16 FMA for each tile of 4 rows.
//
// At the end of a product with FMA there are 3 shuffles a gate row and tile of rows (7 if 8 lanes share a unit): 48 a
// lane for an LSTM's 16 rows, 0.2 us an SM; 0.05 us for 4 rows. The plan's model leaves the shuffles out.
#pragma once

#include "rows.cuh"
#include "../tile.cuh"

namespace fr::FR_TARGET {

// kGates: gate rows of a step's first product. kTwoPhases: there may be a second product, with one gate row.
// kUnitTiles: kGates counts a warp's tiles of units, side by side, instead of gate rows. kHeldSlices: most slices of
// weights in registers. kStreams: there may be weights that fit neither registers nor shared memory, which are read
// from L2.
template <class Math, int kGates, bool kTwoPhases, bool kUnitTiles,
    int kHeldSlices = persistent_register_slices(kGates), bool kStreams = true>
struct PersistentProduct {
  static constexpr bool kTensor = Math::kTensor;
  static constexpr int kBand = kPersistentBand, kUnits = persistent_units(kTensor),
                       kTileRows = persistent_row_tile(kTensor);
  static constexpr int kTiles = kBand / kTileRows;
  // kUnitLanes: lanes that share a unit, each with one piece of the depth at a time. kHalves: how many such turns a
  // slice takes. kHigh: units a lane.
  static constexpr int kUnitLanes = persistent_unit_lanes(kTensor, kGates), kHalves = kRowPieces / kUnitLanes,
                       kHigh = kUnits * kUnitLanes / 32;
  static constexpr int kRegisterSlices = kHeldSlices;
  // Whether products with all their weights in registers have code of their own, run_held. It makes kernels larger, so
  // only these have it: 16-bit types, forward with three or four gate rows, backward with one tile of units.
  static constexpr bool kRunsHeld = kTensor && sizeof(typename Math::Storage) == 2 && kHeldSlices > 0 &&
                                    (kGates > 2 || (kGates == 1 && kTwoPhases));
  using Storage = typename Math::Storage;
  using State = typename Math::State;
  static constexpr int kElement = sizeof(Storage), kSliceDepth = kRowBytes / kElement,
                       kPieceDepth = kPieceBytes / kElement;

  // A lane's weights of one gate row in one half of a slice: a piece for each of its units. FMA: word[unit][]. Tensor
  // cores: word[mma][]. An mma takes four neighbouring registers, so in another order it would need 4 moves.
  struct Fragment {
    uint32_t word[kHigh][4];
    FR_DEVICE void set(int high, const uint32_t (&piece)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) (kTensor ? word[i / 2][i % 2 * 2 + high] : word[high][i]) = piece[i];
    }
  };
  static_assert(!kTensor || kHigh == 2);
  // A lane's sums: mma's accumulators; with FMA those of all rows and its units, over the lane's part of the depth.
  using WarpSums = State[kGates][kTiles][kTensor ? 4 : kTileRows * kHigh];
  union alignas(kPieceBytes) Piece {
    Storage value[kPieceDepth];
    uint32_t word[4];
  };

  // Where a byte of a row lies in a slice. Odd rows exchange their halves, against bank conflicts (kernel.cuh).
  FR_DEVICE static int byte_offset(int row, int byte) { return row * kRowBytes + (byte ^ (row & 1) * (kRowBytes / 2)); }
  FR_DEVICE static int operand_offset(int row, int piece) { return byte_offset(row, piece * kPieceBytes); }
  // The same in a list of slices of kBand rows: `byte` counts over all slices.
  FR_DEVICE static int value_offset(int row, unsigned byte) {
    return byte / kRowBytes * ((kBand - 1) * kRowBytes) + byte_offset(row, byte);
  }

  const PersistentParams& p;
  const PersistentPhase& phase;
  const StepProduct& product;
  int number, unit_warp, depth_warp;
  unsigned lane;  // unsigned, so that its quotients and remainders are single instructions
  int unit0;      // the warp's first unit

  FR_DEVICE PersistentProduct(const PersistentParams& params, int index, int direction, int block, unsigned thread)
      : p(params), phase(params.phase[index]), product(phase.product[direction]), number(index) {
    const int warp = thread / 32;
    lane = thread % 32, unit_warp = warp & (phase.unit_warps - 1), depth_warp = warp >> (phase.unit_bits - kTileBits);
    unit0 = (block * phase.unit_warps + unit_warp) * kTileUnits;
  }

  // Gate rows: kGates in phase 0, 1 in phase 1. A compile-time constant where there is only one phase.
  static constexpr bool kGatesVary = kTwoPhases && kGates > 1;
  FR_DEVICE int gates() const { return kGatesVary ? phase.gates : kGates; }
  FR_DEVICE bool has_gate(int m) const { return m == 0 || !kGatesVary || m < phase.gates; }
  static constexpr int kTileUnits = kUnitTiles ? kUnits * kGates : kUnits;
  static constexpr int kTileBits = kTileUnits == 8 ? 3 : kTileUnits == 16 ? 4 : 5;
  static_assert(kTileUnits == 1 << kTileBits);
  static constexpr int kSums = kUnitTiles ? 1 : kGates;  // of a unit, at most
  FR_DEVICE int block_units() const { return kTileUnits * phase.unit_warps; }
  FR_DEVICE int unit_of(int m, int high) const {
    return unit0 + lane / kUnitLanes + 32 / kUnitLanes * high + (kUnitTiles ? kUnits * m : 0);
  }
  FR_DEVICE int64_t weight_row(int m, int unit) const { return kUnitTiles ? unit : m * product.gate_rows + unit; }
  FR_DEVICE int round_bytes() const { return gates() * kUnits * kRowBytes; }  // of a warp's weights
  FR_DEVICE int warps() const { return phase.unit_warps * phase.depth_warps; }
  FR_DEVICE const Storage*& table(int segment, int row) const {  // addresses of operand rows; null: a row of zeros
    return reinterpret_cast<const Storage**>(
        shared_memory(4 * sizeof(StepDirection), 2 * kBand * sizeof(void*)))[segment * kBand + row];
  }
  // The warp's slice of the operand in a round, kBand rows of it: in a stage of the ring, which is given in bytes from
  // the first, or in a cluster's operand that begins at `first`.
  FR_DEVICE unsigned char* ring_slice(int stage) const {
    return shared_memory(p.ring_offset + stage + depth_warp * kBand * kRowBytes, kBand * kRowBytes);
  }
  FR_DEVICE unsigned char* operand_slice(int round, int stage, int first) const {
    return p.cluster ? shared_memory(first + slice_of(round) * kBand * kRowBytes, kBand * kRowBytes)
                     : ring_slice(stage);
  }
  FR_DEVICE int stage_after(int stage) const {
    return stage == (kPersistentStages - 1) * p.stage_bytes ? 0 : stage + p.stage_bytes;
  }
  FR_DEVICE int slice_of(int round) const { return round * phase.depth_warps + depth_warp; }

  FR_DEVICE void load_weights(Fragment& to, int slice, int half, int m) const {
    const bool exists = slice < phase.slices;
    if (!exists) slice = 0;
    const int segment = slice >= phase.first_slices ? 1 : 0;
    const int64_t k = static_cast<int64_t>(slice - segment * phase.first_slices) * kSliceDepth +
                      (kUnitLanes * half + lane % kUnitLanes) * kPieceDepth;
    const auto* weight = static_cast<const Storage*>(product.weight[segment]);
    const bool within = exists & (k < product.depth[segment]);  // no &&: a branch
#pragma unroll
    for (int high = 0; high < kHigh; ++high) {
      const int unit = unit_of(m, high);
      Piece piece;
      load_constant(
          piece.word, weight + weight_row(m, unit) * product.weight_stride[segment] + k, within & (unit < phase.units));
      Math::prepare(piece.word);
      to.set(high, piece.word);
    }
  }

  // The same for weights that are streamed in each step. Units beyond the last read the last unit's row; their sums are
  // never used. The product's description is read from shared memory, so that addresses
  // are recomputed instead of kept in registers.
  FR_DEVICE void stream_weights(Fragment& to, int slice, int half, int m) const {
    const StepProduct& product = placed_steps()[number].product;
    const int segment = slice >= phase.first_slices ? 1 : 0;
    const int k =
        (slice - segment * phase.first_slices) * kSliceDepth + (kUnitLanes * half + lane % kUnitLanes) * kPieceDepth;
#pragma unroll
    for (int high = 0; high < kHigh; ++high) {
      const int unit = unit_of(m, high);
      const int of_units = unit < phase.units ? unit : phase.units - 1;
      const int64_t row = kUnitTiles ? of_units : m * product.gate_rows + of_units;
      Piece piece{};
      if (k < static_cast<int>(product.depth[segment]))
        piece = *reinterpret_cast<const Piece*>(
            static_cast<const Storage*>(product.weight[segment]) + row * product.weight_stride[segment] + k);
      Math::prepare(piece.word);
      to.set(high, piece.word);
    }
  }

  // Where resident weights lie in shared memory. The pieces of a warp's lanes are neighbours. A lane reads only what it
  // wrote itself, so no barrier is needed.
  FR_DEVICE Piece* resident_piece(int shared_round, int half, int m, int high) const {
    const int warp = depth_warp * phase.unit_warps + unit_warp;
    return reinterpret_cast<Piece*>(
        shared_memory(phase.weights_offset + (shared_round * warps() + warp) * round_bytes() +
                          (((half * gates() + m) * kHigh + high) * 32 + lane) * kPieceBytes,
            kPieceBytes));
  }
  // Loads a fragment from the address of its first piece, which is kOffset fragments away from `from`.
  template <int kOffset = 0>
  FR_DEVICE static void load_resident(Fragment& to, SharedAddress from) {
    constexpr int kPieces = 32 * kPieceBytes;  // of a warp
    load_shared<kHigh * kOffset * kPieces>(to.word[0], from);
    if constexpr (kHigh == 2) load_shared<(kHigh * kOffset + 1) * kPieces>(to.word[1], from);
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

  // Three and four gate rows leave few registers beside weights and sums. There cheap expressions are recomputed in
  // each round, and the addresses of the operand's rows are not kept from round to round.
  static constexpr bool kKeepsRows = kGates <= 2;
  // The LSTM's forward kernel would spill on sm_90; the projected one, which streams no such weights, does not.
  static constexpr bool kFewRegisters = !kKeepsRows && kStreams;
  template <class T>
  FR_DEVICE static T anew(T value) {
    return kKeepsRows ? value : made_anew(value);
  }

  // A warp copies kRows rows at a time, 8 lanes a row. A lane always copies the same piece of a row. kRows is even, so
  // byte_offset gives that piece the same place in all rows of the lane.
  static constexpr int kRows = 32 / kRowPieces;
  FR_DEVICE int first_row() const { return kRows * unit_warp + anew(lane) / kRowPieces; }
  FR_DEVICE int row_step() const { return kRows * phase.unit_warps; }

  // run_held: what a lane copies in the next round. All slices are whole (PersistentPhase::held), so that from round to
  // round the addresses only advance.
  struct Copies {
    const Storage* row[kBand / kRows];  // the lane's piece of each of its rows
    int bytes[kBand / kRows];           // of the piece; 0: the row is zero
    SharedAddress to;                   // where the first row's piece goes
    int count;                          // rows of this lane: 0, 1, 2 or 4
    int away;                           // bytes from one of these rows to the next in shared memory
    int64_t advance;                    // elements from the warp's slice of a round to that of the next round
    int second_segment;                 // first round of segment 1
  };
  // run_any: what a lane copies in the next round, kept from round to round where there are registers for it.
  struct KeptRows {
    const Storage* row[kBand / kRows];  // the lane's rows in the segment; for a row of zeros any valid address
    int bytes[kBand / kRows];           // of a whole piece; 0: the row is zero
    int segment = -1;                   // -1: none yet
    int k, depth;                       // first element of the lane's piece, and the segment's depth
    int slices;                         // from the round's to the segment's end
  };
  // Calls take(i) for each of a lane's `count` rows. i is a compile-time constant, so that arrays stay in registers.
  // rows: rows of the tiles that are copied; if the compiler knows that it is one tile, it drops the branch for the
  // others.
  template <class Take>
  FR_DEVICE static void each_row(int count, int rows, Take take) {
    if (count > 1) {
      take(0), take(1);
      if (rows > kTileRows && count > 2) take(2), take(3);
    } else if (count > 0) {
      take(0);
    }
  }
  // Rows that this lane copies.
  FR_DEVICE int count_copies(int rows) const {
    const int log = phase.unit_bits - kTileBits;  // log2 of unit_warps
    return (rows / kRows - unit_warp + (1 << log) - 1) >> log;
  }
  FR_DEVICE int segment_of(int slice) const { return slice >= phase.first_slices ? 1 : 0; }
  // The first element, in its segment, of the piece of a slice that this lane copies.
  FR_DEVICE int first_element(int slice, int segment) const {
    return (slice - segment * phase.first_slices) * kSliceDepth + anew(lane) % kRowPieces * kPieceDepth;
  }
  // Calls take(i, row, bytes) for each of the lane's rows in a segment. bytes: of a whole piece; 0: the row is zero and
  // `row` any address that is valid and 16-byte aligned, which even a copy of no bytes needs.
  template <class Take>
  FR_DEVICE void each_source(int segment, int count, int rows, Take take) const {
    // made anew: otherwise a branch of each row would compute it
    const auto* spare = made_anew(static_cast<const Storage*>(product.weight[segment]));
    const Storage** from = &table(segment, first_row());
    each_row(count, rows, [&](int i) {
      const Storage* row = from[i * row_step()];
      take(i, row ? row : spare, row ? kPieceBytes : 0);
    });
  }
  // Sets up the copies of a slice and of those that follow in its segment.
  FR_DEVICE void begin_copies(Copies& copies, int slice, int rows) const {
    const int segment = segment_of(slice), k = first_element(slice, segment);
    copies.count = count_copies(rows);
    copies.away = row_step() * kRowBytes, copies.advance = phase.depth_warps * kSliceDepth;
    copies.second_segment = phase.first_rounds;
    each_source(segment, copies.count, rows,
        [&](int i, const Storage* row, int bytes) { copies.row[i] = row + k, copies.bytes[i] = bytes; });
  }
  // Copies the operand of a round. Addresses start anew in the first round and where segment 1 begins. Where registers
  // are few, they are taken anew in each round of the main loop instead of being kept while the warp multiplies, and
  // with kFewRegisters before it too.
  FR_DEVICE void copy_slice(Copies& copies, int round, int rows) const {
    const bool again = !kKeepsRows && (round >= kPersistentStages - 1 || (kFewRegisters && rows > kTileRows));
    if (round == 0 || again || kFewRegisters)
      copies.to = shared_address(
          ring_slice(round % kPersistentStages * p.stage_bytes) + operand_offset(first_row(), anew(lane) % kRowPieces));
    if (round == 0 || again || (kKeepsRows && round == copies.second_segment))
      begin_copies(copies, slice_of(round), rows);
    else if (kFewRegisters) copies.count = count_copies(rows);
    each_row(copies.count, rows, [&](int i) {
      copy_async(copies.to + i * copies.away, copies.row[i], copies.bytes[i]);
      copies.row[i] += copies.advance;
    });
    copies.to += p.stage_bytes;
    if ((round + 1) % kPersistentStages == 0) copies.to -= kPersistentStages * p.stage_bytes;
  }

  // Loads the lane's pieces of rows whose addresses are not aligned.
  FR_DEVICE void load_rows(unsigned char* to, int segment, int k, int valid, int rows) const {
    const Storage** from = &table(segment, first_row());
    for (int row = first_row(); row < rows; row += row_step(), from += row_step(), to += row_step() * kRowBytes) {
      Piece values;
      load_elements(values.word, *from + k, *from ? valid : 0);
      *reinterpret_cast<Piece*>(to) = values;
    }
  }
  // Loads the operand of a round into a stage of the ring, for any depth and alignment; the warps that share a slice
  // load it together. A slice beyond the last is zero.
  FR_DEVICE void issue(KeptRows& kept, int round, int stage, int rows) const {
    unsigned char* to = ring_slice(stage) + operand_offset(first_row(), anew(lane) % kRowPieces);
    const auto valid_of = [](int left) { return left < 0 ? 0 : left < kPieceDepth ? left : kPieceDepth; };
    if constexpr (kTensor && kKeepsRows) {
      if (kept.segment < 0 || (kept.segment == 0 && kept.slices <= 0)) {
        const int slice = slice_of(round), segment = segment_of(slice);
        kept.segment = segment, kept.slices = phase.first_slices - slice;
        kept.k = first_element(slice, segment), kept.depth = static_cast<int>(product.depth[segment]);
        each_source(segment, count_copies(rows), rows,
            [&](int i, const Storage* row, int bytes) { kept.row[i] = row, kept.bytes[i] = bytes; });
      }
      const int valid = valid_of(kept.depth - kept.k), k = valid > 0 ? kept.k : 0, bytes = valid * kElement;
      if (product.copy_operand[kept.segment]) {
        each_row(count_copies(rows), rows, [&](int i) {
          copy_async(to + i * row_step() * kRowBytes, kept.row[i] + k, kept.bytes[i] < bytes ? kept.bytes[i] : bytes);
        });
      } else load_rows(to, kept.segment, k, valid, rows);
      kept.k += phase.depth_warps * kSliceDepth, kept.slices -= phase.depth_warps;
    } else {
      const int slice = slice_of(round), segment = segment_of(slice), k = first_element(slice, segment);
      const int valid = valid_of(static_cast<int>(product.depth[segment]) - k);
      if (!product.copy_operand[segment]) return load_rows(to, segment, k, valid, rows);
      const Storage** from = &table(segment, first_row());
#pragma unroll 1
      for (int away = 0; first_row() + away < rows; away += row_step()) {
        const bool some = from[away] && valid > 0;  // even a copy of no bytes needs a valid address
        copy_async(to + away * kRowBytes, some ? static_cast<const void*>(from[away] + k) : p.flags,
            some ? valid * kElement : 0);
      }
    }
  }

  // Where a lane reads a slice of the operand. On tensor cores `slice` is the lane's piece of row lane / 4 in the first
  // half, and `half` the distance to its piece in the second half: negative in odd rows, which exchange their halves.
  // With FMA `slice` is where the slice begins.
  struct OperandPlace {
    SharedAddress slice;
    int half;
  };
  FR_DEVICE OperandPlace operand_place(const unsigned char* slice) const {
    if constexpr (!kTensor) return {shared_address(slice), 0};
    else
      return {
          shared_address(slice) + operand_offset(lane / 4, lane % 4), lane / 4 % 2 ? -kRowBytes / 2 : kRowBytes / 2};
  }
  // Multiplies a slice. Tensor cores: for each half of the slice load the operand's pieces of all tiles, then go gate
  // row by gate row. FMA: load the weights of all gate rows, then go row by row of the operand.
  template <class Weights>
  FR_DEVICE void multiply(WarpSums& sums, const OperandPlace& from, int tiles, Weights weights) const {
    if constexpr (!kTensor) multiply_fma(sums, from.slice, tiles, weights);
    else multiply_mma<0, kTiles>(sums, from, tiles, weights);
  }
  // Weights in registers take no loads that the tiles of rows could share, so each tile is multiplied by itself. That
  // leaves no branch between the mma of a tile, so those of independent gates interleave.
  template <class Weights>
  FR_DEVICE void multiply_held(WarpSums& sums, const OperandPlace& from, int tiles, Weights weights) const {
    if constexpr (!kTensor) return multiply_fma(sums, from.slice, tiles, weights);
    else {
      multiply_mma<0, 1>(sums, from, tiles, weights);
      if (tiles > 1) multiply_mma<1, kTiles>(sums, from, tiles, weights);
    }
  }
  template <class Weights>
  FR_DEVICE void multiply_fma(WarpSums& sums, SharedAddress from, int tiles, Weights weights) const {
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
          Piece b;
          load_shared(b.word, from + operand_offset(kTileRows * tile + row, kUnitLanes * half + lane % kUnitLanes));
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
  // Multiplies tiles [kFirst, kEnd) of rows. Those from `tiles` on are left out; kFirst itself is there.
  template <int kFirst, int kEnd, class Weights>
  FR_DEVICE void multiply_mma(WarpSums& sums, const OperandPlace& from, int tiles, Weights weights) const {
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      static_assert(kTiles == 2);
      uint32_t b[kTiles][4];
#pragma unroll
      for (int tile = kFirst; tile < kEnd; ++tile) {
        if (tile > kFirst && tile >= tiles) break;
        const SharedAddress at = from.slice + half * from.half;
        if (tile == 0) load_shared(b[tile], at);
        else load_shared<kTileRows * kRowBytes>(b[tile], at);
        Math::prepare(b[tile]);
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
            const uint32_t values[2] = {b[tile][2 * step], b[tile][2 * step + 1]};
            Math::multiply(sums[m][tile], a.word[step], values);
          }
        }
      }
    }
  }

  // Waits until the operand of the round that begins has arrived. All warps that share it have then left the round
  // before, whose stage is the next to be filled.
  FR_DEVICE void wait_for_copies() const {
    wait_copies<kPersistentStages - 2>();
    if (phase.unit_warps > 1) block_sync();
    else warp_sync();
  }

  // The product of a band of kNow tiles of rows, with all weights in registers (PersistentPhase::held). There is no
  // branch between the mma of a round, so those of independent gates interleave.
  template <int kNow>
  FR_DEVICE void run_held(WarpSums& sums, int first, const Fragment (*held)[kHalves][kGates]) const {
    Copies copies;
    const auto load = [&](int round) {
      if (round < phase.rounds) copy_slice(copies, round, kTileRows * kNow);
      commit_copies();
    };
    const int stride = p.cluster ? phase.depth_warps * kBand * kRowBytes : p.stage_bytes;
    const auto rounds = [&](auto before) {
      OperandPlace from = operand_place(operand_slice(0, 0, first));
#pragma unroll
      for (int round = 0; round < kRegisterSlices; ++round) {
        if (round > 0 && round >= phase.register_rounds) break;
        before(round);
        multiply_mma<0, kNow>(sums, from, kNow, [&](int half, int m) { return held[round][half][m]; });
        from.slice += stride;
        if (!p.cluster && (round + 1) % kPersistentStages == 0) from.slice -= kPersistentStages * stride;
      }
    };
    if (p.cluster) return rounds([](int) {});
#pragma unroll
    for (int round = 0; round < kPersistentStages - 1; ++round) load(round);
    rounds([&](int round) { wait_for_copies(), load(round + kPersistentStages - 1); });
  }

  // Calls `take` with the weights that a round has in registers. Registers cannot be indexed: a search by comparisons
  // finds the round's, where an index would put the array into local memory.
  template <int kFirst, int kEnd, class Take>
  FR_DEVICE static void take_held(int round, const Fragment (*held)[kHalves][kGates], Take take) {
    if constexpr (kEnd - kFirst == 1) {
      take([&](int half, int m) { return held[kFirst][half][m]; });
    } else if constexpr (kEnd > kFirst) {
      constexpr int kMiddle = (kFirst + kEnd) / 2;
      if (round < kMiddle) take_held<kFirst, kMiddle>(round, held, take);
      else take_held<kMiddle, kEnd>(round, held, take);
    }
  }

  // The product of any band. A slice beyond the last is skipped or, if its weights are in registers, multiplied as
  // zeros. The code that copies the operand is long, so rounds whose weights are in registers or shared memory share a
  // loop. Its first, negative rounds only begin copies.
  FR_DEVICE void run_any(WarpSums& sums, int first, int rows, const Fragment (*held)[kHalves][kGates]) const {
    const int tiles = (rows + kTileRows - 1) / kTileRows;
    const int streamed = phase.register_rounds + phase.shared_rounds;
    KeptRows kept;
    // If there are registers for it, places only move on: the stage of the ring, where the weights of a round in shared
    // memory begin.
    int ring = 0;
    SharedAddress resident{};
    if (kKeepsRows && phase.shared_rounds > 0) resident = shared_address(resident_piece(0, 0, 0, 0));
    const auto stage_of = [&](int round) { return kKeepsRows ? ring : round % kPersistentStages * p.stage_bytes; };
    const auto resident_of = [&](int round) {
      return kKeepsRows ? resident : shared_address(resident_piece(round - phase.register_rounds, 0, 0, 0));
    };
    // Waits for the round's operand, and fills the stage before that one, which is free then.
    const auto begin = [&](int round) {
      if (p.cluster) return;
      if (round >= 0) wait_for_copies();
      const int loaded = round + kPersistentStages - 1;
      if (loaded < phase.rounds) issue(kept, loaded, stage_of(loaded), kTileRows * anew(tiles));
      commit_copies();
      if (kKeepsRows) ring = stage_after(ring);
    };
    const auto place = [&](int round) { return operand_place(operand_slice(round, stage_of(round), first)); };
#pragma unroll 1
    for (int round = 1 - kPersistentStages; round < streamed; ++round) {
      begin(round);
      if (round < 0) continue;
      if (kRegisterSlices > 0 && round < phase.register_rounds) {
        const OperandPlace from = place(round);
        take_held<0, kRegisterSlices>(round, held, [&](auto weights) { multiply_held(sums, from, tiles, weights); });
        continue;
      }
      if (slice_of(round) < phase.slices) {
        const SharedAddress from = resident_of(round);
        const auto multiply_tiles = [&](int tiles) {
          multiply(sums, place(round), tiles, [&](int half, int m) {
            Fragment a;
            load_resident(a, from + (half * gates() + m) * kHigh * 32 * kPieceBytes);
            return a;
          });
        };
        // With one gate row there is little code, so it has no branch between the mma of a round.
        if (!kTensor || kGates > 1) multiply_tiles(tiles);
        else if (tiles > 1) multiply_tiles(kTiles);
        else multiply_tiles(1);
      }
      if (kKeepsRows) resident += warps() * round_bytes();
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
      multiply(sums, place(round), tiles, [&](int half, int m) {  // warp_sync keeps the loads in this order
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

  // Multiplies a band of `rows` rows, calls `ready` (a barrier, if the partial sums overwrite the ring), and stores the
  // partial sums in shared memory. first: where a cluster's operand begins.
  template <class Ready>
  FR_DEVICE void run(int first, int rows, const Fragment (*held)[kHalves][kGates], Ready ready) const {
    if constexpr (kRunsHeld) {
      const auto run_tiles = [&](auto tiles) {
        WarpSums sums = {};
        run_held<tiles.value>(sums, first, held);
        ready();
        store_partial(sums, kTileRows * tiles.value);
      };
      if (phase.held) {
        if (rows <= kTileRows) run_tiles(std::integral_constant<int, 1>());
        else run_tiles(std::integral_constant<int, kTiles>());
        return;
      }
    }
    WarpSums sums = {};
    run_any(sums, first, rows, held);
    ready();
    store_partial(sums, rows);
  }

  // Stores the addresses of the band's operand rows.
  FR_DEVICE void fill_table(const StepDirection& d, int direction, int row0, int end, unsigned thread) const {
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

  // Partial sums in shared memory: [unit_warps][depth_warps][kBand][kPitch][kVector]. The gates of a unit lie together,
  // three beside an unused one, so that one instruction loads them. All sizes but the first two are compile-time
  // constants, so most of an address is an offset in the instruction.
  static constexpr int kVector = persistent_vector(kSums), kPitch = kTileUnits + kPersistentPitch / kVector;
  struct alignas(kVector * sizeof(State)) Vector {
    State gate[kVector];
  };
  FR_DEVICE Vector* partial(int unit_warp, int depth_warp) const {
    return reinterpret_cast<Vector*>(shared_memory(p.partial_offset, p.partial_bytes)) +
           (unit_warp * phase.depth_warps + depth_warp) * kBand * kPitch;
  }

  // Adds the depth warps' partial sums of a unit and row to `sums`, in the order of the warps.
  FR_DEVICE void add_partial(State (&sums)[kSums], int row, unsigned unit) const {
    const Vector* from = partial(unit / kTileUnits, 0) + row * kPitch + unit % kTileUnits;
    const auto add = [&](int warp) {
      const Vector values = from[warp * kBand * kPitch];
#pragma unroll
      for (int m = 0; m < kSums; ++m) sums[m] += values.gate[m];
    };
    constexpr int kMost = 8;
#pragma unroll
    for (int warp = 0; warp < kMost; ++warp) {
      if (warp > 0 && (warp & (warp - 1)) == 0 && warp == phase.depth_warps) break;  // their number is a power of two
      add(warp);
    }
  }

  // FMA: adds up each value over the lanes that share a unit. Lane n of these lanes gets the total of value n.
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

  // Stores the warp's partial sums. Those of gate rows that the phase does not have are zero.
  FR_DEVICE void store_partial(WarpSums& sums, int rows) const {
    Vector* to = partial(unit_warp, depth_warp);
    const auto store = [&](int row, int unit, const State(&of)[kGates]) {
      Vector* const at = to + row * kPitch + unit;
      if constexpr (kUnitTiles) {
#pragma unroll
        for (int m = 0; m < kGates; ++m) at[kUnits * m].gate[0] = of[m];
      } else {
        Vector values{};
#pragma unroll
        for (int m = 0; m < kGates; ++m) values.gate[m] = of[m];
        *at = values;
      }
    };
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (tile > 0 && kTileRows * tile >= rows) break;
      State of[kGates];
      if constexpr (kTensor) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
          for (int m = 0; m < kGates; ++m) of[m] = sums[m][tile][i];
          store(8 * tile + lane % 4 * 2 + i % 2, lane / 4 + i / 2 * 8, of);
        }
      } else {
#pragma unroll
        for (int m = 0; m < kGates; ++m) of[m] = shared_sum(sums[m][tile]);
        const int value = lane % kUnitLanes;
        store(kTileRows * tile + value % kTileRows, lane / kUnitLanes + 32 / kUnitLanes * (value / kTileRows), of);
      }
    }
  }
};

}  // namespace fr::FR_TARGET
