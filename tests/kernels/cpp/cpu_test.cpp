// Tests the CPU backend through its public entry points (csrc/rnn.h), for every cell, several odd shapes and all ways
// of sharing work. Results must equal those of one thread bit for bit. Forward must agree with a plain step loop in
// double, backward (in float64) with central differences of forward, and instruction sets with each other within
// rounding. Built plain and under sanitizers (test_cpp.py). Buffers have the exact size, so that an access beyond is
// seen.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/storage.h"
#include "cpu/team.h"
#include "plain_step.h"
#include "rnn.h"

using fr::Cell;

namespace {

struct Case {
  Cell cell;
  int64_t steps, batch, input, hidden, projection;
  int directions;
  bool lengths, resets, to_initial, packed;
  double cell_clip, proj_clip;
};

template <class S>
struct Problem {
  using T = fr::StateOf<S>;
  Case c;
  const fr::CellFacts& cell;
  int64_t rows, width, gates, cell_states, kept;  // the last three: times H
  std::vector<int64_t> batch_sizes, offsets, lengths, active;
  std::vector<uint8_t> resets;
  struct Direction {
    std::vector<S> input, ih, hh, hr, bias_ih, bias_hh, unit, h0;
    std::vector<T> c0;
  } d[2];
  std::vector<S> output, h_n[2], saved[2];
  std::vector<T> c_n[2], cells[2];

  static std::vector<S> random(Random& r, int64_t n, double scale) {
    std::vector<S> v(n);
    for (S& x : v) {
      if constexpr (std::is_same_v<S, double>) x = r.uniform(-scale, scale);
      else fr::from_float(x, static_cast<float>(r.uniform(-scale, scale)));
    }
    return v;
  }

  Problem(const Case& which, uint64_t seed)
      : c(which), cell(fr::facts_of(c.cell)), width(c.projection ? c.projection : c.hidden), gates(cell.gates),
        cell_states(cell.cells), kept(cell.saved) {
    Random r{seed * 7919 + 12345};
    active.assign(c.batch, c.steps);
    rows = 0;
    if (c.packed) {
      int64_t size = c.batch;
      for (int64_t t = 0; t < c.steps; ++t) {
        batch_sizes.push_back(size), offsets.push_back(rows), rows += size;
        if (size > 1 && r.below(2)) size -= r.below(size);
      }
      for (int64_t b = 0; b < c.batch; ++b) {
        active[b] = 0;
        while (active[b] < c.steps && batch_sizes[active[b]] > b) ++active[b];
      }
    } else {
      rows = c.steps * c.batch;
    }
    if (c.lengths)
      for (int64_t b = 0; b < c.batch; ++b)
        lengths.push_back(r.below(c.steps + 1)), active[b] = std::min(active[b], lengths[b]);
    if (c.resets)
      for (int64_t i = 0; i < rows; ++i) resets.push_back(r.below(3) == 0);
    const double k = 1.5 / std::sqrt(static_cast<double>(c.hidden));
    for (int i = 0; i < c.directions; ++i) {
      d[i].input = random(r, rows * c.input, 1), d[i].ih = random(r, gates * c.hidden * c.input, k);
      d[i].hh = random(r, gates * c.hidden * width, k), d[i].hr = random(r, c.projection * c.hidden, k);
      d[i].bias_ih = random(r, gates * c.hidden, k), d[i].bias_hh = random(r, gates * c.hidden, k);
      d[i].unit = random(r, cell.unit_weights * c.hidden, 1);
      d[i].h0 = random(r, c.batch * width, 1);
      for (int64_t j = 0; j < c.batch * cell_states * c.hidden; ++j)
        d[i].c0.push_back(static_cast<T>(possible_cell(c.cell, c.hidden, j, r.uniform(-1, 1))));
    }
  }

