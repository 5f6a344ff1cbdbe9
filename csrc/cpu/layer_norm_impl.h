// Defines find_layer_norm; included by each layer_norm_*.cpp. A mean adds up the values of each vector lane in order,
// then the lanes, then the values behind the last whole vector.
#pragma once

#include "../layer_norm_rows.h"
#include "layer_norm.h"
#include "simd.h"

namespace fr::cpu {

template <class Isa, class T>
struct LayerNorm {
  struct Walk {
    using Value = T;
    using V = Vec<T, Isa>;
    static constexpr int kLanes = V::kLanes;

    template <class Function>
    static void each(int64_t count, Function function) {
      for (int64_t unit = 0; unit < count; unit += kLanes)
        function(unit, count - unit < kLanes ? static_cast<int>(count - unit) : kLanes);
    }

    template <class Function>
    static Means<T> means(int64_t count, Function function) {
      V first(0), second(0), a, b;
      int64_t unit = 0;
      for (; unit + kLanes <= count; unit += kLanes) {
        function(unit, kLanes, a, b);
        first = first + a, second = second + b;
      }
      Means<T> sum{0, 0};
      for (int lane = 0; lane < kLanes; ++lane) sum.first += first.raw[lane], sum.second += second.raw[lane];
      if (unit < count) {
        const int n = static_cast<int>(count - unit);
        function(unit, n, a, b);
        for (int lane = 0; lane < n; ++lane) sum.first += a.raw[lane], sum.second += b.raw[lane];
      }
      return {sum.first / static_cast<T>(count), sum.second / static_cast<T>(count)};
    }

    static void sync() {}
    static bool leads() { return true; }
    static V load(const T* p, int n) { return cpu::load<V>(p, n); }
    static void store(T* p, V v, int n) { cpu::store(p, v, n); }

    // Not a function of <cmath>: those are inline, and the linker could choose this file's copy, compiled for this
    // instruction set, for other files too.
    static T root(T x) {
      if constexpr (std::is_same_v<T, float>) return __builtin_sqrtf(x);
      else return __builtin_sqrt(x);
    }
  };
  using Args = LayerNormArgs;
  using Row = LayerNormRow<Walk>;
  using V = typename Walk::V;

  static void forward(const Args& args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) Row{args, row, {}}.forward();
  }
  static void backward(const Args& args, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) Row{args, row, {}}.backward();
  }

  static void unit_gradients(const Args& args, int64_t begin, int64_t end) {
    for (int pair = 0; pair < Row::unit_pairs(args); ++pair)
      Walk::each(end - begin, [&](int64_t offset, int n) {
        V d_gain(0), d_shift(0);
        for (int64_t row = 0; row < args.rows; ++row)
          Row{args, row, {}}.add_unit_gradients(pair, begin + offset, n, d_gain, d_shift);
        Row::store_unit_gradients(args, pair, begin + offset, d_gain, d_shift, n);
      });
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
