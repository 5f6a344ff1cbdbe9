// The tile registers of AMX: eight of up to 16 rows of 64 bytes. A product of two adds to a third: sums[m][n] += the
// sum over words k of left[m][k] * right[k][n], each word a pair of bfloat16 or four bytes (Intel 64 and IA-32 manual,
// volume 2, TDPBF16PS and TDPBUSD; volume 1, "Programming with Intel AMX").
//
// Written as assembly: GCC 12's own functions do not tell the compiler that a tile load reads memory.
#pragma once

#include <cstdint>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace fr::cpu {

struct Tiles {
  static constexpr int64_t kRows = 16, kRowBytes = 64;
  static constexpr int64_t kMostRows = 2 * kRows;  // of left operands in one product

  // Linux lets a process use tile registers when it asks (its documentation, "Using XSTATE features in user space
  // applications"). Threads, and processes that it forks, may then use them too.
  static bool request() {
#if defined(__linux__) && defined(__x86_64__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
  }

  // Left operands: `stride` bytes from row to row, and 64 bytes of each row a step. Right operands of kVectors tiles
  // side by side: a step is [16 words][kVectors][16]. If either has an end, it serves one more step; that of left
  // operands is in rows of 64 bytes.
  struct Left {
    const void* rows;
    int64_t stride;
    const void* end = nullptr;
  };
  struct Right {
    const void* words;
    const void* end = nullptr;
  };
  // Strides in bytes. from_stride 0: all sums start from one row.
  struct Sums {
    const void* from;
    int64_t from_stride;
    void* to;
    int64_t stride;
  };

  // to[row] = from[row] + left[row] * right, for up to kMostRows rows. kBytes: of unsigned by signed bytes, else of
  // pairs of bfloat16. More than 16 rows take two tiles of rows by two of columns at a time: four products for four
  // loads.
  template <bool kBytes, int kVectors>
  static void product(int64_t rows, const Left& left, const Right& right, int64_t steps, const Sums& sums) {
    const int64_t first = rows > kRows ? (rows + 1) / 2 : rows;
    configure(first, rows - first);
    if (rows <= kRows) {
      side_by_side<kBytes, kVectors>(left, right, steps, sums);
    } else {
      two_by_two<kBytes, kVectors, 0>(first, left, right, steps, sums);
      if constexpr (kVectors > 2) two_by_two<kBytes, kVectors, 2>(first, left, right, steps, sums);
    }
  }

  // A thread that leaves its tiles configured slows its changes of context.
  static void release() {
    if (configured) asm volatile("tilerelease");
    configured = 0;
  }

 private:
  static inline thread_local int64_t configured = 0;

