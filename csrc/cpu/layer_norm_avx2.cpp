// Layer normalisation compiled for AVX2 with FMA and F16C; CMakeLists.txt gives the flags.
#include "layer_norm_impl.h"

namespace fr::cpu {

template const LayerNormKernels* find_layer_norm<Avx2>(Type);

}  // namespace fr::cpu
