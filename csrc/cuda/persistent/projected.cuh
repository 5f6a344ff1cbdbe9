// The persistent kernel of the LSTM with projection: a whole sequence in one launch, the weights of a direction spread
// once over a group of blocks. One of its two products a step has few results and a great depth: forward the
// projection, [H] to [R]; backward the gradient of the state, [4H] to [R]. That product's operand never leaves the
// block that computes it: each block multiplies its own units' part of the depth, and the blocks add up partial sums.
// launch.cpp launches it as partition.h decides. The pointwise phases are those of phases.cuh, so every option but
// dropout of the state works here too.
//
// Why only here: if blocks exchange d_gates, each reads G*H*s bytes a row. If they exchange partial sums of d_h, each
// writes R*4 bytes a row and reads as many, whatever the number of blocks. For an LSTM in 16 bit that is 8*H against
// 8*R bytes. Without projection they are equal, and exchanging d_gates saves a barrier and keeps the order of sums.
// With H = 4096 and R = 512 partial sums move an eighth.
#pragma once

#include "../../cells/lstm.h"
#include "../launch.cuh"
#include "product.cuh"
#include "wait.cuh"

namespace fr::FR_TARGET {

FR_GLOBAL(projected_kernel)

// The product that gives partial sums. A block computes it over the depth of its own units (backward: of their four
// gates), for all R results. Its operand lies in shared memory, kBand rows of 128 bytes a slice. A warp takes every
// warps()-th tile of results, over the block's whole depth. An item is one slice of one tile. The weights of the first
// items are in registers, those of the next in shared memory; the rest is streamed from L2.
template <class Math, bool kBackward>
struct PartialProduct : PersistentProduct<Math, 1, false, false, projected_register_slices(kBackward, true)> {
  using Base = PersistentProduct<Math, 1, false, false, projected_register_slices(kBackward, true)>;
  using Base::p, Base::phase, Base::lane, Base::unit_warp, Base::kHalves, Base::kHigh, Base::kUnits, Base::kUnitLanes,
      Base::kTileRows, Base::kBand;
  using typename Base::Fragment, typename Base::Piece, typename Base::State, typename Base::Storage;
  static constexpr int kOwnGates = kBackward ? 4 : 1;
  int own_units, block;

  FR_DEVICE PartialProduct(
      const PersistentParams& params, int index, int direction, int of_block, int units, int thread)
      : Base(params, index, direction, of_block, thread), own_units(units), block(of_block) {}

  struct Item {
    int slice, result0;
  };
  FR_DEVICE Item item_of(int number) const {
    return {number % phase.slices, (number / phase.slices * this->warps() + unit_warp) * kUnits};
  }
  FR_DEVICE Item after(Item item) const {
    if (item.slice + 1 < phase.slices) return {item.slice + 1, item.result0};
    return {0, item.result0 + this->warps() * kUnits};
  }

  // kStreamed: rows and gates are 16-byte aligned, and the product's description is read as in stream_weights.
  template <bool kStreamed>
  FR_DEVICE void load_item(Fragment& to, Item item, int half) const {
    const int k = item.slice * Base::kSliceDepth + (kUnitLanes * half + lane % kUnitLanes) * Base::kPieceDepth;
    const int gate = kBackward ? k / own_units : 0, unit = block * own_units + k - gate * own_units,
              hidden = static_cast<int>(p.step.hidden);
    const int left = k < kOwnGates * own_units ? hidden - unit : 0;
    const StepProduct& product = kStreamed ? placed_steps()[Base::number].product : Base::product;
    const auto* weight = static_cast<const Storage*>(product.weight[0]) + gate * hidden + unit;
#pragma unroll
    for (int high = 0; high < kHigh; ++high) {
      const int result = item.result0 + lane / kUnitLanes + 32 / kUnitLanes * high;
      const Storage* from = weight + result * product.weight_stride[0];
      const bool some = (left > 0) & (result < phase.units);
      Piece piece{};
      if constexpr (kStreamed) {
        if (some) piece = *reinterpret_cast<const Piece*>(from);
      } else {
        if (kBackward && hidden % Base::kPieceDepth != 0)  // only gate 0 begins on 16 bytes
          load_elements(piece.word, from, some ? (left < Base::kPieceDepth ? left : Base::kPieceDepth) : 0);
        else load_constant(piece.word, from, some);
      }
      Math::prepare(piece.word);
      to.set(high, piece.word);
    }
  }

