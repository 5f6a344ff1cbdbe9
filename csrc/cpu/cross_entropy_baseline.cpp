// The cross entropy compiled for the compiler's own target; CMakeLists.txt gives the flags.
#include "cross_entropy_impl.h"

namespace fr::cpu {

template const CrossEntropyKernels* find_cross_entropy<Baseline>(Type);

}  // namespace fr::cpu
