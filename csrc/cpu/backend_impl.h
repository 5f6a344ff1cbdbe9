// The definition of find_backend, included by each isa_*.cpp.
#pragma once

#include "backend.h"
#include "backward.h"

namespace fr::cpu {

template <class Isa, class CellType, class S>
const Backend* backend() {
  using F = Forward<Isa, CellType, S>;
  using B = Backward<Isa, CellType, S>;
  using Outers = OuterProduct<Isa, S>;
  static constexpr Backend table{
      F::kLanes,
      sizeof(typename F::O),
      sizeof(typename F::T),
      F::kOutputIsOperand,
      2 * kTileRows * 4 * Isa::kBytes,
      F::Input::bytes,
      F::First::bytes,
      F::Second::bytes,
      B::Transposed::bytes,
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
const Backend* find_cell(Cell cell) {
  switch (cell) {
#define FR_CELL(name, Type) \
  case Cell::name:          \
    return backend<Isa, Type, S>();
#include "../cells/cells.inc"
#undef FR_CELL
  }
  return nullptr;
}

template <class Isa>
const Backend* find_backend(Cell cell, Type type) {
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

}  // namespace fr::cpu
