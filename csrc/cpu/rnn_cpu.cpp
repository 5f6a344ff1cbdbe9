// The CPU backend's entry points: lay out a call's scratch memory, and run the team.
#include <algorithm>
#include <cstring>
#include <utility>

#include "core.h"

namespace fr {

void cpu_forward(const ForwardArgs& args) {
  using namespace cpu;
  const CellFacts& cell = check(args);
  const Shape& s = args.shape;
  const bool rows = s.steps > 0 && s.batch > 0;
  for (int d = 0; d < args.directions; ++d) {
    const Rows& gates = args.direction[d].input_gates;
    check_address(args.direction[d].input.data, storage_bytes(s.type), "input", rows && s.input > 0 && !gates.data);
    check_address(gates.data, state_bytes(s.type), "input_gates", false);
    check_address(args.direction[d].h_n, storage_bytes(s.type), "h_n", s.batch > 0);
    check_address(args.direction[d].c_n, 4, "c_n", s.batch > 0 && cell.cells > 0);
  }
  const auto* const prepared = static_cast<const Prepared*>(args.direction[0].weights.prepared);
  for (const ForwardDirection& direction : args.direction) check_prepared(direction, s, prepared);
  const CellKernels& kernels =
      prepared ? choose_serving(s.cell, static_cast<Form>(prepared->form)) : choose_kernels(s.cell, s.type);
  Team team;
  prepare(team, s, args.options, args.directions, args.threads, cell, kernels, true);
  const bool pack = !prepared && packs(s.steps, s.batch);

  Arena arena;
  std::vector<DirectionWork> work(args.directions);
  std::vector<Scratch> scratch(team.threads);
  const Chunk chunk = chunk_of(team, kernels, cell, s.steps);
  for (int d = 0; d < args.directions; ++d) {
    want_forward(arena, work[d], kernels, s, cell, args.direction[d].weights, pack, pack && packs_input(team, chunk));
    want_zeros(arena, work[d], s);
    work[d].barrier = &team.barriers[d];
  }
  for (Scratch& own : scratch) want_scratch(arena, own, kernels, team, cell, chunk);
  arena.allocate();
  for (int d = 0; d < args.directions; ++d) clear_zeros(work[d], s);

  struct Context {
    const ForwardArgs& args;
    const CellKernels& kernels;
    const Team& team;
    const DirectionWork* work;
    const std::vector<Scratch>& scratch;
  } context{args, kernels, team, work.data(), scratch};
  const auto packing = [](void* opaque, int index, int count) {
    const Context& c = *static_cast<Context*>(opaque);
    for (int d = 0; d < c.args.directions; ++d)
      c.kernels.pack_forward(c.team.call, c.work[d], c.args.direction[d].h0, index, count);
  };
  const auto running = [](void* opaque, int index, int count) {
    const Context& c = *static_cast<Context*>(opaque);
    for_each_part(c.team, index, count, [&](const Part& part) {
      c.kernels.forward(
          c.team.call, c.args.direction[part.direction], c.work[part.direction], part, c.scratch[index], false);
    });
  };
  if (pack || !kernels.output_is_operand) run_team(pack ? team.threads : 1, packing, &context);
  run_team(team.threads, running, &context);
}

// ---- backward ----

namespace cpu {
namespace {

// Steps [first, last).
struct Range {
  int64_t first, last;
};

int64_t rows_before(const Shape& s, int64_t t) {
  if (!s.batch_sizes) return t * s.batch;
  return t < s.steps ? s.step_offset[t] : t ? s.step_offset[t - 1] + s.batch_sizes[t - 1] : 0;
}
int64_t rows_of(const Shape& s, Range range) { return rows_before(s, range.last) - rows_before(s, range.first); }

// Cuts the sequence into ranges of at most this many rows, or of one step; at least one range.
std::vector<Range> cut(const Shape& s, int64_t most_rows) {
  std::vector<Range> ranges;
  for (int64_t first = 0; first < s.steps || ranges.empty();) {
    int64_t last = first < s.steps ? first + 1 : first;
    while (last < s.steps && rows_of(s, {first, last + 1}) <= most_rows) ++last;
    ranges.push_back({first, last});
    first = last;
  }
  return ranges;
}

GradientColumns columns_of(const CellFacts& cell, const Shape& s, const CellKernels& kernels) {
  const int64_t gates = cell.split_gate >= 0 ? s.hidden : 0, inner = gates + cell.gates * s.hidden;
  const int64_t projected = inner + (cell.two_phases() ? s.hidden : 0), size = projected + s.projection;
  // Rows are an odd number of cache lines apart, so that the rows of a product do not fall into the same few sets of
  // the cache.
  const int64_t line = 64 / kernels.operand_bytes;
  return {gates, inner, projected, ((size + line - 1) / line | 1) * line};
}

// The sums of one direction's parameter gradients, in the state type: the gradients themselves, or scratch to be
// rounded.
struct Sums {
  void *weight_ih, *weight_hh, *weight_hr, *bias_ih, *bias_hh, *weight_unit;
};

// The active rows of a range, in processing order.
struct RangeRows {
  const void** gradients;
  const void** input;
  const void** previous;  // the states that the steps started from
  int64_t* row;
  int64_t count;
};

// clears: where to zero the input gradients of inactive rows, `element` bytes each; or null.
void list_rows(const Call& call, const GradientDirection& x, const DirectionWork& work, const CellKernels& kernels,
    void* clears, int64_t element, RangeRows& rows) {
  const Shape& s = call.shape;
  const int64_t storage = storage_bytes(s.type), width = s.width() * storage;
  const Rows& entering = x.entering.data ? x.entering : x.output;
  const auto at = [&](const void* base, int64_t elements, int64_t size) {
    return static_cast<const char*>(base) + elements * size;
  };
  rows.count = 0;
  for (int64_t index = call.first_step; index < call.last_step; ++index) {
    const int64_t t = x.reverse ? index : call.first_step + call.last_step - 1 - index, here = call.batch_at(t);
    for (int64_t b = 0; b < here; ++b) {
      const int64_t row = call.row(t, b);
      if (!call.is_active(t, b)) {
        if (clears) std::memset(static_cast<char*>(clears) + row * s.input * element, 0, s.input * element);
        continue;
      }
      const Origin origin = call.origin(x.reverse, t, b);
      rows.row[rows.count] = row;
      rows.gradients[rows.count] =
          at(work.gradients, call.range_row(t, b) * work.columns.stride, kernels.operand_bytes);
      rows.input[rows.count] = at(x.input.data, call.offset(x.input, t, b), storage);
      rows.previous[rows.count] =
          origin == Origin::kStep ? at(entering.data, call.offset(entering, x.reverse ? t + 1 : t - 1, b), storage)
          : origin == Origin::kInitial && x.h0 ? at(x.entering.data ? x.h0_entering : x.h0, b * width, 1)
                                               : work.zeros;
      ++rows.count;
    }
  }
}

// The products that give one direction's parameter gradients.
std::vector<Outer> products_of(const CellFacts& cell, const Shape& s, const GradientColumns& columns,
    const RangeRows& rows, const Sums& sums, int64_t state) {
  const int64_t hidden = s.hidden, width = s.width();
  const auto at = [&](void* base, int64_t elements) -> void* {
    return base ? static_cast<char*>(base) + elements * state : nullptr;
  };
  const auto right = [&](const void* const* from, void* to, int64_t gate, int64_t size) {
    return OuterRight{to ? from : nullptr, false, 0, size, at(to, gate * hidden * size), size};
  };
  const auto input = [&](int64_t gate) { return right(rows.input, sums.weight_ih, gate, s.input); };
  const auto previous = [&](int64_t gate) { return right(rows.previous, sums.weight_hh, gate, width); };
  const auto inner = [&](void* to, int64_t gate) {
    OuterRight found = right(rows.gradients, to, gate, hidden);
    found.is_operand = true, found.offset = columns.inner;
    return found;
  };
  const auto bias_ih = [&](int64_t gate) { return at(sums.bias_ih, gate * hidden); };
  const auto bias_hh = [&](int64_t gate) { return at(sums.bias_hh, gate * hidden); };
  const void* const* left = rows.gradients;
  const auto gates = [&](int gate) { return columns.gates + gate * hidden; };
  // Gates before this one have the same gradient for input and recurrent part, so both products have the same left
  // rows.
  const int joint = cell.split_gate >= 0 ? cell.split_gate : cell.phase[0].gates, others = cell.gates - joint;
  std::vector<Outer> products{{left, gates(0), joint * hidden, {input(0), previous(0)}, {bias_ih(0), bias_hh(0)}}};
  if (cell.split_gate >= 0) {
    products.push_back({left, gates(joint), hidden, {input(joint), {}}, {bias_ih(joint), nullptr}});
    products.push_back({left, 0, hidden, {previous(joint), {}}, {bias_hh(joint), nullptr}});
  } else if (cell.second_gates()) {
    products.push_back({left, gates(joint), others * hidden, {input(joint), inner(sums.weight_hh, joint)},
        {bias_ih(joint), bias_hh(joint)}});
  } else if (s.projection) {
    products.push_back({left, columns.projected, s.projection, {inner(sums.weight_hr, 0), {}}, {}});
  }
  return products;
}

// The whole backward pass. Each direction goes through the ranges in its own order.
class BackwardPass {
 public:
  BackwardPass(const GradientArgs& args, std::vector<Range> ranges, const CellFacts& cell, const CellKernels& kernels)
      : args_(args), s_(args.shape), ranges_(std::move(ranges)), cell_(cell), kernels_(kernels),
        calls_(args.directions), work_(args.directions), rebuilding_(args.directions), sums_(args.directions),
        rows_(args.directions), products_(args.directions), inputs_(args.directions) {
    for (const Range& range : ranges_) most_rows_ = std::max(most_rows_, rows_of(s_, range));
  }

