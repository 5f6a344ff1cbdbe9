// Defines find_cell; included by each isa_*.cpp.
#pragma once

#include "kernels.h"
#include "backward.h"

namespace fr::cpu {

template <class Isa, class CellType, class S>
const CellKernels* cell_kernels() {
  using F = Forward<Isa, CellType, S>;
  using B = Backward<Isa, CellType, S>;
  using Outers = OuterProduct<Isa, S>;
  static constexpr CellKernels table{
      F::kLanes,
      Isa::kTileVectors,
      sizeof(typename F::O),
      sizeof(typename F::T),
      F::kOutputIsOperand,
      2 * kTileRows * 4 * Isa::kBytes,
      Isa::kNearBytes,
      F::Input::bytes,
      F::First::bytes,
      F::Second::bytes,
      B::Transposed::bytes,
      F::operand_bytes,
      F::pack,
      B::pack,
      F::run,
      B::run,
      Outers::left_bytes,
      Outers::right_bytes,
      Outers::run,
      InputGradients<Isa, S>::run,
      Conversion<Isa, S>::widen,
      Conversion<Isa, S>::narrow,
  };
  return &table;
}

template <class Isa, class S>
const CellKernels* find_cell(Cell cell) {
  switch (cell) {
#define FR_CELL(name, Type) \
  case Cell::name: \
    return cell_kernels<Isa, Type, S>();
#include "../cells/cells.inc"
#undef FR_CELL
  }
  return nullptr;
}

}  // namespace fr::cpu
