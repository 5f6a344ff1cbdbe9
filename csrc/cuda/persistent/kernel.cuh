// The persistent kernel: a whole sequence in one launch. A group of blocks holds the recurrent weights of a direction
// once, on the chip. In each step the blocks exchange the product's operand (the state; in backward the gate gradients)
// through global memory or, in a cluster, through shared memory. For every arithmetic but float64. launch.cpp launches
// it as partition.h decides. The pointwise phases are those of phases.cuh, so every option but dropout of the state
// works here too.
#pragma once

#include "../launch.cuh"
#include "cluster.cuh"
#include "wait.cuh"

namespace fr::FR_TARGET {

FR_GLOBAL(persistent_kernel)

// work    grid (blocks of a group, groups, directions), all resident together except for clusters. A step has one or
//         two phases, each a product and its pointwise part. A block computes `gates` gate rows of U * unit_warps units
//         for its group's rows, 16 rows at a time (a band). The depth is cut in slices of 128 bytes; depth_warps warps
//         take them in turn, a slice a round. Their sums are added in the order of the warps. Forward: kGates gate rows
//         in phase 0, one in phase 1. Backward: one gate row, of one or two tiles of U units a warp. U is 16 on tensor
//         cores, 8 with FMA (strict float32).
// memory  registers of a lane: U * kGates for each slice of weights that it holds, and 8 * kGates sums (FMA: 32 *
//         kGates with one or two gate rows, else 16 * kGates). shared: addresses of two steps, row pointers, resident
//         weights, a ring of kPersistentStages rounds of the operand, partial sums. global: for each step and band a
//         block reads the operand's whole rows from L2, and the streamed slices of weights.
// lanes   Tensor cores: a lane loads 16-byte pieces as they lie in memory. Lane 4 g + t takes pieces t and t + 4 of a
//         slice, for the weights of units g and g + 8 and for operand row g. This permutes the depth index of the mma,
//         in the same way for both operands, so the product is unchanged and no ldmatrix is needed. Piece q of row r is
//         stored at piece q ^ (4 * (r % 2)) of its 128 bytes: the 8 lanes that read at once hit different banks.
//         FMA: kUnitLanes lanes share a unit (4; with one or two gate rows 8). Each lane multiplies its pieces of the
//         depth by all rows, 4 at a time. Lanes of different units read the same pieces of an operand row together, and
//         no weight is held twice. At the end of a product the lanes of a unit add up their sums with shuffles, in an
//         order that is the same for every row.
// sync    flags: after each band block i of a group publishes how many bands it has done. A band waits until all
//         blocks of its group have done the same band one phase earlier (store_release after a block_sync,
//         load_acquire before one).
//         timeout: a block that waits for a flag longer than p.timeout_ns, or finds its group's abort flag set, aborts.
//         The one that timed out reports to the host and sets the abort flag. An aborted block runs on to the end with
//         NaN in place of every sum; it waits for nobody and publishes nothing. So everything that depends on the
//         missing sums becomes NaN, and all blocks exit. A cluster waits only at hardware barriers, for blocks that are
//         resident with it, and needs no timeout.
//         block_sync: before the operand is loaded (flags seen, row pointers written); in every round if several warps
//         share a slice, else warp_sync; before partial sums are added, and after the pointwise part.
template <class Math, int kGates, bool kBackward>
struct PersistentKernel {
  static constexpr const char* kName = "persistent_kernel";
  FR_ENTRY(persistent_kernel)
  static constexpr int kMaxThreads = 256;
  static constexpr bool kCooperative = true;  // except for clusters: launch.cuh
  // Backward has one gate row. Its kGates counts tiles of units instead; two tiles are for cells with one product only.
  static constexpr bool kUnitTiles = kBackward && kGates > 1;
  // This instantiation also runs cells with two products.
  static constexpr bool kTwoPhases = kBackward ? kGates == 1 : kGates == 2;
  using Params = PersistentParams;
  using Storage = typename Math::Storage;
  using State = typename Math::State;
  using V = Scalar<State, Math::kTensor>;
  using Product = PersistentProduct<Math, kGates, kTwoPhases, kUnitTiles>;
  using Fragment = typename Product::Fragment;
  using Operand = ClusterOperand<Product>;
  static constexpr int kBand = kPersistentBand, kHalves = Product::kHalves;
  static constexpr int kRegisterSlices = Product::kRegisterSlices;

  // One element's sums: those of the depth warps, added in their order. In a cluster the pointwise part keeps what
  // later products read in `operand`.
  struct Sums {
    static constexpr bool kDropsState = false, kStoresEntering = false;
    State value[Product::kSums];
    const Operand& operand;
    int row, unit;
    FR_DEVICE void keep(int number, Storage value) const {
      if (operand.p.cluster) *operand.place(number, row, unit) = value;
    }
    FR_DEVICE State operator()(int m) const { return value[m]; }
  };

