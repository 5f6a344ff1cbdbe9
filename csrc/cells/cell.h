// The contract of a cell, which lstm.h, gru.h, rnn.h, indrnn.h and slstm.h fulfil and every backend is written against.
// cells.h lists them all.
//
// A cell is a type without data. It runs on the CPU (V = a vector of units), in CUDA kernels and in the emulated
// kernels (V = float or double, one unit). All functions work on one hidden unit of one row, through the fields of
// `Unit<V, Cell>`.
//
// A step has one phase or two (kPhases). Each begins with what it waits for (Before), nearly always a product with
// recurrent weights, and continues with a pointwise part, a function of the cell:
//
//   one phase (LSTM, GRU reset-after, RNN)
//     recurrent[g] = W_hh[g] h_prev + b_hh[g] for all gates;            forward0 -> h (and c)
//     backward:  backward0: d_h, d_c -> d_input, d_split, d_h_prev (the elementwise path), d_c
//                then d_h_prev += sum_g d_recurrent[g] W_hh[g], the transposed product (d_recurrent equals
//                d_input except for the split gate)
//
//   one phase without a product (IndRNN)
//     There is no recurrent part: a unit reads its own h_prev through its own weights, and backward0 gives all of
//     d_h_prev. Such a cell has no W_hh and no b_hh, and its units never wait for each other.
//
//   two phases
//     GRU reset-before: forward0 over gates r, z -> inner = r*h_prev;  recurrent[2] = W_hn inner + b_hn;  forward1 -> h
//       backward1: d_h -> d_input[1..2], d_h_prev (z*d_h);             d_inner = d_input[2] W_hn;
//       backward0: d_inner -> d_input[0], d_h_prev += d_inner*r;       then d_h_prev += d_input[0..1] W_h[0..1]
//     LSTM with projection: forward0 over i, f, g, o -> inner = o*tanh(c) [H];  projected = W_hr inner [P];
//       forward1 -> h [P]
//       backward1 (over P): d_h -> d_projected;  d_inner = d_projected W_hr [H];
//       backward0 (over H): d_inner, d_c -> d_input;                   then d_h_prev [P] = d_input W_hh
//
// Heads (W_hh block-diagonal) need nothing from a cell: to the backends each head is a layer of H/heads units. Head k
// has units [k*H/heads, (k+1)*H/heads) of every gate, state and saved value, and its own W_hh [G*H/heads, H/heads],
// gate by gate.
//
// What a cell declares (defaults: CellDefaults):
//   kName         its name in Python
//   kPhases       its phases in order; gates, saved and carried values are numbered across them
//   kUnitWeights  weights of a single unit, besides its rows of the matrices (peepholes, gains). Any phase over hidden
//                 units may read them; that phase's backward gives all their gradients
//   kCells        state values a unit besides h. They do not enter a product, and are kept in the state type
//   kSplitGate    the gate whose recurrent part has another gradient (d_split) than its input part, or -1
//   kReadsHidden  the pointwise parts read h_prev
//   kReadsOutput  backward0 reads h, from the output
//   kZonesCells   cells_again(u, clips) recomputes c from saved and c_prev, so that noise.h may keep old cell states
//   kDropsCandidate  multiplies the candidate by `candidate`, after saving it
//   kPassedOn     if a cell of one phase declares it, forward0 is begin(u, clips), then h = output(u), which reads only
//                 h_prev, c, candidate and saved[kPassedOn] and on, and may replace those. The CPU runs all units'
//                 output after their begin, because h waits for functions of functions
//
// Rules: cell states belong to the first phase, forward and backward. The first phase passes to the second only
// `inner`, the operand of the second product, and the `carried` values. With a projection the second phase runs over
// the P units of the projected state and sees nothing of the hidden units.
#pragma once

#include <type_traits>

#if defined(__CUDACC__)
#define FR_HD __host__ __device__ __forceinline__
#else
#define FR_HD inline __attribute__((always_inline))
#endif

