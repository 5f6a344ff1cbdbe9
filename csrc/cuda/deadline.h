// What a block that has given up waiting for others tells the host: one word, so that it is always whole. Written by the
// persistent kernels to pinned memory (Run::status), read by the next call.
#pragma once

#include <cstdint>

#include "../cells/cell.h"

namespace fr {

struct GivenUp {
  bool backward;
  int direction, phase;  // 0 or 1 each
  int group, block;      // of the direction; of the group
  int64_t step;          // t, or -1: the state before the first step
};

FR_HD unsigned long long status_of(const GivenUp& g) {
  const auto bits = [](int64_t value, int at) { return static_cast<unsigned long long>(value) << at; };
  return bits(1, 63) | bits(g.backward, 62) | bits(g.direction, 61) | bits(g.phase, 60) | bits(g.group, 48) | bits(g.block, 36) |
         bits(g.step + 1, 0);
}
inline GivenUp given_up(unsigned long long status) {
  const auto bits = [&](int at, int count) { return static_cast<int64_t>(status >> at & ((1ull << count) - 1)); };
  return {bits(62, 1) != 0, static_cast<int>(bits(61, 1)), static_cast<int>(bits(60, 1)), static_cast<int>(bits(48, 12)),
          static_cast<int>(bits(36, 12)), bits(0, 36) - 1};
}

// Throws std::runtime_error if a call before this one has given up, once: the word is 0 again.
void raise_if_given_up(unsigned long long* status, unsigned long long nanoseconds);

}  // namespace fr
