// See plan.h. The model: a persistent step costs the exchange of the state between its SMs, the gather of the state by every
// SM, the product on the SMs in use, the part of the weights that is read again each step, and gate mathematics; a launch per
// step costs the launch instead of the exchange and reads all weights. All constants are assumptions until gpu_check has
// measured them on a card; those of an H100 were gathered from public measurements:
//   exchange   0.05 us within an SM; cluster barrier and peer reads about 0.4; flags across the grid about 1.0
//   reads      L2 42 KB/us an SM, peer shared memory 25, own shared memory 225
//   products   65 % of the dense tensor rate with mma.sync, 60 % of the vector rate
//   launch     2.2 us from launch to launch of dependent small kernels in one stream
#include "plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <stdexcept>

#include "step.h"

namespace fr {
namespace {

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;
constexpr double kBlockExchange = 0.05, kClusterExchange = 0.4, kGridExchange = 1.0, kLaunch = 2.2, kPointwise = 0.15;
constexpr double kTensorShare = 0.65, kVectorShare = 0.6;
constexpr int64_t kRegisterShare = 2;        // half of the registers hold weights, the rest accumulators and addresses
constexpr int64_t kSharedReserve = 16 * kKiB;  // row tables, input gates under way
constexpr int64_t kStagedAtMost = 64 * kKiB;   // of the state on one SM; more rows take pieces of at least
constexpr int64_t kLeastStagedRow = 2 * 128;   // two slices of 128 bytes each
constexpr int64_t kRowTile = 8;              // batch rows of one mma
constexpr int kPersistentThreads = 256;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

std::string number(int64_t value) { return std::to_string(value); }
std::string kib(int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f KiB", bytes / 1024.0);
  return text;
}

// Sizes of a request in the terms of the model.
struct Work {
  const PlanRequest& r;
  CellTraits cell;
  int64_t element, width, weight_elements, weight_bytes;

