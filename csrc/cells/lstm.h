// LSTM (Hochreiter and Schmidhuber 1997, with forget gate) in torch.nn.LSTM's form, gates i, f, g, o, and LSTM with a
// recurrent projection (Sak et al. 2014, https://arxiv.org/abs/1402.1128; torch's proj_size). The clips are those of
// the original ELMo's cell: the stored cell state is clipped, the output reads the clipped one, and the gradient
// outside the bound is zero. Both also with peepholes (Gers and Schmidhuber 2000, in the form of Graves 2013,
// https://arxiv.org/abs/1308.0850, equations 7 to 11): unit weights p_i, p_f, p_o, through which gates i and f read the
// unit's old cell state, and o the new, clipped one.
#pragma once

#include "cell.h"

namespace fr {

template <bool kPeepholes>
struct LstmGates : CellDefaults {
  static constexpr int kCells = 1, kUnitWeights = kPeepholes ? 3 : 0;
  static constexpr bool kZonesCells = true, kDropsCandidate = true;

  // A gate's pre-activation. `peephole` is the index of its unit weight, `c` the cell state it reads through it.
  template <class V, class Cell>
  FR_HD static V sum(const Unit<V, Cell>& u, int gate, [[maybe_unused]] int peephole, [[maybe_unused]] V c) {
    const V sum = u.input[gate] + u.recurrent[gate];
    if constexpr (kPeepholes) return sum + u.unit_weight[peephole] * c;
    else return sum;
  }

  template <class V, class Cell>
  FR_HD static void begin(Unit<V, Cell>& u, const Clips<V>& clips) {
    const V i = fr_sigmoid(sum(u, 0, 0, u.c_prev[0]));
    const V f = fr_sigmoid(sum(u, 1, 1, u.c_prev[0]));
    const V g = fr_tanh(u.input[2] + u.recurrent[2]);
    u.saved[0] = i, u.saved[1] = f, u.saved[2] = g;
    cells_again(u, clips);
    const V o = fr_sigmoid(sum(u, 3, 2, u.c[0]));
    u.saved[3] = o;
  }
  template <class V, class Cell>
  FR_HD static V output(const Unit<V, Cell>& u) {
    return u.saved[3] * fr_tanh(u.c[0]);
  }
  template <class V, class Cell>
  FR_HD static void cells_again(Unit<V, Cell>& u, const Clips<V>& clips) {
    u.c[0] = u.saved[1] * u.c_prev[0] + u.saved[0] * (u.saved[2] * u.candidate);
    if (clips.clip_cell) u.c[0] = clipped(u.c[0], clips.cell);
  }

  // d_hidden: gradient of o * tanh(c).
  template <class V, class Cell>
  FR_HD static void gradients(Unit<V, Cell>& u, V d_hidden, V tanh_c, const Clips<V>& clips) {
    const V i = u.saved[0], f = u.saved[1], g = u.saved[2], o = u.saved[3];
    u.d_input[3] = d_hidden * tanh_c * o * (V(1) - o);
    V d_c = u.d_c[0] + d_hidden * o * (V(1) - tanh_c * tanh_c);
    if constexpr (kPeepholes) d_c = d_c + u.d_input[3] * u.unit_weight[2];
    if (clips.clip_cell) d_c = clipped_gradient(u.c[0], clips.cell, d_c);
    u.d_input[0] = d_c * (g * u.candidate) * i * (V(1) - i);
    u.d_input[1] = d_c * u.c_prev[0] * f * (V(1) - f);
    u.d_input[2] = d_c * i * u.candidate * (V(1) - g * g);
    u.d_c[0] = d_c * f;
    if constexpr (kPeepholes) {
      u.d_c[0] = u.d_c[0] + u.d_input[0] * u.unit_weight[0] + u.d_input[1] * u.unit_weight[1];
      u.d_unit_weight[0] = u.d_input[0] * u.c_prev[0];
      u.d_unit_weight[1] = u.d_input[1] * u.c_prev[0];
      u.d_unit_weight[2] = u.d_input[3] * u.c[0];
    }
    u.d_h_prev = V(0);
  }
};

template <bool kPeepholes>
struct LstmCell : LstmGates<kPeepholes> {
  using Gates = LstmGates<kPeepholes>;
  static constexpr CellPhase kPhases[] = {{Before::kProduct, 4, 4, 0, 4}};
  static constexpr int kPassedOn = 3;

  template <class V, class Cell>
  FR_HD static void forward0(Unit<V, Cell>& u, const Clips<V>& clips) {
    Gates::begin(u, clips);
    u.h = Gates::output(u);
  }
  template <class V, class Cell>
  FR_HD static void backward0(Unit<V, Cell>& u, const Clips<V>& clips) {
    Gates::gradients(u, u.d_h, fr_tanh(u.c[0]), clips);
  }
};

struct Lstm : LstmCell<false> {
  static constexpr const char* kName = "lstm";
};

struct LstmPeephole : LstmCell<true> {
  static constexpr const char* kName = "lstm_peephole";
};

template <bool kPeepholes>
struct ProjectedLstmCell : LstmGates<kPeepholes> {
  using Gates = LstmGates<kPeepholes>;
  static constexpr CellPhase kPhases[] = {{Before::kProduct, 4, 4, 0, 4}, {Before::kProjection, 0, 0, 0, 0}};

  template <class V, class Cell>
  FR_HD static void forward0(Unit<V, Cell>& u, const Clips<V>& clips) {
    Gates::begin(u, clips);
    u.inner = Gates::output(u);
  }
  // Over P.
  template <class V, class Cell>
  FR_HD static void forward1(Unit<V, Cell>& u, const Clips<V>& clips) {
    u.h = u.projected;
    if (clips.clip_projected) u.h = clipped(u.h, clips.projected);
  }
  // Over P: the gradient of the projection before its clip.
  template <class V, class Cell>
  FR_HD static void backward1(Unit<V, Cell>& u, const Clips<V>& clips) {
    u.d_projected = clips.clip_projected ? clipped_gradient(u.h, clips.projected, u.d_h) : u.d_h;
    u.d_h_prev = V(0);
  }
  // Also recomputes `inner`, which the projection's weight gradient needs.
  template <class V, class Cell>
  FR_HD static void backward0(Unit<V, Cell>& u, const Clips<V>& clips) {
    const V tanh_c = fr_tanh(u.c[0]);
    u.inner = u.saved[3] * tanh_c;
    Gates::gradients(u, u.d_inner, tanh_c, clips);
  }
};

struct LstmProjected : ProjectedLstmCell<false> {
  static constexpr const char* kName = "lstm_projected";
};

struct LstmPeepholeProjected : ProjectedLstmCell<true> {
  static constexpr const char* kName = "lstm_peephole_projected";
};

}  // namespace fr
