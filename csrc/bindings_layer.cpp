// Fills the argument structs of one layer's call from its tensors: sizes, addresses and strides. One call from Python
// in place of some fifty, which took most of the time of a single step.
//
// Tensors are read through the C functions of their class (DLPack 1.3, DLPackExchangeAPI:
// https://dmlc.github.io/dlpack/latest/c_api.html), so that the module contains no code of torch. A torch without these
// functions gives DLPack capsules instead. No tensor is kept: the caller holds all of them until the core has run.
#include "bindings_layer.h"

#include <pybind11/stl.h>

#include <algorithm>
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

// Set once by `use_tensors`. `exchange` is null for a torch without these functions; to_capsule is then called instead.
const DlExchange* exchange = nullptr;
PyObject *tensor_type = nullptr, *parameter_type = nullptr, *to_capsule = nullptr;

// A tensor's description. If it came in a capsule, the capsule owns shape and strides.
struct Description {
  DlTensor of{};
  py::object capsule;

  // Returns false if a Python exception is set.
  bool read(PyObject* object) {
    if (exchange) return !exchange->read(object, &of);
    capsule = py::reinterpret_steal<py::object>(PyObject_CallOneArg(to_capsule, object));
    // a DLManagedTensor, which begins with the DLTensor
    const void* const managed = capsule ? PyCapsule_GetPointer(capsule.ptr(), "dltensor") : nullptr;
    if (managed) of = *static_cast<const DlTensor*>(managed);
    return managed;
  }
};

struct Tensor : private Description {
  using Description::of;  // null data: no tensor

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

  // Rows of a [T, B, X] or [N, X] tensor, beginning `offset` elements into each.
  Rows rows(int64_t offset = 0) const {
    if (!of.data) return {};
    return {at(offset), of.dimensions == 3 ? stride(2) : 0, stride(1)};
  }
  // The same for a contiguous tensor, whose strides of dimensions of size 1 may be anything.
  Rows dense_rows(int64_t batch, int64_t offset = 0) const {
    if (!of.data) return {};
    return {at(offset), batch * size(0), size(0)};
  }
  // Part d of a contiguous [D, N, X] tensor.
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
  const void* Weights::*data;
  int64_t Weights::*stride;  // null: not a matrix
  void* GradientDirection::*gradient;
};
constexpr Parameter kParameters[] = {
    {"weight_ih", &Weights::ih, &Weights::ih_stride, &GradientDirection::d_weight_ih},
    {"weight_hh", &Weights::hh, &Weights::hh_stride, &GradientDirection::d_weight_hh},
    {"bias_ih", &Weights::bias_ih, nullptr, &GradientDirection::d_bias_ih},
    {"bias_hh", &Weights::bias_hh, nullptr, &GradientDirection::d_bias_hh},
    {"weight_hr", &Weights::hr, &Weights::hr_stride, &GradientDirection::d_weight_hr},
    {"weight_unit", &Weights::unit, nullptr, &GradientDirection::d_weight_unit},
};

// Whether an object is a tensor of torch's own classes whose memory can be read directly; `found` gets its description.
// A lazily negated view is refused, because its memory has the other sign, and so are lazy zeros, which have no memory.
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
    if (!PyList_Check(sequence.ptr()) && !PyTuple_Check(sequence.ptr()))
      throw py::type_error("expected a list or tuple");
    first = PySequence_Fast_ITEMS(sequence.ptr()), count = PySequence_Fast_GET_SIZE(sequence.ptr());
  }
};

// What differs from call to call besides the operands: (T, B, proj_clip, batch_sizes, step_offset, lengths, resets,
// seed, state_mask). The last six are contiguous tensors or None (rnn.h; state_mask [D, B, R]).
struct Extent {
  int64_t steps, batch;
  double proj_clip;
  py::handle batch_sizes, step_offset, lengths, resets, seed, state_mask;

