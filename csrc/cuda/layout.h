// What run.cpp and the strategies' launch.cpp share: where the rows of a step lie, a cell's products as StepProduct,
// and the caller's scratch memory. Internal, not part of the library's interface.
#pragma once

#include <cstdint>
#include <limits>

#include "run.h"

namespace fr {

// A bump allocator over the caller's scratch memory. With a null base it only counts.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(static_cast<char*>(base)) {}
  void* take(int64_t bytes) {
    void* taken = base_ ? base_ + used_ : nullptr;
    used_ += divide_up(bytes, 256) * 256;
    return taken;
  }
  int64_t used() const { return used_; }

 private:
  char* base_;
  int64_t used_ = 0;
};

// Sizes and types of a call, as forward and backward use them.
struct Layout {
  const Shape& shape;
  const CellFacts& cell;
  int64_t element, state, width;

  explicit Layout(const Shape& s)
      : shape(s), cell(facts_of(s.cell)), element(storage_bytes(s.type)), state(state_bytes(s.type)), width(s.width()) {
  }

  int64_t batch_at(int64_t t) const {
    if (t < 0 || t >= shape.steps) return 0;
    return shape.batch_sizes ? shape.batch_sizes[t] : shape.batch;
  }
  int64_t first_row(int64_t t) const { return shape.step_offset ? shape.step_offset[t] : t * shape.batch; }
  int64_t rows_between(int64_t first, int64_t last) const {
    return last > first ? first_row(last - 1) + batch_at(last - 1) - first_row(first) : 0;
  }
  // The row stride, in elements, that aligns every row to 16 bytes.
  int64_t padded(int64_t columns) const { return divide_up(columns * element, 16) * 16 / element; }

  // The rows of step t in a buffer that begins with the rows of step `origin`.
  Matrix at(const Rows& rows, int64_t bytes, int64_t t, int64_t origin = 0) const {
    if (!rows.data || t < 0 || t >= shape.steps) return {};
    const int64_t offset = shape.step_offset ? (shape.step_offset[t] - shape.step_offset[origin]) * rows.row_stride
                                             : (t - origin) * rows.step_stride;
    return {static_cast<char*>(rows.data) + offset * bytes, rows.row_stride};
  }
  StepRows step(int64_t t) const {
    StepRows rows;
    if (t < 0 || t >= shape.steps) return rows;
    rows.step = t;
    rows.rows = batch_at(t), rows.rows_after = batch_at(t + 1);
    if (shape.resets) {
      rows.resets = shape.resets + first_row(t);
      rows.resets_after = t + 1 < shape.steps ? shape.resets + first_row(t + 1) : nullptr;
    }
    return rows;
  }
  const void* column(const void* matrix, int64_t columns, int64_t bytes) const {
    return matrix ? static_cast<const char*>(matrix) + columns * bytes : nullptr;
  }
  bool copies(const void* data, int64_t row_stride) const {
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride * element % 16 == 0;
  }
  StepParams params(const Options& options, const void* state_mask) const {
    StepParams p{};
    p.cell = shape.cell;
    p.hidden = shape.hidden, p.width = width;
    p.lengths = shape.lengths;
    p.cell_clip = options.cell_clip, p.proj_clip = options.proj_clip;
    p.reset_to_initial = options.reset_to_initial;
    p.noise = NoiseParams(options.noise, state_mask);
    p.gradient_clip = options.gradient_clip;
    p.clips_cells = p.cell_clip > 0, p.clips_projected = p.proj_clip > 0;
    p.clips_gradients = p.gradient_clip <= std::numeric_limits<double>::max();  // beyond it a bound clips nothing
    p.acts_on_state = p.noise.on || p.clips_cells || p.clips_projected || p.clips_gradients;
    return p;
  }
};

