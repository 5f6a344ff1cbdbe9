// Philox4x32-7, a counter-based generator (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1,
// 2, 3", https://doi.org/10.1145/2063384.2063405). Four random words are a function of a counter of four words and a
// key of two, so any word can be computed anywhere, in any order, as often as needed. Seven rounds are the fewest that
// pass TestU01's BigCrush there; generators for general use take ten, to be on the safe side.
#pragma once

#include <cstdint>

#include "cell.h"

namespace fr {

constexpr int kPhiloxRounds = 7;

// The keys of a round, computed as the rounds go.
struct PhiloxKeys {
  uint32_t first, second;
  FR_HD void next() { first += 0x9E3779B9u, second += 0xBB67AE85u; }
};

// Lanes: words of one counter or of several. `Lanes::Word` holds them; its bits beyond 32 have no meaning.
// multiply(word, by, high, low) gives both halves of the products with a constant. Keys: as PhiloxKeys.
template <class Lanes, class Keys>
FR_HD void philox(typename Lanes::Word (&counter)[4], Keys keys) {
#if defined(__CUDA_ARCH__)
#pragma unroll 1  // every cell of every kernel has a copy: keep it small
#elif !defined(__CUDACC__)
#pragma GCC unroll 7
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    typename Lanes::Word high[2], low[2];
    Lanes::multiply(counter[0], 0xD2511F53u, high[0], low[0]);
    Lanes::multiply(counter[2], 0xCD9E8D57u, high[1], low[1]);
    counter[0] = high[1] ^ (counter[1] ^ keys.first);
    counter[1] = low[1];
    counter[2] = high[0] ^ (counter[3] ^ keys.second);
    counter[3] = low[0];
    keys.next();
  }
}
template <class Lanes>
FR_HD void philox(typename Lanes::Word (&counter)[4], uint32_t key0, uint32_t key1) {
  philox<Lanes>(counter, PhiloxKeys{key0, key1});
}

struct OneCounter {
  using Word = uint32_t;
  FR_HD static void multiply(Word a, uint32_t by, Word& high, Word& low) {
    const uint64_t product = static_cast<uint64_t>(a) * by;
    high = static_cast<uint32_t>(product >> 32), low = static_cast<uint32_t>(product);
  }
};

}  // namespace fr
