// The random words of noise (contract in cells/noise.h) for vectors of units, drawn a few vectors at a time before the
// pointwise code that uses them. The rounds of Philox depend on each other, so the counters of one register alone would
// leave the processor waiting; those of two keep it busy.
#pragma once

#include "../cells/noise.h"
#include "simd.h"

namespace fr::cpu {

// Counters in the 64-bit lanes of two registers, as the multiply instructions need them.
template <class Isa>
struct TwoRegisters {
  using Raw = typename RawVector<uint64_t, Isa::kBytes>::type;
  struct Word {
    Raw of[2];
    friend Word operator^(const Word& a, const Word& b) { return {a.of[0] ^ b.of[0], a.of[1] ^ b.of[1]}; }
    friend Word operator^(const Word& a, uint64_t key) { return {a.of[0] ^ (Raw{} + key), a.of[1] ^ (Raw{} + key)}; }
  };
  static void multiply(const Word& a, uint32_t by, Word& high, Word& low) {
    for (int i = 0; i < 2; ++i) {
      low.of[i] = product(a.of[i], by);
      high.of[i] = low.of[i] >> 32;
    }
  }
  static Raw product(Raw a, uint32_t by) {
#if defined(__AVX512F__)
    return reinterpret_cast<Raw>(_mm512_mul_epu32(reinterpret_cast<__m512i>(a), _mm512_set1_epi64(by)));
#elif defined(__AVX2__)
    return reinterpret_cast<Raw>(_mm256_mul_epu32(reinterpret_cast<__m256i>(a), _mm256_set1_epi64x(by)));
#elif defined(__SSE2__)
    return reinterpret_cast<Raw>(_mm_mul_epu32(reinterpret_cast<__m128i>(a), _mm_set1_epi64x(by)));
#elif defined(__aarch64__)
    return reinterpret_cast<Raw>(vmull_n_u32(vmovn_u64(reinterpret_cast<uint64x2_t>(a)), by));
#else
    return (a & 0xFFFFFFFFu) * by;
#endif
  }
  // Turns the lanes a0 a1 a2 a3 and b0 b1 b2 b3 into a0 b0 a2 b2 and a1 b1 a3 b3.
  static void interleave(Raw& a, Raw& b) {
#if defined(__AVX512F__)
    const __m512i x = reinterpret_cast<__m512i>(a), y = reinterpret_cast<__m512i>(b);
    a = reinterpret_cast<Raw>(_mm512_unpacklo_epi64(x, y)), b = reinterpret_cast<Raw>(_mm512_unpackhi_epi64(x, y));
#elif defined(__AVX2__)
    const __m256i x = reinterpret_cast<__m256i>(a), y = reinterpret_cast<__m256i>(b);
    a = reinterpret_cast<Raw>(_mm256_unpacklo_epi64(x, y)), b = reinterpret_cast<Raw>(_mm256_unpackhi_epi64(x, y));
#elif defined(__SSE2__)
    const __m128i x = reinterpret_cast<__m128i>(a), y = reinterpret_cast<__m128i>(b);
    a = reinterpret_cast<Raw>(_mm_unpacklo_epi64(x, y)), b = reinterpret_cast<Raw>(_mm_unpackhi_epi64(x, y));
#else
    const Raw x = a, y = b;
    for (size_t lane = 0; lane < sizeof(Raw) / 8; lane += 2) a[lane + 1] = y[lane], b[lane] = x[lane + 1];
#endif
  }
};

}  // namespace fr::cpu

namespace fr {

template <class T, class Isa>
struct Draws<cpu::Vec<T, Isa>> {
  using V = cpu::Vec<T, Isa>;
  using Integer = typename V::Integer;

  typename V::RawInteger word{};

  V if_below(uint32_t bound, V yes, V no) const {
    if constexpr (sizeof(T) == 8) return {word < static_cast<Integer>(bound) ? yes.raw : no.raw};
    else return {(word ^ INT32_MIN) < static_cast<Integer>(bound ^ 0x80000000u) ? yes.raw : no.raw};
  }
};

template <class T, class Isa>
struct NoiseSource<cpu::Vec<T, Isa>> {
  Draws<cpu::Vec<T, Isa>> of[kKindsInKernels];
  const Draws<cpu::Vec<T, Isa>>& draw(NoiseKind kind, uint64_t) const { return of[kind]; }
};

}  // namespace fr

namespace fr::cpu {

// The place of the first of V's units.
template <class V>
NoisePlace noise_place(int64_t direction, int64_t t, int64_t b, int64_t unit) {
  const auto word = [](int64_t i) { return static_cast<uint32_t>(i); };
  return {word(unit), word(b), word(t), word(direction)};
}

// The noise of V's units from `unit` on in row b. mask: dropout of the state [B, width], or null.
template <class Cell, class V>
UnitNoise<V> noise_at(const NoiseParams& noise, const typename V::Lane* mask, int64_t width, int64_t b, int64_t unit,
    const NoiseSource<V>& words) {
  V factor(1);
  if constexpr (UnitNoise<V>::template kEntersHere<Cell>)
    if (mask) factor = load<V>(mask + b * width + unit, lanes_left<V>(width - unit));
  return {noise, words, factor};
}

template <class V>
class Drawer {
 public:
  explicit Drawer(const NoiseParams& noise)
      : draws_{noise.below_h > 0, noise.below_c > 0, noise.below_candidate > 0},
        draws_any_(noise.on && noise.seed && (draws_[kOfH] || draws_[kOfCells] || draws_[kOfCandidate])) {
    if (!draws_any_) return;
    PhiloxKeys keys{static_cast<uint32_t>(*noise.seed), static_cast<uint32_t>(*noise.seed >> 32)};
    for (int i = 0; i < kPhiloxRounds; ++i, keys.next()) keys_[2 * i] = keys.first, keys_[2 * i + 1] = keys.second;
  }

