// How a persistent launch spreads weights and batch rows over a device. A pure function of shapes and limits: the
// launcher (launch.cpp) follows it, the plan (plan.cpp) predicts its cost.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "params.h"
#include "../run.h"

namespace fr {

struct PersistentRequest {
  Cell cell = Cell::kLstm;
  Type type = Type::kFloat32;
  bool tf32 = false;
  int64_t batch = 1, hidden = 1, projection = 0;
  int directions = 1;
  bool backward = false;
};

// One product of a step. The block's warps are unit_warps x depth_warps. Warp (u, d) multiplies the weights of
// tile_units * tiles units by slices d, d + depth_warps, ... of the depth, a slice a round.
struct PhasePartition {
  int gates = 1;       // gate rows a unit
  int tile_units = 0;  // 16; with FMA 8
  int tiles = 1;       // tiles of units a warp: 1 or, with one gate row, 2
  // partial sums: a block multiplies only the depth of its own units, and the blocks add up their sums. Warp w then
  // takes tiles of units w, w + unit_warps, ..., and a round is a slice of one tile
  bool partial = false;
  int64_t units = 0;     // results of the product: H or R
  int first_slices = 0;  // slices of 128 bytes of depth in the first segment (StepProduct)
  int slices = 0;        // slices in both segments
  int unit_warps = 1, depth_warps = 1;
  int rounds = 0;           // slices a warp
  int register_rounds = 0;  // the first rounds, whose weights are in registers
  int shared_rounds = 0;    // the next ones, whose weights are in shared memory; the rest is streamed from L2 each time
  int streamed_rounds() const { return rounds - register_rounds - shared_rounds; }
  int read_slices() const { return rounds * depth_warps; }  // of the operand; those beyond the depth are zero
  int64_t block_units() const { return static_cast<int64_t>(tile_units) * tiles * unit_warps; }
  // Bytes of weights in one round, for all warps of a block.
  int64_t round_bytes() const { return block_units() * depth_warps * gates * kPersistentSlice; }
  // Bytes of the warps' sums of a band.
  int64_t partial_bytes() const {
    return static_cast<int64_t>(unit_warps) * depth_warps * kPersistentBand *
           (tile_units * tiles * persistent_vector(gates) + kPersistentPitch) * 4;
  }
};

struct PersistentPartition {
  std::string refusal;  // "": can run; else the limit that fails, with numbers
  int phases = 0;       // products a step
  PhasePartition phase[2];
  int directions = 1;          // of a launch; 1 if the two directions of a call run in sequence
  int blocks = 0;              // of a group; together they hold the weights of a direction once
  int groups = 0;              // of a direction, each with its own batch rows
  int64_t rows_per_group = 0;  // the last group may have fewer
  int warps = 0;               // of a block
  bool cluster = false;        // a group is a cluster, and each block holds the operands of all rows in shared memory
  int64_t operand_at[2][2] = {};  // offsets of the operands: [phase][even or odd step] (cluster.cuh)
  // Shared memory of a block, in this order:
  //   header            2.4 KiB of addresses
  //   resident weights  of both phases; a round takes 8 warps * 16 units * gates * 128 bytes: 64 KiB for an LSTM, 16
  //                     with one gate row
  //   operand           a ring of 3 rounds of 16 rows * depth_warps * 128 bytes: 48 KiB at most. In a cluster the whole
  //                     operands instead, 2 KiB a slice, the first product's twice: LSTM 512 in 16 bit takes 32 KiB
  //                     forward and 128 KiB backward. Backward's does not fit beside the weights of a block in a
  //                     cluster of 8 (256 KiB, half of them in registers), but in one of 16
  //   partial sums      8 warps * 16 rows * (16 units * gates + 4) * 4 bytes: 34 KiB at most
  int64_t weights_offset[2] = {}, ring_offset = 0, stage_bytes = 0, partial_offset = 0;
  // Of projected.cuh:
  int64_t own_offset = 0;  // where the block's own operand, of the product that gives partial sums, lies
  int slots = 0;           // bands of a group whose partial sums are in global memory at once
  int64_t sums_bytes = 0;  // global memory for all partial sums of a launch
  int64_t shared_bytes = 0;
  int64_t resident_bytes = 0;  // weights in a block's registers and shared memory
  int64_t streamed_bytes = 0;  // weights that a block reads from L2 for each band of rows and step
};

namespace detail {

// Doubles the warps that share the depth until the weights fit the registers, then halves them until the blocks fit the
// device. Must depend on sizes and device only, never on the batch, because it decides the order of a row's sums.
inline void share_warps(PhasePartition& phase, int warps, int register_slices, int most_blocks) {
  const auto blocks = [&] {
    return divide_up(phase.units, static_cast<int64_t>(phase.tile_units) * (warps / phase.depth_warps));
  };
  while (phase.depth_warps < warps && phase.depth_warps < phase.slices &&
         divide_up(phase.slices, phase.depth_warps) > register_slices)
    phase.depth_warps *= 2;
  while (phase.depth_warps > 1 && blocks() > most_blocks) phase.depth_warps /= 2;
  phase.unit_warps = warps / phase.depth_warps;
  phase.rounds = static_cast<int>(divide_up(phase.slices, phase.depth_warps));
  phase.register_rounds = std::min(phase.rounds, register_slices / phase.tiles);
}

}  // namespace detail

// How many clusters of this many blocks are resident at once.
inline int64_t resident_clusters(const PersistentLimits& limits, int blocks) {
  int log = 0;
  while (1 << log < blocks) ++log;
  return std::max(1, limits.resident_clusters[log] > 0 ? limits.resident_clusters[log] : limits.sms >> log);
}

namespace detail {
// Limits of the partial sums in global memory. Several bands of a group are in flight, to hide the exchange; fewer if
// their sums would fill L2. At H = 4096, R = 512 a band takes 4 MiB. The number of blocks is capped, so that a call's
// scratch memory does not depend on the device: at most 32 MiB while R <= 2048. A larger R has one band in flight, of
// at most 192 * 64 * R bytes.
constexpr int kMostSummingBlocks = 192, kMostSlots = 4;
constexpr int64_t kMostSumsBytes = 32 << 20;

inline int64_t sums_bytes_of_block(int64_t width) {
  return kPersistentBand * divide_up(width, 16) * 16 * static_cast<int64_t>(sizeof(float));
}
inline int64_t summing_slots(int64_t width, int64_t rows) {
  const int64_t fit = std::max<int64_t>(1, kMostSumsBytes / (kMostSummingBlocks * sums_bytes_of_block(width)));
  return std::min({static_cast<int64_t>(kMostSlots), fit, divide_up(rows, kPersistentBand)});
}

// projected.cuh: one product of depth R for a block's units, and one over the depth of these units for all R results.
inline PersistentPartition projected_partition(const PersistentRequest& request, const PersistentLimits& limits) {
  const int64_t element = storage_bytes(request.type);
  const int own = request.backward ? 1 : 0, own_gates = request.backward ? 4 : 1;
  const bool tensor = request.type != Type::kFloat32 || request.tf32;
  PersistentPartition p;
  p.phases = 2, p.directions = request.directions;
  p.warps = limits.warps;
  const auto refuse = [&](std::string why) {
    p.refusal = std::move(why);
    return p;
  };
  const auto slices = [&](int64_t depth) { return static_cast<int>(divide_up(depth * element, kPersistentSlice)); };
  PhasePartition& product = p.phase[own];
  PhasePartition& partial = p.phase[1 - own];
  // Forward's partition serves both passes: forward's first-product weights are backward's partial-sum weights.
  product.tile_units = partial.tile_units = persistent_units(tensor);
  product.units = request.hidden;
  product.first_slices = product.slices = slices(request.projection);
  const int most_blocks = std::min(limits.sms, kMostSummingBlocks) / request.directions;
  share_warps(product, limits.warps, std::min(limits.register_slices, persistent_register_slices(4)), most_blocks);
  product.gates = request.backward ? 1 : 4;
  p.blocks = static_cast<int>(divide_up(product.units, product.block_units()));
  if (p.blocks > most_blocks)
    return refuse("a copy of the weights takes " + std::to_string(p.blocks) + " blocks, the device has " +
                  std::to_string(most_blocks) + " SMs for each of " + std::to_string(request.directions) +
                  " directions");
  partial.partial = true;
  partial.units = request.projection;
  partial.first_slices = partial.slices = slices(own_gates * product.block_units());
  partial.unit_warps = limits.warps;
  partial.rounds = static_cast<int>(divide_up(partial.units, partial.block_units())) * partial.slices;
  for (const int i : {0, 1})
    p.phase[i].register_rounds = std::min(
        {p.phase[i].rounds, limits.register_slices, projected_register_slices(request.backward, p.phase[i].partial)});

  const int64_t batch = std::max<int64_t>(1, request.batch), tile = persistent_row_tile(tensor);
  const int64_t groups = std::min<int64_t>(most_blocks / p.blocks, divide_up(batch, tile));
  p.rows_per_group = divide_up(divide_up(batch, groups), tile) * tile;
  p.groups = static_cast<int>(divide_up(batch, p.rows_per_group));
  p.slots = static_cast<int>(summing_slots(request.projection, p.rows_per_group));
  p.sums_bytes = request.directions * p.groups * p.slots * p.blocks * sums_bytes_of_block(request.projection);

  p.stage_bytes = product.depth_warps * kPersistentBand * kPersistentSlice;
  const int64_t ring_bytes = kPersistentStages * p.stage_bytes,
                own_bytes = partial.slices * kPersistentBand * kPersistentSlice;
  const int64_t partial_bytes = std::max<int64_t>(product.partial_bytes(), 4 * limits.warps * kPersistentShare);
  const int64_t ring_or_sums = std::max(ring_bytes, partial_bytes);  // both lie in the same place
  const int64_t working = kPersistentHeader + kPersistentPlace + own_bytes + ring_or_sums;
  if (limits.shared_per_block < working)
    return refuse("a block needs " + std::to_string(working) + " bytes of shared memory, the device gives " +
                  std::to_string(limits.shared_per_block));
  int64_t room = std::min(limits.shared_per_block - working, limits.resident_shared),
          offset = kPersistentHeader + kPersistentPlace;
  for (const int i : {own, 1 - own}) {
    PhasePartition& phase = p.phase[i];
    phase.shared_rounds =
        static_cast<int>(std::min<int64_t>(phase.rounds - phase.register_rounds, room / phase.round_bytes()));
    p.weights_offset[i] = offset;
    offset += phase.shared_rounds * phase.round_bytes();
    room -= phase.shared_rounds * phase.round_bytes();
    p.resident_bytes += (phase.register_rounds + phase.shared_rounds) * phase.round_bytes();
    p.streamed_bytes += phase.streamed_rounds() * phase.round_bytes();
  }
  if (!request.backward && product.streamed_rounds() > 0)
    return refuse("the gates' weights of a block take " + std::to_string(product.rounds * product.round_bytes()) +
                  " bytes, it has room for " +
                  std::to_string((product.rounds - product.streamed_rounds()) * product.round_bytes()));
  p.own_offset = offset;
  p.ring_offset = p.partial_offset = offset + own_bytes;
  p.shared_bytes = p.partial_offset + ring_or_sums;
  if (p.streamed_bytes > 0 && !limits.streaming)
    return refuse("a block would hold " + std::to_string(p.resident_bytes + p.streamed_bytes) +
                  " bytes of weights, it has room for " + std::to_string(p.resident_bytes));
  return p;
}

// "" or why no persistent kernel serves such a layer, whatever its sizes.
inline std::string layer_refusal(const PersistentRequest& request, const PersistentLimits& limits) {
  const CellFacts& cell = facts_of(request.cell);
  if (!cell.multiplies()) return "a recurrence without a product holds no weights on the chip";
  if (request.type == Type::kFloat64) return "float64 has no persistent kernel";
  if (limits.sms < request.directions) return "fewer SMs than directions";
  if (limits.max_cluster > 0 && cell.projects()) return "the projected LSTM has no kernel at cluster scope";
  if (cell.projects() && request.cell != Cell::kLstmProjected) return "projected.cuh serves the projected LSTM alone";
  if (!cell.projects() && cell.two_phases() && (cell.phase[0].gates != 2 || cell.phase[1].gates != 1))
    return "of cells with two products those with 2 gate rows and 1 have a persistent kernel, this one has " +
           std::to_string(cell.phase[0].gates) + " and " + std::to_string(cell.phase[1].gates);
  return "";
}

// Sizes of the products.
inline void set_products(PersistentPartition& p, const PersistentRequest& request) {
  const CellFacts& cell = facts_of(request.cell);
  const int64_t element = storage_bytes(request.type), hidden = request.hidden;
  const int64_t width = request.projection > 0 ? request.projection : hidden;
  const auto slices = [&](int64_t depth) { return static_cast<int>(divide_up(depth * element, kPersistentSlice)); };
  PhasePartition& first = p.phase[0];
  PhasePartition& second = p.phase[1];
  if (request.backward) {
    const int whole = cell.split_gate >= 0 ? cell.split_gate : cell.phase[0].gates;
    first.units = width;
    first.first_slices = slices(whole * hidden);
    first.slices = first.first_slices + (cell.split_gate >= 0 ? slices(hidden) : 0);
    second.units = hidden, second.first_slices = second.slices = slices(hidden);
  } else {
    first.gates = cell.phase[0].gates;
    first.units = hidden, first.first_slices = first.slices = slices(width);
    second.units = width, second.first_slices = second.slices = slices(hidden);
  }
}

// Spreads the units over blocks and warps. Returns "" or a refusal, as the next two do.
inline std::string share_units(
    PersistentPartition& p, const PersistentRequest& request, const PersistentLimits& limits) {
  const bool tensor = request.type != Type::kFloat32 || request.tf32;
  // Clusters never wait for each other, so directions may run in sequence, and one cluster may take all SMs. In a
  // cluster the second product takes no more blocks than the first, because every block adds to the exchange.
  const int most_blocks = limits.sms / request.directions, most_cluster = std::min(limits.max_cluster, limits.sms);
  for (int i = 0; i < p.phases; ++i) {
    const int registers = i == 0 ? std::min(limits.register_slices, persistent_register_slices(p.phase[i].gates)) : 0;
    p.phase[i].tile_units = persistent_units(tensor);
    share_warps(p.phase[i], limits.warps, registers, !p.cluster ? most_blocks : i == 0 ? most_cluster : p.blocks);
    p.blocks = std::max(p.blocks, static_cast<int>(divide_up(p.phase[i].units, p.phase[i].block_units())));
  }
  // A cluster's size is a power of two; the last blocks may have no units.
  while (p.cluster && (p.blocks & (p.blocks - 1))) ++p.blocks;
  const std::string needs = "a copy of the weights takes " + std::to_string(p.blocks) + " blocks, ";
  if (p.cluster && p.blocks > most_cluster && limits.max_cluster == 1)
    return needs + "the device has no thread-block clusters";
  if (p.cluster && p.blocks > most_cluster) return needs + "a cluster has at most " + std::to_string(most_cluster);
  if (!p.cluster && p.blocks > most_blocks)
    return needs + "the device has " + std::to_string(limits.sms) + " SMs for " + std::to_string(request.directions) +
           " directions";
  return "";
}

// Splits the rows, in whole tiles, over as many groups as fit the device: a group with fewer rows gathers less.
// Clusters never wait for each other, so a launch may have more of them than fit at once. A cluster has at most one
// band of rows, so that the operand fits shared memory in any batch.
inline std::string share_rows(
    PersistentPartition& p, const PersistentRequest& request, const PersistentLimits& limits) {
  const bool tensor = request.type != Type::kFloat32 || request.tf32;
  const int64_t batch = std::max<int64_t>(1, request.batch), tile = persistent_row_tile(tensor);
  const int64_t most_groups = p.cluster ? std::max<int64_t>(1, resident_clusters(limits, p.blocks) / request.directions)
                                        : limits.sms / request.directions / p.blocks;
  const int64_t groups = std::min<int64_t>(most_groups, divide_up(batch, tile));
  p.rows_per_group = divide_up(divide_up(batch, groups), tile) * tile;
  if (p.cluster) p.rows_per_group = std::min<int64_t>(p.rows_per_group, kPersistentBand);
  if (divide_up(batch, p.rows_per_group) > kMostBlocksY) return "more groups of rows than a grid has";
  p.groups = static_cast<int>(divide_up(batch, p.rows_per_group));
  return "";
}

// Lays out shared memory. Weights get the room that the operand and the partial sums leave.
inline std::string share_memory(
    PersistentPartition& p, const PersistentRequest& request, const PersistentLimits& limits) {
  const PhasePartition& first = p.phase[0];
  const PhasePartition& second = p.phase[1];
  int64_t partial_bytes = 0;
  for (int i = 0; i < p.phases; ++i) {
    const PhasePartition& phase = p.phase[i];
    p.stage_bytes = std::max<int64_t>(p.stage_bytes, phase.depth_warps * kPersistentBand * kPersistentSlice);
    partial_bytes = std::max(partial_bytes, phase.partial_bytes());
  }
  int64_t ring_bytes = kPersistentStages * p.stage_bytes;
  if (p.cluster) {
    const int64_t slice_bytes = kPersistentBand * kPersistentSlice, first_bytes = first.read_slices() * slice_bytes;
    p.operand_at[0][1] = p.phases == 1 || request.backward ? first_bytes : 0;
    p.operand_at[1][0] = p.operand_at[1][1] = p.operand_at[0][1] + first_bytes;
    ring_bytes = p.operand_at[1][0] + (p.phases == 2 ? second.read_slices() * slice_bytes : 0);
  }
  const int64_t working = kPersistentHeader + ring_bytes + partial_bytes;
  if (limits.shared_per_block < working)
    return "a block needs " + std::to_string(working) + " bytes of shared memory, the device gives " +
           std::to_string(limits.shared_per_block);
  int64_t room = std::min(limits.shared_per_block - working, limits.resident_shared), offset = kPersistentHeader;
  for (int i = 0; i < p.phases; ++i) {
    PhasePartition& phase = p.phase[i];
    phase.shared_rounds =
        static_cast<int>(std::min<int64_t>(phase.rounds - phase.register_rounds, room / phase.round_bytes()));
    p.weights_offset[i] = offset;
    offset += phase.shared_rounds * phase.round_bytes();
    room -= phase.shared_rounds * phase.round_bytes();
    p.resident_bytes += (phase.register_rounds + phase.shared_rounds) * phase.round_bytes();
    p.streamed_bytes += phase.streamed_rounds() * phase.round_bytes();
  }
  p.ring_offset = offset;
  for (auto& places : p.operand_at)
    for (int64_t& place : places) place += offset;
  p.partial_offset = offset + ring_bytes;
  p.shared_bytes = p.partial_offset + partial_bytes;
  if (p.streamed_bytes > 0 && (p.cluster || !limits.streaming))
    return "a block would hold " + std::to_string(p.resident_bytes + p.streamed_bytes) +
           " bytes of weights, it has room for " + std::to_string(p.resident_bytes);
  return "";
}

// tiles: tiles of units a warp in the first phase.
inline PersistentPartition partition_with(int tiles, const PersistentRequest& request, const PersistentLimits& limits) {
  const CellFacts& cell = facts_of(request.cell);
  PersistentPartition p;
  p.phases = cell.phases, p.directions = request.directions;
  p.warps = limits.warps, p.cluster = limits.max_cluster > 0;
  p.refusal = layer_refusal(request, limits);
  if (!p.refusal.empty()) return p;
  if (cell.projects()) return projected_partition(request, limits);
  set_products(p, request);
  p.phase[0].tiles = tiles;
  for (const auto share : {share_units, share_rows, share_memory}) {
    p.refusal = share(p, request, limits);
    if (!p.refusal.empty()) break;
  }
  return p;
}

// Backward's operand is four times forward's, so with many rows a group the gather dominates. Then a warp takes two
// tiles of units, half of their weights in registers and the rest in shared memory. That halves the blocks of a group,
// so that twice the groups fit the device, and a block gathers half the rows.
// Predicted on an H100 for LSTM 1024: 5.8 us in place of 8.6 at B = 64, 19 in place of 34 at B = 256. The order of a
// row's sums stays the same, so this may depend on the batch.
// Clusters of more than 8 blocks need free SMs of one GPC (CUDA programming guide, "Thread Block Clusters"), so only
// layers that 8 blocks cannot hold use them.
inline PersistentPartition partition_of_launch(const PersistentRequest& request, const PersistentLimits& limits) {
  constexpr int kPortableCluster = 8;
  PersistentLimits portable = limits;
  portable.max_cluster = std::min(limits.max_cluster, kPortableCluster);
  const PersistentPartition narrow = partition_with(1, request, portable);
  if (limits.max_cluster > kPortableCluster && !narrow.refusal.empty()) return partition_with(1, request, limits);
  if (!narrow.refusal.empty() || !request.backward || narrow.cluster || narrow.phases > 1) return narrow;
  const PersistentPartition wide = partition_with(2, request, limits);
  const bool fewer_rows =
      wide.refusal.empty() && wide.streamed_bytes == 0 && wide.rows_per_group < narrow.rows_per_group;
  return fewer_rows ? wide : narrow;
}

}  // namespace detail

// Bytes of partial sums that any launch of such a call writes, on any device: part of the call's scratch memory.
inline int64_t persistent_sums_bytes(Cell cell, int64_t batch, int64_t hidden, int64_t projection, int directions) {
  if (!facts_of(cell).projects() || batch < 1) return 0;
  const int64_t blocks =
      divide_up(hidden, persistent_units(false)) * divide_up(batch, persistent_row_tile(false)) * directions;
  return std::min<int64_t>(blocks, detail::kMostSummingBlocks) * detail::summing_slots(projection, batch) *
         detail::sums_bytes_of_block(projection);
}

// Two directions that do not fit together run in sequence. Refusals ignore the batch size, so this choice does too.
inline PersistentPartition persistent_partition(const PersistentRequest& request, const PersistentLimits& limits) {
  PersistentRequest one = request;
  one.directions = 1;
  if (limits.in_sequence) return detail::partition_of_launch(one, limits);
  const PersistentPartition together = detail::partition_of_launch(request, limits);
  if (together.refusal.empty() || request.directions == 1) return together;
  const PersistentPartition in_sequence = detail::partition_of_launch(one, limits);
  return in_sequence.refusal.empty() ? in_sequence : together;
}

}  // namespace fr
