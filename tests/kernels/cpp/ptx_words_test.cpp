// Runs the kernels of lane_maps.cuh on the emulated device as PTX (../ptx), to check the runtime's lane layouts and
// numbers, and the CUDA bodies of the fr:: functions. Prints a line for each failure and a summary; exit status 1 on
// failure.
#include <cstdio>
#include <string>
#include <vector>

#include "lane_maps.cuh"

int main() {
  fr::emulation::Schedule schedule{0};
  std::vector<std::vector<unsigned char>> memory;
  int cases = 0, failures = 0;
  const auto check = [&](bool condition, const std::string& what) {
    ++cases;
    if (!condition) ++failures, std::printf("FAIL %s\n", what.c_str());
  };
  const auto allocate = [&](int bytes) {
    memory.emplace_back(bytes);
    return static_cast<void*>(memory.back().data());
  };
  try {
    fr::host::check_lane_maps(
        &schedule, allocate, [] {}, check);
  } catch (const std::exception& error) { check(false, error.what()); }
  std::printf("%d cases, %d failures\n", cases, failures);
  return failures ? 1 : 0;
}
