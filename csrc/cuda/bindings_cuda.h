// Adds the CUDA part to the Python module. bindings.cpp calls it once ForwardArgs and BackwardArgs are bound.
#pragma once

#include <pybind11/pybind11.h>

namespace fr {
void bind_cuda(pybind11::module_& m);
}
