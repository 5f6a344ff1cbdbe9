// Defines find_serving; included by each serve_*.cpp. The forward pass (forward.h) over prepared 16-bit and 8-bit
// weights.
#pragma once

#include "kernels.h"
#include "forward.h"
#include "quantised.h"

namespace fr::cpu {

template <class Isa>
struct Products<Isa, float, Int8> {
  template <int kGates>
  using Of = QuantisedProduct<Isa, kGates>;
};

template <class Isa, class CellType, class W>
const CellKernels* serving() {
  using F = Forward<Isa, CellType, float, W>;
  static constexpr CellKernels table = [] {
    CellKernels of{};
    of.lanes = F::kLanes, of.tile_vectors = Isa::kTileVectors;
    of.operand_bytes = of.state_bytes = sizeof(float), of.output_is_operand = true;
    of.tile_bytes = 2 * kTileRows * 4 * Isa::kBytes;
    // counted in float32, and bytes take a quarter
    of.near_bytes = Isa::kTiles ? 4 * Isa::kNearBytes : Isa::kNearBytes;
    of.input_bytes = F::Input::bytes, of.first_bytes = F::First::bytes, of.second_bytes = F::Second::bytes;
    of.quantised_bytes = F::operand_bytes, of.pack_forward = F::pack, of.forward = F::run;
    return of;
  }();
  return &table;
}

template <class Isa>
const CellKernels* find_serving(Cell cell, Form form) {
  const auto find = [form]<class CellType>(CellType) {
    if (form == Form::kInt8) return serving<Rough<Isa>, CellType, Int8>();
    if constexpr (Isa::kOnlyInt8) return static_cast<const CellKernels*>(nullptr);
    else return serving<Isa, CellType, BFloat16>();
  };
  switch (cell) {
    case Cell::kLstm: return find(Lstm{});
    case Cell::kLstmProjected: return find(LstmProjected{});
    case Cell::kGru: return find(Gru{});
    case Cell::kGruResetBefore: return find(GruResetBefore{});
    case Cell::kRnnTanh: return find(RnnTanh{});
    case Cell::kRnnRelu: return find(RnnRelu{});
    default: return nullptr;
  }
}

}  // namespace fr::cpu
