// What a launch of a persistent kernel (persistent.cuh) is told: a whole sequence, or a piece of it, of one direction or two.
// Plain data; filled by persistent.cpp. `Partition` fields are those of persistent_partition.h.
#pragma once

#include "step_params.h"

namespace fr {

constexpr int kPersistentStages = 3;       // of the operand's ring in shared memory
constexpr int kPersistentChunk = 16;       // batch rows that a block works on at once
constexpr int kPersistentPitch = 4;        // beyond the units, of a row of partial sums
constexpr int kPersistentSlice = 128;      // bytes of depth
constexpr int kPersistentPlace = 128;      // bytes of shared memory where projected.cuh keeps what a block is told of its group
constexpr int kPersistentShare = 128;      // elements whose partial sums of all blocks a block adds up at once
// What a device gives, and what a test takes away from it.
struct PersistentLimits {
  int sms = 0;                          // blocks that are resident together: one an SM
  int64_t shared_per_block = 0;         // bytes
  int max_cluster = 0;                  // blocks; not 0: a group is one thread-block cluster (sm_90 and newer, or one block)
  int resident_clusters[5] = {};        // of 1, 2, 4, 8, 16 blocks: so many at once, 0: as many as there are SMs for
  bool streaming = false;               // weights that fit nowhere are read from L2 each step; else they are refused
  bool apart = false;                   // two directions run one after the other, even if they fit together
  int warps = 8;                        // of a block
  int register_slices = 8;              // at most so many slices of weights in a warp's registers
  int64_t resident_shared = INT64_MAX;  // bytes of weights at most in a block's shared memory
};

// Units of a warp's tile, and batch rows that it multiplies together: on tensor cores, or with FMA, whose sums take twice the registers
// and whose weights are spread over more SMs.
constexpr int persistent_units(bool tensor) { return tensor ? 16 : 8; }
constexpr int persistent_row_tile(bool tensor) { return tensor ? 8 : 4; }
// Lanes that share a unit: each multiplies a part of the depth. FMA, few gate rows (of the kernel): more lanes, so that a piece of
// the operand, once read, serves two units of its lane.
constexpr int persistent_unit_lanes(bool tensor, int gates) { return tensor || gates > 2 ? 4 : 8; }

// Slices of weights that a warp's registers hold beside sums and addresses: 16 registers a slice and gate row; with FMA 8, as much as
// the sums of a gate row take more.
constexpr int persistent_register_slices(int gates) { return gates == 1 ? 8 : gates == 2 ? 4 : 2; }
// The same of projected.cuh: of the product with depth R, or of the one with partial sums, which has one gate row.
constexpr int projected_register_slices(bool backward, bool partial) { return backward ? (partial ? 8 : 0) : (partial ? 0 : 2); }

// Where the rows of step t lie: at base + position * bytes, position being t, or in packed rows the step's first row.
struct MovingRows {
  uintptr_t base = 0;  // 0: there are none
  int64_t bytes = 0;   // 0: all steps share them
  int64_t row_stride = 0;
};

struct PersistentPhase {
  int units;                 // results of the product
  int gates;                 // gate rows a unit, or in backward tiles of units a warp
  int unit_warps, depth_warps;
  int first_slices, slices;  // slices of depth: of segment 0, of both
  int rounds, register_rounds, shared_rounds;
  int weights_offset;        // of the resident weights in shared memory
  int told_first, told_last; // in a cluster: what the pointwise part tells the peers, as numbers of ClusterOperand::place
  bool operand_pending;      // the operand's rows are those of the step processed before, else this step's
  StepProduct product[2];    // of each direction; its operands' addresses are those of `operand`
  MovingRows operand[2][2];  // [direction][segment]
};

// Bytes of the fixed part of shared memory: two steps' addresses for each phase, row pointers of both segments.
constexpr int kPersistentHeader = (4 * sizeof(StepDirection) + 2 * kPersistentChunk * 8 + 127) / 128 * 128;

struct PersistentParams {
  StepParams step;                        // direction[i]: what all steps share
  PersistentPhase phase[2];
  int phases;
  MovingRows rows[2][kStepMatrices];      // of each direction's matrices, in the order of StepDirection
  int first_direction;                    // of the call, is direction[0] here
  int64_t first_step[2];                  // t of the first step in processing order
  int count;                              // steps to process
  int last;                               // last iteration: count - 1, or count in backward if the state before is wanted
  int64_t total_steps, batch;             // T, B
  const uint8_t* resets;                  // [N] by row, or null
  const int64_t* offsets;                 // [T + 1] first row of each step, on the device, or null: padded
  int groups;                             // of each direction
  int rows_per_group;
  int prefetched;                         // blocks of H values a row that a step reads: gates, or saved values
  bool cluster;                           // the group is a cluster: operands are exchanged through shared memory
  int ring_offset, stage_bytes;           // of the operand's ring
  int operand_at[2][2], operand_bytes;      // of a cluster: operands of each product in steps of even and odd number; of all
  int split_gate, second_gate;            // values that have a place of their own in a cluster's operands, or -1
  int partial_offset, partial_bytes;
  unsigned* flags;                        // [directions][groups][blocks + 1], zero before the launch; last: the group is given up
  unsigned long long patience;            // ns to wait for a flag, 0: without end
  unsigned long long* status;             // of the host (deadline.h)
  // projected.cuh alone:
  float* sums;                            // partial sums: [directions][groups][slots][blocks][R / 16][kPersistentChunk][16]
  int slots;                              // chunks of a group whose partial sums are kept at once
  int own_offset;                         // of the own operand in shared memory
};

// Places of StepDirection's matrices that hold the states before a step.
constexpr int kOutputBefore = 2, kCellsBefore = 5;

// Rows of a range of steps: of `call` sizes, offsets, resets, the options in `step` and the two matrices of states before count.
struct StatesBeforeParams {
  PersistentParams call;
  int64_t first_row, rows;  // of the range, and of the sequence the row that is its first
  int64_t first_step, last_step;  // steps among which the rows lie
  void* h[2];               // of each direction: [rows, R] storage
  void* c[2];               // [rows, cells] state type, or null
  int64_t cells;            // cell states a row: kCells*H
};

// Before a persistent launch: zeroes the flags and stores a part of the steps' offsets, which come as parameters so that no
// host memory is read later.
struct PrepareParams {
  static constexpr int kValues = 448;
  unsigned* flags;
  int64_t flag_count;
  int64_t* to;
  int count;
  int64_t value[kValues];
};

}  // namespace fr
