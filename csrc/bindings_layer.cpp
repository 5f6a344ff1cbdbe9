// What a call of one layer says to the core, filled in from its tensors: sizes, addresses and strides. One call of C++ in place of
// some fifty from Python, which were most of the time of a single step.
//
// Tensors are read through the C functions that their class offers for this (DLPack 1.3, DLPackExchangeAPI:
// https://dmlc.github.io/dlpack/latest/c_api.html), so that the module contains no code of torch; from a torch that lacks them,
// through its DLPack capsules. Nothing is kept of a tensor: the caller holds all of them until the core has run.
#include "bindings_layer.h"

#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "rnn.h"

namespace py = pybind11;

namespace fr {
namespace {

// The part of DLPack's binary interface that is read here.
struct DlTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t dimensions;
  uint8_t type_code, type_bits;
  uint16_t type_lanes;
  int64_t* shape;
  int64_t* strides;  // in elements
  uint64_t byte_offset;
};
struct DlExchange {
  uint32_t major, minor;
  void* previous;
  void *allocate, *export_managed, *import_managed;
  int (*read)(void* object, DlTensor* to);  // nonzero: a Python exception is set
};
constexpr int kCpu = 1;

// Set once by `use_tensors`; to_capsule where there is no exchange.
const DlExchange* exchange = nullptr;
PyObject *tensor_type = nullptr, *parameter_type = nullptr, *to_capsule = nullptr;

// What a tensor says of itself, and the capsule that shape and strides lie in, if one was needed.
struct Description {
  DlTensor of{};
  py::object capsule;

  // False: a Python exception is set.
  bool read(PyObject* object) {
    if (exchange) return !exchange->read(object, &of);
    capsule = py::reinterpret_steal<py::object>(PyObject_CallOneArg(to_capsule, object));
    // A DLManagedTensor, which begins with the DLTensor.
    const void* const managed = capsule ? PyCapsule_GetPointer(capsule.ptr(), "dltensor") : nullptr;
    if (managed) of = *static_cast<const DlTensor*>(managed);
    return managed;
  }
};

struct Tensor : private Description {
  using Description::of;  // null data: there is no tensor

  Tensor() = default;
  explicit Tensor(py::handle object) {
    if (object.is_none()) return;
    if (!read(object.ptr())) throw py::error_already_set();
    of.data = static_cast<char*>(of.data) + of.byte_offset;
  }
  explicit operator bool() const { return of.data != nullptr; }
  int64_t size(int from_last) const { return of.shape[of.dimensions - 1 - from_last]; }
  int64_t stride(int from_last) const { return of.strides[of.dimensions - 1 - from_last]; }
  int64_t bytes() const { return of.type_bits / 8; }
  void* at(int64_t elements) const { return of.data ? static_cast<char*>(of.data) + elements * bytes() : nullptr; }

  // Rows of a [T, B, X] or [N, X] tensor, so many elements into each.
  Rows rows(int64_t offset = 0) const {
    if (!of.data) return {};
    return {at(offset), of.dimensions == 3 ? stride(2) : 0, stride(1)};
  }
  // The same of one without gaps, whatever the strides of sizes of one are.
  Rows dense_rows(int64_t batch, int64_t offset = 0) const {
    if (!of.data) return {};
    return {at(offset), batch * size(0), size(0)};
  }
  // Part d of a [D, N, X] tensor without gaps.
  Rows part_rows(int64_t batch, int64_t d) const { return dense_rows(batch, of.data ? d * size(1) * size(0) : 0); }
  void* part(int64_t d) const { return of.data ? at(d * size(1) * size(0)) : nullptr; }