  template <int kPhase, class Element>
  FR_DEVICE static void pointwise(const Element& element, Cell cell) {
    switch (cell) {  // cells that project have their own kernel: projected.cuh
#define FR_CELL(name, Type) \
  case Cell::name: \
    if constexpr (Numbers<Type>::kProjects || !Numbers<Type>::kMultiplies) break; \
    else if constexpr (kUnitTiles && Numbers<Type>::kTwoPhases) break; \
    else if constexpr (kBackward && kPhase == 0) element.template backward_first<Type>(); \
    else if constexpr (kBackward && Numbers<Type>::kTwoPhases) element.template backward_second<Type>(); \
    else if constexpr (!kBackward && kPhase == 0 && Numbers<Type>::kFirstGates == kGates) \
      element.template forward_first<Type>(); \
    else if constexpr (!kBackward && kPhase == 1 && Numbers<Type>::kTwoPhases && Numbers<Type>::kFirstGates == kGates) \
      element.template forward_second<Type>(); \
    break;
#include "../../cells/cells.inc"
#undef FR_CELL
    }
  }

  // Forward, in a cluster: the state that (b, j) starts from at the step of `d`, which the caller writes into the
  // operand. `kept` is the state that this thread has just computed for the step before; null: none.
  FR_DEVICE static Storage first_state(
      const PersistentParams& p, const StepDirection& d, int b, int j, const Storage* kept) {
    const RowState row = row_state(d.here, d.reverse, p.step.lengths, b);
    if (!row.active) return Storage{};
    if (kept && row.has_before && !row.cut) return *kept;
    const Storage* from =
        old_row<Storage>(row, p.step.reset_to_initial, d.matrix[StepMatrix::kOutputBefore], d.h0, p.step.width, b);
    return from ? from[j] : Storage{};
  }

  // One band: its product, if any, and its pointwise part. row0: the band's first row; end: where the group's rows end.
  // In a cluster `from` is where the product's operand lies, and `operand` takes what later products read. ends: this
  // phase is a step's last one, and another step follows.
  FR_DEVICE static void band(const Product& part, const StepDirection& d, const Fragment (*held)[kHalves][kGates],
      bool product, bool aborted, int block_unit0, int row0, int end, int from, const Operand& operand, bool ends,
      int thread) {
    const PersistentParams& p = part.p;
    const auto count_rows = [&] {  // recomputed: the product leaves no register for it
      const int left = end - made_anew(row0);
      return left < kBand ? left : kBand;
    };
    const int units = part.block_units();
    if (product) part.run(from, count_rows(), held, [] {});
    block_sync();
    const bool plain = product && is_plain<kBackward>(p.step, d);  // without a product it is the first or the last step
    const int elements = count_rows() * units;
    for (int i = thread; i < elements; i += block_threads()) {
      const int row = i >> part.phase.unit_bits, unit = i & (units - 1);
      const int b = row0 + row, j = block_unit0 + unit;
      if (j >= part.phase.units) continue;
      Sums sums{{}, operand, row, j};
      if (product) {
        part.add_partial(sums.value, row, unit);
      } else {
        for (State& sum : sums.value) sum = sum_unless(aborted);
      }
      const auto run = [&](auto element) {
        element.read_roles(kBackward);
        if (part.number == 0) pointwise<0>(element, element.p.cell);
        else if constexpr (kTwoPhases) pointwise<1>(element, element.p.cell);
        return element.kept;
      };
      const bool keeps = !kBackward && p.cluster && ends;
      if (plain) {
        const Clips<V> none{V(0), V(0), false, false};
        const Storage state = run(Element<Math, Sums, true>{p.step, d, none, b, j, sums});
        if (keeps) sums.keep(0, state);
      } else {
        const PersistentParams& again = read_again(p);
        const Clips<V> clips = clips_of<V>(again.step);
        const Storage state = run(Element<Math, Sums>{again.step, d, clips, b, j, sums});
        if (keeps) sums.keep(0, first_state(again, placed_steps()[2 * operand.odd], b, j, &state));
      }
    }
    block_sync();
  }

  // Fills the block's operand for the first step: the initial states of all the group's rows, or zeros in backward.
  // Every block computes all of it. The cluster_sync makes sure that all blocks have done so before one writes to
  // another.
  FR_DEVICE static void start_cluster(
      const PersistentParams& p, const StepDirection& d, int row0, int end, int thread) {
    const int rows = end - row0, hidden = static_cast<int>(p.step.hidden);
    auto* operands = reinterpret_cast<uint32_t*>(shared_memory(p.operand_at[0][0], p.operand_bytes));
    for (int i = thread; i < p.operand_bytes / 4; i += block_threads()) operands[i] = 0;
    block_sync();
    const Operand operand{p, 0};
    if (!kBackward)
      for (int i = thread; i < rows * hidden; i += block_threads())
        *operand.place(0, i / hidden, i % hidden) = first_state(p, d, row0 + i / hidden, i % hidden, nullptr);
    cluster_sync();
  }

