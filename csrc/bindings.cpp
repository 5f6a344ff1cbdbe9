// The pybind11 module fastrnn._C: the calls, and the fields of the argument structs that Python sets itself (addresses
// are integers, 0: null). bindings_layer.cpp fills in all others from a call's tensors.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings_layer.h"
#include "build_info.h"
#include "cross_entropy.h"
#include "cuda/bindings_cuda.h"
#include "layer_norm.h"
#include "rnn.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

// Exposes a pointer field as an integer.
template <class Class, class Owner, class Pointer>
void address(py::class_<Class>& type, const char* name, Pointer Owner::*field) {
  type.def_property(
      name, [field](const Class& self) { return reinterpret_cast<Address>(self.*field); },
      [field](Class& self, Address value) { self.*field = reinterpret_cast<Pointer>(value); });
}

// Exposes a Rows field as a tuple (data, step_stride, row_stride).
template <class Class>
void rows(py::class_<Class>& type, const char* name, fr::Rows Class::*field) {
  type.def_property(
      name,
      [field](const Class& self) {
        const fr::Rows& value = self.*field;
        return py::make_tuple(reinterpret_cast<Address>(value.data), value.step_stride, value.row_stride);
      },
      [field](Class& self, const py::tuple& value) {
        if (value.size() != 3) throw std::invalid_argument("rows must be (data, step_stride, row_stride)");
        self.*field = {
            reinterpret_cast<void*>(value[0].cast<Address>()), value[1].cast<int64_t>(), value[2].cast<int64_t>()};
      });
}

template <class Args, class Direction>
py::class_<Args> arguments(py::module_& m, const char* name) {
  py::class_<Args> type(m, name);
  type.def(py::init([] { return Args{}; }));
  // The emulated kernels' library takes the address of the struct itself.
  type.def_property_readonly("address", [](const Args& self) { return reinterpret_cast<Address>(&self); });
  type.attr("bytes") = sizeof(Args);
  type.def_property(
      "direction",
      [](const Args& self) {
        return std::vector<Direction>(std::begin(self.direction), std::begin(self.direction) + self.directions);
      },
      [](Args& self, std::vector<Direction> list) {
        constexpr bool kAnyNumber = std::is_same_v<decltype(Args::direction), std::vector<Direction>>;
        if (list.empty() || (!kAnyNumber && list.size() > std::size(self.direction)))
          throw std::invalid_argument("direction: expected " + std::string(kAnyNumber ? "at least 1" : "1 or 2") +
                                      ", got " + std::to_string(list.size()));
        self.directions = static_cast<int>(list.size());
        if constexpr (kAnyNumber) self.direction = std::move(list);
        else std::copy(list.begin(), list.end(), self.direction);
      });
  return type;
}

// The argument structs of forward and backward.
void bind_arguments(py::module_& m) {
  py::class_<fr::ForwardDirection> forward(m, "ForwardDirection");
  forward.def(py::init([] { return fr::ForwardDirection{}; }));
  forward.def_readwrite("reverse", &fr::ForwardDirection::reverse);
  rows(forward, "input_gates", &fr::ForwardDirection::input_gates),
      rows(forward, "entering", &fr::ForwardDirection::entering);
  address(forward, "h0_entering", &fr::ForwardDirection::h0_entering);

  py::class_<fr::BackwardDirection> backward(m, "BackwardDirection");
  backward.def(py::init([] {
    fr::BackwardDirection direction{};
    direction.wants_initial = true;
    return direction;
  }));
  backward.def_readwrite("reverse", &fr::BackwardDirection::reverse);
  backward.def_readwrite("wants_initial", &fr::BackwardDirection::wants_initial);
  for (auto [name, field] : std::initializer_list<std::pair<const char*, fr::Rows fr::BackwardDirection::*>>{
           {"input_gates", &fr::BackwardDirection::input_gates}, {"output", &fr::BackwardDirection::output},
           {"gates", &fr::BackwardDirection::gates}, {"cells", &fr::BackwardDirection::cells},
           {"d_output", &fr::BackwardDirection::d_output}, {"d_gates", &fr::BackwardDirection::d_gates},
           {"d_recurrent", &fr::BackwardDirection::d_recurrent}, {"h_prev", &fr::BackwardDirection::h_prev},
           {"inner", &fr::BackwardDirection::inner}, {"d_projected", &fr::BackwardDirection::d_projected},
           {"d_cells", &fr::BackwardDirection::d_cells}})
    rows(backward, name, field);
  address(backward, "h0", &fr::BackwardDirection::h0), address(backward, "c0", &fr::BackwardDirection::c0);
  address(backward, "d_h", &fr::BackwardDirection::d_h), address(backward, "d_c", &fr::BackwardDirection::d_c);
  address(backward, "d_h0_reset", &fr::BackwardDirection::d_h0_reset);
  address(backward, "d_c0_reset", &fr::BackwardDirection::d_c0_reset),
      address(backward, "d_unit", &fr::BackwardDirection::d_unit);

  auto forward_args = arguments<fr::ForwardArgs, fr::ForwardDirection>(m, "ForwardArgs");
  address(forward_args, "stream", &fr::ForwardArgs::stream);
  forward_args.def_readwrite("first_direction", &fr::ForwardArgs::first_direction);
  auto backward_args = arguments<fr::BackwardArgs, fr::BackwardDirection>(m, "BackwardArgs");
  backward_args.def_readwrite("first_step", &fr::BackwardArgs::first_step);
  backward_args.def_readwrite("last_step", &fr::BackwardArgs::last_step);
  backward_args.def_readwrite("first_direction", &fr::BackwardArgs::first_direction);
  address(backward_args, "stream", &fr::BackwardArgs::stream);
}