  bool is_dense() const {
    int64_t elements = 1;
    for (int i = 0; i < of.dimensions; ++i) {
      if (size(i) != 1 && stride(i) != elements) return false;
      elements *= size(i);
    }
    return true;
  }
  bool has_dense_last() const { return size(0) == 1 || stride(0) == 1; }
  bool is_matrix() const { return has_dense_last() && (size(1) == 1 || stride(1) >= size(0)); }
  int64_t row_stride() const { return size(1) == 1 ? size(0) : stride(1); }
};

struct Parameter {
  const char* name;
  const void* Weights::* data;
  int64_t Weights::* stride;  // null: no matrix
  void* GradientDirection::* gradient;
};
constexpr Parameter kParameters[] = {
    {"weight_ih", &Weights::ih, &Weights::ih_stride, &GradientDirection::d_weight_ih},
    {"weight_hh", &Weights::hh, &Weights::hh_stride, &GradientDirection::d_weight_hh},
    {"bias_ih", &Weights::bias_ih, nullptr, &GradientDirection::d_bias_ih},
    {"bias_hh", &Weights::bias_hh, nullptr, &GradientDirection::d_bias_hh},
    {"weight_hr", &Weights::hr, &Weights::hr_stride, &GradientDirection::d_weight_hr},
    {"weight_unit", &Weights::unit, nullptr, &GradientDirection::d_weight_unit},
};

// Whether an object is a tensor of torch's own classes whose memory can be read, and what it says of itself. The memory of a lazily
// negated view has the other sign, lazy zeros have none.
bool is_plain(PyObject* object, Description& found) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type != tensor_type && type != parameter_type) return false;
  if (!found.read(object)) {
    PyErr_Clear();
    return false;
  }
  int64_t elements = 1;
  for (int i = 0; i < found.of.dimensions; ++i) elements *= found.of.shape[i];
  if (elements && !found.of.data) return false;
  const auto negated = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(object, is_neg));
  if (!negated) throw py::error_already_set();
  return negated.ptr() == Py_False;
}

// The items of a list or tuple.
struct Items {
  PyObject** first;
  int64_t count;

  explicit Items(py::handle sequence) {
    if (!PyList_Check(sequence.ptr()) && !PyTuple_Check(sequence.ptr())) throw py::type_error("expected a list or tuple");
    first = PySequence_Fast_ITEMS(sequence.ptr()), count = PySequence_Fast_GET_SIZE(sequence.ptr());
  }
};

// What differs from call to call beside the operands: (T, B, proj_clip, batch_sizes, step_offset, lengths, resets, seed, state_mask), of
// which the last six are tensors without gaps or None (rnn.h; state_mask [D, B, R]).
struct Extent {
  int64_t steps, batch;
  double proj_clip;
  py::handle batch_sizes, step_offset, lengths, resets, seed, state_mask;

  explicit Extent(const py::tuple& of) {
    if (of.size() != 9) throw py::value_error("extent: expected 9 values");
    steps = of[0].cast<int64_t>(), batch = of[1].cast<int64_t>(), proj_clip = of[2].cast<double>();
    batch_sizes = of[3], step_offset = of[4], lengths = of[5], resets = of[6], seed = of[7], state_mask = of[8];
  }
  template <class Args>
  void fill(Args& args) const {
    Shape& s = args.shape;
    s.steps = steps, s.batch = batch;
    args.options.proj_clip = proj_clip;
    s.batch_sizes = static_cast<const int64_t*>(Tensor(batch_sizes).of.data);
    s.step_offset = static_cast<const int64_t*>(Tensor(step_offset).of.data);
    s.lengths = static_cast<const int64_t*>(Tensor(lengths).of.data);
    s.resets = static_cast<const uint8_t*>(Tensor(resets).of.data);
    args.options.noise.seed = static_cast<const uint64_t*>(Tensor(seed).of.data);
  }
};

// The options of a call and how its operands lie (fastrnn/_config.py). One serves all calls with the same options.
class Layer {
 public:
  Layer(int cell, std::vector<bool> reverse, int inputs, bool has_initial, const std::vector<std::string>& parameters, bool all_states,
        double cell_clip, bool reset_to_initial, double zoneout_h, double zoneout_c, double candidate, double gradient_clip)
      : cell_(facts_of(static_cast<Cell>(cell))), reverse_(std::move(reverse)), inputs_(inputs),
        states_(has_initial ? cell_.states() : 0), all_states_(all_states) {
    options_.cell_clip = cell_clip, options_.reset_to_initial = reset_to_initial, options_.gradient_clip = gradient_clip;
    options_.noise.zoneout_h = zoneout_h, options_.noise.zoneout_c = zoneout_c, options_.noise.candidate = candidate;
    for (const std::string& name : parameters)
      for (const Parameter& parameter : kParameters)
        if (name == parameter.name) parameters_.push_back(parameter);
  }

