// The cost model. A step of a persistent launch costs the exchange of the state between its SMs, the gather of the
// state by every SM, the product on the SMs in use, the weights that are read again each step, gate mathematics, and
// the instructions that a block issues one after the other. A launch for each step costs the launch instead of the
// exchange, and reads all weights. Constants:
//   reads      L2 42 KB/us an SM, peer shared memory 25, own shared memory 225
//   products   65 % of the dense tensor rate with mma.sync, 60 % of the vector rate
//   the rest   fitted to an H200's times (benchmarks/results/gpu_nvidia_h200_times.json). The model is
//              within -11 and +9 % of 80 % of the 107 forward times on tensor cores, and within 5 % of 18 backward
//              times. The probe of the same card gives 0.28 us for an exchange within an SM, 0.8 in a cluster, 2.8 by
//              flags with all that a step of the probe does, 4.6 from launch to launch. Other cards use the same
//              values, unscaled.
#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "block/launch.h"

namespace fr {
namespace {

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr double kBlockExchange = 0.28, kClusterExchange = 0.56, kGridExchange = 0.9, kLaunch = 4.6;
// us that instructions which a block issues one after the other take, forward and backward.
struct Issue {
  double band;       // of each product of a band of rows: barriers, addresses, publishing
  double round;      // of each slice that a warp multiplies
  double mma;        // of each gate row (backward: tile of units) and tile of rows in a round
  double pointwise;  // of each element that a thread computes
  double exact;      // of each such element more in strict float32, whose gates are not approximated
};
constexpr Issue kIssue[2] = {{1.2, 0, 0.073, 0.72, 0.65}, {2.1, 0.39, 0, 1.2, 0.3}};
constexpr double kStepIssue = 6.4;                            // of a launch of `step`
constexpr double kStepSlice = 0.53, kStepSliceOfGate = 0.17;  // of each slice of its depth
constexpr double kTensorShare = 0.65, kVectorShare = 0.6;
constexpr int64_t kRegisterShare = 2;  // half of the registers hold weights, the rest sums and addresses
constexpr double kL2Share = 0.8;       // share of L2 that keeps weights from step to step
// Largest sizes for which the counts of elements and bytes below stay within 64 bits. No card holds so large a layer.
constexpr int64_t kMostUnits = int64_t{1} << 24, kMostRows = int64_t{1} << 31;
constexpr int64_t kRowTile = 8;    // batch rows of one mma
constexpr int64_t kStepRows = 32;  // batch rows of a warp's tile in `step`; FMA is counted in whole ones
constexpr int kPersistentThreads = 256, kElementwiseRegisters = 64;
constexpr int64_t kChoiceBatches[] = {1, 16, 64, 256};  // stand for all batches in choose()

std::string number(int64_t value) { return std::to_string(value); }
std::string kib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f KiB", bytes / 1024.0);
  return text;
}

// A request with its sizes as the model counts them.
struct Work {
  const PlanRequest& r;
  const CellFacts& cell;
  int64_t element, width, weight_elements, weight_bytes;

