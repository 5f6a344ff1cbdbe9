// What a cell is: the contract that cells/lstm.h, gru.h and rnn.h fulfil and every backend is written over.
//
// A cell is a type without data, used on the CPU (V = a vector of units), in CUDA kernels and in the emulated kernels
// (V = float or double, one unit). All functions work on one hidden unit of one row, through the fields of `Unit<V>`.
//
// A step has one or two recurrent products (kProducts). Each product is followed by a pointwise phase:
//
//   one product (LSTM, GRU reset-after, RNN)
//     recurrent[g] = W_hh[g] h_prev + b_hh[g] for all kGates gates;     forward0 -> h (and c)
//     backward:  backward0: d_h, d_c -> d_input[g], d_recurrent[g], d_h_prev (the elementwise path), d_c
//                then d_h_prev += sum_g d_recurrent[g] W_hh[g]          (the product, transposed)
//
//   two products
//     GRU reset-before: forward0 over gates r, z -> inner = r*h_prev;  recurrent[2] = W_hn inner + b_hn;  forward1 -> h
//       backward1: d_h -> d_recurrent[2], d_recurrent[1], d_h_prev (z*d_h);  d_inner = d_recurrent[2] W_hn;
//       backward0: d_inner -> d_recurrent[0], d_h_prev += d_inner*r;    then d_h_prev += d_recurrent[0..1] W_h[0..1]
//     LSTM with projection: forward0 over i, f, g, o -> inner = o*tanh(c) [H];  projected = W_hr inner [P];  forward1 -> h [P]
//       backward1 (over P): d_h -> d_projected;  d_inner = d_projected W_hr [H];  backward0 (over H): d_inner, d_c -> d_input;
//       then d_h_prev [P] = d_recurrent W_hh
//
// kFirstGates   gates whose recurrent part comes from the first product (the others come from the second)
// kSaved        values per unit kept for backward in storage type; the cell state is kept apart, in state type
// kStates       1 (h) or 2 (h, c)
// kSplitGate    the gate whose d_recurrent differs from d_input, or -1
// kReadsHidden  the pointwise part reads h_prev
// kReadsOutput  backward0 reads h (saved nowhere else: it is the output)
#pragma once

#if defined(__CUDACC__)
#define FR_HD __host__ __device__ __forceinline__
#else
#define FR_HD inline
#endif

namespace fr {

// One hidden unit of one row at one step. Which fields hold what is said by the phases above; a field a phase does not name
// is neither read nor written by it.
template <class V>
struct Unit {
  V input[4];        // input part of each gate: x W_ih^T + b_ih
  V recurrent[4];    // recurrent part of each gate, bias included
  V saved[4];        // what backward needs
  V h_prev, c_prev;  // old states
  V h, c;            // new states
  V inner;           // operand of the second product
  V d_h, d_c;        // gradients of the new states; d_c comes back as the gradient of c_prev
  V d_inner;
  V d_input[4], d_recurrent[4];
  V d_h_prev;        // gradient of h_prev through elementwise paths only
};

// Run-time values of a cell in the vector type: the clips (0: off).
template <class V>
struct Clips {
  V cell, projected;
  bool clip_cell, clip_projected;
};

// Overloads for float and double live with each backend: the CPU's in cpu/simd.h, the device's in cuda/device.cuh.
//   V fr_sigmoid(V), V fr_tanh(V), V fr_max(V, V), V fr_min(V, V)      NaN in the second argument of max and min wins
//   V fr_if_less(V a, V b, V yes, V no)                                a < b ? yes : no; no where either is NaN

template <class V>
FR_HD V clipped(V value, V bound) {
  return fr_max(V(0) - bound, fr_min(bound, value));
}

// The gradient of a clipped value: torch.clamp's, zero outside. A stored value on the bound counts as outside: the value
// before clipping is not kept, and it lay beyond the bound unless it hit it exactly.
template <class V>
FR_HD V clipped_gradient(V stored, V bound, V gradient) {
  const V inside = fr_if_less(stored, bound, gradient, V(0));
  return fr_if_less(V(0) - bound, stored, inside, V(0));
}

}  // namespace fr
