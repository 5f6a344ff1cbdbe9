// The matrix product of the CPU backend: rows of operands times a packed weight matrix, into a tile of sums that the caller's
// pointwise code reads while it is in L1. This is the micro-kernel's file; nothing else knows how a product is computed.
//
// A packed matrix is cut into panels of kVectors registers of columns. A panel covers kGroups*kLanes hidden units with all
// kGates of their gates side by side (gate-major), so that the pointwise part of a unit finds its gates in one tile:
//   panel = bias [kVectors*kLanes] (state type), then for each k: kVectors*kLanes weights (bfloat16: for each pair k, k+1:
//   kVectors*kLanes pairs).
// Every sum runs over k in ascending order in one accumulator, whatever the number of rows, threads or blocks: results do not
// depend on them, bit for bit.
#pragma once

#include "isa.h"
#include "simd.h"

namespace fr::cpu {

template <class Isa, class S>
using Operand = std::conditional_t<std::is_same_v<S, double>, double,
                                   std::conditional_t<std::is_same_v<S, BFloat16> && Isa::kNativeBFloat16, BFloat16, float>>;

// Where the weights of a product lie before packing, in storage type S (erased: the packing code is told).
struct MatrixSource {
  const void* data;
  int64_t stride;        // elements between rows of the matrix
  bool transposed;       // false: out[unit of gate] = sum_k data[gate*gate_rows + unit][k] a[k]
                         // true:  out[unit] = sum_k data[k][unit] a[k]
  int64_t gate_rows;     // rows between the gates of a unit
  const void* bias;      // [gates*gate_rows] or null, only if not transposed
  int64_t units, depth;  // columns per gate; number of k
};

struct PackedMatrix {
  MatrixSource source;
  void* panels;  // null: packed block by block at each use, for products that run only once
};

template <class Isa, class S, int kGates_>
struct Product {
  using T = StateOf<S>;
  using O = Operand<Isa, S>;
  using V = Vec<T, Isa>;
  static constexpr int kGates = kGates_;
  static constexpr int kGroups = kGates == 1 ? 4 : kGates == 2 ? 2 : 1;
  static constexpr int kVectors = kGates * kGroups;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kColumns = kVectors * kLanes;
  static constexpr int kUnits = kGroups * kLanes;
  static constexpr int kMaxRows = Isa::kAccumulators / kVectors;
  static constexpr bool kPairs = std::is_same_v<O, BFloat16>;
  // A block of k keeps its part of a panel in L2 (128 KiB in float) while the row groups pass; a block packed on the fly in L1.
  static constexpr int64_t kDepthBlock = 512, kFlyBlock = 64;

  static int64_t panels(int64_t units) { return (units + kUnits - 1) / kUnits; }
  static int64_t padded_depth(int64_t depth) { return kPairs ? (depth + 1) / 2 * 2 : depth; }
  static int64_t panel_bytes(int64_t depth) {
    return static_cast<int64_t>(kColumns * (sizeof(T) + padded_depth(depth) * sizeof(O)));
  }
  static int64_t bytes(const MatrixSource& source) { return panels(source.units) * panel_bytes(source.depth); }

  // ---- packing ----

