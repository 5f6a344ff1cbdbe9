// The CPU backend's entry points: checks the contract, chooses the instruction set and how threads share the work, allocates
// the call's scratch memory in one piece, and runs the team.
//
// Threads: directions first, then batch rows for the whole sequence (no barrier), and hidden units only where rows are few.
// The result never depends on the choice: every sum has one fixed order (product.h).
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "../cells/gru.h"
#include "../cells/lstm.h"
#include "../cells/rnn.h"
#include "backend.h"

namespace fr {
namespace cpu {
namespace {

// ---- instruction sets ----

struct InstructionSet {
  const char* name;
  bool (*available)();
  const Backend* (*find)(Cell, Type);
};

#if defined(FASTRNN_X86)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
bool has_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif

// Best first. One that does not serve a type leaves it to the next.
const InstructionSet kInstructionSets[] = {
#if defined(FASTRNN_X86)
    {"avx512_bf16", has_bf16, find_backend<Avx512BFloat16>},
    {"avx512", has_avx512, find_backend<Avx512>},
    {"avx2", has_avx2, find_backend<Avx2>},
#endif
    {"baseline", [] { return true; }, find_backend<Baseline>},
};
constexpr int kInstructionSetCount = sizeof kInstructionSets / sizeof kInstructionSets[0];

int best_instruction_set() {
  int index = 0;
  while (!kInstructionSets[index].available()) ++index;
  return index;
}
std::atomic<int> chosen_instruction_set{-1};  // -1: the best

int current_instruction_set() {
  static const int best = best_instruction_set();
  const int chosen = chosen_instruction_set.load(std::memory_order_relaxed);
  return chosen < 0 ? best : chosen;
}

const Backend& choose_backend(Cell cell, Type type) {
  for (int index = current_instruction_set();; ++index)
    if (const Backend* found = kInstructionSets[index].find(cell, type)) return *found;
}

// ---- what a cell needs ----

struct CellFacts {
  int gates, first_gates, states, saved, products;
  bool split_gate;
};

template <class CellType>
constexpr CellFacts facts() {
  return {CellType::kGates, CellType::kFirstGates, CellType::kStates, CellType::kSaved, CellType::kProducts,
          CellType::kSplitGate >= 0};
}

CellFacts facts_of(Cell cell) {
  switch (cell) {
#define FR_CELL(name, Type) \
  case Cell::name:          \
    return facts<Type>();
#include "../cells/cells.inc"
#undef FR_CELL
  }
  throw std::invalid_argument("cell: unknown code " + std::to_string(static_cast<int>(cell)));
}

// ---- the contract ----

void require(bool holds, const char* argument, const std::string& expected) {
  if (!holds) throw std::invalid_argument(std::string(argument) + ": expected " + expected);
}

int64_t bytes_of(Type type) { return type == Type::kFloat64 ? 8 : type == Type::kFloat32 ? 4 : 2; }

void check_address(const void* data, int64_t alignment, const char* argument, bool needed) {
  if (needed) require(data != nullptr, argument, "an address, got null");
  require(reinterpret_cast<uintptr_t>(data) % alignment == 0, argument,
          "an address aligned to " + std::to_string(alignment) + " bytes");
}

template <class Args>
CellFacts check(const Args& args) {
  const Shape& s = args.shape;
  const CellFacts cell = facts_of(s.cell);
  const int type = static_cast<int>(s.type);
  require(type >= 0 && type <= 3, "type", "a code from 0 to 3, got " + std::to_string(type));
  require(s.steps >= 0 && s.batch >= 0 && s.input >= 0 && s.hidden > 0 && s.projection >= 0, "shape",
          "sizes that are not negative and hidden > 0");
  require((s.cell == Cell::kLstmProjected) == (s.projection > 0), "projection",
          "a size above zero for the cell with projection and zero for all others, got " + std::to_string(s.projection));
  require(args.directions == 1 || args.directions == 2, "direction", "1 or 2 of them, got " + std::to_string(args.directions));
  require((s.batch_sizes == nullptr) == (s.step_offset == nullptr), "step_offset", "a value exactly where batch_sizes has one");
  const bool rows = s.steps > 0 && s.batch > 0;
  const int64_t storage = bytes_of(s.type), state = s.type == Type::kFloat64 ? 8 : 4;
  for (int d = 0; d < args.directions; ++d) {
    const auto& x = args.direction[d];
    check_address(x.weights.ih, storage, "weight_ih", rows && s.input > 0);
    check_address(x.weights.hh, storage, "weight_hh", rows);
    check_address(x.weights.hr, storage, "weight_hr", rows && s.projection > 0);
    require((x.weights.bias_ih == nullptr) == (x.weights.bias_hh == nullptr), "bias_hh", "a bias exactly where bias_ih has one");
    require(x.weights.ih_stride >= s.input && x.weights.hh_stride >= s.width() && (!s.projection || x.weights.hr_stride >= s.hidden),
            "weight strides", "rows that do not overlap");
    check_address(x.output.data, storage, "output", rows);
    check_address(x.cells.data, state, "cells", false);
    check_address(x.h0, storage, "h0", false);
    check_address(x.c0, state, "c0", false);
    check_address(x.gates.data, storage, "gates", false);
    require(x.output.row_stride >= s.width(), "output", "rows that do not overlap");
  }
  return cell;
}

// ---- memory: one piece a call ----

// Large pieces are kept, one for the process, and given to the next call: fresh pages from the system cost more than packing the
// weights into them (for ELMo's layer 19,000 faults in pages of 4 KiB, 44 ms of system time; about the same in huge pages, which
// the system must clear). MADV_FREE hands the kept pages back to the system whenever it runs short of memory.
class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (!piece_.data) return;
    if (kSmallest <= piece_.bytes && piece_.bytes <= kLargest) {
#if defined(__linux__) && defined(MADV_FREE)
      madvise(piece_.data, piece_.bytes, MADV_FREE);
#endif
      const std::lock_guard<std::mutex> lock(mutex_);
      if (kept_.bytes < piece_.bytes) std::swap(kept_, piece_);
    }
    std::free(piece_.data);
  }
  char* take(int64_t bytes) {
    if (bytes >= kSmallest) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (kept_.bytes >= bytes) std::swap(kept_, piece_);
    }
    if (!piece_.data) {
      const int64_t alignment = bytes < kSmallest ? 64 : kHugePage, rounded = (bytes + alignment - 1) / alignment * alignment;
      piece_ = {static_cast<char*>(std::aligned_alloc(alignment, rounded)), rounded};
      if (!piece_.data) throw std::bad_alloc();
#if defined(__linux__) && defined(MADV_HUGEPAGE)
      if (alignment == kHugePage) madvise(piece_.data, rounded, MADV_HUGEPAGE);  // fewer faults and misses of the TLB
#endif
    }
    return piece_.data;
  }

