// The products of backward that sum over rows: weight gradients, C[m][n] = sum over rows r of left[r][m] * right[r][n],
// and bias gradients, which are the sums of the left rows. Rows are given by pointers, so the right ones may lie
// anywhere (the input, the output one step before, the initial state).
//
// Every sum adds the rows in ascending order in one accumulator (bfloat16: in pairs of rows). Threads split the
// elements of C, never a sum, and a later call continues the sums of the previous one. So results depend neither on the
// number of threads nor on how rows are spread over calls. In tile registers, 32 rows are added up at a time.
#pragma once

#include "call.h"

namespace fr::cpu {

// The right-hand rows of one product, and where its C goes.
struct OuterRight {
  const void* const* rows;  // null: no product
  bool is_operand;          // in the operand type, else in the storage type
  int64_t offset, columns;  // n counts from the offset
  void* sums;               // C: [columns of left][columns] in the state type, `stride` elements from row to row
  int64_t stride;
};

struct Outer {
  const void* const* left;       // in the operand type
  int64_t left_offset, columns;  // m counts from the offset
  OuterRight right[2];
  void* left_sums[2];  // [columns] in the state type, or null: two copies of the same sums
};

template <class Isa, class S>
struct OuterProduct {
  using T = StateOf<S>;
  using O = Operand<Isa, S>;
  using V = Vec<T, Isa>;
  static constexpr bool kPairs = std::is_same_v<O, BFloat16>, kTiles = Isa::kTiles && kPairs;
  // What is multiplied: one element, or with bfloat16 two, of rows r and r+1.
  using Packed = std::conditional_t<kPairs, uint32_t, O>;
  static constexpr int kLanes = V::kLanes;
  static constexpr int kVectors = Isa::kBytes == 64 ? 4 : 2, kColumns = kVectors * kLanes;
  static constexpr int kStrip = kTiles ? Tiles::kMostRows : Isa::kAccumulators / kVectors;  // left columns of a strip
  // A block of kDepth rows: its left columns stay in L2, with its right columns beside them, and one strip of left
  // columns stays in L1.
  static constexpr int64_t kDepth = 128, kLeftBytes = Isa::kL2Bytes / 8 * 3, kRightBytes = Isa::kL2Bytes / 8;

  // Bytes of one thread's buffers for at most `rows` rows. Fewer rows make wider blocks, which may need more bytes.
  static int64_t left_bytes(int64_t rows, int64_t columns) {
    return columns < left_block(depth_of(rows)) ? strips(columns) * kStrip * depth_of(rows) * sizeof(Packed)
                                                : kLeftBytes;
  }
  static int64_t right_bytes(int64_t rows, int64_t columns) {
    const int64_t whole = (columns + kLanes - 1) / kLanes * kLanes * depth_of(rows) * sizeof(Packed);
    return columns < right_block(depth_of(rows)) ? whole : kRightBytes;
  }

  // Computes the share of thread `index` of `count`. first: overwrites C with the sums of these rows instead of adding
  // them.
  static void run(
      const Outer& job, int64_t rows, bool first, int index, int count, void* left_buffer, void* right_buffer) {
    T* const left_sums = static_cast<T*>(job.left_sums[job.left_sums[0] ? 0 : 1]);
    if (!left_sums && !job.right[0].rows && !job.right[1].rows) return;
    const TileScope<Isa> tiles;
    const Share share = share_of(job, index, count);
    if (!rows && first) return clear(job, share);
    const int64_t most = depth_of(rows), block = left_block(most), width = right_block(most);
    Packed* const left = static_cast<Packed*>(left_buffer);
    Packed* const right = static_cast<Packed*>(right_buffer);
    for (int64_t m0 = share.left_begin; m0 < share.left_end; m0 += block) {
      const int64_t m1 = m0 + block < share.left_end ? m0 + block : share.left_end;
      for (int64_t row = 0; row < rows; row += kDepth) {
        const int64_t size = row + kDepth < rows ? kDepth : rows - row;
        const bool fresh = first && row == 0;
        pack_left(job, row, size, m0, m1, left, share.part == 0 ? left_sums : nullptr, fresh);
        for (const OuterRight& to : job.right) {
          if (!to.rows) continue;
          const auto [begin, end] = columns_of(to, share);
          if (fresh && size == 1 && put_products(job, to, m0, m1, begin, end)) continue;
          for (int64_t n0 = begin; n0 < end; n0 += width) {
            const int64_t n1 = n0 + width < end ? n0 + width : end;
            pack_right(to, row, size, n0, n1, right);
            multiply(to, depth(size), m0, m1, n0, n1, left, right, fresh);
          }
        }
      }
    }
    if (share.part == 0 && job.left_sums[0] && job.left_sums[1])
      std::memcpy(static_cast<T*>(job.left_sums[1]) + share.left_begin, left_sums + share.left_begin,
          (share.left_end - share.left_begin) * sizeof(T));
  }