  // Zeroes the operand, whose depth beyond the block's units stays zero.
  FR_DEVICE void clear_operand(int thread) const {
    const int bytes = phase.slices * kBand * kRowBytes;
    auto* words = reinterpret_cast<uint32_t*>(shared_memory(p.own_offset, bytes));
    for (int i = thread; i < bytes / 4; i += block_threads()) words[i] = 0;
  }
  FR_DEVICE void fill_resident() const {
    for (int i = 0; i < phase.shared_rounds; ++i)
      for (int half = 0; half < kHalves; ++half) {
        Fragment fragment;
        load_item<false>(fragment, item_of(phase.register_rounds + i), half);
#pragma unroll
        for (int high = 0; high < kHigh; ++high) {
          Piece piece;
#pragma unroll
          for (int k = 0; k < 4; ++k) piece.word[k] = fragment.word[high][k];
          *Base::resident_piece(i, half, 0, high) = piece;
        }
      }
  }

  // Writes the band's partial sums of all results to `to`, in columns of kWarpUnits results, kBand rows each. Rows of
  // the last tile beyond `rows` are written too, but never read. On tensor cores all tiles are multiplied, even if the
  // band has no row of the last one: an mma costs no more than a branch around it.
  FR_DEVICE void run(float* to, int rows, const Fragment (*held)[kHalves][1]) const {
    const int tiles = Math::kTensor ? Base::kTiles : (rows + kTileRows - 1) / kTileRows;
    typename Base::WarpSums sums = {};
    Item item = item_of(0);
    if (item.result0 >= phase.units) return;
    const typename Base::OperandPlace first =
        Base::operand_place(shared_memory(p.own_offset, phase.slices * kBand * kRowBytes));
    typename Base::OperandPlace from = first;
    // Where the lane's first sum of a column goes; its others follow at constant distances.
    const int value = lane % kUnitLanes;
    to += Math::kTensor ? value * 2 * kWarpUnits + lane / 4
                        : value % kTileRows * kWarpUnits + lane / kUnitLanes + 32 / kUnitLanes * (value / kTileRows);
    const auto take = [&](auto weights) {
      Base::multiply(sums, from, tiles, weights);
      from.slice += kBand * kRowBytes;
      if (++item.slice < phase.slices) return;
      float* column = global(to) + (kUnits == kWarpUnits ? item.result0 * kBand
                                                         : item.result0 / kWarpUnits * (kWarpUnits * kBand) +
                                                               item.result0 % kWarpUnits);
      // A warp's last tile may lie beyond the results: its weights are zero.
      const int stored = item.result0 < phase.units ? rows : 0;
#pragma unroll
      for (int tile = 0; tile < Base::kTiles; ++tile) {
        if (kTileRows * tile >= stored) continue;
        if constexpr (Math::kTensor) {
#pragma unroll
          for (int i = 0; i < 4; ++i) column[(8 * tile + i % 2) * kWarpUnits + i / 2 * 8] = sums[0][tile][i];
        } else {
          column[kTileRows * tile * kWarpUnits] = Base::shared_sum(sums[0][tile]);
        }
      }
      for (auto& tile : sums[0])
        for (State& value : tile) value = 0;
      item = {0, item.result0 + this->warps() * kUnits}, from = first;
    };
#pragma unroll
    for (int round = 0; round < Base::kRegisterSlices; ++round) {
      if (round >= phase.register_rounds) break;
      take([&](int half, int) { return held[round][half][0]; });
    }
    const int streamed = phase.register_rounds + phase.shared_rounds;
    SharedAddress resident{};
    if (phase.shared_rounds > 0) resident = shared_address(Base::resident_piece(0, 0, 0, 0));
#pragma unroll 1
    for (int round = phase.register_rounds; round < streamed; ++round) {
      take([&](int half, int) {
        Fragment a;
        if (half == 0) Base::load_resident(a, resident);
        else Base::template load_resident<1>(a, resident);
        return a;
      });
      resident += this->warps() * this->round_bytes();
    }
    if (streamed == phase.rounds) return;
    Fragment next;
    load_item<true>(next, item, 0);
#pragma unroll 1
    for (int round = streamed; round < phase.rounds; ++round) {
      take([&](int half, int) {  // reads one fragment ahead; warp_sync keeps the loads in this order
        const Fragment a = next;
        if (half + 1 < kHalves) load_item<true>(next, item, half + 1);
        else if (round + 1 < phase.rounds) load_item<true>(next, after(item), 0);
        warp_sync();
        return a;
      });
    }
  }
};

// work    grid (blocks of a group, groups, directions), all resident together. A block owns unit_warps tiles of units
//         of its group's rows, 16 rows at a time (a band). A step of a band, forward:
//           own    the gates of the block's units from all of h; pointwise part: `inner` of its units; their product
//                  with the projection weights, partial sums [16, R], to global memory
//           share  the block adds up its share of the 16 * R elements over all blocks in a fixed order (each warp over
//                  every warps-th block, then over the warps in their order); pointwise part: h
//         backward:
//           share  partial sums of d_h from the step processed before; pointwise part: d_projected
//           own    d_inner of the block's units from all of d_projected; pointwise part: d_gates of its units; their
//                  partial sums of d_h to global memory
//         `slots` bands are in flight together (a wave), which hides the exchanges: `own` for each, then `share` for
//         each (backward: `share` of the next step).
// memory  registers: in forward weights of the product of depth R and 32 sums, in backward weights of the partial sums
//         and 8 sums. shared: as in kernel.cuh, and the block's operand, 16 rows of 128 bytes a slice. global: for each
//         step and band a block gathers R values a row, and writes and reads R floats a row, whatever the number of
//         blocks. R = 512 in 16 bit: 5 KiB a row; gathering both operands would take 9 KiB forward and 33 KiB backward.
// sync    flags as in kernel.cuh. `own` of a band waits for `share` of the band that used its slot before, which
//         implies that its operand is complete. `share` waits for `own` of the same band. block_sync: as in
//         kernel.cuh; between writing the block's operand and using it; between using it and publishing a flag; before
//         and after the warps' sums of a share are added.
// limits  forward's gate weights must fit registers and shared memory, because streaming them too would not fit the
//         registers on sm_100 and newer. The weights of the partial sums, and all of backward's, may be streamed.
template <class Math, bool kBackward>
struct ProjectedKernel {
  static constexpr const char* kName = "projected_kernel";
  FR_ENTRY(projected_kernel)
  static constexpr int kMaxThreads = 256;
  static constexpr bool kCooperative = true;
  // phase numbers in the order of PersistentParams
  static constexpr int kGates = kBackward ? 1 : 4, kOwn = kBackward ? 1 : 0, kShared = 1 - kOwn;
  using Params = PersistentParams;
  using Cell = LstmProjected;  // the one cell that projects: partition.h refuses others
  using Storage = typename Math::Storage;
  using State = typename Math::State;
  using V = Scalar<State, Math::kTensor>;
  using Product = PersistentProduct<Math, kGates, false, false, projected_register_slices(kBackward, false), kBackward>;
  using Partial = PartialProduct<Math, kBackward>;
  static constexpr int kBand = kPersistentBand;
  static constexpr unsigned kBytes = sizeof(Storage);
  struct alignas(16) Quad {
    float value[4];
  };
  struct Weights {  // in registers; where there are none an unused element, because arrays cannot be empty
    typename Product::Fragment product[Product::kRegisterSlices > 0 ? Product::kRegisterSlices : 1][Product::kHalves]
                                      [kGates];
    typename Partial::Fragment partial[Partial::kRegisterSlices > 0 ? Partial::kRegisterSlices : 1][Partial::kHalves]
                                      [1];
  };

