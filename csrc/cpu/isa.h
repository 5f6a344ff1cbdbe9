// The instruction sets: tags for the templates of this folder. Included only by isa_*.cpp (and through them).
#pragma once

namespace fr::cpu {

// kBytes: one register. kAccumulators: how many hold a tile of sums while operands pass through the rest.
// kNativeBFloat16: products of bfloat16 pairs in one instruction (vdpbf16ps), so that operands stay in 16 bit.
struct Baseline {
  static constexpr int kBytes = 16, kAccumulators = 8;
  static constexpr bool kNativeBFloat16 = false;
};
struct Avx2 {
  static constexpr int kBytes = 32, kAccumulators = 12;
  static constexpr bool kNativeBFloat16 = false;
};
struct Avx512 {
  static constexpr int kBytes = 64, kAccumulators = 24;
  static constexpr bool kNativeBFloat16 = false;
};
struct Avx512BFloat16 {
  static constexpr int kBytes = 64, kAccumulators = 24;
  static constexpr bool kNativeBFloat16 = true;
};

}  // namespace fr::cpu
