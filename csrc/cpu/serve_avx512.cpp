// Prepared 16-bit and 8-bit weights, compiled for AVX-512 (F, BW, VL, DQ); CMakeLists.txt gives the flags.
#include "serve_impl.h"

namespace fr::cpu {

template const CellKernels* find_serving<Avx512>(Cell, Form);

}  // namespace fr::cpu