  void run() {
    prepare(team_, s_, args_.options, args_.directions, args_.threads, cell_, kernels_, false);
    want();
    arena_.allocate();
    begin();
    if (pack_ || (rebuild_ && !kernels_.output_is_operand && most_rows_))
      team([this](int index, int count) { pack(index, count); }, pack_ ? team_.threads : 1);
    for (size_t i = 0; i < ranges_.size(); ++i) back(i);
    finish();
  }

 private:
  const GradientArgs& args_;
  const Shape& s_;
  const std::vector<Range> ranges_;
  const CellFacts& cell_;
  const CellKernels& kernels_;
  const int64_t storage_ = storage_bytes(s_.type);
  int64_t most_rows_ = 0;
  bool pack_ = false, rebuild_ = false;
  Team team_;
  Arena arena_;
  // One of each for every direction.
  std::vector<Call> calls_;
  std::vector<DirectionWork> work_;
  std::vector<ForwardDirection> rebuilding_;
  std::vector<Sums> sums_;
  std::vector<RangeRows> rows_;
  std::vector<std::vector<Outer>> products_;
  std::vector<InputGradient> inputs_;
  // Forward and reverse directions share the input but are at different ranges, so their sum stays in the state type
  // until it is complete.
  bool shared_input_ = false;
  void* input_sums_ = nullptr;
  struct Buffers {
    void *left, *right;
  };
  std::vector<Scratch> scratch_;
  std::vector<Buffers> buffers_;

