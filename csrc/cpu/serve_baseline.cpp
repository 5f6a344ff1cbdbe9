// Prepared 16-bit and 8-bit weights, compiled for any x86-64, arm64 or other machine; CMakeLists.txt gives the flags.
#include "serve_impl.h"

namespace fr::cpu {

template const CellKernels* find_serving<Baseline>(Cell, Form);

}  // namespace fr::cpu
