// The matrix product of the CPU backend: rows of operands times a packed weight matrix, into a tile of sums that the
// caller's pointwise code reads while it is in L1. The micro-kernel is here; other files do not depend on how a product
// is computed.
//
// A packed matrix is cut into panels of kVectors registers of columns. A panel covers kGroups*kLanes hidden units with
// all kGates of their gates, gate-major, so that a unit's pointwise part finds its gates in one tile:
//   panel = bias [kVectors*kLanes] (state type), then its slices in turn: for each k, the weights of the slice's kSlice
//   registers (bfloat16: pairs of them, for each pair k, k+1).
// A slice is as wide as a tile of sums may be: the whole panel, or half of it where registers are few.
// Every sum runs over k in ascending order in one accumulator, whatever the number of rows, threads or blocks, so
// results are the same bit for bit. With tile registers (kTiles) it adds up 32 operands at a time: the even ones and
// the odd ones apart, and both to the sum so far. Few rows do the same in vectors.
#pragma once

#include "isa.h"
#include "simd.h"
#include "tiles.h"

namespace fr::cpu {

inline constexpr int64_t kTileRows = 48;  // most rows of a tile of sums

template <class Isa, class S>
using Operand = std::conditional_t<std::is_same_v<S, double>, double,
    std::conditional_t<std::is_same_v<S, BFloat16> && Isa::kNativeBFloat16, BFloat16, float>>;

// The weights of a product before packing, in storage type S.
struct MatrixSource {
  const void* data;
  int64_t stride;                // elements between rows of the matrix
  bool transposed;               // false: out[unit of gate] = sum_k data[gate*gate_rows + unit][k] a[k]
                                 // true:  out[unit] = sum_k data[k][unit] a[k]
  int64_t gate_rows;             // rows between the gates of a unit
  const void* bias;              // [gates*gate_rows] or null; only if not transposed
  int64_t units, depth;          // columns per gate; number of k
  int64_t first_k = 0;           // transposed: the row of data for k = 0; after the last row comes row 0
  const float* scale = nullptr;  // [gates*gate_rows], for int8 weights (quantised.h)
};

struct PackedMatrix {
  MatrixSource source;
  void* panels;  // null: packed block by block at each use, for products that run only once
};

#if defined(__AVX2__)
template <class T>
struct HalfRegister {
  using Type = __m256;
};
template <>
struct HalfRegister<double> {
  using Type = __m256d;
};
#endif

// W_: the type of a weight in the panels.
template <class Isa, class S, int kGates_, class W_ = Operand<Isa, S>>
struct Product {
  using W = W_;
  using T = StateOf<S>;
  using O = Operand<Isa, S>;
  using V = Vec<T, Isa>;
  static constexpr int kGates = kGates_;
  static constexpr int kGroups = kGates == 1 ? 4 : kGates == 2 ? 2 : 1;
  static constexpr int kVectors = kGates * kGroups;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kColumns = kVectors * kLanes;
  static constexpr int kUnits = kGroups * kLanes;
  static constexpr int kSlices = kVectors > Isa::kTileVectors ? 2 : 1, kSlice = kVectors / kSlices;
  static constexpr int kSliceColumns = kSlice * kLanes;
  static constexpr int kMaxRows = Isa::kAccumulators / kSlice;
  static_assert(kVectors % kSlices == 0 && kSlice <= Isa::kTileVectors && (kSlices == 1 || kSlice * Isa::kBytes <= 64));
  static constexpr bool kPairs = std::is_same_v<O, BFloat16>, kTiles = Isa::kTiles && kPairs;
  static constexpr bool kOnlyPrepared = !std::is_same_v<W, O>;  // the panels come prepared, never packed here
  // kDepthBlock keeps a slice in cache (isa.h) from one group of rows to the next. Blocks packed on the fly stay in L1.
  static constexpr int64_t kDepthBlock = Isa::kDepthBlock, kFlyBlock = 64;
  static constexpr int64_t kLine = 64;  // bytes of a cache line

