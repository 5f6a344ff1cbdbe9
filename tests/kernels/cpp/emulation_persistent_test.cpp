// The persistent kernels on the emulated device (see emulation_cases.h): weights in registers, in shared memory and
// streamed, several bands of rows, groups of unequal size, more blocks than rows, blocks without units; and the
// properties of the partition.
// usage: emulation_persistent_test [partition] [races: for ThreadSanitizer, results are not compared] [timeout: a
// block stalls]
//        [a device's name] [share=N: every Nth of a device's cases, from a different one for each device] [part of a
//        case's name] [seed ...]
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <set>
#include <tuple>

#include "../../../csrc/cuda/persistent/timeout.h"
#include "../../../csrc/cuda/persistent/partition.h"
#include "emulation_cases.h"

namespace {

struct Device {
  const char* name;
  const char* strategy;
  int sms, warps, register_slices;
  int64_t resident_shared;
  bool in_sequence = false;  // directions run in sequence
};
constexpr int64_t kAll = INT64_MAX;
const Device kDevices[] = {
    {"registers", "grid", 12, 2, 8, kAll},
    {"one_warp", "grid", 20, 1, 2, kAll},
    {"shared", "grid", 12, 2, 1, kAll},
    {"only_shared", "grid", 12, 2, 0, kAll, true},
    {"streamed", "streaming", 12, 2, 1, 4 * 1024},
    {"only_streamed", "streaming", 12, 2, 0, 0},
    {"four_warps", "grid", 6, 4, 1, kAll},
    {"partial_streamed", "streaming", 12, 2, 8, 0},
    {"cluster", "cluster", 16, 2, 1, kAll},
    {"cluster_of_one", "cluster", 12, 8, 8, kAll},
    {"cluster_of_sixteen", "cluster", 20, 1, 8, kAll},
};

// Whether an earlier cell has the same facts. The two then differ only in formulas, which emulation_step_test covers.
bool is_like_another(const fr::CellFacts& facts) {
  for (const fr::CellFacts* other = fr::kCells; other != &facts; ++other) {
    const auto numbers = [](const fr::CellFacts& c) {
      return std::tuple(c.gates, c.cells, c.saved, c.unit_weights, c.split_gate, c.reads_hidden, c.reads_output,
          c.phases, c.projects(), c.phase[0].gates);
    };
    if (numbers(*other) == numbers(facts)) return true;
  }
  return false;
}

// Whether a persistent kernel holds the cell's weights on the chip. IndRNN has none; persistent/projected.cuh runs
// only the plain projected LSTM.
bool is_served(const fr::CellFacts& facts) {
  return facts.multiplies() && (!facts.projects() || facts.code == Cell::kLstmProjected);
}

std::vector<Case> make_cases() {
  std::vector<Case> cases;
  for (const fr::CellFacts& facts : fr::kCells) {
    if (!is_served(facts) || is_like_another(facts)) continue;
    const Cell cell = facts.code;
    const size_t first = cases.size();
    Case c;  // three slices of the state: a round without work for some warps; three bands of rows in unequal groups
    c.cell = cell, c.type = Type::kBFloat16, c.steps = 3, c.batch = 37, c.hidden = 136;
    c.projection = facts.projects() ? 72 : 0;
    c.lengths = c.resets = true;
    cases.push_back(c);
    // more blocks than rows
    c.batch = 1, c.first_reverse = true, c.lengths = c.resets = false, c.type = Type::kFloat16;
    cases.push_back(c);
    c.batch = 9, c.hidden = 40, c.projection = facts.projects() ? 24 : 0, c.directions = 2, c.first_reverse = false;
    c.type = Type::kFloat32, c.tf32 = true, c.range = 2, c.resets = c.to_initial = true;
    cases.push_back(c);
    c.packed = c.noise = true, c.range = 0, c.batch = 20, c.type = Type::kBFloat16, c.tf32 = false, c.hidden = 72;
    cases.push_back(c);
    if (facts.gates == 3) {
      c.batch = 3, c.hidden = 68;  // backward: rows of weights end in the middle of 16 bytes; forward does not stream
                                   // such rows
      cases.push_back(c);
    }
    if (facts.projects()) {
      Case d;
      d.cell = cell, d.type = Type::kBFloat16, d.steps = 3, d.packed = d.resets = true, d.directions = 2;
      // more bands than have partial sums in memory at once
      d.batch = 101, d.hidden = 136, d.projection = 72, d.cell_clip = 0.6, d.proj_clip = 0.4;
      cases.push_back(d);
      // all rows misaligned
      d.packed = false, d.lengths = true, d.directions = 1, d.batch = 5, d.hidden = 33, d.projection = 147;
      cases.push_back(d);
    }
    // Whole slices, which fit the registers of two warps: with 19 rows also in backward, which then has one tile of
    // units; with 192 units the first warp has a slice more.
    for (const auto& [batch, hidden] : {std::pair(37, 128), std::pair(19, 128), std::pair(19, 192)}) {
      Case d;
      d.cell = cell, d.type = Type::kBFloat16, d.steps = 3, d.batch = batch, d.hidden = hidden;
      d.projection = facts.projects() ? 128 : 0;
      d.lengths = d.resets = true;
      if (batch == 37 || cell == Cell::kGru) cases.push_back(d);
    }
    if (cell == Cell::kLstm || cell == Cell::kGruResetBefore) {
      c.batch = 70, c.hidden = 136;  // five bands in flight together
      cases.push_back(c);
    }
    if (cell == Cell::kLstm || cell == Cell::kLstmProjected) {
      Case d;  // directions that do not fit together
      d.cell = cell, d.type = Type::kBFloat16, d.steps = 3, d.batch = 20, d.hidden = 200, d.directions = 2,
      d.lengths = d.resets = d.noise = true;
      d.projection = facts.projects() ? 72 : 0;
      cases.push_back(d);
    }
    // Without tensor cores: 8 units a warp, tiles of 4 rows. Four slices of the state, the last of 4 elements.
    c = Case{};
    c.cell = cell, c.type = Type::kFloat32, c.steps = 3, c.batch = 37, c.hidden = 100;
    c.projection = facts.projects() ? 68 : 0;
    c.lengths = c.resets = true;
    cases.push_back(c);
    c.batch = 1, c.hidden = 36, c.projection = facts.projects() ? 20 : 0, c.lengths = c.resets = false,
    c.first_reverse = true;
    cases.push_back(c);
    c.batch = 9, c.hidden = 40, c.first_reverse = false, c.directions = 2, c.range = 2, c.resets = c.to_initial = true;
    cases.push_back(c);
    c.packed = true, c.range = 0, c.batch = 20, c.hidden = 35;  // rows that are not 16-byte aligned: forward streams
                                                                // none
    cases.push_back(c);
    // Products and exchange are as in the other cells: a few cases, for the unit weights.
    if (facts.unit_weights > 0 || facts.cells > 1) cases.erase(cases.begin() + first + 2, cases.end() - 1);
  }
  return cases;
}

std::set<int> g_cluster_sizes;  // of the cases that ran

void choose_device(const Device& one) {
  g_options.strategy = one.strategy;
  g_options.limits.sms = one.sms, g_options.limits.warps = one.warps,
  g_options.limits.register_slices = one.register_slices;
  g_options.limits.resident_shared = one.resident_shared, g_options.limits.in_sequence = one.in_sequence;
  g_options.limits.shared_per_block = 227 * 1024;
}

void promise(bool holds, const std::string& what) {
  ++g_cases;
  if (holds) return;
  ++g_failures;
  std::printf("FAIL partition: %s\n", what.c_str());
}

// Fails if the partition refuses the case, which would silently run in step. Returns false where a refusal is allowed:
// the projected cell in a cluster.
bool check_it_runs(const Case& c, const Device& device) {
  for (const bool backward : {false, true}) {
    fr::PersistentRequest request{c.cell, c.type, c.tf32, c.batch, c.hidden, c.projection, c.directions, backward};
    fr::PersistentLimits limits = g_options.limits;
    limits.streaming = g_options.strategy == "streaming";
    if (g_options.strategy != "cluster") limits.max_cluster = 0;
    else if (c.projection > 0) return false;
    const fr::PersistentPartition p = fr::persistent_partition(request, limits);
    // its gate weights are not streamed
    if (c.projection > 0 && !backward && device.resident_shared < kAll && !p.refusal.empty()) return false;
    promise(p.refusal.empty(), c.text() + " on " + device.name + " is refused: " + p.refusal);
    if (p.cluster) g_cluster_sizes.insert(p.blocks);
    else if (c.hidden == 200) promise(p.directions == 1, c.text() + " on " + device.name + ": both directions fit");
    const fr::PhasePartition& phase = p.phase[0];
    if (backward && std::strcmp(device.name, "registers") == 0 && c.cell == Cell::kLstm && c.batch == 37)
      promise(phase.tiles == 2, c.text() + ": one tile of units a warp");
    if ((phase.rounds - 1) * phase.round_bytes() > device.resident_shared)
      promise(p.streamed_bytes > 0, c.text() + ": no streamed weights");
    if (phase.rounds > 1 && device.resident_shared == kAll && device.register_slices < 2)
      promise(phase.shared_rounds > 0, c.text() + ": no weights in shared memory");
  }
  return true;
}

// Checks for the limits of known cards that the partition fits the device and covers all units and rows, and that what
// decides the order of sums does not depend on the batch.
void check_partitions() {
  const std::pair<int, int64_t> cards[] = {{108, 163 * 1024}, {132, 227 * 1024}, {142, 99 * 1024}};
  for (const auto& [sms, shared] : cards)
    for (const fr::CellFacts& facts : fr::kCells)
      for (const int64_t hidden : {1, 100, 128, 512, 768, 1024, 1500, 2048, 4096}) {
        if (is_like_another(facts)) continue;
        if (!is_served(facts)) {
          fr::PersistentLimits limits;
          limits.sms = sms, limits.shared_per_block = shared, limits.streaming = true;
          const fr::PersistentRequest request{
              facts.code, Type::kBFloat16, false, 8, hidden, facts.projects() ? hidden : 0, 1, false};
          promise(
              !fr::persistent_partition(request, limits).refusal.empty(), std::string(facts.name) + " is not refused");
          continue;
        }
        for (const fr::Math math : {fr::Math::kBFloat16, fr::Math::kTf32, fr::Math::kFloat32})
          for (const bool backward : {false, true})
            for (const int directions : {1, 2}) {
              // 8 warps have 64 units at most
              if (math == fr::Math::kFloat32 && hidden * directions > 64 * sms) continue;
              fr::PersistentPartition first;
              for (const int64_t batch : {1, 8, 20, 64, 256, 1000}) {
                const Type type = math == fr::Math::kBFloat16 ? Type::kBFloat16 : Type::kFloat32;
                fr::PersistentRequest request{
                    facts.code, type, math == fr::Math::kTf32, batch, hidden, 0, directions, backward};
                if (facts.projects()) request.projection = std::max<int64_t>(1, hidden / 8);
                fr::PersistentLimits limits;
                limits.sms = sms, limits.shared_per_block = shared, limits.streaming = true;
                const fr::PersistentPartition p = fr::persistent_partition(request, limits);
                const std::string name = std::string(facts.name) + " H" + std::to_string(hidden) + " B" +
                                         std::to_string(batch) + " math " + std::to_string(int(math)) +
                                         (backward ? " backward" : "") + " D" + std::to_string(directions) + " SMs " +
                                         std::to_string(sms);
                if (batch == 1) first = p;
                promise(
                    p.directions == first.directions, name + ": whether directions run together depends on the batch");
                // The projected cell's gates must fit; on the largest card in 16 bit they do.
                if (facts.projects() && !backward && (shared < 227 * 1024 || math != fr::Math::kBFloat16) &&
                    !p.refusal.empty())
                  continue;
                promise(p.refusal.empty(), name + ": " + p.refusal);
                promise(p.shared_bytes <= shared, name + ": shared memory");
                promise(p.blocks * p.groups * p.directions <= sms, name + ": more blocks than SMs");
                const int64_t row_tile = fr::persistent_row_tile(math != fr::Math::kFloat32);
                promise(p.phase[0].tiles == 1 || (p.streamed_bytes == 0 && p.rows_per_group >= row_tile),
                    name + ": two tiles, and no room for them");
                promise(
                    p.groups * p.rows_per_group >= batch && (p.groups - 1) * p.rows_per_group < batch, name + ": rows");
                if (p.slots > 0) {
                  promise(p.blocks == first.blocks && p.phase[backward].unit_warps == first.phase[backward].unit_warps,
                      name + ": the order of sums depends on the batch");
                  promise(p.sums_bytes <=
                              fr::persistent_sums_bytes(facts.code, batch, hidden, request.projection, directions),
                      name + ": partial sums");
                }
                for (int i = 0; i < p.phases; ++i) {
                  const fr::PhasePartition& phase = p.phase[i];
                  if (phase.partial) {
                    const int64_t depth =
                        p.phase[1 - i].block_units() * (backward ? 4 : 1) * (math == fr::Math::kBFloat16 ? 2 : 4);
                    promise(phase.slices * fr::kPersistentSlice >= depth, name + ": own depth");
                    promise(phase.rounds / phase.slices * phase.block_units() >= phase.units, name + ": results");
                    continue;
                  }
                  promise(p.blocks * phase.block_units() >= phase.units, name + ": units");
                  promise(phase.rounds * phase.depth_warps >= phase.slices, name + ": depth");
                  promise(phase.unit_warps * phase.depth_warps == p.warps, name + ": warps");
                  promise(phase.depth_warps == first.phase[i].depth_warps,
                      name + ": the order of sums depends on the batch");
                }
              }
            }
      }
}

// The same for clusters, and that rows run in as few waves as the device allows.
void check_clusters() {
  for (const fr::CellFacts& facts : fr::kCells)
    for (const int64_t hidden : {1, 100, 128, 200, 512, 600, 768, 1024})
      for (const bool tf32 : {false, true})
        for (const bool backward : {false, true})
          for (const int directions : {1, 2})
            for (const int most : {1, 8, 16}) {
              fr::PersistentPartition first;
              for (const int64_t batch : {1, 8, 20, 64, 256, 1000}) {
                const fr::PersistentRequest request{
                    facts.code, tf32 ? Type::kFloat32 : Type::kBFloat16, tf32, batch, hidden, 0, directions, backward};
                fr::PersistentLimits limits;
                limits.sms = 132, limits.shared_per_block = 227 * 1024, limits.max_cluster = most;
                limits.resident_clusters[3] = 15, limits.resident_clusters[4] = 6;
                const fr::PersistentPartition p = fr::persistent_partition(request, limits);
                const std::string name = "cluster of " + std::to_string(most) + " " + facts.name + " H" +
                                         std::to_string(hidden) + " B" + std::to_string(batch) + (tf32 ? " tf32" : "") +
                                         (backward ? " backward" : "");
                if (batch == 1) first = p;
                promise(p.refusal == first.refusal, name + ": refused for some batches: " + p.refusal);
                if (!p.refusal.empty()) continue;
                promise(p.blocks <= most && (p.blocks & (p.blocks - 1)) == 0, name + ": size");
                promise(p.blocks <= 8 || fr::detail::partition_with(1, request,
                                             [&] {
                                               limits.max_cluster = 8;
                                               return limits;
                                             }())
                                                 .refusal != "",
                    name + ": 8 would do");
                promise(p.blocks == first.blocks, name + ": the size depends on the batch");
                promise(p.rows_per_group <= fr::kPersistentBand, name + ": rows of a cluster");
                promise(
                    p.groups * p.rows_per_group >= batch && (p.groups - 1) * p.rows_per_group < batch, name + ": rows");
                const int64_t resident = p.blocks == 16 ? 6 : p.blocks == 8 ? 15 : 132 / p.blocks;
                promise(p.rows_per_group == 16 || p.groups * directions <= resident,
                    name + ": a wave for the sake of fewer rows");
                promise(p.shared_bytes <= limits.shared_per_block, name + ": shared memory");
                for (int i = 0; i < p.phases; ++i) {
                  promise(p.blocks * p.phase[i].block_units() >= p.phase[i].units, name + ": units");
                  promise(p.phase[i].depth_warps == first.phase[i].depth_warps,
                      name + ": the order of sums depends on the batch");
                  for (const int64_t place : p.operand_at[i])
                    promise(place >= p.ring_offset &&
                                place + p.phase[i].slices * 16 * fr::kPersistentSlice <= p.partial_offset,
                        name + ": operand");
                }
              }
            }
}

// A launch has at most kMostBlocksY groups. More rows are refused, not cut off.
void check_most_groups() {
  const int64_t most = int64_t{fr::kMostBlocksY} * fr::kPersistentBand;
  for (const int64_t batch : {most, most + 1}) {
    fr::PersistentLimits limits;
    limits.sms = 132, limits.shared_per_block = 227 * 1024, limits.max_cluster = 8;
    const fr::PersistentPartition p =
        fr::persistent_partition({Cell::kGruResetBefore, Type::kBFloat16, false, batch, 64, 0, 1, false}, limits);
    promise(p.refusal.empty() == (batch == most), "groups of " + std::to_string(batch) + " rows: " + p.refusal);
  }
}

// ---- timeouts
// --------------------------------------------------------------------------------------------------------
// Every number is either NaN or the one that comes without a timeout.
void nan_or_right(const Values& got, const Values& want, const std::string& what) {
  int64_t wrong = 0;
  for (size_t i = 0; i < got.size(); ++i) wrong += !std::isnan(got[i]) && got[i] != want[i];
  promise(
      wrong == 0, what + ": " + std::to_string(wrong) + " of " + std::to_string(got.size()) + " neither NaN nor right");
}

// Checks that the final state of direction d is NaN in the rows of `group` only.
void nan_in_group(
    const Values& state, const Case& c, int64_t width, int64_t rows_per_group, int group, const std::string& what) {
  for (int64_t b = 0; b < c.batch; ++b)
    for (int64_t j = 0; j < width; ++j)
      if (std::isnan(state[b * width + j]) != (b / rows_per_group == group)) {
        return promise(false, what + ": row " + std::to_string(b) + ", unit " + std::to_string(j));
      }
}

// In one pass block (x, group, direction) stalls after a number of publications.
void run_timeout(const Case& c, const Device& device, Pass pass, int after, bool last, uint64_t seed) {
  const bool backward = pass == Pass::kBackward;
  fr::PersistentLimits limits = g_options.limits;
  limits.streaming = g_options.strategy == "streaming", limits.max_cluster = 0;
  const fr::PersistentPartition p = fr::persistent_partition(
      {c.cell, c.type, c.tf32, c.batch, c.hidden, c.projection, c.directions, backward}, limits);
  const std::string what = c.text() + (backward ? " backward" : " forward") + " on " + device.name + ", block " +
                           (last ? "last" : "0") + " stands still after " + std::to_string(after) + " seed " +
                           std::to_string(seed);
  if (!p.refusal.empty() && c.projection > 0) return;  // forward's first product is not streamed: the call runs in step
  if (p.streamed_bytes > 0 && c.projection % 8 != 0)
    return;  // rows that are not 16-byte aligned are not streamed
             // either
  promise(p.refusal.empty(), what + ": " + p.refusal);
  if (!p.refusal.empty() || p.blocks == 1) return;  // a single block waits for no other
  unsigned long long status = 0;
  Problem problem = make_problem(c, 7);
  g_unwritten = 0x3C;
  g_stalled = pass;
  g_options.stall_after = -1;
  const std::vector<Got> want = run_kernels(problem, seed);
  g_options.status = &status, g_options.timeout_ns = 10'000'000'000ull;
  g_options.stall_after = after;
  g_options.stalled =
      last ? fr::emulation::Dim{p.blocks - 1, p.groups - 1, p.directions - 1} : fr::emulation::Dim{0, 0, 0};
  const fr::emulation::Dim stalled = g_options.stalled;
  const bool in_sequence =
      p.directions < c.directions;  // then the block stalls in both launches, and the second one is
                                    // reported
  std::vector<Got> got;
  try {
    got = run_kernels(problem, seed);
    promise(status != 0, what + ": no status");
    const fr::TimeoutReport g = fr::report_of(status);
    promise(g.backward == backward && g.direction == (in_sequence ? 1 : stalled.z) && g.group == stalled.y &&
                g.block < p.blocks && g.block != stalled.x,
        what + ": the status names direction " + std::to_string(g.direction) + " group " + std::to_string(g.group) +
            " block " + std::to_string(g.block));
  } catch (const std::exception& error) { promise(false, what + ": " + error.what()); }
  for (int d = 0; d < int(got.size()); ++d) {
    const Got &a = got[d], &b = want[d];
    const int group = in_sequence || d == stalled.z ? stalled.y : -1;
    nan_or_right(a.output, b.output, what + " output"), nan_or_right(a.h_n, b.h_n, what + " h_n"),
        nan_or_right(a.c_n, b.c_n, what + " c_n");
    nan_or_right(a.kept, b.kept, what + " gates"), nan_or_right(a.cells, b.cells, what + " cells");
    nan_or_right(a.gradient.gates, b.gradient.gates, what + " d_gates"),
        nan_or_right(a.gradient.hh, b.gradient.hh, what + " d_weight_hh");
    nan_or_right(a.gradient.hr, b.gradient.hr, what + " d_weight_hr"),
        nan_or_right(a.gradient.bias, b.gradient.bias, what + " d_bias");
    nan_or_right(a.gradient.h0, b.gradient.h0, what + " d_h0"),
        nan_or_right(a.gradient.c0, b.gradient.c0, what + " d_c0");
    if (!c.lengths) nan_in_group(backward ? a.gradient.h0 : a.h_n, c, problem.R, p.rows_per_group, group, what);
  }
  // The next call raises, and the one after it works.
  g_options.stall_after = -1;
  bool raised = false;
  try {
    run_kernels(problem, seed);
  } catch (const std::runtime_error& error) {
    raised = std::string(error.what()).find(backward ? "backward kernel timed out" : "forward kernel timed out") !=
             std::string::npos;
  }
  promise(raised && status == 0, what + ": the next call does not raise");
  g_options.status = nullptr, g_options.timeout_ns = 0;
}

void check_timeouts(const std::string& only, const std::string& device, const std::vector<uint64_t>& seeds) {
  for (const Device& one : kDevices) {
    if ((!device.empty() && device != one.name) || std::strcmp(one.strategy, "cluster") == 0) continue;
    choose_device(one);
    for (Case c : make_cases()) {
      if (c.batch == 1 || c.range || c.packed) continue;
      // with these, blocks wait as in other cells
      if (fr::facts_of(c.cell).unit_weights > 0 || fr::facts_of(c.cell).cells > 1) continue;
      c.steps = 4, c.directions = 2, c.noise = false;
      for (const bool masked : {false, true}) {
        c.lengths = c.resets = masked;
        if (!only.empty() && c.text().find(only) == std::string::npos) continue;
        int turn = 0;
        for (const uint64_t seed : seeds)
          for (const Pass pass : {Pass::kForward, Pass::kBackward})
            run_timeout(c, one, pass, turn % 3, turn % 2 == 0, seed), ++turn;
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<uint64_t> seeds;
  std::string only, device;
  bool partition = argc == 1, races = false, timeout = false;
  unsigned share = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    bool is_device = false;
    for (const Device& one : kDevices) is_device = is_device || argument == one.name;
    if (argument == "partition") partition = true;
    else if (argument == "races") races = true;
    else if (argument == "timeout") timeout = true;
    else if (argument.rfind("share=", 0) == 0) share = static_cast<unsigned>(std::stoul(argument.substr(6)));
    else if (is_device) device = argument;
    else if (std::isdigit(static_cast<unsigned char>(argument[0])))
      seeds.push_back(std::strtoull(argv[i], nullptr, 10));
    else only = argument;
  }
  if (partition) check_partitions(), check_clusters(), check_most_groups();
  if (seeds.empty()) seeds = {0, 1};
  if (timeout) check_timeouts(only, device, seeds);
  for (const Device& one : kDevices) {
    if (timeout || (!device.empty() && device != one.name)) continue;
    choose_device(one);
    unsigned number = 0;
    for (const Case& c : make_cases()) {
      ++number;
      // forward streams its second product, never its first
      if (std::strcmp(one.name, "partial_streamed") == 0 && c.projection == 0) continue;
      if (!only.empty() && c.text().find(only) == std::string::npos) continue;
      if (!check_it_runs(c, one) && races) continue;
      if ((number + (&one - kDevices)) % share != 0) continue;
      for (const uint64_t seed : seeds) {
        // With other seeds than 0, a block stalls until the others are as far ahead as they can be.
        g_stalled = Pass::kBoth;
        g_options.stall_after = seed == 0 ? -1 : static_cast<int>((number + seed) % 4);
        g_options.stalled = {static_cast<int>(number % 2), 0, 0};
        const int before = g_failures;
        if (races) {
          Problem problem = make_problem(c, number);
          run_kernels(problem, seed), ++g_cases;
          continue;
        }
        run_case(c, seed, number);
        if (g_failures > before) std::printf("  on device %s\n", one.name);
      }
    }
  }
  if (!timeout && device.empty() && only.empty())
    promise(g_cluster_sizes == std::set<int>{1, 2, 4, 8, 16}, "cluster sizes of the cases");
  std::printf("%d cases, %d failures\n", g_cases, g_failures);
  return g_failures ? 1 : 0;
}