  // One element's sums: those of the warps, added in their order.
  struct Sums {
    static constexpr bool kDropsState = false, kStoresEntering = false;
    State value[Product::kSums];
    // Where `keep` writes to: the block's operand, a row of it, gate 0's byte of depth and bytes from gate to gate.
    int operand, row;
    unsigned byte, gate_bytes;
    FR_DEVICE void keep(int gate, Storage value) const {
      const int offset = operand + Product::value_offset(row, byte + (kBackward ? gate : 0) * gate_bytes);
      *reinterpret_cast<Storage*>(shared_memory(offset, sizeof(Storage))) = value;
    }
    FR_DEVICE State operator()(int m) const { return value[m]; }
  };

  // A group's addresses. They live in shared memory and are read again after each barrier, so that they take no
  // registers from the weights.
  struct Place {
    int row0, end, bands, pitch;  // pitch: R rounded up to whole columns of kWarpUnits
    unsigned* flags;
    float* sums;  // [slot][block][column][kBand][kWarpUnits]
  };
  static_assert(sizeof(Place) <= kPersistentPlace);
  FR_DEVICE static Place& place() { return *reinterpret_cast<Place*>(shared_memory(kPersistentHeader, sizeof(Place))); }

  // A band of the group, and which slot has its partial sums: index % slots.
  struct Band {
    int index, slot;
  };

