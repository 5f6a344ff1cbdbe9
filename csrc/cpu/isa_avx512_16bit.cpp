// bfloat16 and float16 on the CPU compiled for AVX-512 (F, BW, VL, DQ); CMakeLists.txt gives the flags.
#include "kernels_impl.h"

namespace fr::cpu {

template const CellKernels* find_cell<Avx512, BFloat16>(Cell);
template const CellKernels* find_cell<Avx512, Float16>(Cell);

}  // namespace fr::cpu
