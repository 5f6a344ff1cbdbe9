// Compares the emulated kernels of the cells with layer normalisation with the CPU core, array by array, forward and
// backward. Backward starts for both from what the CPU core kept. Every seed must give the same bits.
// usage: emulation_layer_norm_test [TEXT] [seed ...]: all cases, or those with TEXT in their name. Prints a line for
// each failure and a summary; exit status 1 on failure.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "../../../csrc/cpu/layer_norm_impl.h"
#include "../../../csrc/cuda/kernels.h"
#include "buffer.h"

namespace {

using fr::LayerNormArgs, fr::Type;

struct Case {
  Type type;
  bool gru;
  int64_t rows, hidden;
  bool options;  // a shift, dropout of the candidate and the LSTM's clip
};

// Cases with quick in their name serve the sanitizers.
std::string text(const Case& c) {
  return std::string(c.hidden <= 70 && c.rows <= 20 ? "quick " : "all ") + (c.gru ? "gru" : "lstm") +
         (c.type == Type::kFloat32 ? " float32" : " float64") + " B" + std::to_string(c.rows) + " H" +
         std::to_string(c.hidden) + (c.options ? " options" : "");
}

// The arrays of LayerNormArgs. A pointer that the case has not is null.
struct Arrays {
  std::vector<std::pair<const char*, Buffer>> all;
  LayerNormArgs args{};

  explicit Arrays(const Case& c, std::mt19937 random) {  // by value: the same numbers for each backend
    const int64_t gates = c.gru ? 3 : 4, unit_rows = c.gru ? 3 : 6, B = c.rows, H = c.hidden;
    args.type = c.type, args.gru = c.gru, args.rows = B, args.hidden = H, args.threads = 1;
    args.cell_clip = c.options && !c.gru ? 0.4 : 0;
    all.reserve(32);
    const auto make = [&](const char* name, int64_t rows, int64_t columns, double scale) -> unsigned char* {
      all.emplace_back(name, Buffer(c.type, Kind::kStorage, rows, columns));
      Buffer& made = all.back().second;
      if (scale > 0) {
        std::normal_distribution<double> normal(0, scale);
        Values values(rows * columns);
        for (double& v : values) v = normal(random);
        made.put(values);
      }
      return made.data;
    };
    args.input = make("input", B, gates * H, 1), args.product = make("product", B, gates * H, 1);
    args.units = make("units", unit_rows, H, 0.7), args.state = make("state", B, H, 0.7);
    if (c.options) args.shift = make("shift", 1, gates * H, 0.3), args.candidate = make("candidate", B, H, 1);
    args.d_h = make("d_h", B, H, 1), args.gates = make("gates", B, gates * H, 0);
    if (!c.gru) args.d_c = make("d_c", B, H, 1), args.c = make("c", B, H, 0);
    args.moments = make("moments", B, 3, 0), args.h = make("h", B, H, 0);
    args.d_input = make("d_input", B, gates * H, 0), args.d_product = make("d_product", B, gates * H, 0);
    args.d_state = make("d_state", B, H, 0), args.scratch = make("scratch", B, H, 0);
    args.d_units = make("d_units", unit_rows, H, 0), args.d_shift = make("d_shift", 1, gates * H, 0);
  }
  Arrays(const Arrays&) = delete;

