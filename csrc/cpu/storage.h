// The 16-bit storage types on the host: bit patterns and scalar conversions (round to nearest, ties to even), and the
// bounds of 8-bit weights. The conversions are static, so that each file has its own copy and one compiled for AVX-512
// is never linked into another.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace fr {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Prepared weights of 8 bits (quantised.h). Operands lie between -kLargest and kLargest. Of the four weights of a row
// whose products share a 16-bit sum (k, k+1, k+4 and k+5; k+2, k+3, k+6 and k+7; k a multiple of 8) the positive ones
// add up to at most kGroupSum, the negative ones to at least -kGroupSum: then the sum fits for any operands.
struct Int8 {
  static constexpr int kLargest = 100, kGroupSum = INT16_MAX / (2 * kLargest);
  static constexpr int64_t kMostDepth = 1 << 18;  // the sums of deeper products might leave 32 bits
};
static_assert(Int8::kMostDepth / 4 * 2 * Int8::kGroupSum * Int8::kLargest <= INT32_MAX);

// The type of pre-activations, states and sums for a storage type.
template <class S>
using StateOf = std::conditional_t<std::is_same_v<S, double>, double, float>;

static inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
static inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float to_float(float value) { return value; }
static inline double to_float(double value) { return value; }
static inline float to_float(BFloat16 value) { return float_from_bits(uint32_t{value.bits} << 16); }

static inline float to_float(Float16 value) {
  const uint32_t sign = uint32_t{value.bits & 0x8000u} << 16;
  const uint32_t magnitude = value.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);  // Inf, NaN
  if (magnitude >= 0x0400u) return float_from_bits(sign | ((magnitude << 13) + (112u << 23)));
  const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -subnormal : subnormal;
}

static inline void from_float(float& to, float value) { to = value; }
static inline void from_float(double& to, double value) { to = value; }
static inline void from_float(BFloat16& to, float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    to.bits = static_cast<uint16_t>(bits >> 16 | 0x40u);  // stays a NaN when the low half of the payload is lost
    return;
  }
  to.bits = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
static inline void from_float(Float16& to, float value) {
  const uint32_t bits = bits_of(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) to.bits = sign | 0x7e00u;
  else if (magnitude >= 0x477ff000u) to.bits = sign | 0x7c00u;  // 65520 and above round to Inf
  else if (magnitude >= 0x38800000u) {                          // normal: 2^-14 and above
    to.bits = static_cast<uint16_t>(sign | ((magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13));
  } else {
    // Subnormal: after adding 0.5 the unit 2^-24 is the sum's last bit, so the addition itself rounds to nearest even.
    const float sum = float_from_bits(magnitude) + 0.5f;
    to.bits = static_cast<uint16_t>(sign | (bits_of(sum) - bits_of(0.5f)));
  }
}

}  // namespace fr
