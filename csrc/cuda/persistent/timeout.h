// The timeout report of a persistent kernel: a block that stops waiting packs who waited, and where, into one 64-bit
// word. One word, so that the host never sees it half written. The kernel writes it to pinned memory (Run::status); the
// next call reads it.
#pragma once

#include <cstdint>

#include "../../cells/cell.h"

namespace fr {

struct TimeoutReport {
  bool backward;
  int direction, phase;  // each 0 or 1
  int group, block;      // group within the direction, block within the group
  int64_t step;          // t, or -1: the extra iteration for the initial state
};

FR_HD unsigned long long status_of(const TimeoutReport& g) {
  const auto bits = [](int64_t value, int at) { return static_cast<unsigned long long>(value) << at; };
  return bits(1, 63) | bits(g.backward, 62) | bits(g.direction, 61) | bits(g.phase, 60) | bits(g.group, 48) |
         bits(g.block, 36) | bits(g.step + 1, 0);
}
inline TimeoutReport report_of(unsigned long long status) {
  const auto bits = [&](int at, int count) { return static_cast<int64_t>(status >> at & ((1ull << count) - 1)); };
  return {bits(62, 1) != 0, static_cast<int>(bits(61, 1)), static_cast<int>(bits(60, 1)),
      static_cast<int>(bits(48, 12)), static_cast<int>(bits(36, 12)), bits(0, 36) - 1};
}

// If an earlier call timed out, clears the word and throws std::runtime_error.
void raise_if_timed_out(unsigned long long* status, unsigned long long nanoseconds);

}  // namespace fr
