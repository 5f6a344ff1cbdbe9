// Compares the emulated CUDA kernels with the CPU core, through the structs of csrc/rnn.h: every cell x type x
// direction on small odd shapes, padded with lengths and resets, packed, and with rebuilt gates. Both get the same
// rows, and both backward passes start from what the CPU core kept. The kernels leave the time-parallel products to
// their caller; here they are computed in double.
// usage: emulation_cpu_test STRATEGY [TEXT] [seed ...]: all cases, or those with TEXT in their name. Prints a line for
// each failure and a summary; exit status 1 on failure.
#include <cmath>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "../../../csrc/emulation/rnn_emulated.h"
#include "buffer.h"
#include "plain_step.h"

namespace {

using fr::Cell, fr::Type;

struct Case {
  Cell cell;
  Type type;
  bool tf32;
  int64_t steps, batch, hidden, projection;
  int directions;
  bool first_reverse, masked, packed, recompute;
};

std::string text(const Case& c) {
  static const char* const types[] = {"float32", "float64", "bfloat16", "float16"};
  return std::string(fr::facts_of(c.cell).name) + " " + (c.tf32 ? "tf32" : types[int(c.type)]) + " T" +
         std::to_string(c.steps) + " B" + std::to_string(c.batch) + " H" + std::to_string(c.hidden) +
         (c.directions == 2    ? " both"
             : c.first_reverse ? " reverse"
                               : " forward") +
         (c.masked ? " masked" : "") + (c.packed ? " packed" : "") + (c.recompute ? " recompute" : "");
}

// Both backends round at the same places: operands and states to the storage type, all else to the state type. So they
// differ only by the order of sums in the state type. 32 roundings of that type cover the sums over H and the steps. In
// 16 bit such a difference sometimes flips a rounding to storage, which later steps pass on: 4 roundings of storage.
// TF32 rounds the operands of every product to 11 bits, the CPU core does not: 16 of these roundings.
double bound_of(const Case& c) {
  if (c.tf32) return 16 * std::ldexp(1, -11);
  switch (c.type) {
    case Type::kFloat64: return 32 * std::ldexp(1, -53);
    case Type::kFloat32: return 32 * std::ldexp(1, -24);
    case Type::kBFloat16: return 4 * std::ldexp(1, -8);
    default: return 4 * std::ldexp(1, -11);
  }
}

// The arguments of one backend for one direction.
struct Direction {
  Buffer input, input_gates, ih, hh, hr, bias_ih, bias_hh, h0, c0;
  Buffer output, h_n, c_n, gates, cells;
  Buffer d_output, d_h_n, d_c_n;
  Buffer weight_unit, d_unit;
  // the kernels'
  Buffer d_h, d_c, d_h0_reset, d_c0_reset, d_gates, d_recurrent, h_prev, inner, d_projected;
  Buffer d_input, d_h0, d_c0, d_weight_ih, d_weight_hh, d_weight_hr, d_bias_ih, d_bias_hh, d_weight_unit;  // the core's
};

struct Test {
  const Case& c;
  const uint64_t seed;
  const fr::CellFacts& cell;
  const int64_t H, R, GH, CH, UH, saved;
  static constexpr int64_t kInput = 3;
  int64_t N = 0;
  std::vector<int64_t> lengths, batch_sizes, step_offset;
  std::vector<uint8_t> resets;
  std::mt19937 random{7};
  std::string worst_name;
  double worst = 0;

  Test(const Case& which, uint64_t s)
      : c(which), seed(s), cell(fr::facts_of(c.cell)), H(c.hidden), R(c.projection ? c.projection : c.hidden),
        GH(cell.gates * H), CH(cell.cells * H), UH(cell.unit_weights * H), saved(cell.saved * H) {}

  int64_t integer(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(random); }
  int64_t batch_at(int64_t t) const { return c.packed ? batch_sizes[t] : c.batch; }
  int64_t row(int64_t t, int64_t b) const { return (c.packed ? step_offset[t] : t * c.batch) + b; }

  void make_rows() {
    int64_t rows = c.batch;
    for (int64_t t = 0; t < c.steps; ++t) {
      batch_sizes.push_back(rows), step_offset.push_back(N);
      N += rows;
      if (c.packed) rows = integer(1, rows);
    }
    for (int64_t b = 0; b < c.batch; ++b) lengths.push_back(integer(0, c.steps));
    for (int64_t i = 0; i < N; ++i) resets.push_back(integer(0, 2) == 0);
  }

