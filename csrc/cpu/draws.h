// The random words of noise (contract in cells/noise.h) for vectors of units, drawn a few vectors at a time before the
// pointwise code that uses them. The rounds of Philox depend on each other, so one vector alone would leave the
// processor waiting; two keep it busy.
#pragma once

#include "../cells/noise.h"
#include "simd.h"

namespace fr::cpu {

// Counters of two vectors, one in each 64-bit lane, as the multiply instructions need them.
template <class Isa>
struct TwoVectors {
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
};

}  // namespace fr::cpu

namespace fr {

template <class T, class Isa>
struct Draws<cpu::Vec<T, Isa>> {
  using V = cpu::Vec<T, Isa>;
  using Integer = typename V::Integer;

  typename V::RawInteger word[2]{};

  V if_below(int i, uint32_t bound, V yes, V no) const {
    if constexpr (sizeof(T) == 8) return {word[i] < static_cast<Integer>(bound) ? yes.raw : no.raw};
    else return {(word[i] ^ INT32_MIN) < static_cast<Integer>(bound ^ 0x80000000u) ? yes.raw : no.raw};
  }
};

template <class T, class Isa>
struct NoiseSource<cpu::Vec<T, Isa>> {
  Draws<cpu::Vec<T, Isa>> of_states, of_candidates;
  const Draws<cpu::Vec<T, Isa>>& states(uint64_t) const { return of_states; }
  const Draws<cpu::Vec<T, Isa>>& candidates(uint64_t) const { return of_candidates; }
};

}  // namespace fr

namespace fr::cpu {

template <class V>
class Drawer {
 public:
  Drawer(const NoiseParams& noise, bool has_candidate)
      : states_(noise.on && noise.seed && (noise.below_h > 0 || noise.below_c > 0)),
        candidates_(noise.on && noise.seed && has_candidate && noise.below_candidate > 0) {
    if (!states_ && !candidates_) return;
    PhiloxKeys keys{static_cast<uint32_t>(*noise.seed), static_cast<uint32_t>(*noise.seed >> 32)};
    for (uint64_t* to = keys_; to < keys_ + 20; to += 2, keys.next()) to[0] = keys.first, to[1] = keys.second;
  }

  // Calls each(i, its words) for i in [0, count). place(i): of the first of the i-th vector's units, which is even.
  template <class Place, class Each>
  void for_each(int64_t count, Place place, Each each) const {
    NoiseSource<V> words[kAtOnce];
    NoisePlace places[kAtOnce];
    for (int64_t first = 0; first < count; first += kAtOnce) {
      const int n = count - first < kAtOnce ? static_cast<int>(count - first) : kAtOnce;
      if (states_ || candidates_) {
        for (int i = 0; i < n; ++i) places[i] = place(first + i);
        for (int i = n; i % 2; ++i) places[i] = places[n - 1];
        draw(places, n, words);
      }
      for (int i = 0; i < n; ++i) each(first + i, words[i]);
    }
  }

 private:
  using Raw = typename TwoVectors<typename V::IsaTag>::Raw;
  static constexpr int kAtOnce = 8, kCounters = sizeof(Raw) / 8;
  // In float the two units of a counter share its 64-bit lane; in double they are neighbouring lanes, with a copy of
  // the counter each.
  static constexpr bool kShared = sizeof(typename V::Lane) == 4;

  uint64_t keys_[22];  // of the ten rounds; the last two are read, but not used
  const bool states_, candidates_;

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
    for (int i = 0; i < count; i += 2) {
      if (states_) draw_two(places + i, 0, words[i].of_states, words[i + 1].of_states);
      if (candidates_) draw_two(places + i, kCandidateStream, words[i].of_candidates, words[i + 1].of_candidates);
    }
  }
  void draw_two(const NoisePlace* places, uint32_t stream, Draws<V>& first, Draws<V>& second) const {
    static constexpr auto offset = lanes([](uint64_t lane) { return kShared ? lane : lane / 2; });
    [[maybe_unused]] static constexpr auto odd_lanes = lanes([](uint64_t lane) { return lane % 2 ? ~uint64_t{0} : 0; });
    const Raw zero{}, odd = raw(odd_lanes);
    typename TwoVectors<typename V::IsaTag>::Word counter[4];
    for (int i = 0; i < 2; ++i) {
      counter[0].of[i] = raw(offset) + places[i].unit / 2;
      counter[1].of[i] = zero + places[i].row;
      counter[2].of[i] = zero + places[i].step;
      counter[3].of[i] = zero + (places[i].direction | stream);
    }
    philox<TwoVectors<typename V::IsaTag>>(counter, StoredKeys{keys_});
    for (int i = 0; i < 2; ++i)
      for (int word = 0; word < 2; ++word) {
        const Raw even_unit = counter[word].of[i], odd_unit = counter[2 + word].of[i], low = zero + 0xFFFFFFFFu;
        const Raw both = kShared ? (even_unit & low) | odd_unit << 32 : ((even_unit & ~odd) | (odd_unit & odd)) & low;
        (i ? second : first).word[word] = reinterpret_cast<typename V::RawInteger>(both);
      }
  }
};

}  // namespace fr::cpu
