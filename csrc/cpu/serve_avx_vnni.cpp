// Prepared 8-bit weights, compiled for AVX2 with AVX-VNNI; CMakeLists.txt gives the flags.
#include "serve_impl.h"

namespace fr::cpu {

template const CellKernels* find_serving<AvxVnni>(Cell, Form);

}  // namespace fr::cpu