  Direction make_direction() {
    const auto storage = [&](int64_t rows, int64_t columns) { return Buffer(c.type, Kind::kStorage, rows, columns); };
    const auto state = [&](int64_t rows, int64_t columns) { return Buffer(c.type, Kind::kState, rows, columns); };
    // Rows aligned to 16 bytes with memory between them that must not be read: kernels copy such weights in place.
    const auto apart = [&](int64_t rows, int64_t columns) {
      const int64_t piece = 16 / fr::storage_bytes(c.type);
      return Buffer(
          c.type, Kind::kStorage, rows, columns, c.masked ? (columns + piece - 1) / piece * piece - columns : 0);
    };
    const auto fill = [&](Buffer& buffer, double scale) {
      std::normal_distribution<double> normal(0, scale);
      Values values(buffer.rows * buffer.columns);
      for (double& v : values) v = scale > 0 ? normal(random) : 0;
      buffer.put(values);
    };
    const int64_t B = c.batch;
    Direction d{storage(N, kInput), state(N, GH), storage(GH, kInput), apart(GH, R), apart(c.projection, H),
        storage(1, GH), storage(1, GH), storage(B, R), state(B, CH), storage(N, R), storage(B, R), state(B, CH),
        storage(N, saved), state(N, CH), storage(N, R), storage(B, R), storage(B, CH), storage(1, UH), state(B, UH),
        state(B, R), state(B, CH), state(B, R), state(B, CH), storage(N, GH), storage(N, H), storage(N, R),
        storage(N, H), storage(N, c.projection), storage(N, kInput), storage(B, R), storage(B, CH), storage(GH, kInput),
        storage(GH, R), storage(c.projection, H), storage(1, GH), storage(1, GH), storage(1, UH)};
    const double scale = 1 / std::sqrt(double(H));
    fill(d.input, 1), fill(d.ih, 0.6), fill(d.hh, scale), fill(d.hr, 1.5 * scale), fill(d.bias_ih, 0.3),
        fill(d.bias_hh, 0.3);
    fill(d.h0, 0.7), fill(d.c0, 0.7), fill(d.weight_unit, 0.5), fill(d.d_unit, 0), fill(d.d_output, 1),
        fill(d.d_h_n, 1), fill(d.d_c_n, 1);
    Values cells = d.c0.take();
    for (size_t i = 0; i < cells.size(); ++i) cells[i] = possible_cell(c.cell, H, i, cells[i]);
    d.c0.put(cells);
    Values d_h = d.d_h_n.take(), d_c = d.d_c_n.take();
    d.d_h.put(d_h), d.d_c.put(d_c);
    fill(d.gates, 0), fill(d.cells, 0), fill(d.d_h0_reset, 0), fill(d.d_c0_reset, 0);
    for (int64_t n = 0; n < N; ++n)
      for (int64_t j = 0; j < GH; ++j) {
        double sum = d.bias_ih.get(0, j);
        for (int64_t k = 0; k < kInput; ++k) sum += d.input.get(n, k) * d.ih.get(j, k);
        d.input_gates.set(n, j, sum);
      }
    return d;
  }

  static Buffer copy(const Buffer& from) {
    Buffer to(from.type, from.kind, from.rows, from.columns, from.stride - from.columns);
    Values values = from.take();
    to.put(values);
    return to;
  }
  static Direction copy(const Direction& d) {
    return {copy(d.input), copy(d.input_gates), copy(d.ih), copy(d.hh), copy(d.hr), copy(d.bias_ih), copy(d.bias_hh),
        copy(d.h0), copy(d.c0), copy(d.output), copy(d.h_n), copy(d.c_n), copy(d.gates), copy(d.cells),
        copy(d.d_output), copy(d.d_h_n), copy(d.d_c_n), copy(d.weight_unit), copy(d.d_unit), copy(d.d_h), copy(d.d_c),
        copy(d.d_h0_reset), copy(d.d_c0_reset), copy(d.d_gates), copy(d.d_recurrent), copy(d.h_prev), copy(d.inner),
        copy(d.d_projected), copy(d.d_input), copy(d.d_h0), copy(d.d_c0), copy(d.d_weight_ih), copy(d.d_weight_hh),
        copy(d.d_weight_hr), copy(d.d_bias_ih), copy(d.d_bias_hh), copy(d.d_weight_unit)};
  }

