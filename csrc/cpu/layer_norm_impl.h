// Defines find_layer_norm; included by each layer_norm_*.cpp. Means and variances add the units in order, lane by lane.
#pragma once

#include "layer_norm.h"
#include "simd.h"

namespace fr::cpu {

template <class Isa, class T>
struct LayerNorm {
  using V = Vec<T, Isa>;
  using Args = LayerNormArgs;
  static constexpr int kLanes = V::kLanes;

  // ---- over units ----

  template <class Function>
  static void each(int64_t count, Function function) {
    for (int64_t unit = 0; unit < count; unit += kLanes)
      function(unit, count - unit < kLanes ? static_cast<int>(count - unit) : kLanes);
  }

  // Means of two functions over the units.
  struct Means {
    T first, second;
  };
  template <class Function>
  static Means means(int64_t count, Function function) {
    V first(0), second(0), a, b;
    int64_t unit = 0;
    for (; unit + kLanes <= count; unit += kLanes) {
      function(unit, kLanes, a, b);
      first = first + a, second = second + b;
    }
    Means sum{0, 0};
    for (int lane = 0; lane < kLanes; ++lane) sum.first += first.raw[lane], sum.second += second.raw[lane];
    if (unit < count) {
      const int n = static_cast<int>(count - unit);
      function(unit, n, a, b);
      for (int lane = 0; lane < n; ++lane) sum.first += a.raw[lane], sum.second += b.raw[lane];
    }
    return {sum.first / static_cast<T>(count), sum.second / static_cast<T>(count)};
  }

  struct Moments {
    T mean, scale;  // scale: 1 / deviation
  };
  static Moments moments(const T* x, int64_t count) {
    const T mean = means(count, [&](int64_t unit, int n, V& a, V& b) { a = load<V>(x + unit, n), b = V(0); }).first;
    const V middle(mean);
    const T variance = means(count, [&](int64_t unit, int n, V& a, V& b) {
      const V away = load<V>(x + unit, n) - middle;
      a = away * away, b = V(0);
    }).first;
    return {mean, T(1) / root(variance + T(1e-5))};
  }
  // The functions of <cmath> are inline, and a copy compiled for this instruction set must not be linked into other
  // files.
  static T root(T x) {
    if constexpr (std::is_same_v<T, float>) return __builtin_sqrtf(x);
    else return __builtin_sqrt(x);
  }

  // Replaces `count` values x by N(x), and returns 1 / their deviation.
  static T normalise(T* x, int64_t count) {
    const Moments of = moments(x, count);
    each(count, [&](int64_t unit, int n) { store(x + unit, (load<V>(x + unit, n) - V(of.mean)) * V(of.scale), n); });
    return of.scale;
  }
  // The gradient of x, from that of s = N(x) gain + shift.
  static void normalise_backward(const T* normal, const T* gain, const T* d_s, T scale, T* d, int64_t count) {
    const Means mean = means(count, [&](int64_t unit, int n, V& a, V& b) {
      a = load<V>(d_s + unit, n) * load<V>(gain + unit, n);
      b = a * load<V>(normal + unit, n);
    });
    each(count, [&](int64_t unit, int n) {
      const V d_normal = load<V>(d_s + unit, n) * load<V>(gain + unit, n);
      store(d + unit, V(scale) * (d_normal - V(mean.first) - load<V>(normal + unit, n) * V(mean.second)), n);
    });
  }

  // ---- one row ----

  // One row's values in the arrays, of type T. In arrays of G*H values a gate's part begins at gate * hidden.
  struct Row {
    const Args& args;
    const int64_t hidden = args.hidden, index;

    T* wide(const void* data) const {
      return static_cast<T*>(const_cast<void*>(data)) + index * (args.gru ? 3 : 4) * hidden;
    }
    T* narrow(const void* data) const { return static_cast<T*>(const_cast<void*>(data)) + index * hidden; }
    T* moments() const { return static_cast<T*>(args.moments) + index * 3; }
    const T* gain(int row) const { return static_cast<const T*>(args.units) + row * hidden; }

    V at(const void* data, int gate, int64_t unit, int n) const {
      return load<V>(wide(data) + gate * hidden + unit, n);
    }
    V candidate(int64_t unit, int n) const { return args.candidate ? load<V>(narrow(args.candidate) + unit, n) : V(1); }
    // s of one gate.
    V recurrent(int gate, int64_t unit, int n) const {
      const V scaled = at(args.product, gate, unit, n) * load<V>(gain(gate) + unit, n);
      return args.shift ? scaled + load<V>(static_cast<const T*>(args.shift) + gate * hidden + unit, n) : scaled;
    }
    void put(void* data, int gate, int64_t unit, V value, int n) const {
      store(wide(data) + gate * hidden + unit, value, n);
    }
  };

