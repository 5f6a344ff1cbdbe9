// A step of the cells with layer normalisation (Ba, Kiros and Hinton 2016), behind its recurrent product and before that product's
// gradient: the surface of the CPU's core. fastrnn/_layer_norm.py calls it in its loop over the steps; everything is its.
#pragma once

#include "rnn.h"

namespace fr {

// With N(a) = (a - mean(a)) / sqrt(variance(a) + 1e-5) over values of one row, and s = N(product) * gain + shift:
//   LSTM (N over all gates): a = input + s, c = sigmoid(f) c_prev + sigmoid(i) tanh(g) candidate, h = sigmoid(o) tanh(N(c) gain_c + shift_c)
//   GRU (N over r and z, and over n): r, z = sigmoid(input + s), n = tanh(input + r s), h = (1 - z) n candidate + z h_prev
// All rows lie one after the other; G is 4 or 3. Results do not depend on the threads, and those of a row not on other rows.
struct LayerNormArgs {
  Type type;            // float32 or float64
  bool gru;             // else LSTM
  int64_t rows, hidden;
  double cell_clip;     // LSTM; 0: off
  int threads;
  const void* input;      // [B][G*H]
  void* product;          // [B][G*H]: in forward replaced by N of it
  const void* units;      // [G][H] gain; of the LSTM [6][H]: gain, gain_c, shift_c
  const void* shift;      // [G*H] or null
  const void* state;      // [B][H]: c_prev, or h_prev
  const void* candidate;  // [B][H] or null: 1
  void* gates;            // [B][G*H]: i, f, g, o, or r, z, n, from forward to backward
  void* moments;          // [B][3]: 1/deviation of the gates (r and z), mean and 1/deviation of c (1/deviation of n), likewise
  void* c;                // [B][H] LSTM
  void* h;                // [B][H]
  // backward
  const void* d_h;        // [B][H]
  const void* d_c;        // [B][H] LSTM
  void* d_input;          // [B][G*H]
  void* d_product;        // [B][G*H]
  void* d_state;          // [B][H]
  void* d_units;          // as units
  void* d_shift;          // [G*H]
  void* scratch;          // [B][H]
};

void cpu_layer_norm(const LayerNormArgs& args);
void cpu_layer_norm_gradients(const LayerNormArgs& args);

}  // namespace fr