  fr::Rows in_rows(const void* data, int64_t stride) const {
    return {const_cast<void*>(data), c.batch * stride, stride};
  }
  int64_t row(int64_t t, int64_t b) const { return c.packed ? offsets[t] + b : t * c.batch + b; }
  fr::Weights weights(int i) const {
    return {d[i].ih.data(), d[i].hh.data(), c.projection ? d[i].hr.data() : nullptr, d[i].bias_ih.data(),
        cell.multiplies() ? d[i].bias_hh.data() : nullptr, c.input, width, c.hidden, d[i].unit.data()};
  }
  fr::Shape shape() const {
    constexpr fr::Type type = std::is_same_v<S, double>         ? fr::Type::kFloat64
                              : std::is_same_v<S, float>        ? fr::Type::kFloat32
                              : std::is_same_v<S, fr::BFloat16> ? fr::Type::kBFloat16
                                                                : fr::Type::kFloat16;
    return {c.cell, type, c.steps, c.batch, c.input, c.hidden, c.projection, c.packed ? batch_sizes.data() : nullptr,
        c.packed ? offsets.data() : nullptr, c.lengths ? lengths.data() : nullptr, c.resets ? resets.data() : nullptr};
  }
  fr::Options options() const { return {c.cell_clip, c.proj_clip, c.to_initial}; }
  bool reverse(int i) const { return i == 1; }

  void forward(int threads, bool save) {
    output.assign(rows * width * c.directions, S{});
    fr::ForwardArgs args{};
    args.shape = shape(), args.options = options(), args.directions = c.directions, args.threads = threads;
    args.direction.resize(c.directions);
    for (int i = 0; i < c.directions; ++i) {
      h_n[i].assign(c.batch * width, S{}), c_n[i].assign(c.batch * cell_states * c.hidden, T{});
      saved[i].assign(save ? rows * kept * c.hidden : 0, S{});
      cells[i].assign(save ? rows * cell_states * c.hidden : 0, T{});
      fr::ForwardDirection& x = args.direction[i];
      x.reverse = reverse(i), x.weights = weights(i), x.input = in_rows(d[i].input.data(), c.input);
      x.output = {output.data() + i * width, c.batch * width * c.directions, width * c.directions};
      x.h0 = d[i].h0.data(), x.c0 = cell_states ? d[i].c0.data() : nullptr;
      x.h_n = h_n[i].data(), x.c_n = c_n[i].data();
      if (save)
        x.gates = in_rows(saved[i].data(), kept * c.hidden), x.cells = in_rows(cells[i].data(), cell_states * c.hidden);
    }
    fr::cpu_forward(args);
  }

  // The results of backward for d_output = 1 everywhere and no gradient of the final states.
  struct Gradients {
    std::vector<S> input, h0, c0, weight_ih, weight_hh, weight_hr, bias_ih, bias_hh, weight_unit;

    std::vector<const std::vector<S>*> all() const {
      return {&input, &h0, &c0, &weight_ih, &weight_hh, &weight_hr, &bias_ih, &bias_hh, &weight_unit};
    }
    bool operator==(const Gradients& o) const {
      for (size_t i = 0; i < all().size(); ++i)
        if (all()[i]->size() != o.all()[i]->size() ||
            std::memcmp(all()[i]->data(), o.all()[i]->data(), all()[i]->size() * sizeof(S)) != 0)
          return false;
      return true;
    }
  };

  void backward(int threads, bool rebuild, int64_t range_bytes, Gradients (&g)[2]) {
    std::vector<S> ones(rows * width * c.directions);
    for (S& x : ones) {
      if constexpr (std::is_same_v<S, double>) x = 1;
      else fr::from_float(x, 1.0f);
    }
    fr::GradientArgs args{};
    args.shape = shape(), args.options = options(), args.directions = c.directions, args.threads = threads;
    args.direction.resize(c.directions);
    args.range_bytes = range_bytes;
    for (int i = 0; i < c.directions; ++i) {
      // Results overwrite whatever is there; these bits are NaN in every type.
      const auto fresh = [](std::vector<S>& v, int64_t size) {
        v.resize(size);
        std::memset(static_cast<void*>(v.data()), 0xff, size * sizeof(S));
        return size ? v.data() : nullptr;
      };
      fr::GradientDirection& x = args.direction[i];
      x.reverse = reverse(i), x.weights = weights(i), x.input = in_rows(d[i].input.data(), c.input);
      x.output = {output.data() + i * width, c.batch * width * c.directions, width * c.directions};
      x.d_output = {ones.data() + i * width, c.batch * width * c.directions, width * c.directions};
      x.h0 = d[i].h0.data(), x.c0 = cell_states ? d[i].c0.data() : nullptr;
      if (!rebuild) x.gates = in_rows(saved[i].data(), kept * c.hidden);
      if (cell_states) x.cells = in_rows(cells[i].data(), cell_states * c.hidden);
      x.d_input = fresh(g[i].input, rows * c.input), x.d_h0 = fresh(g[i].h0, c.batch * width);
      x.d_c0 = fresh(g[i].c0, c.batch * cell_states * c.hidden);
      x.d_weight_ih = fresh(g[i].weight_ih, gates * c.hidden * c.input);
      if (cell.multiplies()) x.d_weight_hh = fresh(g[i].weight_hh, gates * c.hidden * width);
      x.d_weight_hr = fresh(g[i].weight_hr, c.projection * c.hidden);
      x.d_weight_unit = fresh(g[i].weight_unit, cell.unit_weights * c.hidden);
      x.d_bias_ih = fresh(g[i].bias_ih, gates * c.hidden),
      x.d_bias_hh = cell.multiplies() ? fresh(g[i].bias_hh, gates * c.hidden) : nullptr;
    }
    fr::cpu_backward(args);
  }