  static constexpr int kWordSize = kPairs ? 2 : 1;  // operands of one lane
  // Most rows for which weights that are used once are multiplied from where they lie, without packing.
  static constexpr int kUnpackedRows = kTiles ? 4 : Isa::kBytes / 8;
  static constexpr int64_t kStep = 4 * kWordSize;    // operands of a row of such weights that are transposed at a time
  static constexpr int64_t kUnpackedNear = 2 << 20;  // bytes that are likely still in cache at the next use

  // Most rows that a caller's tile of sums should have: it stays in L1.
  static constexpr int64_t kBlockRows = kTiles ? Tiles::kMostRows : kTileRows;

  static int64_t panels(int64_t units) { return (units + kUnits - 1) / kUnits; }
  static constexpr int64_t kPadding = kTiles ? 32 : kPairs ? 2 : 1;
  static int64_t padded_depth(int64_t depth) { return (depth + kPadding - 1) / kPadding * kPadding; }
  static int64_t panel_bytes(int64_t depth) {
    return static_cast<int64_t>(kColumns * (sizeof(T) + padded_depth(depth) * sizeof(W)));
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

  // Packs k in [k0, k1) of one panel, `slice_stride` elements from slice to slice; k0 is a multiple of kPadding.
  static void pack_block(
      const MatrixSource& source, int64_t panel, int64_t k0, int64_t k1, W* out, int64_t slice_stride) {
    const S* data = static_cast<const S*>(source.data);
    const int64_t end = padded_depth(k1);
    for (int vector = 0; vector < kVectors; ++vector) {
      const int64_t gate = vector / kGroups, unit0 = panel * kUnits + vector % kGroups * kLanes;
      const int64_t left = source.units - unit0;
      const int lanes = left > 0 ? lanes_left<V>(left) : 0;
      W* const slice = out + vector / kSlice * slice_stride;
      const auto slot = [&](int64_t k) -> W* {
        if constexpr (kPairs)
          return slice + ((k - k0) / 2 * kSliceColumns + vector % kSlice * kLanes) * 2 + (k - k0) % 2;
        else return slice + (k - k0) * kSliceColumns + vector % kSlice * kLanes;
      };
      constexpr int kLaneStep = kPairs ? 2 : 1;
      if (source.transposed) {
        for (int64_t k = k0; k < end; ++k) {
          W* to = slot(k);
          const int64_t data_row =
              k + source.first_k < source.depth ? k + source.first_k : k + source.first_k - source.depth;
          const S* from = data + data_row * source.stride + unit0;
          const int valid = k < k1 ? lanes : 0;
          for (int lane = 0; lane < valid; ++lane) convert(to[lane * kLaneStep], from[lane]);
          for (int lane = valid; lane < kLanes; ++lane) to[lane * kLaneStep] = W{};
        }
        continue;
      }
      const S* from = data + (gate * source.gate_rows + unit0) * source.stride;
      int64_t k = k0;
#if defined(__AVX2__)
      for (; !kOnlyPrepared && lanes == kLanes && k + 4 * kWordSize <= k1; k += 4 * kWordSize)
#pragma GCC unroll 2
        for (int part = 0; part < kLanes; part += kHalf) {
          Half words[4];
          transpose(from + part * source.stride + k, source.stride, words);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) std::memcpy(slot(k + i * kWordSize) + part * kWordSize, &words[i], 32);
        }
#endif
      for (int lane = 0; lane < lanes; ++lane)
        for (int64_t i = k; i < k1; ++i) convert(slot(i)[lane * kLaneStep], from[lane * source.stride + i]);
      for (int lane = lanes; lane < kLanes; ++lane)
        for (int64_t i = k; i < k1; ++i) slot(i)[lane * kLaneStep] = W{};
      for (int64_t i = k1; i < end; ++i)
        for (int lane = 0; lane < kLanes; ++lane) slot(i)[lane * kLaneStep] = W{};
    }
  }