 private:
  static constexpr int64_t kFewColumns = 64;
  static constexpr int kFew = 8 * kStrip;

  // The part of C that one thread computes: whole strips of left columns.
  struct Share {
    int64_t left_begin, left_end;
    int part, parts;  // its part of the right columns
  };

  // Splits by left columns. If that gives each thread so few that packing the right columns would dominate, splits
  // those too.
  static Share share_of(const Outer& job, int index, int count) {
    int parts = 1;
    while (parts < count && (count % parts || job.columns * parts < kFewColumns * count)) ++parts;
    const int64_t groups = count / parts, group = index / parts, all = strips(job.columns);
    const int64_t begin = all * group / groups * kStrip, end = all * (group + 1) / groups * kStrip;
    return {begin, end < job.columns ? end : job.columns, index % parts, parts};
  }

  static int64_t strips(int64_t columns) { return (columns + kStrip - 1) / kStrip; }
  static int64_t depth(int64_t rows) {
    constexpr int64_t kTogether = kTiles ? 16 : 1;  // pairs of rows
    return kPairs ? ((rows + 1) / 2 + kTogether - 1) / kTogether * kTogether : rows;
  }
  static int64_t depth_of(int64_t rows) { return rows > kDepth ? depth(kDepth) : rows > 0 ? depth(rows) : 1; }
  static int64_t left_block(int64_t depth) {
    return kLeftBytes / (depth * static_cast<int64_t>(sizeof(Packed))) / kStrip * kStrip;
  }
  static int64_t right_block(int64_t depth) {
    return kRightBytes / (depth * static_cast<int64_t>(sizeof(Packed))) / kColumns * kColumns;
  }
  static UnitRange columns_of(const OuterRight& to, const Share& share) {
    const int64_t all = (to.columns + kLanes - 1) / kLanes;
    const int64_t begin = all * share.part / share.parts * kLanes, end = all * (share.part + 1) / share.parts * kLanes;
    return {begin, end < to.columns ? end : to.columns};
  }

  static void clear(const Outer& job, const Share& share) {
    const size_t size = sizeof(T);
    for (void* sums : job.left_sums)
      if (share.part == 0 && sums)
        std::memset(static_cast<T*>(sums) + share.left_begin, 0, (share.left_end - share.left_begin) * size);
    for (const OuterRight& to : job.right) {
      if (!to.rows) continue;
      const auto [begin, end] = columns_of(to, share);
      for (int64_t m = share.left_begin; m < share.left_end && begin < end; ++m)
        std::memset(static_cast<T*>(to.sums) + m * to.stride + begin, 0, (end - begin) * size);
    }
  }

  // ---- a single row ----

  // Writes the products of a single first row, with the same bits as micro_kernel. Nothing is read twice, and writing
  // whole rows of C is about twice as fast as writing strips. Returns false if the rows need conversion.
  static bool put_products(const Outer& job, const OuterRight& to, int64_t m0, int64_t m1, int64_t n0, int64_t n1) {
    if constexpr (std::is_same_v<O, T>) {
      if (!to.is_operand && !std::is_same_v<S, T>) return false;
      const T* const left = static_cast<const T*>(job.left[0]) + job.left_offset;
      const T* const right = static_cast<const T*>(to.rows[0]) + to.offset;
      for (int64_t m = m0; m < m1; ++m) {
        T* const row = static_cast<T*>(to.sums) + m * to.stride;
        const V a(left[m]);
        int64_t n = n0;
        for (; n + kLanes <= n1; n += kLanes) store_full(row + n, V(0) + a * load_full<V>(right + n));
        if (n < n1) store(row + n, V(0) + a * load<V>(right + n, lanes_left<V>(n1 - n)), lanes_left<V>(n1 - n));
      }
      return true;
    }
    return false;
  }

  // ---- packing ----