  // B, where the operands are ordinary tensors in the CPU's memory with the shapes and the type that `remember` was last told; -1
  // where they are not, or may not be. T may be another.
  int64_t known_batch(py::handle operands) const {
    const Items items(operands);
    const std::shared_ptr<const std::vector<Known>> all = known_;  // another thread may remember others meanwhile
    if (!all || items.count != static_cast<int64_t>(all->size())) return -1;
    int64_t steps = 0;
    for (int64_t i = 0; i < items.count; ++i) {
      Description found;
      if (!is_plain(items.first[i], found)) return -1;
      const DlTensor& t = found.of;
      const Known& known = (*all)[i];
      if (t.device_type != kCpu || t.type_code != known.type_code || t.type_bits != known.type_bits ||
          t.dimensions != static_cast<int32_t>(known.shape.size()))
        return -1;
      for (int place = i < inputs_ ? 1 : 0; place < t.dimensions; ++place)
        if (t.shape[place] != known.shape[place]) return -1;
      if (i < inputs_ && (i ? t.shape[0] != steps : (steps = t.shape[0]) < 0)) return -1;
    }
    return (*all)[0].shape[1];
  }
  // To be told operands [T, B, I] and so on that have been checked.
  void remember(py::handle operands) {
    std::vector<Known> known;
    const Items items(operands);
    for (int64_t i = 0; i < items.count; ++i) {
      Description found;
      if (!found.read(items.first[i])) {
        PyErr_Clear();
        return;
      }
      const DlTensor& t = found.of;
      known.push_back({t.type_code, t.type_bits, {t.shape, t.shape + t.dimensions}});
    }
    known_ = std::make_shared<const std::vector<Known>>(std::move(known));
  }

  // Whether the core can read the operands as they lie, the cell states in the state type.
  bool reads(py::handle operands) const { return reads_all(tensors(operands)); }
  // Whether gradients are ordinary tensors with memory, or None.
  static bool plain(py::handle gradients) {
    const Items items(gradients);
    for (int64_t i = 0; i < items.count; ++i) {
      Description found;
      if (items.first[i] != Py_None && !is_plain(items.first[i], found)) return false;
    }
    return true;
  }

  // For callers that fill the directions themselves.
  BackwardArgs backward(py::handle operands, const py::tuple& extent) const {
    BackwardArgs args{};
    begin(args, tensors(operands), Extent(extent));
    return args;
  }
  void weights(BackwardDirection& direction, py::handle operands, const py::tuple& extent, int d) const {
    direction.weights = weights_of(tensors(operands), Extent(extent), d);
  }

  // `input`: the core makes the input part of the gates itself.
  ForwardArgs forward(py::handle operands, const py::tuple& extent, py::handle output, py::handle h_n, py::handle c_n, py::handle gates,
                      py::handle cells, bool input) const {
    const std::vector<Tensor> all = tensors(operands);
    ForwardArgs args{};
    const Extent of_call(extent);
    begin(args, all, of_call);
    const int64_t batch = args.shape.batch;
    const Tensor out(output), last_h(h_n), last_c(c_n), kept(gates), states(cells);
    const int64_t width = args.shape.width();
    for (int d = 0; d < args.directions; ++d) {
      ForwardDirection& to = args.direction[d];
      to.reverse = reverse_[d];
      to.weights = weights_of(all, of_call, d);
      if (input) to.input = all[input_of(d)].rows();
      to.output = out.dense_rows(batch, d * width);
      if (states_ > 0) to.h0 = all[inputs_].part(d);
      if (states_ > 1) to.c0 = all[inputs_ + 1].part(d);
      to.h_n = last_h.part(d), to.c_n = last_c.part(d);
      to.gates = kept.part_rows(batch, d);
      to.cells = cell_rows(states, args.shape, d);
    }
    return args;
  }