  static void pack_panels(const PackedMatrix& matrix, int64_t panel_begin, int64_t panel_end) {
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      char* base = static_cast<char*>(matrix.panels) + panel * panel_bytes(matrix.source.depth);
      pack_bias(matrix.source, panel, reinterpret_cast<T*>(base));
      pack_block(matrix.source, panel, 0, matrix.source.depth, reinterpret_cast<W*>(base + kColumns * sizeof(T)),
          padded_depth(matrix.source.depth) * kSliceColumns);
    }
  }

  // ---- the product ----

  // Converts rows of operands to what `run` takes, in `memory` of operand_bytes.
  using Row = const O*;
  static int64_t operand_bytes(int64_t, int64_t) { return 0; }
  static const Row* operands(const O* const* rows, int64_t, int64_t, void*) { return rows; }

  // The result of `run` for rows that are zero: the bias.
  static void run_zero(const PackedMatrix& matrix, int64_t panel, int64_t count, T* out, int64_t out_stride) {
    alignas(64) T fly_bias[kColumns];
    const T* const bias = bias_of(matrix, panel, fly_bias);
    for (int64_t row = 0; row < count; ++row) std::memcpy(out + row * out_stride, bias, kColumns * sizeof(T));
  }

  // out[row*out_stride + vector*kLanes + lane] = bias + sum_k rows[row][k] * panel, for `count` > 0 rows of `depth`
  // operands each. `next`: the panel that the caller wants next.
  // Not inlined, because its size would slow the callers' own code, the cells' formulas.
  static __attribute__((noinline)) void run(const PackedMatrix& matrix, int64_t panel, const O* const* rows,
      int64_t count, T* out, int64_t out_stride, int64_t next) {
    const MatrixSource& source = matrix.source;
    const int64_t depth = source.depth;
    if (depth == 0) return run_zero(matrix, panel, count, out, out_stride);
    alignas(64) T fly_bias[kColumns];
    const T* const bias = bias_of(matrix, panel, fly_bias);
    if (kOnlyPrepared || matrix.panels) {
      const W* weights = reinterpret_cast<const W*>(bias + kColumns);
      const char* after = reinterpret_cast<const char*>(weights) + (next - panel) * panel_bytes(depth);
      for (int64_t k = 0; k < depth; k += kDepthBlock) {
        const W* here = weights + k * kSliceColumns;
        const bool last = k + kDepthBlock >= depth;
        block(rows, count, k, last ? depth : k + kDepthBlock, here, padded_depth(depth) * kSliceColumns, bias, out,
            out_stride, last ? after : reinterpret_cast<const char*>(here + kDepthBlock * kSliceColumns));
      }
    } else if constexpr (!kOnlyPrepared) {
      int64_t k = 0;
#if defined(__AVX2__)
      // Rows of weights that are a multiple of 4 KiB apart fall into one set of L1. They are then read line by line, or
      // packed, a block at a time.
      const int64_t row_bytes = source.stride * static_cast<int64_t>(sizeof(S));
      const bool spread = row_bytes % 4096 != 0, far = kGates * source.units * row_bytes > kUnpackedNear;
      constexpr int64_t kSteps = kTiles ? kPadding : kStep;
      const bool full = (panel + 1) * kUnits <= source.units && depth >= kSteps;
      if (!source.transposed && full && count <= kUnpackedRows) {
        const int64_t whole = depth / kSteps * kSteps, after = (next + 1) * kUnits <= source.units ? next : panel;
        if (spread && !far && !kTiles)
          unpacked<kUnpackedRows, false>(source, panel, rows, count, k = whole, bias, out, out_stride, after);
        else unpacked<kUnpackedRows, true>(source, panel, rows, count, k = whole, bias, out, out_stride, after);
      }
#endif
      alignas(64) O weights[kFlyBlock * kColumns];
      for (; k < depth; k += kFlyBlock) {
        const int64_t end = k + kFlyBlock < depth ? k + kFlyBlock : depth;
        pack_block(source, panel, k, end, weights, kFlyBlock * kSliceColumns);
        block(rows, count, k, end, weights, kFlyBlock * kSliceColumns, bias, out, out_stride,
            reinterpret_cast<const char*>(weights));
      }
    }
  }

