// The CPU backend compiled for AVX2 with FMA and F16C; CMakeLists.txt gives the flags.
#include "backend_impl.h"

namespace fr::cpu {

template const Backend* find_backend<Avx2>(Cell, Type);

}  // namespace fr::cpu
