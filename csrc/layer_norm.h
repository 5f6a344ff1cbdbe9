// One step of the cells with layer normalisation (Ba, Kiros and Hinton 2016): forward after the recurrent product,
// backward before that product's gradient. The interface of the CPU core and of the CUDA kernels (cuda/rnn_cuda.h).
// fastrnn/_core/layer_norm.py calls it in its loop over the steps and owns all buffers.
#pragma once

#include "rnn.h"

namespace fr {

// With N(a) = (a - mean(a)) / sqrt(variance(a) + 1e-5) over values of one row, and s = N(product) * gain + shift:
//   LSTM (N over all gates): a = input + s, c = sigmoid(f) c_prev + sigmoid(i) tanh(g) candidate,
//     h = sigmoid(o) tanh(N(c) gain_c + shift_c)
//   GRU (N over r and z, and over n): r, z = sigmoid(input + s), n = tanh(input + r s),
//     h = (1 - z) n candidate + z h_prev
// Rows are contiguous; G is 4 or 3. Results do not depend on the number of threads or on the order in which they run,
// and a row's result does not depend on other rows.
struct LayerNormArgs {
  Type type;  // float32 or float64
  bool gru;   // else LSTM
  int64_t rows, hidden;
  double cell_clip;       // LSTM; 0: off
  int threads;            // CPU: at most this many
  void* stream;           // CUDA: the stream to run on
  const void* input;      // [B][G*H]
  void* product;          // [B][G*H]: forward replaces it by N(product)
  const void* units;      // [G][H] gain; LSTM [6][H]: gain, gain_c, shift_c
  const void* shift;      // [G*H] or null
  const void* state;      // [B][H]: c_prev (LSTM) or h_prev (GRU)
  const void* candidate;  // [B][H] factor of the candidate (g or n), for dropout; null: 1
  void* gates;            // [B][G*H]: i, f, g, o, or r, z, n; forward writes it for backward
  void* moments;          // [B][3]; forward writes it for backward. LSTM: 1/deviation of the gates, mean and
                          // 1/deviation of c. GRU: 1/deviation of r and z, and of n
  void* c;                // [B][H] LSTM
  void* h;                // [B][H]
  // backward
  const void* d_h;  // [B][H]
  const void* d_c;  // [B][H] LSTM
  void* d_input;    // [B][G*H]
  void* d_product;  // [B][G*H]
  void* d_state;    // [B][H]
  void* d_units;    // as `units`
  void* d_shift;    // [G*H]
  void* scratch;    // [B][H]
};

void cpu_layer_norm(const LayerNormArgs& args);
void cpu_layer_norm_gradients(const LayerNormArgs& args);

}  // namespace fr