namespace fr {

// What a phase waits for.
enum class Before : int {
  kProduct,     // its gates of W_hh times h_prev; in a second phase times `inner`
  kProjection,  // W_hr times `inner`
  kNothing,     // no product: the recurrence is elementwise
  kMoments,     // mean and variance over a row's units, for normalisation
};              // kMoments is reserved: no backend has it yet, and Numbers refuses it.

struct CellPhase {
  Before before;
  int gates;      // gates that the pointwise part reads: rows of W_ih a unit, and of W_hh after a product
  int saved;      // values a unit kept for backward, in the storage type
  int carried;    // values a unit passed to the next phase, in the state type; no more than its gates
  int gradients;  // gates whose gradient its backward gives; numbered on from phase to phase
};

constexpr int kMostPhases = 2, kMostGates = 4;  // kMostGates: of one phase

struct CellDefaults {
  static constexpr int kUnitWeights = 0, kCells = 0, kSplitGate = -1;
  static constexpr bool kReadsHidden = false, kReadsOutput = false, kZonesCells = false, kDropsCandidate = false;
};

template <class Cell>
constexpr int sum_over_phases(int CellPhase::*field) {
  int sum = 0;
  for (const CellPhase& phase : Cell::kPhases) sum += phase.*field;
  return sum;
}

// A cell's numbers, derived from its phases.
template <class Cell>
struct Numbers {
  static constexpr int kPhases = sizeof Cell::kPhases / sizeof(CellPhase);
  static constexpr CellPhase kFirst = Cell::kPhases[0], kLast = Cell::kPhases[kPhases - 1];
  static constexpr bool kTwoPhases = kPhases == 2, kProjects = kLast.before == Before::kProjection;
  static constexpr bool kMultiplies = kFirst.before == Before::kProduct;  // has W_hh
  static constexpr int kFirstGates = kFirst.gates, kFirstSaved = kFirst.saved, kFirstGradients = kFirst.gradients;
  // weight rows a unit in the second product
  static constexpr int kSecondRows = kProjects ? 1 : kTwoPhases ? kLast.gates : 0;
  static constexpr int kSecondGates = kTwoPhases && !kProjects ? kLast.gates : 0;
  static constexpr int kGates = sum_over_phases<Cell>(&CellPhase::gates),
                       kSaved = sum_over_phases<Cell>(&CellPhase::saved);
  static constexpr int kCarried = kFirst.carried;
  static_assert(kPhases <= kMostPhases && (kMultiplies || kFirst.before == Before::kNothing) &&
                kLast.carried * (kPhases - 1) == 0);
  static_assert(kTwoPhases ? kMultiplies && (kLast.before == Before::kProduct || kProjects) : !kProjects);
  static_assert(
      sum_over_phases<Cell>(&CellPhase::gradients) == kGates && kCarried <= kFirst.gates && (kTwoPhases || !kCarried));
  static_assert(
      kFirst.gates > 0 && kFirst.gates <= kMostGates && kSecondRows <= kMostGates && (!kTwoPhases || kSecondRows > 0));
  static_assert(Cell::kSplitGate < 0 || (Cell::kSplitGate == kGates - 1 && !kTwoPhases));  // the last gate
  static_assert(!kProjects || (kTwoPhases && !kCarried && !kLast.gates && !kLast.saved && !kLast.gradients));
};

// Stands for a field that the cell does not have.
struct Absent {
  Absent() = default;
  template <class V>
  FR_HD explicit Absent(V) {}
};
template <class V, int kCount>
using Values = std::conditional_t<(kCount > 0), V[(kCount > 0) ? kCount : 1], Absent>;
template <class V, bool kPresent>
using Value = std::conditional_t<kPresent, V, Absent>;

// One hidden unit of one row at one step, with the fields that the cell has. The list of phases above says which fields
// are valid when; a phase neither reads nor writes others.
template <class V, class Cell>
struct Unit {
  using N = Numbers<Cell>;
  Values<V, N::kGates> input;                           // input part of each gate: x W_ih^T + b_ih
  Values<V, N::kMultiplies ? N::kGates : 0> recurrent;  // recurrent part of each gate, bias included
  Value<V, N::kProjects> projected;                     // W_hr inner
  Values<V, N::kSaved> saved;                           // what backward needs
  Values<V, N::kCarried> carried;
  V h_prev;  // for cells that read it, and for noise
  V h;
  Value<V, Cell::kDropsCandidate> candidate{V(1)};
  Values<V, Cell::kCells> c_prev, c;  // cell states, old and new
  Values<V, Cell::kUnitWeights> unit_weight, d_unit_weight;
  Value<V, N::kTwoPhases> inner;  // operand of the second product
  V d_h;                          // gradients of the new states;
  Values<V, Cell::kCells> d_c;    // backward replaces d_c by the gradient of c_prev
  Value<V, N::kTwoPhases> d_inner;
  Value<V, N::kProjects> d_projected;
  Values<V, N::kGates> d_input;
  Value<V, (Cell::kSplitGate >= 0)> d_split;  // gradient of the split gate's recurrent part
  V d_h_prev;                                 // gradient of h_prev through elementwise paths only
};

// Run-time options of a cell as vectors: the clips and whether they are on.
template <class V>
struct Clips {
  V cell, projected;
  bool clip_cell, clip_projected;
};

// Each backend defines these for its own V: the CPU in cpu/simd.h, the device in cuda/device.cuh.
//   V fr_sigmoid(V), V fr_tanh(V), V fr_max(V, V), V fr_min(V, V)      max, min: b if b is NaN
//   V fr_if_less(V a, V b, V yes, V no)                                a < b ? yes : no; no if either is NaN
//   V fr_exp(V x), V fr_log_sigmoid(V x)                               fr_exp: for x <= 0

template <class V>
FR_HD V clipped(V value, V bound) {
  return fr_max(V(0) - bound, fr_min(bound, value));
}

// The gradient of a clipped value as in torch.clamp: zero outside the bound. The value before clipping is not kept, so
// a stored value equal to the bound counts as outside; it was, unless it hit the bound exactly.
template <class V>
FR_HD V clipped_gradient(V stored, V bound, V gradient) {
  const V inside = fr_if_less(stored, bound, gradient, V(0));
  return fr_if_less(V(0) - bound, stored, inside, V(0));
}

}  // namespace fr
