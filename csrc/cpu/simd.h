// Vectors of the CPU backend: GCC/Clang vector extensions behind one small type, tagged by instruction set so that code
// compiled for one is never linked into another (every function here is a template over, or takes, a tagged vector type).
// Included only by isa_*.cpp, which define exactly one Isa each. Accuracy of the functions is at their definitions; a test
// (tests/cpp/cpu_test.cpp) holds it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../cells/cell.h"
#include "storage.h"

namespace fr::cpu {

template <class T>
struct IntegerOf;
template <>
struct IntegerOf<float> { using type = int32_t; };
template <>
struct IntegerOf<double> { using type = int64_t; };

template <class T, int kBytes>
struct RawVector {
  typedef T type __attribute__((vector_size(kBytes)));
};

// T: float or double; kLanes of them fill one register of the instruction set.
template <class T, class Isa>
struct Vec {
  static constexpr int kLanes = Isa::kBytes / static_cast<int>(sizeof(T));
  using Lane = T;
  using IsaTag = Isa;
  using Integer = typename IntegerOf<T>::type;
  using Raw = typename RawVector<T, Isa::kBytes>::type;
  using RawInteger = typename RawVector<Integer, Isa::kBytes>::type;

  Raw raw;

  Vec() = default;
  Vec(Raw value) : raw(value) {}
  explicit Vec(T value) : raw(value - Raw{}) {}
  explicit Vec(int value) : raw(static_cast<T>(value) - Raw{}) {}

  friend Vec operator+(Vec a, Vec b) { return a.raw + b.raw; }
  friend Vec operator-(Vec a, Vec b) { return a.raw - b.raw; }
  friend Vec operator*(Vec a, Vec b) { return a.raw * b.raw; }
  friend Vec operator/(Vec a, Vec b) { return a.raw / b.raw; }
};

// ---- memory: storage type S <-> vector; n < kLanes touches only the first n elements (the rest read as zero) ----------

template <class V, class S>
inline V load_full(const S* p) {
  using T = typename V::Lane;
  if constexpr (std::is_same_v<S, T>) {
    typename V::Raw raw;
    std::memcpy(&raw, p, sizeof raw);
    return raw;
#if defined(__AVX512F__)
  } else if constexpr (std::is_same_v<S, BFloat16>) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return V(reinterpret_cast<typename V::Raw>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)));
  } else if constexpr (std::is_same_v<S, Float16>) {
    return V(reinterpret_cast<typename V::Raw>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
#elif defined(__AVX2__)
  } else if constexpr (std::is_same_v<S, BFloat16>) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return V(reinterpret_cast<typename V::Raw>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
  } else if constexpr (std::is_same_v<S, Float16>) {
    return V(reinterpret_cast<typename V::Raw>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#endif
  } else {
    typename V::Raw raw;
    for (int lane = 0; lane < V::kLanes; ++lane) raw[lane] = to_float(p[lane]);
    return raw;
  }
}

template <class V, class S>
inline void store_full(S* p, V v) {
  using T = typename V::Lane;
  if constexpr (std::is_same_v<S, T>) {
    std::memcpy(p, &v.raw, sizeof v.raw);
#if defined(__AVX512BF16__)
  } else if constexpr (std::is_same_v<S, BFloat16> && V::IsaTag::kNativeBFloat16) {
    // Rounds to nearest even, like storage.h; unlike it, flushes results below 2^-126 to zero.
    const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v.raw));
    std::memcpy(p, &rounded, sizeof rounded);
#endif
#if defined(__AVX512F__)
  } else if constexpr (std::is_same_v<S, Float16>) {
    const __m256i half = _mm512_cvtps_ph(reinterpret_cast<__m512>(v.raw), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(p, &half, sizeof half);
#elif defined(__AVX2__)
  } else if constexpr (std::is_same_v<S, Float16>) {
    const __m128i half = _mm256_cvtps_ph(reinterpret_cast<__m256>(v.raw), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(p, &half, sizeof half);
#endif
  } else {
    for (int lane = 0; lane < V::kLanes; ++lane) from_float(p[lane], v.raw[lane]);
  }
}

template <class V, class S>
inline V load(const S* p, int n) {
  if (n >= V::kLanes) return load_full<V>(p);
  S buffer[V::kLanes] = {};
  for (int lane = 0; lane < n; ++lane) buffer[lane] = p[lane];
  return load_full<V>(buffer);
}

template <class V, class S>
inline void store(S* p, V v, int n) {
  if (n >= V::kLanes) return store_full(p, v);
  S buffer[V::kLanes];
  store_full(buffer, v);
  for (int lane = 0; lane < n; ++lane) p[lane] = buffer[lane];
}

// ---- the functions the cells need (contract in cells/cell.h) -----------------------------------------------------------

template <class T, class Isa>
inline Vec<T, Isa> fr_max(Vec<T, Isa> a, Vec<T, Isa> b) {
  return {a.raw > b.raw ? a.raw : b.raw};
}
template <class T, class Isa>
inline Vec<T, Isa> fr_min(Vec<T, Isa> a, Vec<T, Isa> b) {
  return {a.raw < b.raw ? a.raw : b.raw};
}
template <class T, class Isa>
inline Vec<T, Isa> fr_if_less(Vec<T, Isa> a, Vec<T, Isa> b, Vec<T, Isa> yes, Vec<T, Isa> no) {
  return {a.raw < b.raw ? yes.raw : no.raw};
}

// a / b to within 1 ulp, for b in [1, 2^127): a division costs as much as six of the other operations here.
template <class T, class Isa>
inline Vec<T, Isa> quotient(Vec<T, Isa> a, Vec<T, Isa> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    using Raw = typename Vec<T, Isa>::Raw;
    const Vec<T, Isa> r{reinterpret_cast<Raw>(_mm512_rcp14_ps(reinterpret_cast<__m512>(b.raw)))};
    const Vec<T, Isa> q = a * r;
    const Vec<T, Isa> one(1);
    // q + q*(1 - b*r): the reciprocal's relative error 2^-14 squares away.
    return q + q * (one - b * r);
  }
#endif
  return a / b;
}

