// What each instruction set offers to rnn_cpu.cpp: one table of functions per cell and storage type.
#pragma once

#include "call.h"

namespace fr::cpu {

// Sizes and functions of one cell in one storage type.
struct Backend {
  int lanes;                  // units in a register
  int operand_bytes;          // of an operand of the products
  int state_bytes;            // of a pre-activation, cell state or sum
  bool output_is_operand;     // states need no converted copies
  bool gradient_is_operand;   // likewise for backward
  int64_t tile_bytes;
  int64_t (*input_bytes)(const MatrixSource&);       // packed sizes
  int64_t (*first_bytes)(const MatrixSource&);
  int64_t (*plain_bytes)(const MatrixSource&);       // second, and both transposed
  void (*pack_forward)(const Call&, const DirectionWork&, const void* h0, int index, int count);
  void (*pack_backward)(const DirectionWork&, int index, int count);
  void (*forward)(const Call&, const ForwardDirection&, const DirectionWork&, const Part&, const Scratch&, bool gates_only);
  void (*backward)(const Call&, const BackwardDirection&, const DirectionWork&, const Part&, const Scratch&);
};

// Null where the instruction set leaves the type to another.
template <class Isa>
const Backend* find_backend(Cell cell, Type type);

}  // namespace fr::cpu
