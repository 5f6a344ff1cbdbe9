// float32 and float64 on the CPU compiled for AVX-512 (F, BW, VL, DQ); CMakeLists.txt gives the flags.
#include "kernels_impl.h"

namespace fr::cpu {

template const CellKernels* find_cell<Avx512, float>(Cell);
template const CellKernels* find_cell<Avx512, double>(Cell);

}  // namespace fr::cpu
