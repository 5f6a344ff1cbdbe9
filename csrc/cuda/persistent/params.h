// Parameters of one launch of a persistent kernel (kernel.cuh): a whole sequence, or a range of its steps, of one
// or two directions. Plain data, filled by launch.cpp. Fields without a comment are explained in partition.h.
#pragma once

#include "../params.h"

namespace fr {

constexpr int kPersistentStages = 3;  // stages of the operand's ring buffer in shared memory
constexpr int kPersistentBand = 16;   // batch rows that a block works on at once: a band
constexpr int kPersistentPitch = 4;   // padding of a row of partial sums, in elements
// Elements that the partial sums of a unit's gates take: three are padded to four, so that one instruction loads them.
constexpr int persistent_vector(int gates) { return gates == 3 ? 4 : gates; }
constexpr int kPersistentSlice = 128;  // bytes of depth in a slice
constexpr int kPersistentPlace = 128;  // projected.cuh: bytes of shared memory for its group's addresses
constexpr int kPersistentShare = 128;  // projected.cuh: elements whose partial sums a block adds up at once
// Limits of a device. Tests lower them.
struct PersistentLimits {
  int sms = 0;                          // also the most blocks resident together: one an SM
  int64_t shared_per_block = 0;         // bytes
  int max_cluster = 0;                  // most blocks of a thread-block cluster (before sm_90: 1). If not 0, a group is
                                        // one cluster; if 0, its blocks exchange through global memory
  int resident_clusters[5] = {};        // how many clusters of 1, 2, 4, 8, 16 blocks are resident together; 0: not
                                        // known, one block an SM is assumed
  bool streaming = false;               // weights that fit nowhere on the chip are read from L2 in each step; if false
                                        // they are refused
  bool in_sequence = false;             // two directions take a launch each, even if they fit together
  int warps = 8;                        // of a block
  int register_slices = 8;              // most slices of weights in a warp's registers
  int64_t resident_shared = INT64_MAX;  // most bytes of weights in a block's shared memory
};

// Units and batch rows of a warp's tile. FMA takes fewer units, because its sums take twice the registers, and because
// the weights then spread over more SMs.
constexpr int persistent_units(bool tensor) { return tensor ? 16 : 8; }
constexpr int persistent_row_tile(bool tensor) { return tensor ? 8 : 4; }
// Lanes that share a unit; each multiplies a part of the depth. FMA with one or two gate rows takes 8 lanes, so that
// each piece of the operand that a lane reads serves two of its units.
constexpr int persistent_unit_lanes(bool tensor, int gates) { return tensor || gates > 2 ? 4 : 8; }

// Slices of weights that fit a warp's registers beside sums and addresses. A slice takes 16 registers of a lane for
// each gate row; with FMA 8, which makes up for the larger sums.
constexpr int persistent_register_slices(int gates) { return gates == 1 ? 8 : gates == 2 ? 4 : 2; }
// The same for projected.cuh. partial: for the product that gives partial sums, else for the one of depth R.
constexpr int projected_register_slices(bool backward, bool partial) {
  return backward ? (partial ? 8 : 0) : (partial ? 0 : 2);
}

// Where a step's rows lie: at base + position * bytes. position is t; for packed rows it is the step's first row.
struct MovingRows {
  uintptr_t base = 0;  // 0: no such matrix
  int64_t bytes = 0;   // 0: all steps share one matrix
  int64_t row_stride = 0;
};

struct PersistentPhase {
  int units;  // results of the product
  int gates;  // gate rows a unit; in backward, tiles of units a warp
  int unit_warps, depth_warps;
  int unit_bits;             // log2 of a block's units, which are a power of two
  int first_slices, slices;  // slices of depth: of segment 0, of both segments
  int rounds, register_rounds, shared_rounds;
  int weights_offset;         // of the resident weights in shared memory
  int first_rounds;           // rounds of segment 0, if `held`
  bool held;                  // run_held (product.cuh) may multiply: all weights are in registers, and the operand lies
                              // in a cluster, or all slices are whole: in every round each warp has 128 bytes of one
                              // segment, and the rows of weights and operand are 16-byte aligned
  int sent_first, sent_last;  // cluster: the pointwise part broadcasts values [sent_first, sent_last) to the peers,
                              // numbered as in ClusterOperand::place
  bool operand_pending;       // the operand's rows are those of the step processed before, not of this step
  StepProduct product[2];     // of each direction; the addresses of its operands are in `operand`
  MovingRows operand[2][2];   // [direction][segment]
};

// Where the values of a gate, or of the state, lie in a cluster's operands.
struct ClusterValue {
  int at[2];       // offset in shared memory of the operand for even and odd steps
  int first_byte;  // of unit 0, in the operand's depth
};

// Bytes at the start of shared memory: the addresses of two steps for each phase, and the row pointers of both
// segments.
constexpr int kPersistentHeader = (4 * sizeof(StepDirection) + 2 * kPersistentBand * 8 + 127) / 128 * 128;

struct PersistentParams {
  StepParams step;  // direction[i] holds what all steps share
  PersistentPhase phase[2];
  int phases;
  MovingRows rows[2][StepMatrix::kCount];  // each direction's matrices
  int first_direction;                     // which direction of the call direction[0] is
  int64_t first_step[2];                   // t of the first step in processing order
  int count;                               // steps to process
  int last;                                // last iteration: count - 1; in backward `count` if the gradient of the
                                           // initial state is wanted
  int64_t total_steps, batch;              // T, B
  const uint8_t* resets;                   // [N] by row, or null
  const int64_t* offsets;                  // [T + 1] first row of each step, on the device; null: padded rows
  int groups;                              // of each direction
  int rows_per_group, bands;               // the last group may have fewer
  int prefetched;                          // blocks of H values a row to prefetch for a step: gates, or saved values
  bool cluster;                            // a group is a cluster; operands are exchanged through shared memory
  int ring_offset, stage_bytes;            // of the operand's ring buffer
  int operand_at[2][2], operand_bytes;     // cluster: offsets of each product's operand for even and odd steps; bytes
                                           // of all
  ClusterValue value[4];                   // by their numbers in ClusterOperand::place
  int partial_offset, partial_bytes;
  unsigned* flags;                // [directions][groups][blocks + 1], zero before the launch; a group's last
                                  // one is its abort flag
  unsigned long long timeout_ns;  // of a wait for a flag; 0: none
  unsigned long long* status;     // host memory (timeout.h)
  // Used by projected.cuh only:
  float* sums;     // partial sums [directions][groups][slots][blocks][R / 16, rounded up][kPersistentBand][16]
  int slots;       // bands of a group whose partial sums are in memory at once
  int own_offset;  // of the block's own operand in shared memory
};

// Parameters of the kernel that gathers the states which the rows of a range of steps started from (rebuild.cuh). Of
// `sequence` only these are filled: sizes, offsets, resets, `step`, and the rows of kOutputBefore and kCellsBefore.
struct StatesBeforeParams {
  PersistentParams sequence;
  int64_t first_row, rows;        // the range's first row, counted in the sequence; number of its rows
  int64_t first_step, last_step;  // the steps that these rows belong to: [first_step, last_step)
  void* h[2];                     // of each direction: [rows, R] in the storage type
  void* c[2];                     // [rows, cells] in the state type, or null
  int64_t cells;                  // cell state values a row: kCells*H
};

// Parameters of prepare.cuh: flags to zero, and up to kValues offsets of steps to store at `to`.
struct PrepareParams {
  static constexpr int kValues = 448;
  unsigned* flags;
  int64_t flag_count;
  int64_t* to;
  int count;
  int64_t value[kValues];
};

}  // namespace fr
