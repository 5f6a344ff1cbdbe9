// One row of the cells with layer normalisation (layer_norm.h): the formulas, for the CPU (cpu/layer_norm_impl.h) and
// for the CUDA kernels (cuda/layer_norm.cuh).
//
// Walk says how the values of a row are visited: a vector at a time, or by the threads of a block.
//   Value, V         float or double, and what a visit holds of them: a vector, or a scalar
//   each(count, f)   calls f(i, n), which works on n values from i on, until all of [0, count) are visited
//   means(count, f)  the means over [0, count) of a and b, which f(i, n, a, b) sets; added in an order that depends on
//                    count alone
//   sync()           makes what earlier visits stored visible to later ones, as a mean does too. Between two loops of
//                    the same count it is not needed, because the same thread visits a value in both
//   leads()          whether this thread stores the values that a row has only once
//   load(p, n), store(p, v, n), root(value)
#pragma once

#include "cells/cell.h"
#include "layer_norm.h"

// Kernels include cuda/device.cuh first, which defines it for device functions.
#if !defined(FR_DEVICE)
#define FR_DEVICE inline
#endif

namespace fr {

template <class T>
struct Means {
  T first, second;
};

template <class Walk>
struct LayerNormRow {
  using T = typename Walk::Value;
  using V = typename Walk::V;

  const LayerNormArgs& args;
  const int64_t index;  // of the row
  Walk walk;

  // ---- the row's values in the arrays. In arrays of G*H values a gate's part begins at gate * hidden ----

  FR_DEVICE static V load(const T* p, int n) { return Walk::load(p, n); }
  FR_DEVICE static void store(T* p, V v, int n) { Walk::store(p, v, n); }

  FR_DEVICE T* wide(const void* data) const {
    return static_cast<T*>(const_cast<void*>(data)) + index * (args.gru ? 3 : 4) * args.hidden;
  }
  FR_DEVICE T* narrow(const void* data) const { return static_cast<T*>(const_cast<void*>(data)) + index * args.hidden; }
  FR_DEVICE const T* kept() const { return static_cast<const T*>(args.moments) + index * 3; }
  FR_DEVICE void keep(int place, T value) const {
    if (walk.leads()) static_cast<T*>(args.moments)[index * 3 + place] = value;
  }
  FR_DEVICE const T* gain(int row) const { return static_cast<const T*>(args.units) + row * args.hidden; }

  FR_DEVICE V at(const void* data, int gate, int64_t unit, int n) const {
    return load(wide(data) + gate * args.hidden + unit, n);
  }
  FR_DEVICE void put(void* data, int gate, int64_t unit, V value, int n) const {
    store(wide(data) + gate * args.hidden + unit, value, n);
  }
  FR_DEVICE V candidate(int64_t unit, int n) const {
    return args.candidate ? load(narrow(args.candidate) + unit, n) : V(1);
  }
  // s (layer_norm.h) of one gate.
  FR_DEVICE V recurrent(int gate, int64_t unit, int n) const {
    const V scaled = at(args.product, gate, unit, n) * load(gain(gate) + unit, n);
    return args.shift ? scaled + load(static_cast<const T*>(args.shift) + gate * args.hidden + unit, n) : scaled;
  }

  // ---- normalisation ----

  struct Moments {
    T mean, scale;  // scale: 1 / deviation
  };
  FR_DEVICE Moments moments(const T* x, int64_t count) {
    const T mean = walk.means(count, [&](int64_t i, int n, V& a, V& b) { a = load(x + i, n), b = V(0); }).first;
    const V middle(mean);
    const auto squares = [&](int64_t i, int n, V& a, V& b) {
      const V away = load(x + i, n) - middle;
      a = away * away, b = V(0);
    };
    const T variance = walk.means(count, squares).first;
    return {mean, T(1) / Walk::root(variance + T(1e-5))};
  }