 private:
  // A panel's bias; if it is not packed, packs it to `here`.
  static const T* bias_of(const PackedMatrix& matrix, int64_t panel, T* here) {
    if (matrix.panels)
      return reinterpret_cast<const T*>(
          static_cast<const char*>(matrix.panels) + panel * panel_bytes(matrix.source.depth));
    pack_bias(matrix.source, panel, here);
    return here;
  }

  static void convert(W& to, S from) {
    if constexpr (std::is_same_v<W, S>) to = from;
    else from_float(to, to_float(from));
  }

  // Adds k in [k0, k1) to the sums, slice by slice, in groups of rows of nearly equal size. The first block starts from
  // the bias, the others from the sums so far. Meanwhile it prefetches the next block from `ahead`: each group of rows
  // prefetches a part, so that memory is busy all the time. With slices the first group prefetches all of it, and the
  // others repeat lines that are already in cache: any more would evict from a small L2 what is in use.
  static void block(const O* const* rows, int64_t count, int64_t k0, int64_t k1, const W* weights, int64_t slice_stride,
      const T* bias, T* out, int64_t out_stride, const char* ahead) {
    if constexpr (kTiles) {
      for (int64_t row = 0; row < count; row += Tiles::kMostRows) {
        T* const to = out + row * out_stride;
        const int64_t size = count - row < Tiles::kMostRows ? count - row : Tiles::kMostRows;
        tile_kernel(rows + row, size, k0, k1, weights, k0 ? to : bias, k0 ? out_stride : 0, to, out_stride);
      }
      return;
    }
    if constexpr (kSlices > 1) {
      // Few rows take all slices at once: one slice would give too few independent chains of additions.
      if (count <= kMaxRows / kSlices)
        return group<kMaxRows / kSlices, kSlices>(
            count, rows, k0, k1, weights, slice_stride, k0 ? out : bias, k0 ? out_stride : 0, out, out_stride, ahead);
    }
    for (int slice = 0; slice < kSlices; ++slice) {
      const char* part = ahead + slice * slice_stride * static_cast<int64_t>(sizeof(W));
      int64_t groups = (count + kMaxRows - 1) / kMaxRows;
      for (int64_t row = 0; groups > 0; --groups) {
        const int64_t size = (count - row + groups - 1) / groups;
        T* to = out + row * out_stride;
        group<kMaxRows, 1>(
            size, rows + row, k0, k1, weights, slice_stride, k0 ? to : bias, k0 ? out_stride : 0, to, out_stride, part);
        if constexpr (kSlices > 1) part = reinterpret_cast<const char*>(weights);
        else part += (k1 - k0) * kLine;
        row += size;
      }
      weights += slice_stride, bias += kSliceColumns, out += kSliceColumns;
    }
  }

  // At most Tiles::kMostRows rows. Copies rows that do not lie at equal distances, and the end of rows that does not
  // fill a tile.
  static __attribute__((noinline)) void tile_kernel(const O* const* rows, int64_t size, int64_t k0, int64_t k1,
      const W* weights, const T* from, int64_t from_stride, T* to, int64_t to_stride) {
    constexpr int64_t kOperand = sizeof(O), kSum = sizeof(T);
    alignas(64) O copy[Tiles::kMostRows * kDepthBlock], end[Tiles::kMostRows * kPadding];
    const auto address = [&](int64_t row) { return reinterpret_cast<intptr_t>(rows[row]); };
    const int64_t depth = k1 - k0, steps = depth / kPadding, whole = steps * kPadding;
    Tiles::Left left{rows[0] + k0, size > 1 ? address(1) - address(0) : 0};
    bool even = true;
    for (int64_t row = 2; row < size; ++row) even = even && address(row) - address(row - 1) == left.stride;
    if (!even) {
      left = {copy, kDepthBlock * kOperand};
      for (int64_t row = 0; row < size; ++row)
        std::memcpy(copy + row * kDepthBlock, rows[row] + k0, static_cast<size_t>(whole * kOperand));
    }
    if (whole < depth) {
      left.end = end;
      std::memset(end, 0, static_cast<size_t>(size * kPadding * kOperand));
      for (int64_t row = 0; row < size; ++row)
        std::memcpy(end + row * kPadding, rows[row] + k0 + whole, static_cast<size_t>((depth - whole) * kOperand));
    }
    Tiles::product<false, kVectors>(size, left, {weights}, steps, {from, from_stride * kSum, to, to_stride * kSum});
  }

