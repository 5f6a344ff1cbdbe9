// Which kernels run a layer on a device, how its weights and batch are partitioned, and what a time step should cost there.
// A pure function of shapes, types and device limits: no CUDA call, so it can be printed (`fastrnn explain`), forced
// (FASTRNN_PLAN) and swept by tests on a machine without a GPU. The model's numbers and where they come from are in plan.cpp.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "../rnn.h"
#include "persistent_partition.h"

namespace fr {

constexpr int kLowestCapability = 80;

struct DeviceLimits {
  std::string name;
  int capability;  // 90: compute capability 9.0
  int sms;
  int64_t shared_per_block, shared_per_sm, registers_per_sm, l2_bytes;
  int max_cluster;  // 1: no clusters
  // Rates, for the prediction alone: dense TFLOP/s, TB/s, and KB/us an SM reads.
  double tensor16, tensor32, vector32, vector64, dram, l2_per_sm, peer_per_sm, shared_rate_per_sm;
  int resident_clusters[5] = {};  // as in PersistentLimits: 0, where no device was asked
};

// The cards that `fastrnn explain --card` knows: A100, H100, H200, L40S, RTX4090, B200.
const std::vector<DeviceLimits>& known_cards();
const DeviceLimits& card_limits(const std::string& name);  // throws std::invalid_argument naming the known ones
// Rates of the known card nearest to a capability, scaled to the number of SMs.
DeviceLimits limits_like(int capability, int sms);

enum class Strategy : int { kStep, kBlock, kCluster, kGrid, kStreaming };
constexpr int kStrategyCount = 5;
const char* strategy_name(Strategy strategy);
Strategy strategy_named(const std::string& name);  // throws std::invalid_argument naming all

// Registers a thread of a strategy's kernels may take, which is what the plan counts with: `gates` gate rows a unit, forward or
// backward. Allocated in eights. tests/test_compiled_kernels.py holds the compiler to it.
int planned_registers(Strategy strategy, Math math, int gates, bool backward);

struct PlanRequest {
  Cell cell = Cell::kLstm;
  Type type = Type::kFloat32;
  bool tf32 = false;
  int64_t steps = 1, batch = 1, hidden = 1, projection = 0;
  int directions = 1;
  bool training = false;
  bool packed = false;   // rows of each step as they lie, fewer and fewer (Shape::batch_sizes)
  std::string strategy;  // "": choose
  bool state_dropout = false;  // what enters the product is not the output
};

// Parts of a step's time in us: what the strategy pays to start or synchronise, to bring the state to every SM, to multiply,
// to read weights (from shared memory, L2 or DRAM; with FMA the operand from shared memory too), to read and write the step's rows in DRAM, and for gate mathematics.
struct StepCost {
  double launch = 0, exchange = 0, broadcast = 0, arithmetic = 0, weights = 0, rows = 0, pointwise = 0;
  double total() const;
  const char* bound() const;  // name of the largest part
};

struct Candidate {
  Strategy strategy;
  std::string refusal[2];  // forward, backward; "": can run; else the limit that fails, with numbers
  int blocks, threads, cluster, groups;  // grid in all; blocks a cluster (1: none); batch groups, each with its own weights
  int registers;          // a thread, at most, of any kernel of the call
  int64_t rows_per_group;
  int64_t weight_bytes;   // a direction's recurrent weights
  int64_t resident_bytes; // of them, on one SM
  int64_t streamed_bytes; // read from L2 by each SM in each step, for each chunk of rows
  int64_t shared_bytes;   // a block
  std::vector<std::string> partition[2];  // forward, backward: how the weights are spread, in words
  StepCost cost[2];        // forward, backward
  bool can_run(bool backward) const { return refusal[backward].empty(); }
};

struct Plan {
  PlanRequest request;
  DeviceLimits limits;
  std::vector<Candidate> candidates;  // one for each strategy, in the enumeration's order
  Strategy chosen[2];                 // forward, backward
  std::vector<std::string> reasons;   // one for each strategy
};

// What the persistent kernels are told of a device for a strategy (kCluster, kGrid or kStreaming).
PersistentLimits persistent_limits(Strategy strategy, const DeviceLimits& limits);

// The model's constants by name, for comparison with measurements: us, and the shares of dense rates that products reach.
std::vector<std::pair<std::string, double>> model_constants();

// The choice alone, without the candidates: what a call asks; of forward, or with request.training of backward. The lowest predicted
// cost over a few batch sizes that stand for all: it depends on cell, type, sizes, directions, packing and whether T > 1, not on the
// batch, so that a row's result is the same in any batch. request.strategy, if any, is taken as it is.
struct Choice {
  Strategy strategy;
  bool apart;  // PersistentLimits::apart: the weights of one direction fit, or nearly so
};
Choice choose(const PlanRequest& request, const DeviceLimits& limits);

// Throws std::invalid_argument if request.strategy names one that cannot run, saying which limit failed.
Plan make_plan(const PlanRequest& request, const DeviceLimits& limits);

}  // namespace fr
