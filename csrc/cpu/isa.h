// The instruction sets: tags for the templates of this folder. Included only by the files that are compiled for one
// instruction set.
#pragma once

namespace fr::cpu {

// kBytes: bytes of a vector register.
// kAccumulators: registers that hold a tile of sums. The others hold operands in passing.
// kTileVectors: width of such a tile in registers. On AVX2, 3 rows of 4 registers would need one register more than its
// 16, so that each row reads a weight from memory again. 6 rows of 2 take 8 loads for 12 multiply-adds instead of 9,
// and half as many bytes of weights from L2.
// kDepthBlock: the depth, in operands of a row, that a tile processes at a time. On AVX2 a slice of weights so deep is
// 16 KiB (64 bytes an operand) and stays in an L1 of 32 KiB from one group of rows to the next. Elsewhere it is 128 KiB
// and stays in L2.
// kL2Bytes: L2 of a core that has this set and no better one.
// kNearBytes: recurrent weights larger than this do not stay in a core's own caches beside their use, and every thread
// with rows of its own reads all of them at each step. Unless rows are many, splitting units is worth its barrier,
// because each thread then reads only its share.
// kNativeBFloat16: one instruction multiplies bfloat16 pairs (vdpbf16ps), so operands stay in 16 bit.
// kOnlyInt8: the set serves weights of 8 bits only (with vpdpbusd, quantised.h).
// kRough: sigmoid and tanh to three digits, in three quarters of the operations (simd.h).
// kTiles: products of bfloat16 and of bytes run in the tile registers of AMX (tiles.h).
//
// Baseline: SSE2 with its 16 registers, or on arm64 NEON with 32.
#if defined(__aarch64__)
inline constexpr int kBaselineAccumulators = 24;
#else
inline constexpr int kBaselineAccumulators = 8;
#endif
struct Baseline {
  static constexpr int kBytes = 16, kAccumulators = kBaselineAccumulators, kTileVectors = 4, kDepthBlock = 512,
                       kL2Bytes = 1 << 20, kNearBytes = 8 << 20;
  static constexpr bool kNativeBFloat16 = false, kOnlyInt8 = false, kRough = false, kTiles = false;
};
struct Avx2 {
  static constexpr int kBytes = 32, kAccumulators = 12, kTileVectors = 3, kDepthBlock = 256, kL2Bytes = 512 << 10,
                       kNearBytes = 8 << 20;
  static constexpr bool kNativeBFloat16 = false, kOnlyInt8 = false, kRough = false, kTiles = false;
};
struct Avx512 {
  static constexpr int kBytes = 64, kAccumulators = 24, kTileVectors = 4, kDepthBlock = 512, kL2Bytes = 1 << 20,
                       kNearBytes = 8 << 20;
  static constexpr bool kNativeBFloat16 = false, kOnlyInt8 = false, kRough = false, kTiles = false;
};
struct Avx512BFloat16 : Avx512 {
  static constexpr bool kNativeBFloat16 = true;
};
struct AvxVnni : Avx2 {
  static constexpr bool kOnlyInt8 = true;
};
struct Avx512Vnni : Avx512 {
  static constexpr bool kOnlyInt8 = true;
};
// It serves bfloat16 and 8-bit weights, no others.
struct Avx512Amx : Avx512 {
  static constexpr int kNearBytes = 1 << 20;  // a product takes less time than reading its weights from memory
  static constexpr bool kNativeBFloat16 = true, kOnlyInt8 = true, kTiles = true;
};

// For products of 8-bit integers, which round their operands by up to 1/200 of the largest one.
template <class Isa>
struct Rough : Isa {
  static constexpr bool kRough = true;
};

}  // namespace fr::cpu
