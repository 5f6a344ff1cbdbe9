// The cross entropy of a linear layer, in slabs of rows and words: the functions that each instruction set offers to
// cross_entropy.cpp.
//
// A slab's logits are replaced in place: first by exponentials relative to their row's maximum within the slab, then
// by gradients. Every sum has one fixed order: over words block by block, over rows as in outer.h. So results do not
// depend on the number of threads, and a row's result does not depend on other rows.
#pragma once

#include "../cross_entropy.h"
#include "outer.h"

namespace fr::cpu {

// A slab: some of the rows that are not ignored, and words [word0, word0 + words).
struct LogitsSlab {
  const CrossEntropyArgs* args;
  const int64_t* rows;  // their indices in the caller's arrays
  int64_t word0, words;
  PackedMatrix logits;      // the whole weight; panels count from word 0
  PackedMatrix transposed;  // of the slab's words only
  void* values;             // [rows][stride]: logits, then exponentials, then gradients
  int64_t stride;
  void* shift;    // [rows]: subtracted from the logits before exp
  void* maximum;  // [rows]: of all words so far
  void* sum;      // [rows]: exponentials relative to the maximum, summed so far
  void* label;    // [rows]: the label's logit
};

struct CrossEntropyKernels {
  int64_t (*packed_bytes)(const MatrixSource&);
  int64_t tile_bytes;
  int64_t panel_words;  // words a panel; slabs of words begin at panels
  int64_t group_rows;   // rows that one product computes together
  int64_t near_bytes;   // bytes that stay in a core's cache between two uses
  void (*pack)(const LogitsSlab&, int index, int count);
  // The next three take rows [begin, end) of the slab, at most kTileRows.
  void (*exponentials)(const LogitsSlab&, int64_t begin, int64_t end, bool adds);
  void (*losses)(const LogitsSlab&, int64_t begin, int64_t end);
  void (*gradients)(const LogitsSlab&, int64_t begin, int64_t end, double scale, void* tile);
  int64_t (*outer_left_bytes)(int64_t rows, int64_t columns);
  int64_t (*outer_right_bytes)(int64_t rows, int64_t columns);
  void (*outer)(const Outer&, int64_t rows, bool first, int index, int count, void* left, void* right);
};

// Returns null if the instruction set does not serve the type.
template <class Isa>
const CrossEntropyKernels* find_cross_entropy(Type type);

const CrossEntropyKernels& choose_cross_entropy(Type type);

}  // namespace fr::cpu