  // Replaces `count` values x by N(x), and returns 1 / their deviation.
  FR_DEVICE T normalise(T* x, int64_t count) {
    const Moments of = moments(x, count);
    walk.each(count, [&](int64_t i, int n) { store(x + i, (load(x + i, n) - V(of.mean)) * V(of.scale), n); });
    return of.scale;
  }
  // The gradient of x, from that of s = N(x) gain + shift.
  FR_DEVICE void normalise_backward(const T* normal, const T* gains, const T* d_s, T scale, T* d, int64_t count) {
    const Means<T> mean = walk.means(count, [&](int64_t i, int n, V& a, V& b) {
      a = load(d_s + i, n) * load(gains + i, n);
      b = a * load(normal + i, n);
    });
    walk.each(count, [&](int64_t i, int n) {
      const V d_normal = load(d_s + i, n) * load(gains + i, n);
      store(d + i, V(scale) * (d_normal - V(mean.first) - load(normal + i, n) * V(mean.second)), n);
    });
  }

  // ---- LSTM ----

  FR_DEVICE void forward_lstm() {
    const int64_t hidden = args.hidden;
    keep(0, normalise(wide(args.product), 4 * hidden));
    walk.sync();  // N(product) of the LSTM
    T* const c = narrow(args.c);
    walk.each(hidden, [&](int64_t unit, int n) {
      const auto sum = [&](int gate) { return at(args.input, gate, unit, n) + recurrent(gate, unit, n); };
      const V i = fr_sigmoid(sum(0)), f = fr_sigmoid(sum(1)), g = fr_tanh(sum(2)), o = fr_sigmoid(sum(3));
      put(args.gates, 0, unit, i, n), put(args.gates, 1, unit, f, n);
      put(args.gates, 2, unit, g, n), put(args.gates, 3, unit, o, n);
      V made = f * load(narrow(args.state) + unit, n) + i * (g * candidate(unit, n));
      if (args.cell_clip > 0) made = clipped(made, V(static_cast<T>(args.cell_clip)));
      store(c + unit, made, n);
    });
    const Moments of = moments(c, hidden);
    keep(1, of.mean), keep(2, of.scale);
    walk.each(hidden, [&](int64_t unit, int n) {
      const V normal = (load(c + unit, n) - V(of.mean)) * V(of.scale);
      const V y = normal * load(gain(4) + unit, n) + load(gain(5) + unit, n);
      store(narrow(args.h) + unit, at(args.gates, 3, unit, n) * fr_tanh(y), n);
    });
  }

  FR_DEVICE void backward_lstm() {
    const int64_t hidden = args.hidden;
    const V mean_c(kept()[1]), scale_c(kept()[2]);
    const T* const c = narrow(args.c);
    T* const d_y = narrow(args.scratch);
    walk.each(hidden, [&](int64_t unit, int n) {
      const V normal = (load(c + unit, n) - mean_c) * scale_c, o = at(args.gates, 3, unit, n);
      const V t = fr_tanh(normal * load(gain(4) + unit, n) + load(gain(5) + unit, n));
      const V d_h = load(narrow(args.d_h) + unit, n);
      put(args.d_input, 3, unit, d_h * t * o * (V(1) - o), n);
      store(d_y + unit, d_h * o * (V(1) - t * t), n);
    });
    const Means<T> mean = walk.means(hidden, [&](int64_t unit, int n, V& a, V& b) {
      a = load(d_y + unit, n) * load(gain(4) + unit, n);
      b = a * ((load(c + unit, n) - mean_c) * scale_c);
    });
    walk.each(hidden, [&](int64_t unit, int n) {
      const V here = load(c + unit, n), normal = (here - mean_c) * scale_c;
      const V d_normal = load(d_y + unit, n) * load(gain(4) + unit, n);
      V d_c = load(narrow(args.d_c) + unit, n) + scale_c * (d_normal - V(mean.first) - normal * V(mean.second));
      if (args.cell_clip > 0) d_c = clipped_gradient(here, V(static_cast<T>(args.cell_clip)), d_c);
      const V i = at(args.gates, 0, unit, n), f = at(args.gates, 1, unit, n), g = at(args.gates, 2, unit, n);
      const V dropped = candidate(unit, n);
      put(args.d_input, 0, unit, d_c * (g * dropped) * i * (V(1) - i), n);
      put(args.d_input, 1, unit, d_c * load(narrow(args.state) + unit, n) * f * (V(1) - f), n);
      put(args.d_input, 2, unit, d_c * i * dropped * (V(1) - g * g), n);
      store(narrow(args.d_state) + unit, d_c * f, n);
    });
    walk.sync();  // d_input of the LSTM
    normalise_backward(wide(args.product), gain(0), wide(args.d_input), kept()[0], wide(args.d_product), 4 * hidden);
  }

