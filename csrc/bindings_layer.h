// Adds `Layer` to the Python module: it reads tensors and fills the argument structs. bindings.cpp calls it once these
// are bound.
#pragma once

#include <pybind11/pybind11.h>

namespace fr {
void bind_layer(pybind11::module_& m);
}
