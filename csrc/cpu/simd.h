// Vectors of the CPU backend: GCC/Clang vector extensions behind one small type. The type is tagged by instruction set,
// so that code compiled for one set is never linked into another; every function here is a template over a tagged
// vector type, or takes one. Included only by files that are compiled for one instruction set (isa.h). Accuracies are
// stated at the functions, and tested by tests/kernels/cpp/simd_test.cpp.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../cells/cell.h"
#include "storage.h"

namespace fr::cpu {

template <class T>
struct IntegerOf;
template <>
struct IntegerOf<float> {
  using type = int32_t;
};
template <>
struct IntegerOf<double> {
  using type = int64_t;
};

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

// ---- memory: storage type S <-> vector; n < kLanes touches only the first n elements (the rest read as zero) --------

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
    return V(
        reinterpret_cast<typename V::Raw>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))));
#elif defined(__AVX2__)
  } else if constexpr (std::is_same_v<S, BFloat16>) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return V(reinterpret_cast<typename V::Raw>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16)));
  } else if constexpr (std::is_same_v<S, Float16>) {
    return V(reinterpret_cast<typename V::Raw>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))));
#elif defined(__aarch64__)
  } else if constexpr (std::is_same_v<S, BFloat16>) {
    return V(reinterpret_cast<typename V::Raw>(vshll_n_u16(vld1_u16(&p->bits), 16)));
  } else if constexpr (std::is_same_v<S, Float16>) {
    return V(reinterpret_cast<typename V::Raw>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&p->bits)))));
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
    // Rounds to nearest even, as storage.h does, but flushes results below 2^-126 to zero.
    const __m256bh rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v.raw));
    std::memcpy(p, &rounded, sizeof rounded);
#endif
#if defined(__AVX512F__)
  } else if constexpr (std::is_same_v<S, Float16>) {
    const __m256i half =
        _mm512_cvtps_ph(reinterpret_cast<__m512>(v.raw), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(p, &half, sizeof half);
#elif defined(__AVX2__)
  } else if constexpr (std::is_same_v<S, Float16>) {
    const __m128i half =
        _mm256_cvtps_ph(reinterpret_cast<__m256>(v.raw), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    std::memcpy(p, &half, sizeof half);
#elif defined(__aarch64__)
  } else if constexpr (std::is_same_v<S, Float16>) {
    vst1_u16(&p->bits, vreinterpret_u16_f16(vcvt_f16_f32(reinterpret_cast<float32x4_t>(v.raw))));
#endif
  } else {
    for (int lane = 0; lane < V::kLanes; ++lane) from_float(p[lane], v.raw[lane]);
  }
}

// The number of lanes that `left` elements fill: at most all of a vector.
template <class V>
inline int lanes_left(int64_t left) {
  return left < V::kLanes ? static_cast<int>(left) : V::kLanes;
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

// ---- the functions that cells need (contract in cells/cell.h) -------------------------------------------------------

// b if either is NaN or both are zero, as x86's instructions have it. GCC 12 makes a comparison and a selection of
// a > b ? a : b.
template <class T, class Isa>
inline Vec<T, Isa> fr_max(Vec<T, Isa> a, Vec<T, Isa> b) {
  using Raw = typename Vec<T, Isa>::Raw;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>)
    return reinterpret_cast<Raw>(_mm512_max_ps(reinterpret_cast<__m512>(a.raw), reinterpret_cast<__m512>(b.raw)));
  else return reinterpret_cast<Raw>(_mm512_max_pd(reinterpret_cast<__m512d>(a.raw), reinterpret_cast<__m512d>(b.raw)));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>)
    return reinterpret_cast<Raw>(_mm256_max_ps(reinterpret_cast<__m256>(a.raw), reinterpret_cast<__m256>(b.raw)));
  else return reinterpret_cast<Raw>(_mm256_max_pd(reinterpret_cast<__m256d>(a.raw), reinterpret_cast<__m256d>(b.raw)));
#elif defined(__SSE2__)
  if constexpr (std::is_same_v<T, float>)
    return reinterpret_cast<Raw>(_mm_max_ps(reinterpret_cast<__m128>(a.raw), reinterpret_cast<__m128>(b.raw)));
  else return reinterpret_cast<Raw>(_mm_max_pd(reinterpret_cast<__m128d>(a.raw), reinterpret_cast<__m128d>(b.raw)));
#else
  return Raw(a.raw > b.raw ? a.raw : b.raw);
#endif
}
template <class T, class Isa>
inline Vec<T, Isa> fr_min(Vec<T, Isa> a, Vec<T, Isa> b) {
  using Raw = typename Vec<T, Isa>::Raw;
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>)
    return reinterpret_cast<Raw>(_mm512_min_ps(reinterpret_cast<__m512>(a.raw), reinterpret_cast<__m512>(b.raw)));
  else return reinterpret_cast<Raw>(_mm512_min_pd(reinterpret_cast<__m512d>(a.raw), reinterpret_cast<__m512d>(b.raw)));
