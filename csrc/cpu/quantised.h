// The matrix product with 8-bit integer weights. It has the interface and the geometry of Product (product.h).
//
// A weight is q*s: q an integer from -127 to 127, s its row's scale. A row of operands a is quantised when a product
// needs it: a = p*t, p an integer from -m to m, t = max|a| / m, m = min(32767, (2^31 - 1) / (127 depth)). So no sum of
// p*q, nor of a pair of them, overflows 32 bits, and all sums are exact: the same on every instruction set and in any
// order. Only the result, bias + sum*(s*t), is rounded to float.
//
//   panel = bias [kColumns] and scales [kColumns] (float), then its slices as in product.h: for each pair k, k+1 the
//   8-bit weights of the slice's registers, with the two of a lane side by side. Loading widens them to 16 bits.
#pragma once

#include <cmath>
#include <limits>

#include "product.h"

namespace fr::cpu {

// The storage type of such weights.
struct Int8 {};

// Pairs of 16-bit integers, one pair in each 32-bit lane.
template <class Isa>
struct Pairs {
  using Sums = typename Vec<float, Isa>::RawInteger;
  typedef int16_t Narrow __attribute__((vector_size(Isa::kBytes / 2)));  // of Sums that fit
#if defined(__AVX512F__)
  static Narrow narrow(Sums a) { return reinterpret_cast<Narrow>(_mm512_cvtepi32_epi16(reinterpret_cast<__m512i>(a))); }
  using Words = __m512i;
  static Words widen(const int8_t* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Words repeat(int32_t pair) { return _mm512_set1_epi32(pair); }
  static Sums products(Words a, Words b) { return reinterpret_cast<Sums>(_mm512_madd_epi16(a, b)); }
  static Sums rounded(typename Vec<float, Isa>::Raw a) {
    return reinterpret_cast<Sums>(_mm512_cvtps_epi32(reinterpret_cast<__m512>(a)));
  }
#elif defined(__AVX2__)
  static Narrow narrow(Sums a) {
    const __m256i whole = reinterpret_cast<__m256i>(a);
    return reinterpret_cast<Narrow>(_mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1)));
  }
  using Words = __m256i;
  static Words widen(const int8_t* from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Words repeat(int32_t pair) { return _mm256_set1_epi32(pair); }
  static Sums products(Words a, Words b) { return reinterpret_cast<Sums>(_mm256_madd_epi16(a, b)); }
  static Sums rounded(typename Vec<float, Isa>::Raw a) {
    return reinterpret_cast<Sums>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(a)));
  }
#elif defined(__SSE2__)
  static Narrow narrow(Sums a) { return __builtin_convertvector(a, Narrow); }
  using Words = __m128i;
  static Words widen(const int8_t* from) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
  }
  static Words repeat(int32_t pair) { return _mm_set1_epi32(pair); }
  static Sums products(Words a, Words b) { return reinterpret_cast<Sums>(_mm_madd_epi16(a, b)); }
  static Sums rounded(typename Vec<float, Isa>::Raw a) {
    return reinterpret_cast<Sums>(_mm_cvtps_epi32(reinterpret_cast<__m128>(a)));
  }