  template <int kRows, int kWide>
  static void group(int64_t size, const O* const* rows, int64_t k0, int64_t k1, const W* weights, int64_t slice_stride,
      const T* from, int64_t from_stride, T* to, int64_t to_stride, const char* ahead) {
    if constexpr (kRows > 1) {
      if (size < kRows)
        return group<kRows - 1, kWide>(
            size, rows, k0, k1, weights, slice_stride, from, from_stride, to, to_stride, ahead);
    }
    micro_kernel<kRows, kWide>(rows, k0, k1, weights, slice_stride, from, from_stride, to, to_stride, ahead);
  }

  // The hot loop: kRows times the registers of kWide slices in sums; for each k, a load for each of those registers and
  // kRows broadcasts. k0 < k1.
  template <int kRows, int kWide>
  static __attribute__((noinline)) void micro_kernel(const O* const* rows, int64_t k0, int64_t k1, const W* weights,
      int64_t slice_stride, const T* from, int64_t from_stride, T* to, int64_t to_stride, const char* ahead) {
    constexpr int kWidth = kWide * kSlice;
    const auto place = [&](int64_t word, int vector) {
      return vector / kSlice * slice_stride + (word * kSliceColumns + vector % kSlice * kLanes) * kWordSize;
    };
    V sum[kRows][kWidth];
    const O* a[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      a[row] = rows[row] + k0;
#pragma GCC unroll 4
      for (int vector = 0; vector < kWidth; ++vector)
        sum[row][vector] = load_full<V>(from + row * from_stride + vector * kLanes);
    }
    const int64_t depth = k1 - k0;
    if constexpr (kPairs) {
#if defined(__AVX512BF16__)
      const auto step = [&](int64_t pair, auto&& operand) {
        __m512bh w[kWidth];
#pragma GCC unroll 4
        for (int vector = 0; vector < kWidth; ++vector) std::memcpy(&w[vector], weights + place(pair, vector), 64);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const __m512i pairs = _mm512_set1_epi32(operand(row));
#pragma GCC unroll 4
          for (int vector = 0; vector < kWidth; ++vector)
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
      const auto step = [&](int64_t k) __attribute__((always_inline)) {
        V w[kWidth];
        // All slices at once are read as fast as memory delivers them, so prefetches would only displace loads.
        if constexpr (kWide == 1) __builtin_prefetch(ahead + k * kLine, 0, 2);
#pragma GCC unroll 4
        for (int vector = 0; vector < kWidth; ++vector) w[vector] = load_full<V>(weights + place(k, vector));
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
          const V operand(a[row][k]);
#pragma GCC unroll 4
          for (int vector = 0; vector < kWidth; ++vector) sum[row][vector] = sum[row][vector] + operand * w[vector];
        }
      };
      int64_t k = 0;
      // Two at a time leave fewer other instructions beside the multiply-adds.
      for (; k + 2 <= depth; k += 2) step(k), step(k + 1);
      if (k < depth) step(k);
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int vector = 0; vector < kWidth; ++vector)
        store_full(to + row * to_stride + vector * kLanes, sum[row][vector]);
  }

  // ---- weights that are not packed ----
#if defined(__AVX2__)

