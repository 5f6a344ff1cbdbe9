// Prepared 16-bit and 8-bit weights, compiled for AVX2 with FMA and F16C; CMakeLists.txt gives the flags.
#include "serve_impl.h"

namespace fr::cpu {

template const CellKernels* find_serving<Avx2>(Cell, Form);

}  // namespace fr::cpu