// Operand of the second product and values carried between the phases, for forward and for rebuilt gates.
struct InnerBuffers {
  Matrix inner;
  void* carry = nullptr;
  InnerBuffers() = default;
  InnerBuffers(const Layout& l, int64_t rows, Workspace& workspace) {
    if (!l.cell.two_phases()) return;
    const int64_t stride = l.padded(l.shape.hidden);
    inner = {workspace.take(rows * stride * l.element), stride};
    if (l.cell.carried()) carry = workspace.take(rows * l.cell.carried() * l.shape.hidden * l.state);
  }
};

// The product W_hh h_prev. Needs d.output_before and d.h0.
inline StepProduct forward_first_product(const Layout& l, const Weights& weights, const StepDirection& d) {
  StepProduct product;
  if (!l.cell.multiplies()) return product;
  product.segments = 1;
  product.weight[0] = weights.hh, product.weight_stride[0] = weights.hh_stride;
  product.depth[0] = l.width;
  product.operand_rows = d.here.rows;
  product.operand_is_state = true;
  product.copy_weight[0] = l.copies(weights.hh, weights.hh_stride);
  const Matrix& before = d.entering.data ? d.entering_before : d.matrix[StepMatrix::kOutputBefore];
  product.copy_operand[0] =
      l.copies(before.data, before.row_stride) && l.copies(d.entering.data ? d.h0_entering : d.h0, l.width);
  product.gate_rows = l.shape.hidden;
  product.bias = weights.bias_hh;
  return product;
}

// The second product: W_hn inner, or W_hr inner with projection. Needs d.inner.
inline StepProduct forward_second_product(const Layout& l, const Weights& weights, const StepDirection& d) {
  StepProduct product;
  const int64_t skipped = l.cell.phase[0].gates * l.shape.hidden;
  const bool projects = l.cell.projects();
  product.segments = 1;
  product.weight_stride[0] = projects ? weights.hr_stride : weights.hh_stride;
  product.weight[0] = projects ? weights.hr : l.column(weights.hh, skipped * weights.hh_stride, l.element);
  product.depth[0] = l.shape.hidden;
  product.operand[0] = d.matrix[StepMatrix::kInner];
  product.operand_rows = d.here.rows;
  product.copy_weight[0] = l.copies(product.weight[0], product.weight_stride[0]);
  product.copy_operand[0] = l.copies(product.operand[0].data, product.operand[0].row_stride);
  product.gate_rows = l.shape.hidden;
  product.bias = projects ? nullptr : l.column(weights.bias_hh, skipped, l.element);
  return product;
}

// The weights of a direction as `persistent` and `block` read them, in pieces of 16 bytes: rows are aligned, and beyond
// their end they are zero up to the next 16 bytes. Weights that are not like that are copied.
class WholeWeights {
 public:
  WholeWeights(const Layout& l, const Weights& from, Workspace& workspace) : from_(from), whole_(from) {
    if (!l.cell.multiplies()) return;
    const auto take = [&](const void*& data, int64_t& stride, int64_t rows, int64_t columns) {
      if (l.copies(data, stride) && columns * l.element % 16 == 0) return;
      stride = l.padded(columns);
      data = workspace.take(rows * stride * l.element);
    };
    take(whole_.hh, whole_.hh_stride, l.cell.gates * l.shape.hidden, l.width);
    if (l.cell.projects()) take(whole_.hr, whole_.hr_stride, l.width, l.shape.hidden);
  }
  const Weights& fill(const Layout& l, const Kernels& kernels, void* stream) const {
    const auto copy = [&](const void* to, int64_t stride, const void* from, int64_t from_stride, int64_t rows,
                          int64_t columns) {
      if (to != from)
        kernels.transpose(static_cast<int>(l.element),
            {from, const_cast<void*>(to), from_stride, stride, rows, columns, false}, stream);
    };
    copy(whole_.hh, whole_.hh_stride, from_.hh, from_.hh_stride, l.cell.gates * l.shape.hidden, l.width);
    copy(whole_.hr, whole_.hr_stride, from_.hr, from_.hr_stride, l.width, l.shape.hidden);
    return whole_;
  }