#elif defined(__AVX2__)
  if constexpr (std::is_same_v<T, float>)
    return reinterpret_cast<Raw>(_mm256_min_ps(reinterpret_cast<__m256>(a.raw), reinterpret_cast<__m256>(b.raw)));
  else return reinterpret_cast<Raw>(_mm256_min_pd(reinterpret_cast<__m256d>(a.raw), reinterpret_cast<__m256d>(b.raw)));
#elif defined(__SSE2__)
  if constexpr (std::is_same_v<T, float>)
    return reinterpret_cast<Raw>(_mm_min_ps(reinterpret_cast<__m128>(a.raw), reinterpret_cast<__m128>(b.raw)));
  else return reinterpret_cast<Raw>(_mm_min_pd(reinterpret_cast<__m128d>(a.raw), reinterpret_cast<__m128d>(b.raw)));
#else
  return Raw(a.raw < b.raw ? a.raw : b.raw);
#endif
}
template <class T, class Isa>
inline Vec<T, Isa> fr_if_less(Vec<T, Isa> a, Vec<T, Isa> b, Vec<T, Isa> yes, Vec<T, Isa> no) {
  return {a.raw < b.raw ? yes.raw : no.raw};
}

// a / b to within 1 ulp, for b in [1, 2^126). A division instruction would cost as much as six of the operations used
// instead.
template <class T, class Isa>
inline Vec<T, Isa> quotient(Vec<T, Isa> a, Vec<T, Isa> b) {
#if defined(__AVX512F__)
  if constexpr (std::is_same_v<T, float>) {
    using Raw = typename Vec<T, Isa>::Raw;
    const Vec<T, Isa> r{reinterpret_cast<Raw>(_mm512_rcp14_ps(reinterpret_cast<__m512>(b.raw)))};
    const Vec<T, Isa> q = a * r;
    // The remainder a - b*q is exact up to one rounding; the reciprocal's relative error 2^-14 is squared away.
    return q + r * (a - b * q);
  }
#endif
  return a / b;
}

// e^x - 1 = scale*tail + (scale - 1) with x = n*ln2 + r, |r| <= ln2/2, scale = 2^n, tail = e^r - 1 = r + r^2 p(r),
// which keeps the tail's relative accuracy near zero. n*ln2 is subtracted in two parts, the first exact (Cody and Waite
// 1980). Coefficients: minimax (Remez) fits of p; relative error of the tail 1.7e-8 (float) and 3.4e-19 (double). x
// must lie in [-87, 87] (float) or [-700, 700] (double). Rough: x = (n + f) ln2, and the tail 2^f - 1 within 4.4e-4 of
// itself. So sigmoid is within 5e-5, tanh within 6e-4 of itself, and both go to 0, 1 and -1 as fast as the exact ones.
template <class V>
struct Exponential {
  V scale, tail;
};

template <class Isa>
inline Exponential<Vec<float, Isa>> exponential(Vec<float, Isa> x) {
  using V = Vec<float, Isa>;
  // Adding 1.5*2^23 rounds to an integer and leaves it in the low bits.
  const V magic(12582912.0f);
  const V shifted = x * V(0x1.715476p+0f) + magic;
  const V n = shifted - magic;
  using RawInteger = typename V::RawInteger;
  const RawInteger bits = (reinterpret_cast<RawInteger>(shifted.raw) << 23) + 0x3f800000;
  const V scale(reinterpret_cast<typename V::Raw>(bits));
  if constexpr (Isa::kRough) {
    const V f = x * V(0x1.715476p+0f) - n;
    return {scale, f * (V(0x1.62e846p-1f) + f * (V(0x1.efacd8p-3f) + f * V(0x1.c6affep-5f)))};
  }
  const V r = (x - n * V(0x1.62e4p-1f)) - n * V(0x1.7f7d1cp-20f);
  V p(0x1.6d9508p-10f);
  p = p * r + V(0x1.122554p-7f);
  p = p * r + V(0x1.55548cp-5f);
  p = p * r + V(0x1.5554b4p-3f);
  p = p * r + V(0.5f);
  return {scale, r + r * r * p};
}