  template <class Body>
  static void team(const Body& body, int threads) {
    run_team(
        threads, [](void* context, int index, int count) { (*static_cast<const Body*>(context))(index, count); },
        const_cast<Body*>(&body));
  }

  // Calls function(sums, gradient, size) for each parameter of direction d.
  template <class Function>
  void for_each_parameter(int d, Function function) {
    const GradientDirection& x = args_.direction[d];
    Sums& sums = sums_[d];
    const int64_t gates = cell_.gates * s_.hidden;
    function(sums.weight_ih, x.d_weight_ih, gates * s_.input);
    function(sums.weight_hh, x.d_weight_hh, gates * s_.width());
    function(sums.weight_hr, x.d_weight_hr, s_.projection * s_.hidden);
    function(sums.bias_ih, x.d_bias_ih, gates);
    function(sums.bias_hh, x.d_bias_hh, gates);
    function(sums.weight_unit, x.d_weight_unit, cell_.unit_weights * s_.hidden);
  }

  void want() {
    const int64_t batch = s_.batch, width = s_.width(), state = kernels_.state_bytes;
    pack_ = most_rows_ && packs(s_.steps, batch);
    rebuild_ = cell_.saved > 0 && !args_.direction[0].gates.data;
    require(!rebuild_ || !args_.direction[0].weights.state_mask, "gates", "those that forward kept, with state_mask");
    const Chunk chunk = rebuild_ ? chunk_of(team_, kernels_, cell_, ranges_[0].last - ranges_[0].first) : Chunk{0, 0};
    for (int d = 0; d < args_.directions; ++d) {
      const GradientDirection& x = args_.direction[d];
      const Weights& w = x.weights;
      DirectionWork& work = work_[d];
      const int64_t second_row = cell_.phase[0].gates * s_.hidden;
      work.barrier = &team_.barriers[d];
      work.columns = columns_of(cell_, s_, kernels_);
      if (cell_.multiplies()) {
        work.first_transposed.source = transposed_source(w.hh, w.hh_stride, width, second_row);
        if (cell_.split_gate >= 0) work.first_transposed.source.first_k = cell_.split_gate * s_.hidden;
        want_packed(work.first_transposed);
      }
      if (cell_.two_phases()) {
        const char* second = static_cast<const char*>(w.hh) + second_row * w.hh_stride * storage_;
        work.second_transposed.source =
            s_.projection ? transposed_source(w.hr, w.hr_stride, s_.hidden, s_.projection)
                          : transposed_source(second, w.hh_stride, s_.hidden, cell_.phase[1].gates * s_.hidden);
        want_packed(work.second_transposed);
      }
      if (x.d_input) {
        work.input_transposed.source = transposed_source(w.ih, w.ih_stride, s_.input, cell_.gates * s_.hidden);
        want_packed(work.input_transposed);
      }
      const GradientDirection& other = args_.direction[0];
      if (!shared_input_ && x.d_input && x.d_input == other.d_input && x.reverse != other.reverse) {
        shared_input_ = true;
        if (ranges_.size() > 1 && state != storage_)
          arena_.want(input_sums_, rows_before(s_, s_.steps) * s_.input * state);
      }
      want_zeros(arena_, work, s_);
      arena_.want(work.gradients, most_rows_ * work.columns.stride * kernels_.operand_bytes);
      arena_.want(work.d_h, batch * width * state);
      if (cell_.cells) arena_.want(work.d_c, batch * cell_.cells * s_.hidden * state);
      if (cell_.unit_weights) arena_.want(work.d_unit, batch * cell_.unit_weights * s_.hidden * state);
      if (args_.options.reset_to_initial && s_.resets && x.d_h0) arena_.want(work.d_h0_reset, batch * width * state);
      if (args_.options.reset_to_initial && s_.resets && x.d_c0)
        arena_.want(work.d_c0_reset, batch * cell_.cells * s_.hidden * state);
      if (rebuild_) {
        want_forward(arena_, work, kernels_, s_, cell_, w, pack_, pack_ && packs_input(team_, chunk));
        arena_.want(work.rebuilt_gates, most_rows_ * cell_.saved * s_.hidden * storage_);
      }
      arena_.want(rows_[d].gradients, most_rows_ * sizeof(void*));
      arena_.want(rows_[d].input, most_rows_ * sizeof(void*));
      arena_.want(rows_[d].previous, most_rows_ * sizeof(void*));
      arena_.want(rows_[d].row, most_rows_ * sizeof(int64_t));
      for_each_parameter(d, [&](void*& sums, void* gradient, int64_t size) {
        if (gradient && state != storage_) arena_.want(sums, size * state);
        else sums = gradient;
      });
    }
    int64_t longest = 0;
    for (int64_t columns : {s_.input, width, s_.hidden}) longest = std::max(longest, columns);
    scratch_.resize(team_.product_threads), buffers_.resize(team_.product_threads);
    for (int i = 0; i < team_.product_threads; ++i) {
      want_scratch(arena_, scratch_[i], kernels_, team_, cell_, chunk);
      arena_.want(
          buffers_[i].left, kernels_.outer_left_bytes(most_rows_, std::max(cell_.gates * s_.hidden, s_.projection)));
      arena_.want(buffers_[i].right, kernels_.outer_right_bytes(most_rows_, longest));
    }
  }
  void want_packed(PackedMatrix& matrix) {
    if (pack_) arena_.want(matrix.panels, kernels_.plain_bytes(matrix.source));
  }