  explicit Work(const PlanRequest& request) : r(request), cell(facts_of(request.cell)) {
    element = storage_bytes(r.type);
    width = r.projection > 0 ? r.projection : r.hidden;
    weight_elements = cell.multiplies() ? cell.gates * r.hidden * width + r.projection * r.hidden : 0;
    weight_bytes = weight_elements * element;
  }
  bool tensor() const {
    return r.type == Type::kBFloat16 || r.type == Type::kFloat16 || (r.type == Type::kFloat32 && r.tf32);
  }
  // The TFLOP/s that kernels reach on the device: a share of its dense rate.
  double rate(const DeviceLimits& limits) const {
    if (r.type == Type::kFloat64) return limits.vector64 * kVectorShare;
    if (!tensor()) return limits.vector32 * kVectorShare;
    return (r.type == Type::kFloat32 ? limits.tensor32 : limits.tensor16) * kTensorShare;
  }
  // us to multiply `rows` rows by `weights` weights on `sms` of the device's SMs.
  double arithmetic(const DeviceLimits& limits, int64_t weights, int64_t rows, double sms) const {
    const int64_t tile = tensor() ? kRowTile : kStepRows, counted = divide_up(rows, tile) * tile;
    return 2.0 * weights * counted / (rate(limits) * 1e6 * sms / limits.sms);
  }
  // A step's traffic in DRAM: the input part read and the output written; in training, gates and cells written, or read
  // back.
  double row_bytes(bool backward) const {
    const double state = state_bytes(r.type), per_unit = cell.saved * element + cell.cells * state;
    const double rows = static_cast<double>(r.batch) * r.directions;
    if (backward) return rows * r.hidden * (per_unit + state * cell.cells + cell.gates * element + 3 * element);
    return rows * (r.hidden * (cell.gates * state + (r.training ? per_unit : 0)) + width * element);
  }
};

// The most registers of any kernel that the call uses.
int most_registers(Strategy strategy, const Work& work) {
  const Math math = math_of(work.r.type, work.r.tf32);
  int most = planned_registers(strategy, math, work.cell.phase[0].gates, false);
  if (work.cell.two_phases()) most = std::max(most, planned_registers(strategy, math, 1, false));
  if (work.r.training) most = std::max(most, planned_registers(strategy, math, 1, true));
  return most;
}

Candidate blank(Strategy strategy, const Work& work) {
  Candidate c{};
  c.strategy = strategy;
  c.threads = kPersistentThreads;
  c.blocks = c.cluster = c.groups = 1;
  c.rows_per_group = work.r.batch;
  c.weight_bytes = work.weight_bytes;
  c.registers = most_registers(strategy, work);
  return c;
}

// The limit of the device that a block exceeds, or "".
std::string block_limits_refusal(const Candidate& c, const DeviceLimits& limits) {
  if (c.shared_bytes > limits.shared_per_block)
    return "a block needs " + kib(c.shared_bytes) + " of shared memory, the device gives " +
           kib(limits.shared_per_block);
  if (static_cast<int64_t>(c.registers) * c.threads > limits.registers_per_sm)
    return number(c.threads) + " threads of " + number(c.registers) + " registers a block, an SM has " +
           number(limits.registers_per_sm);
  return "";
}

// One product of a step; in `step` it is a launch of its own.
struct Product {
  int gates;
  int64_t units, depth;
};
std::vector<Product> products(const Work& work, bool backward) {
  const int64_t hidden = work.r.hidden, width = work.width;
  if (!work.cell.multiplies()) return {{work.cell.gates, hidden, 0}};
  std::vector<Product> list{
      backward ? Product{1, width, work.cell.gates * hidden} : Product{work.cell.phase[0].gates, hidden, width}};
  if (work.cell.two_phases()) list.push_back(backward ? Product{1, hidden, width} : Product{1, width, hidden});
  return list;
}

// Every row tile reads all weights, from L2 if they stay there between steps. Every tile of units reads all rows of the
// operand.
Candidate plan_step(const Work& work, const DeviceLimits& limits) {
  Candidate c = blank(Strategy::kStep, work);
  std::string refusal;
  if (limits.capability < kLowestCapability)
    refusal = "compute capability " + number(limits.capability) + " < " + number(kLowestCapability);
  const bool from_dram = static_cast<double>(work.weight_bytes) * work.r.directions > kL2Share * limits.l2_bytes;
  for (const bool backward : {false, true}) {
    StepCost& cost = c.cost[backward];
    for (const Product& product : products(work, backward)) {
      const double depth_bytes = static_cast<double>(product.depth) * work.element;
      const StepTile tile =
          step_tile(product.gates, work.r.type, product.depth * work.element, work.r.batch, limits.shared_per_block);
      const int64_t unit_tiles = divide_up(product.units, 16 * tile.unit_warps),
                    row_tiles = divide_up(work.r.batch, 32 * tile.row_warps);
      const int64_t blocks = unit_tiles * row_tiles * work.r.directions;
      if (!backward && cost.launch == 0) {  // explain prints forward's first product
        c.threads = tile.threads(), c.blocks = static_cast<int>(blocks);
        c.shared_bytes = step_shared_bytes(tile, product.gates, work.r.type);
      }
      const double busy = static_cast<double>(std::min<int64_t>(blocks, limits.sms));
      // the last wave is not full
      const double waves = blocks <= limits.sms ? 1 : divide_up(blocks, limits.sms) * busy / blocks;
      const double rate = limits.l2_per_sm * 1024 * busy / waves;  // of all SMs, bytes/us
      const double weights = product.gates * product.units * depth_bytes * work.r.directions;
      const int64_t rows = work.r.batch * work.r.directions;
      cost.launch += kLaunch;
      cost.broadcast += rows * depth_bytes * unit_tiles / rate;
      cost.weights += std::max(weights * row_tiles / rate, from_dram ? weights / (limits.dram * 1e6) : 0);
      cost.arithmetic += work.arithmetic(limits, product.gates * product.units * product.depth, rows, busy) * waves;
      cost.issue += kStepIssue + divide_up(product.depth * work.element, kPersistentSlice) *
                                     (kStepSlice + kStepSliceOfGate * product.gates);
    }
    cost.rows = work.row_bytes(backward) / (limits.dram * 1e6);
  }
  if (refusal.empty()) refusal = block_limits_refusal(c, limits);
  c.refusal[0] = c.refusal[1] = refusal;
  return c;
}

// What all strategies but step refuse.
std::string one_launch_refusal(const Work& work, const DeviceLimits& limits) {
  if (limits.capability < kLowestCapability)
    return "compute capability " + number(limits.capability) + " < " + number(kLowestCapability);
  if (work.r.type == Type::kFloat64 && work.cell.multiplies()) return "float64 runs in step only";
  if (work.r.state_dropout && work.cell.multiplies())
    return "dropout of the state runs in step only, other kernels read the output as it is";
  return "";
}

// block/kernel.cuh: 8 rows a block. Blocks beyond the number of SMs run in waves.
Candidate plan_block(const Work& work, const DeviceLimits& limits) {
  Candidate c = blank(Strategy::kBlock, work);
  c.rows_per_group = std::min(kRowTile, work.r.batch);
  c.groups = static_cast<int>(divide_up(work.r.batch, kRowTile));
  if (!work.cell.multiplies()) {  // block/elementwise.cuh: a thread for each unit of each row
    c.rows_per_group = std::min(divide_up(kPersistentThreads, work.r.hidden), work.r.batch);
    c.groups =
        static_cast<int>(std::min<int64_t>(divide_up(work.r.batch * work.r.hidden, kPersistentThreads), INT32_MAX / 2));
    c.registers = kElementwiseRegisters;
  }
  c.blocks = c.groups * work.r.directions;
  c.resident_bytes = work.weight_bytes;
  std::string refusal = one_launch_refusal(work, limits);
  const int64_t room = limits.registers_per_sm * 4 / kRegisterShare;
  if (refusal.empty() && work.r.packed) refusal = "packed rows have no block kernel";
  if (refusal.empty() && work.weight_bytes > room)
    refusal = "the weights of a direction take " + kib(work.weight_bytes) + ", the registers of one SM hold " +
              kib(room) + " of weights";
  if (refusal.empty())
    refusal = block_refusal(work.r.cell, work.r.type, work.r.tf32, work.r.hidden, limits.shared_per_block);
  if (refusal.empty()) {
    c.shared_bytes = block_shared_bytes(work.r.cell, work.r.type, work.r.hidden);
    refusal = block_limits_refusal(c, limits);
  }
  c.refusal[0] = c.refusal[1] = refusal;
  // blocks an SM
  const int64_t resident =
      work.cell.multiplies() ? 1 : limits.registers_per_sm / (kElementwiseRegisters * kPersistentThreads);
  const int64_t waves = divide_up(c.blocks, limits.sms * resident);
  for (const bool backward : {false, true}) {
    StepCost& cost = c.cost[backward];
    cost.exchange = kBlockExchange * waves;
    cost.arithmetic = waves * work.arithmetic(limits, work.weight_elements, c.rows_per_group, 1);
    cost.rows = work.row_bytes(backward) / (limits.dram * 1e6);
    cost.issue = waves * (kIssue[backward].round + kIssue[backward].mma * work.cell.gates) *
                 divide_up(work.r.hidden * work.element, kPersistentSlice) * (backward ? work.cell.gates : 1);
    // block/kernel.cuh: two threads a unit; elementwise.cuh: one a unit and row
    cost.pointwise = waves * kIssue[backward].pointwise * (work.cell.multiplies() ? divide_up(c.rows_per_group, 2) : 1);
  }
  return c;
}

PersistentPartition partition_of(
    Strategy strategy, const Work& work, const DeviceLimits& limits, bool backward, bool in_sequence) {
  PersistentRequest request;
  request.cell = work.r.cell, request.type = work.r.type, request.tf32 = work.r.tf32;
  request.batch = work.r.batch, request.hidden = work.r.hidden, request.projection = work.r.projection;
  request.directions = work.r.directions, request.backward = backward;
  PersistentLimits persistent = persistent_limits(strategy, limits);
  persistent.in_sequence = in_sequence;
  return persistent_partition(request, persistent);
}

// A step of a persistent launch. A group's rows go through it in bands; the work on one band hides the exchange of
// the others. exchange: us from a block's results until another can read them. read_rate: KiB/us of the operand that an
// SM gathers.
StepCost persistent_cost(const PersistentPartition& partition, const Work& work, const DeviceLimits& limits,
    bool backward, double exchange, double read_rate) {
  const int64_t rows = std::min(work.r.batch, partition.rows_per_group), bands = divide_up(rows, kPersistentBand);
  const double per_sm = work.rate(limits) * 1e6 / limits.sms;  // flop/us
  const bool tensor = work.tensor();
  const int64_t tile = persistent_row_tile(tensor), counted = divide_up(rows, tile) * tile;
  const int64_t band_rows = std::min<int64_t>(rows, kPersistentBand), row_tiles = divide_up(band_rows, kRowTile);
  const Issue& issue = kIssue[backward];
  StepCost cost;
  double shared = 0, streamed = 0;
  for (int i = 0; i < partition.phases; ++i) {
    const PhasePartition& phase = partition.phase[i];
    const double depth = static_cast<double>(phase.slices) * kPersistentSlice;
    if (phase.partial) {  // the operand is the block's own; it writes partial sums of all results, and reads as many
      cost.broadcast += 2.0 * rows * phase.units * sizeof(float) / (read_rate * 1024);
      cost.arithmetic +=
          2.0 * (phase.rounds / phase.slices) * phase.block_units() * (depth / work.element) * counted / per_sm;
    } else {
      cost.broadcast += rows * depth / (read_rate * 1024);
      cost.arithmetic += 2.0 * phase.gates * phase.block_units() * (depth / work.element) * counted / per_sm;
    }
    cost.issue += bands * (issue.band + phase.rounds * (issue.round + issue.mma * phase.gates * row_tiles));
    const int64_t elements = phase.partial ? 1 : divide_up(band_rows * phase.block_units(), 32 * partition.warps);
    cost.pointwise += bands * elements * (issue.pointwise + (tensor ? 0 : issue.exact));
    shared += static_cast<double>(bands) * phase.shared_rounds * phase.round_bytes();
    if (!tensor)  // the lanes of a warp read the operand once for each unit that they hold
      shared += static_cast<double>(counted) * partition.warps * phase.rounds * kPersistentSlice * 32 /
                persistent_unit_lanes(tensor, partition.phase[0].gates);
    streamed += static_cast<double>(bands) * phase.streamed_rounds() * phase.round_bytes();
  }
  const double blocks = static_cast<double>(partition.blocks) * partition.groups * partition.directions;
  cost.weights = shared / (limits.shared_rate_per_sm * 1024) + streamed / (limits.l2_per_sm * 1024);
  // Streamed weights that do not fit L2 come from DRAM, for each band.
  if (partition.streamed_bytes * blocks > kL2Share * limits.l2_bytes)
    cost.weights = std::max(cost.weights, streamed * blocks / (limits.dram * 1e6));
  const double of_one_band = cost.total() / bands / partition.phases;
  // bands in flight
  const int64_t together = partition.slots > 0 ? std::min<int64_t>(bands, partition.slots) : bands;
  cost.exchange += partition.phases * std::max(0.0, exchange - (together - 1) * of_one_band);
  // Clusters beyond those resident at once run in waves; directions that do not fit together run in sequence.
  const int64_t resident = resident_clusters(persistent_limits(Strategy::kCluster, limits), partition.blocks);
  const auto waves = static_cast<double>(
      partition.cluster ? divide_up(static_cast<int64_t>(partition.groups) * partition.directions, resident)
                        : work.r.directions / partition.directions);
  for (double* part : {&cost.exchange, &cost.broadcast, &cost.arithmetic, &cost.weights, &cost.issue, &cost.pointwise})
    *part *= waves;
  cost.rows = work.row_bytes(backward) / (limits.dram * 1e6);
  return cost;
}

StepCost persistent_cost(Strategy strategy, const PersistentPartition& partition, const Work& work,
    const DeviceLimits& limits, bool backward) {
  const bool cluster = strategy == Strategy::kCluster, alone = cluster && partition.blocks == 1;
  return persistent_cost(partition, work, limits, backward,
      alone     ? kBlockExchange
      : cluster ? kClusterExchange
                : kGridExchange,
      alone     ? limits.shared_rate_per_sm
      : cluster ? limits.peer_per_sm
                : limits.l2_per_sm);
}

// Choice::in_sequence. Compares the two ways by the geometric mean over the fixed batches.
bool runs_apart(Strategy strategy, const PlanRequest& request, const DeviceLimits& limits, bool backward) {
  if (request.directions == 1 || (strategy != Strategy::kGrid && strategy != Strategy::kStreaming)) return false;
  double gain = 0;
  for (const int64_t batch : kChoiceBatches) {
    PlanRequest one = request;
    one.batch = batch;
    const Work work(one);
    for (const bool in_sequence : {false, true}) {
      const PersistentPartition partition = partition_of(strategy, work, limits, backward, in_sequence);
      if (!partition.refusal.empty()) return false;
      gain += (in_sequence ? -1 : 1) * std::log(persistent_cost(strategy, partition, work, limits, backward).total());
    }
  }
  return gain > 0;
}

std::string describe(const PhasePartition& phase) {
  if (phase.partial)
    return "partial sums of " + number(phase.units) + " results over a block's own units, which the blocks add up; " +
           number(phase.unit_warps) + " x 1 warps (results x depth), " + number(phase.rounds) +
           " slices of the depth a warp: " + number(phase.register_rounds) + " in registers, " +
           number(phase.shared_rounds) + " in shared memory, " + number(phase.streamed_rounds()) + " streamed";
  return number(phase.gates) + (phase.gates == 1 ? " gate row" : " gate rows") + " of " + number(phase.units) +
         " units, " + number(phase.block_units()) + " units a block; " + number(phase.unit_warps) + " x " +
         number(phase.depth_warps) + " warps (units x depth)" +
         (phase.tiles > 1 ? ", each " + number(phase.tiles) + " tiles of units, " : ", ") + number(phase.rounds) +
         " slices of the depth a warp: " + number(phase.register_rounds) + " in registers, " +
         number(phase.shared_rounds) + " in shared memory, " + number(phase.streamed_rounds()) + " streamed";
}

// The weights of a direction spread once over a group of blocks, which exchange through global memory or, in a cluster,
// through shared memory. Weights that do not fit are refused or, with streaming, read from L2 in each step.
Candidate plan_persistent(Strategy strategy, const Work& work, const DeviceLimits& limits) {
  Candidate c = blank(strategy, work);
  const bool cluster = strategy == Strategy::kCluster;
  for (const bool backward : {false, true}) {
    const PersistentPartition partition =
        partition_of(strategy, work, limits, backward, runs_apart(strategy, work.r, limits, backward));
    std::string& refusal = c.refusal[backward] = one_launch_refusal(work, limits);
    if (refusal.empty()) refusal = partition.refusal;
    if (!refusal.empty()) continue;
    c.blocks = std::max(c.blocks, partition.blocks * partition.groups * partition.directions);
    c.groups = std::max(c.groups, partition.groups);
    if (cluster) c.cluster = std::max(c.cluster, partition.blocks);
    c.threads = 32 * partition.warps;
    c.rows_per_group = backward ? std::max(c.rows_per_group, partition.rows_per_group) : partition.rows_per_group;
    c.resident_bytes = std::max(c.resident_bytes, partition.resident_bytes);
    c.streamed_bytes = std::max(c.streamed_bytes, partition.streamed_bytes);
    c.shared_bytes = std::max(c.shared_bytes, partition.shared_bytes);
    c.cost[backward] = persistent_cost(strategy, partition, work, limits, backward);
    refusal = block_limits_refusal(c, limits);
    std::vector<std::string>& words = c.partition[backward];
    words.push_back(number(partition.blocks) + (partition.blocks == 1 ? " block takes" : " blocks take") +
                    " the weights once, " + number(partition.groups) + (partition.groups == 1 ? " group" : " groups") +
                    " of up to " + number(partition.rows_per_group) + " rows; a block holds " +
                    kib(partition.resident_bytes));
    if (partition.streamed_bytes > 0)
      words.back() += " and reads " + kib(partition.streamed_bytes) + " from L2 in each step for each " +
                      number(kPersistentBand) + " rows";
    if (partition.directions < work.r.directions) words.back() += "; the directions run one after the other";
    for (int i = 0; i < partition.phases; ++i)
      words.push_back("product " + number(i + 1) + ": " + describe(partition.phase[i]));
  }
  return c;
}

}  // namespace

