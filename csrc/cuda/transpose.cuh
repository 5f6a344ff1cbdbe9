// Transposes a matrix of elements of 2, 4 or 8 bytes, or copies it, into rows whose padding is zero. The backward
// products read W_hh and W_hr by columns; transposing them once a call lets backward use the forward tile. Weights
// whose rows do not end on 16 bytes are copied once a call for the persistent and the block kernels. Launched by
// layout.h.
#pragma once

#include "launch.cuh"

namespace fr::FR_TARGET {

FR_GLOBAL(transpose_kernel)

// work    grid (column tiles, row tiles): a block of 256 threads moves a tile of 32 x 32, 4 elements a thread.
// memory  shared: 32 rows of 33 elements; the odd pitch puts the elements of a column on different banks.
// sync    one block_sync, after the tile is written and before its columns are read.
// Padding reaches to the next 16 bytes, so a tile that has a row's last element has its padding too.
template <class T>
struct TransposeKernel {
  static constexpr const char* kName = "transpose_kernel";
  FR_ENTRY(transpose_kernel)
  static constexpr int kMaxThreads = 256;
  static constexpr bool kCooperative = false;
  static constexpr int kTile = 32, kPitch = kTile + 1;
  using Params = TransposeParams;

  FR_DEVICE static void run(const TransposeParams& p) {
    T* tile = reinterpret_cast<T*>(shared_memory(0, kTile * kPitch * sizeof(T)));
    const int64_t row0 = static_cast<int64_t>(block_y()) * kTile, column0 = static_cast<int64_t>(block_x()) * kTile;
    const int x = thread_index() % kTile;
    for (int y = thread_index() / kTile; y < kTile; y += kMaxThreads / kTile)
      tile[y * kPitch + x] = row0 + y < p.rows && column0 + x < p.columns
                                 ? static_cast<const T*>(p.from)[(row0 + y) * p.from_stride + column0 + x]
                                 : T(0);
    block_sync();
    const int64_t to_row0 = p.transposes ? column0 : row0, to_column = (p.transposes ? row0 : column0) + x;
    for (int y = thread_index() / kTile; y < kTile; y += kMaxThreads / kTile)
      if (to_row0 + y < (p.transposes ? p.columns : p.rows) && to_column < p.to_stride)
        static_cast<T*>(p.to)[(to_row0 + y) * p.to_stride + to_column] =
            tile[p.transposes ? x * kPitch + y : y * kPitch + x];
  }
};

template <class T>
void launch_transpose(const TransposeParams& params, void* stream) {
  using Kernel = TransposeKernel<T>;
  const auto tiles = [](int64_t size) { return static_cast<int>((size + Kernel::kTile - 1) / Kernel::kTile); };
  const LaunchShape shape{tiles(params.columns), tiles(params.rows), 1, Kernel::kMaxThreads,
      Kernel::kTile * Kernel::kPitch * static_cast<int64_t>(sizeof(T))};
  launch<Kernel>(shape, params, stream);
}

}  // namespace fr::FR_TARGET