  static void forward_lstm(const Row& row) {
    const Args& args = row.args;
    const int64_t hidden = args.hidden;
    row.moments()[0] = normalise(row.wide(args.product), 4 * hidden);
    T* const c = row.narrow(args.c);
    each(hidden, [&](int64_t unit, int n) {
      const auto sum = [&](int gate) { return row.at(args.input, gate, unit, n) + row.recurrent(gate, unit, n); };
      const V i = fr_sigmoid(sum(0)), f = fr_sigmoid(sum(1)), g = fr_tanh(sum(2)), o = fr_sigmoid(sum(3));
      row.put(args.gates, 0, unit, i, n), row.put(args.gates, 1, unit, f, n);
      row.put(args.gates, 2, unit, g, n), row.put(args.gates, 3, unit, o, n);
      V made = f * load<V>(row.narrow(args.state) + unit, n) + i * (g * row.candidate(unit, n));
      if (args.cell_clip > 0) made = clipped(made, V(static_cast<T>(args.cell_clip)));
      store(c + unit, made, n);
    });
    const Moments of = moments(c, hidden);
    row.moments()[1] = of.mean, row.moments()[2] = of.scale;
    each(hidden, [&](int64_t unit, int n) {
      const V normal = (load<V>(c + unit, n) - V(of.mean)) * V(of.scale);
      const V y = normal * load<V>(row.gain(4) + unit, n) + load<V>(row.gain(5) + unit, n);
      store(row.narrow(args.h) + unit, row.at(args.gates, 3, unit, n) * fr_tanh(y), n);
    });
  }

  static void backward_lstm(const Row& row) {
    const Args& args = row.args;
    const int64_t hidden = args.hidden;
    const V mean_c(row.moments()[1]), scale_c(row.moments()[2]);
    const T* const c = row.narrow(args.c);
    T* const d_y = row.narrow(args.scratch);
    each(hidden, [&](int64_t unit, int n) {
      const V normal = (load<V>(c + unit, n) - mean_c) * scale_c, o = row.at(args.gates, 3, unit, n);
      const V t = fr_tanh(normal * load<V>(row.gain(4) + unit, n) + load<V>(row.gain(5) + unit, n));
      const V d_h = load<V>(row.narrow(args.d_h) + unit, n);
      row.put(args.d_input, 3, unit, d_h * t * o * (V(1) - o), n);
      store(d_y + unit, d_h * o * (V(1) - t * t), n);
    });
    const Means mean = means(hidden, [&](int64_t unit, int n, V& a, V& b) {
      a = load<V>(d_y + unit, n) * load<V>(row.gain(4) + unit, n);
      b = a * ((load<V>(c + unit, n) - mean_c) * scale_c);
    });
    each(hidden, [&](int64_t unit, int n) {
      const V here = load<V>(c + unit, n), normal = (here - mean_c) * scale_c;
      const V d_normal = load<V>(d_y + unit, n) * load<V>(row.gain(4) + unit, n);
      V d_c = load<V>(row.narrow(args.d_c) + unit, n) + scale_c * (d_normal - V(mean.first) - normal * V(mean.second));
      if (args.cell_clip > 0) d_c = clipped_gradient(here, V(static_cast<T>(args.cell_clip)), d_c);
      const V i = row.at(args.gates, 0, unit, n), f = row.at(args.gates, 1, unit, n),
              g = row.at(args.gates, 2, unit, n);
      const V candidate = row.candidate(unit, n);
      row.put(args.d_input, 0, unit, d_c * (g * candidate) * i * (V(1) - i), n);
      row.put(args.d_input, 1, unit, d_c * load<V>(row.narrow(args.state) + unit, n) * f * (V(1) - f), n);
      row.put(args.d_input, 2, unit, d_c * i * candidate * (V(1) - g * g), n);
      store(row.narrow(args.d_state) + unit, d_c * f, n);
    });
    normalise_backward(row.wide(args.product), row.gain(0), row.wide(args.d_input), row.moments()[0],
        row.wide(args.d_product), 4 * hidden);
  }