  // Packs columns [m0, m1) in strips of kStrip: strip [depth][kStrip].
  static void pack_left(
      const Outer& job, int64_t row, int64_t count, int64_t m0, int64_t m1, Packed* out, T* to, bool fresh) {
    const O* const* rows = reinterpret_cast<const O* const*>(job.left) + row;
    int64_t m = m0;
    if constexpr (kTiles) {
      for (; m < m1; m += kLanes, out += depth(count) * kLanes)
        pack_tiles(rows, job.left_offset + m, lanes_left<V>(m1 - m), count, out, to ? to + m : nullptr, fresh);
      return;
    }
    for (; m + kFew <= m1; m += kFew, out += depth(count) * kFew)
      pack_strips<kFew>(rows, job.left_offset + m, kFew, count, out, to ? to + m : nullptr, fresh);
    for (; m < m1; m += kStrip, out += depth(count) * kStrip)
      pack_strips<0>(rows, job.left_offset + m, m1 - m < kStrip ? static_cast<int>(m1 - m) : kStrip, count, out,
          to ? to + m : nullptr, fresh);
  }

  // Packs `size` columns of a strip for tiles: [kLanes][depth], zero-padded.
  static void pack_tiles(const O* const* rows, int64_t at, int size, int64_t count, Packed* out, T* sums, bool fresh) {
    const int64_t stride = depth(count);
    V sum = !sums || fresh ? V(0) : load<V>(sums, size);
    for (int64_t pair0 = 0; pair0 < stride; pair0 += 16) {
      alignas(64) Packed pairs[16][kLanes]{};
      for (int64_t pair = pair0; pair < pair0 + 16 && 2 * pair < count; ++pair) {
        const O* const row = rows[2 * pair] + at;
        const O* const next = 2 * pair + 1 < count ? rows[2 * pair + 1] + at : nullptr;
        if (sums) {
          sum = sum + load<V>(row, size);
          if (next) sum = sum + load<V>(next, size);
        }
        pair_up(row, next, size, pairs[pair - pair0]);
      }
      transpose(pairs, out + pair0, stride);
    }
    if (sums) store(sums, sum, size);
  }

  // to[i*stride + j] = from[j][i]
  static void transpose(const Packed (&from)[16][kLanes], Packed* to, int64_t stride) {
#if defined(__AVX512F__)
    __m512i a[16], b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_load_si512(from[i]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 2)
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < 16; i += 4)  // a[i + j] has column j of each quarter, from rows i to i + 3
      for (int j = 0; j < 2; ++j) {
        a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
        a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
      }
#pragma GCC unroll 16
    for (int j = 0; j < 4; ++j) {
      const __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88),
                    high = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88),
                    low1 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd),
                    high1 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
      _mm512_storeu_si512(to + j * stride, _mm512_shuffle_i32x4(low, high, 0x88));
      _mm512_storeu_si512(to + (8 + j) * stride, _mm512_shuffle_i32x4(low, high, 0xdd));
      _mm512_storeu_si512(to + (4 + j) * stride, _mm512_shuffle_i32x4(low1, high1, 0x88));
      _mm512_storeu_si512(to + (12 + j) * stride, _mm512_shuffle_i32x4(low1, high1, 0xdd));
    }
#else
    for (int i = 0; i < kLanes; ++i)
      for (int j = 0; j < 16; ++j) to[i * stride + j] = from[j][i];
