// Layer normalisation compiled for the platform's baseline; CMakeLists.txt gives the flags.
#include "layer_norm_impl.h"

namespace fr::cpu {

template const LayerNormKernels* find_layer_norm<Baseline>(Type);

}  // namespace fr::cpu