void bind_cross_entropy(py::module_& m) {
  py::class_<fr::CrossEntropyArgs> cross_entropy(m, "CrossEntropyArgs");
  cross_entropy.def(py::init([] { return fr::CrossEntropyArgs{}; }));
  cross_entropy.def_property(
      "type", [](const fr::CrossEntropyArgs& self) { return static_cast<int>(self.type); },
      [](fr::CrossEntropyArgs& self, int v) { self.type = static_cast<fr::Type>(v); });
  for (auto [name, field] : std::initializer_list<std::pair<const char*, int64_t fr::CrossEntropyArgs::*>>{
           {"rows", &fr::CrossEntropyArgs::rows}, {"words", &fr::CrossEntropyArgs::words},
           {"depth", &fr::CrossEntropyArgs::depth}, {"input_stride", &fr::CrossEntropyArgs::input_stride},
           {"weight_stride", &fr::CrossEntropyArgs::weight_stride},
           {"ignore_index", &fr::CrossEntropyArgs::ignore_index}, {"slab_bytes", &fr::CrossEntropyArgs::slab_bytes}})
    cross_entropy.def_readwrite(name, field);
  for (auto [name, field] : std::initializer_list<std::pair<const char*, const void * fr::CrossEntropyArgs::*>>{
           {"input", &fr::CrossEntropyArgs::input}, {"weight", &fr::CrossEntropyArgs::weight},
           {"bias", &fr::CrossEntropyArgs::bias}, {"label_logit", &fr::CrossEntropyArgs::label_logit},
           {"row_gradient", &fr::CrossEntropyArgs::row_gradient}})
    address(cross_entropy, name, field);
  for (auto [name, field] : std::initializer_list<std::pair<const char*, void * fr::CrossEntropyArgs::*>>{
           {"loss", &fr::CrossEntropyArgs::loss}, {"total", &fr::CrossEntropyArgs::total},
           {"d_input", &fr::CrossEntropyArgs::d_input}, {"d_weight", &fr::CrossEntropyArgs::d_weight},
           {"d_bias", &fr::CrossEntropyArgs::d_bias}, {"d_label_logit", &fr::CrossEntropyArgs::d_label_logit}})
    address(cross_entropy, name, field);
  address(cross_entropy, "target", &fr::CrossEntropyArgs::target);
  cross_entropy.def_readwrite("mean", &fr::CrossEntropyArgs::mean)
      .def_readwrite("threads", &fr::CrossEntropyArgs::threads);
  m.def("cpu_cross_entropy", &fr::cpu_cross_entropy, py::call_guard<py::gil_scoped_release>());
}

