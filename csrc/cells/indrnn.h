// Independently recurrent network (Li et al. 2018, https://arxiv.org/abs/1803.04831, equation 2). A unit reads no other
// unit's state:
//   h = tanh or relu of x W_ih + b_ih + u h_prev.
// Backward reads the output.
#pragma once

#include "cell.h"

namespace fr {

struct IndependentRnn : CellDefaults {
  static constexpr CellPhase kPhases[] = {{Before::kNothing, 1, 0, 0, 1}};
  static constexpr int kUnitWeights = 1;
  static constexpr bool kReadsHidden = true, kReadsOutput = true;

  template <class V, class Cell>
  FR_HD static V sum(const Unit<V, Cell>& u) {
    return u.input[0] + u.unit_weight[0] * u.h_prev;
  }
  template <class V, class Cell>
  FR_HD static void gradients(Unit<V, Cell>& u, V d_sum) {
    u.d_input[0] = d_sum;
    u.d_unit_weight[0] = d_sum * u.h_prev;
    u.d_h_prev = d_sum * u.unit_weight[0];
  }
};

struct IndRnnTanh : IndependentRnn {
  static constexpr const char* kName = "indrnn_tanh";

  template <class V>
  FR_HD static void forward0(Unit<V, IndRnnTanh>& u, const Clips<V>&) {
    u.h = fr_tanh(sum(u));
  }
  template <class V>
  FR_HD static void backward0(Unit<V, IndRnnTanh>& u, const Clips<V>&) {
    gradients(u, u.d_h * (V(1) - u.h * u.h));
  }
};

struct IndRnnRelu : IndependentRnn {
  static constexpr const char* kName = "indrnn_relu";

  template <class V>
  FR_HD static void forward0(Unit<V, IndRnnRelu>& u, const Clips<V>&) {
    u.h = fr_max(V(0), sum(u));
  }
  template <class V>
  FR_HD static void backward0(Unit<V, IndRnnRelu>& u, const Clips<V>&) {
    gradients(u, fr_if_less(V(0), u.h, u.d_h, V(0)));
  }
};

}  // namespace fr