double StepCost::total() const {
  return std::max(launch + exchange + broadcast + std::max(arithmetic, weights) + issue + pointwise, rows);
}

const char* StepCost::bound() const {
  const std::pair<double, const char*> parts[] = {{launch, "launch"}, {exchange, "exchange"}, {broadcast, "broadcast"},
      {arithmetic, "arithmetic"}, {weights, "weights"}, {rows, "memory"}, {issue, "issue"}, {pointwise, "pointwise"}};
  return std::max_element(std::begin(parts), std::end(parts), [](auto& a, auto& b) {
    return a.first < b.first;
  })->second;
}

const char* strategy_name(Strategy strategy) {
  static const char* const kNames[kStrategyCount] = {"step", "block", "cluster", "grid", "streaming"};
  return kNames[static_cast<int>(strategy)];
}

Strategy strategy_named(const std::string& name) {
  for (int i = 0; i < kStrategyCount; ++i)
    if (name == strategy_name(static_cast<Strategy>(i))) return static_cast<Strategy>(i);
  throw std::invalid_argument("strategy \"" + name + "\" is not one of step, block, cluster, grid, streaming");
}

int planned_registers(Strategy strategy, Math math, int gates, bool backward) {
  // Indexed by gate rows - 1.
  static constexpr int kStepTensor[] = {96, 128, 152, 176}, kStepFloat[] = {104, 128, 168, 168},
                       kStepDouble[] = {128, 168, 200, 232};
  static constexpr int kBlockForward[] = {152, 255, 232, 248};
  constexpr int kBlockBackward = 255, kPersistent = 255;  // one block of 256 threads an SM: at most 255
  if (gates < 1 || gates > 4) throw std::invalid_argument("gates: expected 1 to 4");
  switch (strategy) {
    case Strategy::kStep:
      return (math == Math::kFloat64 ? kStepDouble : math == Math::kFloat32 ? kStepFloat : kStepTensor)[gates - 1];
    case Strategy::kBlock: return backward ? kBlockBackward : kBlockForward[gates - 1];
    default: return kPersistent;
  }
}