  // In forward, whose weights leave fewer registers, expressions of the value are recomputed for each band.
  FR_DEVICE static int own_value(int value) { return kBackward ? value : made_anew(value); }

  struct Block {
    const PersistentParams& p;
    mutable bool aborted = false;  // as in kernel.cuh

    FR_DEVICE const Place& at() const { return place(); }
    // The first warps have most of the pointwise part, so other work is dealt out from the last thread on. The next
    // step's addresses, which take longest, are left to the warps before these.
    FR_DEVICE static int other() { return block_threads() - 1 - own_value(thread_index()); }
    FR_DEVICE float* partial_of(Band band, int block) const {
      return at().sums + (static_cast<int64_t>(band.slot) * grid_x() + block) * kBand * at().pitch;
    }
    FR_DEVICE Product product_part() const {
      return Product(p, kOwn, block_z(), own_value(block_x()), own_value(thread_index()));
    }
    FR_DEVICE Partial partial_part() const {
      return Partial(p, kShared, block_z(), own_value(block_x()), Product::kUnits * p.phase[kOwn].unit_warps,
          own_value(thread_index()));
    }
    FR_DEVICE int first_row(Band band) const { return at().row0 + band.index * kBand; }
    FR_DEVICE int rows_of(Band band) const {
      const int left = at().end - first_row(band);
      return left < kBand ? left : kBand;
    }
    // The value of a block's flag once it has done `own` of a band in iteration s, or the `share` that follows. It
    // counts what the block has done: in each iteration, wave by wave, `own` of the wave's bands and then `share` of
    // them. Backward counts one `share` of each band before the first iteration.
    FR_DEVICE unsigned own_done(int s, Band band) const {
      return (kBackward ? at().bands : 0) + 2u * s * at().bands + (band.index - band.slot) + band.index + 1;
    }
    FR_DEVICE unsigned share_done(int s, Band band) const {
      const int left = at().bands - (band.index - band.slot);
      return own_done(s, band) + (left < p.slots ? left : p.slots);
    }
    FR_DEVICE void wait(unsigned wanted, const StepDirection& d, int phase) const {
      if (aborted) return;
      bool all = true;
      unsigned seen = 0;
      for (int i = other(); i <= grid_x() && all; i += block_threads())
        all = wait_for<kBackward>(p, at().flags, i, wanted, phase, d.here.step, seen);
      aborted = block_sync_any(!all);
    }
    FR_DEVICE void publish(unsigned done) const {
      if (thread_index() == 0 && !aborted) store_release(at().flags + block_x(), done);
    }

    // Waits until `own` of iteration s may read its operand and overwrite its slot.
    FR_DEVICE void wait_for_slot(int s, Band band, const StepDirection& d) const {
      const int c = band.index;
      if (c >= p.slots) return wait(share_done(s, {c - p.slots, band.slot}), d, kOwn);
      const int last = c + (at().bands - 1 - c) / p.slots * p.slots;
      if (s > 0) return wait(share_done(s - 1, {last, band.slot}), d, kOwn);
      if (kBackward) return wait(c + 1, d, kOwn);
      block_sync();
    }