  explicit Work(const PlanRequest& request) : r(request), cell(cell_traits(request.cell)) {
    element = storage_bytes(r.type);
    width = r.projection > 0 ? r.projection : r.hidden;
    weight_elements = cell.gates * r.hidden * width + r.projection * r.hidden;
    weight_bytes = weight_elements * element;
  }
  bool tensor() const { return r.type == Type::kBFloat16 || r.type == Type::kFloat16 || (r.type == Type::kFloat32 && r.tf32); }
  // TFLOP/s of the whole device at the share a kernel reaches.
  double rate(const DeviceLimits& limits) const {
    if (r.type == Type::kFloat64) return limits.vector64 * kVectorShare;
    if (!tensor()) return limits.vector32 * kVectorShare;
    return (r.type == Type::kFloat32 ? limits.tensor32 : limits.tensor16) * kTensorShare;
  }
  // us to multiply `rows` rows by the weights of one direction on `sms` of the device's SMs.
  double arithmetic(const DeviceLimits& limits, int64_t rows, double sms) const {
    const int64_t counted = tensor() ? divide_up(rows, kRowTile) * kRowTile : rows;
    return 2.0 * weight_elements * counted / (rate(limits) * 1e6 * sms / limits.sms);
  }
  // Bytes of a step's rows in DRAM: input part read, output written; in training gates and cells written, or read again.
  double row_bytes(bool backward) const {
    const double state = state_bytes(r.type), per_unit = cell.saved * element + (cell.states == 2 ? state : 0);
    const double rows = static_cast<double>(r.batch) * r.directions;
    if (backward) return rows * r.hidden * (per_unit + state * (cell.states == 2) + cell.gates * element + 3 * element);
    return rows * (r.hidden * (cell.gates * state + (r.training ? per_unit : 0)) + width * element);
  }
  // Bytes that a row's exchange moves: the state forward; backward the gate gradients, which are cell.gates times as many.
  double exchanged(bool backward) const {
    const double first = backward ? cell.gates * r.hidden : width, second = cell.products == 2 ? (backward ? width : r.hidden) : 0;
    return (first + second) * element;
  }
};

// The most registers of any kernel of a call.
int most_registers(Strategy strategy, const Work& work) {
  const Math math = math_of(work.r.type, work.r.tf32);
  int most = planned_registers(strategy, math, work.cell.first_gates, false);
  if (work.cell.products == 2) most = std::max(most, planned_registers(strategy, math, 1, false));
  if (work.r.training) most = std::max(most, planned_registers(strategy, math, 1, true));
  return most;
}

Candidate blank(Strategy strategy, const Work& work) {
  Candidate c{};
  c.strategy = strategy;
  c.threads = kPersistentThreads;
  c.cluster = c.groups = 1;
  c.rows_per_group = work.r.batch;
  c.weight_bytes = work.weight_bytes;
  c.registers = most_registers(strategy, work);
  return c;
}

// What the device does not give a block, or "".
std::string block_limits_refusal(const Candidate& c, const DeviceLimits& limits) {
  if (c.shared_bytes > limits.shared_per_block)
    return "a block needs " + kib(c.shared_bytes) + " of shared memory, the device gives " + kib(limits.shared_per_block);
  if (static_cast<int64_t>(c.registers) * c.threads > limits.registers_per_sm)
    return number(c.threads) + " threads of " + number(c.registers) + " registers a block, an SM has " + number(limits.registers_per_sm);
  return "";
}

Candidate plan_step(const Work& work, const DeviceLimits& limits) {
  Candidate c = blank(Strategy::kStep, work);
  c.built = true;
  if (limits.capability < kLowestCapability)
    c.refusal = "compute capability " + number(limits.capability) + " < " + number(kLowestCapability);
  const int gates = work.cell.first_gates;
  const StepTile tile = step_tile(gates, work.r.type, work.width * work.element, work.r.batch, limits.shared_per_block);
  c.threads = tile.threads();
  c.shared_bytes = step_shared_bytes(tile, gates, work.r.type);
  if (c.refusal.empty()) c.refusal = block_limits_refusal(c, limits);
  c.blocks = static_cast<int>(divide_up(work.r.hidden, 16 * tile.unit_warps) * divide_up(work.r.batch, 32 * tile.row_warps)) *
             work.r.directions;
  const double busy = std::min<double>(c.blocks, limits.sms);
  const double all = static_cast<double>(work.weight_bytes) * work.r.directions;
  // Every row tile reads the weights; from L2 if they stay there from step to step.
  const double l2 = all * divide_up(work.r.batch, 32 * tile.row_warps) / (limits.l2_per_sm * 1024 * busy);
  const double dram = all > 0.8 * limits.l2_bytes ? all / (limits.dram * 1e6) : 0;
  for (StepCost* cost : {&c.forward, &c.backward}) {
    const bool backward = cost == &c.backward;
    cost->launch = kLaunch * work.cell.products;
    cost->weights = std::max(l2, dram);
    cost->arithmetic = work.arithmetic(limits, work.r.batch * work.r.directions, busy);
    cost->rows = work.row_bytes(backward) / (limits.dram * 1e6);
    cost->pointwise = kPointwise;
  }
  return c;
}

// Bytes of the state of `rows` rows staged on one SM: whole, twice (as it is exchanged), or in pieces of the depth.
int64_t staged_bytes(const Work& work, int64_t rows) {
  return std::min(2 * rows * work.width * work.element, std::max<int64_t>(kStagedAtMost, rows * kLeastStagedRow));
}

// Bytes of weights that stay on one SM beside the staged state of `rows` rows.
int64_t resident_limit(const Work& work, const DeviceLimits& limits, int64_t rows) {
  const int64_t shared = limits.shared_per_block - kSharedReserve - staged_bytes(work, rows);
  return shared < 0 ? -1 : limits.registers_per_sm * 4 / kRegisterShare + shared;
}

std::string no_tensor_refusal(const Work& work, const DeviceLimits& limits) {
  if (limits.capability < kLowestCapability)
    return "compute capability " + number(limits.capability) + " < " + number(kLowestCapability);
  if (work.r.type == Type::kFloat64) return "float64 runs in step only";
  return "";
}

// Weights spread over `sms_each` SMs, `groups` times, each copy with its own rows: the cost of a step.
void cost_resident(Candidate& c, const Work& work, const DeviceLimits& limits, int sms_each, double exchange, double read_rate) {
  c.resident_bytes = divide_up(work.weight_bytes, sms_each);
  const int64_t registers = limits.registers_per_sm * 4 / kRegisterShare;
  c.shared_bytes = std::max<int64_t>(0, c.resident_bytes - registers) + staged_bytes(work, c.rows_per_group) + kSharedReserve;
  const int64_t waves = divide_up(static_cast<int64_t>(c.groups) * work.r.directions * sms_each, limits.sms);
  for (StepCost* cost : {&c.forward, &c.backward}) {
    const bool backward = cost == &c.backward;
    cost->exchange = exchange * work.cell.products * waves;
    cost->broadcast = waves * work.exchanged(backward) * c.rows_per_group * (sms_each - 1) / sms_each / (read_rate * 1024);
    cost->arithmetic = waves * work.arithmetic(limits, c.rows_per_group, sms_each);
    cost->weights = waves * std::max<int64_t>(0, c.resident_bytes - registers) / (limits.shared_rate_per_sm * 1024);
    cost->rows = work.row_bytes(backward) / (limits.dram * 1e6);
    cost->pointwise = kPointwise * waves;
  }
}

Candidate plan_block(const Work& work, const DeviceLimits& limits) {
  Candidate c = blank(Strategy::kBlock, work);
  c.rows_per_group = std::min(kRowTile, work.r.batch);
  c.groups = static_cast<int>(divide_up(work.r.batch, kRowTile));
  c.blocks = c.groups * work.r.directions;
  c.refusal = no_tensor_refusal(work, limits);
  const int64_t room = resident_limit(work, limits, kRowTile);
  if (c.refusal.empty() && work.weight_bytes > room)
    c.refusal = "the weights of a direction take " + kib(work.weight_bytes) + ", one SM holds " + kib(room);
  if (c.refusal.empty()) c.refusal = block_refusal(work.r.cell, work.r.type, work.r.tf32, work.r.hidden, limits.shared_per_block);
  c.built = true;
  cost_resident(c, work, limits, 1, kBlockExchange, limits.shared_rate_per_sm);
  return c;
}

Candidate plan_cluster(const Work& work, const DeviceLimits& limits) {
  Candidate c = blank(Strategy::kCluster, work);
  c.refusal = no_tensor_refusal(work, limits);
  if (c.refusal.empty() && limits.max_cluster < 2) c.refusal = "the device has no thread-block clusters";
  bool found = false;
  for (int size = 2; size <= std::max(2, limits.max_cluster); size *= 2) {
    const int64_t at_once = std::max(1, limits.sms / size / work.r.directions);
    c.cluster = size;
    c.groups = static_cast<int>(std::min(at_once, divide_up(work.r.batch, kRowTile)));
    c.rows_per_group = std::min(work.r.batch, divide_up(divide_up(work.r.batch, c.groups), kRowTile) * kRowTile);
    if (divide_up(work.weight_bytes, size) <= resident_limit(work, limits, c.rows_per_group)) {
      found = true;
      break;
    }
  }
  c.groups = static_cast<int>(divide_up(work.r.batch, c.rows_per_group));
  c.blocks = c.cluster * c.groups * work.r.directions;
  if (c.refusal.empty() && !found)
    c.refusal = "the weights of a direction take " + kib(work.weight_bytes) + ", a cluster of " + number(c.cluster) + " holds " +
                kib(std::max<int64_t>(0, resident_limit(work, limits, c.rows_per_group)) * c.cluster) + " beside " +
                number(c.rows_per_group) + " rows";
  cost_resident(c, work, limits, c.cluster, kClusterExchange, limits.peer_per_sm);
  return c;
}

// Grid scope: as many copies of the weights as fit, so that every copy gathers fewer rows.
Candidate plan_grid(const Work& work, const DeviceLimits& limits) {
  Candidate c = blank(Strategy::kGrid, work);
  c.refusal = no_tensor_refusal(work, limits);
  int64_t needed = 0;
  bool found = false;
  const int64_t most = std::min<int64_t>(divide_up(work.r.batch, kRowTile), std::max(1, limits.sms / work.r.directions));
  for (int64_t groups = most; groups >= 1 && !found; --groups) {
    const int sms_each = static_cast<int>(limits.sms / (groups * work.r.directions));
    if (sms_each < 1) continue;
    c.groups = static_cast<int>(groups);
    c.rows_per_group = std::min(work.r.batch, divide_up(divide_up(work.r.batch, groups), kRowTile) * kRowTile);
    needed = divide_up(work.weight_bytes, sms_each);
    found = needed <= resident_limit(work, limits, c.rows_per_group);
  }
  c.groups = static_cast<int>(divide_up(work.r.batch, c.rows_per_group));
  const int sms_each = std::max(1, limits.sms / (c.groups * work.r.directions));
  c.blocks = std::min(sms_each * c.groups * work.r.directions, limits.sms);
  if (c.refusal.empty() && limits.sms < work.r.directions) c.refusal = "fewer SMs than directions";
  if (c.refusal.empty() && !found)
    c.refusal = "each of " + number(sms_each) + " SMs would hold " + kib(needed) + " of weights, it has room for " +
                kib(std::max<int64_t>(0, resident_limit(work, limits, c.rows_per_group))) + " beside " + number(c.rows_per_group) + " rows";
  cost_resident(c, work, limits, sms_each, kGridExchange, limits.l2_per_sm);
  return c;
}

// Grid scope with what does not fit read from L2 each step; rows in chunks, so any batch.
Candidate plan_streaming(const Work& work, const DeviceLimits& limits) {
  Candidate c = blank(Strategy::kStreaming, work);
  c.refusal = no_tensor_refusal(work, limits);
  if (c.refusal.empty() && limits.sms < work.r.directions) c.refusal = "fewer SMs than directions";
  const int sms_each = std::max(1, limits.sms / work.r.directions);
  c.blocks = std::min(limits.sms, sms_each * work.r.directions);
  const int64_t chunk = std::min<int64_t>(work.r.batch, 64);
  const int64_t room = std::max<int64_t>(0, resident_limit(work, limits, chunk));
  const int64_t each = divide_up(work.weight_bytes, sms_each);
  cost_resident(c, work, limits, sms_each, kGridExchange, limits.l2_per_sm);
  c.resident_bytes = std::min(each, room);
  c.shared_bytes = std::min(c.shared_bytes, limits.shared_per_block);
  const int64_t streamed = each - c.resident_bytes;
  const double passes = static_cast<double>(divide_up(work.r.batch, chunk));
  for (StepCost* cost : {&c.forward, &c.backward}) cost->weights += passes * streamed / (limits.l2_per_sm * 1024);
  return c;
}

}  // namespace

double StepCost::total() const {
  return std::max(launch + exchange + broadcast + std::max(arithmetic, weights) + pointwise, rows);
}

const char* StepCost::bound() const {
  const std::pair<double, const char*> parts[] = {{launch, "launch"},         {exchange, "exchange"}, {broadcast, "broadcast"},
                                                  {arithmetic, "arithmetic"}, {weights, "weights"},   {rows, "memory"},
                                                  {pointwise, "pointwise"}};
  return std::max_element(std::begin(parts), std::end(parts), [](auto& a, auto& b) { return a.first < b.first; })->second;
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
  // By gate rows, 1 to 4.
  static constexpr int kStepTensor[] = {96, 128, 152, 176}, kStepFloat[] = {104, 128, 168, 168}, kStepDouble[] = {128, 168, 200, 232};
  static constexpr int kBlockForward[] = {152, 255, 232, 248};
  constexpr int kAll = 255;  // one block of 256 threads an SM
  if (gates < 1 || gates > 4) throw std::invalid_argument("gates: expected 1 to 4");
  switch (strategy) {
    case Strategy::kStep: return (math == Math::kFloat64 ? kStepDouble : math == Math::kFloat32 ? kStepFloat : kStepTensor)[gates - 1];
    case Strategy::kBlock: return backward ? kAll : kBlockForward[gates - 1];
    default: return kAll;
  }
}

const std::vector<DeviceLimits>& known_cards() {
  // Vendor's data sheets: capability, SMs, shared memory a block and an SM, registers, L2, cluster; dense rates. H100: tensor16
  // and dram as measured publicly (800 TFLOP/s, 3.0 TB/s). Reads an SM: see the head of this file; scaled by clock elsewhere.
  static const std::vector<DeviceLimits> cards = {
      {"A100", 80, 108, 163 * kKiB, 164 * kKiB, 65536, 40 * kMiB, 1, 312, 156, 19.5, 9.7, 2.0, 36, 0, 180},
      {"H100", 90, 132, 227 * kKiB, 228 * kKiB, 65536, 50 * kMiB, 16, 800, 400, 60, 33.5, 3.0, 42, 25, 225},
      {"H200", 90, 132, 227 * kKiB, 228 * kKiB, 65536, 50 * kMiB, 16, 800, 400, 60, 33.5, 4.3, 42, 25, 225},
      {"L40S", 89, 142, 99 * kKiB, 100 * kKiB, 65536, 96 * kMiB, 1, 362, 183, 91, 1.4, 0.86, 36, 0, 310},
      {"RTX4090", 89, 128, 99 * kKiB, 100 * kKiB, 65536, 72 * kMiB, 1, 165, 82, 82, 1.3, 1.0, 36, 0, 310},
      {"B200", 100, 148, 227 * kKiB, 228 * kKiB, 65536, 126 * kMiB, 16, 2250, 1120, 75, 37, 7.7, 45, 25, 240},
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
  const char* nearest = capability >= 120 ? "RTX4090" : capability >= 100 ? "B200" : capability >= 90 ? "H100" : capability >= 86 ? "L40S" : "A100";
  DeviceLimits limits = card_limits(nearest);
  const double scale = static_cast<double>(sms) / limits.sms;
  for (double* rate : {&limits.tensor16, &limits.tensor32, &limits.vector32, &limits.vector64}) *rate *= scale;
  limits.name = "sm_" + std::to_string(capability);
  limits.capability = capability, limits.sms = sms;
  limits.max_cluster = capability >= 90 ? 8 : 1;  // 16 is for devices that say so
  return limits;
}

std::vector<std::pair<std::string, double>> model_constants() {
  return {{"launch", kLaunch}, {"block_exchange", kBlockExchange}, {"cluster_exchange", kClusterExchange},
          {"grid_exchange", kGridExchange}, {"pointwise", kPointwise}, {"tensor_share", kTensorShare}, {"vector_share", kVectorShare}};
}

Strategy choose_strategy(const PlanRequest& request, const DeviceLimits& limits) {
  // A single step would load the weights for one product: step does that with more blocks.
  const bool block = limits.capability >= kLowestCapability && request.steps > 1 &&
                     block_refusal(request.cell, request.type, request.tf32, request.hidden, limits.shared_per_block).empty();
  return block ? Strategy::kBlock : Strategy::kStep;
}

Plan make_plan(const PlanRequest& request, const DeviceLimits& limits) {
  if (request.steps < 0 || request.batch < 1 || request.hidden < 1 || request.projection < 0)
    throw std::invalid_argument("plan: steps >= 0, batch >= 1, hidden >= 1 and projection >= 0 expected");
  if (request.directions != 1 && request.directions != 2) throw std::invalid_argument("plan: 1 or 2 directions expected");
  if ((request.cell == Cell::kLstmProjected) != (request.projection > 0))
    throw std::invalid_argument("plan: projection > 0 expected with lstm_projected, and only there");
  const Work work(request);
  Plan plan;
  plan.request = request;
  plan.limits = limits;
  plan.candidates = {plan_step(work, limits), plan_block(work, limits), plan_cluster(work, limits), plan_grid(work, limits),
                     plan_streaming(work, limits)};
  const auto cost = [&](const Candidate& c) { return c.forward.total() + (request.training ? c.backward.total() : 0); };
  const auto describe = [&](const Candidate& c) {
    return c.refusal.empty() ? (c.built ? std::string("can run") : "this version has no kernels for it") : c.refusal;
  };
  if (!request.strategy.empty()) {
    plan.chosen = strategy_named(request.strategy);
    if (!plan.candidate().can_run())
      throw std::invalid_argument("strategy \"" + request.strategy + "\" cannot run here: " + describe(plan.candidate()));
    plan.reasons.push_back(request.strategy + " was asked for");
    return plan;
  }
  plan.chosen = choose_strategy(request, limits);
  for (const Candidate& c : plan.candidates) {
    char text[64];
    std::snprintf(text, sizeof text, "%.2f us a step predicted, bound by ", cost(c));
    if (c.strategy == plan.chosen) plan.reasons.push_back(std::string(strategy_name(c.strategy)) + " is chosen: " + text + c.forward.bound());
    else if (!c.can_run()) plan.reasons.push_back(std::string("not ") + strategy_name(c.strategy) + ": " + describe(c));
    else plan.reasons.push_back(std::string("not ") + strategy_name(c.strategy) + ": " + text + c.forward.bound());
  }
  if (!plan.candidate().can_run()) throw std::invalid_argument("no strategy can run here: " + describe(plan.candidate()));
  return plan;
}

}  // namespace fr