#endif
  }

  // Packs a few strips at a time, to read whole cache lines. kSize: their columns; 0: one strip of `size` columns,
  // zero-padded.
  template <int kSize>
  static void pack_strips(const O* const* rows, int64_t at, int size, int64_t count, Packed* out, T* sums, bool fresh) {
    constexpr int kStrips = kSize ? kSize / kStrip : 1, kSums = kSize ? kSize / kLanes : (kStrip + kLanes - 1) / kLanes;
    static_assert(!kSize || (kStrips * kStrip == kSize && kSums * kLanes == kSize));
    const int64_t stride = depth(count) * kStrip;
    V sum[kSums];
    const auto lanes = [&](int i) { return kSize ? kLanes : size > i * kLanes ? lanes_left<V>(size - i * kLanes) : 0; };
    for (int i = 0; i < kSums; ++i) sum[i] = !sums || fresh ? V(0) : load<V>(sums + i * kLanes, lanes(i));
    const auto add = [&](const O* row) {
      if (!sums) return;
#pragma GCC unroll 8
      for (int i = 0; i < kSums; ++i) sum[i] = sum[i] + load<V>(row + i * kLanes, lanes(i));
    };
    for (int64_t r = 0; r < count; r += kPairs ? 2 : 1, out += kStrip) {
      const O* const row = rows[r] + at;
      add(row);
      const Packed* from;
      Packed pairs[kPairs ? kSums * kLanes : 1];
      if constexpr (kPairs) {
        const O* const next = r + 1 < count ? rows[r + 1] + at : nullptr;
        if (next) add(next);
        pair_up(row, next, kSize ? kSize : size, pairs);
        from = pairs;
      } else {
        from = row;
      }
#pragma GCC unroll 8
      for (int s = 0; s < kStrips; ++s) {
        if constexpr (kSize > 0) {
          std::memcpy(out + s * stride, from + s * kStrip, kStrip * sizeof(Packed));
        } else {
          for (int i = 0; i < kStrip; ++i) out[i] = i < size ? from[i] : Packed{};
        }
      }
    }
    for (int i = 0; i < kSums && sums; ++i) store(sums + i * kLanes, sum[i], lanes(i));
  }

  // Packs columns [n0, n1) in panels [depth][kColumns], and the rest in panels [depth][kLanes], zero-padded.
  static void pack_right(const OuterRight& from, int64_t row, int64_t count, int64_t n0, int64_t n1, Packed* out) {
    if (from.is_operand)
      pack_columns(reinterpret_cast<const O* const*>(from.rows) + row, from.offset, count, n0, n1, out);
    else pack_columns(reinterpret_cast<const S* const*>(from.rows) + row, from.offset, count, n0, n1, out);
  }
  template <class From>
  static void pack_columns(
      const From* const* rows, int64_t offset, int64_t count, int64_t n0, int64_t n1, Packed* out) {
    int64_t n = n0;
    for (; n + kColumns <= n1; n += kColumns, out += depth(count) * kColumns)
      pack_panel<kVectors>(rows, offset + n, kLanes, count, out);
    for (; n < n1; n += kLanes, out += depth(count) * kLanes)
      pack_panel<1>(rows, offset + n, lanes_left<V>(n1 - n), count, out);
  }
  template <int kWide, class From>
  static void pack_panel(const From* const* rows, int64_t at, int lanes, int64_t count, Packed* out) {
    if constexpr (kPairs) {
      for (int64_t r = 0; r < count; r += 2, out += kWide * kLanes) {
        const int valid = kWide > 1 ? kWide * kLanes : lanes;
        pair_up(rows[r] + at, r + 1 < count ? rows[r + 1] + at : nullptr, valid, out);
        for (int i = valid; i < kWide * kLanes; ++i) out[i] = 0;
      }
      if constexpr (kTiles)
        std::memset(out, 0, static_cast<size_t>(depth(count) - (count + 1) / 2) * kWide * kLanes * sizeof(Packed));
    } else {
      for (int64_t r = 0; r < count; ++r, out += kWide * kLanes) {
        const From* const from = rows[r] + at;
        if constexpr (kWide > 1) {
#pragma GCC unroll 4
          for (int i = 0; i < kWide; ++i) store_full(out + i * kLanes, load_full<V>(from + i * kLanes));
        } else {
          store_full(out, load<V>(from, lanes));
        }
      }
    }
  }

  // Interleaves the elements of two rows. A last row alone is paired with zeros.
  static void pair_up(const BFloat16* row, const BFloat16* next, int size, Packed* out) {
    if (next)
      for (int i = 0; i < size; ++i) out[i] = static_cast<Packed>(row[i].bits | uint32_t{next[i].bits} << 16);
    else
      for (int i = 0; i < size; ++i) out[i] = static_cast<Packed>(row[i].bits);
  }

  // ---- the product of packed columns, added to C (fresh: overwrites C) ----

  static void multiply(const OuterRight& to, int64_t depth, int64_t m0, int64_t m1, int64_t n0, int64_t n1,
      const Packed* left, const Packed* right, bool fresh) {
    for (int64_t m = m0; m < m1; m += kStrip, left += depth * kStrip) {
      const int size = m1 - m < kStrip ? static_cast<int>(m1 - m) : kStrip;
      T* const row = static_cast<T*>(to.sums) + m * to.stride;
      const Packed* panel = right;
      int64_t n = n0;
      for (; n + kColumns <= n1; n += kColumns, panel += depth * kColumns)
        strip<kStrip, kVectors>(size, left, panel, depth, row + n, to.stride, kLanes, fresh);
      for (; n < n1; n += kLanes, panel += depth * kLanes)
        strip<kStrip, 1>(size, left, panel, depth, row + n, to.stride, lanes_left<V>(n1 - n), fresh);
    }
  }

  template <int kSize, int kWide>
  static void strip(
      int size, const Packed* left, const Packed* right, int64_t depth, T* to, int64_t stride, int lanes, bool fresh) {
    if constexpr (kTiles) return tile_kernel<kWide>(size, left, right, depth, to, stride, lanes, fresh);
    if constexpr (kSize > 1) {
      if (size < kSize) return strip<kSize - 1, kWide>(size, left, right, depth, to, stride, lanes, fresh);
    }
    micro_kernel<kSize, kWide>(left, right, depth, to, stride, lanes, fresh);
  }

  template <int kWide>
  static __attribute__((noinline)) void tile_kernel(
      int size, const Packed* left, const Packed* right, int64_t depth, T* to, int64_t stride, int lanes, bool fresh) {
    constexpr int64_t kBytes = sizeof(T);
    static constexpr T kZeros[kWide * kLanes]{};
    alignas(64) T copy[kStrip * kLanes];  // of sums that do not fill a register
    const bool whole = kWide > 1 || lanes == kLanes;
    T* const sums = whole ? to : copy;
    const int64_t sums_stride = (whole ? stride : kLanes) * kBytes;
    for (int row = 0; !whole && !fresh && row < size; ++row)
      store_full(copy + row * kLanes, load<V>(to + row * stride, lanes));
    Tiles::product<false, kWide>(size, {left, depth * kBytes}, {right}, depth / 16,
        {fresh ? kZeros : sums, fresh ? 0 : sums_stride, sums, sums_stride});
    for (int row = 0; !whole && row < size; ++row) store(to + row * stride, load_full<V>(copy + row * kLanes), lanes);
  }

  // The hot loop: kSize*kWide sums in registers; for each row, kWide loads and kSize broadcasts.
  template <int kSize, int kWide>
  static __attribute__((noinline)) void micro_kernel(
      const Packed* left, const Packed* right, int64_t depth, T* to, int64_t stride, int lanes, bool fresh) {
    V sum[kSize][kWide];
#pragma GCC unroll 8
    for (int i = 0; i < kSize; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kWide; ++j) {
        if (fresh) sum[i][j] = V(0);
        else if constexpr (kWide > 1) sum[i][j] = load_full<V>(to + i * stride + j * kLanes);
        else sum[i][j] = load<V>(to + i * stride, lanes);
      }
    for (int64_t r = 0; r < depth; ++r, left += kStrip, right += kWide * kLanes) {
#if defined(__AVX512BF16__)
      if constexpr (kPairs) {
        __m512bh b[kWide];
#pragma GCC unroll 4
        for (int j = 0; j < kWide; ++j) std::memcpy(&b[j], right + j * kLanes, 64);
#pragma GCC unroll 8
        for (int i = 0; i < kSize; ++i) {
          const __m512i a = _mm512_set1_epi32(static_cast<int32_t>(left[i]));
#pragma GCC unroll 4
          for (int j = 0; j < kWide; ++j)
            sum[i][j].raw = reinterpret_cast<typename V::Raw>(
                _mm512_dpbf16_ps(reinterpret_cast<__m512>(sum[i][j].raw), reinterpret_cast<__m512bh>(a), b[j]));
        }
      }
#endif
      if constexpr (!kPairs) {
        V b[kWide];
#pragma GCC unroll 4
        for (int j = 0; j < kWide; ++j) b[j] = load_full<V>(right + j * kLanes);
#pragma GCC unroll 8
        for (int i = 0; i < kSize; ++i) {
          const V a(left[i]);
#pragma GCC unroll 4
          for (int j = 0; j < kWide; ++j) sum[i][j] = sum[i][j] + a * b[j];
        }
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kSize; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < kWide; ++j) {
        if constexpr (kWide > 1) store_full(to + i * stride + j * kLanes, sum[i][j]);
        else store(to + i * stride, sum[i][j], lanes);
      }
  }
};

}  // namespace fr::cpu
