// Defines find_cross_entropy; included by each cross_entropy_*.cpp.
#pragma once

#include <limits>

#include "cross_entropy.h"

namespace fr::cpu {

template <class Isa, class S>
struct CrossEntropy {
  using P = Product<Isa, S, 1>;
  using V = typename P::V;
  using Slab = LogitsSlab;
  static constexpr int kLanes = V::kLanes, kVectors = P::kVectors;
  // Words whose exponentials are summed before they join the row's sum. The error grows with the number of such blocks,
  // not of words.
  static constexpr int64_t kSumWords = 16 * P::kColumns;
  static constexpr S kInfinity = std::numeric_limits<S>::infinity();

  static S* row_of(const Slab& slab, int64_t row) { return static_cast<S*>(slab.values) + row * slab.stride; }

  static void pack(const Slab& slab, int index, int count) {
    for (const PackedMatrix* matrix : {&slab.logits, &slab.transposed}) pack_share<P>(*matrix, index, count);
  }

  // Computes logits, and from them exponentials and their sums; `adds`: adds these to the rows' sums.
  static void exponentials(const Slab& slab, int64_t begin, int64_t end, bool adds) {
    const CrossEntropyArgs& args = *slab.args;
    const S* operands[kTileRows];
    for (int64_t row = begin; row < end; ++row)
      operands[row - begin] = static_cast<const S*>(args.input) + slab.rows[row] * args.input_stride;
    const int64_t panel0 = slab.word0 / P::kUnits, panels = P::panels(slab.words);
    for (int64_t panel = 0; panel < panels; ++panel)
      P::run(slab.logits, panel0 + panel, operands, end - begin, row_of(slab, begin) + panel * P::kColumns, slab.stride,
          panel0 + (panel + 1 < panels ? panel + 1 : 0));
    for (int64_t row = begin; row < end; ++row) {
      S* const values = row_of(slab, row);
      for (int64_t word = slab.words; word < panels * P::kColumns; ++word) values[word] = -kInfinity;
      const int64_t at = args.target[slab.rows[row]] - slab.word0;
      if (at >= 0 && at < slab.words) {
        if (args.label_logit) values[at] = -kInfinity;
        else static_cast<S*>(slab.label)[row] = values[at];
      }
      const S top = largest(values, panels), shift = top == -kInfinity ? S(0) : top;
      const S sum = exponentials_of(values, panels, shift);
      static_cast<S*>(slab.shift)[row] = shift;
      if (adds) add(slab, row, top, sum);
    }
  }

  // Each row's loss, once all words are done.
  static void losses(const Slab& slab, int64_t begin, int64_t end) {
    const CrossEntropyArgs& args = *slab.args;
    for (int64_t row = begin; row < end; ++row) {
      S* const label = static_cast<S*>(slab.label) + row;
      if (args.label_logit) {
        *label = static_cast<const S*>(args.label_logit)[slab.rows[row]];
        add(slab, row, *label, S(1));
      }
      const S maximum = static_cast<S*>(slab.maximum)[row], sum = static_cast<S*>(slab.sum)[row];
      static_cast<S*>(args.loss)[slab.rows[row]] = (maximum - *label) + log_of(sum);
    }
  }

  // Turns exponentials into gradients of the logits, and multiplies those into gradients of the input. `scale` is the
  // gradient of a loss if the caller gave none.
  static void gradients(const Slab& slab, int64_t begin, int64_t end, double scale, void* tile) {
    const CrossEntropyArgs& args = *slab.args;
    const int64_t panels = P::panels(slab.words);
    const S* operands[kTileRows];
    for (int64_t row = begin; row < end; ++row) {
      const int64_t place = slab.rows[row];
      const S gradient = args.row_gradient ? static_cast<const S*>(args.row_gradient)[place] : static_cast<S>(scale);
      const S maximum = static_cast<S*>(slab.maximum)[row], sum = static_cast<S*>(slab.sum)[row];
      const V factor(gradient * exp_of(static_cast<S*>(slab.shift)[row] - maximum) / sum);
      S* const values = row_of(slab, row);
      for (int64_t word = 0; word < panels * P::kColumns; word += kLanes)
        store_full(values + word, load_full<V>(values + word) * factor);
      const int64_t at = args.target[place] - slab.word0;
      if (!args.label_logit && at >= 0 && at < slab.words) values[at] = values[at] - gradient;
      if (args.d_label_logit && slab.word0 == 0) {
        const S label = static_cast<S*>(slab.label)[row];
        static_cast<S*>(args.d_label_logit)[place] = gradient * (exp_of(label - maximum) / sum - S(1));
      }
      operands[row - begin] = values;
    }
    if (!args.d_input) return;
    S* const sums = static_cast<S*>(tile);
    for (int64_t panel = 0, count = P::panels(args.depth); panel < count; ++panel) {
      P::run(slab.transposed, panel, operands, end - begin, sums, P::kColumns, panel + 1 < count ? panel + 1 : 0);
      for (int64_t row = begin; row < end; ++row) {
        S* const to = static_cast<S*>(args.d_input) + slab.rows[row] * args.depth;
        for (int vector = 0; vector < kVectors; ++vector) {
          const int64_t unit = panel * P::kUnits + vector * kLanes;
          if (unit >= args.depth) break;
          const int n = lanes_left<V>(args.depth - unit);
          V value = load_full<V>(sums + (row - begin) * P::kColumns + vector * kLanes);
          if (slab.word0) value = load<V>(to + unit, n) + value;
          store(to + unit, value, n);
        }
      }
    }
  }

