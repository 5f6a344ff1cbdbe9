// Adds `Layer` to the Python module, which reads tensors and fills the argument structs; bindings.cpp calls it after it has bound these.
#pragma once

#include <pybind11/pybind11.h>

namespace fr {
void bind_layer(pybind11::module_& m);
}