  // Gives the tiles of operands and sums these numbers of rows. Contents are lost.
  static void configure(int64_t rows, int64_t more) {
    const int64_t wanted = rows + kMostRows * more;
    if (wanted == configured) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14]{};
      uint16_t row_bytes[16]{};
      uint8_t rows[16]{};
    } shape;
    for (int tile = 0; tile < 8; ++tile) {
      // as side_by_side and two_by_two use them
      const int64_t one[] = {rows, rows, rows, rows, rows, kRows, kRows, kRows};
      const int64_t two[] = {rows, rows, more, more, rows, more, kRows, kRows};
      shape.row_bytes[tile] = kRowBytes, shape.rows[tile] = static_cast<uint8_t>((more ? two : one)[tile]);
    }
    asm volatile("ldtilecfg %0" : : "m"(shape));
    configured = wanted;
  }

  template <int kTile>
  static void load(const char* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(char* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  template <bool kBytes, int kSums, int kLeft, int kRight>
  static void multiply() {
    if constexpr (kBytes) asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kLeft), "i"(kRight));
    else asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kLeft), "i"(kRight));
  }

  // Calls step(left, left_stride, right) for each step.
  template <int kVectors, class Step>
  static void for_each_step(const Left& left, const Right& right, int64_t steps, Step step) {
    const char *a = static_cast<const char*>(left.rows), *b = static_cast<const char*>(right.words);
    for (int64_t i = 0; i < steps; ++i, a += kRowBytes, b += kRows * kVectors * kRowBytes) step(a, left.stride, b);
    if (left.end || right.end)
      step(left.end ? static_cast<const char*>(left.end) : a, left.end ? kRowBytes : left.stride,
          right.end ? static_cast<const char*>(right.end) : b);
  }

  template <bool kBytes, int kVectors>
  static void side_by_side(const Left& left, const Right& right, int64_t steps, const Sums& sums) {
    constexpr int64_t kStride = kVectors * kRowBytes;
    const char* const from = static_cast<const char*>(sums.from);
    char* const to = static_cast<char*>(sums.to);
    load<0>(from, sums.from_stride);
    if constexpr (kVectors > 1) load<1>(from + kRowBytes, sums.from_stride);
    if constexpr (kVectors > 2) load<2>(from + 2 * kRowBytes, sums.from_stride);
    if constexpr (kVectors > 3) load<3>(from + 3 * kRowBytes, sums.from_stride);
    for_each_step<kVectors>(left, right, steps, [&](const char* a, int64_t stride, const char* b) {
      load<4>(a, stride);
      load<5>(b, kStride), multiply<kBytes, 0, 4, 5>();
      if constexpr (kVectors > 1) load<6>(b + kRowBytes, kStride), multiply<kBytes, 1, 4, 6>();
      if constexpr (kVectors > 2) load<7>(b + 2 * kRowBytes, kStride), multiply<kBytes, 2, 4, 7>();
      if constexpr (kVectors > 3) load<5>(b + 3 * kRowBytes, kStride), multiply<kBytes, 3, 4, 5>();
    });
    store<0>(to, sums.stride);
    if constexpr (kVectors > 1) store<1>(to + kRowBytes, sums.stride);
    if constexpr (kVectors > 2) store<2>(to + 2 * kRowBytes, sums.stride);
    if constexpr (kVectors > 3) store<3>(to + 3 * kRowBytes, sums.stride);
  }

  // Columns of the kFirst-th tile and the next.
  template <bool kBytes, int kVectors, int kFirst>
  static void two_by_two(int64_t rows, const Left& left, const Right& right, int64_t steps, const Sums& sums) {
    constexpr int64_t kStride = kVectors * kRowBytes;
    constexpr bool kTwo = kFirst + 1 < kVectors;
    const char* const from = static_cast<const char*>(sums.from) + kFirst * kRowBytes;
    const char* const from1 = from + rows * sums.from_stride;
    char* const to = static_cast<char*>(sums.to) + kFirst * kRowBytes;
    char* const to1 = to + rows * sums.stride;
    load<0>(from, sums.from_stride), load<2>(from1, sums.from_stride);
    if constexpr (kTwo) load<1>(from + kRowBytes, sums.from_stride), load<3>(from1 + kRowBytes, sums.from_stride);
    for_each_step<kVectors>(left, right, steps, [&](const char* a, int64_t stride, const char* b) {
      b += kFirst * kRowBytes;
      load<4>(a, stride), load<6>(b, kStride), multiply<kBytes, 0, 4, 6>();
      if constexpr (kTwo) load<7>(b + kRowBytes, kStride), multiply<kBytes, 1, 4, 7>();
      load<5>(a + rows * stride, stride), multiply<kBytes, 2, 5, 6>();
      if constexpr (kTwo) multiply<kBytes, 3, 5, 7>();
    });
    store<0>(to, sums.stride), store<2>(to1, sums.stride);
    if constexpr (kTwo) store<1>(to + kRowBytes, sums.stride), store<3>(to1 + kRowBytes, sums.stride);
  }
};

// At the end of a kernel: releases the thread's tiles.
template <class Isa>
struct TileScope {
  ~TileScope() {
    if constexpr (Isa::kTiles) Tiles::release();
  }
};

}  // namespace fr::cpu