  // Calls each(i, its words) for i in [0, count). place(i): of the first unit of the i-th vector, a multiple of the
  // lanes; step and direction are the same for all.
  template <class Place, class Each>
  void for_each(int64_t count, Place place, Each each) const {
    NoiseSource<V> words[kAtOnce];
    NoisePlace places[kAtOnce];
    for (int64_t first = 0; first < count; first += kAtOnce) {
      const int n = count - first < kAtOnce ? static_cast<int>(count - first) : kAtOnce;
      if (draws_any_) {
        for (int i = 0; i < n; ++i) places[i] = place(first + i);
        for (int i = n; i % kTogether; ++i) places[i] = places[n - 1];
        draw(places, n, words);
      }
      for (int i = 0; i < n; ++i) each(first + i, words[i]);
    }
  }

 private:
  using Registers = TwoRegisters<typename V::IsaTag>;
  using Raw = typename Registers::Raw;
  // In float the words of a register's counters fill two vectors: its even lanes serve the first, its odd ones the
  // second. In double they serve one vector: each lane takes the word of its own unit and discards the counter's other
  // words.
  static constexpr bool kFloat = sizeof(typename V::Lane) == 4;
  static constexpr int kAtOnce = 8, kTogether = kFloat ? 4 : 2, kCounters = sizeof(Raw) / 8;

  uint64_t keys_[2 * kPhiloxRounds + 2];  // of each round; the last two are read, but not used
  const bool draws_[kKindsInKernels], draws_any_;

  struct StoredKeys {
    const uint64_t* at;
    uint64_t first = at[0], second = at[1];
    void next() { at += 2, first = at[0], second = at[1]; }
  };
  // Vectors of constants. Writing them lane by lane would store them in halves, from which a full load cannot be
  // forwarded.
  struct Lanes {
    alignas(sizeof(Raw)) uint64_t of[kCounters];
  };
  template <class Function>
  static constexpr Lanes lanes(Function function) {
    Lanes all{};
    for (int lane = 0; lane < kCounters; ++lane) all.of[lane] = function(lane);
    return all;
  }
  static Raw raw(const Lanes& lanes) {
    Raw found;
    std::memcpy(&found, lanes.of, sizeof found);
    return found;
  }

  __attribute__((noinline)) void draw(const NoisePlace* places, int count, NoiseSource<V>* words) const {
    for (int i = 0; i < count; i += kTogether)
      for (const NoiseKind kind : {kOfH, kOfCells, kOfCandidate})
        if (draws_[kind]) draw_together(places + i, kind, words + i);
  }
  void draw_together(const NoisePlace* places, NoiseKind kind, NoiseSource<V>* words) const {
    [[maybe_unused]] static constexpr auto numbers = lanes([](uint64_t lane) { return lane; });
    [[maybe_unused]] static constexpr auto halves = lanes([](uint64_t lane) { return lane / 2; });
    [[maybe_unused]] static constexpr auto odd_lanes = lanes([](uint64_t lane) { return lane % 2 ? ~uint64_t{0} : 0; });
    const Raw zero{}, low = zero + 0xFFFFFFFFu;
    [[maybe_unused]] const auto of_two = [&](uint32_t even, uint32_t odd) {
      return (zero + even) ^ ((zero + (even ^ odd)) & raw(odd_lanes));
    };
    // Neighbours in one row need fewer instructions.
    [[maybe_unused]] static constexpr auto counters_in_row =
        lanes([](uint64_t lane) { return lane / 2 + lane % 2 * (V::kLanes / 4); });
    const NoisePlace& last = places[kTogether - 1];
    const bool in_row =
        kFloat && last.row == places[0].row && last.unit == places[0].unit + (kTogether - 1) * V::kLanes;
    typename Registers::Word counter[4];
    for (int i = 0; i < 2; ++i) {
      if (in_row) {
        counter[0].of[i] = (zero + (places[0].unit / 4 + i * (V::kLanes / 2))) + raw(counters_in_row);
        counter[1].of[i] = zero + places[0].row;
      } else if constexpr (kFloat) {
        const NoisePlace &even = places[2 * i], &odd = places[2 * i + 1];
        counter[0].of[i] = of_two(even.unit / 4, odd.unit / 4) + raw(halves);
        counter[1].of[i] = of_two(even.row, odd.row);
      } else {
        counter[0].of[i] = (raw(numbers) + places[i].unit) >> 2;
        counter[1].of[i] = zero + places[i].row;
      }
      counter[2].of[i] = zero + places[0].step;
      counter[3].of[i] = zero + noise_stream(kind, places[0].direction);
    }
    philox<Registers>(counter, StoredKeys{keys_});
    for (int i = 0; i < 2; ++i) {
      const auto word = [&](int which) { return counter[which].of[i] & low; };
      const auto keep = [&](int vector, Raw found) {
        words[vector].of[kind].word = reinterpret_cast<typename V::RawInteger>(found);
      };
      if constexpr (kFloat) {
        Raw first = word(0) | word(1) << 32, second = word(2) | word(3) << 32;
        Registers::interleave(first, second);
        keep(2 * i, first), keep(2 * i + 1, second);
      } else {
        const Raw number = (raw(numbers) + places[i].unit) & 3;
        keep(i, number < 2 ? (number == 0 ? word(0) : word(1)) : (number == 2 ? word(2) : word(3)));
      }
    }
  }
};

}  // namespace fr::cpu