  void begin() {
    for (int d = 0; d < args_.directions; ++d) {
      const GradientDirection& x = args_.direction[d];
      DirectionWork& work = work_[d];
      const int64_t size = s_.batch * s_.width(), cells = s_.batch * cell_.cells * s_.hidden,
                    state = kernels_.state_bytes;
      const auto fill = [&](const void* from, void* to, int64_t elements) {
        if (from) kernels_.widen(from, to, elements);
        else if (to) std::memset(to, 0, elements * state);
      };
      clear_zeros(work, s_);
      fill(x.d_h_n, work.d_h, size);
      if (cell_.cells) fill(x.d_c_n, work.d_c, cells);
      fill(nullptr, work.d_h0_reset, size), fill(nullptr, work.d_c0_reset, cells);
      fill(nullptr, work.d_unit, s_.batch * cell_.unit_weights * s_.hidden);
      products_[d] = products_of(cell_, s_, work.columns, rows_[d], sums_[d], state);
      if (!rebuild_) continue;
      const int64_t stride = cell_.saved * s_.hidden;
      ForwardDirection& to = rebuilding_[d];
      to.reverse = x.reverse, to.weights = x.weights, to.input = x.input, to.output = x.output, to.cells = x.cells;
      to.h0 = x.h0, to.c0 = x.c0, to.gates = {work.rebuilt_gates, s_.batch * stride, stride};
    }
  }