  template <class Args>
  void set_common(Args& args) const {
    args.shape = {c.cell, c.type, c.steps, c.batch, kInput, H, c.projection, c.packed ? batch_sizes.data() : nullptr,
        c.packed ? step_offset.data() : nullptr, c.masked ? lengths.data() : nullptr,
        c.masked ? resets.data() : nullptr};
    args.options = {cell.cells ? 0.9 : 0.0, c.projection ? 0.8 : 0.0, c.masked};
    args.directions = c.directions;
  }
  fr::Weights weights(const Direction& d) const {
    return {d.ih.data, d.hh.data, c.projection ? d.hr.data : nullptr, d.bias_ih.data,
        cell.multiplies() ? d.bias_hh.data : nullptr, kInput, d.hh.stride, d.hr.stride, d.weight_unit.data};
  }
  bool reverse(int i) const { return i == 1 ? !c.first_reverse : c.first_reverse; }

  fr::ForwardArgs forward_args(std::vector<Direction>& all, bool cpu) const {
    fr::ForwardArgs args{};
    set_common(args);
    args.threads = 1;
    args.direction.resize(c.directions);
    for (int i = 0; i < c.directions; ++i) {
      Direction& d = all[i];
      fr::ForwardDirection& to = args.direction[i];
      to.reverse = reverse(i);
      to.weights = weights(d);
      if (cpu) to.input = d.input.as_rows(c.batch);
      else to.input_gates = d.input_gates.as_rows(c.batch);
      to.output = d.output.as_rows(c.batch);
      to.h0 = d.h0.data, to.h_n = d.h_n.data;
      if (cell.cells) to.c0 = d.c0.data, to.c_n = d.c_n.data, to.cells = d.cells.as_rows(c.batch);
      if (saved && !c.recompute) to.gates = d.gates.as_rows(c.batch);
    }
    return args;
  }

  template <class To>
  void set_backward(To& to, Direction& d, int i) const {
    to.reverse = reverse(i);
    to.weights = weights(d);
    to.output = d.output.as_rows(c.batch), to.d_output = d.d_output.as_rows(c.batch);
    to.h0 = d.h0.data;
    if (cell.cells) to.c0 = d.c0.data, to.cells = d.cells.as_rows(c.batch);
    if (saved && !c.recompute) to.gates = d.gates.as_rows(c.batch);
  }

  fr::BackwardArgs backward_args(std::vector<Direction>& all) const {
    fr::BackwardArgs args{};
    set_common(args);
    args.last_step = c.steps;
    for (int i = 0; i < c.directions; ++i) {
      Direction& d = all[i];
      fr::BackwardDirection& to = args.direction[i];
      set_backward(to, d, i);
      to.input_gates = d.input_gates.as_rows(c.batch);
      to.d_h = d.d_h.data, to.d_unit = d.d_unit.data, to.wants_initial = true;
      if (cell.cells) to.d_c = d.d_c.data;
      if (c.masked) to.d_h0_reset = d.d_h0_reset.data;
      if (c.masked && cell.cells) to.d_c0_reset = d.d_c0_reset.data;
      to.d_gates = d.d_gates.as_rows(c.batch), to.h_prev = d.h_prev.as_rows(c.batch);
      if (cell.split_gate >= 0) to.d_recurrent = d.d_recurrent.as_rows(c.batch);
      if (cell.two_phases()) to.inner = d.inner.as_rows(c.batch);
      if (c.projection) to.d_projected = d.d_projected.as_rows(c.batch);
    }
    return args;
  }

