// The gradient of the input: each row's gate gradients times W_ih, summed over the directions that read the row.
#pragma once

#include <vector>

#include "call.h"

namespace fr::cpu {

struct InputGradient {
  std::vector<const DirectionWork*> work;  // of the directions that share the input
  const int64_t* rows;                     // the active rows of the range, in any order
  int64_t count, first_row;                // first_row: where the range begins
  int64_t input;                           // I
  void* d_input;                           // [N][I] in the storage type; in the state type if is_state
  bool is_state;
  bool adds;  // adds to what d_input holds
};

template <class Isa, class S>
struct InputGradients {
  using T = StateOf<S>;
  using O = Operand<Isa, S>;
  using V = Vec<T, Isa>;
  using Transposed = Product<Isa, S, 1>;
  static constexpr int kLanes = V::kLanes;
  static constexpr int64_t kRows = Transposed::kBlockRows;

  // Computes the share of thread `index` of `count`. tiles: [2][kRows][kColumns]. A block of rows goes through all
  // panels of columns before the next one, so that a thread's rows stay in cache.
  static void run(const InputGradient& job, int index, int count, void* tiles) {
    const TileScope<Isa> scope;
    if (job.is_state) run_to<T>(job, index, count, tiles);
    else run_to<S>(job, index, count, tiles);
  }

 private:
  template <class To>
  static void run_to(const InputGradient& job, int index, int count, void* tiles) {
    const int64_t panels = Transposed::panels(job.input), blocks = (job.count + kRows - 1) / kRows;
    T* const sums[2] = {static_cast<T*>(tiles), static_cast<T*>(tiles) + kRows * Transposed::kColumns};
    const O* operands[kRows];
    for (int64_t at = blocks * panels * index / count, end = blocks * panels * (index + 1) / count; at < end; ++at) {
      const int64_t row0 = at / panels * kRows, panel = at % panels;
      const int64_t size = job.count - row0 < kRows ? job.count - row0 : kRows;
      for (size_t d = 0; d < job.work.size(); ++d) {
        const DirectionWork& work = *job.work[d];
        if (d > 1)  // frees the second tile
          for (int64_t i = 0; i < size * Transposed::kColumns; i += kLanes)
            store_full(sums[0] + i, load_full<V>(sums[0] + i) + load_full<V>(sums[1] + i));
        for (int64_t row = 0; row < size; ++row)
          operands[row] = static_cast<const O*>(work.gradients) +
                          (job.rows[row0 + row] - job.first_row) * work.columns.stride + work.columns.gates;
        Transposed::run(
            work.input_transposed, panel, operands, size, sums[d > 0], Transposed::kColumns, (at + 1) % panels);
      }
      for (int64_t row = 0; row < size; ++row) {
        To* const to = static_cast<To*>(job.d_input) + job.rows[row0 + row] * job.input;
        for (int group = 0; group < Transposed::kGroups; ++group) {
          const int64_t unit = panel * Transposed::kUnits + group * kLanes;
          if (unit >= job.input) break;
          const int n = lanes_left<V>(job.input - unit);
          const int64_t place = row * Transposed::kColumns + group * kLanes;
          V sum = load_full<V>(sums[0] + place);
          if (job.work.size() > 1) sum = sum + load_full<V>(sums[1] + place);
          if (job.adds) sum = sum + load<V>(to + unit, n);
          store(to + unit, sum, n);
        }
      }
    }
  }
};

// Conversion between the storage type and the state type.
template <class Isa, class S>
struct Conversion {
  using T = StateOf<S>;
  using V = Vec<T, Isa>;

  static void widen(const void* from, void* to, int64_t size) {
    for_each(size,
        [&](int64_t i, int n) { store(static_cast<T*>(to) + i, load<V>(static_cast<const S*>(from) + i, n), n); });
  }
  // Rounds from + more; `more` may be null.
  static void narrow(const void* from, const void* more, void* to, int64_t size) {
    for_each(size, [&](int64_t i, int n) {
      V value = load<V>(static_cast<const T*>(from) + i, n);
      if (more) value = value + load<V>(static_cast<const T*>(more) + i, n);
      store(static_cast<S*>(to) + i, value, n);
    });
  }

 private:
  template <class Function>
  static void for_each(int64_t size, Function function) {
    for (int64_t i = 0; i < size; i += V::kLanes)
      function(i, size - i < V::kLanes ? static_cast<int>(size - i) : V::kLanes);
  }
};

}  // namespace fr::cpu
