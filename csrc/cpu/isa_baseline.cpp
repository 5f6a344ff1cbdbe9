// float32 and float64 on the CPU compiled for any x86-64, arm64 or other machine; CMakeLists.txt gives the flags.
#include "kernels_impl.h"

namespace fr::cpu {

template const CellKernels* find_cell<Baseline, float>(Cell);
template const CellKernels* find_cell<Baseline, double>(Cell);

}  // namespace fr::cpu
