// All cells, and the one table of what the host needs to know about them.
#pragma once

#define FR_CELL(name, Type)
#include "cells.inc"
#undef FR_CELL

#include <cstddef>
#include <stdexcept>
#include <string>

namespace fr {

enum class Cell : int {
#define FR_CELL(name, Type) name,
#include "cells.inc"
#undef FR_CELL
};

struct CellFacts {
  const char* name;
  Cell code;
  int gates, cells, saved, unit_weights, split_gate;
  bool reads_hidden, reads_output, zones_cells, drops_candidate;
  int phases;
  CellPhase phase[kMostPhases];
  int states() const { return 1 + (cells > 0); }  // states that a caller sees: h, and all cell states as one
  int carried() const { return phase[0].carried; }
  bool multiplies() const { return phase[0].before == Before::kProduct; }  // has W_hh and b_hh
  bool two_phases() const { return phases == 2; }
  bool projects() const { return phase[phases - 1].before == Before::kProjection; }
  // The second product: whether it multiplies a part of W_hh, and its weight rows a unit.
  bool second_gates() const { return two_phases() && !projects(); }
  int second_rows() const { return projects() ? 1 : two_phases() ? phase[1].gates : 0; }
};

template <class Type>
constexpr CellFacts facts(Cell code) {
  using N = Numbers<Type>;
  return {Type::kName, code, N::kGates, Type::kCells, N::kSaved, Type::kUnitWeights, Type::kSplitGate,
      Type::kReadsHidden, Type::kReadsOutput, Type::kZonesCells, Type::kDropsCandidate, N::kPhases,
      {N::kFirst, N::kTwoPhases ? N::kLast : CellPhase{}}};
}

inline constexpr CellFacts kCells[] = {
#define FR_CELL(name, Type) facts<Type>(Cell::name),
#include "cells.inc"
#undef FR_CELL
};

// Static, as in cpu/storage.h: each file has its own copy, so that one compiled for AVX-512 is never linked into
// another.
static inline const CellFacts& facts_of(Cell cell) {
  const auto code = static_cast<std::size_t>(cell);
  if (code >= sizeof kCells / sizeof kCells[0])
    throw std::invalid_argument("cell: unknown code " + std::to_string(static_cast<int>(cell)));
  return kCells[code];
}

}  // namespace fr