 private:
  static constexpr int64_t kHugePage = 2 << 20, kSmallest = 2 * kHugePage, kLargest = 512 << 20;
  struct Piece {
    char* data;
    int64_t bytes;
  };
  Piece piece_{};
  static inline Piece kept_{};
  static inline std::mutex mutex_;
};

class Arena {
 public:
  // Remembers that `to` shall point to `bytes` bytes once allocated.
  template <class Pointer>
  void want(Pointer*& to, int64_t bytes) {
    wants_.push_back({reinterpret_cast<void**>(&to), size_});
    size_ += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  void allocate() {
    char* memory = memory_.take(size_ + kAlignment);
    for (const auto& [to, offset] : wants_) *to = memory + offset;
  }

 private:
  static constexpr int64_t kAlignment = 64;
  std::vector<std::pair<void**, int64_t>> wants_;
  int64_t size_ = 0;
  Memory memory_;
};

// ---- sharing the work ----

// Fewer rows than this a thread, and it streams all the weights for too little arithmetic: then units are shared instead.
constexpr int64_t kRowsPerThread = 8;
// Recurrent weights beyond this lie far from the cores, and every thread with rows of its own reads them all at each step: until
// rows are many, sharing units, so that each reads only its share, is worth a barrier.
constexpr int64_t kNearWeightBytes = 8 << 20, kRowsPerThreadFar = 64;
// Multiply-adds below which another thread costs more than it saves: for the whole call, and for a step with a barrier.
constexpr int64_t kWorkPerThread = 1 << 17, kStepWorkPerThread = 1 << 14;
// The input product's result for a few steps should stay in L2.
constexpr int64_t kChunkBytes = 512 << 10;

struct Sharing {
  int directions;
  bool by_units;

