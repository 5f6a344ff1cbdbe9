// float32 and float64 on the CPU compiled for AVX2 with FMA and F16C; CMakeLists.txt gives the flags.
#include "kernels_impl.h"

namespace fr::cpu {

template const CellKernels* find_cell<Avx2, float>(Cell);
template const CellKernels* find_cell<Avx2, double>(Cell);

}  // namespace fr::cpu