  static void forward_gru(const Row& row) {
    const Args& args = row.args;
    const int64_t hidden = args.hidden;
    T* const product = row.wide(args.product);
    row.moments()[0] = normalise(product, 2 * hidden), row.moments()[1] = normalise(product + 2 * hidden, hidden);
    each(hidden, [&](int64_t unit, int n) {
      const auto input = [&](int gate) { return row.at(args.input, gate, unit, n); };
      const V r = fr_sigmoid(input(0) + row.recurrent(0, unit, n)),
              z = fr_sigmoid(input(1) + row.recurrent(1, unit, n));
      const V made = fr_tanh(input(2) + r * row.recurrent(2, unit, n)), added = made * row.candidate(unit, n);
      row.put(args.gates, 0, unit, r, n), row.put(args.gates, 1, unit, z, n), row.put(args.gates, 2, unit, made, n);
      store(row.narrow(args.h) + unit, added + z * (load<V>(row.narrow(args.state) + unit, n) - added), n);
    });
  }

  static void backward_gru(const Row& row) {
    const Args& args = row.args;
    const int64_t hidden = args.hidden;
    T* const d_recurrent = row.narrow(args.scratch);  // of gate n
    each(hidden, [&](int64_t unit, int n) {
      const V r = row.at(args.gates, 0, unit, n), z = row.at(args.gates, 1, unit, n),
              made = row.at(args.gates, 2, unit, n);
      const V d_h = load<V>(row.narrow(args.d_h) + unit, n), candidate = row.candidate(unit, n);
      const V d_n = d_h * (V(1) - z) * candidate * (V(1) - made * made);
      row.put(args.d_input, 0, unit, d_n * row.recurrent(2, unit, n) * r * (V(1) - r), n);
      row.put(args.d_input, 1, unit,
          d_h * (load<V>(row.narrow(args.state) + unit, n) - made * candidate) * z * (V(1) - z), n);
      row.put(args.d_input, 2, unit, d_n, n);
      store(d_recurrent + unit, d_n * r, n);
      store(row.narrow(args.d_state) + unit, d_h * z, n);
    });
    const T *const product = row.wide(args.product), *const d_input = row.wide(args.d_input), *const of = row.moments();
    T* const d_product = row.wide(args.d_product);
    normalise_backward(product, row.gain(0), d_input, of[0], d_product, 2 * hidden);
    normalise_backward(product + 2 * hidden, row.gain(2), d_recurrent, of[1], d_product + 2 * hidden, hidden);
  }

  // ---- the table ----

  static void forward(const Args& args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      args.gru ? forward_gru({args, args.hidden, row}) : forward_lstm({args, args.hidden, row});
  }
  static void backward(const Args& args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      args.gru ? backward_gru({args, args.hidden, row}) : backward_lstm({args, args.hidden, row});
  }

  static void unit_gradients(const Args& args, int64_t begin, int64_t end) {
    const int64_t hidden = args.hidden, blocks = args.gru ? 3 : 5;  // the LSTM's last block: gain and shift of c
    T *const d_units = static_cast<T*>(args.d_units), *const d_shifts = static_cast<T*>(args.d_shift);
    for (int block = 0; block < blocks; ++block) {
      const bool of_c = block == 4, own = of_c || (args.gru && block == 2);
      T* const d_gain = d_units + block * hidden;
      T* const d_shift = of_c ? d_gain + hidden : d_shifts + block * hidden;
      each(end - begin, [&](int64_t offset, int n) {
        const int64_t unit = begin + offset;
        V gain(0), shift(0);
        for (int64_t index = 0; index < args.rows; ++index) {
          const Row row{args, hidden, index};
          const V d = own ? load<V>(row.narrow(args.scratch) + unit, n) : row.at(args.d_input, block, unit, n);
          const V normal = of_c ? (load<V>(row.narrow(args.c) + unit, n) - V(row.moments()[1])) * V(row.moments()[2])
                                : row.at(args.product, block, unit, n);
          gain = gain + d * normal, shift = shift + d;
        }
        store(d_gain + unit, gain, n), store(d_shift + unit, shift, n);
      });
    }
  }
};

template <class Isa>
const LayerNormKernels* find_layer_norm(Type type) {
  static constexpr LayerNormKernels of_float{
      LayerNorm<Isa, float>::forward, LayerNorm<Isa, float>::backward, LayerNorm<Isa, float>::unit_gradients};
  static constexpr LayerNormKernels of_double{
      LayerNorm<Isa, double>::forward, LayerNorm<Isa, double>::backward, LayerNorm<Isa, double>::unit_gradients};
  return type == Type::kFloat32 ? &of_float : type == Type::kFloat64 ? &of_double : nullptr;
}

}  // namespace fr::cpu