  FR_DEVICE static void run(const PersistentParams& p) {
    const int thread = thread_index(), direction = block_z(), block = block_x(), blocks = grid_x();
    // The pointwise part keeps the first warps busy, so other work is dealt out from the last thread on.
    const auto other = [&] { return block_threads() - 1 - made_anew(thread); };
    const int row0 = block_y() * p.rows_per_group, batch = static_cast<int>(p.batch);
    const int end = row0 + p.rows_per_group < batch ? row0 + p.rows_per_group : batch;
    // index of the group's first flag: takes fewer registers than its address
    const int first_flag = (direction * p.groups + block_y()) * (blocks + 1);
    StepDirection* current = placed_steps();

    const int phases = kTwoPhases ? p.phases : 1;
    const auto part_of = [&](int index) { return Product(p, index, direction, block, made_anew(thread)); };
    const Product first = part_of(0);
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
    if (phases > 1) part_of(1).fill_resident();
    for (int i = 0; i < 4; ++i) copy_words(current[i], p.step.direction[direction], thread);
    block_sync();
    for (int i = 0; i < 4; ++i) copy_words(current[i].product, p.phase[i % 2].product[direction], thread);
    block_sync();
    // Addresses are prepared two steps ahead, by warps that neither wait for flags nor publish one.
    const auto place = [&](int s) {
      const int at = made_anew(thread) - block_threads() / 2;
      if (s <= p.last)
        place_step<kBackward>(
            p, direction, current + s % 2 * 2, current + (1 - s % 2) * 2, s, at < 0 ? at + block_threads() : at);
    };
#pragma unroll 1
    for (int s = 0; s < 2; ++s) {
      place(s);
      block_sync();
    }

    if (p.cluster) start_cluster(p, current[0], row0, end, thread);

    bool aborted = false;
    unsigned seen = 0;  // value last read from the flag that this thread waits for, if it waits for one alone
    for (int s = 0; s <= p.last; ++s) {
      const StepDirection* d = current + s % 2 * 2;
      const Operand operand{p, 1 - s % 2};
      for (int index = 0; index < phases; ++index) {
        const bool product = !kBackward || (index == 0 ? s > 0 : s < p.count);
        const unsigned done = s * phases + index;  // phases done so far
        for (int c = 0; row0 + c * kBand < end; ++c) {
          const Product part = part_of(index);
          const int units = part.block_units(), unit0 = block * units;
          const int band_row0 = row0 + c * kBand;
          if (product && !p.cluster && !aborted) {
            part.fill_table(d[index], direction, band_row0, end, other());
            bool all = true;
            if (done > 0) {
              const unsigned wanted = (done - 1) * p.bands + c + 1;
              // A flag that had already passed this band when it was last read is not read again, which would take a
              // round trip to L2.
              for (int i = other(); i <= blocks && all; i += block_threads())
                if (c == 0 || blocks >= block_threads() || (i < blocks && seen < wanted))
                  all = wait_for<kBackward>(p, p.flags + first_flag, i, wanted, index, d->here.step, seen);
            }
            aborted = block_sync_any(!all);
          }
          if (index == 0) prefetch_rows<Math, kBackward>(p, d[0], band_row0, end, unit0, part.phase.unit_bits, other());
          band(part, d[index], weights, product && !aborted, aborted, unit0, band_row0, end, p.operand_at[index][s % 2],
              operand, index + 1 == phases && s < p.last, thread);
          if (thread == 0 && !p.cluster && !aborted)
            store_release(p.flags + (first_flag + block), done * p.bands + c + 1);
        }
        const bool exchanges = p.cluster && cluster_size() > 1;
        if (exchanges) {
          const Product part = part_of(index);
          operand.broadcast(part.phase, block * part.block_units(), end - row0, thread);
          cluster_arrive();
        }
        if (index + 1 == phases) place(s + 2);  // over the addresses of this step, which nobody reads any more
        if (exchanges) cluster_wait();
      }
    }
  }
};

// gates: in forward the first product's gate rows, in backward the tiles of units.
template <class Math>
void launch_persistent(
    bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream) {
  if (backward && gates == 1) return launch<PersistentKernel<Math, 1, true>>(shape, params, stream);
  if (backward) return launch<PersistentKernel<Math, 2, true>>(shape, params, stream);
  switch (gates) {
    case 1: return launch<PersistentKernel<Math, 1, false>>(shape, params, stream);
    case 2: return launch<PersistentKernel<Math, 2, false>>(shape, params, stream);
    case 3: return launch<PersistentKernel<Math, 3, false>>(shape, params, stream);
    case 4: return launch<PersistentKernel<Math, 4, false>>(shape, params, stream);
  }
}

}  // namespace fr::FR_TARGET
