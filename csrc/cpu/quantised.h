// The matrix product with 8-bit integer weights. It has the interface and the geometry of Product (product.h).
//
// A weight is q*s: q an integer from -127 to 127, s its row's scale. A row of operands a is quantised when a product
// needs it: a = p*t, p an integer from -m to m, t = max|a| / m, m = min(32767 - 127, (2^31 - 1) / (127 depth)). So no
// sum of p*q overflows 32 bits, and all sums are exact: the same on every instruction set and in any order. Only the
// result, bias + sum*(s*t), is rounded to float.
//
// Two products of a sum take one multiplication (Winograd, "A new algorithm for inner product", 1968):
//   p q + p' q' = (p + q') (p' + q) - p p' - q q'
// The last two terms, summed over k, depend on the row or the column alone: `cross` of each. p + q' fits 16 bits, and
// what overflows 32 bits in between comes back, because sums are those of integers modulo 2^32. On AVX2 additions have
// twice as many ports as multiplications, and this takes the same number of instructions as two multiplications.
//
//   panel = bias and scales (float) and cross (uint32), [kColumns] each, then its slices as in product.h: for each pair
//   k, k+1 the 8-bit weights of the slice's registers, with the two of a lane side by side. The depth is padded to
//   quads: k, k+1 of a quad are p, and k+2, k+3 are p'. Loading widens the weights to 16 bits.
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
  using Raw = typename Vec<float, Isa>::Raw;
  using Sums = typename RawVector<uint32_t, Isa::kBytes>::type;  // modulo 2^32
#if defined(__AVX512F__)
  using Words = __m512i;
  static Words widen(const int8_t* from) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static Words repeat(int32_t pair) { return _mm512_set1_epi32(pair); }
  static Words add(Words a, Words b) { return _mm512_add_epi16(a, b); }
  static Sums products(Words a, Words b) { return reinterpret_cast<Sums>(_mm512_madd_epi16(a, b)); }
  static Sums round(Raw a, Raw b, int16_t* to) {
    const auto narrow = [](Raw c) { return _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(reinterpret_cast<__m512>(c))); };
    const Words words = _mm512_inserti64x4(_mm512_castsi256_si512(narrow(a)), narrow(b), 1);
    _mm512_storeu_si512(to, words);
    return products(words, _mm512_srli_epi64(words, 32));
  }
#elif defined(__AVX2__)
  using Words = __m256i;
  static Words widen(const int8_t* from) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static Words repeat(int32_t pair) { return _mm256_set1_epi32(pair); }
  static Words add(Words a, Words b) { return _mm256_add_epi16(a, b); }
  static Sums products(Words a, Words b) { return reinterpret_cast<Sums>(_mm256_madd_epi16(a, b)); }
  static Sums round(Raw a, Raw b, int16_t* to) {
    const auto whole = [](Raw c) { return _mm256_cvtps_epi32(reinterpret_cast<__m256>(c)); };
    const Words words = _mm256_permute4x64_epi64(_mm256_packs_epi32(whole(a), whole(b)), 0xd8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), words);
    return products(words, _mm256_srli_epi64(words, 32));
  }
#elif defined(__SSE2__)
  using Words = __m128i;
  static Words widen(const int8_t* from) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    return _mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8);
  }
  static Words repeat(int32_t pair) { return _mm_set1_epi32(pair); }
  static Words add(Words a, Words b) { return _mm_add_epi16(a, b); }
  static Sums products(Words a, Words b) { return reinterpret_cast<Sums>(_mm_madd_epi16(a, b)); }
  static Sums round(Raw a, Raw b, int16_t* to) {
    const auto whole = [](Raw c) { return _mm_cvtps_epi32(reinterpret_cast<__m128>(c)); };
    const Words words = _mm_packs_epi32(whole(a), whole(b));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), words);
    return products(words, _mm_srli_epi64(words, 32));
  }
