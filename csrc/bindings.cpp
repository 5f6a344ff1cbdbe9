// The pybind11 module fastrnn._C: plain argument structs whose addresses are integers (0: null), checks of the contract in
// rnn.h that can be made without reading memory, and the calls. Used by fastrnn/functional.py alone.
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
#include "rnn.h"

namespace py = pybind11;

namespace {

using Address = std::uintptr_t;

// Exposes a pointer field as an integer.
template <class Class, class Owner, class Pointer>
void address(py::class_<Class>& type, const char* name, Pointer Owner::* field) {
  type.def_property(
      name, [field](const Class& self) { return reinterpret_cast<Address>(self.*field); },
      [field](Class& self, Address value) { self.*field = reinterpret_cast<Pointer>(value); });
}

// Exposes a Rows field as a tuple (data, step_stride, row_stride).
template <class Class>
void rows(py::class_<Class>& type, const char* name, fr::Rows Class::* field) {
  type.def_property(
      name,
      [field](const Class& self) {
        const fr::Rows& value = self.*field;
        return py::make_tuple(reinterpret_cast<Address>(value.data), value.step_stride, value.row_stride);
      },
      [field](Class& self, const py::tuple& value) {
        if (value.size() != 3) throw std::invalid_argument("rows must be (data, step_stride, row_stride)");
        self.*field = {reinterpret_cast<void*>(value[0].cast<Address>()), value[1].cast<int64_t>(), value[2].cast<int64_t>()};
      });
}

template <class Class>
void weights(py::class_<Class>& type) {
  const auto member = [&type](const char* name, auto fr::Weights::* field) {
    using Field = std::remove_reference_t<decltype(std::declval<fr::Weights>().*field)>;
    type.def_property(
        name,
        [field](const Class& self) {
          if constexpr (std::is_pointer_v<Field>) return reinterpret_cast<Address>(self.weights.*field);
          else return self.weights.*field;
        },
        [field](Class& self, std::conditional_t<std::is_pointer_v<Field>, Address, int64_t> value) {
          if constexpr (std::is_pointer_v<Field>) self.weights.*field = reinterpret_cast<Field>(value);
          else self.weights.*field = value;
        });
  };
  member("weight_ih", &fr::Weights::ih), member("weight_hh", &fr::Weights::hh), member("weight_hr", &fr::Weights::hr);
  member("bias_ih", &fr::Weights::bias_ih), member("bias_hh", &fr::Weights::bias_hh);
  member("ih_stride", &fr::Weights::ih_stride), member("hh_stride", &fr::Weights::hh_stride);
  member("hr_stride", &fr::Weights::hr_stride), member("weight_unit", &fr::Weights::unit);
}

template <class Args, class Direction>
py::class_<Args> arguments(py::module_& m, const char* name) {
  py::class_<Args> type(m, name);
  type.def(py::init([] { return Args{}; }));
  // For the emulated kernels, whose library takes the struct itself.
  type.def_property_readonly("address", [](const Args& self) { return reinterpret_cast<Address>(&self); });
  type.attr("bytes") = sizeof(Args);
  const auto value = [&type](const char* field_name, auto owner, auto field) {
    type.def_property(
        field_name, [owner, field](const Args& self) { return self.*owner.*field; },
        [owner, field](Args& self, std::remove_reference_t<decltype(std::declval<Args>().*owner.*field)> v) {
          self.*owner.*field = v;
        });
  };
  const auto pointer = [&type](const char* field_name, auto field) {
    using Pointer = std::remove_reference_t<decltype(std::declval<fr::Shape>().*field)>;
    type.def_property(
        field_name, [field](const Args& self) { return reinterpret_cast<Address>(self.shape.*field); },
        [field](Args& self, Address v) { self.shape.*field = reinterpret_cast<Pointer>(v); });
  };
  type.def_property(
      "cell", [](const Args& self) { return static_cast<int>(self.shape.cell); },
      [](Args& self, int v) { self.shape.cell = static_cast<fr::Cell>(v); });
  type.def_property(
      "type", [](const Args& self) { return static_cast<int>(self.shape.type); },
      [](Args& self, int v) { self.shape.type = static_cast<fr::Type>(v); });
  value("steps", &Args::shape, &fr::Shape::steps), value("batch", &Args::shape, &fr::Shape::batch);
  value("input", &Args::shape, &fr::Shape::input), value("hidden", &Args::shape, &fr::Shape::hidden);
  value("projection", &Args::shape, &fr::Shape::projection);
  pointer("batch_sizes", &fr::Shape::batch_sizes), pointer("step_offset", &fr::Shape::step_offset);
  pointer("lengths", &fr::Shape::lengths), pointer("resets", &fr::Shape::resets);
  value("cell_clip", &Args::options, &fr::Options::cell_clip);
  value("proj_clip", &Args::options, &fr::Options::proj_clip);
  value("reset_to_initial", &Args::options, &fr::Options::reset_to_initial);
  for (auto [noise_name, field] : std::initializer_list<std::pair<const char*, double fr::NoiseOptions::*>>{
           {"zoneout_h", &fr::NoiseOptions::zoneout_h}, {"zoneout_c", &fr::NoiseOptions::zoneout_c},
           {"candidate_dropout", &fr::NoiseOptions::candidate}})
    type.def_property(
        noise_name, [field](const Args& self) { return self.options.noise.*field; },
        [field](Args& self, double v) { self.options.noise.*field = v; });
  type.def_property(
      "seed", [](const Args& self) { return reinterpret_cast<Address>(self.options.noise.seed); },
      [](Args& self, Address v) { self.options.noise.seed = reinterpret_cast<const uint64_t*>(v); });
  type.def_property(
      "direction",
      [](const Args& self) {
        return std::vector<Direction>(std::begin(self.direction), std::begin(self.direction) + self.directions);
      },
      [](Args& self, std::vector<Direction> list) {
        constexpr bool kAnyNumber = std::is_same_v<decltype(Args::direction), std::vector<Direction>>;
        if (list.empty() || (!kAnyNumber && list.size() > std::size(self.direction)))
          throw std::invalid_argument("direction: expected " + std::string(kAnyNumber ? "at least 1" : "1 or 2") + ", got " +
                                      std::to_string(list.size()));
        self.directions = static_cast<int>(list.size());
        if constexpr (kAnyNumber) self.direction = std::move(list);
        else std::copy(list.begin(), list.end(), self.direction);
      });
  return type;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "fastrnn's compiled core; see csrc/rnn.h";

  py::class_<fr::ForwardDirection> forward(m, "ForwardDirection");
  forward.def(py::init([] { return fr::ForwardDirection{}; }));
  forward.def_readwrite("reverse", &fr::ForwardDirection::reverse);
  weights(forward);
  for (auto [name, field] : std::initializer_list<std::pair<const char*, fr::Rows fr::ForwardDirection::*>>{
           {"input", &fr::ForwardDirection::input}, {"input_gates", &fr::ForwardDirection::input_gates},
           {"output", &fr::ForwardDirection::output}, {"gates", &fr::ForwardDirection::gates},
           {"cells", &fr::ForwardDirection::cells}})
    rows(forward, name, field);
  address(forward, "h0", &fr::ForwardDirection::h0), address(forward, "c0", &fr::ForwardDirection::c0);
  address(forward, "h_n", &fr::ForwardDirection::h_n), address(forward, "c_n", &fr::ForwardDirection::c_n);

  py::class_<fr::BackwardDirection> backward(m, "BackwardDirection");
  backward.def(py::init([] {
    fr::BackwardDirection direction{};
    direction.wants_initial = true;
    return direction;
  }));
  backward.def_readwrite("reverse", &fr::BackwardDirection::reverse);
  backward.def_readwrite("wants_initial", &fr::BackwardDirection::wants_initial);
  weights(backward);
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
  address(backward, "d_c0_reset", &fr::BackwardDirection::d_c0_reset), address(backward, "d_unit", &fr::BackwardDirection::d_unit);

  py::class_<fr::GradientDirection> gradient(m, "GradientDirection");
  gradient.def(py::init([] { return fr::GradientDirection{}; }));
  gradient.def_readwrite("reverse", &fr::GradientDirection::reverse);
  weights(gradient);
  for (auto [name, field] : std::initializer_list<std::pair<const char*, fr::Rows fr::GradientDirection::*>>{
           {"input", &fr::GradientDirection::input}, {"output", &fr::GradientDirection::output},
           {"gates", &fr::GradientDirection::gates}, {"cells", &fr::GradientDirection::cells},
           {"d_output", &fr::GradientDirection::d_output}, {"d_cells", &fr::GradientDirection::d_cells}})
    rows(gradient, name, field);
  for (auto [name, field] : std::initializer_list<std::pair<const char*, const void* fr::GradientDirection::*>>{
           {"h0", &fr::GradientDirection::h0}, {"c0", &fr::GradientDirection::c0},
           {"d_h_n", &fr::GradientDirection::d_h_n}, {"d_c_n", &fr::GradientDirection::d_c_n}})
    address(gradient, name, field);
  for (auto [name, field] : std::initializer_list<std::pair<const char*, void* fr::GradientDirection::*>>{
           {"d_input", &fr::GradientDirection::d_input}, {"d_h0", &fr::GradientDirection::d_h0},
           {"d_c0", &fr::GradientDirection::d_c0}, {"d_weight_ih", &fr::GradientDirection::d_weight_ih},
           {"d_weight_hh", &fr::GradientDirection::d_weight_hh}, {"d_weight_hr", &fr::GradientDirection::d_weight_hr},
           {"d_bias_ih", &fr::GradientDirection::d_bias_ih}, {"d_bias_hh", &fr::GradientDirection::d_bias_hh},
           {"d_weight_unit", &fr::GradientDirection::d_weight_unit}})
    address(gradient, name, field);

  auto forward_args = arguments<fr::ForwardArgs, fr::ForwardDirection>(m, "ForwardArgs");
  forward_args.def_readwrite("threads", &fr::ForwardArgs::threads);
  address(forward_args, "stream", &fr::ForwardArgs::stream);
  auto backward_args = arguments<fr::BackwardArgs, fr::BackwardDirection>(m, "BackwardArgs");
  backward_args.def_readwrite("first_step", &fr::BackwardArgs::first_step);
  backward_args.def_readwrite("last_step", &fr::BackwardArgs::last_step);
  address(backward_args, "stream", &fr::BackwardArgs::stream);
  auto gradient_args = arguments<fr::GradientArgs, fr::GradientDirection>(m, "GradientArgs");
  gradient_args.def_readwrite("range_bytes", &fr::GradientArgs::range_bytes);
  gradient_args.def_readwrite("threads", &fr::GradientArgs::threads);

  py::class_<fr::CrossEntropyArgs> cross_entropy(m, "CrossEntropyArgs");
  cross_entropy.def(py::init([] { return fr::CrossEntropyArgs{}; }));
  cross_entropy.def_property(
      "type", [](const fr::CrossEntropyArgs& self) { return static_cast<int>(self.type); },
      [](fr::CrossEntropyArgs& self, int v) { self.type = static_cast<fr::Type>(v); });
  for (auto [name, field] : std::initializer_list<std::pair<const char*, int64_t fr::CrossEntropyArgs::*>>{
           {"rows", &fr::CrossEntropyArgs::rows}, {"words", &fr::CrossEntropyArgs::words}, {"depth", &fr::CrossEntropyArgs::depth},
           {"input_stride", &fr::CrossEntropyArgs::input_stride}, {"weight_stride", &fr::CrossEntropyArgs::weight_stride},
           {"ignore_index", &fr::CrossEntropyArgs::ignore_index}, {"piece_bytes", &fr::CrossEntropyArgs::piece_bytes}})
    cross_entropy.def_readwrite(name, field);
  for (auto [name, field] : std::initializer_list<std::pair<const char*, const void* fr::CrossEntropyArgs::*>>{
           {"input", &fr::CrossEntropyArgs::input}, {"weight", &fr::CrossEntropyArgs::weight}, {"bias", &fr::CrossEntropyArgs::bias},
           {"label_logit", &fr::CrossEntropyArgs::label_logit}, {"row_gradient", &fr::CrossEntropyArgs::row_gradient}})
    address(cross_entropy, name, field);
  for (auto [name, field] : std::initializer_list<std::pair<const char*, void* fr::CrossEntropyArgs::*>>{
           {"loss", &fr::CrossEntropyArgs::loss}, {"total", &fr::CrossEntropyArgs::total},
           {"d_input", &fr::CrossEntropyArgs::d_input}, {"d_weight", &fr::CrossEntropyArgs::d_weight},
           {"d_bias", &fr::CrossEntropyArgs::d_bias}, {"d_label_logit", &fr::CrossEntropyArgs::d_label_logit}})
    address(cross_entropy, name, field);
  address(cross_entropy, "target", &fr::CrossEntropyArgs::target);
  cross_entropy.def_readwrite("mean", &fr::CrossEntropyArgs::mean).def_readwrite("threads", &fr::CrossEntropyArgs::threads);
  m.def("cpu_cross_entropy", &fr::cpu_cross_entropy, py::call_guard<py::gil_scoped_release>());

  m.def("cells", [] {
    py::list cells;
    for (const fr::CellFacts& cell : fr::kCells) {
      using namespace py::literals;
      cells.append(py::dict("name"_a = cell.name, "code"_a = static_cast<int>(cell.code), "gates"_a = cell.gates, "cells"_a = cell.cells,
                            "saved"_a = cell.saved, "unit_weights"_a = cell.unit_weights, "split_gate"_a = cell.split_gate < 0 ? py::object(py::none()) : py::int_(cell.split_gate),
                            "phases"_a = cell.phases, "first_gates"_a = cell.phase[0].gates, "carried"_a = cell.carried(),
                            "multiplies"_a = cell.multiplies(), "projects"_a = cell.projects(), "reads_output"_a = cell.reads_output,
                            "zones_cells"_a = cell.zones_cells, "drops_candidate"_a = cell.drops_candidate));
    }
    return cells;
  }, "What csrc/cells/cells.h says of each cell.");
  m.def("cpu_forward", &fr::cpu_forward, py::call_guard<py::gil_scoped_release>());
  m.def("cpu_backward", &fr::cpu_backward, py::call_guard<py::gil_scoped_release>());
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
