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

// Operands lie as config.py in fastrnn/_core says; results are those of raw.py with nothing kept for backward.
void layer(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto given = [&, first = stack->size() - arguments.size()](const char* name) -> const c10::IValue& {
    for (size_t i = 0; i < arguments.size(); ++i)
      if (arguments[i].name() == name) return (*stack)[first + i];
    TORCH_CHECK(false, "fastrnn::layer has no argument ", name);
  };
  TORCH_CHECK(!given("save").toBool(),
              "fastrnn::layer without Python makes no gradients: export the model under torch.no_grad()");
  TORCH_CHECK(given("state_dropout").toDouble() == 0,
              "fastrnn::layer without Python drops no state: export the model in evaluation");
  const fr::CellFacts& cell = facts_of(given("cell").toStringRef());
  const c10::List<bool> reverse = given("reverse").toBoolList();
  const int64_t inputs = given("inputs").toInt(), batch = given("batch").toInt(), heads = given("heads").toInt();
  const int64_t directions = reverse.size() * heads;  // those of the kernels
  const bool all_states = given("all_states").toBool();
  std::vector<at::Tensor> operands;
  for (const at::Tensor& t : given("operands").toTensorVector()) operands.push_back(t.contiguous());
  const at::Tensor x = operands[0];

  // Parameters that a direction has, in the order of fastrnn/cells.py.
  const bool has_bias = given("has_bias").toBool();
  std::vector<std::string> names{"weight_ih"};
  if (cell.multiplies()) names.push_back("weight_hh");
  if (has_bias) names.push_back("bias_ih");
  if (has_bias && cell.multiplies()) names.push_back("bias_hh");
  if (cell.projects()) names.push_back("weight_hr");
  if (cell.unit_weights) names.push_back("weight_unit");
  const size_t states = given("has_initial").toBool() ? cell.states() : 0, first_weight = inputs + states;
  const size_t expected = first_weight + reverse.size() * names.size();
  TORCH_CHECK(operands.size() == expected, "fastrnn::layer: expected ", expected, " operands, got ", operands.size());
  if (heads > 1) {
    std::vector<at::Tensor> split(operands.begin(), operands.begin() + inputs);
    for (size_t i = 0; i < states; ++i) split.push_back(split_state(operands[inputs + i], i ? cell.cells : 1, heads));
    for (size_t first = first_weight; first < expected; first += names.size()) {
      std::vector<at::Tensor> parameters;
      for (size_t i = 0; i < names.size(); ++i) {
        const at::Tensor& t = operands[first + i];
        if (names[i] == "weight_hh") parameters.push_back(t);  // [heads, G*H/heads, H/heads]
        else if (names[i] == "weight_unit") parameters.push_back(by_head(t, 1, 1, heads));
        else parameters.push_back(by_head(t, 0, cell.gates, heads));
      }
      for (int64_t head = 0; head < heads; ++head)
        for (const at::Tensor& t : parameters) split.push_back(t[head]);
    }
    operands = split;
  }
  const at::ScalarType state_type = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  if (states > 1) operands[inputs + 1] = operands[inputs + 1].to(state_type);

  fr::ForwardArgs args{};
  fr::Shape& s = args.shape;
  s.cell = cell.code, s.type = type_of(x.scalar_type());
  s.batch = batch, s.input = operands[first_weight].size(1), s.hidden = operands[first_weight].size(0) / cell.gates;
  if (cell.projects()) s.projection = operands[first_weight + 1].size(1);
  const auto optional = [&](const char* name) {
    return given(name).isNone() ? at::Tensor() : given(name).toTensor().contiguous();
  };
  const at::Tensor lengths = optional("lengths"), resets = optional("resets"), seed = optional("seed");
  const at::Tensor sizes = optional("batch_sizes");
  at::Tensor offsets;
  s.steps = sizes.defined() ? sizes.size(0) : x.size(0);
  if (sizes.defined()) {
    offsets = sizes.cumsum(0) - sizes;
    s.batch_sizes = sizes.const_data_ptr<int64_t>(), s.step_offset = offsets.const_data_ptr<int64_t>();
  }
  if (lengths.defined()) s.lengths = lengths.const_data_ptr<int64_t>();
  if (resets.defined()) s.resets = static_cast<const uint8_t*>(resets.const_data_ptr());
  args.options.cell_clip = given("cell_clip").toDouble();
  // As the storage type holds it.
  args.options.proj_clip = at::scalar_tensor(given("proj_clip").toDouble(), x.options()).item<double>();
  args.options.reset_to_initial = given("reset_to_initial").toBool();
  args.options.noise = {given("zoneout_h").toDouble(), given("zoneout_c").toDouble(),
                        given("candidate_dropout").toDouble(),
                        seed.defined() ? static_cast<const uint64_t*>(seed.const_data_ptr()) : nullptr};
  args.threads = at::get_num_threads();

  const int64_t width = s.width(), of_cells = cell.cells * s.hidden, item = x.element_size();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = directions * width;
  const at::Tensor output = at::empty(shape, x.options());
  at::Tensor h_n = at::empty({directions, batch, width}, x.options());
  shape.back() = directions * of_cells;
  const at::Tensor none = at::empty({0}, x.options());
  at::Tensor c_n = of_cells ? at::empty({directions, batch, of_cells}, x.options().dtype(state_type)) : none;
  at::Tensor cells = all_states ? at::zeros(shape, x.options().dtype(state_type)) : none;

  const auto rows = [&](const at::Tensor& t, int64_t from) {
    const int64_t columns = t.size(-1);
    char* const first = static_cast<char*>(t.data_ptr()) + from * t.element_size();
    return fr::Rows{first, sizes.defined() ? 0 : batch * columns, columns};
  };
  const auto part = [](const at::Tensor& t, int64_t d) {
    return static_cast<char*>(t.data_ptr()) + d * t.stride(0) * t.element_size();
  };
  args.directions = static_cast<int>(directions);
  args.direction.resize(directions);
  for (int64_t d = 0; d < directions; ++d) {
    fr::ForwardDirection& to = args.direction[d];
    to.reverse = reverse[d / heads];
    size_t place = first_weight + d * names.size();
    fr::Weights& w = to.weights;
    for (const std::string& name : names) {
      const at::Tensor& t = operands[place++];
      const void* const data = t.const_data_ptr();
      if (name == "weight_ih") w.ih = data, w.ih_stride = t.size(1);
      else if (name == "weight_hh") w.hh = data, w.hh_stride = t.size(1);
      else if (name == "weight_hr") w.hr = data, w.hr_stride = t.size(1);
      else if (name == "bias_ih") w.bias_ih = data;
      else if (name == "bias_hh") w.bias_hh = data;
      else w.unit = data;
    }
    to.input = rows(operands[d * inputs / directions], 0);
    to.output = rows(output, d * width);
    if (states > 0) to.h0 = part(operands[inputs], d);
    if (states > 1) to.c0 = part(operands[inputs + 1], d);
    to.h_n = part(h_n, d);
    if (of_cells) to.c_n = part(c_n, d);
    if (all_states) to.cells = rows(cells, d * of_cells);
  }
  fr::cpu_forward(args);
  if (heads > 1) {
    h_n = join_state(h_n, 1, heads);
    if (of_cells) c_n = join_state(c_n, cell.cells, heads);
    if (all_states && cell.cells > 1)
      cells = cells.unflatten(-1, {-1, heads, cell.cells, s.hidden}).transpose(-3, -2).flatten(-4);
  }
  torch::jit::drop(*stack, arguments.size());
  torch::jit::push(*stack, output, h_n, of_cells ? c_n.to(x.scalar_type()) : none, none, cells);
}

void refuse(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK(false, "fastrnn::layer without Python runs on the CPU only: move the model and its input there, or run ",
              "it in Python");
}

}  // namespace

TORCH_LIBRARY(fastrnn, m) {
  m.def(kSchema);
}
TORCH_LIBRARY_IMPL(fastrnn, CPU, m) {
  m.impl("layer", torch::CppFunction::makeFromBoxedFunction<&layer>());
}
TORCH_LIBRARY_IMPL(fastrnn, CUDA, m) {
  m.impl("layer", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}