#else
  struct Words {
    Sums first, second;
  };
  static constexpr int kLanes = Vec<float, Isa>::kLanes;
  static Words widen(const int8_t* from) {
    Words words;
    for (int lane = 0; lane < kLanes; ++lane) {
      words.first[lane] = static_cast<uint32_t>(from[2 * lane]);
      words.second[lane] = static_cast<uint32_t>(from[2 * lane + 1]);
    }
    return words;
  }
  static Words repeat(int32_t pair) {
    int16_t both[2];
    std::memcpy(both, &pair, sizeof pair);
    return {static_cast<uint32_t>(both[0]) - Sums{}, static_cast<uint32_t>(both[1]) - Sums{}};
  }
  static Words add(const Words& a, const Words& b) { return {a.first + b.first, a.second + b.second}; }
  static Sums products(const Words& a, const Words& b) { return a.first * b.first + a.second * b.second; }
  static Sums round(Raw a, Raw b, int16_t* to) {
    for (int lane = 0; lane < kLanes; ++lane) {
      to[lane] = static_cast<int16_t>(std::lrintf(a[lane]));
      to[kLanes + lane] = static_cast<int16_t>(std::lrintf(b[lane]));
    }
    Sums sums{};
    for (int k = 0; k < 2 * kLanes; k += 4)
      sums[k / 2] = static_cast<uint32_t>(to[k]) * static_cast<uint32_t>(to[k + 2]) +
                    static_cast<uint32_t>(to[k + 1]) * static_cast<uint32_t>(to[k + 3]);
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
  using P = Pairs<Isa>;
  // The registers must hold the sums, a quad's weights in the slice, the row's operands and two of their sums.
  static constexpr int kRegisters = Isa::kAccumulators > 16 ? 32 : 16;
  static constexpr int kFitRows = (kRegisters - 2 * kSlice - 4) / kSlice, kMaxRows = kFitRows < 2 ? 2 : kFitRows;
  // If several groups of rows use a slice, the first keeps a block of its widened weights in L1 for the others.
  static constexpr int64_t kBlockBytes = 16 << 10, kBlockQuads = kBlockBytes / (2 * kSlice * sizeof(typename P::Words));

  struct Row {
    const int16_t* values;  // [padded depth]
    float scale;            // NaN if the operands are not finite
    uint32_t cross;
  };

  static int64_t panels(int64_t units) { return Geometry::panels(units); }
  static int64_t quads(int64_t depth) { return (depth + 3) / 4; }
  static int64_t panel_bytes(int64_t depth) {
    return kColumns * (3 * static_cast<int64_t>(sizeof(float)) + 4 * quads(depth));
  }
  static int64_t bytes(const MatrixSource& source) { return panels(source.units) * panel_bytes(source.depth); }

  // The weights come as floats with integer values.
  static void pack_panels(const PackedMatrix& matrix, int64_t begin, int64_t end) {
    const MatrixSource& source = matrix.source;
    const float* const data = static_cast<const float*>(source.data);
    const int64_t pairs = 2 * quads(source.depth);
    for (int64_t panel = begin; panel < end; ++panel) {
      float* const bias =
          reinterpret_cast<float*>(static_cast<char*>(matrix.panels) + panel * panel_bytes(source.depth));
      uint32_t* const cross = reinterpret_cast<uint32_t*>(bias + 2 * kColumns);
      int8_t* const weights = reinterpret_cast<int8_t*>(bias + 3 * kColumns);
      for (int column = 0; column < kColumns; ++column) {
        const int vector = column / kLanes, lane = column % kLanes;
        const int64_t unit = panel * kUnits + vector % kGroups * kLanes + lane,
                      row = vector / kGroups * source.gate_rows + unit;
        const bool is_unit = unit < source.units;
        bias[column] = is_unit && source.bias ? static_cast<const float*>(source.bias)[row] : 0.0f;
        bias[kColumns + column] = is_unit && source.scale ? source.scale[row] : 0.0f;
        const auto weight = [&](int64_t k) {
          return is_unit && k < source.depth ? static_cast<int8_t>(data[row * source.stride + k]) : int8_t{0};
        };
        cross[column] = 0;
        for (int64_t k = 0; k < 2 * pairs; ++k) {
          weights[((vector / kSlice * pairs + k / 2) * kSlice + vector % kSlice) * 2 * kLanes + 2 * lane + k % 2] =
              weight(k);
          if (k % 4 < 2) cross[column] += static_cast<uint32_t>(weight(k) * weight(k + 2));
        }
      }
    }
  }

  // ---- operands ----

  static int64_t padded(int64_t depth) { return (depth + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes); }
  static int64_t operand_bytes(int64_t count, int64_t depth) {
    return count * (static_cast<int64_t>(sizeof(Row)) + padded(depth) * static_cast<int64_t>(sizeof(int16_t)));
  }
  static const Row* operands(const float* const* rows, int64_t count, int64_t depth, void* memory) {
    Row* const out = static_cast<Row*>(memory);
    int16_t* values = reinterpret_cast<int16_t*>(out + count);
    for (int64_t row = 0; row < count; ++row, values += padded(depth)) out[row] = quantise(rows[row], depth, values);
    return out;
  }

  // A row whose largest number is below 2^-100 counts as zero, because the inverse of its scale
  // would not be finite.
  static Row quantise(const float* from, int64_t depth, int16_t* to) {
    using Bits = typename V::RawInteger;
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
      return {to, size <= kMost ? 0.0f : std::nanf(""), 0};
    }
    constexpr int64_t kLargest = 32767 - 127;
    const int64_t most = INT32_MAX / (127 * depth);
    const float limit = static_cast<float>(most < kLargest ? most : kLargest), inverse = limit / size;
    const auto scaled = [&](int64_t k) {
      return k < depth ? (load<V>(from + k, n_at(k)) * V(inverse)).raw : V(0.0f).raw;
    };
    typename P::Sums sums{};
    for (int64_t k = 0; k < depth; k += 2 * kLanes) sums += P::round(scaled(k), scaled(k + kLanes), to + k);
    uint32_t cross = 0;
    for (int lane = 0; lane < kLanes; ++lane) cross += sums[lane];
    return {to, size / limit, cross};
  }

  // ---- the product ----

  static void run(
      const PackedMatrix& matrix, int64_t panel, const Row* rows, int64_t count, T* out, int64_t out_stride, int64_t) {
    const int64_t depth = matrix.source.depth, whole = quads(depth);
    const float* const bias =
        reinterpret_cast<const float*>(static_cast<const char*>(matrix.panels) + panel * panel_bytes(depth));
    const int8_t* weights = reinterpret_cast<const int8_t*>(bias + 3 * kColumns);
    typename P::Words wide[2 * kSlice * kBlockQuads];
    // With one row, a slice alone would be a short loop.
    if (count == 1)
      return micro_kernel<1, Source::kNarrow, kSlices>(
          rows, {0, whole, whole}, weights, nullptr, {bias, out, out_stride});
    for (int slice = 0; slice < kSlices; ++slice) {
      const Columns columns{bias + slice * kSlice * kLanes, out + slice * kSlice * kLanes, out_stride};
      if (count <= kMaxRows) {
        group<kMaxRows, Source::kNarrow>(count, rows, {0, whole, whole}, weights, nullptr, columns);
      } else {
        for (int64_t quad = 0; quad == 0 || quad < whole; quad += kBlockQuads) {
          const Block block{quad, whole - quad < kBlockQuads ? whole - quad : kBlockQuads, whole};
          const int64_t groups = (count + kMaxRows - 1) / kMaxRows;
          for (int64_t index = 0, row = 0; index < groups; ++index) {
            const int64_t size = (count - row + groups - index - 1) / (groups - index);
            const Columns here{columns.bias, columns.out + row * out_stride, out_stride};
            if (index == 0) group<kMaxRows, Source::kKept>(size, rows + row, block, weights, wide, here);
            else group<kMaxRows, Source::kWide>(size, rows + row, block, weights, wide, here);
            row += size;
          }
        }
      }
      weights += whole * 4 * kSlice * kLanes;
    }
  }

 private:
  // Weights as they lie, or kept widened, or widened already.
  enum class Source { kNarrow, kKept, kWide };
  struct Block {
    int64_t first, quads, whole;
  };
  struct Columns {
    const float* bias;
    T* out;
    int64_t out_stride;
  };

  template <int kRows, Source kSource>
  static void group(int64_t size, const Row* rows, const Block& block, const int8_t* weights, typename P::Words* wide,
      const Columns& columns) {
    if constexpr (kRows > 1) {
      if (size < kRows) return group<kRows - 1, kSource>(size, rows, block, weights, wide, columns);
    }
    micro_kernel<kRows, kSource>(rows, block, weights, wide, columns);
  }

  // Between blocks the integer sums lie where the results will be.
  template <int kRows, Source kSource, int kWideSlices = 1>
  static __attribute__((noinline)) void micro_kernel(
      const Row* rows, const Block& block, const int8_t* weights, typename P::Words* wide, const Columns& columns) {
    constexpr int kWidth = kWideSlices * kSlice;
    typename P::Sums sum[kRows][kWidth] = {};
    const int16_t* a[kRows];
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row) {
      a[row] = rows[row].values + 4 * block.first;
      if (block.first > 0)
#pragma GCC unroll 4
        for (int vector = 0; vector < kWidth; ++vector)
          std::memcpy(&sum[row][vector], columns.out + row * columns.out_stride + vector * kLanes, Isa::kBytes);
    }
    weights += block.first * 4 * kSlice * kLanes;