  // Threads per direction when `count` run: two groups, one a direction, if that comes out even.
  int group(int count) const { return directions == 2 && count % 2 == 0 ? count / 2 : count; }
};

struct Team {
  Call call;
  Sharing sharing;
  int threads;
  std::vector<int64_t> active, work_before;  // [B], [B + 1]: sums of active over the rows before
  Barrier barriers[2];
};

// The parts of thread `index` of `count`: calls work(part) for each.
template <class Work>
void for_each_part(const Team& team, int index, int count, Work work) {
  const Sharing& sharing = team.sharing;
  const std::vector<int64_t>& work_before = team.work_before;
  const int64_t batch = team.call.shape.batch;
  const int group = sharing.group(count), member = index % group;
  const bool own_direction = group < count;
  // The row where the thread's share of the active steps begins.
  const auto boundary = [&](int share) -> int64_t {
    if (share == 0 || share == group) return share == 0 ? 0 : batch;
    const int64_t target = work_before[batch] * share / group;
    int64_t row = 0;
    while (row < batch && work_before[row] < target) ++row;
    return row;
  };
  for (int direction = own_direction ? index / group : 0; direction < (own_direction ? index / group + 1 : sharing.directions);
       ++direction) {
    if (sharing.by_units && group > 1) work(Part{direction, 0, batch, member, group});
    else work(Part{direction, boundary(member), boundary(member + 1), 0, 1});
  }
}

void prepare(Team& team, const Shape& shape, const Options& options, int64_t first_step, int64_t last_step, int directions,
             int threads, const CellFacts& cell, const Backend& backend) {
  const int lanes = backend.lanes;
  const int64_t batch = shape.batch;
  team.active.assign(batch, shape.steps);
  if (shape.batch_sizes) {
    int64_t rows = 0;
    for (int64_t t = 0; t < shape.steps; ++t) {
      const int64_t size = shape.batch_sizes[t];
      require(size >= 0 && size <= (t ? shape.batch_sizes[t - 1] : batch), "batch_sizes", "sizes from batch down, never rising");
      require(shape.step_offset[t] == rows, "step_offset", "the sums of the batch_sizes before");
      rows += size;
    }
    int64_t steps = shape.steps;
    for (int64_t b = 0; b < batch; ++b) {
      while (steps > 0 && shape.batch_sizes[steps - 1] <= b) --steps;
      team.active[b] = steps;
    }
  }
  team.work_before.assign(batch + 1, 0);
  for (int64_t b = 0; b < batch; ++b) {
    if (shape.lengths) {
      require(shape.lengths[b] >= 0, "lengths", "values that are not negative, got " + std::to_string(shape.lengths[b]));
      if (shape.lengths[b] < team.active[b]) team.active[b] = shape.lengths[b];
    }
    team.work_before[b + 1] = team.work_before[b] + team.active[b];
  }
  team.call = Call{shape, options, team.active.data(), first_step, last_step};

  const int64_t steps = last_step - first_step;
  const int64_t recurrent = cell.gates * shape.hidden * shape.width() + shape.projection * shape.hidden;
  const int64_t work = directions * batch * steps * (recurrent + cell.gates * shape.hidden * shape.input);
  int64_t wanted = work / kWorkPerThread + 1;
  if (wanted > threads) wanted = threads;
  if (wanted < 1) wanted = 1;
  team.sharing = {directions, false};
  int64_t group = team.sharing.group(static_cast<int>(wanted));
  const bool far = recurrent * backend.operand_bytes > kNearWeightBytes;
  if (group > 1 && (batch < (far ? kRowsPerThreadFar : kRowsPerThread) * group || steps == 1)) {
    const int64_t shares = (shape.hidden + 4 * lanes - 1) / (4 * lanes), by_work = batch * recurrent / kStepWorkPerThread;
    const int64_t most = shares < by_work ? shares : by_work;
    team.sharing.by_units = most > 1;
    if (most <= 1) wanted = directions == 2 && wanted >= 2 ? 2 : 1;
    else if (group > most) wanted = wanted > group ? 2 * most : most;
  }
  team.threads = static_cast<int>(wanted);
}

// Hidden units in a row of scratch, padded to whole panels of any width. The runtime may grant fewer threads than planned: one
// thread's part is then everything, so scratch is sized for that.
int64_t padded_units(const Shape& shape, int lanes) { return (shape.hidden + 4 * lanes - 1) / (4 * lanes) * 4 * lanes; }

MatrixSource source_of(const void* data, int64_t stride, int64_t gate_rows, const void* bias, int64_t units, int64_t depth) {
  return {data, stride, false, gate_rows, bias, units, depth};
}
MatrixSource transposed_source(const void* data, int64_t stride, int64_t units, int64_t depth) {
  return {data, stride, true, 0, nullptr, units, depth};
}

// Wants everything the forward pass of one direction needs.
void want_forward(Arena& arena, DirectionWork& work, const Backend& backend, const Shape& s, const CellFacts& cell,
                  const Weights& w, Type type, bool pack, bool pack_input) {
  const int64_t width = s.width(), second_row = cell.first_gates * s.hidden;
  const auto element = [&](const void* base, int64_t offset) -> const void* {
    return base ? static_cast<const char*>(base) + offset * bytes_of(type) : nullptr;
  };
  work.input.source = source_of(w.ih, w.ih_stride, s.hidden, w.bias_ih, s.hidden, s.input);
  work.first.source = source_of(w.hh, w.hh_stride, s.hidden, w.bias_hh, s.hidden, width);
  if (pack_input) arena.want(work.input.panels, backend.input_bytes(work.input.source));
  if (pack) arena.want(work.first.panels, backend.first_bytes(work.first.source));
  if (cell.products == 2) {
    work.second.source =
        s.projection ? source_of(w.hr, w.hr_stride, 0, nullptr, s.projection, s.hidden)
                     : source_of(element(w.hh, second_row * w.hh_stride), w.hh_stride, 0, element(w.bias_hh, second_row), s.hidden, s.hidden);
    if (pack) arena.want(work.second.panels, backend.plain_bytes(work.second.source));
    arena.want(work.inner, s.batch * s.hidden * backend.operand_bytes);
  }
  if (!backend.output_is_operand) {
    arena.want(work.operands, 2 * s.batch * width * backend.operand_bytes);
    arena.want(work.initial, s.batch * width * backend.operand_bytes);
  }
  if (cell.states == 2) arena.want(work.cell, s.batch * s.hidden * backend.state_bytes);
  arena.want(work.zeros, (s.hidden > width ? s.hidden : width) * 8);
}

// Weights that are used once are packed in cache, block by block, as they are used.
bool packs(int64_t steps, int64_t batch) { return steps > 1 || batch > kTileRows; }

struct Chunk {
  int64_t steps, rows;
};
Chunk chunk_of(const Team& team, const Backend& backend, const CellFacts& cell) {
  const int64_t rows = team.call.shape.batch;
  const int64_t row_bytes = cell.gates * padded_units(team.call.shape, backend.lanes) * backend.state_bytes;
  const int64_t range = team.call.last_step - team.call.first_step;
  // Weights that lie far from the cores are worth a longer way of the results: each chunk reads them once.
  const int64_t weights = cell.gates * team.call.shape.hidden * team.call.shape.input * backend.operand_bytes;
  int64_t steps = (weights > kNearWeightBytes ? weights : kChunkBytes) / (row_bytes * (rows ? rows : 1));
  if (steps > range) steps = range;
  if (steps < 1) steps = 1;
  return {steps, steps * rows};
}

// The input weights are used once where one chunk covers all steps and no other thread needs them for other rows.
bool packs_input(const Team& team, Chunk chunk) {
  const bool shared_rows = !team.sharing.by_units && team.sharing.group(team.threads) > 1;
  return shared_rows || chunk.steps < team.call.last_step - team.call.first_step;
}

void want_scratch(Arena& arena, Scratch& scratch, const Backend& backend, const Team& team, const CellFacts& cell, Chunk chunk) {
  const Shape& s = team.call.shape;
  arena.want(scratch.tile, backend.tile_bytes);
  arena.want(scratch.pointers, (4 * s.batch + chunk.rows) * sizeof(void*));
  arena.want(scratch.indices, 2 * s.batch * sizeof(int64_t));
  if (chunk.rows) {
    arena.want(scratch.gates, chunk.rows * cell.gates * padded_units(s, backend.lanes) * backend.state_bytes);
    if (!backend.output_is_operand) arena.want(scratch.converted, chunk.rows * s.input * backend.operand_bytes);
  }
  scratch.chunk_steps = chunk.steps;
}

}  // namespace
}  // namespace cpu