  void pack(int index, int count) {
    for (int d = 0; d < args_.directions; ++d) {
      if (pack_) kernels_.pack_backward(work_[d], index, count);
      if (rebuild_) kernels_.pack_forward(team_.call, work_[d], args_.direction[d].h0, index, count);
    }
  }

  // Runs each direction backward over its `index`-th range, then the products over that range's rows.
  void back(size_t index) {
    const bool first = index == 0, last = index + 1 == ranges_.size();
    for (int d = 0; d < args_.directions; ++d) {
      const Range range = ranges_[args_.direction[d].reverse ? index : ranges_.size() - 1 - index];
      calls_[d] = team_.call;
      calls_[d].first_step = range.first, calls_[d].last_step = range.last;
      work_[d].wants_initial = !last || args_.direction[d].d_h0;
    }
    team(
        [this](int member, int count) {
          for_each_part(team_, member, count, [&](const Part& part) {
            const int d = part.direction;
            if (rebuild_) kernels_.forward(calls_[d], rebuilding_[d], work_[d], part, scratch_[member], true);
            kernels_.backward(calls_[d], args_.direction[d], work_[d], part, scratch_[member]);
          });
        },
        team_.threads);
    // Directions that share the input and are at the same range compute its gradient in one job, that of the first of
    // them. Of directions at different ranges the first to reach a range stores its part, and the second adds to it.
    const bool second = ranges_.size() != 2 * index + 1 && index >= ranges_.size() / 2;
    for (int d = 0; d < args_.directions; ++d) {
      int first = 0;
      while (!together(first, d)) ++first;
      const bool shared = shared_input_ && args_.direction[d].d_input == args_.direction[0].d_input,
                 again = shared && second;
      const bool is_state = shared && input_sums_;
      void* const to = first < d ? nullptr : is_state ? input_sums_ : args_.direction[d].d_input;
      list_rows(calls_[d], args_.direction[d], work_[d], kernels_, again ? nullptr : to,
          is_state ? kernels_.state_bytes : storage_, rows_[d]);
      inputs_[d] = {
          {}, rows_[d].row, rows_[d].count, rows_before(s_, calls_[d].first_step), s_.input, to, is_state, again};
      inputs_[first].work.push_back(&work_[d]);
    }
    team(
        [&](int member, int count) {
          for (int d = 0; d < args_.directions; ++d) {
            for (const Outer& product : products_[d])
              kernels_.outer(
                  product, rows_[d].count, first, member, count, buffers_[member].left, buffers_[member].right);
            if (inputs_[d].d_input) kernels_.input_gradient(inputs_[d], member, count, scratch_[member].tile);
          }
        },
        team_.product_threads);
  }

  // Whether two directions are at the same range and share the input.
  bool together(int a, int b) const {
    return a == b ||
           (args_.direction[a].d_input == args_.direction[b].d_input && calls_[a].first_step == calls_[b].first_step);
  }

  template <class T>
  static void sum_rows(const void* from, void* to, int64_t rows, int64_t columns) {
    std::memset(to, 0, columns * sizeof(T));
    for (int64_t row = 0; row < rows; ++row)
      for (int64_t i = 0; i < columns; ++i) static_cast<T*>(to)[i] += static_cast<const T*>(from)[row * columns + i];
  }

