// A table of functions for each instruction set, cell and storage type. rnn_cpu.cpp and core.cpp reach them only
// through these tables.
#pragma once

#include "input_gradient.h"
#include "outer.h"

namespace fr::cpu {

// Sizes and functions of one cell in one storage type.
struct CellKernels {
  int lanes;                                    // units in a register
  int tile_vectors;                             // width of a tile in registers
  int operand_bytes;                            // of an operand of the products
  int state_bytes;                              // of a pre-activation, cell state or sum
  bool output_is_operand;                       // the products read outputs as they are: no converted copies of states
  int64_t tile_bytes;                           // of two tiles
  int64_t near_bytes;                           // recurrent weights up to this size may be read by every thread
  int64_t (*input_bytes)(const MatrixSource&);  // sizes of packed matrices
  int64_t (*first_bytes)(const MatrixSource&);
  int64_t (*second_bytes)(const MatrixSource&);
  int64_t (*plain_bytes)(const MatrixSource&);               // transposed
  int64_t (*quantised_bytes)(const Shape&, int64_t inputs);  // one thread's quantised operands; null: operands are used
                                                             // as they come
  void (*pack_forward)(const Call&, const DirectionWork&, const void* h0, int index, int count);
  void (*pack_backward)(const DirectionWork&, int index, int count);
  void (*forward)(
      const Call&, const ForwardDirection&, const DirectionWork&, const Part&, const Scratch&, bool gates_only);
  void (*backward)(const Call&, const GradientDirection&, const DirectionWork&, const Part&, const Scratch&);
  int64_t (*outer_left_bytes)(int64_t rows, int64_t columns);  // buffers of one thread
  int64_t (*outer_right_bytes)(int64_t rows, int64_t columns);
  void (*outer)(const Outer&, int64_t rows, bool first, int index, int count, void* left, void* right);
  void (*input_gradient)(const InputGradient&, int index, int count, void* tiles);
  void (*widen)(const void* from, void* to, int64_t size);                     // storage type to state type
  void (*narrow)(const void* from, const void* more, void* to, int64_t size);  // and back
};

// One function for each storage type; isa_*.cpp instantiate it.
template <class Isa, class S>
const CellKernels* find_cell(Cell cell);

// Returns null if the instruction set does not serve the type.
template <class Isa>
const CellKernels* find_kernels(Cell cell, Type type) {
  if constexpr (Isa::kNativeBFloat16) return type == Type::kBFloat16 ? find_cell<Isa, BFloat16>(cell) : nullptr;
  else {
    switch (type) {
      case Type::kFloat32: return find_cell<Isa, float>(cell);
      case Type::kFloat64: return find_cell<Isa, double>(cell);
      case Type::kBFloat16: return find_cell<Isa, BFloat16>(cell);
      case Type::kFloat16: return find_cell<Isa, Float16>(cell);
    }
    return nullptr;
  }
}

// The table for prepared weights that are not float32 (serve_impl.h): forward without noise only. Returns null for
// cells that have none.
template <class Isa>
const CellKernels* find_serving(Cell cell, Form form);

}  // namespace fr::cpu