// 2^t - 1 = scale*tail + (scale - 1) with t = x*log2(e) = n + f, |f| <= 1/2, scale = 2^n, tail = 2^f - 1 = f*q(f).
// The tail keeps full relative accuracy near zero. Coefficients: minimax (Remez) fits of (2^f - 1)/f on [-1/2, 1/2], of relative
// error 1.1e-8 (float, degree 5) and 1.8e-17 (double, degree 10). x must lie in [-87, 87] (float) or [-700, 700] (double).
template <class V>
struct Exponential {
  V scale, tail;
};

template <class Isa>
inline Exponential<Vec<float, Isa>> exponential(Vec<float, Isa> x) {
  using V = Vec<float, Isa>;
  // Adding 1.5*2^23 rounds to an integer and leaves it in the low bits.
  const V magic(12582912.0f);
  const V shifted = x * V(1.442695040888963f) + magic;
  const V n = shifted - magic;
  const V f = (x * V(1.4426950216293335f) - n) + x * V(1.92596299113e-8f);
  V q(0x1.4308fap-13f);
  q = q * f + V(0x1.5f07b4p-10f);
  q = q * f + V(0x1.3b2ba0p-7f);
  q = q * f + V(0x1.c6af6ep-5f);
  q = q * f + V(0x1.ebfbdep-3f);
  q = q * f + V(0x1.62e430p-1f);
  using RawInteger = typename V::RawInteger;
  const RawInteger bits = (reinterpret_cast<RawInteger>(shifted.raw) << 23) + 0x3f800000;
  return {V(reinterpret_cast<typename V::Raw>(bits)), f * q};
}

template <class Isa>
inline Exponential<Vec<double, Isa>> exponential(Vec<double, Isa> x) {
  using V = Vec<double, Isa>;
  const V magic(6755399441055744.0);  // 1.5*2^52
  const V shifted = x * V(1.4426950408889634) + magic;
  const V n = shifted - magic;
  const V f = (x * V(1.4426950408889634) - n) + x * V(2.0355273740931e-17);
  V q(4.4455372281544427333e-10);
  q = q * f + V(7.0725617019303205134e-9);
  q = q * f + V(1.0178121299165704425e-7);
  q = q * f + V(1.321544272423112757e-6);
  q = q * f + V(0.000015252733701214656492);
  q = q * f + V(0.00015403530441480679921);
  q = q * f + V(0.0013333558146531632859);
  q = q * f + V(0.0096181291076070656693);
  q = q * f + V(0.055504108664821236534);
  q = q * f + V(0.24022650695910097888);
  q = q * f + V(0.6931471805599453112);
  using RawInteger = typename V::RawInteger;
  const RawInteger bits = (reinterpret_cast<RawInteger>(shifted.raw) << 52) + 0x3ff0000000000000;
  return {V(reinterpret_cast<typename V::Raw>(bits)), f * q};
}

// 1 / (1 + e^-x), within 2 ulp in float for |x| < 87; beyond, 0 or 1 to within 2^-125.
template <class T, class Isa>
inline Vec<T, Isa> fr_sigmoid(Vec<T, Isa> x) {
  using V = Vec<T, Isa>;
  const V bound(std::is_same_v<T, float> ? T(87) : T(700));
  const auto e = exponential(fr_max(V(0) - bound, fr_min(bound, V(0) - x)));
  return quotient(V(1), (e.scale + V(1)) + e.scale * e.tail);
}

// (e^2x - 1) / (e^2x + 1), within 2 ulp in float; exactly odd up to rounding, accurate near zero.
template <class T, class Isa>
inline Vec<T, Isa> fr_tanh(Vec<T, Isa> x) {
  using V = Vec<T, Isa>;
  const V bound(std::is_same_v<T, float> ? T(20) : T(40));  // tanh(10) rounds to 1 in float, tanh(20) in double
  const auto e = exponential(fr_max(V(0) - bound, fr_min(bound, x + x)));
  const V minus_one = (e.scale - V(1)) + e.scale * e.tail;
  return quotient(minus_one, minus_one + V(2));
}

}  // namespace fr::cpu
