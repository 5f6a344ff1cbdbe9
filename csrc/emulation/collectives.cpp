// Collectives of a whole warp: shuffles, ldmatrix and mma.sync, computed from the parts that its lanes have deposited.
// Fragment layouts are those of the PTX manual, "Matrix fragments for mma.m16n8k16 with floating point type" and
// "mma.m16n8k8 (.tf32)":
//   groupID = lane / 4, t = lane % 4
//   C, D (16x8):  c0, c1 at row groupID, columns 2t, 2t+1;  c2, c3 at row groupID + 8
//   16 bit, A (16x16): a register holds two values; registers 0..3 at (groupID, 2t), (groupID+8, 2t), (groupID, 2t+8),
//                      (groupID+8, 2t+8)
//   16 bit, B (16x8):  registers 0, 1 at rows 2t, 2t+8 (and the next row), column groupID
//   TF32, A (16x8):    registers 0..3 at (groupID, t), (groupID+8, t), (groupID, t+4), (groupID+8, t+4)
//   TF32, B (8x8):     registers 0, 1 at rows t, t+4, column groupID
// Compiled without sanitizers, because it reads the lanes' stacks.
#include "../cuda/device.cuh"

namespace fr::FR_TARGET::emulated {
namespace {

constexpr int kLanes = 32;

using Decode = float (*)(uint16_t);
float decode_bf16(uint16_t bits) { return bits_to_float(static_cast<uint32_t>(bits) << 16); }

// D += A B over the depth, in float.
template <int kDepth>
void multiply(void** parts, const float (&a)[16][kDepth], const float (&b)[kDepth][8]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    float* d = static_cast<Mma*>(parts[lane])->d;
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + (i / 2) * 8, column = 2 * (lane % 4) + i % 2;
      float sum = d[i];
      for (int k = 0; k < kDepth; ++k) sum += a[row][k] * b[k][column];
      d[i] = sum;
    }
  }
}

void mma_16_bit(void** parts, Decode decode) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Mma& part = *static_cast<Mma*>(parts[lane]);
    const int group = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i)
      for (int half = 0; half < 2; ++half)
        a[group + i % 2 * 8][2 * t + i / 2 * 8 + half] = decode(static_cast<uint16_t>(part.a[i] >> (16 * half)));
    for (int i = 0; i < 2; ++i)
      for (int half = 0; half < 2; ++half)
        b[2 * t + i * 8 + half][group] = decode(static_cast<uint16_t>(part.b[i] >> (16 * half)));
  }
  multiply<16>(parts, a, b);
}

}  // namespace

void shuffle(void** parts) {
  for (int lane = 0; lane < kLanes; ++lane) {
    auto& part = *static_cast<Shuffle*>(parts[lane]);
    part.result = static_cast<Shuffle*>(parts[part.from & (kLanes - 1)])->value;
  }
}

void load_matrix(void** parts) {
  for (int lane = 0; lane < kLanes; ++lane)
    for (int matrix = 0; matrix < 4; ++matrix)
      static_cast<Matrix*>(parts[lane])->result[matrix] =
          static_cast<Matrix*>(parts[8 * matrix + lane / 4])->row[lane % 4];
}

void mma_bf16(void** parts) { mma_16_bit(parts, decode_bf16); }
void mma_fp16(void** parts) { mma_16_bit(parts, fp16_to_float); }

void mma_tf32(void** parts) {
  constexpr uint32_t kKept = 0xFFFFE000u;  // the hardware ignores the low 13 bits
  float a[16][8], b[8][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Mma& part = *static_cast<Mma*>(parts[lane]);
    const int group = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) a[group + i % 2 * 8][t + i / 2 * 4] = bits_to_float(part.a[i] & kKept);
    for (int i = 0; i < 2; ++i) b[t + i * 4][group] = bits_to_float(part.b[i] & kKept);
  }
  multiply<8>(parts, a, b);
}

float fp16_to_float(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value = exponent == 31 ? (mantissa ? NAN : INFINITY)
                : exponent     ? std::ldexp(1024.f + mantissa, exponent - 25)
                               : std::ldexp(float(mantissa), -24);
  return bits & 0x8000 ? -value : value;
}

uint16_t float_to_fp16(float value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const float magnitude = std::fabs(value);
  if (value != value) return 0x7FFF;
  if (magnitude >= 65520.f) return sign | 0x7C00;
  if (magnitude < 6.103515625e-05f) return sign | static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 24)));
  int exponent;
  const float fraction = std::frexp(magnitude, &exponent);                         // in [0.5, 1)
  const int rounded = static_cast<int>(std::nearbyint(std::ldexp(fraction, 11)));  // in [1024, 2048]
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + (rounded - 1024));
}

}  // namespace fr::FR_TARGET::emulated