 private:
  // The functions of <cmath> are inline. A copy compiled for this instruction set must not be linked into other files,
  // so these belong to this class.
  static S exp_of(S x) {
    if constexpr (std::is_same_v<S, float>) return __builtin_expf(x);
    else return __builtin_exp(x);
  }
  static S log_of(S x) {
    if constexpr (std::is_same_v<S, float>) return __builtin_logf(x);
    else return __builtin_log(x);
  }

  static S largest(const S* values, int64_t panels) {
    V top[kVectors];
    for (V& vector : top) vector = V(-kInfinity);
    for (int64_t panel = 0; panel < panels; ++panel, values += P::kColumns)
#pragma GCC unroll 4
      for (int i = 0; i < kVectors; ++i) top[i] = fr_max(top[i], load_full<V>(values + i * kLanes));
    S result = -kInfinity;
    for (const V& vector : top)
      for (int lane = 0; lane < kLanes; ++lane) result = vector.raw[lane] > result ? vector.raw[lane] : result;
    return result;
  }

  static S exponentials_of(S* values, int64_t panels, S shift) {
    const V lowest(std::is_same_v<S, float> ? S(-87) : S(-700)), away(shift);
    V total(0);
    for (int64_t panel = 0; panel < panels;) {
      const int64_t end = panel + kSumWords / P::kColumns < panels ? panel + kSumWords / P::kColumns : panels;
      V sum[kVectors];
      for (V& vector : sum) vector = V(0);
      for (; panel < end; ++panel, values += P::kColumns)
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) {
          const V x = load_full<V>(values + i * kLanes) - away;
          const auto e = exponential(fr_max(lowest, x));
          const V value = fr_if_less(x, lowest, V(0), e.scale + e.scale * e.tail);
          store_full(values + i * kLanes, value);
          sum[i] = sum[i] + value;
        }
      for (const V& vector : sum) total = total + vector;
    }
    S result(0);
    for (int lane = 0; lane < kLanes; ++lane) result += total.raw[lane];
    return result;
  }

  // Adds a sum of exponentials relative to `top` to the row's sum. A row starts with a maximum of -infinity and a sum
  // of zero.
  static void add(const Slab& slab, int64_t row, S top, S sum) {
    S& maximum = static_cast<S*>(slab.maximum)[row];
    S& total = static_cast<S*>(slab.sum)[row];
    if (top == -kInfinity || maximum == -kInfinity) {
      total += sum;
    } else {
      const S both = top > maximum ? top : maximum;
      total = total * exp_of(maximum - both) + sum * exp_of(top - both);
    }
    if (!(top <= maximum)) maximum = top;
  }
};

template <class Isa, class S>
const CrossEntropyKernels* cross_entropy_kernels() {
  using C = CrossEntropy<Isa, S>;
  using P = Product<Isa, S, 1>;
  using Outers = OuterProduct<Isa, S>;
  static constexpr CrossEntropyKernels table{
      P::bytes,
      kTileRows * P::kColumns * static_cast<int64_t>(sizeof(S)),
      P::kUnits,
      P::kMaxRows,
      Isa::kL2Bytes / 2,
      C::pack,
      C::exponentials,
      C::losses,
      C::gradients,
      Outers::left_bytes,
      Outers::right_bytes,
      Outers::run,
  };
  return &table;
}

template <class Isa>
const CrossEntropyKernels* find_cross_entropy(Type type) {
  if (type == Type::kFloat32) return cross_entropy_kernels<Isa, float>();
  return type == Type::kFloat64 ? cross_entropy_kernels<Isa, double>() : nullptr;
}

}  // namespace fr::cpu