  static void pack_bias(const MatrixSource& source, int64_t panel, T* out) {
    const S* bias = static_cast<const S*>(source.bias);
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t gate = vector / kGroups, unit0 = panel * kUnits + vector % kGroups * kLanes;
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t unit = unit0 + lane;
        *out++ = bias && unit < source.units ? to_float(bias[gate * source.gate_rows + unit]) : T(0);
      }
    }
  }

  // Packs k in [k0, k1) of one panel; k0 is even.
  static void pack_block(const MatrixSource& source, int64_t panel, int64_t k0, int64_t k1, O* out) {
    const S* data = static_cast<const S*>(source.data);
    const int64_t end = padded_depth(k1);
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t gate = vector / kGroups, unit0 = panel * kUnits + vector % kGroups * kLanes;
      const int64_t left = source.units - unit0;
      const int lanes = left < 0 ? 0 : left < kLanes ? static_cast<int>(left) : kLanes;
      const auto slot = [&](int64_t k) -> O* {
        if constexpr (kPairs) return out + ((k - k0) / 2 * kColumns + vector * kLanes) * 2 + (k - k0) % 2;
        else return out + (k - k0) * kColumns + vector * kLanes;
      };
      constexpr int kLaneStep = kPairs ? 2 : 1;
      if (source.transposed) {
        for (int64_t k = k0; k < end; ++k) {
          O* to = slot(k);
          const S* from = data + k * source.stride + unit0;
          const int valid = k < k1 ? lanes : 0;
          for (int lane = 0; lane < valid; ++lane) convert(to[lane * kLaneStep], from[lane]);
          for (int lane = valid; lane < kLanes; ++lane) to[lane * kLaneStep] = O{};
        }
        continue;
      }
      const S* from = data + (gate * source.gate_rows + unit0) * source.stride;
      int64_t k = k0;
#if defined(__AVX512F__)
      if constexpr (std::is_same_v<S, float>) {
        if (lanes == kLanes)
          for (; k + kLanes <= k1; k += kLanes) transpose_16x16(from + k, source.stride, slot(k), kColumns);
      }
#endif
      for (int lane = 0; lane < lanes; ++lane)
        for (int64_t i = k; i < k1; ++i) convert(slot(i)[lane * kLaneStep], from[lane * source.stride + i]);
      for (int lane = lanes; lane < kLanes; ++lane)
        for (int64_t i = k; i < k1; ++i) slot(i)[lane * kLaneStep] = O{};
      for (int64_t i = k1; i < end; ++i)
        for (int lane = 0; lane < kLanes; ++lane) slot(i)[lane * kLaneStep] = O{};
    }
  }

  static void pack_panels(const PackedMatrix& matrix, int64_t panel_begin, int64_t panel_end) {
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      char* base = static_cast<char*>(matrix.panels) + panel * panel_bytes(matrix.source.depth);
      pack_bias(matrix.source, panel, reinterpret_cast<T*>(base));
      pack_block(matrix.source, panel, 0, matrix.source.depth, reinterpret_cast<O*>(base + kColumns * sizeof(T)));
    }
  }

  // ---- the product ----

  // out[row*out_stride + vector*kLanes + lane] = bias + sum_k rows[row][k] * panel, for `count` rows of `depth` operands each.
  static void run(const PackedMatrix& matrix, int64_t panel, const O* const* rows, int64_t count, T* out, int64_t out_stride) {
    const int64_t depth = matrix.source.depth;
    alignas(64) T fly_bias[kColumns];
    const T* bias = fly_bias;
    if (matrix.panels) bias = reinterpret_cast<const T*>(static_cast<const char*>(matrix.panels) + panel * panel_bytes(depth));
    else pack_bias(matrix.source, panel, fly_bias);
    if (depth == 0) {
      for (int64_t row = 0; row < count; ++row)
        for (int vector = 0; vector < kVectors; ++vector)
          store_full(out + row * out_stride + vector * kLanes, load_full<V>(bias + vector * kLanes));
    } else if (matrix.panels) {
      const O* weights = reinterpret_cast<const O*>(bias + kColumns);
      for (int64_t k = 0; k < depth; k += kDepthBlock)
        block(rows, count, k, k + kDepthBlock < depth ? k + kDepthBlock : depth, weights + k * kColumns, bias, out, out_stride);
    } else {
      alignas(64) O weights[kFlyBlock * kColumns];
      for (int64_t k = 0; k < depth; k += kFlyBlock) {
        const int64_t end = k + kFlyBlock < depth ? k + kFlyBlock : depth;
        pack_block(matrix.source, panel, k, end, weights);
        block(rows, count, k, end, weights, bias, out, out_stride);
      }
    }
  }

 private:
  static void convert(O& to, S from) {
    if constexpr (std::is_same_v<O, S>) to = from;
    else to = to_float(from);
  }

  // Adds k in [k0, k1) to the sums, in groups of rows as even as can be. The first block starts from the bias, the others from
  // what the one before left.
  static void block(const O* const* rows, int64_t count, int64_t k0, int64_t k1, const O* weights, const T* bias, T* out,
                    int64_t out_stride) {
    int64_t groups = (count + kMaxRows - 1) / kMaxRows;
    for (int64_t row = 0; groups > 0; --groups) {
      const int64_t size = (count - row + groups - 1) / groups;
      T* to = out + row * out_stride;
      group<kMaxRows>(size, rows + row, k0, k1, weights, k0 ? to : bias, k0 ? out_stride : 0, to, out_stride);
      row += size;
    }
  }

  template <int kRows>
  static void group(int64_t size, const O* const* rows, int64_t k0, int64_t k1, const O* weights, const T* from,
                    int64_t from_stride, T* to, int64_t to_stride) {
    if constexpr (kRows > 1) {
      if (size < kRows) return group<kRows - 1>(size, rows, k0, k1, weights, from, from_stride, to, to_stride);
    }
    micro_kernel<kRows>(rows, k0, k1, weights, from, from_stride, to, to_stride);
  }

  // The loop that matters: kRows*kVectors sums in registers; per k, kVectors loads of weights, kRows broadcasts. k0 < k1.
  template <int kRows>
  static __attribute__((noinline)) void micro_kernel(const O* const* rows, int64_t k0, int64_t k1, const O* weights,
                                                     const T* from, int64_t from_stride, T* to, int64_t to_stride) {
    V sum[kRows][kVectors];
    const O* a[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      a[row] = rows[row] + k0;
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; ++vector)
        sum[row][vector] = load_full<V>(from + row * from_stride + vector * kLanes);
    }
    const int64_t depth = k1 - k0;
    if constexpr (kPairs) {
#if defined(__AVX512BF16__)
      const auto step = [&](int64_t pair, auto&& operand) {
        __m512bh w[kVectors];
#pragma GCC unroll 4
        for (int vector = 0; vector < kVectors; ++vector)
          std::memcpy(&w[vector], weights + (pair * kColumns + vector * kLanes) * 2, 64);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const __m512i pairs = _mm512_set1_epi32(operand(row));
#pragma GCC unroll 4
          for (int vector = 0; vector < kVectors; ++vector)
            sum[row][vector].raw = reinterpret_cast<typename V::Raw>(_mm512_dpbf16_ps(
                reinterpret_cast<__m512>(sum[row][vector].raw), reinterpret_cast<__m512bh>(pairs), w[vector]));
        }
      };
      for (int64_t pair = 0; pair < depth / 2; ++pair)
        step(pair, [&](int row) {
          int32_t bits;
          std::memcpy(&bits, a[row] + 2 * pair, sizeof bits);
          return bits;
        });
      // An odd last operand is paired with zero: the element after it need not exist or be finite.
      if (depth % 2) step(depth / 2, [&](int row) { return static_cast<int32_t>(a[row][depth - 1].bits); });
