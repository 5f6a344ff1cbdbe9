// The `step` strategy: one or two launches a time step, any shape. step.cpp turns the structs of rnn.h into launches of the
// kernels of one target (gpu: rnn_cuda.cpp, host: emulation/rnn_emulated.cpp); it makes no CUDA call itself.
#pragma once

#include <cstdint>
#include <string>

#include "persistent_params.h"
#include "step_params.h"

namespace fr {

// Bytes of scratch memory that a call needs; the caller allocates them, aligned to 256.
int64_t step_forward_workspace(const ForwardArgs& args);
int64_t step_backward_workspace(const BackwardArgs& args);

// A piece of a forward call: the steps [first, last) in processing order (for a reverse direction: counted from the end);
// last 0: all. `input_gates` then holds the piece's rows alone, the row of its first step in time being row 0; everything
// else is as for the whole. Pieces follow each other with the same arguments, first piece first.
struct Piece {
  int64_t first = 0, last = 0;
};

// "" if the `block` strategy (block.cuh: the whole sequence in one launch) serves such a layer, else why not.
std::string block_refusal(Cell cell, Type type, bool tf32, int64_t hidden, int64_t shared_limit);

// Shared memory that it takes.
int64_t block_shared_bytes(Cell cell, Type type, int64_t hidden);

// How a call runs. shared_limit: bytes of shared memory that a block may have.
struct Run {
  bool block = false;       // the block strategy; packed rows and what block_refusal refuses run step by step all the same
  bool persistent = false;  // likewise the persistent ones (persistent_partition.h), on a device of these limits:
  PersistentLimits limits;
  bool tf32 = false;
  int64_t shared_limit = 0;
  void* workspace = nullptr;
  void* stream = nullptr;
  unsigned long long* status = nullptr;  // host memory that the device can write to (deadline.h); null: waits have no deadline
  unsigned long long patience = 0;       // ns that a block waits for others, 0: without end
};

// Throw std::invalid_argument for a broken contract, std::runtime_error if an earlier call has written to run.status.
void step_forward(const ForwardArgs& args, const Piece& piece, const Run& run, const StepKernels& kernels);
void step_backward(const BackwardArgs& args, const Run& run, const StepKernels& kernels);

inline int64_t storage_bytes(Type type) { return type == Type::kFloat64 ? 8 : type == Type::kFloat32 ? 4 : 2; }
inline int64_t state_bytes(Type type) { return type == Type::kFloat64 ? 8 : 4; }
Math math_of(Type type, bool tf32);

// The tile of a launch and the shared memory it takes (step.cuh says what for).
StepTile step_tile(int gates, Type type, int64_t depth_bytes, int64_t rows, int64_t shared_limit);
int64_t step_shared_bytes(const StepTile& tile, int gates, Type type);

}  // namespace fr
