// Layer normalisation in a step: the functions that each instruction set offers to layer_norm.cpp. They work on rows,
// or units, [begin, end).
#pragma once

#include "../layer_norm.h"
#include "isa.h"

namespace fr::cpu {

struct LayerNormKernels {
  void (*forward)(const LayerNormArgs&, int64_t begin, int64_t end);
  void (*backward)(const LayerNormArgs&, int64_t begin, int64_t end);
  void (*unit_gradients)(const LayerNormArgs&, int64_t begin, int64_t end);  // sums over rows; after backward
};

// Returns null if the instruction set does not serve the type.
template <class Isa>
const LayerNormKernels* find_layer_norm(Type type);

const LayerNormKernels& choose_layer_norm(Type type);

}  // namespace fr::cpu
