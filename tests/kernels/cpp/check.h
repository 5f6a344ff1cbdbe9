// Shared by the C++ tests: checks that count and report failures, and a small random number generator.
#pragma once

#include <cstdint>
#include <cstdio>

inline int failures = 0;

#define CHECK(condition, ...) \
  do { \
    if (!(condition)) { \
      ++failures; \
      std::printf("%s:%d: %s  ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__); \
      std::printf("\n"); \
    } \
  } while (false)

struct Random {
  uint64_t state = 88172645463325252ull;
  uint64_t bits() {  // xorshift (Marsaglia 2003)
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
  }
  double uniform(double low, double high) { return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1p-53; }
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
};

inline int report(const char* name) {
  std::printf("%s: %s\n", name, failures ? "FAILED" : "ok");
  return failures ? 1 : 0;
}
