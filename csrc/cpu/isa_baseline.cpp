// The CPU backend compiled for any x86-64, arm64 or other machine; CMakeLists.txt gives the flags.
#include "backend_impl.h"

namespace fr::cpu {

template const Backend* find_backend<Baseline>(Cell, Type);

}  // namespace fr::cpu
