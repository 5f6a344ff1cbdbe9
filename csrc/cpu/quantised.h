// The matrix product with 8-bit integer weights. It has the interface and the geometry of Product (product.h).
//
// A weight is q*s: q an integer, s its row's scale. A row of operands a is quantised when a product needs it: a = p*t,
// p an integer from -kLargest to kLargest (Int8, storage.h), t = max|a| / kLargest. Its bytes hold p + kLargest. Sums
// are exact: the same on every instruction set and in any order. They start from -kLargest times the sum of q, so that
// sum p*q is left at the end. Only the result, bias + sum*(s*t), is rounded to float.
//
// x86 multiplies unsigned by signed bytes and adds two such products in 16 bits, with saturation (vpmaddubsw). Two of
// these sums are added in 16 bits before a second multiplication widens them, so that 32 products take 1.5
// multiplications, not 2. Int8::kGroupSum keeps them within 16 bits. VNNI (vpdpbusd) adds four products in 32 bits, and
// AMX in tile registers.
//
//   panel = bias and scales (float) and start (uint32), [kColumns] each, then its slices as in product.h: for each word
//   of four k, the weights of the slice's registers, with the four of a lane side by side. The depth is padded to an
//   even number of words.
#pragma once

#include <cmath>
#include <limits>

#include "product.h"

namespace fr::cpu {

// Registers of bytes, four in each 32-bit lane.
template <class Isa>
struct Bytes {
  using Raw = typename Vec<float, Isa>::Raw;
  using Sums = typename RawVector<uint32_t, Isa::kBytes>::type;  // modulo 2^32
#if defined(__AVX512F__)
  using Words = __m512i;
  static Words repeat(int32_t word) { return _mm512_set1_epi32(word); }
  // sum + the eight products of each lane
  static Sums add(Sums sum, Words a, Words w, Words b, Words v) {
#if defined(__AVX512VNNI__)
    return reinterpret_cast<Sums>(_mm512_dpbusd_epi32(_mm512_dpbusd_epi32(reinterpret_cast<Words>(sum), a, w), b, v));
#else
    const __m512i pairs = _mm512_add_epi16(_mm512_maddubs_epi16(a, w), _mm512_maddubs_epi16(b, v));
    return sum + reinterpret_cast<Sums>(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
#endif
  }
  // A loop's result. Without it GCC 12 stores sums at each turn, for want of registers behind the loop.
  static void settle(Sums& sum) { asm("" : "+v"(sum)); }
  // Rounds to integers and adds the offset.
  static void round(Raw from, uint8_t* to) {
    const __m512i whole = _mm512_cvtps_epi32(reinterpret_cast<__m512>(from));
    const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_add_epi32(whole, _mm512_set1_epi32(Int8::kLargest)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
  }
#elif defined(__AVX2__)
  using Words = __m256i;
  static Words repeat(int32_t word) { return _mm256_set1_epi32(word); }
  static Sums add(Sums sum, Words a, Words w, Words b, Words v) {
#if defined(__AVXVNNI__)
    return reinterpret_cast<Sums>(
        _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(reinterpret_cast<Words>(sum), a, w), b, v));
#else
    const __m256i pairs = _mm256_add_epi16(_mm256_maddubs_epi16(a, w), _mm256_maddubs_epi16(b, v));
    return sum + reinterpret_cast<Sums>(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
  }
  static void settle(Sums& sum) { asm("" : "+x"(sum)); }
  static void round(Raw from, uint8_t* to) {
    const __m256i whole = _mm256_cvtps_epi32(reinterpret_cast<__m256>(from));
    const __m128i words =
        _mm_add_epi16(_mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)),
            _mm_set1_epi16(Int8::kLargest));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
  }
#else
  using Words = Sums;
  using Shorts = typename RawVector<uint16_t, Isa::kBytes>::type;
  using SignedShorts = typename RawVector<int16_t, Isa::kBytes>::type;
  static Words repeat(int32_t word) { return static_cast<uint32_t>(word) - Words{}; }
  static Shorts pairs(Words a, Words w) {
    const Shorts u = reinterpret_cast<Shorts>(a);
    const auto first = reinterpret_cast<SignedShorts>(reinterpret_cast<Shorts>(w) << 8) >> 8;
    const auto second = reinterpret_cast<SignedShorts>(w) >> 8;
    return (u & 0xff) * reinterpret_cast<Shorts>(first) + (u >> 8) * reinterpret_cast<Shorts>(second);
  }
  static Sums add(Sums sum, Words a, Words w, Words b, Words v) {
    using Signed = typename Vec<float, Isa>::RawInteger;
    const auto both = reinterpret_cast<Sums>(pairs(a, w) + pairs(b, v));
    const Signed first = reinterpret_cast<Signed>(both << 16) >> 16, second = reinterpret_cast<Signed>(both) >> 16;
    return sum + reinterpret_cast<Sums>(first + second);
  }
  static void settle(Sums&) {}
  static void round(Raw from, uint8_t* to) {
#if defined(__SSE2__)
    const __m128i whole = _mm_cvtps_epi32(reinterpret_cast<__m128>(from));
    const __m128i words = _mm_add_epi16(_mm_packs_epi32(whole, whole), _mm_set1_epi16(Int8::kLargest));
    const int four = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
    std::memcpy(to, &four, sizeof four);
#else
    for (int lane = 0; lane < Vec<float, Isa>::kLanes; ++lane)
      to[lane] = static_cast<uint8_t>(std::lrintf(from[lane]) + Int8::kLargest);
#endif
  }
#endif
};

template <class Isa, int kGates_>
struct QuantisedProduct {
  using Geometry = Product<Isa, float, kGates_>;
  using T = float;
  using O = float;
  using V = Vec<float, Isa>;
  static constexpr int kGates = kGates_, kGroups = Geometry::kGroups, kVectors = Geometry::kVectors, kLanes = V::kLanes;
  static constexpr int kColumns = Geometry::kColumns, kUnits = Geometry::kUnits;
  static constexpr int kSlices = Geometry::kSlices, kSlice = Geometry::kSlice;
  using B = Bytes<Isa>;
  // From so many rows on, tiles are faster than vectors.
  static constexpr int64_t kTileRowsFrom = 3;
  static constexpr int64_t kBlockRows = Isa::kTiles ? Tiles::kMostRows : kTileRows;
  // Sums take at most 10 of 16 registers, or 20 of 32. The others hold weights, two words of operands and products.
  static constexpr int kMaxRows = (Isa::kAccumulators > 16 ? 20 : 10) / kSlice;

