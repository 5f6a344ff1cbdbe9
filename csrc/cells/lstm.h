// LSTM (Hochreiter and Schmidhuber 1997, with forget gate) in torch.nn.LSTM's form, gates i, f, g, o; and LSTM with a
// recurrent projection (Sak et al. 2014, https://arxiv.org/abs/1402.1128; torch's proj_size). The clips are those of the
// original ELMo's cell: the stored cell state is clipped, the output reads the clipped one, the gradient outside is zero.
#pragma once

#include "cell.h"

namespace fr {

struct LstmGates {
  static constexpr int kGates = 4, kFirstGates = 4, kStates = 2, kSaved = 4, kSplitGate = -1;
  static constexpr bool kReadsHidden = false, kReadsOutput = false;

  template <class V>
  FR_HD static V update(Unit<V>& u, const Clips<V>& clips) {
    const V i = fr_sigmoid(u.input[0] + u.recurrent[0]);
    const V f = fr_sigmoid(u.input[1] + u.recurrent[1]);
    const V g = fr_tanh(u.input[2] + u.recurrent[2]);
    const V o = fr_sigmoid(u.input[3] + u.recurrent[3]);
    u.c = f * u.c_prev + i * g;
    if (clips.clip_cell) u.c = clipped(u.c, clips.cell);
    u.saved[0] = i, u.saved[1] = f, u.saved[2] = g, u.saved[3] = o;
    return o * fr_tanh(u.c);
  }

  // d_hidden: gradient of o * tanh(c).
  template <class V>
  FR_HD static void gradients(Unit<V>& u, V d_hidden, const Clips<V>& clips) {
    const V i = u.saved[0], f = u.saved[1], g = u.saved[2], o = u.saved[3];
    const V tanh_c = fr_tanh(u.c);
    V d_c = u.d_c + d_hidden * o * (V(1) - tanh_c * tanh_c);
    if (clips.clip_cell) d_c = clipped_gradient(u.c, clips.cell, d_c);
    u.d_input[0] = d_c * g * i * (V(1) - i);
    u.d_input[1] = d_c * u.c_prev * f * (V(1) - f);
    u.d_input[2] = d_c * i * (V(1) - g * g);
    u.d_input[3] = d_hidden * tanh_c * o * (V(1) - o);
    for (int gate = 0; gate < 4; ++gate) u.d_recurrent[gate] = u.d_input[gate];
    u.d_c = d_c * f;
    u.d_h_prev = V(0);
  }
};

struct Lstm : LstmGates {
  static constexpr int kProducts = 1;

  template <class V>
  FR_HD static void forward0(Unit<V>& u, const Clips<V>& clips) {
    u.h = update(u, clips);
  }
  template <class V>
  FR_HD static void backward0(Unit<V>& u, const Clips<V>& clips) {
    gradients(u, u.d_h, clips);
  }
};

struct LstmProjected : LstmGates {
  static constexpr int kProducts = 2;

  template <class V>
  FR_HD static void forward0(Unit<V>& u, const Clips<V>& clips) {
    u.inner = update(u, clips);
  }
  // Over P: recurrent[0] holds the projection of `inner`.
  template <class V>
  FR_HD static void forward1(Unit<V>& u, const Clips<V>& clips) {
    u.h = u.recurrent[0];
    if (clips.clip_projected) u.h = clipped(u.h, clips.projected);
  }
  // Over P: d_recurrent[0] is the gradient of the projection before its clip.
  template <class V>
  FR_HD static void backward1(Unit<V>& u, const Clips<V>& clips) {
    u.d_recurrent[0] = clips.clip_projected ? clipped_gradient(u.h, clips.projected, u.d_h) : u.d_h;
    u.d_h_prev = V(0);
  }
  // Also rebuilds `inner`, which the projection's weight gradient needs.
  template <class V>
  FR_HD static void backward0(Unit<V>& u, const Clips<V>& clips) {
    u.inner = u.saved[3] * fr_tanh(u.c);
    gradients(u, u.d_inner, clips);
  }
};

}  // namespace fr
