// GRU, gates r, z, n:
//   h = (1 - z) n + z h_prev
// As in torch, z weighs the old state. Papers whose update gate u weighs the new state have u = 1 - z.
// reset-after  (torch.nn.GRU, cuDNN):      n = tanh(x W_in + b_in + r (h_prev W_hn + b_hn))
// reset-before (Cho et al. 2014, https://arxiv.org/abs/1406.1078):  n = tanh(x W_in + b_in + (r h_prev) W_hn + b_hn)
#pragma once

#include "cell.h"

namespace fr {

struct Gru : CellDefaults {
  static constexpr const char* kName = "gru";
  static constexpr CellPhase kPhases[] = {{Before::kProduct, 3, 4, 0, 3}};
  static constexpr int kSplitGate = 2, kPassedOn = 1;
  static constexpr bool kReadsHidden = true, kDropsCandidate = true;

  template <class V>
  FR_HD static void begin(Unit<V, Gru>& u, const Clips<V>&) {
    u.saved[0] = fr_sigmoid(u.input[0] + u.recurrent[0]);
    u.saved[1] = fr_sigmoid(u.input[1] + u.recurrent[1]);
    u.saved[2] = u.input[2] + u.saved[0] * u.recurrent[2];
    u.saved[3] = u.recurrent[2];
  }
  template <class V>
  FR_HD static V output(Unit<V, Gru>& u) {
    u.saved[2] = fr_tanh(u.saved[2]);
    const V added = u.saved[2] * u.candidate;
    return added + u.saved[1] * (u.h_prev - added);
  }
  template <class V>
  FR_HD static void forward0(Unit<V, Gru>& u, const Clips<V>& clips) {
    begin(u, clips);
    u.h = output(u);
  }
  template <class V>
  FR_HD static void backward0(Unit<V, Gru>& u, const Clips<V>&) {
    const V r = u.saved[0], z = u.saved[1], n = u.saved[2];
    const V d_n = u.d_h * (V(1) - z) * u.candidate * (V(1) - n * n);
    u.d_input[0] = d_n * u.saved[3] * r * (V(1) - r);
    u.d_input[1] = u.d_h * (u.h_prev - n * u.candidate) * z * (V(1) - z);
    u.d_input[2] = d_n;
    u.d_split = d_n * r;
    u.d_h_prev = u.d_h * z;
  }
};

struct GruResetBefore : CellDefaults {
  static constexpr const char* kName = "gru_reset_before";
  static constexpr CellPhase kPhases[] = {{Before::kProduct, 2, 2, 1, 1}, {Before::kProduct, 1, 1, 0, 2}};
  static constexpr bool kReadsHidden = true, kDropsCandidate = true;

  template <class V>
  FR_HD static void forward0(Unit<V, GruResetBefore>& u, const Clips<V>&) {
    u.saved[0] = fr_sigmoid(u.input[0] + u.recurrent[0]);
    u.saved[1] = u.carried[0] = fr_sigmoid(u.input[1] + u.recurrent[1]);
    u.inner = u.saved[0] * u.h_prev;
  }
  // carried[0] is z, not rounded to storage.
  template <class V>
  FR_HD static void forward1(Unit<V, GruResetBefore>& u, const Clips<V>&) {
    const V n = fr_tanh(u.input[2] + u.recurrent[2]);
    u.saved[2] = n;
    const V added = n * u.candidate;
    u.h = added + u.carried[0] * (u.h_prev - added);
  }
  template <class V>
  FR_HD static void backward1(Unit<V, GruResetBefore>& u, const Clips<V>&) {
    const V z = u.saved[1], n = u.saved[2];
    u.d_input[2] = u.d_h * (V(1) - z) * u.candidate * (V(1) - n * n);
    u.d_input[1] = u.d_h * (u.h_prev - n * u.candidate) * z * (V(1) - z);
    u.d_h_prev = u.d_h * z;
  }
  // Adds to backward1's d_h_prev. Also recomputes `inner`, which W_hn's gradient needs.
  template <class V>
  FR_HD static void backward0(Unit<V, GruResetBefore>& u, const Clips<V>&) {
    const V r = u.saved[0];
    u.inner = r * u.h_prev;
    u.d_input[0] = u.d_inner * u.h_prev * r * (V(1) - r);
    u.d_h_prev = u.d_h_prev + u.d_inner * r;
  }
};

}  // namespace fr