  void copy(const Arrays& from) {
    for (size_t i = 0; i < all.size(); ++i)
      std::memcpy(all[i].second.data, from.all[i].second.data,
          all[i].second.rows * all[i].second.stride * all[i].second.element);
  }
};

struct Difference {
  std::string name;
  double size = 0;  // relative to the array's largest value, or to 1
};

// A GRU has two moments of a row: the third value of each is unwritten for both.
Difference compare(const Arrays& mine, const Arrays& truth) {
  Difference worst;
  for (size_t i = 0; i < truth.all.size(); ++i) {
    const Values a = mine.all[i].second.take(), b = truth.all[i].second.take();
    double largest = 1;
    for (const double v : b)
      if (std::isfinite(v)) largest = std::max(largest, std::fabs(v));
    for (size_t k = 0; k < a.size(); ++k) {
      if (std::isnan(a[k]) && std::isnan(b[k])) continue;
      const double size = std::isnan(a[k] - b[k]) ? INFINITY : std::fabs(a[k] - b[k]) / largest;
      if (size > worst.size) worst = {mine.all[i].first, size};
    }
  }
  return worst;
}

// Sums of up to 4H values of size 1 in another order, and exp and tanh of another library: a few roundings each. The
// scale multiplies them, which is sqrt(1e5) = 316 where a single value is normalised.
double bound_of(const Case& c) { return 1024 * std::ldexp(1, c.type == Type::kFloat32 ? -24 : -53); }

int test(const Case& c, const std::vector<uint64_t>& seeds) {
  const std::mt19937 random(static_cast<unsigned>(7 + c.rows + c.hidden));
  const fr::cpu::LayerNormKernels& core = *fr::cpu::find_layer_norm<fr::cpu::Baseline>(c.type);
  Arrays after_forward(c, random), after_backward(c, random);
  core.forward(after_forward.args, 0, c.rows);
  after_backward.copy(after_forward);
  core.backward(after_backward.args, 0, c.rows), core.unit_gradients(after_backward.args, 0, c.hidden);
  int failures = 0;
  const auto check = [&](const Arrays& mine, const Arrays& truth, uint64_t seed) {
    const Difference worst = compare(mine, truth);
    if (worst.size <= bound_of(c)) return;
    ++failures;
    std::printf("FAIL %s seed %d: %s differs by %.3g\n", text(c).c_str(), static_cast<int>(seed), worst.name.c_str(),
        worst.size);
  };
  std::optional<Arrays> first[2];
  for (const uint64_t seed : seeds) {
    fr::emulation::Schedule schedule{seed};
    for (const bool backward : {false, true}) {
      Arrays mine(c, random);
      if (backward) mine.copy(after_forward);
      mine.args.stream = &schedule;
      try {
        fr::host::layer_norm(backward, mine.args);
      } catch (const std::exception& error) {
        std::printf("FAIL %s: %s\n", text(c).c_str(), error.what());
        return failures + 1;
      }
      check(mine, backward ? after_backward : after_forward, seed);
      if (!first[backward]) {
        first[backward].emplace(c, random);
        first[backward]->copy(mine);
      }
      for (size_t i = 0; i < mine.all.size(); ++i) {
        const Buffer &a = mine.all[i].second, &b = first[backward]->all[i].second;
        if (std::memcmp(a.data, b.data, a.rows * a.stride * a.element) == 0) continue;
        ++failures;
        std::printf("FAIL %s seed %d: %s has other bits\n", text(c).c_str(), static_cast<int>(seed), mine.all[i].first);
      }
    }
  }
  return failures;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : "all";
  std::vector<uint64_t> seeds;
  for (int i = 2; i < argc; ++i) seeds.push_back(std::strtoull(argv[i], nullptr, 10));
  if (seeds.empty()) seeds = {0, 1};
  std::vector<Case> cases;
  for (const Type type : {Type::kFloat64, Type::kFloat32})
    for (const bool gru : {false, true}) {
      for (const auto [rows, hidden] :
          {std::pair<int64_t, int64_t>{1, 1}, {3, 17}, {20, 33}, {2, 70}, {70, 3}, {3, 257}, {1, 513}, {2, 1100}})
        cases.push_back({type, gru, rows, hidden, hidden != 33});
      cases.push_back({type, gru, 0, 5, false});
    }
  int count = 0, failures = 0;
  for (const Case& c : cases) {
    if (wanted != "all" && text(c).find(wanted) == std::string::npos) continue;
    ++count;
    failures += test(c, seeds);
  }
  std::printf("%d cases, %d failures\n", count, failures);
  return failures ? 1 : 0;
}
