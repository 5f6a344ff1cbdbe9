// The CPU backend compiled for AVX-512 (F, BW, VL, DQ); CMakeLists.txt gives the flags.
#include "backend_impl.h"

namespace fr::cpu {

template const Backend* find_backend<Avx512>(Cell, Type);

}  // namespace fr::cpu