  explicit Extent(const py::tuple& of) {
    enum { kSteps, kBatch, kProjClip, kBatchSizes, kStepOffset, kLengths, kResets, kSeed, kStateMask, kCount };
    if (of.size() != kCount) throw py::value_error("extent: expected 9 values");
    steps = of[kSteps].cast<int64_t>(), batch = of[kBatch].cast<int64_t>(), proj_clip = of[kProjClip].cast<double>();
    batch_sizes = of[kBatchSizes], step_offset = of[kStepOffset], lengths = of[kLengths], resets = of[kResets];
    seed = of[kSeed], state_mask = of[kStateMask];
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

// The options of a call and the order of its operands (fastrnn/_core/config.py). One object serves all calls with the
// same options.
class Layer {
 public:
  Layer(int cell, std::vector<bool> reverse, int inputs, bool has_initial, const std::vector<std::string>& parameters,
      bool all_states, double cell_clip, bool reset_to_initial, double zoneout_h, double zoneout_c, double candidate,
      double gradient_clip)
      : cell_(facts_of(static_cast<Cell>(cell))), reverse_(std::move(reverse)), inputs_(inputs),
        states_(has_initial ? cell_.states() : 0), all_states_(all_states) {
    options_.cell_clip = cell_clip, options_.reset_to_initial = reset_to_initial,
    options_.gradient_clip = gradient_clip;
    options_.noise.zoneout_h = zoneout_h, options_.noise.zoneout_c = zoneout_c, options_.noise.candidate = candidate;
    for (const std::string& name : parameters)
      for (const Parameter& parameter : kParameters)
        if (name == parameter.name) parameters_.push_back(parameter);
  }

  // Returns B if the operands are plain tensors in CPU memory with the type and shapes last given to `remember`, T
  // aside. Returns -1 if they are not, or if that is uncertain.
  int64_t known_batch(py::handle operands) const {
    const Items items(operands);
    const std::shared_ptr<const std::vector<Known>> all = known_;  // another thread may call remember meanwhile
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
  // Call it with operands [T, B, I] and so on that have been checked.
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

  // Whether the core can read the operands in place, with cell states in the state type.
  bool reads(py::handle operands) const { return reads_all(tensors(operands)); }
  // Whether every gradient is None or a plain tensor with memory.
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

  // input: whether the core computes the input part of the gates itself.
  ForwardArgs forward(py::handle operands, const py::tuple& extent, py::handle output, py::handle h_n, py::handle c_n,
      py::handle gates, py::handle cells, bool input) const {
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

  // Returns false, and does nothing, if an operand cannot be read in place.
  bool cpu_forward(py::handle operands, const py::tuple& extent, py::handle output, py::handle h_n, py::handle c_n,
      py::handle gates, py::handle cells, int threads) const {
    if (!reads(operands)) return false;
    ForwardArgs args = forward(operands, extent, output, h_n, c_n, gates, cells, true);
    args.threads = threads;
    const py::gil_scoped_release released;
    fr::cpu_forward(args);
    return true;
  }

  // found: tensors that receive the operands' gradients; None for those not wanted. Returns false, and does nothing, if
  // a tensor cannot be read or written in place.
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
    const Tensor out(output), kept(gates), states(cells), d_out(d_output), d_last_h(d_h_n), d_last_c(d_c_n),
        d_states(d_cells);
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
      if (i < static_cast<size_t>(inputs_) ? !t.has_dense_last()
          : i < first_weight()             ? !t.is_dense()
                                           : !reads_parameter(t, i))
        return false;
    }
    return states_ < 2 || all[inputs_ + 1].bytes() == (all[0].bytes() == 8 ? 8 : 4);
  }
  bool reads_parameter(const Tensor& t, size_t place) const {
    const Parameter& parameter = parameters_[(place - first_weight()) % parameters_.size()];
    if (parameter.stride) return t.is_matrix();
    // a head's bias: [G, H], with gates as in weight_ih
    return t.is_dense() || (parameter.data == &Weights::bias_ih && t.has_dense_last());
  }
  Weights weights_of(const std::vector<Tensor>& all, const Extent& extent, int d) const {
    Weights weights{};
    weights.state_mask = Tensor(extent.state_mask).part(d);
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Tensor& t = all[first_of(d) + i];
      weights.*parameters_[i].data = t.of.data;
      if (parameters_[i].stride) weights.*parameters_[i].stride = t.row_stride();
      // a head's weight_ih: [G, H, I]
      if (i == 0 && t.of.dimensions == 3) weights.ih_gate_rows = t.stride(2) / t.row_stride();
    }
    return weights;
  }
  Rows cell_rows(const Tensor& t, const Shape& s, int d) const {
    return all_states_ ? t.rows(d * cell_.cells * s.hidden) : t.part_rows(s.batch, d);
  }

  template <class Args>
  void begin(Args& args, const std::vector<Tensor>& all, const Extent& extent) const {
    if (all.size() != first_of(static_cast<int>(reverse_.size())))
      throw py::value_error("operands: not as many as the layer has");
    Shape& s = args.shape;
    const Tensor &x = all[0], &ih = all[first_weight()], &hh = all[first_weight() + (cell_.multiplies() ? 1 : 0)];
    const bool is_bfloat = x.of.type_code == 4;
    s.cell = cell_.code;
    s.type = is_bfloat              ? Type::kBFloat16
             : x.of.type_bits == 64 ? Type::kFloat64
             : x.of.type_bits == 32 ? Type::kFloat32
                                    : Type::kFloat16;
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

// A stack of layers with prepared weights (rnn.h, fastrnn/frozen.py). Calls return false, and do nothing, if the
// weights were prepared for another instruction set or an operand cannot be read in place.
class Frozen {
 public:
  Frozen(int cell, std::vector<bool> reverse, double cell_clip, double proj_clip)
      : cell_(static_cast<Cell>(cell)), reverse_(std::move(reverse)) {
    options_.cell_clip = cell_clip, options_.proj_clip = proj_clip;
  }

  // prepared: of all layers, and of each layer's directions. input: [T, B, I] or [N, I]; states: [L*D, B, X]. All are
  // float32 and, except for the input, contiguous. The final states may overwrite the initial ones.
  bool forward(py::handle prepared, const py::tuple& extent, bool reset_to_initial, py::handle input, py::handle h0,
      py::handle c0, py::handle output, py::handle h_n, py::handle c_n, int threads) const {
    ForwardArgs args{};
    args.options = options_;
    Extent(extent).fill(args);
    args.options.proj_clip = options_.proj_clip, args.options.reset_to_initial = reset_to_initial,
    args.threads = threads;
    return run(args, prepared, Tensor(input), Tensor(h0), Tensor(c0), Tensor(output), Tensor(h_n), Tensor(c_n));
  }

  // A sequence [T, B, I] without lengths, resets or packing. Returns false also if T or B is 0, or if a tensor is not an
  // ordinary one of float32 on the CPU with the shape that is expected. The results are dense.
  bool sequence(py::handle prepared, py::handle input, py::handle h0, py::handle c0, py::handle output, py::handle h_n,
      py::handle c_n, int threads) const {
    Description x;
    if (!reads(x, input, 3) || !(x.of.shape[2] == 1 || x.of.strides[2] == 1) || !x.of.shape[0] || !x.of.shape[1])
      return false;
    const Tensor last_h(h_n), last_c(c_n);
    const auto fits = [](py::handle given, const Tensor& last) {
      if (given.is_none()) return true;
      Description t;
      return last && reads(t, given, 3) && std::equal(t.of.shape, t.of.shape + 3, last.of.shape) &&
             Tensor(given).is_dense();
    };
    if (!fits(h0, last_h) || !fits(c0, last_c) || (last_c && h0.is_none() != c0.is_none())) return false;
    ForwardArgs args{};
    args.options = options_, args.threads = threads;
    args.shape.steps = x.of.shape[0], args.shape.batch = x.of.shape[1];
    return run(args, prepared, Tensor(input), Tensor(h0), Tensor(c0), Tensor(output), last_h, last_c);
  }

  // One step for the rows of `input` [B, I], or of its part of the first layer's gates [B, G*H]; updates the states h
  // and c in place.
  bool step(py::handle prepared, py::handle input, bool is_gates, py::handle h, py::handle c, py::handle output,
      int threads) const {
    Description x, y;
    const Tensor states(h);
    const auto fits = [&](Description& t, py::handle object) {
      return reads(t, object, 2) && t.of.shape[0] == states.size(1) && (t.of.shape[1] == 1 || t.of.strides[1] == 1);
    };
    if (!fits(x, input) || !fits(y, output)) return false;
    const Tensor out(output);
    if (!out.is_dense()) return false;
    ForwardArgs args{};
    args.options = options_, args.threads = threads;
    args.shape.steps = 1, args.shape.batch = states.size(1);
    return run(args, prepared, Tensor(input), states, Tensor(c), out, states, Tensor(c), is_gates);
  }

 private:
  static constexpr int kFloat = 2;
  const Cell cell_;
  const std::vector<bool> reverse_;
  Options options_{};

  static bool reads(Description& t, py::handle object, int dimensions) {
    return is_plain(object.ptr(), t) && t.of.device_type == kCpu && t.of.type_code == kFloat && t.of.type_bits == 32 &&
           t.of.dimensions == dimensions;
  }

  bool run(ForwardArgs& args, py::handle prepared, const Tensor& input, const Tensor& h0, const Tensor& c0,
      const Tensor& output, const Tensor& h_n, const Tensor& c_n, bool is_gates = false) const {
    const Items items(prepared);
    std::vector<const Prepared*> weights;
    for (int64_t i = 0; i < items.count; ++i) {
      const Tensor t(py::handle(items.first[i]));
      const auto* const own = static_cast<const Prepared*>(t.of.data);
      if (t.of.device_type != kCpu || t.of.dimensions != 1 || t.of.type_bits != 8 || !t.is_dense() ||
          t.size(0) < static_cast<int64_t>(sizeof(Prepared)) || t.size(0) != own->bytes)
        throw py::value_error("prepared: expected what freeze made");
      if (!cpu_reads(*own)) return false;
      weights.push_back(own);
    }
    const int directions = static_cast<int>(reverse_.size());
    const int64_t layers = items.count / directions, batch = args.shape.batch;
    int64_t columns = input.size(0);  // of what enters a layer
    if (is_gates) {
      if (weights.empty() || columns != facts_of(cell_).gates * weights[0]->hidden) return false;
      columns = weights[0]->input;
    }
    for (int64_t place = 0; place < items.count; ++place) {
      const Prepared& own = *weights[place];
      const int64_t width = own.projection ? own.projection : own.hidden;
      if (own.input != columns || width != h_n.size(0) || (c_n && own.hidden != c_n.size(0))) return false;
      if (place % directions == directions - 1) columns = directions * width;
    }
    if (output.size(0) != columns) return false;
    const int64_t rows = input.of.dimensions == 3 || !args.shape.batch_sizes ? args.shape.steps * batch : input.size(1);
    std::unique_ptr<float[]> between[2];  // outputs of the layers, alternating
    Rows from = input.rows();
    args.shape.cell = cell_, args.shape.type = Type::kFloat32;
    args.directions = directions;
    const py::gil_scoped_release released;
    for (int64_t layer = 0; layer < layers; ++layer) {
      const Prepared& sizes = *weights[layer * directions];
      args.shape.input = sizes.input, args.shape.hidden = sizes.hidden, args.shape.projection = sizes.projection;
      const int64_t width = args.shape.width(), row = directions * width;
      float* to = static_cast<float*>(output.of.data);
      if (layer + 1 < layers) {
        std::unique_ptr<float[]>& own = between[layer % 2];
        if (!own) own.reset(new float[rows * row]);
        to = own.get();
      }
      args.direction.assign(directions, {});
      for (int d = 0; d < directions; ++d) {
        const int64_t place = layer * directions + d;
        ForwardDirection& x = args.direction[d];
        x.reverse = reverse_[d], x.weights.prepared = weights[place];
        (is_gates && layer == 0 ? x.input_gates : x.input) = from;
        x.output = {to + d * width, batch * row, row};
        x.h0 = h0.part(place), x.c0 = c0.part(place), x.h_n = h_n.part(place), x.c_n = c_n.part(place);
      }
      fr::cpu_forward(args);
      from = {to, batch * row, row};
    }
    return true;
  }
};

Shape prepared_shape(int cell, int64_t input, int64_t hidden, int64_t projection) {
  Shape shape{};
  shape.cell = facts_of(static_cast<Cell>(cell)).code, shape.input = input, shape.hidden = hidden,
  shape.projection = projection;
  return shape;
}

// tensors: weight_ih, weight_hh, bias_ih, bias_hh, weight_hr and the scales of the three matrices; contiguous float32,
// or None.
void prepare(int cell, int form, int64_t projection, py::handle tensors, py::handle to) {
  const Items items(tensors);
  std::vector<Tensor> t;
  for (int64_t i = 0; i < items.count; ++i) t.emplace_back(py::handle(items.first[i]));
  const Tensor out(to);
  if (t.size() != 8) throw py::value_error("tensors: expected 8");
  const Shape shape =
      prepared_shape(cell, t[0].size(0), t[1].size(1) / facts_of(static_cast<Cell>(cell)).gates, projection);
  if (out.size(0) != cpu_prepared_bytes(shape, static_cast<Form>(form)))
    throw py::value_error("to: expected prepared_bytes");
  Weights weights{};
  weights.ih = t[0].of.data, weights.hh = t[1].of.data, weights.bias_ih = t[2].of.data, weights.bias_hh = t[3].of.data;
  weights.hr = t[4].of.data;
  weights.ih_stride = shape.input, weights.hh_stride = shape.width(), weights.hr_stride = shape.hidden;
  const auto scale = [&](int i) { return static_cast<const float*>(t[5 + i].of.data); };
  cpu_prepare(shape, static_cast<Form>(form), weights, {scale(0), scale(1), scale(2)}, out.of.data);
}

}  // namespace

void bind_layer(py::module_& m) {
  // capsule_of: makes a DLPack capsule of a tensor, for a torch without exchange functions or with another version of
  // them.
  m.def("use_tensors", [](const py::object& tensor, const py::object& parameter, const py::object& capsule_of) {
    const py::object capsule = py::getattr(tensor, "__dlpack_c_exchange_api__", py::none());
    exchange = nullptr;
    if (!capsule.is_none()) {
      const auto* const found =
          static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
      if (!found) throw py::error_already_set();
      if (found->major == 1) exchange = found;
    }
    tensor_type = tensor.inc_ref().ptr(), parameter_type = parameter.inc_ref().ptr(),
    to_capsule = capsule_of.inc_ref().ptr();
  });
  py::class_<Layer>(m, "Layer")
      .def(py::init<int, std::vector<bool>, int, bool, std::vector<std::string>, bool, double, bool, double, double,
          double, double>())
      .def("known_batch", &Layer::known_batch)
      .def("remember", &Layer::remember)
      .def("reads", &Layer::reads)
      .def_static("plain", &Layer::plain)
      .def("backward", &Layer::backward)
      .def("weights", &Layer::weights)
      .def("forward", &Layer::forward)
      .def("cpu_forward", &Layer::cpu_forward)
      .def("cpu_backward", &Layer::cpu_backward);
  py::class_<Frozen>(m, "Frozen")
      .def(py::init<int, std::vector<bool>, double, double>())
      .def("forward", &Frozen::forward)
      .def("sequence", &Frozen::sequence)
      .def("step", &Frozen::step);
  m.def("prepared_bytes", [](int cell, int form, int64_t input, int64_t hidden, int64_t projection) {
    return cpu_prepared_bytes(prepared_shape(cell, input, hidden, projection), static_cast<Form>(form));
  });
  m.def("prepare", &prepare);
}

}  // namespace fr