  // Rounds the gradients that were summed in the state type, and those of the initial states.
  void finish() {
    for (int d = 0; d < args_.directions; ++d) {
      const GradientDirection& x = args_.direction[d];
      const DirectionWork& work = work_[d];
      if (sums_[d].weight_unit)
        (kernels_.state_bytes == 8 ? sum_rows<double> : sum_rows<float>)(work.d_unit, sums_[d].weight_unit, s_.batch,
            cell_.unit_weights * s_.hidden);
      if (x.d_h0) kernels_.narrow(work.d_h, work.d_h0_reset, x.d_h0, s_.batch * s_.width());
      if (x.d_c0) kernels_.narrow(work.d_c, work.d_c0_reset, x.d_c0, s_.batch * cell_.cells * s_.hidden);
    }
    if (kernels_.state_bytes == storage_) return;
    team(
        [this](int index, int count) {
          const auto narrow = [&](void* sums, void* gradient, int64_t size) {
            if (!sums || !gradient) return;
            const int64_t begin = size * index / count, end = size * (index + 1) / count;
            kernels_.narrow(static_cast<char*>(sums) + begin * kernels_.state_bytes, nullptr,
                static_cast<char*>(gradient) + begin * storage_, end - begin);
          };
          for (int d = 0; d < args_.directions; ++d) for_each_parameter(d, narrow);
          narrow(input_sums_, args_.direction[0].d_input, rows_before(s_, s_.steps) * s_.input);
        },
        team_.threads);
  }
};

}  // namespace
}  // namespace cpu

void cpu_backward(const GradientArgs& args) {
  using namespace cpu;
  const CellFacts& cell = check(args);
  const Shape& s = args.shape;
  const bool rows = s.steps > 0 && s.batch > 0;
  const int64_t storage = storage_bytes(s.type), state = state_bytes(s.type);
  const CellKernels& kernels = choose_kernels(s.cell, s.type);
  int64_t row_bytes = 0;
  for (int d = 0; d < args.directions; ++d) {
    const GradientDirection& x = args.direction[d];
    check_address(x.cells.data, state, "cells", rows && cell.cells > 0);
    check_address(x.input.data, storage, "input", rows && s.input > 0);
    check_address(x.d_output.data, storage, "d_output", false);
    check_address(x.d_cells.data, state, "d_cells", false);
    for (const auto& [data, name] : {std::pair<const void*, const char*>{x.d_h_n, "d_h_n"}, {x.d_c_n, "d_c_n"},
             {x.d_input, "d_input"}, {x.d_h0, "d_h0"}, {x.d_c0, "d_c0"}, {x.d_weight_ih, "d_weight_ih"},
             {x.d_weight_hh, "d_weight_hh"}, {x.d_weight_hr, "d_weight_hr"}, {x.d_bias_ih, "d_bias_ih"},
             {x.d_bias_hh, "d_bias_hh"}, {x.d_weight_unit, "d_weight_unit"}})
      check_address(data, storage, name, false);
    require(cell.cells || (!x.d_c_n && !x.d_c0 && !x.d_cells.data), "d_c0", "null: the cell has one state");
    require(cell.unit_weights || !x.d_weight_unit, "d_weight_unit", "null: the cell has no weights of a unit");
    require(cell.multiplies() || (!x.d_weight_hh && !x.d_bias_hh), "d_weight_hh", "null: the cell has no weight_hh");
    require(s.projection || !x.d_weight_hr, "d_weight_hr", "null: the cell has no projection");
    for (int other = 1; other < d; ++other)
      require(!x.d_input || x.d_input == args.direction[0].d_input || x.d_input != args.direction[other].d_input ||
                  x.reverse == args.direction[other].reverse,
          "d_input", "shared by a forward and a reverse direction only if it is the first direction's");
    require(!x.gates.data == !args.direction[0].gates.data, "gates", "those of both directions or none");
    row_bytes += columns_of(cell, s, kernels).stride * kernels.operand_bytes +
                 (x.gates.data ? 0 : cell.saved * s.hidden * storage);
  }
  BackwardPass(args, cut(s, args.range_bytes / row_bytes), cell, kernels).run();
}

}  // namespace fr