  // The output by a plain double loop.
  std::vector<double> reference(int i) const {
    const auto values = [](const auto& from) {
      std::vector<double> to;
      for (const auto& x : from) to.push_back(static_cast<double>(fr::to_float(x)));
      return to;
    };
    const std::vector<double> x = values(d[i].input), ih = values(d[i].ih), hh = values(d[i].hh), hr = values(d[i].hr);
    const std::vector<double> bias_ih = values(d[i].bias_ih), bias_hh = values(d[i].bias_hh), h0 = values(d[i].h0);
    const std::vector<double> unit = values(d[i].unit);
    const PlainWeights weights{c.hidden, width, hh, bias_hh, hr, unit, c.cell_clip, c.proj_clip};
    std::vector<double> out(rows * width, 0), input(gates * c.hidden);
    for (int64_t b = 0; b < c.batch; ++b) {
      const std::vector<double> first(h0.begin() + b * width, h0.begin() + (b + 1) * width);
      const int64_t size = cell_states * c.hidden;
      const std::vector<double> first_cells(d[i].c0.begin() + b * size, d[i].c0.begin() + (b + 1) * size);
      std::vector<double> h = first, states = first_cells;
      for (int64_t s = 0; s < active[b]; ++s) {
        const int64_t t = reverse(i) ? active[b] - 1 - s : s;
        const bool cut = c.resets && (reverse(i) ? s > 0 && resets[row(t + 1, b)] : resets[row(t, b)]);
        if (cut && c.to_initial) h = first, states = first_cells;
        else if (cut) std::fill(h.begin(), h.end(), 0), std::fill(states.begin(), states.end(), 0);
        for (int64_t k = 0; k < gates * c.hidden; ++k) {
          input[k] = bias_ih[k];
          for (int64_t j = 0; j < c.input; ++j) input[k] += ih[k * c.input + j] * x[row(t, b) * c.input + j];
        }
        plain_step(c.cell, weights, input.data(), h, states);
        for (int64_t u = 0; u < width; ++u) out[row(t, b) * width + u] = h[u];
      }
    }
    return out;
  }