  fr::GradientArgs gradient_args(std::vector<Direction>& all) const {
    fr::GradientArgs args{};
    set_common(args);
    args.threads = 1, args.range_bytes = 1 << 20;
    args.direction.resize(c.directions);
    for (int i = 0; i < c.directions; ++i) {
      Direction& d = all[i];
      fr::GradientDirection& to = args.direction[i];
      set_backward(to, d, i);
      to.input = d.input.as_rows(c.batch), to.d_h_n = d.d_h_n.data, to.d_input = d.d_input.data, to.d_h0 = d.d_h0.data;
      if (cell.cells) to.d_c_n = d.d_c_n.data, to.d_c0 = d.d_c0.data;
      if (c.projection) to.d_weight_hr = d.d_weight_hr.data;
      if (cell.unit_weights) to.d_weight_unit = d.d_weight_unit.data;
      to.d_weight_ih = d.d_weight_ih.data, to.d_weight_hh = cell.multiplies() ? d.d_weight_hh.data : nullptr;
      to.d_bias_ih = d.d_bias_ih.data, to.d_bias_hh = cell.multiplies() ? d.d_bias_hh.data : nullptr;
    }
    return args;
  }

  // Computes from the kernels' results each gradient that the core writes itself.
  void finish(Direction& d) const {
    const auto sum_rows = [&](const Buffer& left, int64_t first, int64_t count, const Buffer& right, Buffer& to,
                              int64_t row) {
      for (int64_t j = 0; j < count; ++j)
        for (int64_t k = 0; k < to.columns; ++k) {
          double sum = 0;
          for (int64_t n = 0; n < N; ++n) sum += left.get(n, first + j) * right.get(n, k);
          to.set(row + j, k, sum);
        }
    };
    const auto sum_bias = [&](const Buffer& left, int64_t first, int64_t count, Buffer& to, int64_t column) {
      for (int64_t j = 0; j < count; ++j) {
        double sum = 0;
        for (int64_t n = 0; n < N; ++n) sum += left.get(n, first + j);
        to.set(0, column + j, sum);
      }
    };
    const bool split = cell.split_gate >= 0, second = cell.second_gates();
    const int64_t joint = split ? cell.split_gate * H : cell.phase[0].gates * H;
    sum_rows(d.d_gates, 0, GH, d.input, d.d_weight_ih, 0);
    if (cell.multiplies()) sum_rows(d.d_gates, 0, joint, d.h_prev, d.d_weight_hh, 0);
    if (split) sum_rows(d.d_recurrent, 0, H, d.h_prev, d.d_weight_hh, joint);
    if (second) sum_rows(d.d_gates, joint, GH - joint, d.inner, d.d_weight_hh, joint);
    if (c.projection) sum_rows(d.d_projected, 0, c.projection, d.inner, d.d_weight_hr, 0);
    sum_bias(d.d_gates, 0, GH, d.d_bias_ih, 0);
    if (cell.multiplies()) sum_bias(d.d_gates, 0, GH, d.d_bias_hh, 0);
    if (split) sum_bias(d.d_recurrent, 0, H, d.d_bias_hh, joint);
    for (int64_t n = 0; n < N; ++n)
      for (int64_t k = 0; k < kInput; ++k) {
        double sum = 0;
        for (int64_t j = 0; j < GH; ++j) sum += d.d_gates.get(n, j) * d.ih.get(j, k);
        d.d_input.set(n, k, sum);
      }
    for (int64_t j = 0; j < UH; ++j) {
      double sum = 0;
      for (int64_t b = 0; b < c.batch; ++b) sum += d.d_unit.get(b, j);
      d.d_weight_unit.set(0, j, sum);
    }
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t j = 0; j < R; ++j) d.d_h0.set(b, j, d.d_h.get(b, j) + (c.masked ? d.d_h0_reset.get(b, j) : 0));
      for (int64_t j = 0; j < CH; ++j) d.d_c0.set(b, j, d.d_c.get(b, j) + (c.masked ? d.d_c0_reset.get(b, j) : 0));
    }
  }

  // Largest difference relative to the largest value. Values that neither wrote (NaN in both) count as equal.
  void compare(const std::string& name, const Buffer& a, const Buffer& b) {
    double most = 0.1, difference = 0;
    for (int64_t i = 0; i < a.rows; ++i)
      for (int64_t j = 0; j < a.columns; ++j) {
        const double x = a.get(i, j), y = b.get(i, j);
        if (std::isnan(x) && std::isnan(y)) continue;
        most = std::fmax(most, std::fabs(y));
        difference = std::isnan(x - y) ? INFINITY : std::fmax(difference, std::fabs(x - y));
      }
    if (difference / most > worst) worst = difference / most, worst_name = name;
  }

  // The largest difference of any buffer.
  void run(const std::string& strategy) {
    make_rows();
    const fr::emulation::Registered known[] = {
        registered(lengths), registered(batch_sizes), registered(step_offset), registered(resets)};
    const fr::EmulationOptions options{strategy, seed, c.tf32, 0, 0, 99 * 1024};
    std::vector<Direction> core, kernels;
    for (int i = 0; i < c.directions; ++i) core.push_back(make_direction()), kernels.push_back(copy(core[i]));
    fr::cpu_forward(forward_args(core, true));
    fr::emulated_forward(forward_args(kernels, false), options);
    for (int i = 0; i < c.directions; ++i) {
      const Direction &a = kernels[i], &b = core[i];
      compare("output", a.output, b.output), compare("h_n", a.h_n, b.h_n), compare("c_n", a.c_n, b.c_n);
      compare("gates", a.gates, b.gates), compare("cells", a.cells, b.cells);
    }
    std::vector<Direction> from;
    for (const Direction& d : core) from.push_back(copy(d));
    fr::cpu_backward(gradient_args(core));
    fr::emulated_backward(backward_args(from), options);
    for (int i = 0; i < c.directions; ++i) {
      finish(from[i]);
      const Direction &a = from[i], &b = core[i];
      compare("d_input", a.d_input, b.d_input), compare("d_h0", a.d_h0, b.d_h0), compare("d_c0", a.d_c0, b.d_c0);
      compare("d_weight_ih", a.d_weight_ih, b.d_weight_ih), compare("d_weight_hh", a.d_weight_hh, b.d_weight_hh);
      compare("d_weight_hr", a.d_weight_hr, b.d_weight_hr);
      compare("d_bias_ih", a.d_bias_ih, b.d_bias_ih), compare("d_bias_hh", a.d_bias_hh, b.d_bias_hh);
      compare("d_weight_unit", a.d_weight_unit, b.d_weight_unit);
    }
  }
};