#else
  static Narrow narrow(Sums a) { return __builtin_convertvector(a, Narrow); }
  struct Words {
    Sums first, second;
  };
  static Words widen(const int8_t* from) {
    Words words;
    for (int lane = 0; lane < Vec<float, Isa>::kLanes; ++lane)
      words.first[lane] = from[2 * lane], words.second[lane] = from[2 * lane + 1];
    return words;
  }
  static Words repeat(int32_t pair) {
    int16_t both[2];
    std::memcpy(both, &pair, sizeof pair);
    return {both[0] - Sums{}, both[1] - Sums{}};
  }
  static Sums products(const Words& a, const Words& b) { return a.first * b.first + a.second * b.second; }
  static Sums rounded(typename Vec<float, Isa>::Raw a) {
    Sums sums;
    for (int lane = 0; lane < Vec<float, Isa>::kLanes; ++lane) sums[lane] = static_cast<int32_t>(std::lrintf(a[lane]));
    return sums;
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
  // The registers must hold the sums, the slice's weights, one operand and one product.
  static constexpr int kRegisters = Isa::kAccumulators > 16 ? 32 : 16, kMostRows = (kRegisters - 2 - kSlice) / kSlice;
  static constexpr int kMaxRows = kMostRows < Geometry::kMaxRows ? kMostRows : Geometry::kMaxRows;

  struct Row {
    const int16_t* values;  // [padded depth]
    float scale;            // NaN if the operands are not finite
  };

  static int64_t panels(int64_t units) { return Geometry::panels(units); }
  static int64_t padded(int64_t depth) { return (depth + 1) / 2 * 2; }
  static int64_t panel_bytes(int64_t depth) {
    return kColumns * (2 * static_cast<int64_t>(sizeof(float)) + padded(depth));
  }
  static int64_t bytes(const MatrixSource& source) { return panels(source.units) * panel_bytes(source.depth); }

  // The weights come as floats with integer values.
  static void pack_panels(const PackedMatrix& matrix, int64_t begin, int64_t end) {
    const MatrixSource& source = matrix.source;
    const float* const data = static_cast<const float*>(source.data);
    const int64_t pairs = padded(source.depth) / 2;
    for (int64_t panel = begin; panel < end; ++panel) {
      float* const bias =
          reinterpret_cast<float*>(static_cast<char*>(matrix.panels) + panel * panel_bytes(source.depth));
      int8_t* const weights = reinterpret_cast<int8_t*>(bias + 2 * kColumns);
      for (int column = 0; column < kColumns; ++column) {
        const int vector = column / kLanes, lane = column % kLanes;
        const int64_t unit = panel * kUnits + vector % kGroups * kLanes + lane,
                      row = vector / kGroups * source.gate_rows + unit;
        const bool is_unit = unit < source.units;
        bias[column] = is_unit && source.bias ? static_cast<const float*>(source.bias)[row] : 0.0f;
        bias[kColumns + column] = is_unit && source.scale ? source.scale[row] : 0.0f;
        for (int64_t k = 0; k < 2 * pairs; ++k)
          weights[((vector / kSlice * pairs + k / 2) * kSlice + vector % kSlice) * 2 * kLanes + 2 * lane + k % 2] =
              is_unit && k < source.depth ? static_cast<int8_t>(data[row * source.stride + k]) : int8_t{0};
      }
    }
  }

  // ---- operands ----

  static int64_t operand_bytes(int64_t count, int64_t depth) {
    return count * (static_cast<int64_t>(sizeof(Row)) + padded(depth) * static_cast<int64_t>(sizeof(int16_t)));
  }
  static const Row* operands(const float* const* rows, int64_t count, int64_t depth, void* memory) {
    Row* const out = static_cast<Row*>(memory);
    int16_t* values = reinterpret_cast<int16_t*>(out + count);
    for (int64_t row = 0; row < count; ++row, values += padded(depth))
      out[row] = {values, quantise(rows[row], depth, values)};
    return out;
  }

  // Returns the scale. A row whose largest number is below 2^-100 counts as zero, because the inverse of its scale
  // would not be finite.
  static float quantise(const float* from, int64_t depth, int16_t* to) {
    using Bits = typename Pairs<Isa>::Sums;
    const auto n_at = [depth](int64_t k) { return lanes_left<V>(depth - k); };
    Bits most_bits{};  // without the sign, bit patterns have the order of the numbers
    for (int64_t k = 0; k < depth; k += kLanes) {
      const Bits bits = reinterpret_cast<Bits>(load<V>(from + k, n_at(k)).raw) & 0x7fffffff;
      most_bits = bits > most_bits ? bits : most_bits;
    }
    int32_t largest = 0;
    for (int lane = 0; lane < kLanes; ++lane) largest = most_bits[lane] > largest ? most_bits[lane] : largest;
    const float size = float_from_bits(static_cast<uint32_t>(largest));
    constexpr float kMost = std::numeric_limits<float>::max();
    if (!(size <= kMost) || size < 0x1p-100f) {
      std::memset(to, 0, padded(depth) * sizeof(int16_t));
      return size <= kMost ? 0.0f : std::nanf("");
    }
    const int64_t most = INT32_MAX / (127 * depth);
    const float limit = static_cast<float>(most < 32767 ? most : 32767), inverse = limit / size;
    for (int64_t k = 0; k < depth; k += kLanes) {
      const int n = n_at(k);
      const auto narrow = Pairs<Isa>::narrow(Pairs<Isa>::rounded((load<V>(from + k, n) * V(inverse)).raw));
      if (n == kLanes) std::memcpy(to + k, &narrow, sizeof narrow);
      else std::memcpy(to + k, &narrow, n * sizeof(int16_t));
    }
    if (depth % 2) to[depth] = 0;
    return size / limit;
  }

  // ---- the product ----

  static void run(
      const PackedMatrix& matrix, int64_t panel, const Row* rows, int64_t count, T* out, int64_t out_stride, int64_t) {
    const int64_t depth = matrix.source.depth, pairs = padded(depth) / 2;
    const float* const bias =
        reinterpret_cast<const float*>(static_cast<const char*>(matrix.panels) + panel * panel_bytes(depth));
    const int8_t* const weights = reinterpret_cast<const int8_t*>(bias + 2 * kColumns);
    for (int slice = 0; slice < kSlices; ++slice) {
      const int first = slice * kSlice * kLanes;
      int64_t groups = (count + kMaxRows - 1) / kMaxRows;
      for (int64_t row = 0; groups > 0; --groups) {
        const int64_t size = (count - row + groups - 1) / groups;
        group<kMaxRows>(size, rows + row, pairs, weights + slice * pairs * kSlice * 2 * kLanes, bias + first,
            out + row * out_stride + first, out_stride);
        row += size;
      }
    }
  }

 private:
  template <int kRows>
  static void group(int64_t size, const Row* rows, int64_t pairs, const int8_t* weights, const float* bias, T* out,
      int64_t out_stride) {
    if constexpr (kRows > 1) {
      if (size < kRows) return group<kRows - 1>(size, rows, pairs, weights, bias, out, out_stride);
    }
    micro_kernel<kRows>(rows, pairs, weights, bias, out, out_stride);
  }

  template <int kRows>
  static __attribute__((noinline)) void micro_kernel(
      const Row* rows, int64_t pairs, const int8_t* weights, const float* bias, T* out, int64_t out_stride) {
    using P = Pairs<Isa>;
    typename P::Sums sum[kRows][kSlice] = {};
    const int16_t* a[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) a[row] = rows[row].values;
#pragma GCC unroll 4
    for (int64_t pair = 0; pair < pairs; ++pair) {
      typename P::Words w[kSlice];
#pragma GCC unroll 4
      for (int vector = 0; vector < kSlice; ++vector)
        w[vector] = P::widen(weights + (pair * kSlice + vector) * 2 * kLanes);
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        int32_t both;
        std::memcpy(&both, a[row] + 2 * pair, sizeof both);
        const typename P::Words operand = P::repeat(both);
#pragma GCC unroll 4
        for (int vector = 0; vector < kSlice; ++vector) sum[row][vector] += P::products(operand, w[vector]);
      }
    }
    const float* const scale = bias + kColumns;
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int vector = 0; vector < kSlice; ++vector) {
        const V whole{__builtin_convertvector(sum[row][vector], typename V::Raw)};
        const V unit = V(rows[row].scale) * load_full<V>(scale + vector * kLanes);
        store_full(out + row * out_stride + vector * kLanes, load_full<V>(bias + vector * kLanes) + whole * unit);
      }
  }
};

}  // namespace fr::cpu
