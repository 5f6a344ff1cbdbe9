// The plan: which kernels run a layer on a device, how its weights and batch are partitioned, and what a time step
// should cost. A pure function of shapes, types and device limits, without a CUDA call. So it can be printed (`fastrnn
// explain`), forced (FASTRNN_PLAN) and swept by tests on a machine without a GPU. plan.cpp holds the cost model and the
// sources of its numbers.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../rnn.h"
#include "persistent/partition.h"

namespace fr {

constexpr int kLowestCapability = 80;

struct DeviceLimits {
  std::string name;
  int capability;  // 90: compute capability 9.0
  int sms;
  int64_t shared_per_block, shared_per_sm, registers_per_sm, l2_bytes;
  int max_cluster;  // 1: no clusters
  // Rates, used only to predict: dense TFLOP/s; DRAM in TB/s; KB/us that an SM reads.
  double tensor16, tensor32, vector32, vector64, dram, l2_per_sm, peer_per_sm, shared_rate_per_sm;
  int resident_clusters[5] = {};  // as in PersistentLimits; all 0 if no device was queried
};

// The cards that `fastrnn explain --card` knows: A100, H100, H200, L40S, RTX4090, B200.
const std::vector<DeviceLimits>& known_cards();
const DeviceLimits& card_limits(const std::string& name);  // throws std::invalid_argument that lists the known ones
// Rates of the known card nearest to a compute capability, scaled to the number of SMs.
DeviceLimits limits_like(int capability, int sms);

enum class Strategy : int { kStep, kBlock, kCluster, kGrid, kStreaming };
constexpr int kStrategyCount = 5;
const char* strategy_name(Strategy strategy);
Strategy strategy_named(const std::string& name);  // throws std::invalid_argument that lists all

// Registers a thread that a strategy's kernels may take, and the plan counts with; `gates`: gate rows a unit. Allocated
// in multiples of eight. tests/kernels/test_compiled_kernels.py holds the compiler to it.
int planned_registers(Strategy strategy, Math math, int gates, bool backward);

struct PlanRequest {
  Cell cell = Cell::kLstm;
  Type type = Type::kFloat32;
  bool tf32 = false;
  int64_t steps = 1, batch = 1, hidden = 1, projection = 0;
  int directions = 1;
  bool training = false;
  bool packed = false;         // packed rows: each step has no more than the step before (Shape::batch_sizes)
  std::string strategy;        // "": choose one
  bool state_dropout = false;  // the product reads the masked output, not the output
};

// The parts of a step's time, in us: launch; synchronisation between blocks; bringing the operand to every SM;
// multiplication; reading weights (from shared memory, L2 or DRAM; with FMA also the operand from shared memory); the
// step's rows in DRAM; gate mathematics.
struct StepCost {
  // issue: barriers and instructions of a step that nothing else hides, beside those of the pointwise part
  double launch = 0, exchange = 0, broadcast = 0, arithmetic = 0, weights = 0, rows = 0, issue = 0, pointwise = 0;
  double total() const;
  const char* bound() const;  // name of the largest part
};

struct Candidate {
  Strategy strategy;
  std::string refusal[2];                // [forward, backward]; "": can run; else the limit that fails, with numbers
  int blocks, threads, cluster, groups;  // blocks: of the whole grid; cluster: blocks of one (1: none); groups: batch
                                         // groups, each with its own copy of the weights
  int registers;                         // a thread: the most of any kernel of the call
  int64_t rows_per_group;
  int64_t weight_bytes;                   // recurrent weights of a direction
  int64_t resident_bytes;                 // the part of them on one SM
  int64_t streamed_bytes;                 // what each SM reads from L2 in each step, for each band of rows
  int64_t shared_bytes;                   // of a block
  std::vector<std::string> partition[2];  // [forward, backward]: how the weights are spread, in words
  StepCost cost[2];                       // [forward, backward]
  bool can_run(bool backward) const { return refusal[backward].empty(); }
};

struct Plan {
  PlanRequest request;
  DeviceLimits limits;
  std::vector<Candidate> candidates;  // one for each strategy, in the enumeration's order
  Strategy chosen[2];                 // [forward, backward]
  std::vector<std::string> reasons;   // one for each strategy
};

// A device's limits as the persistent kernels get them for a strategy (kCluster, kGrid or kStreaming).
PersistentLimits persistent_limits(Strategy strategy, const DeviceLimits& limits);

// The model's constants by name, for comparison with measurements: times in us, and the shares of the dense rates that
// products reach.
std::vector<std::pair<std::string, double>> model_constants();

// Picks a strategy, and no more: for forward or, with request.training, for backward. It minimises the predicted cost
// over a few fixed batch sizes, never the call's own, because strategies add a row's sums in different orders and a
// row's result must be the same in any batch. The choice depends on cell, type, sizes, directions, packing and whether
// T > 1. request.strategy, if any, is taken as it is. A batch that the chosen strategy cannot run (cluster: above
// 1,048,560 rows, since a grid has 65,535 groups) runs in step.
struct Choice {
  Strategy strategy;
  bool in_sequence;  // PersistentLimits::in_sequence, if that is predicted to be faster over those batches
};
Choice choose(const PlanRequest& request, const DeviceLimits& limits);

// Throws std::invalid_argument if request.strategy cannot run; the message names the limit that fails.
Plan make_plan(const PlanRequest& request, const DeviceLimits& limits);

}  // namespace fr