const std::vector<DeviceLimits>& known_cards() {
  // From the vendor's data sheets: capability, SMs, shared memory of a block and an SM, registers, L2, cluster, dense
  // rates. H100: tensor16 and dram as measured publicly (800 TFLOP/s, 3.0 TB/s). H200: L2, clusters, peer and own
  // shared memory as the probe found them (benchmarks/results/gpu_nvidia_h200_probe.json). Clusters on other cards: the
  // portable size of 8, with as many resident as the SMs allow. A real card may hold fewer: one H100 of 132 SMs holds
  // 120 blocks in clusters of 8 (github.com/accel-sim/gpu-app-collection/pull/87). On the device itself rnn_cuda.cpp
  // queries the number, for clusters of 16 too. The read rates of an SM are those at the head of this file, scaled by
  // clock for other cards.
  static const std::vector<DeviceLimits> cards = {
      {"A100", 80, 108, 163 * kKiB, 164 * kKiB, 65536, 40 * kMiB, 1, 312, 156, 19.5, 9.7, 2.0, 36, 0, 180},
      {"H100", 90, 132, 227 * kKiB, 228 * kKiB, 65536, 50 * kMiB, 8, 800, 400, 60, 33.5, 3.0, 42, 25, 225},
      {"H200", 90, 132, 227 * kKiB, 228 * kKiB, 65536, 60 * kMiB, 16, 800, 400, 60, 33.5, 4.3, 42, 28, 236,
          {132, 66, 30, 15, 7}},
      {"L40S", 89, 142, 99 * kKiB, 100 * kKiB, 65536, 96 * kMiB, 1, 362, 183, 91, 1.4, 0.86, 36, 0, 310},
      {"RTX4090", 89, 128, 99 * kKiB, 100 * kKiB, 65536, 72 * kMiB, 1, 165, 82, 82, 1.3, 1.0, 36, 0, 310},
      {"B200", 100, 148, 227 * kKiB, 228 * kKiB, 65536, 126 * kMiB, 8, 2250, 1120, 75, 37, 7.7, 45, 25, 240},
  };
  return cards;
}

