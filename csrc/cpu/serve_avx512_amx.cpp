// Prepared 8-bit weights, compiled for AVX-512 with AMX; CMakeLists.txt gives the flags.
#include "serve_impl.h"

namespace fr::cpu {

template const CellKernels* find_serving<Avx512Amx>(Cell, Form);

}  // namespace fr::cpu