#pragma GCC unroll 2
    for (int64_t quad = 0; quad < block.quads; ++quad) {
      typename P::Words w[2][kWidth];
#pragma GCC unroll 8
      for (int i = 0; i < 2 * kWidth; ++i) {
        const int half = i / kSlice % 2, vector = i / kSlice / 2 * kSlice + i % kSlice;
        const int64_t at = (i / kSlice / 2 * block.whole + quad) * 2 * kSlice + i % (2 * kSlice);
        w[half][vector] = kSource == Source::kWide ? wide[at] : P::widen(weights + at * 2 * kLanes);
        if constexpr (kSource == Source::kKept) wide[at] = w[half][vector];
      }
#pragma GCC unroll 8
      for (int row = 0; row < kRows; ++row) {
        int32_t pair[2];
        std::memcpy(pair, a[row] + 4 * quad, sizeof pair);
        const typename P::Words first = P::repeat(pair[0]), second = P::repeat(pair[1]);
#pragma GCC unroll 4
        for (int vector = 0; vector < kWidth; ++vector)
          sum[row][vector] += P::products(P::add(first, w[1][vector]), P::add(second, w[0][vector]));
      }
    }
    const bool last = block.first + block.quads >= block.whole;
    const float* const scale = columns.bias + kColumns;
#pragma GCC unroll 8
    for (int row = 0; row < kRows; ++row)
#pragma GCC unroll 4
      for (int vector = 0; vector < kWidth; ++vector) {
        T* const out = columns.out + row * columns.out_stride + vector * kLanes;
        if (!last) {
          std::memcpy(out, &sum[row][vector], Isa::kBytes);
          continue;
        }
        typename P::Sums cross;
        std::memcpy(&cross, scale + kColumns + vector * kLanes, Isa::kBytes);
        const auto exact = reinterpret_cast<typename V::RawInteger>(sum[row][vector] - cross - rows[row].cross);
        const V whole{__builtin_convertvector(exact, typename V::Raw)};
        const V unit = V(rows[row].scale) * load_full<V>(scale + vector * kLanes);
        store_full(out, load_full<V>(columns.bias + vector * kLanes) + whole * unit);
      }
  }
};

}  // namespace fr::cpu
