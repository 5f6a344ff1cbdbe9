// The cross entropy compiled for AVX-512; CMakeLists.txt gives the flags.
#include "cross_entropy_impl.h"

namespace fr::cpu {

template const CrossEntropyKernels* find_cross_entropy<Avx512>(Type);

}  // namespace fr::cpu
