// bfloat16 and float16 on the CPU compiled for AVX2 with FMA and F16C; CMakeLists.txt gives the flags.
#include "kernels_impl.h"

namespace fr::cpu {

template const CellKernels* find_cell<Avx2, BFloat16>(Cell);
template const CellKernels* find_cell<Avx2, Float16>(Cell);

}  // namespace fr::cpu
