// Instruction sets, checks and the sharing of work: core.h.
#include "core.h"

#include <algorithm>
#include <atomic>
#if defined(FASTRNN_AVX2)
#include <cpuid.h>
#endif

#include "cross_entropy.h"
#include "layer_norm.h"

namespace fr {
namespace cpu {
namespace {

// ---- instruction sets ----

struct InstructionSet {
  const char* name;
  bool (*available)();
  const CellKernels* (*find)(Cell, Type);
  const CrossEntropyKernels* (*find_cross_entropy)(Type);
  const LayerNormKernels* (*find_layer_norm)(Type);
  const CellKernels* (*find_serving)(Cell, Form);
};

#if defined(FASTRNN_AVX2)
struct Processor {
  bool avx2, avx_vnni, avx512, avx512_vnni, avx512_bf16, avx512_amx;
};

// The extensions that the processor has and whose registers the operating system saves. Not __builtin_cpu_supports,
// which reads a table that zig's runtime library leaves empty (tools/wheel.sh); clang 14 does not know its f16c. Leaves
// and bits: Intel 64 and IA-32 manual, volume 2, "CPUID"; states in XCR0: volume 1, "XSAVE-Supported Features and
// State-Component Bitmaps".
Processor read_processor() {
  constexpr unsigned kYmm = 0x06, kZmm = 0xe6, k512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
  constexpr unsigned kAmx = 1u << 22 | 1u << 24 | 1u << 25, kTileStates = 3u << 17;  // bfloat16, tiles, bytes
  Processor found{};
  unsigned a, b, c, d, saved, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_OSXSAVE) || !(c & bit_FMA) || !(c & bit_F16C)) return found;
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
  found.avx2 = (b & bit_AVX2) && (saved & kYmm) == kYmm;
  found.avx512 = found.avx2 && (b & k512) == k512 && (saved & kZmm) == kZmm;
  found.avx512_vnni = found.avx512 && (c & bit_AVX512VNNI);
  const bool tiles = (d & kAmx) == kAmx && (saved & kTileStates) == kTileStates;
  if (a < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return found;
  found.avx_vnni = found.avx2 && (a & bit_AVXVNNI);
  found.avx512_bf16 = found.avx512 && (a & bit_AVX512BF16);
  found.avx512_amx = found.avx512_vnni && found.avx512_bf16 && tiles && Tiles::request();
  return found;
}

const Processor& processor() {
  static const Processor found = read_processor();
  return found;
}
#endif

#if defined(__aarch64__)
[[maybe_unused]] constexpr const char* kBaselineName = "neon";
#else
[[maybe_unused]] constexpr const char* kBaselineName = "baseline";
#endif

template <class Served, class... Of>
[[maybe_unused]] const Served* left_to_the_next(Of...) {
  return nullptr;
}

// Best first. What a set does not serve falls to the next one that the processor has. Layer normalisation is a small
// part of its steps and is not compiled for a third set. CMakeLists.txt decides which are compiled.
const InstructionSet kInstructionSets[] = {
#if defined(FASTRNN_AVX512_AMX)
    {"avx512_amx", [] { return processor().avx512_amx; }, find_kernels<Avx512Amx>,
        left_to_the_next<CrossEntropyKernels, Type>, left_to_the_next<LayerNormKernels, Type>, find_serving<Avx512Amx>},
#endif
#if defined(FASTRNN_AVX512_BF16)
    {"avx512_bf16", [] { return processor().avx512_bf16; }, find_kernels<Avx512BFloat16>,
        left_to_the_next<CrossEntropyKernels, Type>, left_to_the_next<LayerNormKernels, Type>,
        left_to_the_next<CellKernels, Cell, Form>},
#endif
#if defined(FASTRNN_AVX512_VNNI)
    {"avx512_vnni", [] { return processor().avx512_vnni; }, left_to_the_next<CellKernels, Cell, Type>,
        left_to_the_next<CrossEntropyKernels, Type>, left_to_the_next<LayerNormKernels, Type>,
        find_serving<Avx512Vnni>},
#endif
#if defined(FASTRNN_AVX512)
    {"avx512", [] { return processor().avx512; }, find_kernels<Avx512>, find_cross_entropy<Avx512>,
        left_to_the_next<LayerNormKernels, Type>, find_serving<Avx512>},
#endif
#if defined(FASTRNN_AVX_VNNI)
    {"avx_vnni", [] { return processor().avx_vnni; }, left_to_the_next<CellKernels, Cell, Type>,
        left_to_the_next<CrossEntropyKernels, Type>, left_to_the_next<LayerNormKernels, Type>, find_serving<AvxVnni>},
#endif
#if defined(FASTRNN_AVX2)
    {"avx2", [] { return processor().avx2; }, find_kernels<Avx2>, find_cross_entropy<Avx2>, find_layer_norm<Avx2>,
        find_serving<Avx2>},
#endif
#if !defined(FASTRNN_NO_BASELINE)
    {kBaselineName, [] { return true; }, find_kernels<Baseline>, find_cross_entropy<Baseline>,
        find_layer_norm<Baseline>, find_serving<Baseline>},
#endif
};
constexpr int kInstructionSetCount = sizeof kInstructionSets / sizeof kInstructionSets[0];

int best_instruction_set() {
  for (int index = 0; index < kInstructionSetCount; ++index)
    if (kInstructionSets[index].available()) return index;
  throw std::runtime_error("it has only kernels for " + cpu_instruction_sets() +
                           ", which this processor cannot run; FASTRNN_CPU=all builds it for any");
}
std::atomic<int> chosen_instruction_set{-1};  // -1: the best

int current_instruction_set() {
  static const int best = best_instruction_set();
  const int chosen = chosen_instruction_set.load(std::memory_order_relaxed);
  return chosen < 0 ? best : chosen;
}

}  // namespace

// What the set in use serves, or else the next one that the processor has; null if none does.
template <class Find, class... Of>
static auto first_found(Find InstructionSet::*find, Of... of) {
  for (int index = current_instruction_set(); index < kInstructionSetCount; ++index) {
    const InstructionSet& set = kInstructionSets[index];
    if (const auto* found = set.available() ? (set.*find)(of...) : nullptr) return found;
  }
  return decltype((kInstructionSets[0].*find)(of...)){};
}

const CellKernels& choose_kernels(Cell cell, Type type) { return *first_found(&InstructionSet::find, cell, type); }

const LayerNormKernels& choose_layer_norm(Type type) { return *first_found(&InstructionSet::find_layer_norm, type); }

const CellKernels& choose_serving(Cell cell, Form form) {
  if (form == Form::kFloat32) return choose_kernels(cell, Type::kFloat32);
  if (const CellKernels* found = first_found(&InstructionSet::find_serving, cell, form)) return *found;
  throw std::invalid_argument("form: expected float32, the one form of " + std::string(facts_of(cell).name));
}

const CrossEntropyKernels& choose_cross_entropy(Type type) {
  return *first_found(&InstructionSet::find_cross_entropy, type);
}

// ---- argument checks ----

void refuse(const char* argument, const std::string& expected) {
  throw std::invalid_argument(std::string(argument) + ": expected " + expected);
}

void check_address(const void* data, int64_t alignment, const char* argument, bool needed) {
  if (needed) require(data != nullptr, argument, "an address, got null");
  require(reinterpret_cast<uintptr_t>(data) % alignment == 0, argument,
      [&] { return "an address aligned to " + std::to_string(alignment) + " bytes"; });
}

// ---- sharing the work ----

namespace {

// With fewer rows a thread than this, each would stream all weights for too little arithmetic: units are split instead.
constexpr int64_t kRowsPerThread = 8;
// While the cores are busy, threads that meet at every step would wait for each other's turn on a core: rows are split
// down to this few, and the rest of the threads has nothing to do.
constexpr int64_t kRowsPerThreadBusy = 2;
// Below which rows a thread units are split if the recurrent weights exceed CellKernels::near_bytes.
constexpr int64_t kRowsPerThreadFar = 64;
// Multiply-adds below which another thread costs more than it saves: for a whole call; for a call of a single step of
// few rows; for a step with a barrier. Single steps, as in generation, come between other work: threads must be woken,
// and each has at best half of the weights in its own cache.
constexpr int64_t kWorkPerThread = 1 << 17, kSingleStepWorkPerThread = 1 << 18, kStepWorkPerThread = 3 << 13;
// The input product of a chunk of steps should stay in L2.
constexpr int64_t kChunkBytes = 512 << 10;

}  // namespace

void prepare(Team& team, const Shape& shape, const Options& options, int directions, int threads, const CellFacts& cell,
    const CellKernels& kernels, bool forward) {
  const int lanes = kernels.lanes;
  const int64_t batch = shape.batch;
  team.active.assign(batch, shape.steps);
  if (shape.batch_sizes) {
    int64_t rows = 0;
    for (int64_t t = 0; t < shape.steps; ++t) {
      const int64_t size = shape.batch_sizes[t];
      require(size >= 0 && size <= (t ? shape.batch_sizes[t - 1] : batch), "batch_sizes",
          "sizes from batch down, never rising");
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
      require(shape.lengths[b] >= 0, "lengths",
          [&] { return "values that are not negative, got " + std::to_string(shape.lengths[b]); });
      if (shape.lengths[b] < team.active[b]) team.active[b] = shape.lengths[b];
    }
    team.work_before[b + 1] = team.work_before[b] + team.active[b];
  }
  team.call = Call{shape, options, team.active.data(), 0, shape.steps};

  const int64_t recurrent =
      cell.multiplies() ? cell.gates * shape.hidden * shape.width() + shape.projection * shape.hidden : 0;
  const int64_t work = directions * batch * shape.steps * (recurrent + cell.gates * shape.hidden * shape.input);
  int64_t wanted = work / (forward && !packs(shape.steps, batch) ? kSingleStepWorkPerThread : kWorkPerThread) + 1;
  if (wanted > threads) wanted = threads;
  if (wanted < 1) wanted = 1;
  team.product_threads = static_cast<int>(wanted);
  team.sharing = {directions, false};
  team.barriers = std::make_unique<Barrier[]>(directions);
  int64_t group = team.sharing.group(static_cast<int>(wanted));
  const bool far = recurrent * kernels.operand_bytes > kernels.near_bytes;
  if (group > 1 && (batch < (far ? kRowsPerThreadFar : kRowsPerThread) * group || shape.steps == 1)) {
    const int64_t shares = (shape.hidden + 4 * lanes - 1) / (4 * lanes),
                  by_work = batch * recurrent / kStepWorkPerThread;
    // without a product there is no barrier
    int64_t most = cell.multiplies() ? std::min(shares, by_work) : shares;
    const bool rows_only = cell.multiplies() && shape.steps > 1 && cores_are_busy();
    if (rows_only) most = batch / kRowsPerThreadBusy;
    team.sharing.by_units = most > 1 && !rows_only;
    if (most <= 1) {  // then whole directions, the same number to each thread
      if (wanted > directions) wanted = directions;
      while (directions % wanted) --wanted;
    } else if (group > most) {
      wanted = wanted / group * most;
    }
  }
  team.threads = static_cast<int>(wanted);
}

// ---- packed weights and scratch ----

namespace {

// Hidden units in a row of scratch, padded to whole panels of any width. Scratch is sized for all units, because the
// runtime may grant fewer threads than planned, even only one.
int64_t padded_units(const Shape& shape, int lanes) { return (shape.hidden + 4 * lanes - 1) / (4 * lanes) * 4 * lanes; }

MatrixSource source_of(
    const void* data, int64_t stride, int64_t gate_rows, const void* bias, int64_t units, int64_t depth) {
  return {data, stride, false, gate_rows, bias, units, depth};
}

}  // namespace

MatrixSource transposed_source(const void* data, int64_t stride, int64_t units, int64_t depth) {
  return {data, stride, true, 0, nullptr, units, depth};
}

void set_sources(DirectionWork& work, const Shape& s, const CellFacts& cell, const Weights& w) {
  const int64_t second_row = cell.phase[0].gates * s.hidden;
  const auto element = [&](const void* base, int64_t offset) -> const void* {
    return base ? static_cast<const char*>(base) + offset * storage_bytes(s.type) : nullptr;
  };
  work.input.source =
      source_of(w.ih, w.ih_stride, w.ih_gate_rows ? w.ih_gate_rows : s.hidden, w.bias_ih, s.hidden, s.input);
  if (cell.multiplies()) work.first.source = source_of(w.hh, w.hh_stride, s.hidden, w.bias_hh, s.hidden, s.width());
  if (cell.two_phases())
    work.second.source = s.projection ? source_of(w.hr, w.hr_stride, 0, nullptr, s.projection, s.hidden)
                                      : source_of(element(w.hh, second_row * w.hh_stride), w.hh_stride, s.hidden,
                                            element(w.bias_hh, second_row), s.hidden, s.hidden);
}

int64_t place_panels(DirectionWork& work, const CellKernels& kernels, const CellFacts& cell, void* first) {
  char* next = static_cast<char*>(first);
  const auto place = [&](PackedMatrix& matrix, int64_t bytes) { matrix.panels = next, next += (bytes + 63) / 64 * 64; };
  place(work.input, kernels.input_bytes(work.input.source));
  if (cell.multiplies()) place(work.first, kernels.first_bytes(work.first.source));
  if (cell.two_phases()) place(work.second, kernels.second_bytes(work.second.source));
  return next - static_cast<char*>(first);
}

bool packs(int64_t steps, int64_t batch) { return steps > 1 || batch > kTileRows; }

void want_forward(Arena& arena, DirectionWork& work, const CellKernels& kernels, const Shape& s, const CellFacts& cell,
    const Weights& w, bool pack, bool pack_input) {
  const int64_t width = s.width();
  set_sources(work, s, cell, w);
  if (w.prepared) {
    place_panels(work, kernels, cell, static_cast<Prepared*>(const_cast<void*>(w.prepared)) + 1);
  } else {
    if (pack_input) arena.want(work.input.panels, kernels.input_bytes(work.input.source));
    if (pack && cell.multiplies()) arena.want(work.first.panels, kernels.first_bytes(work.first.source));
    if (pack && cell.two_phases()) arena.want(work.second.panels, kernels.second_bytes(work.second.source));
  }
  if (cell.two_phases()) arena.want(work.inner, s.batch * s.hidden * kernels.operand_bytes);
  if (!kernels.output_is_operand) {
    arena.want(work.operands, 2 * s.batch * width * kernels.operand_bytes);
    arena.want(work.initial, s.batch * width * kernels.operand_bytes);
  }
  if (w.state_mask && cell.multiplies()) {
    arena.want(work.entering, 2 * s.batch * width * kernels.operand_bytes);
    arena.want(work.entering_initial, s.batch * width * kernels.operand_bytes);
  }
  if (cell.cells) arena.want(work.cell, s.batch * cell.cells * s.hidden * kernels.state_bytes);
}

namespace {
int64_t zeros_bytes(const Shape& s) { return std::max(s.width(), std::max(facts_of(s.cell).cells, 1) * s.hidden) * 8; }
}  // namespace

void want_zeros(Arena& arena, DirectionWork& work, const Shape& s) { arena.want(work.zeros, zeros_bytes(s)); }
void clear_zeros(const DirectionWork& work, const Shape& s) { std::memset(work.zeros, 0, zeros_bytes(s)); }

Chunk chunk_of(const Team& team, const CellKernels& kernels, const CellFacts& cell, int64_t most) {
  const int64_t rows = team.call.shape.batch;
  const int64_t row_bytes = cell.gates * padded_units(team.call.shape, kernels.lanes) * kernels.state_bytes;
  // Each chunk reads the weights once. If they do not stay in a core's caches, larger chunks pay, although their
  // results leave L2.
  const int64_t weights = cell.gates * team.call.shape.hidden * team.call.shape.input * kernels.operand_bytes;
  int64_t steps = (weights > kernels.near_bytes ? weights : kChunkBytes) / (row_bytes * (rows ? rows : 1));
  if (steps > most) steps = most;
  if (steps < 1) steps = 1;
  return {steps, steps * rows};
}

bool packs_input(const Team& team, Chunk chunk) {
  const bool shared_rows = !team.sharing.by_units && team.sharing.group(team.threads) > 1;
  return shared_rows || chunk.steps < team.call.shape.steps;
}

void want_scratch(
    Arena& arena, Scratch& scratch, const CellKernels& kernels, const Team& team, const CellFacts& cell, Chunk chunk) {
  const Shape& s = team.call.shape;
  arena.want(scratch.tile, kernels.tile_bytes);
  arena.want(scratch.pointers, (4 * s.batch + chunk.rows) * sizeof(void*));
  arena.want(scratch.indices, 2 * s.batch * sizeof(int64_t));
  if (chunk.rows) {
    arena.want(scratch.gates, chunk.rows * cell.gates * padded_units(s, kernels.lanes) * kernels.state_bytes);
    if (const int64_t bytes = kernels.quantised_bytes(s, chunk.rows)) arena.want(scratch.quantised, bytes);
    if (!kernels.output_is_operand) arena.want(scratch.converted, chunk.rows * s.input * kernels.operand_bytes);
  }
  scratch.chunk_steps = chunk.steps;
}

}  // namespace cpu

std::string cpu_instruction_sets() {
  std::string names;
  for (const cpu::InstructionSet& set : cpu::kInstructionSets)
    names += (names.empty() ? "" : " ") + std::string(set.name);
  return names;
}

std::string cpu_chosen_instruction_set() { return cpu::kInstructionSets[cpu::current_instruction_set()].name; }

void cpu_choose_instruction_set(const std::string& name) {
  int found = -1;
  for (int index = 0; index < cpu::kInstructionSetCount; ++index)
    if (name == cpu::kInstructionSets[index].name) found = index;
  cpu::require(name.empty() || found >= 0, "instruction set",
      [&] { return "one of: " + cpu_instruction_sets() + "; got " + name; });
  cpu::require(found < 0 || cpu::kInstructionSets[found].available(), "instruction set",
      [&] { return "one that this machine has, got " + name; });
  cpu::chosen_instruction_set.store(found, std::memory_order_relaxed);
}

}  // namespace fr