  struct Row {
    const uint8_t* values;  // [padded depth]
    float scale;            // NaN if the operands are not finite
  };

  static int64_t panels(int64_t units) { return Geometry::panels(units); }
  static int64_t words(int64_t depth) { return (depth + 7) / 8 * 2; }
  static int64_t panel_bytes(int64_t depth) {
    return kColumns * (3 * static_cast<int64_t>(sizeof(float)) + 4 * words(depth));
  }
  static int64_t bytes(const MatrixSource& source) { return panels(source.units) * panel_bytes(source.depth); }

  // The weights come as floats with integer values.
  static void pack_panels(const PackedMatrix& matrix, int64_t begin, int64_t end) {
    const MatrixSource& source = matrix.source;
    const float* const data = static_cast<const float*>(source.data);
    const int64_t whole = words(source.depth);
    for (int64_t panel = begin; panel < end; ++panel) {
      float* const bias =
          reinterpret_cast<float*>(static_cast<char*>(matrix.panels) + panel * panel_bytes(source.depth));
      uint32_t* const start = reinterpret_cast<uint32_t*>(bias + 2 * kColumns);
      int8_t* const weights = reinterpret_cast<int8_t*>(bias + 3 * kColumns);
      for (int column = 0; column < kColumns; ++column) {
        const int vector = column / kLanes, lane = column % kLanes;
        const int64_t unit = panel * kUnits + vector % kGroups * kLanes + lane,
                      row = vector / kGroups * source.gate_rows + unit;
        const bool is_unit = unit < source.units;
        bias[column] = is_unit && source.bias ? static_cast<const float*>(source.bias)[row] : 0.0f;
        bias[kColumns + column] = is_unit && source.scale ? source.scale[row] : 0.0f;
        start[column] = 0;
        for (int64_t k = 0; k < 4 * whole; ++k) {
          const int weight = is_unit && k < source.depth ? static_cast<int>(data[row * source.stride + k]) : 0;
          weights[(((vector / kSlice * whole + k / 4) * kSlice + vector % kSlice) * kLanes + lane) * 4 + k % 4] =
              static_cast<int8_t>(weight);
          start[column] -= static_cast<uint32_t>(Int8::kLargest * weight);
        }
      }
    }
  }

