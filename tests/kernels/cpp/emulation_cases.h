// A layer on the emulated device, compared with a plain loop in double: forward with its results, backward in double
// with its finite differences. Backward in other types is compared with the kernels in double. Shared by
// emulation_step_test and emulation_persistent_test.
#pragma once

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "../../../csrc/emulation/rnn_emulated.h"
#include "buffer.h"
#include "plain_step.h"

namespace {

using fr::Cell, fr::Type;

fr::EmulationOptions g_options;  // strategy and device of the runs
// The calls in which a block stalls as g_options says. With kForward a run ends after the forward call.
enum class Pass { kNone, kForward, kBackward, kBoth } g_stalled = Pass::kNone;
// To count instructions (../ptx/count.cpp): run_kernels runs only this pass, without the caller's products.
enum class Only { kAll, kForward, kBackward } g_only = Only::kAll;

// ---- a case ---------------------------------------------------------------------------------------------------------
struct Case {
  Cell cell = Cell::kLstm;
  Type type = Type::kFloat64;
  bool tf32 = false;
  int64_t steps = 4, batch = 3, hidden = 5, projection = 0;
  int directions = 1;
  bool first_reverse = false;
  bool lengths = false, resets = false, to_initial = false, packed = false, initial = true, bias = true;
  double cell_clip = 0, proj_clip = 0;
  bool recompute = false, inference = false;
  int64_t range = 0;     // steps of a backward range; 0: all
  bool discard = false;  // d_h0 is not wanted
  int64_t pad = 0, offset = 0;
  bool noise = false;
  std::string text() const {
    static const char* const types[] = {"float32", "float64", "bfloat16", "float16"};
    std::string t = std::string(fr::facts_of(cell).name) + " " + (tf32 ? "tf32" : types[int(type)]) + " T" +
                    std::to_string(steps) + " B" + std::to_string(batch) + " H" + std::to_string(hidden) + " P" +
                    std::to_string(projection) + " D" + std::to_string(directions);
    const auto flag = [&](bool on, const char* name) {
      if (on) t += std::string(" ") + name;
    };
    flag(first_reverse, "reverse"), flag(lengths, "lengths"), flag(resets, "resets"), flag(to_initial, "to_initial");
    flag(packed, "packed"), flag(!initial, "no_initial"), flag(!bias, "no_bias"), flag(cell_clip > 0, "cell_clip");
    flag(proj_clip > 0, "proj_clip"), flag(recompute, "recompute"), flag(inference, "inference"),
        flag(range > 0, "ranges"), flag(discard, "discard");
    flag(pad || offset, "misaligned"), flag(noise, "noise");
    return t;
  }
  // Every kind of noise that the cell supports.
  fr::NoiseOptions noise_options() const {
    static const uint64_t seed = 0x0123456789ABCDEF;
    if (!noise) return {};
    const fr::CellFacts& facts = fr::facts_of(cell);
    return {0.25, facts.zones_cells ? 0.375 : 0, facts.drops_candidate ? 0.5 : 0, &seed};
  }
};

// The values of one direction that have gradients, all as doubles.
struct Inputs {
  Values gates;  // [N, G*H] input part
  Values hh, hr, bias, unit;
  Values h0, c0;
};

struct Problem {
  Case c;
  fr::CellFacts cell;
  int64_t R, N;
  std::vector<int64_t> lengths, batch_sizes, step_offset;
  std::vector<uint8_t> resets;
  Inputs inputs[2];
  Values d_output[2], d_h[2], d_c[2];
  bool reverse(int d) const { return d == 1 ? !c.first_reverse : c.first_reverse; }
  int64_t batch_at(int64_t t) const { return c.packed ? batch_sizes[t] : c.batch; }
  int64_t row(int64_t t, int64_t b) const { return (c.packed ? step_offset[t] : t * c.batch) + b; }
  bool active(int64_t t, int64_t b) const {
    return t >= 0 && t < c.steps && b < batch_at(t) && (!c.lengths || t < lengths[b]);
  }
};

struct Result {
  Values output, h_n, c_n;
};

// The plain loop: row by row and step by step.
Result reference(const Problem& p, const Inputs& in, int d) {
  const int64_t H = p.c.hidden, R = p.R, C = p.cell.cells * H, G = p.cell.gates;
  const bool reverse = p.reverse(d);
  const PlainWeights weights{H, R, in.hh, in.bias, in.hr, in.unit, p.c.cell_clip, p.c.proj_clip};
  const fr::NoiseOptions noise = p.c.noise_options();
  Result result{Values(p.N * R, 0.0), Values(p.c.batch * R), Values(p.c.batch * C)};
  for (int64_t b = 0; b < p.c.batch; ++b) {
    const Values h0(in.h0.begin() + b * R, in.h0.begin() + (b + 1) * R),
        c0(in.c0.begin() + b * C, in.c0.begin() + (b + 1) * C);
    Values h = h0, c = c0;
    bool started = false;
    for (int64_t s = 0; s < p.c.steps; ++s) {
      const int64_t t = reverse ? p.c.steps - 1 - s : s;
      if (!p.active(t, b)) continue;
      const bool cut = p.c.resets && (reverse ? started && p.resets[p.row(t + 1, b)] : p.resets[p.row(t, b)]);
      started = true;
      if (cut) {
        h = p.c.to_initial ? h0 : Values(R, 0.0);
        c = p.c.to_initial ? c0 : Values(C, 0.0);
      }
      plain_step(p.c.cell, weights, &in.gates[p.row(t, b) * G * H], h, c,
          {noise.zoneout_h, noise.zoneout_c, noise.candidate, noise.seed ? *noise.seed : 0, static_cast<uint32_t>(b),
              static_cast<uint32_t>(t), static_cast<uint32_t>(d)});
      for (int64_t q = 0; q < R; ++q) result.output[p.row(t, b) * R + q] = h[q];
    }
    for (int64_t q = 0; q < R; ++q) result.h_n[b * R + q] = h[q];
    for (int64_t j = 0; j < C; ++j) result.c_n[b * C + j] = c[j];
  }
  return result;
}

double dot(const Values& a, const Values& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

double loss(const Problem& p, int d, const Inputs& in) {
  const Result r = reference(p, in, d);
  double sum = dot(r.output, p.d_output[d]) + dot(r.h_n, p.d_h[d]);
  if (p.cell.cells) sum += dot(r.c_n, p.d_c[d]);
  return sum;
}

// What the kernels return for one direction.
struct Got {
  Values output, h_n, c_n, kept, cells;
  Inputs gradient;
  bool zero_where_inactive = true;
};

Problem make_problem(const Case& c, unsigned seed) {
  Problem p;
  p.c = c;
  p.cell = fr::facts_of(c.cell);
  p.R = c.projection ? c.projection : c.hidden;
  std::mt19937 random(seed);
  const auto integer = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  const auto normal = [&](int64_t count, double scale) {
    Values v(count);
    std::normal_distribution<double> distribution(0, scale);
    for (double& x : v) x = distribution(random);
    return v;
  };
  if (c.lengths) {
    for (int64_t b = 0; b < c.batch; ++b) p.lengths.push_back(integer(0, c.steps));
    p.lengths[0] = c.steps;
    if (c.batch > 1) p.lengths[1] = 0;
  }
  p.N = c.steps * c.batch;
  if (c.packed) {
    p.N = 0;
    int64_t rows = c.batch;
    for (int64_t t = 0; t < c.steps; ++t) {
      p.batch_sizes.push_back(rows), p.step_offset.push_back(p.N);
      p.N += rows;
      rows = integer(1, rows);
    }
  }
  if (c.resets)
    for (int64_t i = 0; i < p.N; ++i) p.resets.push_back(integer(0, 2) == 0);
  const double scale = 1 / std::sqrt(double(c.hidden));
  for (int d = 0; d < c.directions; ++d) {
    Inputs& in = p.inputs[d];
    in.gates = normal(p.N * p.cell.gates * c.hidden, 1.0);
    in.hh = normal(p.cell.gates * c.hidden * p.R, scale);
    if (c.projection) in.hr = normal(c.projection * c.hidden, 1.5 * scale);
    in.bias = c.bias ? normal(p.cell.gates * c.hidden, 0.3) : Values(p.cell.gates * c.hidden, 0.0);
    in.unit = normal(p.cell.unit_weights * c.hidden, 0.5);
    in.h0 = c.initial ? normal(c.batch * p.R, 0.7) : Values(c.batch * p.R, 0.0);
    in.c0 = c.initial ? normal(c.batch * p.cell.cells * c.hidden, 0.7) : Values(c.batch * p.cell.cells * c.hidden, 0.0);
    for (size_t i = 0; i < in.c0.size() && c.initial; ++i) in.c0[i] = possible_cell(c.cell, c.hidden, i, in.c0[i]);
    p.d_output[d] = normal(p.N * p.R, 1.0);
    p.d_h[d] = normal(c.batch * p.R, 1.0), p.d_c[d] = normal(c.batch * p.cell.cells * c.hidden, 1.0);
  }
  return p;
}

// One forward call of the kernels, and the backward calls after it, as a caller makes them.
class KernelRun {
 public:
  KernelRun(Problem& problem, uint64_t seed) : p(problem), seed_(seed) {
    for (int d = 0; d < c.directions; ++d) allocate(d);
    for (int d = 0; d < c.directions; ++d) set_forward(d);
  }

  std::vector<Got> run() {
    if (g_only != Only::kBackward) fr::emulated_forward(forward, options_of(Pass::kForward));
    for (int d = 0; d < c.directions; ++d) take_forward(d);
    if (c.inference || g_stalled == Pass::kForward || g_only == Only::kForward) return got;
    for (Got& direction : got) {
      Inputs& g = direction.gradient;
      g.gates = Values(p.N * GH, 0.0), g.hh = Values(GH * R, 0.0), g.hr = Values(c.projection * H, 0.0);
      g.bias = Values(GH, 0.0);
    }
    // Both directions run together if the whole is one range. With ranges each runs in its own calls, last range in
    // processing order first.
    const int together = c.range ? 1 : c.directions;
    const int64_t length = c.range ? c.range : c.steps;
    for (int first = 0; first < c.directions; first += together)
      for (int64_t done = 0; done < c.steps; done += length)
        run_range(first, together, done, std::min(length, c.steps - done));
    for (int d = 0; d < c.directions; ++d) take_states(d);
    return got;
  }

 private:
  struct Direction {
    Buffer gates, hh, hr, bias, h0, c0, output, h_n, c_n, kept, cells, d_output, d_h, d_c, d_h0r, d_c0r, unit, d_unit;
  };
  struct Range {
    Buffer gates, d_gates, d_recurrent, h_prev, inner, d_projected;
  };

  Buffer storage(int64_t rows, int64_t columns) const {
    return Buffer(c.type, Kind::kStorage, rows, columns, c.pad, c.offset);
  }
  Buffer plain(int64_t rows, int64_t columns) const { return Buffer(c.type, Kind::kStorage, rows, columns); }
  Buffer state(int64_t rows, int64_t columns, int64_t pad = 0) const {
    return Buffer(c.type, Kind::kState, rows, columns, pad);
  }
  fr::EmulationOptions options_of(Pass pass) const {
    fr::EmulationOptions options = g_options;
    options.seed = seed_, options.tf32 = c.tf32;
    if (pass != g_stalled && g_stalled != Pass::kBoth) options.stall_after = -1, options.status = nullptr;
    return options;
  }

  void allocate(int d) {
    Inputs& in = p.inputs[d];
    all.push_back({state(p.N, GH, c.pad), storage(GH, R), storage(c.projection, H), plain(1, GH), plain(c.batch, R),
        state(c.batch, CH), storage(p.N, R), plain(c.batch, R), state(c.batch, CH), plain(p.N, saved),
        state(p.N, CH, c.pad), storage(p.N, R), state(c.batch, R), state(c.batch, CH), state(c.batch, R),
        state(c.batch, CH), plain(1, UH), state(c.batch, UH)});
    Direction& x = all.back();
    x.gates.put(in.gates), x.hh.put(in.hh), x.bias.put(in.bias), x.h0.put(in.h0), x.c0.put(in.c0), x.unit.put(in.unit);
    if (c.projection) x.hr.put(in.hr);
    x.d_output.put(p.d_output[d]), x.d_h.put(p.d_h[d]), x.d_c.put(p.d_c[d]);
    Values zero_h(c.batch * R, 0.0), zero_c(c.batch * CH, 0.0), zero_unit(c.batch * UH, 0.0);
    x.d_h0r.put(zero_h), x.d_c0r.put(zero_c), x.d_unit.put(zero_unit);
  }

  void set_forward(int d) {
    if (d == 0) {
      forward.shape = {c.cell, c.type, c.steps, c.batch, 0, H, c.projection, c.packed ? p.batch_sizes.data() : nullptr,
          c.packed ? p.step_offset.data() : nullptr, c.lengths ? p.lengths.data() : nullptr,
          c.resets ? p.resets.data() : nullptr};
      forward.options = {c.cell_clip, c.proj_clip, c.to_initial, c.noise_options()};
      forward.directions = c.directions;
      forward.direction.resize(c.directions);
    }
    Direction& x = all[d];
    fr::ForwardDirection& f = forward.direction[d];
    f.reverse = p.reverse(d);
    f.weights = {nullptr, x.hh.data, c.projection ? x.hr.data : nullptr, nullptr, c.bias ? x.bias.data : nullptr, 0,
        x.hh.stride, x.hr.stride, x.unit.data};
    f.input_gates = x.gates.as_rows(c.batch);
    f.output = x.output.as_rows(c.batch);
    if (c.initial) f.h0 = x.h0.data, f.c0 = x.c0.data;
    f.h_n = x.h_n.data, f.c_n = x.c_n.data;
    if (!c.inference && p.cell.cells) f.cells = x.cells.as_rows(c.batch);
    if (!c.inference && !c.recompute && p.cell.saved) f.gates = x.kept.as_rows(c.batch);
  }

  void take_forward(int d) {
    got[d].output = all[d].output.take(), got[d].h_n = all[d].h_n.take(), got[d].c_n = all[d].c_n.take();
    if (g_stalled == Pass::kForward) got[d].kept = all[d].kept.take(), got[d].cells = all[d].cells.take();
  }

  // Backward over `count` steps of `together` directions, after `done` steps.
  void run_range(int first, int together, int64_t done, int64_t count) {
    fr::BackwardArgs backward{};
    backward.shape = forward.shape, backward.options = forward.options, backward.directions = together;
    backward.first_step = !c.range ? 0 : p.reverse(first) ? done : c.steps - done - count;
    backward.last_step = backward.first_step + count;
    const int64_t row0 = p.row(backward.first_step, 0);
    const int64_t rows = p.row(backward.last_step - 1, 0) + p.batch_at(backward.last_step - 1) - row0;
    std::vector<Range> ranges;
    for (int i = 0; i < together; ++i) {
      ranges.push_back({state(rows, GH), storage(rows, GH), storage(rows, H), plain(rows, R), plain(rows, H),
          plain(rows, c.projection)});
      const Values& gates = p.inputs[first + i].gates;
      Values part(gates.begin() + row0 * GH, gates.begin() + (row0 + rows) * GH);
      ranges.back().gates.put(part);
    }
    for (int i = 0; i < together; ++i)
      set_backward(backward.direction[i], first + i, ranges[i], done + count < c.steps);
    fr::emulated_backward(backward, options_of(Pass::kBackward));
    for (int i = 0; i < together; ++i) {
      if (g_only == Only::kAll) add_products(first + i, ranges[i], row0, rows);
      check_inactive(first + i, ranges[i], row0, backward.first_step, backward.last_step);
    }
  }

  // more: other ranges follow.
  void set_backward(fr::BackwardDirection& b, int d, Range& r, bool more) {
    Direction& x = all[d];
    b = {};
    b.reverse = p.reverse(d);
    b.wants_initial = !c.discard || more;
    b.weights = forward.direction[d].weights;
    if (c.recompute) b.input_gates = r.gates.as_rows(c.batch);
    b.output = x.output.as_rows(c.batch);
    b.h0 = forward.direction[d].h0, b.c0 = forward.direction[d].c0;
    b.gates = forward.direction[d].gates, b.cells = forward.direction[d].cells;
    b.d_output = x.d_output.as_rows(c.batch);
    b.d_h = x.d_h.data, b.d_c = x.d_c.data, b.d_unit = x.d_unit.data;
    if (c.to_initial) b.d_h0_reset = x.d_h0r.data, b.d_c0_reset = x.d_c0r.data;
    b.d_gates = r.d_gates.as_rows(c.batch);
    if (p.cell.split_gate >= 0) b.d_recurrent = r.d_recurrent.as_rows(c.batch);
    b.h_prev = r.h_prev.as_rows(c.batch);
    if (p.cell.two_phases()) b.inner = r.inner.as_rows(c.batch);
    if (c.projection) b.d_projected = r.d_projected.as_rows(c.batch);
  }

  // The time-parallel products, which are the caller's.
  void add_products(int d, Range& r, int64_t row0, int64_t rows) {
    Inputs& g = got[d].gradient;
    for (int64_t n = 0; n < rows; ++n)
      for (int64_t j = 0; j < GH; ++j) {
        const int gate = int(j / H);
        const double d_input = r.d_gates.get(n, j);
        const double d_recurrent = gate == p.cell.split_gate ? r.d_recurrent.get(n, j % H) : d_input;
        g.gates[(row0 + n) * GH + j] = d_input;
        g.bias[j] += d_recurrent;
        const bool second = gate >= p.cell.phase[0].gates;
        for (int64_t k = 0; k < R; ++k)
          g.hh[j * R + k] += d_recurrent * (second ? r.inner.get(n, k) : r.h_prev.get(n, k));
      }
    for (int64_t n = 0; n < rows && c.projection; ++n)
      for (int64_t q = 0; q < R; ++q)
        for (int64_t k = 0; k < H; ++k) g.hr[q * H + k] += r.d_projected.get(n, q) * r.inner.get(n, k);
  }

  void check_inactive(int d, Range& r, int64_t row0, int64_t first_step, int64_t last_step) {
    bool& zero = got[d].zero_where_inactive;
    for (int64_t t = first_step; t < last_step; ++t)
      for (int64_t b = 0; b < p.batch_at(t); ++b)
        if (!p.active(t, b)) {
          for (int64_t j = 0; j < GH; ++j) zero &= r.d_gates.get(p.row(t, b) - row0, j) == 0;
          for (int64_t k = 0; k < R; ++k) zero &= r.h_prev.get(p.row(t, b) - row0, k) == 0;
        }
  }

  // The gradients of initial states and unit weights.
  void take_states(int d) {
    Inputs& g = got[d].gradient;
    g.h0 = all[d].d_h.take(), g.c0 = all[d].d_c.take();
    const Values d_unit = all[d].d_unit.take();
    g.unit = Values(UH, 0.0);
    for (size_t i = 0; i < d_unit.size(); ++i) g.unit[i % UH] += d_unit[i];
    const Values h0r = all[d].d_h0r.take(), c0r = all[d].d_c0r.take();
    for (size_t i = 0; i < g.h0.size(); ++i) g.h0[i] += h0r[i];
    for (size_t i = 0; i < g.c0.size(); ++i) g.c0[i] += c0r[i];
  }

  Problem& p;
  const Case& c = p.c;
  const uint64_t seed_;
  const int64_t H = c.hidden, R = p.R, GH = p.cell.gates * H, CH = p.cell.cells * H, UH = p.cell.unit_weights * H,
                saved = p.cell.saved * H;
  const fr::emulation::Registered known[5] = {registered(p.batch_sizes), registered(p.step_offset),
      registered(p.lengths), registered(p.resets), {p.c.noise_options().seed, sizeof(uint64_t)}};
  std::vector<Direction> all;
  fr::ForwardArgs forward{};
  std::vector<Got> got = std::vector<Got>(c.directions);
};

std::vector<Got> run_kernels(Problem& p, uint64_t seed) { return KernelRun(p, seed).run(); }

double distance(const Values& got, const Values& want) {  // largest difference over the largest value; NaN counts as
                                                          // infinite
  double worst = 0, scale = 1e-30;
  for (size_t i = 0; i < want.size(); ++i) {
    scale = std::fmax(scale, std::fabs(want[i]));
    const double difference = std::fabs(got[i] - want[i]);
    if (!(difference <= worst)) worst = std::isnan(difference) ? INFINITY : difference;
  }
  return worst / std::fmax(scale, 0.1);
}

int g_failures = 0, g_cases = 0;
bool g_verbose = false;

void complain(const Case& c, uint64_t seed, const char* what, double got, double bound) {
  ++g_failures;
  std::printf(
      "FAIL %s seed %llu: %s %.3g > %.3g\n", c.text().c_str(), static_cast<unsigned long long>(seed), what, got, bound);
}

// Bounds: one rounding of the type (half an ulp at 1: 2^-8, 2^-11, 2^-24, 2^-53; TF32 operands 2^-11), times a factor
// for the operations and steps that follow: 16 forward, 64 backward (sums over T and B of products of rounded factors).
double unit_of(const Case& c) {
  if (c.tf32) return std::ldexp(1, -11);
  switch (c.type) {
    case Type::kFloat64: return std::ldexp(1, -53);
    case Type::kFloat32: return std::ldexp(1, -24);
    case Type::kBFloat16: return std::ldexp(1, -8);
    default: return std::ldexp(1, -11);
  }
}

void run_case(const Case& c, uint64_t seed, unsigned problem_seed) {
  ++g_cases;
  Problem p = make_problem(c, problem_seed);
  std::vector<Got> got;
  try {
    got = run_kernels(p, seed);
  } catch (const std::exception& error) {
    ++g_failures;
    std::printf("FAIL %s seed %llu: %s\n", c.text().c_str(), static_cast<unsigned long long>(seed), error.what());
    return;
  }
  const double unit = unit_of(c), forward_bound = 16 * unit;
  const auto test = [&](const char* what, double error, double bound) {
    if (g_verbose) std::printf("  %s %s %.3g (bound %.3g)\n", c.text().c_str(), what, error, bound);
    if (!(error <= bound)) complain(c, seed, what, error, bound);
  };
  // The other types' gradients are compared with double, run with one step a launch, which is the same for any device
  // and order of threads.
  static std::map<unsigned, std::vector<Got>> in_double;
  std::vector<Got>& exact = in_double[problem_seed];
  if (exact.empty() && !c.inference && c.type != Type::kFloat64) {
    Problem q = p;
    q.c.type = Type::kFloat64, q.c.tf32 = false;
    exact = run_kernels(q, 0);
  }
  for (int d = 0; d < c.directions; ++d) {
    const Result want = reference(p, p.inputs[d], d);
    test("output", distance(got[d].output, want.output), forward_bound);
    test("h_n", distance(got[d].h_n, want.h_n), forward_bound);
    if (p.cell.cells) test("c_n", distance(got[d].c_n, want.c_n), 2 * forward_bound);
    if (c.inference) continue;
    test("rows that must be zero", got[d].zero_where_inactive ? 0 : 1, 0);
    Inputs& g = got[d].gradient;
    // if rounding flips a pre-activation's sign, all of its gradient changes
    if (has_kink(c.cell) && unit > std::ldexp(1, -24)) continue;
    if (!exact.empty()) {
      const Inputs& e = exact[d].gradient;
      const double bound = 64 * unit;
      test("d_gates", distance(g.gates, e.gates), bound), test("d_weight_hh", distance(g.hh, e.hh), bound);
      test("d_bias", distance(g.bias, e.bias), bound), test("d_unit", distance(g.unit, e.unit), bound);
      if (!c.discard) test("d_h0", distance(g.h0, e.h0), bound);
      if (c.projection) test("d_weight_hr", distance(g.hr, e.hr), bound);
      if (p.cell.cells) test("d_c0", distance(g.c0, e.c0), bound);
      continue;
    }
    // Directional derivatives of the plain loop, one tensor at a time.
    std::mt19937 random(problem_seed + 99);
    std::normal_distribution<double> normal;
    const std::pair<const char*, std::pair<Values Inputs::*, bool>> members[] = {{"d_gates", {&Inputs::gates, true}},
        {"d_weight_hh", {&Inputs::hh, p.cell.multiplies()}}, {"d_weight_hr", {&Inputs::hr, c.projection > 0}},
        {"d_bias", {&Inputs::bias, p.cell.multiplies()}}, {"d_unit", {&Inputs::unit, p.cell.unit_weights > 0}},
        {"d_h0", {&Inputs::h0, !c.discard}}, {"d_c0", {&Inputs::c0, p.cell.cells}}};
    for (const auto& [name, entry] : members) {
      if (!entry.second) continue;
      const auto member = entry.first;
      for (int repeat = 0; repeat < 2; ++repeat) {
        Values direction((g.*member).size());
        for (double& x : direction) x = normal(random);
        const double step = 1e-5 / std::sqrt(double(direction.size()));
        Inputs plus = p.inputs[d], minus = p.inputs[d];
        for (size_t i = 0; i < direction.size(); ++i)
          (plus.*member)[i] += step * direction[i], (minus.*member)[i] -= step * direction[i];
        const double want_slope = (loss(p, d, plus) - loss(p, d, minus)) / (2 * step),
                     got_slope = dot(g.*member, direction);
        // rounding of two losses of size ~|loss| (2^-53 each), divided by the step, and the cubic term of the step
        const double bound =
            1e-5 * std::fmax(1.0, std::fabs(want_slope)) * std::sqrt(double(direction.size()) / 10 + 1);
        test(name, std::fabs(want_slope - got_slope), bound);
      }
    }
  }
}

}  // namespace
