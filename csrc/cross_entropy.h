// The cross entropy of a linear layer, without storing all its logits: the interface of the CPU core. The caller owns
// everything; the call returns when all results are written.
#pragma once

#include "rnn.h"

namespace fr {

// loss[r] = log(sum over words w of exp(logit[r][w])) - logit[r][target[r]], logit[r][w] = input[r] . weight[w] +
// bias[w].
// With label_logit the label is not a word of the matrix: its own logit joins the sum, and word target[r] leaves it
// (-1: none does).
struct CrossEntropyArgs {
  Type type;  // float32 or float64, of everything but the integers
  int64_t rows, words, depth;
  const void* input;   // [rows][depth], input_stride elements from row to row
  const void* weight;  // [words][depth], weight_stride elements from row to row
  int64_t input_stride, weight_stride;
  const void* bias;          // [words] or null
  const int64_t* target;     // [rows]
  int64_t ignore_index;      // rows with this target are ignored: loss 0, no gradient
  const void* label_logit;   // [rows] or null
  const void* row_gradient;  // [rows]: gradient of each loss; null: 1, or with `mean` 1 / the number of rows not
                             // ignored
  bool mean;
  void* loss;           // [rows]
  void* total;          // [1]: sum of the losses; with `mean` their mean, NaN without rows
  void* d_input;        // [rows][depth] or null; all below may be null too
  void* d_weight;       // [words][depth]
  void* d_bias;         // [words]
  void* d_label_logit;  // [rows]
  int64_t slab_bytes;   // memory for a slab of logits, approximately
  int threads;
};

// Throws std::out_of_range for a target that is no word.
void cpu_cross_entropy(const CrossEntropyArgs& args);

}  // namespace fr
