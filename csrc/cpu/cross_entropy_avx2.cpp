// The cross entropy compiled for AVX2 with FMA and F16C; CMakeLists.txt gives the flags.
#include "cross_entropy_impl.h"

namespace fr::cpu {

template const CrossEntropyKernels* find_cross_entropy<Avx2>(Type);

}  // namespace fr::cpu