  // ---- operands ----

  // Whole tiles or vectors. With tiles, 64 bytes more keep rows out of one set of L1.
  static int64_t padded(int64_t depth) { return Isa::kTiles ? (depth + 63) / 64 * 64 + 64 : (depth + 15) / 16 * 16; }
  static int64_t operand_bytes(int64_t count, int64_t depth) {
    return count * (static_cast<int64_t>(sizeof(Row)) + padded(depth));
  }
  static const Row* operands(const float* const* rows, int64_t count, int64_t depth, void* memory) {
    Row* const out = static_cast<Row*>(memory);
    uint8_t* values = reinterpret_cast<uint8_t*>(out + count);
    for (int64_t row = 0; row < count; ++row, values += padded(depth)) out[row] = quantise(rows[row], depth, values);
    return out;
  }

  // A row whose largest number is below 2^-100 counts as zero, because the inverse of its scale
  // would not be finite.
  static Row quantise(const float* from, int64_t depth, uint8_t* to) {
    using Bits = typename V::RawInteger;
    const auto at = [&](int64_t k) { return load<V>(from + k, lanes_left<V>(depth - k)); };
    Bits most_bits{};  // without the sign, bit patterns have the order of the numbers
    for (int64_t k = 0; k < depth; k += kLanes) {
      const Bits bits = reinterpret_cast<Bits>(at(k).raw) & 0x7fffffff;
      most_bits = bits > most_bits ? bits : most_bits;
    }
    int32_t largest = 0;
    for (int lane = 0; lane < kLanes; ++lane) largest = most_bits[lane] > largest ? most_bits[lane] : largest;
    const float size = float_from_bits(static_cast<uint32_t>(largest));
    constexpr float kMost = std::numeric_limits<float>::max();
    if (!(size <= kMost) || size < 0x1p-100f) {
      std::memset(to, Int8::kLargest, padded(depth));
      return {to, size <= kMost ? 0.0f : std::nanf("")};
    }
    const V inverse(Int8::kLargest / size);
    int64_t k = 0;
    for (; k < depth; k += kLanes) B::round((at(k) * inverse).raw, to + k);
    for (; k < padded(depth); ++k) to[k] = 0;  // their weights are zero
    return {to, size / Int8::kLargest};
  }

  // ---- the product ----

  static const float* bias_of(const PackedMatrix& matrix, int64_t panel) {
    return reinterpret_cast<const float*>(
        static_cast<const char*>(matrix.panels) + panel * panel_bytes(matrix.source.depth));
  }
  static void run_zero(const PackedMatrix& matrix, int64_t panel, int64_t count, T* out, int64_t out_stride) {
    for (int64_t row = 0; row < count; ++row)
      std::memcpy(out + row * out_stride, bias_of(matrix, panel), kColumns * sizeof(T));
  }

  static void run(
      const PackedMatrix& matrix, int64_t panel, const Row* rows, int64_t count, T* out, int64_t out_stride, int64_t) {
    const int64_t depth = matrix.source.depth, whole = words(depth);
    const float* const bias = bias_of(matrix, panel);
    const int8_t* weights = reinterpret_cast<const int8_t*>(bias + 3 * kColumns);
    if constexpr (Isa::kTiles)
      if (count >= kTileRowsFrom) {
        for (int64_t row = 0; row < count; row += Tiles::kMostRows)
          tile_kernel(rows + row, count - row < Tiles::kMostRows ? count - row : Tiles::kMostRows, weights, whole, bias,
              out + row * out_stride, out_stride);
        return;
      }
    // With one row, a slice alone would be a short loop. A long one is read faster alone, if it comes from memory.
    if (count == 1 && depth <= 512) return micro_kernel<1, kSlices>(rows, weights, whole, bias, out, out_stride);
    for (int slice = 0; slice < kSlices; ++slice) {
      const int first = slice * kSlice * kLanes;
      for (int64_t row = 0, groups = (count + kMaxRows - 1) / kMaxRows; groups > 0; --groups) {
        const int64_t size = (count - row + groups - 1) / groups;
        group<kMaxRows>(size, rows + row, weights, whole, bias + first, out + row * out_stride + first, out_stride);
        row += size;
      }
      weights += whole * 4 * kSlice * kLanes;
    }
  }