template <class Isa>
inline Exponential<Vec<double, Isa>> exponential(Vec<double, Isa> x) {
  using V = Vec<double, Isa>;
  const V magic(6755399441055744.0);  // 1.5*2^52
  const V shifted = x * V(1.4426950408889634) + magic;
  const V n = shifted - magic;
  const V r = (x - n * V(0x1.62e42fefa3p-1)) - n * V(0x1.3de6af278ece6p-42);
  V p(2.09240382408255172e-9);
  p = p * r + V(2.5108523804282842984e-8);
  p = p * r + V(2.7557244291377956734e-7);
  p = p * r + V(2.7557245798181329208e-6);
  p = p * r + V(0.000024801587358404978187);
  p = p * r + V(0.0001984126988440343876);
  p = p * r + V(0.0013888888888868199624);
  p = p * r + V(0.0083333333333223865977);
  p = p * r + V(0.041666666666666697681);
  p = p * r + V(0.16666666666666675494);
  p = p * r + V(0.5);
  using RawInteger = typename V::RawInteger;
  const RawInteger bits = (reinterpret_cast<RawInteger>(shifted.raw) << 52) + 0x3ff0000000000000;
  return {V(reinterpret_cast<typename V::Raw>(bits)), r + r * r * p};
}

// e^x for x <= 0, within 2 ulp down to e^-87 (double: e^-700), and that value below.
template <class T, class Isa>
inline Vec<T, Isa> fr_exp(Vec<T, Isa> x) {
  using V = Vec<T, Isa>;
  const auto e = exponential(fr_max(V(std::is_same_v<T, float> ? T(-87) : T(-700)), x));
  return e.scale + e.scale * e.tail;
}

// log(1 / (1 + e^-x)) = min(x, 0) - log(1 + e^-|x|), and log(1 + y) = 2 artanh(s) with s = y / (2 + y) <= 1/3. The
// first omitted term of the series is below 2^-27 (double: 2^-56) of its first term.
template <class T, class Isa>
inline Vec<T, Isa> fr_log_sigmoid(Vec<T, Isa> x) {
  using V = Vec<T, Isa>;
  const V y = fr_exp(fr_min(V(0) - x, x)), s = y / (y + V(2)), square = s * s;
  constexpr int kTerms = std::is_same_v<T, float> ? 8 : 17;
  V series(T(1) / (2 * kTerms - 1));
  for (int k = kTerms - 2; k >= 0; --k) series = series * square + V(T(1) / (2 * k + 1));
  return fr_min(V(0), x) - V(2) * s * series;
}

// 1 / (1 + e^-x), within 2.3 ulp for |x| < 87 (float) or 700 (double); beyond, 0 or 1 to within 2^-125 (2^-1000).
template <class T, class Isa>
inline Vec<T, Isa> fr_sigmoid(Vec<T, Isa> x) {
  using V = Vec<T, Isa>;
  const V bound(std::is_same_v<T, float> ? T(87) : T(700));
  const auto e = exponential(fr_max(V(0) - bound, fr_min(bound, V(0) - x)));
  return quotient(V(1), (e.scale + V(1)) + e.scale * e.tail);
}

// (e^2x - 1) / (e^2x + 1), within 2.6 ulp, near zero too.
template <class T, class Isa>
inline Vec<T, Isa> fr_tanh(Vec<T, Isa> x) {
  using V = Vec<T, Isa>;
  const V bound(std::is_same_v<T, float> ? T(20) : T(40));  // tanh(10) rounds to 1 in float, tanh(20) in double
  const auto e = exponential(fr_max(V(0) - bound, fr_min(bound, x + x)));
  const V minus_one = (e.scale - V(1)) + e.scale * e.tail;
  return quotient(minus_one, minus_one + V(2));
}

}  // namespace fr::cpu