#endif
    } else {
      int64_t k = 0;
      do {
        V w[kVectors];
#pragma GCC unroll 4
        for (int vector = 0; vector < kVectors; ++vector) w[vector] = load_full<V>(weights + k * kColumns + vector * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const V operand(a[row][k]);
#pragma GCC unroll 4
          for (int vector = 0; vector < kVectors; ++vector) sum[row][vector] = sum[row][vector] + operand * w[vector];
        }
      } while (++k < depth);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; ++vector)
        store_full(to + row * to_stride + vector * kLanes, sum[row][vector]);
  }

#if defined(__AVX512F__)
  // to[k][lane] = from[lane][k] for a 16 by 16 block of floats: four rounds of pairwise exchanges.
  static void transpose_16x16(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_ps(from + i * from_stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4)
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        const __m512d low = _mm512_castps_pd(b[i + j]), high = _mm512_castps_pd(b[i + j + 2]);
        a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
        a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
      }
    // Now a[4q + c] holds, in each 128-bit lane l, column 4l + c of rows 4q .. 4q+3.
#pragma GCC unroll 4
    for (int c = 0; c < 4; ++c) {
      const __m512 x = _mm512_shuffle_f32x4(a[c], a[4 + c], 0x88), y = _mm512_shuffle_f32x4(a[c], a[4 + c], 0xdd);
      const __m512 z = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0x88), w = _mm512_shuffle_f32x4(a[8 + c], a[12 + c], 0xdd);
      _mm512_storeu_ps(to + (0 + c) * to_stride, _mm512_shuffle_f32x4(x, z, 0x88));
      _mm512_storeu_ps(to + (4 + c) * to_stride, _mm512_shuffle_f32x4(y, w, 0x88));
      _mm512_storeu_ps(to + (8 + c) * to_stride, _mm512_shuffle_f32x4(x, z, 0xdd));
      _mm512_storeu_ps(to + (12 + c) * to_stride, _mm512_shuffle_f32x4(y, w, 0xdd));
    }
  }
#endif
};

}  // namespace fr::cpu