void bind_layer_norm(py::module_& m) {
  py::class_<fr::LayerNormArgs> layer_norm(m, "LayerNormArgs");
  layer_norm.def(py::init([](int type, bool gru, int64_t rows, int64_t hidden, double cell_clip, int threads) {
    fr::LayerNormArgs args{};
    args.type = static_cast<fr::Type>(type), args.gru = gru, args.rows = rows, args.hidden = hidden;
    args.cell_clip = cell_clip, args.threads = threads;
    return args;
  }));
  // As for the other structs (`arguments`).
  layer_norm.def_property_readonly(
      "address", [](const fr::LayerNormArgs& self) { return reinterpret_cast<Address>(&self); });
  layer_norm.attr("bytes") = sizeof(fr::LayerNormArgs);
  address(layer_norm, "stream", &fr::LayerNormArgs::stream);
  for (auto [name, field] : std::initializer_list<std::pair<const char*, const void * fr::LayerNormArgs::*>>{
           {"input", &fr::LayerNormArgs::input}, {"units", &fr::LayerNormArgs::units},
           {"shift", &fr::LayerNormArgs::shift}, {"state", &fr::LayerNormArgs::state},
           {"candidate", &fr::LayerNormArgs::candidate}, {"d_h", &fr::LayerNormArgs::d_h},
           {"d_c", &fr::LayerNormArgs::d_c}})
    address(layer_norm, name, field);
  for (auto [name, field] : std::initializer_list<std::pair<const char*, void * fr::LayerNormArgs::*>>{
           {"product", &fr::LayerNormArgs::product}, {"gates", &fr::LayerNormArgs::gates},
           {"moments", &fr::LayerNormArgs::moments}, {"c", &fr::LayerNormArgs::c}, {"h", &fr::LayerNormArgs::h},
           {"d_input", &fr::LayerNormArgs::d_input}, {"d_product", &fr::LayerNormArgs::d_product},
           {"d_state", &fr::LayerNormArgs::d_state}, {"d_units", &fr::LayerNormArgs::d_units},
           {"d_shift", &fr::LayerNormArgs::d_shift}, {"scratch", &fr::LayerNormArgs::scratch}})
    address(layer_norm, name, field);
  m.def("cpu_layer_norm", &fr::cpu_layer_norm, py::call_guard<py::gil_scoped_release>());
  m.def("cpu_layer_norm_gradients", &fr::cpu_layer_norm_gradients, py::call_guard<py::gil_scoped_release>());
}

void bind_noise(py::module_& m) {
  m.def(
      "cpu_state_mask", [](int state, double p, Address seed, int streams, int64_t batch, int64_t width, Address mask) {
        fr::cpu_state_mask(static_cast<fr::Type>(state), p, reinterpret_cast<const uint64_t*>(seed), streams, batch,
            width, reinterpret_cast<void*>(mask));
      });
}

void bind_cells(py::module_& m) {
  m.def(
      "cells",
      [] {
        py::list cells;
        for (const fr::CellFacts& cell : fr::kCells) {
          using namespace py::literals;
          cells.append(py::dict("name"_a = cell.name, "code"_a = static_cast<int>(cell.code), "gates"_a = cell.gates,
              "cells"_a = cell.cells, "saved"_a = cell.saved, "unit_weights"_a = cell.unit_weights,
              "split_gate"_a = cell.split_gate < 0 ? py::object(py::none()) : py::int_(cell.split_gate),
              "phases"_a = cell.phases, "first_gates"_a = cell.phase[0].gates, "carried"_a = cell.carried(),
              "multiplies"_a = cell.multiplies(), "projects"_a = cell.projects(), "reads_output"_a = cell.reads_output,
              "zones_cells"_a = cell.zones_cells, "drops_candidate"_a = cell.drops_candidate));
        }
        return cells;
      },
      "What csrc/cells/cells.h says of each cell.");
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "fastrnn's compiled core; see csrc/rnn.h";
  fr::cpu_chosen_instruction_set();  // throws if this processor can run none
  bind_arguments(m);
  bind_cross_entropy(m);
  bind_layer_norm(m);
  bind_noise(m);
  bind_cells(m);
  fr::bind_cuda(m);
  fr::bind_layer(m);
  m.def("cpu_choose_instruction_set", &fr::cpu_choose_instruction_set);
  m.def("build_info", [] {
    py::dict info;
    info["compiler"] = fr::kCompiler;
    info["cuda"] = fr::kCuda;
    info["cuda_architectures"] = fr::kCudaArchitectures;
    info["cpu_instruction_sets"] = fr::cpu_instruction_sets();
    info["cpu_chosen"] = fr::cpu_chosen_instruction_set();
    return info;
  });
}