std::vector<Case> make_cases() {
  std::vector<Case> cases;
  for (const fr::CellFacts& facts : fr::kCells)
    for (const auto& [type, tf32] : {std::pair(Type::kFloat64, false), {Type::kFloat32, false}, {Type::kFloat32, true},
             {Type::kBFloat16, false}, {Type::kFloat16, false}}) {
      const auto add = [&, type = type, tf32 = tf32](int64_t steps, int64_t batch, int64_t hidden, int directions,
                           bool first_reverse, bool masked, bool packed, bool recompute) {
        const int64_t projection = facts.projects() ? std::max<int64_t>(1, hidden * 2 / 3) : 0;
        cases.push_back({facts.code, type, tf32, steps, batch, hidden, projection, directions, first_reverse, masked,
            packed, recompute});
      };
      add(5, 3, 7, 1, false, false, false, false);
      add(5, 3, 7, 1, true, true, false, false);
      add(3, 17, 33, 2, false, true, false, false);
      add(4, 5, 9, 2, true, true, true, true);
      add(1, 1, 1, 1, false, false, false, false);
    }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string strategy = argc > 1 ? argv[1] : "step";
  std::vector<uint64_t> seeds;
  std::string only;
  for (int i = 2; i < argc; ++i) {
    if (std::isdigit(static_cast<unsigned char>(argv[i][0]))) seeds.push_back(std::stoull(argv[i]));
    else only = argv[i];
  }
  if (seeds.empty()) seeds.push_back(0);
  int failures = 0, count = 0;
  for (const Case& c : make_cases())
    for (const uint64_t seed : seeds) {
      if (text(c).find(only) == std::string::npos) continue;
      Test test(c, seed);
      ++count;
      try {
        test.run(strategy);
      } catch (const std::exception& error) { test.worst = INFINITY, test.worst_name = error.what(); }
      const bool fails = !(test.worst <= bound_of(c));
      failures += fails;
      if (fails)
        std::printf("FAIL %s seed %llu: %s differs by %.3g (bound %.3g)\n", text(c).c_str(),
            static_cast<unsigned long long>(seed), test.worst_name.c_str(), test.worst, bound_of(c));
    }
  std::printf("%d cases, %d failures\n", count, failures);
  return failures ? 1 : 0;
}
