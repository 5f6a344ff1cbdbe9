// LSTM (Hochreiter and Schmidhuber 1997, with forget gate) in torch.nn.LSTM's form, gates i, f, g, o; and LSTM with a
// recurrent projection (Sak et al. 2014, https://arxiv.org/abs/1402.1128; torch's proj_size). The clips are those of the
// original ELMo's cell: the stored cell state is clipped, the output reads the clipped one, the gradient outside is zero.
#pragma once

#include "cell.h"

namespace fr {

struct LstmGates : CellDefaults {
  static constexpr int kCells = 1;
  static constexpr bool kZonesCells = true, kDropsCandidate = true;

  template <class V, class Cell>
  FR_HD static V update(Unit<V, Cell>& u, const Clips<V>& clips) {
    const V i = fr_sigmoid(u.input[0] + u.recurrent[0]);
    const V f = fr_sigmoid(u.input[1] + u.recurrent[1]);
    const V g = fr_tanh(u.input[2] + u.recurrent[2]);
    const V o = fr_sigmoid(u.input[3] + u.recurrent[3]);
    u.saved[0] = i, u.saved[1] = f, u.saved[2] = g, u.saved[3] = o;
    cells_again(u, clips);
    return o * fr_tanh(u.c[0]);
  }
  template <class V, class Cell>
  FR_HD static void cells_again(Unit<V, Cell>& u, const Clips<V>& clips) {
    u.c[0] = u.saved[1] * u.c_prev[0] + u.saved[0] * (u.saved[2] * u.candidate);
    if (clips.clip_cell) u.c[0] = clipped(u.c[0], clips.cell);
  }

  // d_hidden: gradient of o * tanh(c).
  template <class V, class Cell>
  FR_HD static void gradients(Unit<V, Cell>& u, V d_hidden, const Clips<V>& clips) {
    const V i = u.saved[0], f = u.saved[1], g = u.saved[2], o = u.saved[3];
    const V tanh_c = fr_tanh(u.c[0]);
    V d_c = u.d_c[0] + d_hidden * o * (V(1) - tanh_c * tanh_c);
    if (clips.clip_cell) d_c = clipped_gradient(u.c[0], clips.cell, d_c);
    u.d_input[0] = d_c * (g * u.candidate) * i * (V(1) - i);
    u.d_input[1] = d_c * u.c_prev[0] * f * (V(1) - f);
    u.d_input[2] = d_c * i * u.candidate * (V(1) - g * g);
    u.d_input[3] = d_hidden * tanh_c * o * (V(1) - o);
    u.d_c[0] = d_c * f;
    u.d_h_prev = V(0);
  }
};

struct Lstm : LstmGates {
  static constexpr const char* kName = "lstm";
  static constexpr CellPhase kPhases[] = {{Before::kProduct, 4, 4, 0, 4}};

  template <class V>
  FR_HD static void forward0(Unit<V, Lstm>& u, const Clips<V>& clips) {
    u.h = update(u, clips);
  }
  template <class V>
  FR_HD static void backward0(Unit<V, Lstm>& u, const Clips<V>& clips) {
    gradients(u, u.d_h, clips);
  }
};

struct LstmProjected : LstmGates {
  static constexpr const char* kName = "lstm_projected";
  static constexpr CellPhase kPhases[] = {{Before::kProduct, 4, 4, 0, 4}, {Before::kProjection, 0, 0, 0, 0}};

  template <class V>
  FR_HD static void forward0(Unit<V, LstmProjected>& u, const Clips<V>& clips) {
    u.inner = update(u, clips);
  }
  // Over P.
  template <class V>
  FR_HD static void forward1(Unit<V, LstmProjected>& u, const Clips<V>& clips) {
    u.h = u.projected;
    if (clips.clip_projected) u.h = clipped(u.h, clips.projected);
  }
  // Over P: the gradient of the projection before its clip.
  template <class V>
  FR_HD static void backward1(Unit<V, LstmProjected>& u, const Clips<V>& clips) {
    u.d_projected = clips.clip_projected ? clipped_gradient(u.h, clips.projected, u.d_h) : u.d_h;
    u.d_h_prev = V(0);
  }
  // Also rebuilds `inner`, which the projection's weight gradient needs.
  template <class V>
  FR_HD static void backward0(Unit<V, LstmProjected>& u, const Clips<V>& clips) {
    u.inner = u.saved[3] * fr_tanh(u.c[0]);
    gradients(u, u.d_inner, clips);
  }
};

}  // namespace fr
