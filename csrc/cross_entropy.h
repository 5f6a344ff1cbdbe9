// The cross entropy of a linear layer, without its logits as a whole: the surface of the CPU's core. Everything is owned by the
// caller; the call returns when all results are written.
#pragma once

#include "rnn.h"

namespace fr {

// loss[r] = log(sum over words w of exp(logit[r][w])) - logit[r][target[r]], logit[r][w] = input[r] . weight[w] + bias[w].
// With label_logit the label is no word of the matrix: its own logit joins the sum, and word target[r] leaves it (-1: none does).
struct CrossEntropyArgs {
  Type type;                    // float32 or float64, of all that is not an integer
  int64_t rows, words, depth;
  const void* input;            // [rows][depth], rows input_stride apart
  const void* weight;           // [words][depth], rows weight_stride apart
  int64_t input_stride, weight_stride;
  const void* bias;             // [words] or null
  const int64_t* target;        // [rows]
  int64_t ignore_index;         // rows with this target take no part: loss 0 and no gradient
  const void* label_logit;      // [rows] or null
  const void* row_gradient;     // [rows]: the gradient of each loss, or null: 1, or 1 / rows that take part if `mean`
  bool mean;
  void* loss;                   // [rows]
  void* total;                  // [1]: the sum of loss, or its mean if `mean` (NaN of no rows)
  void* d_input;                // [rows][depth] or null, as all below
  void* d_weight;               // [words][depth]
  void* d_bias;                 // [words]
  void* d_label_logit;          // [rows]
  int64_t piece_bytes;          // about what a piece of logits may take
  int threads;
};

// Throws std::out_of_range for a target that is no word.
void cpu_cross_entropy(const CrossEntropyArgs& args);

}  // namespace fr
