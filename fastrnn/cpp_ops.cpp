// The operator fastrnn::layer for torch programs without Python, on the CPU and without gradients: what AOTInductor's
// packages of models with fastrnn's layers call. cpp_ops.py builds it. Load the library (dlopen) before the package,
// but not beside `import fastrnn`, which registers the operator itself.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <string>
#include <vector>

#include <rnn.h>

namespace {

// fastrnn/_core/ops.py, which a test compares with this.
constexpr char kSchema[] =
    "layer(Tensor[] operands, Tensor? lengths, Tensor? resets, Tensor? batch_sizes, Tensor? seed, SymInt batch, "
    "str cell, bool[] reverse, SymInt inputs, bool has_initial, bool has_bias, bool reset_to_initial, float "
    "cell_clip, float proj_clip, bool recompute, SymInt heads, bool all_states, float zoneout_h, float zoneout_c, "
    "float candidate_dropout, float state_dropout, float gradient_clip, bool save) -> (Tensor, Tensor, Tensor, "
    "Tensor, Tensor)";

const fr::CellFacts& facts_of(const std::string& name) {
  for (const fr::CellFacts& cell : fr::kCells)
    if (name == cell.name) return cell;
  TORCH_CHECK(false, "fastrnn::layer: unknown cell ", name);
}

fr::Type type_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return fr::Type::kFloat32;
    case at::kDouble: return fr::Type::kFloat64;
    case at::kBFloat16: return fr::Type::kBFloat16;
    case at::kHalf: return fr::Type::kFloat16;
    default: TORCH_CHECK(false, "fastrnn::layer: expected a floating point type, got ", type);
  }
}

// Heads (fastrnn/_core/heads.py): each head of a direction is a direction of its own. The functions below split tensors
// into heads and join results.

// Splits the units in dimension `dim`, which has `blocks` blocks of them, and moves the heads to the front.
at::Tensor by_head(const at::Tensor& t, int64_t dim, int64_t blocks, int64_t heads) {
  return t.unflatten(dim, {blocks, heads, -1}).movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous();
}
// A state [D, B, blocks*H] as [D*heads, B, blocks*H/heads], and back.
at::Tensor split_state(const at::Tensor& t, int64_t blocks, int64_t heads) {
  return by_head(t, 2, blocks, heads).transpose(0, 1).flatten(0, 1).contiguous();
}
at::Tensor join_state(const at::Tensor& t, int64_t blocks, int64_t heads) {
  return t.unflatten(0, {-1, heads}).unflatten(3, {blocks, -1}).permute({0, 2, 3, 1, 4}).flatten(2).contiguous();
}

// The arguments of a call, by name.
struct Given {
  const std::vector<c10::Argument>& arguments;
  const torch::jit::Stack& stack;

  const c10::IValue& operator[](const char* name) const {
    const size_t first = stack.size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == name) return stack[first + i];
    TORCH_CHECK(false, "fastrnn::layer has no argument ", name);
  }
  at::Tensor optional(const char* name) const {
    const c10::IValue& value = (*this)[name];
    return value.isNone() ? at::Tensor() : value.toTensor().contiguous();
  }
};

// Parameters that a direction has, in the order of fastrnn/cells.py.
std::vector<std::string> parameter_names(const fr::CellFacts& cell, bool has_bias) {
  std::vector<std::string> names{"weight_ih"};
  if (cell.multiplies()) names.push_back("weight_hh");
  if (has_bias) names.push_back("bias_ih");
  if (has_bias && cell.multiplies()) names.push_back("bias_hh");
  if (cell.projects()) names.push_back("weight_hr");
  if (cell.unit_weights) names.push_back("weight_unit");
  return names;
}

// Operands lie as config.py in fastrnn/_core says: inputs, initial states, and the parameters of each direction.
struct Operands {
  std::vector<at::Tensor> all;
  std::vector<std::string> names;  // of a direction's parameters
  size_t inputs, states;
  size_t first_weight() const { return inputs + states; }
};

Operands operands_of(const Given& given, const fr::CellFacts& cell) {
  Operands found;
  for (const at::Tensor& t : given["operands"].toTensorVector()) found.all.push_back(t.contiguous());
  found.names = parameter_names(cell, given["has_bias"].toBool());
  found.inputs = given["inputs"].toInt(), found.states = given["has_initial"].toBool() ? cell.states() : 0;
  const size_t expected = found.first_weight() + given["reverse"].toBoolList().size() * found.names.size();
  TORCH_CHECK(found.all.size() == expected, "fastrnn::layer: expected ", expected, " operands, got ", found.all.size());
  return found;
}

