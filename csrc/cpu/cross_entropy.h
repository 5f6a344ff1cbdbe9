// The cross entropy of a linear layer in pieces of rows and words: what each instruction set offers to cross_entropy.cpp.
//
// A piece's logits become exponentials over their row's maximum in the piece, in place, then gradients. Every sum has one fixed
// order: over words block by block, over rows as outer.h has it. Results do not depend on the number of threads, and those of a row
// not on other rows.
#pragma once

#include "../cross_entropy.h"
#include "outer.h"

namespace fr::cpu {

// A piece: some rows of those that take part, and words [word0, word0 + words).
struct CrossEntropyPiece {
  const CrossEntropyArgs* args;
  const int64_t* rows;     // their places in the caller's arrays
  int64_t word0, words;
  PackedMatrix logits;     // the whole weight, its panels numbered from word 0
  PackedMatrix transposed; // the piece's
  void* values;            // [rows][stride] logits, exponentials, gradients
  int64_t stride;
  void* shift;             // [rows]: exponentials are of the logit minus this
  void* maximum;           // [rows] so far, of all words
  void* sum;               // [rows] so far, of exponentials over the maximum
  void* label;             // [rows]: the label's logit
};

struct CrossEntropyBackend {
  int64_t (*packed_bytes)(const MatrixSource&);
  int64_t tile_bytes;
  int64_t panel_words;  // pieces of words begin at panels
  int64_t group_rows;   // rows that a product takes together
  int64_t near_bytes;   // what stays near a core from one use to the next
  void (*pack)(const CrossEntropyPiece&, int index, int count);
  // Rows [begin, end) of the piece, at most kTileRows.
  void (*exponentials)(const CrossEntropyPiece&, int64_t begin, int64_t end, bool adds);
  void (*losses)(const CrossEntropyPiece&, int64_t begin, int64_t end);
  void (*gradients)(const CrossEntropyPiece&, int64_t begin, int64_t end, double scale, void* tile);
  int64_t (*outer_left_bytes)(int64_t rows, int64_t columns);
  int64_t (*outer_right_bytes)(int64_t rows, int64_t columns);
  void (*outer)(const Outer&, int64_t rows, bool first, int index, int count, void* left, void* right);
};

// Null where the instruction set leaves the type to another.
template <class Isa>
const CrossEntropyBackend* find_cross_entropy(Type type);

const CrossEntropyBackend& choose_cross_entropy(Type type);

}  // namespace fr::cpu