  double total() const {
    double sum = 0;
    for (const S& x : output) sum += static_cast<double>(fr::to_float(x));
    return sum;
  }
};

// Rounding of the storage type.
template <class S>
constexpr double kUnit = std::is_same_v<S, double>        ? 0x1p-53
                         : std::is_same_v<S, float>       ? 0x1p-24
                         : std::is_same_v<S, fr::Float16> ? 0x1p-11
                                                          : 0x1p-8;

// Accuracy of one step's arithmetic in each type, times the steps it passes through (inputs and states are at most
// about 1). The roundings of a long sum add up like a random walk.
template <class S>
double tolerance(const Case& c) {
  return 16 * kUnit<S> * static_cast<double>(c.steps + 1) *
         std::sqrt(std::max(1., static_cast<double>(c.input + c.hidden) / 256));
}

// The same problem in double, with the very same values.
template <class S>
Problem<double> in_double(const Problem<S>& p, uint64_t seed) {
  Problem<double> wide(p.c, seed);
  for (int i = 0; i < p.c.directions; ++i) {
    const auto copy = [](const auto& from, std::vector<double>& to) {
      for (size_t k = 0; k < from.size(); ++k) to[k] = static_cast<double>(fr::to_float(from[k]));
    };
    const auto& from = p.d[i];
    auto& to = wide.d[i];
    copy(from.input, to.input), copy(from.ih, to.ih), copy(from.hh, to.hh), copy(from.hr, to.hr),
        copy(from.bias_ih, to.bias_ih);
    copy(from.bias_hh, to.bias_hh), copy(from.unit, to.unit), copy(from.h0, to.h0), copy(from.c0, to.c0);
  }
  return wide;
}

constexpr int64_t kOneRange = int64_t{1} << 40;

template <class S>
bool same(const std::vector<S>& a, const std::vector<S>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
}

template <class S>
void check_case(const Case& c, uint64_t seed, const char* name, bool pairs) {
  Problem<S> one(c, seed), many(c, seed);
  one.forward(1, true);
  for (int i = 0; i < c.directions; ++i) {
    const std::vector<double> exact = one.reference(i);
    double worst = 0, most = 1;  // relu's outputs may be larger
    for (int64_t r = 0; r < one.rows; ++r)
      for (int64_t u = 0; u < one.width; ++u) {
        const double found = static_cast<double>(fr::to_float(one.output[(r * c.directions + i) * one.width + u]));
        const double error = std::fabs(found - exact[r * one.width + u]);
        if (!(error <= worst)) worst = error;
        most = std::fmax(most, std::fabs(exact[r * one.width + u]));
      }
    CHECK(worst <= tolerance<S>(c) * most, "%s direction %d: error %g, T %d B %d H %d", name, i, worst, int(c.steps),
        int(c.batch), int(c.hidden));
  }
  typename Problem<S>::Gradients base[2], other[2];
  one.backward(1, false, kOneRange, base);
  // Four threads also cut the sequence into ranges of one step. Not if products sum over pairs of rows, because these
  // ranges pair other rows.
  for (int threads : {2, 3, 4, 8}) {
    many.forward(threads, threads != 3);
    CHECK(same(one.output, many.output) && same(one.h_n[0], many.h_n[0]) && same(one.c_n[0], many.c_n[0]),
        "%s: %d threads", name, threads);
    one.backward(threads, threads == 3, threads == 4 && !pairs ? 1 : kOneRange, other);
    for (int i = 0; i < c.directions; ++i)
      CHECK(base[i] == other[i], "%s backward: %d threads, direction %d", name, threads, i);
  }
  // at a kink, rounding decides the side
  if (std::is_same_v<S, double> || has_kink(c.cell) || c.cell_clip > 0 || c.proj_clip > 0) return;
  Problem<double> wide = in_double(one, seed);
  Problem<double>::Gradients exact[2];
  wide.forward(1, true), wide.backward(1, false, kOneRange, exact);
  for (int i = 0; i < c.directions; ++i)
    for (size_t k = 0; k < base[i].all().size(); ++k) {
      const auto& found = *base[i].all()[k];
      const auto& truth = *exact[i].all()[k];
      double most = 0, worst = 0;
      for (size_t j = 0; j < truth.size(); ++j) {
        const double error = std::fabs(static_cast<double>(fr::to_float(found[j])) - truth[j]);
        most = std::fmax(most, std::fabs(truth[j]));
        if (!(error <= worst)) worst = error;
      }
      CHECK(worst <= 4 * tolerance<S>(c) * most, "%s gradient %d direction %d: error %g of %g", name, int(k), i, worst,
          most);
    }
}

// What a busy machine changes: with `busy`, work is shared without barriers; else threads that meet at every step leave
// the rest to the first of them as soon as they may.
template <class S>
void check_busy(const Case& c, uint64_t seed, const char* name) {
  Problem<S> one(c, seed), many(c, seed);
  typename Problem<S>::Gradients base[2], other[2];
  one.forward(1, true), one.backward(1, false, kOneRange, base);
  for (const bool busy : {false, true})
    for (int threads : {2, 3}) {
      fr::cpu::pretence.busy = busy, fr::cpu::pretence.held_up = !busy;
      many.forward(threads, threads == 2);
      CHECK(same(one.output, many.output) && same(one.h_n[0], many.h_n[0]) && same(one.c_n[0], many.c_n[0]),
          "%s: %d threads, busy %d", name, threads, busy);
      one.backward(threads, threads == 3, kOneRange, other);
      for (int i = 0; i < c.directions; ++i)
        CHECK(base[i] == other[i], "%s backward: %d threads, busy %d, direction %d", name, threads, busy, i);
    }
  fr::cpu::pretence.busy = -1, fr::cpu::pretence.held_up = -1;
}

// d(sum of outputs) along one random direction of all arguments, by central differences in float64.
void check_gradient(const Case& c, uint64_t seed, const char* name) {
  Problem<double> p(c, seed);
  p.forward(2, true);
  Problem<double>::Gradients g[2];
  p.backward(2, false, kOneRange, g);
  const double step = 0x1p-18;
  for (int i = 0; i < c.directions; ++i) {
    Random r{seed + 99};
    double analytic = 0;
    Problem<double> plus(c, seed), minus(c, seed);
    const auto move = [&](std::vector<double> Problem<double>::Direction::*values,
                          const std::vector<double>& gradient) {
      for (size_t k = 0; k < gradient.size(); ++k) {
        const double delta = r.uniform(-1, 1);
        analytic += gradient[k] * delta;
        (plus.d[i].*values)[k] += step * delta, (minus.d[i].*values)[k] -= step * delta;
      }
    };
    using Direction = Problem<double>::Direction;
    move(&Direction::input, g[i].input), move(&Direction::h0, g[i].h0), move(&Direction::c0, g[i].c0);
    move(&Direction::ih, g[i].weight_ih), move(&Direction::hh, g[i].weight_hh), move(&Direction::hr, g[i].weight_hr);
    move(&Direction::bias_ih, g[i].bias_ih), move(&Direction::bias_hh, g[i].bias_hh),
        move(&Direction::unit, g[i].weight_unit);
    plus.forward(1, false), minus.forward(1, false);
    const double numeric = (plus.total() - minus.total()) / (2 * step);
    // Truncation error: step^2 times a third derivative; rounding of the sums, divided by 2*step.
    CHECK(std::fabs(numeric - analytic) <= 1e-6 * (1 + std::fabs(numeric)), "%s direction %d: %.9g and %.9g", name, i,
        numeric, analytic);
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string sets = fr::cpu_instruction_sets();
  while (!sets.empty()) {
    const std::string set = sets.substr(0, sets.find(' '));
    sets.erase(0, set.size() + 1);
    try {
      fr::cpu_choose_instruction_set(set);
    } catch (const std::exception&) {
      std::printf("%s: not on this machine\n", set.c_str());
      continue;
    }
    uint64_t seed = 0;
    for (const fr::CellFacts& facts : fr::kCells) {
      if (argc > 1 && std::string(argv[1]) != facts.name) continue;
      const Cell cell = facts.code;
      const bool clip = facts.cells > 0;
      const int64_t projection = facts.projects() ? 37 : 0;
      const Case list[] = {
          {cell, 1, 1, 1, 1, projection ? 1 : 0, 1, false, false, false, false, 0, 0},
          {cell, 5, 3, 7, 17, projection ? 5 : 0, 2, true, true, true, false, clip ? .3 : 0, projection ? .1 : 0},
          {cell, 4, 35, 9, 33, projection ? 20 : 0, 1, false, false, false, false, 0, 0},
          {cell, 6, 19, 3, 21, projection, 2, false, true, false, true, 0, 0},
          {cell, 3, 2, 30, 300, projection ? 290 : 0, 1, true, true, false, false, 0, 0},  // few rows: units are split
          {cell, 1, 4, 40, 300, projection ? 290 : 0, 1, false, false, true, false, 0, 0},
          // weights that come from memory
          {cell, 1, 3, 1030, 300, projection ? 290 : 0, 1, false, false, false, false, 0, 0},
          {cell, 1, 2, 1024, 104, projection, 1, false, false, false, false, 0, 0},  // rows 4 KiB apart in float32
      };
      for (const Case& c : list) {
        const std::string name = set + " " + facts.name;
        ++seed;
        check_case<float>(c, seed, (name + " float32").c_str(), false);
        check_case<fr::BFloat16>(c, seed, (name + " bfloat16").c_str(), set == "avx512_bf16" || set == "avx512_amx");
        if (c.hidden > 100) continue;  // the other types take the same paths, and the loop in double is slow
        check_case<double>(c, seed, (name + " float64").c_str(), false);
        check_case<fr::Float16>(c, seed, (name + " float16").c_str(), false);
        check_gradient(c, seed, name.c_str());
      }
      // more than a chunk of steps, units split; rows split while the cores are busy
      for (const auto& [steps, batch] : {std::pair<int64_t, int64_t>{310 / facts.gates, 3}, {4, 5}}) {
        const Case c{cell, steps, batch, 5, 150, projection ? 140 : 0, 1, true, true, true, false, 0, 0};
        check_busy<float>(c, 1000 + seed, (set + " " + facts.name + " float32").c_str());
        check_busy<fr::BFloat16>(c, 1000 + seed, (set + " " + facts.name + " bfloat16").c_str());
      }
    }
  }
  return report("cpu_test");
}