// Makes each head of a direction a direction of its own.
void split_heads(Operands& operands, const fr::CellFacts& cell, int64_t heads) {
  const std::vector<at::Tensor> whole = std::move(operands.all);
  std::vector<at::Tensor>& split = operands.all;
  split.assign(whole.begin(), whole.begin() + operands.inputs);
  for (size_t i = 0; i < operands.states; ++i)
    split.push_back(split_state(whole[operands.inputs + i], i ? cell.cells : 1, heads));
  const std::vector<std::string>& names = operands.names;
  for (size_t first = operands.first_weight(); first < whole.size(); first += names.size()) {
    std::vector<at::Tensor> parameters;
    for (size_t i = 0; i < names.size(); ++i) {
      const at::Tensor& t = whole[first + i];
      if (names[i] == "weight_hh") parameters.push_back(t);  // [heads, G*H/heads, H/heads]
      else if (names[i] == "weight_unit") parameters.push_back(by_head(t, 1, 1, heads));
      else parameters.push_back(by_head(t, 0, cell.gates, heads));
    }
    for (int64_t head = 0; head < heads; ++head)
      for (const at::Tensor& t : parameters) split.push_back(t[head]);
  }
}

// Tensors whose addresses a call's arguments hold.
struct Kept {
  at::Tensor lengths, resets, seed, sizes, offsets;
};

Kept set_shape(fr::ForwardArgs& args, const Given& given, const fr::CellFacts& cell, const Operands& operands) {
  const at::Tensor& x = operands.all[0];
  const at::Tensor& weight_ih = operands.all[operands.first_weight()];
  Kept kept{
      given.optional("lengths"), given.optional("resets"), given.optional("seed"), given.optional("batch_sizes"), {}};
  fr::Shape& s = args.shape;
  s.cell = cell.code, s.type = type_of(x.scalar_type());
  s.batch = given["batch"].toInt(), s.input = weight_ih.size(1), s.hidden = weight_ih.size(0) / cell.gates;
  if (cell.projects()) s.projection = operands.all[operands.first_weight() + 1].size(1);
  s.steps = kept.sizes.defined() ? kept.sizes.size(0) : x.size(0);
  if (kept.sizes.defined()) {
    kept.offsets = kept.sizes.cumsum(0) - kept.sizes;
    s.batch_sizes = kept.sizes.const_data_ptr<int64_t>(), s.step_offset = kept.offsets.const_data_ptr<int64_t>();
  }
  if (kept.lengths.defined()) s.lengths = kept.lengths.const_data_ptr<int64_t>();
  if (kept.resets.defined()) s.resets = static_cast<const uint8_t*>(kept.resets.const_data_ptr());
  return kept;
}

void set_options(fr::Options& options, const Given& given, const at::Tensor& x, const at::Tensor& seed) {
  options.cell_clip = given["cell_clip"].toDouble();
  // As the storage type holds it.
  options.proj_clip = at::scalar_tensor(given["proj_clip"].toDouble(), x.options()).item<double>();
  options.reset_to_initial = given["reset_to_initial"].toBool();
  options.noise = {given["zoneout_h"].toDouble(), given["zoneout_c"].toDouble(), given["candidate_dropout"].toDouble(),
      seed.defined() ? static_cast<const uint64_t*>(seed.const_data_ptr()) : nullptr};
}

void set_weights(fr::Weights& w, const Operands& operands, size_t place) {
  for (const std::string& name : operands.names) {
    const at::Tensor& t = operands.all[place++];
    const void* const data = t.const_data_ptr();
    if (name == "weight_ih") w.ih = data, w.ih_stride = t.size(1);
    else if (name == "weight_hh") w.hh = data, w.hh_stride = t.size(1);
    else if (name == "weight_hr") w.hr = data, w.hr_stride = t.size(1);
    else if (name == "bias_ih") w.bias_ih = data;
    else if (name == "bias_hh") w.bias_hh = data;
    else w.unit = data;
  }
}

// Results are those of raw.py with nothing kept for backward.
struct Results {
  at::Tensor output, h_n, c_n, cells;  // c_n, cells: undefined if the cell or the call has none
};

