// The tile registers of AMX: eight of up to 16 rows of 64 bytes. A product of two adds to a third: sums[m][n] += the
// sum over words k of left[m][k] * right[k][n], each a pair of bfloat16 or four bytes (Intel 64 and IA-32 manual,
// volume 2, TDPBF16PS and TDPBUSD; volume 1, "Programming with Intel AMX").
//
// Written as assembly: GCC 12's own functions do not tell the compiler that a tile load reads memory.
#pragma once

#include <cstdint>

namespace fr::cpu {

// Tiles 0 to 3 hold sums and 4 left operands, both with as many rows as operands; 5 to 7 hold right ones.
struct Tiles {
  static constexpr int kRows = 16, kRowBytes = 64;
  static constexpr int kLeft = 4, kRight = 5;

  // Gives the tiles of operands and sums this many rows. Contents are lost.
  static void configure(int64_t rows) {
    if (rows == configured) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14]{};
      uint16_t row_bytes[16]{};
      uint8_t rows[16]{};
    } shape;
    for (int tile = 0; tile < 8; ++tile) {
      shape.row_bytes[tile] = kRowBytes;
      shape.rows[tile] = static_cast<uint8_t>(tile < kRight ? rows : kRows);
    }
    asm volatile("ldtilecfg %0" : : "m"(shape));
    configured = rows;
  }
  // A thread that leaves tiles configured slows its next change of context.
  static void release() {
    if (configured) asm volatile("tilerelease");
    configured = 0;
  }

  template <int kTile>
  static void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  // kBytes: unsigned by signed bytes, else pairs of bfloat16
  template <bool kBytes, int kSums, int kWith>
  static void multiply() {
    if constexpr (kBytes)
      asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kLeft), "i"(kWith));
    else asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kSums), "i"(kLeft), "i"(kWith));
  }

  // Sums of kVectors tiles side by side, `stride` bytes from row to row. A stride of 0 loads one row for all.
  template <int kVectors>
  static void load_sums(const void* from, int64_t stride) {
    const char* const at = static_cast<const char*>(from);
    load<0>(at, stride);
    if constexpr (kVectors > 1) load<1>(at + kRowBytes, stride);
    if constexpr (kVectors > 2) load<2>(at + 2 * kRowBytes, stride);
    if constexpr (kVectors > 3) load<3>(at + 3 * kRowBytes, stride);
  }
  template <int kVectors>
  static void store_sums(void* to, int64_t stride) {
    char* const at = static_cast<char*>(to);
    store<0>(at, stride);
    if constexpr (kVectors > 1) store<1>(at + kRowBytes, stride);
    if constexpr (kVectors > 2) store<2>(at + 2 * kRowBytes, stride);
    if constexpr (kVectors > 3) store<3>(at + 3 * kRowBytes, stride);
  }
  // Adds the products of one tile of left operands with kVectors of right ones side by side: [16 words][kVectors * 16].
  template <bool kBytes, int kVectors>
  static void add(const void* left, int64_t left_stride, const void* right) {
    constexpr int64_t kStride = kVectors * kRowBytes;
    const char* const at = static_cast<const char*>(right);
    load<kLeft>(left, left_stride);
    load<kRight>(at, kStride);
    multiply<kBytes, 0, kRight>();
    if constexpr (kVectors > 1) load<kRight + 1>(at + kRowBytes, kStride), multiply<kBytes, 1, kRight + 1>();
    if constexpr (kVectors > 2) load<kRight + 2>(at + 2 * kRowBytes, kStride), multiply<kBytes, 2, kRight + 2>();
    if constexpr (kVectors > 3) load<kRight>(at + 3 * kRowBytes, kStride), multiply<kBytes, 3, kRight>();
  }

 private:
  static inline thread_local int64_t configured = 0;
};

// At the end of a kernel: releases the thread's tiles.
template <class Isa>
struct TileScope {
  ~TileScope() {
    if constexpr (Isa::kTiles) Tiles::release();
  }
};

}  // namespace fr::cpu
