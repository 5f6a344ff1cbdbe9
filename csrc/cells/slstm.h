// sLSTM (Beck et al. 2024, https://arxiv.org/abs/2405.04517, equations 8 to 17), gates i, f, z, o; the forget gate is a
// sigmoid, as in the published code. States are c, n and the stabiliser m. The gates are scaled by exp(-m), so that no
// exponential exceeds 1:
//   a = log sigmoid(f) + m_prev,  m = max(a, i),  i' = exp(i - m),  f' = exp(a - m)
//   c = f' c_prev + i' tanh(z),   n = f' n_prev + i',   h = sigmoid(o) c / n
// A unit without history (n_prev = 0) has m = i, so that i' is 1 however small the gate is; f' is then at most 1.
#pragma once

#include "cell.h"

namespace fr {

struct Slstm : CellDefaults {
  static constexpr const char* kName = "slstm";
  static constexpr CellPhase kPhases[] = {{Before::kProduct, 4, 4, 0, 4}};
  static constexpr int kCells = 3;

  // The two exponential gates, from lead = a - i. One of them is 1.
  template <class V>
  struct Gates {
    V i, f;
  };
  template <class V>
  FR_HD static Gates<V> gates(V lead, V n_prev) {
    const V less = fr_exp(fr_min(V(0) - lead, lead));
    return {fr_if_less(V(0), n_prev, fr_if_less(V(0), lead, less, V(1)), V(1)), fr_if_less(V(0), lead, V(1), less)};
  }

  template <class V>
  FR_HD static void forward0(Unit<V, Slstm>& u, const Clips<V>&) {
    const V i = u.input[0] + u.recurrent[0], f = u.input[1] + u.recurrent[1];
    const V z = fr_tanh(u.input[2] + u.recurrent[2]);
    const V o = fr_sigmoid(u.input[3] + u.recurrent[3]);
    const V a = fr_log_sigmoid(f) + u.c_prev[2], lead = a - i;
    const Gates<V> gate = gates(lead, u.c_prev[1]);
    u.c[0] = gate.f * u.c_prev[0] + gate.i * z;
    u.c[1] = gate.f * u.c_prev[1] + gate.i;
    u.c[2] = fr_if_less(V(0), u.c_prev[1], fr_if_less(V(0), lead, a, i), i);
    u.saved[0] = lead, u.saved[1] = fr_sigmoid(V(0) - f), u.saved[2] = z, u.saved[3] = o;
    u.h = o * (u.c[0] / u.c[1]);
  }
  template <class V>
  FR_HD static void backward0(Unit<V, Slstm>& u, const Clips<V>&) {
    const V lead = u.saved[0], z = u.saved[2], o = u.saved[3], n_prev = u.c_prev[1];
    const Gates<V> gate = gates(lead, n_prev);
    const V ratio = u.c[0] / u.c[1], d_ratio = u.d_h * o / u.c[1];
    const V d_c = u.d_c[0] + d_ratio, d_n = u.d_c[1] - d_ratio * ratio, d_m = u.d_c[2];
    u.d_input[2] = d_c * gate.i * (V(1) - z * z);
    u.d_input[3] = u.d_h * ratio * o * (V(1) - o);
    // Gradients of the exponents: m equals a if a leads, else i; the exponent that equals m is constant.
    const V d_i = (d_c * z + d_n) * gate.i, d_f = (d_c * u.c_prev[0] + d_n * n_prev) * gate.f;
    const V held = fr_if_less(V(0), lead, V(0), d_f);  // without history f' stays 1 if a leads
    const V d_a = fr_if_less(V(0), n_prev, fr_if_less(V(0), lead, d_m - d_i, d_f), held);
    u.d_input[0] = fr_if_less(V(0), n_prev, fr_if_less(V(0), lead, d_i, d_m - d_f), d_m - held);
    u.d_input[1] = d_a * u.saved[1];
    u.d_c[0] = d_c * gate.f;
    u.d_c[1] = d_n * gate.f;
    u.d_c[2] = d_a;
    u.d_h_prev = V(0);
  }
};

}  // namespace fr
