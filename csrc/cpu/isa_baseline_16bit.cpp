// bfloat16 and float16 on the CPU compiled for any x86-64, arm64 or other machine; CMakeLists.txt gives the flags.
#include "kernels_impl.h"

namespace fr::cpu {

template const CellKernels* find_cell<Baseline, BFloat16>(Cell);
template const CellKernels* find_cell<Baseline, Float16>(Cell);

}  // namespace fr::cpu