  // False, and nothing done, where an operand cannot be read as it lies.
  bool cpu_forward(py::handle operands, const py::tuple& extent, py::handle output, py::handle h_n, py::handle c_n, py::handle gates,
                   py::handle cells, int threads) const {
    if (!reads(operands)) return false;
    ForwardArgs args = forward(operands, extent, output, h_n, c_n, gates, cells, true);
    args.threads = threads;
    const py::gil_scoped_release released;
    fr::cpu_forward(args);
    return true;
  }

  // `found`: where the gradients of the operands go, None for those that are not wanted. False, and nothing done, where a tensor cannot
  // be read or written as it lies.
  bool cpu_backward(py::handle operands, const py::tuple& extent, py::handle output, py::handle gates, py::handle cells,
                    py::handle entering, py::handle h0_entering, py::handle d_output, py::handle d_h_n, py::handle d_c_n,
                    py::handle d_cells, py::handle found, int64_t range_bytes, int threads) const {
    const std::vector<Tensor> all = tensors(operands), to_all = tensors(found);
    GradientArgs args{};
    const Extent of_call(extent);
    begin(args, all, of_call);
    args.range_bytes = range_bytes, args.threads = threads;
    const int64_t batch = args.shape.batch;
    const Tensor entering_rows(entering), entering_h0(h0_entering);
    const Tensor out(output), kept(gates), states(cells), d_out(d_output), d_last_h(d_h_n), d_last_c(d_c_n), d_states(d_cells);
    bool lies = reads_all(all) && (!d_out || d_out.has_dense_last());
    for (const Tensor* t : {&out, &kept, &states, &d_last_h, &d_last_c, &d_states}) lies = lies && t->is_dense();
    for (const Tensor& t : to_all) lies = lies && t.is_dense();
    if (!lies) return false;
    const int64_t width = args.shape.width();
    for (int d = 0; d < args.directions; ++d) {
      GradientDirection& to = args.direction[d];
      to.reverse = reverse_[d];
      to.weights = weights_of(all, of_call, d);
      if (entering_rows) to.entering = entering_rows.dense_rows(batch, d * width);
      to.h0_entering = entering_h0.part(d);
      to.input = all[input_of(d)].rows();
      to.output = out.dense_rows(batch, d * width);
      if (states_ > 0) to.h0 = all[inputs_].part(d), to.d_h0 = to_all[inputs_].part(d);
      if (states_ > 1) to.c0 = all[inputs_ + 1].part(d), to.d_c0 = to_all[inputs_ + 1].part(d);
      to.gates = kept.part_rows(batch, d);
      to.cells = cell_rows(states, args.shape, d);
      to.d_cells = cell_rows(d_states, args.shape, d);
      to.d_output = d_out.rows(d * width);
      to.d_h_n = d_last_h.part(d), to.d_c_n = d_last_c.part(d);
      to.d_input = to_all[input_of(d)].of.data;
      for (size_t i = 0; i < parameters_.size(); ++i) to.*parameters_[i].gradient = to_all[first_of(d) + i].of.data;
    }
    const py::gil_scoped_release released;
    fr::cpu_backward(args);
    return true;
  }

 private:
  struct Known {
    uint8_t type_code, type_bits;
    std::vector<int64_t> shape;
  };
  const CellFacts& cell_;
  std::vector<bool> reverse_;
  int inputs_, states_;
  bool all_states_;
  Options options_{};
  std::vector<Parameter> parameters_;
  std::shared_ptr<const std::vector<Known>> known_;