void cpu_forward(const ForwardArgs& args) {
  using namespace cpu;
  const CellFacts cell = check(args);
  const Shape& s = args.shape;
  const bool rows = s.steps > 0 && s.batch > 0;
  for (int d = 0; d < args.directions; ++d) {
    check_address(args.direction[d].input.data, bytes_of(s.type), "input", rows && s.input > 0);
    check_address(args.direction[d].h_n, bytes_of(s.type), "h_n", s.batch > 0);
    check_address(args.direction[d].c_n, 4, "c_n", s.batch > 0 && cell.states == 2);
  }
  const Backend& backend = choose_backend(s.cell, s.type);
  Team team;
  prepare(team, s, args.options, 0, s.steps, args.directions, args.threads, cell, backend);
  const bool pack = packs(s.steps, s.batch);

  Arena arena;
  DirectionWork work[2] = {};
  std::vector<Scratch> scratch(team.threads);
  const Chunk chunk = chunk_of(team, backend, cell);
  for (int d = 0; d < args.directions; ++d) {
    want_forward(arena, work[d], backend, s, cell, args.direction[d].weights, s.type, pack, pack && packs_input(team, chunk));
    work[d].barrier = &team.barriers[d];
  }
  for (Scratch& own : scratch) want_scratch(arena, own, backend, team, cell, chunk);
  arena.allocate();
  for (int d = 0; d < args.directions; ++d) std::memset(work[d].zeros, 0, (s.hidden > s.width() ? s.hidden : s.width()) * 8);

  struct Context {
    const ForwardArgs& args;
    const Backend& backend;
    const Team& team;
    const DirectionWork* work;
    const std::vector<Scratch>& scratch;
  } context{args, backend, team, work, scratch};
  const auto packing = [](void* opaque, int index, int count) {
    const Context& c = *static_cast<Context*>(opaque);
    for (int d = 0; d < c.args.directions; ++d)
      c.backend.pack_forward(c.team.call, c.work[d], c.args.direction[d].h0, index, count);
  };
  const auto running = [](void* opaque, int index, int count) {
    const Context& c = *static_cast<Context*>(opaque);
    for_each_part(c.team, index, count, [&](const Part& part) {
      c.backend.forward(c.team.call, c.args.direction[part.direction], c.work[part.direction], part, c.scratch[index], false);
    });
  };
  if (pack || !backend.output_is_operand) run_team(pack ? team.threads : 1, packing, &context);
  run_team(team.threads, running, &context);
}