 private:
  // At most Tiles::kMostRows rows, whose operands lie one after another.
  static __attribute__((noinline)) void tile_kernel(const Row* rows, int64_t size, const int8_t* weights, int64_t whole,
      const float* bias, T* out, int64_t out_stride) {
    constexpr int64_t kWord = kColumns * 4;
    const int64_t steps = whole / Tiles::kRows;
    alignas(64) int8_t end[Tiles::kRows * kWord];
    const Tiles::Left left{rows[0].values, size > 1 ? rows[1].values - rows[0].values : 0};
    Tiles::Right right{weights};
    if (const int64_t words = whole % Tiles::kRows) {  // nothing may be read behind the weights
      std::memcpy(end, weights + steps * Tiles::kRows * kWord, static_cast<size_t>(words * kWord));
      std::memset(end + words * kWord, 0, static_cast<size_t>((Tiles::kRows - words) * kWord));
      right.end = end;
    }
    alignas(64) typename B::Sums sums[Tiles::kMostRows][kVectors];
    Tiles::product<true, kVectors>(size, left, right, steps, {bias + 2 * kColumns, 0, sums, kWord});
    for (int64_t row = 0; row < size; ++row)
#pragma GCC unroll 4
      for (int vector = 0; vector < kVectors; ++vector)
        finish(sums[row][vector], rows[row].scale, bias + vector * kLanes, out + row * out_stride + vector * kLanes);
  }

  // out = bias + sum * scale
  static inline void finish(typename B::Sums sum, float scale, const float* bias, T* out) {
    const auto exact = reinterpret_cast<typename V::RawInteger>(sum);
    const V unit = V(scale) * load_full<V>(bias + kColumns);
    store_full(out, load_full<V>(bias) + V{__builtin_convertvector(exact, typename V::Raw)} * unit);
  }

  template <int kRows>
  static void group(int64_t size, const Row* rows, const int8_t* weights, int64_t whole, const float* bias, T* out,
      int64_t out_stride) {
    if constexpr (kRows > 1) {
      if (size < kRows) return group<kRows - 1>(size, rows, weights, whole, bias, out, out_stride);
    }
    micro_kernel<kRows, 1>(rows, weights, whole, bias, out, out_stride);
  }

  template <int kRows, int kWide>
  static __attribute__((noinline)) void micro_kernel(
      const Row* rows, const int8_t* weights, int64_t whole, const float* bias, T* out, int64_t out_stride) {
    constexpr int kWidth = kWide * kSlice;
    typename B::Sums sum[kRows][kWidth];
    const uint8_t* a[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      a[row] = rows[row].values;
#pragma GCC unroll 4
      for (int vector = 0; vector < kWidth; ++vector)
        std::memcpy(&sum[row][vector], bias + 2 * kColumns + vector * kLanes, Isa::kBytes);
    }
    for (int64_t word = 0; word < whole; word += 2) {
      typename B::Words w[2][kWidth];
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kWidth; ++i) {
        const int vector = i / 2;
        const int64_t at = (vector / kSlice * whole + word + i % 2) * kSlice + vector % kSlice;
        std::memcpy(&w[i % 2][vector], weights + at * Isa::kBytes, Isa::kBytes);
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        int32_t two[2];
        std::memcpy(two, a[row] + 4 * word, sizeof two);
        const typename B::Words first = B::repeat(two[0]), second = B::repeat(two[1]);
#pragma GCC unroll 4
        for (int vector = 0; vector < kWidth; ++vector)
          sum[row][vector] = B::add(sum[row][vector], first, w[0][vector], second, w[1][vector]);
      }
    }
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int vector = 0; vector < kWidth; ++vector) B::settle(sum[row][vector]);
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int vector = 0; vector < kWidth; ++vector)
        finish(sum[row][vector], rows[row].scale, bias + vector * kLanes, out + row * out_stride + vector * kLanes);
  }
};

}  // namespace fr::cpu