 private:
  const Weights& from_;
  Weights whole_;
};

// Transposed weights of the backward products: [units, depth] each, rows padded with zeros to 16 bytes.
struct BackwardWeights {
  struct Transposed {
    void* data = nullptr;
    int64_t stride = 0, depth = 0;
  };
  Transposed first[2];  // of W_hh: the gates whose gradients lie in d_gates; the split gate
  Transposed second;    // W_hn or W_hr

  BackwardWeights(const Layout& l, Workspace& workspace) {
    const int64_t hidden = l.shape.hidden;
    if (!l.cell.multiplies()) return;
    const int whole = l.cell.split_gate >= 0 ? l.cell.split_gate : l.cell.phase[0].gates;
    first[0] = transposed(l, workspace, l.width, whole * hidden);
    if (l.cell.split_gate >= 0) first[1] = transposed(l, workspace, l.width, hidden);
    if (l.cell.two_phases())
      second = transposed(l, workspace, hidden, l.cell.projects() ? l.width : l.cell.phase[1].gates * hidden);
  }

  void fill(const Layout& l, const Weights& weights, const Kernels& kernels, void* stream) const {
    const auto transpose = [&](const Transposed& to, const void* from, int64_t from_stride, int64_t columns) {
      if (to.data)
        kernels.transpose(
            static_cast<int>(l.element), {from, to.data, from_stride, to.stride, to.depth, columns, true}, stream);
    };
    transpose(first[0], weights.hh, weights.hh_stride, l.width);
    transpose(
        first[1], l.column(weights.hh, first[0].depth * weights.hh_stride, l.element), weights.hh_stride, l.width);
    if (!l.cell.two_phases()) return;
    if (l.cell.projects()) transpose(second, weights.hr, weights.hr_stride, l.shape.hidden);
    else
      transpose(
          second, l.column(weights.hh, first[0].depth * weights.hh_stride, l.element), weights.hh_stride, l.width);
  }

 private:
  static Transposed transposed(const Layout& l, Workspace& workspace, int64_t units, int64_t depth) {
    const int64_t stride = l.padded(depth);
    return {workspace.take(units * stride * l.element), stride, depth};
  }
};

// The states that a range's rows started from: h [rows, R] in the storage type, c [rows, kCells*H] in the state type.
struct GatheredStates {
  void* h = nullptr;
  void* c = nullptr;
};

// Scratch memory of one direction. If forward kept no gates, it also holds the rebuilt gates of the range and what
// rebuilding needs.
struct BackwardBuffers {
  BackwardWeights weights;
  Rows gates{};
  GatheredStates states;
  InnerBuffers inner;

  BackwardBuffers(const Layout& l, const BackwardArgs& args, const BackwardDirection& from, Workspace& workspace)
      : weights(l, workspace) {
    if (from.gates.data || l.cell.saved == 0) return;
    const int64_t columns = l.cell.saved * l.shape.hidden, rows = l.rows_between(args.first_step, args.last_step);
    gates = {workspace.take(rows * columns * l.element), l.shape.batch * columns, columns};
    states.h = workspace.take(rows * l.width * l.element);
    if (l.cell.cells) states.c = workspace.take(rows * l.cell.cells * l.shape.hidden * l.state);
    if (l.cell.two_phases() && l.cell.phase[1].saved) inner = InnerBuffers(l, rows, workspace);
  }
  bool rebuilds() const { return gates.data != nullptr; }
};

inline void set_segment(const Layout& l, StepProduct& product, int segment, const BackwardWeights::Transposed& weight,
    const Matrix& operand) {
  product.segments = segment + 1;
  product.weight[segment] = weight.data, product.weight_stride[segment] = weight.stride;
  product.depth[segment] = weight.depth;
  product.operand[segment] = operand;
  product.copy_weight[segment] = true;
  product.copy_operand[segment] = l.copies(operand.data, operand.row_stride);
}

}  // namespace fr
