// The CPU backend compiled for AVX-512 with AMX, for bfloat16 only; CMakeLists.txt gives the flags.
#include "kernels_impl.h"

namespace fr::cpu {

template const CellKernels* find_cell<Avx512Amx, BFloat16>(Cell);

}  // namespace fr::cpu