const DeviceLimits& card_limits(const std::string& name) {
  std::string names;
  for (const DeviceLimits& card : known_cards()) {
    if (card.name == name) return card;
    names += (names.empty() ? "" : ", ") + card.name;
  }
  throw std::invalid_argument("card: no table for \"" + name + "\", there are " + names);
}

DeviceLimits limits_like(int capability, int sms) {
  const char* nearest = capability >= 120   ? "RTX4090"
                        : capability >= 100 ? "B200"
                        : capability >= 90  ? "H100"
                        : capability >= 86  ? "L40S"
                                            : "A100";
  DeviceLimits limits = card_limits(nearest);
  const double scale = static_cast<double>(sms) / limits.sms;
  for (double* rate : {&limits.tensor16, &limits.tensor32, &limits.vector32, &limits.vector64}) *rate *= scale;
  limits.name = "sm_" + std::to_string(capability);
  limits.capability = capability, limits.sms = sms;
  return limits;
}

std::vector<std::pair<std::string, double>> model_constants() {
  return {{"launch", kLaunch}, {"block_exchange", kBlockExchange}, {"cluster_exchange", kClusterExchange},
      {"grid_exchange", kGridExchange}, {"tensor_share", kTensorShare}, {"vector_share", kVectorShare}};
}

PersistentLimits persistent_limits(Strategy strategy, const DeviceLimits& limits) {
  PersistentLimits persistent;
  persistent.sms = limits.sms, persistent.shared_per_block = limits.shared_per_block;
  persistent.streaming = strategy == Strategy::kStreaming;
  if (strategy == Strategy::kCluster) {
    persistent.max_cluster = std::max(1, limits.max_cluster);
    std::copy(std::begin(limits.resident_clusters), std::end(limits.resident_clusters), persistent.resident_clusters);
  }
  return persistent;
}