  static std::vector<Tensor> tensors(py::handle sequence) {
    const Items items(sequence);
    std::vector<Tensor> all;
    all.reserve(items.count);
    for (int64_t i = 0; i < items.count; ++i) all.emplace_back(py::handle(items.first[i]));
    return all;
  }
  size_t first_weight() const { return inputs_ + states_; }
  size_t first_of(int d) const { return first_weight() + d * parameters_.size(); }
  int input_of(int d) const { return d * inputs_ / static_cast<int>(reverse_.size()); }

  bool reads_all(const std::vector<Tensor>& all) const {
    for (size_t i = 0; i < all.size(); ++i) {
      const Tensor& t = all[i];
      if (i < static_cast<size_t>(inputs_) ? !t.has_dense_last() : i < first_weight() ? !t.is_dense() : !reads_parameter(t, i)) return false;
    }
    return states_ < 2 || all[inputs_ + 1].bytes() == (all[0].bytes() == 8 ? 8 : 4);
  }
  bool reads_parameter(const Tensor& t, size_t place) const {
    return parameters_[(place - first_weight()) % parameters_.size()].stride ? t.is_matrix() : t.is_dense();
  }
  Weights weights_of(const std::vector<Tensor>& all, const Extent& extent, int d) const {
    Weights weights{};
    weights.state_mask = Tensor(extent.state_mask).part(d);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Tensor& t = all[first_of(d) + i];
      weights.*parameters_[i].data = t.of.data;
      if (parameters_[i].stride) weights.*parameters_[i].stride = t.row_stride();
    }
    return weights;
  }
  Rows cell_rows(const Tensor& t, const Shape& s, int d) const {
    return all_states_ ? t.rows(d * cell_.cells * s.hidden) : t.part_rows(s.batch, d);
  }

  template <class Args>
  void begin(Args& args, const std::vector<Tensor>& all, const Extent& extent) const {
    if (all.size() != first_of(static_cast<int>(reverse_.size()))) throw py::value_error("operands: not as many as the layer has");
    Shape& s = args.shape;
    const Tensor &x = all[0], &ih = all[first_weight()], &hh = all[first_weight() + (cell_.multiplies() ? 1 : 0)];
    const bool is_bfloat = x.of.type_code == 4;
    s.cell = cell_.code;
    s.type = is_bfloat ? Type::kBFloat16 : x.of.type_bits == 64 ? Type::kFloat64 : x.of.type_bits == 32 ? Type::kFloat32 : Type::kFloat16;
    s.input = ih.size(0), s.hidden = hh.size(1) / cell_.gates;
    if (cell_.projects()) s.projection = hh.size(0);
    args.options = options_;
    extent.fill(args);
    if constexpr (!std::is_same_v<Args, BackwardArgs>) {
      args.directions = static_cast<int>(reverse_.size());
      args.direction.resize(reverse_.size());
    }
  }
};

}  // namespace

void bind_layer(py::module_& m) {
  // capsule_of: makes a DLPack capsule of a tensor, for a torch without exchange functions, or with those of another version.
  m.def("use_tensors", [](const py::object& tensor, const py::object& parameter, const py::object& capsule_of) {
    const py::object capsule = py::getattr(tensor, "__dlpack_c_exchange_api__", py::none());
    exchange = nullptr;
    if (!capsule.is_none()) {
      const auto* const found = static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      if (!found) throw py::error_already_set();
      if (found->major == 1) exchange = found;
    }
    tensor_type = tensor.inc_ref().ptr(), parameter_type = parameter.inc_ref().ptr(), to_capsule = capsule_of.inc_ref().ptr();
  });
  py::class_<Layer>(m, "Layer")
      .def(py::init<int, std::vector<bool>, int, bool, std::vector<std::string>, bool, double, bool, double, double, double, double>())
      .def("known_batch", &Layer::known_batch)
      .def("remember", &Layer::remember)
      .def("reads", &Layer::reads)
      .def_static("plain", &Layer::plain)
      .def("backward", &Layer::backward)
      .def("weights", &Layer::weights)
      .def("forward", &Layer::forward)
      .def("cpu_forward", &Layer::cpu_forward)
      .def("cpu_backward", &Layer::cpu_backward);
}

}  // namespace fr
