// The kernels of the cells with layer normalisation: everything of a step after its recurrent product, and of its
// backward before that product's gradient (../layer_norm.h; the formulas are in ../layer_norm_rows.h). fastrnn's loop
// over the steps (fastrnn/_core/layer_norm.py) launches them around torch's products. Launched by run.cpp.
#pragma once

#include <cmath>

#include "launch.cuh"

#include "../layer_norm_rows.h"

namespace fr::FR_TARGET {

FR_GLOBAL(layer_norm_kernel)
FR_GLOBAL(layer_norm_units_kernel)

// The threads of a block visit the values of their row in turn. Sums are added by thread, then as a tree over the lanes
// of a warp, then in the order of the warps. The order depends on H alone, so a row's result is the same in any batch.
template <class T>
struct BlockWalk {
  using Value = T;
  using V = Scalar<T>;

  T* sums = nullptr;  // shared: [2][warps][2]. Two sets in turn, so that a mean needs only one barrier: a set is
                      // written again after the barrier of the next mean, which follows all reads of it
  int set = 0;

  FR_HD static int64_t shared_bytes(int threads) { return 2 * (threads / 32) * 2 * static_cast<int64_t>(sizeof(T)); }

  template <class Function>
  FR_DEVICE void each(int64_t count, Function function) const {
    for (int64_t i = thread_index(); i < count; i += block_threads()) function(i, 1);
  }

  template <class Function>
  FR_DEVICE Means<T> means(int64_t count, Function function) {
    V first(0), second(0), a, b;
    for (int64_t i = thread_index(); i < count; i += block_threads()) {
      function(i, 1, a, b);
      first = first + a, second = second + b;
    }
    Means<T> sum{first.value, second.value};
    const int lane = thread_index() % 32, warp = thread_index() / 32, warps = block_threads() / 32;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum.first += warp_shuffle(sum.first, lane ^ distance);
      sum.second += warp_shuffle(sum.second, lane ^ distance);
    }
    T* const own = sums + set * 2 * warps;
    set = 1 - set;
    if (lane == 0) own[2 * warp] = sum.first, own[2 * warp + 1] = sum.second;
    block_sync();
    sum = {0, 0};
    for (int i = 0; i < warps; ++i) sum.first += own[2 * i], sum.second += own[2 * i + 1];
    return {sum.first / static_cast<T>(count), sum.second / static_cast<T>(count)};
  }

  FR_DEVICE static void sync() { block_sync(); }
  FR_DEVICE static bool leads() { return thread_index() == 0; }
  FR_DEVICE static V load(const T* p, int) { return V(*p); }
  FR_DEVICE static void store(T* p, V v, int) { *p = v.value; }
  FR_DEVICE static T root(T x) {
    if constexpr (sizeof(T) == 4) return sqrtf(x);
    else return sqrt(x);
  }
};

// work    a block for each row; its threads take the row's values in turn.
// memory  shared: 4 sums a warp. global: a row's values, which are read again from L1 in each loop over them: 7 loops
//         over one to four gates in forward, 5 in backward.
// sync    one block_sync for each mean, and one between two loops that give a value to different threads.
// shapes  any; float and double. Reads and writes are coalesced, an element a thread.
template <class T, bool kBackward>
struct LayerNormKernel {
  static constexpr const char* kName = "layer_norm_kernel";
  FR_ENTRY(layer_norm_kernel)
  static constexpr int kMaxThreads = 512;
  static constexpr bool kCooperative = false;
  using Params = LayerNormArgs;

  FR_DEVICE static void run(const LayerNormArgs& args) {
    BlockWalk<T> walk;
    walk.sums = reinterpret_cast<T*>(shared_memory(0, walk.shared_bytes(block_threads())));
    LayerNormRow<BlockWalk<T>> row{args, block_x(), walk};
    if constexpr (kBackward) row.backward();
    else row.forward();
  }
};

// work    grid (units / 32, pairs of a gain and a shift): a block sums a pair's gradients of 32 units over the rows. A
//         warp takes every 16th row; then the warps' sums are added in order. This order depends on the number of rows
//         alone.
// memory  shared: 2 sums a thread. global: reads d_input, scratch, N(product) and c once.
// sync    one block_sync, between the warps' sums and their total.
template <class T>
struct LayerNormUnitsKernel {
  static constexpr const char* kName = "layer_norm_units_kernel";
  FR_ENTRY(layer_norm_units_kernel)
  static constexpr int kMaxThreads = 512, kUnits = 32, kGroups = kMaxThreads / kUnits;
  static constexpr bool kCooperative = false;
  static constexpr int64_t kSharedBytes = 2 * kMaxThreads * sizeof(T);
  using Params = LayerNormArgs;
  using Row = LayerNormRow<BlockWalk<T>>;
  using V = Scalar<T>;

  FR_DEVICE static void run(const LayerNormArgs& args) {
    T* const sums = reinterpret_cast<T*>(shared_memory(0, kSharedBytes));
    const int thread = thread_index(), group = thread / kUnits, pair = block_y();
    const int64_t unit = static_cast<int64_t>(block_x()) * kUnits + thread % kUnits;
    V d_gain(0), d_shift(0);
    if (unit < args.hidden)
      for (int64_t row = group; row < args.rows; row += kGroups)
        Row{args, row, {}}.add_unit_gradients(pair, unit, 1, d_gain, d_shift);
    sums[thread] = d_gain.value, sums[kMaxThreads + thread] = d_shift.value;
    block_sync();
    if (group > 0 || unit >= args.hidden) return;
    for (int other = thread + kUnits; other < kMaxThreads; other += kUnits)
      d_gain = d_gain + V(sums[other]), d_shift = d_shift + V(sums[kMaxThreads + other]);
    Row::store_unit_gradients(args, pair, unit, d_gain, d_shift, 1);
  }
};

template <class T>
void launch_layer_norm(bool backward, const LayerNormArgs& args) {
  using Units = LayerNormUnitsKernel<T>;
  const int64_t warps = (args.hidden + 31) / 32, most = LayerNormKernel<T, false>::kMaxThreads / 32;
  const int threads = 32 * static_cast<int>(warps < most ? warps : most);
  const LaunchShape rows{static_cast<int>(args.rows), 1, 1, threads, BlockWalk<T>::shared_bytes(threads)};
  if (!backward) {
    if (args.rows > 0) launch<LayerNormKernel<T, false>>(rows, args, args.stream);
    return;
  }
  if (args.rows > 0) launch<LayerNormKernel<T, true>>(rows, args, args.stream);
  const LaunchShape units{static_cast<int>((args.hidden + Units::kUnits - 1) / Units::kUnits),
      Units::Row::unit_pairs(args), 1, Units::kMaxThreads, Units::kSharedBytes};
  launch<Units>(units, args, args.stream);
}

}  // namespace fr::FR_TARGET