    template <class Run>
    FR_DEVICE void run_element(bool plain, int b, int j, const StepDirection& d, const Sums& sums, Run run) const {
      if (plain) {
        const Clips<V> none{V(0), V(0), false, false};
        Element<Math, Sums, true> element{p.step, d, none, b, j, sums};
        element.read_roles(kBackward);
        run(element);
      } else {
        const PersistentParams& again = read_again(p);
        const Clips<V> clips = clips_of<V>(again.step);
        Element<Math, Sums> element{again.step, d, clips, b, j, sums};
        element.read_roles(kBackward);
        run(element);
      }
    }

    FR_DEVICE void own(const StepDirection& d, int s, Band band, const Weights& weights) const {
      const Product part = product_part();
      const int units = part.block_units(), unit0 = block_x() * units;
      const int first = first_row(band), rows = rows_of(band);
      const int thread = own_value(thread_index());
      bool product = (!kBackward || s < p.count) && !aborted;
      if (product) {
        part.fill_table(d, block_z(), first, at().end, other());
        wait_for_slot(s, band, d);
        product = !aborted;
      }
      prefetch_rows<Math, kBackward>(p, d, first, at().end, unit0, part.phase.unit_bits, other());
      if (product) part.run(0, rows, weights.product, [] { block_sync(); });  // the sums overwrite the ring
      block_sync();
      const bool plain = product && is_plain<kBackward>(p.step, d);
      // The threads are a multiple of the units, so each has one unit, of several rows.
      const int unit = thread & (units - 1), j = unit0 + unit, bits = part.phase.unit_bits;
      for (int row = thread >> bits; row < rows && j < part.phase.units; row += block_threads() >> bits) {
        Sums sums{{}, p.own_offset, row, unit * kBytes, units * kBytes};
        if (product) {
          part.add_partial(sums.value, row, unit);
        } else {
          for (State& sum : sums.value) sum = sum_unless(aborted);
        }
        const auto run = [&](const auto& element) {
          if constexpr (kBackward) element.template backward_second<Cell>();
          else element.template forward_first<Cell>();
        };
        run_element(plain, first + row, j, d, sums, run);
      }
      block_sync();
      if ((!kBackward || s < p.last) && !aborted) {
        partial_part().run(partial_of(band, block_x()), rows, weights.partial);
        block_sync();
      }
      publish(own_done(s, band));
    }

    // Adds up the block's share of a band's partial sums, if there are any (product), and runs the pointwise part of
    // step d.
    FR_DEVICE void share(const StepDirection& d, Band band, bool product) const {
      product = product && !aborted;
      const int rows = rows_of(band), all = rows * at().pitch, blocks = grid_x();
      const int thread = own_value(thread_index()), warps = block_threads() / 32, warp = thread / 32,
                lane = thread % 32;
      const int mine = (all / 4 + blocks - 1) / blocks * 4, from = block_x() * mine,
                to = from + mine < all ? from + mine : all;
      const bool plain = product && is_plain<kBackward>(p.step, d);
      State* added = part_sums();
      for (int first = from; first < to; first += kPersistentShare) {
        const int quad = first + 4 * lane;
        if (product && quad < to) {
          const int place = quad + quad / (rows * kWarpUnits) * (kBand - rows) * kWarpUnits;
          Quad sum{};
          const float* read = partial_of(band, warp) + place;
          const int64_t step = static_cast<int64_t>(warps) * kBand * at().pitch;
#pragma unroll 4
          for (int left = (blocks - warp + warps - 1) / warps; left > 0; --left, read += step) {
            const Quad value = *reinterpret_cast<const Quad*>(read);
#pragma unroll
            for (int k = 0; k < 4; ++k) sum.value[k] += value.value[k];
          }
          *reinterpret_cast<Quad*>(added + warp * kPersistentShare + 4 * lane) = sum;
        }
        block_sync();
        for (int i = thread; i < kPersistentShare && first + i < to; i += block_threads()) {
          const int column = (first + i) / kWarpUnits, row = column % rows,
                    j = column / rows * kWarpUnits + (first + i) % kWarpUnits;
          if (j >= p.phase[kShared].units) continue;
          Sums sums{{sum_unless(aborted)}, 0, 0, 0, 0};
          if (product)
            for (int of = 0; of < warps; ++of) sums.value[0] += added[of * kPersistentShare + i];
          const auto run = [&](const auto& element) {
            if constexpr (kBackward) element.template backward_first<Cell>();
            else element.template forward_second<Cell>();
          };
          run_element(plain, first_row(band) + row, j, d, sums, run);
        }
        block_sync();
      }
    }
    FR_DEVICE State* part_sums() const {
      return reinterpret_cast<State*>(shared_memory(p.partial_offset, p.partial_bytes));
    }
  };

