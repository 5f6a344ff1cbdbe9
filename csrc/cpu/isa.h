// The instruction sets: tags for the templates of this folder. Included only by isa_*.cpp (and through them).
#pragma once

namespace fr::cpu {

// kBytes: one register. kAccumulators: how many hold a tile of sums while operands pass through the rest. kTileVectors: registers
// that such a tile may be wide. 3 rows of 4 take a register more than AVX2's 16 leave, so that each row reads one of the weights from
// memory again; 6 rows of 2 need 8 loads for 12 multiply-adds, not 9, and half as many bytes of weights from L2.
// kDepthBlock: operands of a row that a tile takes at a time. AVX2: a slice of 64 bytes each is 16 KiB, which stay in an L1 of 32
// while the groups of rows pass; the others: 128 KiB in L2. kL2Bytes: of a core that has this set and no better one.
// kNativeBFloat16: products of bfloat16 pairs in one instruction (vdpbf16ps), so that operands stay in 16 bit.
// kUnpacksLines: weights that are used once, and are many or have rows that share a set of L1, are read a line of each row at a time.
// Baseline: SSE2 with its 16 registers, or on arm64 NEON with 32.
#if defined(__aarch64__)
inline constexpr int kBaselineAccumulators = 24;
#else
inline constexpr int kBaselineAccumulators = 8;
#endif
struct Baseline {
  static constexpr int kBytes = 16, kAccumulators = kBaselineAccumulators, kTileVectors = 4, kDepthBlock = 512, kL2Bytes = 1 << 20;
  static constexpr bool kNativeBFloat16 = false, kUnpacksLines = false;
};
struct Avx2 {
  static constexpr int kBytes = 32, kAccumulators = 12, kTileVectors = 3, kDepthBlock = 256, kL2Bytes = 512 << 10;
  static constexpr bool kNativeBFloat16 = false, kUnpacksLines = true;
};
struct Avx512 {
  static constexpr int kBytes = 64, kAccumulators = 24, kTileVectors = 4, kDepthBlock = 512, kL2Bytes = 1 << 20;
  static constexpr bool kNativeBFloat16 = false, kUnpacksLines = false;
};
struct Avx512BFloat16 {
  static constexpr int kBytes = 64, kAccumulators = 24, kTileVectors = 4, kDepthBlock = 512, kL2Bytes = 1 << 20;
  static constexpr bool kNativeBFloat16 = true, kUnpacksLines = false;
};

}  // namespace fr::cpu