void cpu_backward(const BackwardArgs& args) {
  using namespace cpu;
  const CellFacts cell = check(args);
  const Shape& s = args.shape;
  require(0 <= args.first_step && args.first_step <= args.last_step && args.last_step <= s.steps, "first_step, last_step",
          "a range within the steps");
  const bool rows = args.first_step < args.last_step && s.batch > 0;
  bool rebuild = false;
  for (int d = 0; d < args.directions; ++d) {
    const BackwardDirection& x = args.direction[d];
    const int64_t storage = bytes_of(s.type), state = s.type == Type::kFloat64 ? 8 : 4;
    check_address(x.d_h, state, "d_h", s.batch > 0);
    check_address(x.d_c, state, "d_c", s.batch > 0 && cell.states == 2);
    check_address(x.cells.data, state, "cells", rows && cell.states == 2);
    check_address(x.d_output.data, storage, "d_output", false);
    check_address(x.d_gates.data, storage, "d_gates", rows);
    check_address(x.d_recurrent.data, storage, "d_recurrent", rows && cell.split_gate);
    check_address(x.inner.data, storage, "inner", rows && cell.products == 2);
    check_address(x.d_projected.data, storage, "d_projected", rows && s.projection > 0);
    check_address(x.h_prev.data, storage, "h_prev", false);
    const bool missing = cell.saved > 0 && !x.gates.data;
    if (missing) check_address(x.input.data, storage, "input", rows && s.input > 0);
    rebuild = rebuild || missing;
  }
  if (!rows) return;
  const Backend& backend = choose_backend(s.cell, s.type);
  Team team;
  prepare(team, s, args.options, args.first_step, args.last_step, args.directions, args.threads, cell, backend);

  const bool pack = packs(args.last_step - args.first_step, s.batch);

  Arena arena;
  DirectionWork work[2] = {};
  ForwardDirection rebuilding[2] = {};
  std::vector<Scratch> scratch(team.threads);
  const Chunk chunk = rebuild ? chunk_of(team, backend, cell) : Chunk{0, 0};
  const int64_t range_rows =
      s.batch_sizes ? s.step_offset[args.last_step - 1] + s.batch_sizes[args.last_step - 1] - s.step_offset[args.first_step]
                    : (args.last_step - args.first_step) * s.batch;
  for (int d = 0; d < args.directions; ++d) {
    const BackwardDirection& x = args.direction[d];
    const Weights& w = x.weights;
    const int64_t second_row = cell.first_gates * s.hidden;
    work[d].barrier = &team.barriers[d];
    work[d].first_transposed.source = transposed_source(w.hh, w.hh_stride, s.width(), second_row);
    if (pack) arena.want(work[d].first_transposed.panels, backend.plain_bytes(work[d].first_transposed.source));
    if (cell.products == 2) {
      const char* second = static_cast<const char*>(w.hh) + second_row * w.hh_stride * bytes_of(s.type);
      work[d].second_transposed.source = s.projection ? transposed_source(w.hr, w.hr_stride, s.hidden, s.projection)
                                                      : transposed_source(second, w.hh_stride, s.hidden, s.hidden);
      if (pack) arena.want(work[d].second_transposed.panels, backend.plain_bytes(work[d].second_transposed.source));
    }
    if (!backend.gradient_is_operand) {
      arena.want(work[d].d_operands, 2 * s.batch * second_row * backend.operand_bytes);
      if (cell.products == 2)
        arena.want(work[d].d_second, s.batch * work[d].second_transposed.source.depth * backend.operand_bytes);
    }
    if (rebuild) {
      want_forward(arena, work[d], backend, s, cell, w, s.type, pack, pack && packs_input(team, chunk));
      arena.want(work[d].rebuilt_gates, range_rows * cell.saved * s.hidden * bytes_of(s.type));
    }
  }
  for (Scratch& own : scratch) want_scratch(arena, own, backend, team, cell, chunk);
  arena.allocate();
  for (int d = 0; d < args.directions && rebuild; ++d) {
    const BackwardDirection& x = args.direction[d];
    std::memset(work[d].zeros, 0, (s.hidden > s.width() ? s.hidden : s.width()) * 8);
    rebuilding[d].reverse = x.reverse, rebuilding[d].weights = x.weights, rebuilding[d].input = x.input;
    rebuilding[d].output = x.output, rebuilding[d].cells = x.cells, rebuilding[d].h0 = x.h0, rebuilding[d].c0 = x.c0;
    const int64_t gate_stride = cell.saved * s.hidden;
    rebuilding[d].gates = {work[d].rebuilt_gates, s.batch * gate_stride, gate_stride};
  }

  struct Context {
    const BackwardArgs& args;
    const ForwardDirection* rebuilding;
    const Backend& backend;
    const Team& team;
    const DirectionWork* work;
    const std::vector<Scratch>& scratch;
    bool rebuild;
  } context{args, rebuilding, backend, team, work, scratch, rebuild};
  const auto packing = [](void* opaque, int index, int count) {
    const Context& c = *static_cast<Context*>(opaque);
    for (int d = 0; d < c.args.directions; ++d) {
      c.backend.pack_backward(c.work[d], index, count);
      if (c.rebuild) c.backend.pack_forward(c.team.call, c.work[d], c.args.direction[d].h0, index, count);
    }
  };
  const auto running = [](void* opaque, int index, int count) {
    const Context& c = *static_cast<Context*>(opaque);
    for_each_part(c.team, index, count, [&](const Part& part) {
      const int d = part.direction;
      if (c.rebuild) c.backend.forward(c.team.call, c.rebuilding[d], c.work[d], part, c.scratch[index], true);
      c.backend.backward(c.team.call, c.args.direction[d], c.work[d], part, c.scratch[index]);
    });
  };
  if (pack || (rebuild && !backend.output_is_operand)) run_team(pack ? team.threads : 1, packing, &context);
  run_team(team.threads, running, &context);
}

std::string cpu_instruction_sets() {
  std::string names;
  for (const cpu::InstructionSet& set : cpu::kInstructionSets) names += (names.empty() ? "" : " ") + std::string(set.name);
  return names;
}

std::string cpu_chosen_instruction_set() { return cpu::kInstructionSets[cpu::current_instruction_set()].name; }

void cpu_choose_instruction_set(const std::string& name) {
  int found = -1;
  for (int index = 0; index < cpu::kInstructionSetCount; ++index)
    if (name == cpu::kInstructionSets[index].name) found = index;
  cpu::require(name.empty() || found >= 0, "instruction set", "one of: " + cpu_instruction_sets() + "; got " + name);
  cpu::require(found < 0 || cpu::kInstructionSets[found].available(), "instruction set", "one that this machine has, got " + name);
  cpu::chosen_instruction_set.store(found, std::memory_order_relaxed);
}

}  // namespace fr