namespace {

std::vector<Candidate> make_candidates(const PlanRequest& request, const DeviceLimits& limits) {
  const Work work(request);
  return {plan_step(work, limits), plan_block(work, limits), plan_persistent(Strategy::kCluster, work, limits),
      plan_persistent(Strategy::kGrid, work, limits), plan_persistent(Strategy::kStreaming, work, limits)};
}

}  // namespace

Choice choose(const PlanRequest& request, const DeviceLimits& limits) {
  const auto taken = [&](Strategy strategy) {
    return Choice{strategy, runs_apart(strategy, request, limits, request.training)};
  };
  if (!request.strategy.empty()) return taken(strategy_named(request.strategy));
  // A single step in `step` is one launch; the others need two, which take longer to queue than the step to run. (In a
  // CUDA graph, where nothing is queued, `grid` is ahead: on an H200 27 us in place of 40 for an LSTM of 1024 units.)
  if (request.steps <= 1) return taken(Strategy::kStep);
  // Comparing strategies takes longer than a launch, so each thread caches its last few answers.
  struct Answer {
    PlanRequest request;
    DeviceLimits limits;
    Choice choice;
  };
  thread_local std::vector<Answer> known;
  constexpr size_t kKept = 16;
  const auto same = [&](const Answer& a) {
    const PlanRequest& r = a.request;
    return r.cell == request.cell && r.type == request.type && r.tf32 == request.tf32 && r.hidden == request.hidden &&
           r.projection == request.projection && r.directions == request.directions && r.training == request.training &&
           r.packed == request.packed && r.state_dropout == request.state_dropout && a.limits.name == limits.name &&
           a.limits.sms == limits.sms && a.limits.shared_per_block == limits.shared_per_block &&
           a.limits.max_cluster == limits.max_cluster &&
           std::equal(
               std::begin(a.limits.resident_clusters), std::end(a.limits.resident_clusters), limits.resident_clusters);
  };
  const auto found = std::find_if(known.begin(), known.end(), same);
  if (found != known.end()) return found->choice;

  double cost[kStrategyCount] = {};
  for (const int64_t batch : kChoiceBatches) {
    PlanRequest one = request;
    one.batch = batch;
    for (const Candidate& c : make_candidates(one, limits))
      cost[static_cast<int>(c.strategy)] +=
          c.can_run(request.training) ? std::log(c.cost[request.training].total()) : INFINITY;
  }
  const Choice choice =
      taken(static_cast<Strategy>(std::min_element(std::begin(cost), std::end(cost)) - std::begin(cost)));
  if (known.size() == kKept) known.erase(known.begin());
  known.push_back({request, limits, choice});
  return choice;
}