  FR_DEVICE static void run(const PersistentParams& p) {
    const int thread = thread_index(), direction = block_z();
    if (thread == 0) {
      Place& at = place();
      const int row0 = block_y() * p.rows_per_group, to = row0 + p.rows_per_group, batch = static_cast<int>(p.batch);
      at.row0 = row0, at.end = to < batch ? to : batch, at.bands = (at.end - row0 + kBand - 1) / kBand;
      at.pitch = (p.phase[kShared].units + kWarpUnits - 1) / kWarpUnits * kWarpUnits;
      const int64_t group = static_cast<int64_t>(direction) * p.groups + block_y();
      at.flags = p.flags + group * (grid_x() + 1);
      at.sums = p.sums + group * p.slots * grid_x() * kBand * at.pitch;
    }
    const Block of{p};
    StepDirection* current = placed_steps();

    const Product part = of.product_part();
    const Partial partial = of.partial_part();
    Weights weights;
#pragma unroll
    for (int round = 0; round < Product::kRegisterSlices; ++round) {
      if (round >= part.phase.register_rounds) break;
#pragma unroll
      for (int half = 0; half < Product::kHalves; ++half)
#pragma unroll
        for (int m = 0; m < kGates; ++m)
          part.load_weights(weights.product[round][half][m], part.slice_of(round), half, m);
    }
#pragma unroll
    for (int item = 0; item < Partial::kRegisterSlices; ++item) {
      if (item >= partial.phase.register_rounds) break;
#pragma unroll
      for (int half = 0; half < Partial::kHalves; ++half)
        partial.template load_item<false>(weights.partial[item][half][0], partial.item_of(item), half);
    }
    part.fill_resident();
    partial.fill_resident();
    partial.clear_operand(thread);
    for (int i = 0; i < 4; ++i) copy_words(current[i], p.step.direction[direction], thread);
    block_sync();
    for (int i = 0; i < 4; ++i) copy_words(current[i].product, p.phase[i % 2].product[direction], thread);
    block_sync();
    place_step<kBackward>(p, direction, current, nullptr, 0, thread);
    block_sync();

    if constexpr (kBackward)
      for (int c = 0; c < of.at().bands; ++c) {
        of.share(current[kShared], {c, 0}, false);
        of.publish(c + 1);
      }
    for (int s = 0; s <= p.last; ++s) {
      StepDirection* d = current + s % 2 * 2;
      StepDirection* next = current + (1 - s % 2) * 2;
      for (int first = 0; first < of.at().bands; first += p.slots) {
        const int after = first + p.slots < of.at().bands ? first + p.slots : of.at().bands;
        for (int c = first; c < after; ++c) {
          // Prepares the next step's addresses. The addresses that are overwritten were last read a step ago.
          if (c == 0 && s < p.last) {
            const int at = block_threads() * 3 / 4 - 1 - thread;
            place_step<kBackward>(p, direction, next, d, s + 1, at < 0 ? at + block_threads() : at);
          }
          of.own(d[kOwn], s, {c, c - first}, weights);
        }
        if (kBackward && s == p.last) continue;
        for (int c = first; c < after; ++c) {
          const StepDirection& shared = (kBackward ? next : d)[kShared];
          const Band band{c, c - first};
          of.wait(of.own_done(s, band), shared, kShared);
          of.share(shared, band, true);
          of.publish(of.share_done(s, band));
        }
      }
    }
  }
};

template <class Math>
void launch_projected(bool backward, const LaunchShape& shape, const PersistentParams& params, void* stream) {
  if (backward) return launch<ProjectedKernel<Math, true>>(shape, params, stream);
  launch<ProjectedKernel<Math, false>>(shape, params, stream);
}

}  // namespace fr::FR_TARGET
