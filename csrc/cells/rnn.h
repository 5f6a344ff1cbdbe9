// Plain (Elman 1990) RNN: h = tanh or relu of x W_ih + b_ih + h_prev W_hh + b_hh. Backward reads the output.
#pragma once

#include "cell.h"

namespace fr {

struct PlainRnn : CellDefaults {
  static constexpr CellPhase kPhases[] = {{Before::kProduct, 1, 0, 0, 1}};
  static constexpr bool kReadsOutput = true;
};

struct RnnTanh : PlainRnn {
  static constexpr const char* kName = "rnn_tanh";

  template <class V>
  FR_HD static void forward0(Unit<V, RnnTanh>& u, const Clips<V>&) {
    u.h = fr_tanh(u.input[0] + u.recurrent[0]);
  }
  template <class V>
  FR_HD static void backward0(Unit<V, RnnTanh>& u, const Clips<V>&) {
    u.d_input[0] = u.d_h * (V(1) - u.h * u.h);
    u.d_h_prev = V(0);
  }
};

struct RnnRelu : PlainRnn {
  static constexpr const char* kName = "rnn_relu";

  template <class V>
  FR_HD static void forward0(Unit<V, RnnRelu>& u, const Clips<V>&) {
    u.h = fr_max(V(0), u.input[0] + u.recurrent[0]);
  }
  template <class V>
  FR_HD static void backward0(Unit<V, RnnRelu>& u, const Clips<V>&) {
    u.d_input[0] = fr_if_less(V(0), u.h, u.d_h, V(0));
    u.d_h_prev = V(0);
  }
};

}  // namespace fr