Plan make_plan(const PlanRequest& request, const DeviceLimits& limits) {
  if (request.steps < 0 || request.batch < 1 || request.hidden < 1 || request.projection < 0)
    throw std::invalid_argument("plan: steps >= 0, batch >= 1, hidden >= 1 and projection >= 0 expected");
  const struct {
    const char* name;
    int64_t size, most;
  } sizes[] = {{"hidden", request.hidden, kMostUnits}, {"projection", request.projection, kMostUnits},
      {"batch", request.batch, kMostRows}, {"steps", request.steps, kMostRows}};
  for (const auto& [name, size, most] : sizes)
    if (size > most)
      throw std::invalid_argument(std::string("plan: ") + name + " is " + std::to_string(size) + ", at most " +
                                  std::to_string(most) + " can be planned");
  if (request.directions != 1 && request.directions != 2)
    throw std::invalid_argument("plan: 1 or 2 directions expected");
  if (facts_of(request.cell).projects() != (request.projection > 0))
    throw std::invalid_argument("plan: projection > 0 expected with a cell that projects, and only there");
  Plan plan;
  plan.request = request;
  plan.limits = limits;
  plan.candidates = make_candidates(request, limits);
  const int phases = request.training ? 2 : 1;
  for (int backward = 0; backward < phases; ++backward) {
    PlanRequest one = request;
    one.training = backward;
    plan.chosen[backward] = choose(one, limits).strategy;
    const Candidate& c = plan.candidates[static_cast<int>(plan.chosen[backward])];
    if (!c.can_run(backward))
      throw std::invalid_argument((request.strategy.empty() ? "no strategy" : "strategy \"" + request.strategy + "\"") +
                                  " cannot run here: " + (backward ? "backward: " : "") + c.refusal[backward]);
  }
  if (!request.training) plan.chosen[1] = plan.chosen[0];
  for (const Candidate& c : plan.candidates) {
    const bool forward = plan.chosen[0] == c.strategy, backward = plan.chosen[1] == c.strategy;
    std::string text = std::string(strategy_name(c.strategy)) +
                       (!forward && !backward ? " is not chosen" : " is chosen") +
                       (forward == backward ? ""
                           : forward        ? " forward"
                                            : " backward") +
                       ":";
    const auto phase = [&](int i) {
      if (!c.can_run(i)) return "cannot run: " + c.refusal[i];
      char predicted[64];
      std::snprintf(predicted, sizeof predicted, "%.2f us a step, bound by ", c.cost[i].total());
      return predicted + std::string(c.cost[i].bound());
    };
    if (phases == 1 || phase(0) == phase(1)) text.append(" ").append(phase(0));
    else text.append(" forward ").append(phase(0)).append("; backward ").append(phase(1));
    plan.reasons.push_back(text);
  }
  return plan;
}

}  // namespace fr