  // Half registers transpose at twice the rate: two are processed at once, and rows are merged as they are loaded.
  using Half = typename HalfRegister<T>::Type;
  static constexpr int kHalf = 32 / sizeof(T);

  // Four words of a row: floats, pairs of bfloat16, or 16-bit weights converted to float.
  static inline __attribute__((always_inline)) __m128 four(const S* from) {
    if constexpr (kPairs || std::is_same_v<S, float>) {
      return _mm_loadu_ps(reinterpret_cast<const float*>(from));
    } else {
      const __m128i bits = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
      if constexpr (std::is_same_v<S, Float16>) return _mm_cvtph_ps(bits);
      else return _mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(bits), 16));
    }
  }

  // to[i] lane j = word i of row j, for the first four words of kHalf rows.
  static inline __attribute__((always_inline)) void transpose(const S* from, int64_t stride, Half (&to)[4]) {
    if constexpr (std::is_same_v<T, double>) {
      const auto rows = [&](int row, int k) {
        return _mm256_insertf128_pd(_mm256_castpd128_pd256(_mm_loadu_pd(from + row * stride + k)),
            _mm_loadu_pd(from + (row + 2) * stride + k), 1);
      };
#pragma GCC unroll 2
      for (int k = 0; k < 4; k += 2)
        to[k] = _mm256_unpacklo_pd(rows(0, k), rows(1, k)), to[k + 1] = _mm256_unpackhi_pd(rows(0, k), rows(1, k));
    } else {
      const auto rows = [&](int row) {
        return _mm256_insertf128_ps(
            _mm256_castps128_ps256(four(from + row * stride)), four(from + (row + 4) * stride), 1);
      };
      const __m256 a = rows(0), b = rows(1), c = rows(2), d = rows(3);
      const __m256 x = _mm256_unpacklo_ps(a, b), y = _mm256_unpacklo_ps(c, d);
      const __m256 z = _mm256_unpackhi_ps(a, b), w = _mm256_unpackhi_ps(c, d);
      to[0] = _mm256_shuffle_ps(x, y, 0x44), to[1] = _mm256_shuffle_ps(x, y, 0xee);
      to[2] = _mm256_shuffle_ps(z, w, 0x44), to[3] = _mm256_shuffle_ps(z, w, 0xee);
    }
  }

  // The multiply-add of the micro-kernel, for one word of kHalf columns.
  static inline __attribute__((always_inline)) Half add_product(Half sum, const O* operand, Half words) {
    if constexpr (kPairs) {
#if defined(__AVX512BF16__)
      int32_t bits;
      std::memcpy(&bits, operand, sizeof bits);
      return _mm256_dpbf16_ps(
          sum, reinterpret_cast<__m256bh>(_mm256_set1_epi32(bits)), reinterpret_cast<__m256bh>(words));
#endif
    } else if constexpr (std::is_same_v<T, double>) {
      return _mm256_fmadd_pd(_mm256_set1_pd(*operand), words, sum);
    } else {
      return _mm256_fmadd_ps(_mm256_set1_ps(*operand), words, sum);
    }
  }

  // The sums of 32 operands as a tile makes them: the even and the odd ones apart (TDPBF16PS). The same bits, but for
  // numbers below 2^-126, which tiles take as zero.
  template <int kRows>
  struct TileSums {
    Half even[kRows]{}, odd[kRows]{};

    void add(int row, const O* operands, Half words) {
      const __m256i bits = _mm256_castps_si256(words);
      even[row] = _mm256_fmadd_ps(
          _mm256_set1_ps(to_float(operands[0])), _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16)), even[row]);
      odd[row] = _mm256_fmadd_ps(_mm256_set1_ps(to_float(operands[1])),
          _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-0x10000))), odd[row]);
    }
    Half all(int row) const { return _mm256_add_ps(even[row], odd[row]); }
  };

  // Sums over k in [0, depth), a multiple of 4 words (with tiles, of 32 operands), starting from the bias, for a panel
  // without padding. A few half registers of columns at a time: each is one chain of additions, and with more of them a
  // line of weights would leave L1 before all of it is used. kLines: reads one line of each row at a time, for weights
  // that come from memory or whose rows share a set of L1.
  template <int kRows, bool kLines>
  static __attribute__((noinline)) void unpacked(const MatrixSource& source, int64_t panel, const O* const* rows,
      int64_t count, int64_t depth, const T* bias, T* out, int64_t out_stride, int64_t next) {
    if constexpr (kRows > 1) {
      if (count < kRows)
        return unpacked<kRows - 1, kLines>(source, panel, rows, count, depth, bias, out, out_stride, next);
    }
    const auto first_row = [&](int64_t of, int column) {
      const int vector = column / kLanes;
      const int64_t unit = of * kUnits + vector % kGroups * kLanes + column % kLanes;
      return static_cast<const S*>(source.data) + (vector / kGroups * source.gate_rows + unit) * source.stride;
    };
    constexpr int kTogether = kColumns / kHalf % 2 ? 3 : 2;
    for (int column = 0; column < kColumns; column += kTogether * kHalf) {
      const S* from[kTogether];
      Half sum[kRows][kTogether];
#pragma GCC unroll 3
      for (int i = 0; i < kTogether; ++i) {
        const int first = column + i * kHalf;
        from[i] = first_row(panel, first);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) std::memcpy(&sum[row][i], bias + first, 32);
      }
      if constexpr (kLines) {
        // Line by line, so that none leaves L1 half used. Meanwhile it prefetches the next rows in the order in which
        // they lie; to the core's own prefetcher each row is only a short stream.
        constexpr int64_t kRun = kLine / sizeof(S);
        const S* ahead[kTogether];
        for (int i = 0; i < kTogether; ++i) {
          const int after = column + (kTogether + i) * kHalf;
          ahead[i] = first_row(after < kColumns ? panel : next, after % kColumns);
        }
        for (int64_t k0 = 0; k0 < depth; k0 += kRun) {
          const int64_t k1 = k0 + kRun < depth ? k0 + kRun : depth;
#pragma GCC unroll 3
          for (int i = 0; i < kTogether; ++i) {
            [[maybe_unused]] std::conditional_t<kTiles, TileSums<kRows>, int> in_tile{};
            for (int64_t k = k0; k < k1; k += kStep) {
#pragma GCC unroll 4
              for (int64_t line = 0; line < kStep * kHalf; line += kRun)
                __builtin_prefetch(ahead[i] + k * kHalf + line, 0, 2);
              Half words[4];
              transpose(from[i] + k, source.stride, words);
#pragma GCC unroll 4
              for (int word = 0; word < 4; ++word)
#pragma GCC unroll 8
                for (int row = 0; row < kRows; ++row) {
                  const O* const operands = rows[row] + k + word * kWordSize;
                  if constexpr (kTiles) in_tile.add(row, operands, words[word]);
                  else sum[row][i] = add_product(sum[row][i], operands, words[word]);
                }
            }
            if constexpr (kTiles)
              for (int row = 0; row < kRows; ++row) sum[row][i] = _mm256_add_ps(sum[row][i], in_tile.all(row));
          }
        }
      } else {
        for (int64_t k = 0; k < depth; k += kStep) {
          Half words[kTogether][4];
#pragma GCC unroll 3
          for (int i = 0; i < kTogether; ++i) transpose(from[i] + k, source.stride, words[i]);
#pragma GCC unroll 4
          for (int word = 0; word < 4; ++word)
#pragma GCC unroll 8
            for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 3
              for (int i = 0; i < kTogether; ++i)
                sum[row][i] = add_product(sum[row][i], rows[row] + k + word * kWordSize, words[i][word]);
        }
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 3
        for (int i = 0; i < kTogether; ++i) std::memcpy(out + row * out_stride + column + i * kHalf, &sum[row][i], 32);
    }
  }
#endif
};

}  // namespace fr::cpu
