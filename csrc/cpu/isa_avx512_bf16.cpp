// The CPU backend compiled for AVX-512 with AVX512-BF16, for bfloat16 only; CMakeLists.txt gives the flags.
#include "kernels_impl.h"

namespace fr::cpu {

template const CellKernels* find_cell<Avx512BFloat16, BFloat16>(Cell);

}  // namespace fr::cpu
