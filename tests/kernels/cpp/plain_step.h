// One step of one row in plain double, for any cell: plain sums for the products, and the cell's own formulas
// (csrc/cells) around them. That these formulas are the right ones is checked by the Python tests, which compare with
// fastrnn/cells.py and torch.nn.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "../../../csrc/cells/cells.h"
#include "../../../csrc/cuda/device.cuh"

// Weights of one direction: hh [G*H, R] and bias_hh [G*H], hr [P, H], unit [U*H].
struct PlainWeights {
  int64_t hidden, width;
  const std::vector<double>&hh, &bias_hh, &hr, &unit;
  double cell_clip, proj_clip;
};

// Noise of one row at one step, as in cells/noise.h, except that each unit draws its words anew. Probabilities must
// have few binary digits, so that the comparison with a word is exact.
struct PlainNoise {
  double zoneout_h = 0, zoneout_c = 0, candidate = 0;
  uint64_t seed = 0;
  uint32_t row = 0, step = 0, direction = 0;
  bool hits(double p, uint32_t kind, int64_t unit) const {
    uint32_t counter[4] = {static_cast<uint32_t>(unit / 4), row, step, direction + kind * 0x40000000u};
    fr::philox<fr::OneCounter>(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    return counter[unit % 4] < p * 4294967296.0;
  }
};

// Makes a random cell state one that can occur: sLSTM's normaliser is positive.
inline double possible_cell(fr::Cell cell, int64_t hidden, int64_t place, double value) {
  return cell == fr::Cell::kSlstm && place % (3 * hidden) / hidden == 1 ? 0.5 + std::abs(value) : value;
}

// Whether the gradient jumps somewhere (relu; the gate that sLSTM's stabiliser follows). Rounding to 16 bit may then
// decide on which side of the jump a value falls.
inline bool has_kink(fr::Cell cell) {
  return cell == fr::Cell::kRnnRelu || cell == fr::Cell::kIndRnnRelu || cell == fr::Cell::kSlstm;
}

// input: [G*H]. h [R] and c [cells*H] are the states before the step, and on return those after it.
template <class Cell>
void plain_step(const PlainWeights& w, const double* input, std::vector<double>& h, std::vector<double>& c,
    const PlainNoise& noise) {
  using V = fr::host::Scalar<double>;
  using N = fr::Numbers<Cell>;
  using Unit = fr::Unit<V, Cell>;
  const int64_t H = w.hidden, R = w.width;
  const fr::Clips<V> clips{V(w.cell_clip), V(w.proj_clip), w.cell_clip > 0, w.proj_clip > 0};
  [[maybe_unused]] const auto recurrent = [&](int gate, int64_t j, const std::vector<double>& operand) {
    double sum = w.bias_hh[gate * H + j];
    for (int64_t k = 0; k < R; ++k) sum += w.hh[(gate * H + j) * R + k] * operand[k];
    return V(sum);
  };
  // Loads gates [begin, end), and what else both phases read of a unit.
  const auto load = [&](Unit& u, int begin, int end, int64_t j, [[maybe_unused]] const std::vector<double>& operand) {
    for (int gate = begin; gate < end; ++gate) {
      u.input[gate] = V(input[gate * H + j]);
      if constexpr (N::kMultiplies) u.recurrent[gate] = recurrent(gate, j, operand);
    }
    if constexpr (Cell::kReadsHidden) u.h_prev = V(h[j]);
    if constexpr (Cell::kUnitWeights > 0)
      for (int i = 0; i < Cell::kUnitWeights; ++i) u.unit_weight[i] = V(w.unit[i * H + j]);
  };
  std::vector<double> next(R), inner(H);
  std::vector<Unit> first(H);
  for (int64_t j = 0; j < H; ++j) {
    Unit& u = first[j];
    load(u, 0, N::kFirstGates, j, h);
    if constexpr (Cell::kCells > 0)
      for (int i = 0; i < Cell::kCells; ++i) u.c_prev[i] = V(c[i * H + j]);
    if constexpr (Cell::kDropsCandidate)
      if (noise.candidate > 0) u.candidate = V(noise.hits(noise.candidate, 2, j) ? 0 : 1 / (1 - noise.candidate));
    Cell::forward0(u, clips);
    if constexpr (Cell::kCells > 0)
      for (int i = 0; i < Cell::kCells; ++i)
        if (!noise.hits(noise.zoneout_c, 1, j)) c[i * H + j] = u.c[i].value;
    if constexpr (N::kTwoPhases) inner[j] = u.inner.value;
    else next[j] = noise.hits(noise.zoneout_h, 0, j) ? h[j] : u.h.value;
  }
  if constexpr (N::kTwoPhases)
    for (int64_t j = 0; j < R; ++j) {
      Unit u;
      if constexpr (N::kProjects) {
        double sum = 0;
        for (int64_t k = 0; k < H; ++k) sum += w.hr[j * H + k] * inner[k];
        u.projected = V(sum);
      } else {
        load(u, N::kFirstGates, N::kGates, j, inner);
        if constexpr (N::kCarried > 0)
          for (int i = 0; i < N::kCarried; ++i) u.carried[i] = first[j].carried[i];
      }
      if constexpr (Cell::kDropsCandidate && !N::kProjects)
        if (noise.candidate > 0) u.candidate = V(noise.hits(noise.candidate, 2, j) ? 0 : 1 / (1 - noise.candidate));
      Cell::forward1(u, clips);
      next[j] = noise.hits(noise.zoneout_h, 0, j) ? h[j] : u.h.value;
    }
  h = next;
}

inline void plain_step(fr::Cell cell, const PlainWeights& w, const double* input, std::vector<double>& h,
    std::vector<double>& c, const PlainNoise& noise = {}) {
  switch (cell) {
#define FR_CELL(name, Type) \
  case fr::Cell::name: \
    return plain_step<fr::Type>(w, input, h, c, noise);
#include "../../../csrc/cells/cells.inc"
#undef FR_CELL
  }
}
