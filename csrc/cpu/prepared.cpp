// Weights prepared once (rnn.h): writes them, and refuses those that a call cannot read.
#include <cmath>

#include "core.h"

namespace fr {
namespace cpu {
namespace {

static_assert(sizeof(Prepared) == 64);

const CellKernels& check_sizes(const Shape& s, Form form) {
  const CellFacts& cell = facts_of(s.cell);
  require(s.hidden > 0 && s.input >= 0 && cell.projects() == (s.projection > 0), "shape",
      "the sizes of a layer of the cell");
  require(form == Form::kFloat32 || form == Form::kBFloat16 || form == Form::kInt8, "form",
      [&] { return "a code from 0 to 2, got " + std::to_string(static_cast<int>(form)); });
  require(cell.multiplies() && cell.unit_weights == 0, "cell",
      [&] { return "one whose weights are matrices and biases, got " + std::string(cell.name); });
  const int64_t depth = s.input > s.hidden ? s.input : s.hidden;
  require(form != Form::kInt8 || depth <= Int8::kMostDepth, "shape",
      [&] { return "at most " + std::to_string(Int8::kMostDepth) + " inputs and units with int8"; });
  return choose_serving(s.cell, form);
}

// The sums of quantised.h would overflow with other weights.
void check_int8(const void* data, int64_t stride, int64_t rows, int64_t depth, const char* argument) {
  for (int64_t row = 0; row < rows; ++row) {
    const float* const weights = static_cast<const float*>(data) + row * stride;
    float positive[2]{}, negative[2]{};
    bool fits = true;
    for (int64_t k = 0; k < depth; ++k) {
      if (k % 8 == 0) positive[0] = positive[1] = negative[0] = negative[1] = 0;
      const float weight = weights[k];
      (weight > 0 ? positive : negative)[k / 2 % 2] += weight;
      fits = fits && std::nearbyint(weight) == weight && std::fabs(weight) <= 127 &&
             positive[k / 2 % 2] <= Int8::kGroupSum && negative[k / 2 % 2] >= -Int8::kGroupSum;
    }
    require(fits, argument, "integers within the bounds of int8");
  }
}

Shape float_shape(const Shape& s) {
  Shape shape = s;
  shape.type = Type::kFloat32, shape.steps = shape.batch = 0;
  return shape;
}

int64_t prepared_bytes(const CellKernels& kernels, const Shape& s) {
  DirectionWork work{};
  set_sources(work, float_shape(s), facts_of(s.cell), {});
  alignas(64) static char nowhere;
  return static_cast<int64_t>(sizeof(Prepared)) + place_panels(work, kernels, facts_of(s.cell), &nowhere);
}

}  // namespace

void check_prepared(const ForwardDirection& direction, const Shape& s, const Prepared* first) {
  const auto* const own = static_cast<const Prepared*>(direction.weights.prepared);
  require(!own == !first, "prepared", "weights of every direction or of none");
  if (!own) return;
  require(s.type == Type::kFloat32 && !direction.gates.data && !direction.cells.data && !direction.weights.state_mask,
      "prepared", "null but for inference in float32 without noise");
  require(cpu_reads(*own) && own->form == first->form, "prepared",
      "weights prepared for the instruction set in use, of one form");
  require(own->cell == static_cast<int>(s.cell) && own->input == s.input && own->hidden == s.hidden &&
              own->projection == s.projection,
      "prepared", "weights of this layer");
}

}  // namespace cpu

int64_t cpu_prepared_bytes(const Shape& shape, Form form) {
  return cpu::prepared_bytes(cpu::check_sizes(shape, form), shape);
}

void cpu_prepare(const Shape& given, Form form, const Weights& weights, const Scales& scales, void* to) {
  using namespace cpu;
  const CellKernels& kernels = check_sizes(given, form);
  const CellFacts& cell = facts_of(given.cell);
  const Shape s = float_shape(given);
  check_address(weights.ih, 4, "weight_ih", s.input > 0), check_address(weights.hh, 4, "weight_hh", true);
  check_address(weights.hr, 4, "weight_hr", s.projection > 0), check_address(to, 8, "to", true);
  if (form == Form::kInt8) {
    require(scales.ih && scales.hh && (scales.hr || !s.projection), "scales", "those of every matrix of int8");
    check_int8(weights.ih, weights.ih_stride, cell.gates * s.hidden, s.input, "weight_ih");
    check_int8(weights.hh, weights.hh_stride, cell.gates * s.hidden, s.width(), "weight_hh");
    check_int8(weights.hr, weights.hr_stride, s.projection, s.hidden, "weight_hr");
  }
  DirectionWork work{};
  set_sources(work, s, cell, weights);
  work.input.source.scale = scales.ih, work.first.source.scale = scales.hh;
  work.second.source.scale = s.projection || !scales.hh ? scales.hr : scales.hh + cell.phase[0].gates * s.hidden;
  auto* const header = static_cast<Prepared*>(to);
  *header = {kPreparedVersion, static_cast<int32_t>(form), static_cast<int32_t>(s.cell), kernels.lanes,
      kernels.tile_vectors, weights.bias_ih != nullptr, s.input, s.hidden, s.projection, prepared_bytes(kernels, s), 0};
  place_panels(work, kernels, cell, header + 1);
  kernels.pack_forward(Call{s, {}, nullptr, 0, 0}, work, nullptr, 0, 1);
}

// The header alone decides which bytes a kernel reads, so a header that was changed since must be refused. The sizes
// are bounded first: every unit and every feature takes at least a byte.
bool cpu_reads(const Prepared& prepared) {
  using namespace cpu;
  require(prepared.version == kPreparedVersion, "prepared", "weights that this version of the library prepared");
  Shape s{};
  s.cell = static_cast<Cell>(prepared.cell), s.input = prepared.input, s.hidden = prepared.hidden,
  s.projection = prepared.projection;
  for (const int64_t size : {s.input, s.hidden, s.projection})
    require(size >= 0 && size <= prepared.bytes, "prepared", "sizes below its bytes");
  const CellKernels& kernels = check_sizes(s, static_cast<Form>(prepared.form));
  if (prepared.lanes != kernels.lanes || prepared.tile_vectors != kernels.tile_vectors) return false;
  require(prepared_bytes(kernels, s) == prepared.bytes, "prepared", "as many bytes as its sizes need");
  return true;
}

}  // namespace fr
