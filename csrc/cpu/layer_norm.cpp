// Layer normalisation in a step: checks the arguments, and shares rows, then units, among threads.
#include "layer_norm.h"

#include <algorithm>

#include "core.h"

namespace fr {
namespace cpu {
namespace {

// A thread for fewer values than this costs more than it saves.
constexpr int64_t kValuesPerThread = 1 << 14;

using Function = void (*)(const LayerNormArgs&, int64_t, int64_t);

// Calls the function for each thread's share of [0, count). Shares begin at multiples of `unit`.
void share(const LayerNormArgs& args, Function function, int64_t count, int64_t unit) {
  struct Work {
    const LayerNormArgs& args;
    Function function;
    int64_t count, unit;
  } work{args, function, count, unit};
  const int64_t threads = std::clamp<int64_t>(4 * args.rows * args.hidden / kValuesPerThread, 1, args.threads);
  run_team(
      static_cast<int>(threads),
      [](void* opaque, int index, int parties) {
        const Work& w = *static_cast<Work*>(opaque);
        const int64_t blocks = (w.count + w.unit - 1) / w.unit;
        const auto begin = [&](int part) { return std::min(w.count, blocks * part / parties * w.unit); };
        w.function(w.args, begin(index), begin(index + 1));
      },
      &work);
}

void check_call(const LayerNormArgs& args, bool backward) {
  const int type = static_cast<int>(args.type);
  require(type == 0 || type == 1, "type", [&] { return "float32 (0) or float64 (1), got " + std::to_string(type); });
  require(args.rows >= 0 && args.hidden > 0 && args.threads > 0, "sizes", "rows >= 0, hidden > 0 and threads > 0");
  const int64_t size = storage_bytes(args.type);
  const bool rows = args.rows > 0;
  for (const void* needed : {static_cast<const void*>(args.product), static_cast<const void*>(args.gates),
           static_cast<const void*>(args.moments), args.state})
    check_address(needed, size, "values of rows", rows);
  check_address(args.units, size, "units", true), check_address(args.shift, size, "shift", false);
  check_address(args.candidate, size, "candidate", false), check_address(args.c, size, "c", rows && !args.gru);
  if (!backward) {
    check_address(args.input, size, "input", rows), check_address(args.h, size, "h", rows);
    return;
  }
  check_address(args.d_c, size, "d_c", rows && !args.gru), check_address(args.d_h, size, "d_h", rows);
  for (const void* needed : {args.d_input, args.d_product, args.d_state, args.scratch})
    check_address(needed, size, "gradients of rows", rows);
  check_address(args.d_units, size, "d_units", true), check_address(args.d_shift, size, "d_shift", true);
}

}  // namespace
}  // namespace cpu

void cpu_layer_norm(const LayerNormArgs& args) {
  cpu::check_call(args, false);
  cpu::share(args, cpu::choose_layer_norm(args.type).forward, args.rows, 1);
}

void cpu_layer_norm_gradients(const LayerNormArgs& args) {
  cpu::check_call(args, true);
  const cpu::LayerNormKernels& kernels = cpu::choose_layer_norm(args.type);
  cpu::share(args, kernels.backward, args.rows, 1);
  cpu::share(args, kernels.unit_gradients, args.hidden, 64);
}

}  // namespace fr
