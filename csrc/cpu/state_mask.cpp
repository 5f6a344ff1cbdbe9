// The mask of state dropout, which lies in memory, since products read it (contract in cells/noise.h).
#include "../cells/noise.h"
#include "core.h"

namespace fr {
namespace {

template <class T>
void draw(double p, uint64_t seed, int streams, int64_t batch, int64_t width, T* to) {
  const uint32_t below = NoiseParams::below(p);
  const T scale = T(1) / static_cast<T>(1 - p);
  for (int stream = 0; stream < streams; ++stream)
    for (int64_t row = 0; row < batch; ++row, to += width)
      for (int64_t unit = 0; unit < width; unit += 4) {
        uint32_t words[4] = {static_cast<uint32_t>(unit / 4), static_cast<uint32_t>(row), 0,
            noise_stream(kOfState, static_cast<uint32_t>(stream))};
        philox<OneCounter>(words, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
        for (int64_t i = 0; i < 4 && unit + i < width; ++i) to[unit + i] = words[i] < below ? T(0) : scale;
      }
}

}  // namespace

void cpu_state_mask(Type state, double p, const uint64_t* seed, int streams, int64_t batch, int64_t width, void* mask) {
  using cpu::check_address, cpu::require;
  require(state == Type::kFloat32 || state == Type::kFloat64, "state", "float32 (0) or float64 (1)");
  require(p >= 0 && p < 1, "p", "a probability in [0, 1)");
  require(streams >= 0 && batch >= 0 && width >= 0, "sizes", "sizes that are not negative");
  const bool any = streams > 0 && batch > 0 && width > 0;
  check_address(seed, 8, "seed", any), check_address(mask, storage_bytes(state), "mask", any);
  if (!any) return;
  if (state == Type::kFloat32) draw(p, *seed, streams, batch, width, static_cast<float*>(mask));
  else draw(p, *seed, streams, batch, width, static_cast<double*>(mask));
}

}  // namespace fr