Results allocate(const fr::Shape& s, int64_t directions, int64_t of_cells, bool all_states, const at::Tensor& x) {
  const auto state = x.options().dtype(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = directions * s.width();
  Results results{at::empty(shape, x.options()), at::empty({directions, s.batch, s.width()}, x.options()), {}, {}};
  shape.back() = directions * of_cells;
  if (of_cells) results.c_n = at::empty({directions, s.batch, of_cells}, state);
  if (all_states) results.cells = at::zeros(shape, state);
  return results;
}

void set_directions(fr::ForwardArgs& args, const Operands& operands, const c10::List<bool>& reverse, int64_t heads,
    int64_t of_cells, const Results& results) {
  const fr::Shape& s = args.shape;
  const auto rows = [&](const at::Tensor& t, int64_t from) {
    const int64_t columns = t.size(-1);
    char* const first = static_cast<char*>(t.data_ptr()) + from * t.element_size();
    return fr::Rows{first, s.batch_sizes ? 0 : s.batch * columns, columns};
  };
  const auto part = [](const at::Tensor& t, int64_t d) {
    return static_cast<char*>(t.data_ptr()) + d * t.stride(0) * t.element_size();
  };
  const int64_t directions = reverse.size() * heads;
  args.directions = static_cast<int>(directions);
  args.direction.resize(directions);
  for (int64_t d = 0; d < directions; ++d) {
    fr::ForwardDirection& to = args.direction[d];
    to.reverse = reverse[d / heads];
    set_weights(to.weights, operands, operands.first_weight() + d * operands.names.size());
    to.input = rows(operands.all[d * operands.inputs / directions], 0);
    to.output = rows(results.output, d * s.width());
    if (operands.states > 0) to.h0 = part(operands.all[operands.inputs], d);
    if (operands.states > 1) to.c0 = part(operands.all[operands.inputs + 1], d);
    to.h_n = part(results.h_n, d);
    if (results.c_n.defined()) to.c_n = part(results.c_n, d);
    if (results.cells.defined()) to.cells = rows(results.cells, d * of_cells);
  }
}

void join_heads(Results& results, const fr::CellFacts& cell, int64_t heads, int64_t hidden) {
  results.h_n = join_state(results.h_n, 1, heads);
  if (results.c_n.defined()) results.c_n = join_state(results.c_n, cell.cells, heads);
  if (results.cells.defined() && cell.cells > 1)
    results.cells = results.cells.unflatten(-1, {-1, heads, cell.cells, hidden}).transpose(-3, -2).flatten(-4);
}

void layer(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const Given given{op.schema().arguments(), *stack};
  TORCH_CHECK(!given["save"].toBool(),
      "fastrnn::layer without Python makes no gradients: export the model under torch.no_grad()");
  TORCH_CHECK(given["state_dropout"].toDouble() == 0,
      "fastrnn::layer without Python drops no state: export the model in evaluation");
  const fr::CellFacts& cell = facts_of(given["cell"].toStringRef());
  const c10::List<bool> reverse = given["reverse"].toBoolList();
  const int64_t heads = given["heads"].toInt();
  Operands operands = operands_of(given, cell);
  const at::Tensor x = operands.all[0];
  if (heads > 1) split_heads(operands, cell, heads);
  if (operands.states > 1) {
    at::Tensor& c0 = operands.all[operands.inputs + 1];
    c0 = c0.to(x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat);
  }

  fr::ForwardArgs args{};
  const Kept kept = set_shape(args, given, cell, operands);
  set_options(args.options, given, x, kept.seed);
  args.threads = at::get_num_threads();
  const int64_t of_cells = cell.cells * args.shape.hidden, directions = reverse.size() * heads;
  Results results = allocate(args.shape, directions, of_cells, given["all_states"].toBool(), x);
  set_directions(args, operands, reverse, heads, of_cells, results);
  fr::cpu_forward(args);
  if (heads > 1) join_heads(results, cell, heads, args.shape.hidden);

  const at::Tensor none = at::empty({0}, x.options());
  const at::Tensor c_n = results.c_n.defined() ? results.c_n.to(x.scalar_type()) : none;
  torch::jit::drop(*stack, given.arguments.size());
  torch::jit::push(*stack, results.output, results.h_n, c_n, none, results.cells.defined() ? results.cells : none);
}

void refuse(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK(false, "fastrnn::layer without Python runs on the CPU only: move the model and its input there, or run ",
      "it in Python");
}

}  // namespace

TORCH_LIBRARY(fastrnn, m) { m.def(kSchema); }
TORCH_LIBRARY_IMPL(fastrnn, CPU, m) { m.impl("layer", torch::CppFunction::makeFromBoxedFunction<&layer>()); }
TORCH_LIBRARY_IMPL(fastrnn, CUDA, m) { m.impl("layer", torch::CppFunction::makeFromBoxedFunction<&refuse>()); }