  // ---- GRU ----

  FR_DEVICE void forward_gru() {
    const int64_t hidden = args.hidden;
    T* const product = wide(args.product);
    keep(0, normalise(product, 2 * hidden));
    keep(1, normalise(product + 2 * hidden, hidden));  // its means make N of r and z visible
    walk.each(hidden, [&](int64_t unit, int n) {
      const auto input = [&](int gate) { return at(args.input, gate, unit, n); };
      const V r = fr_sigmoid(input(0) + recurrent(0, unit, n)), z = fr_sigmoid(input(1) + recurrent(1, unit, n));
      const V made = fr_tanh(input(2) + r * recurrent(2, unit, n)), added = made * candidate(unit, n);
      put(args.gates, 0, unit, r, n), put(args.gates, 1, unit, z, n), put(args.gates, 2, unit, made, n);
      store(narrow(args.h) + unit, added + z * (load(narrow(args.state) + unit, n) - added), n);
    });
  }

  FR_DEVICE void backward_gru() {
    const int64_t hidden = args.hidden;
    T* const d_recurrent = narrow(args.scratch);  // of gate n
    walk.each(hidden, [&](int64_t unit, int n) {
      const V r = at(args.gates, 0, unit, n), z = at(args.gates, 1, unit, n), made = at(args.gates, 2, unit, n);
      const V d_h = load(narrow(args.d_h) + unit, n), dropped = candidate(unit, n);
      const V d_n = d_h * (V(1) - z) * dropped * (V(1) - made * made);
      put(args.d_input, 0, unit, d_n * recurrent(2, unit, n) * r * (V(1) - r), n);
      put(args.d_input, 1, unit, d_h * (load(narrow(args.state) + unit, n) - made * dropped) * z * (V(1) - z), n);
      put(args.d_input, 2, unit, d_n, n);
      store(d_recurrent + unit, d_n * r, n);
      store(narrow(args.d_state) + unit, d_h * z, n);
    });
    walk.sync();  // d_input of the GRU
    const T *const product = wide(args.product), *const d_input = wide(args.d_input);
    T* const d_product = wide(args.d_product);
    normalise_backward(product, gain(0), d_input, kept()[0], d_product, 2 * hidden);
    normalise_backward(product + 2 * hidden, gain(2), d_recurrent, kept()[1], d_product + 2 * hidden, hidden);
  }

  FR_DEVICE void forward() { args.gru ? forward_gru() : forward_lstm(); }
  FR_DEVICE void backward() { args.gru ? backward_gru() : backward_lstm(); }

  // ---- gradients of gains and shifts, after backward of all rows ----

  // How many pairs of a gain and a shift a unit has: one for each gate, and in the LSTM one of c.
  FR_HD static int unit_pairs(const LayerNormArgs& args) { return args.gru ? 3 : 5; }
  // Adds this row's part of the gradients of a pair.
  FR_DEVICE void add_unit_gradients(int pair, int64_t unit, int n, V& d_gain, V& d_shift) const {
    const bool of_c = pair == 4, own = of_c || (args.gru && pair == 2);
    const V d = own ? load(narrow(args.scratch) + unit, n) : at(args.d_input, pair, unit, n);
    const V normal =
        of_c ? (load(narrow(args.c) + unit, n) - V(kept()[1])) * V(kept()[2]) : at(args.product, pair, unit, n);
    d_gain = d_gain + d * normal, d_shift = d_shift + d;
  }
  FR_DEVICE static void store_unit_gradients(
      const LayerNormArgs& args, int pair, int64_t unit, V d_gain, V d_shift, int n) {
    T* const gains = static_cast<T*>(args.d_units) + pair * args.hidden;
    T* const shifts = pair == 4 ? gains + args.hidden : static_cast<T*>(args.d_shift) + pair * args.hidden;
    store(gains + unit, d_gain, n), store(shifts + unit, d_shift, n);
  }
};

}  // namespace fr
