// The persistent strategies: a call in one launch of persistent.cuh, weights spread as persistent_partition.h says. Called by
// step.cpp, which keeps what they have in common.
#pragma once

#include <vector>

#include "deadline.h"
#include "layout.h"
#include "persistent_partition.h"

namespace fr {

// Flags, the offsets of packed steps and partial sums: a part of a call's scratch memory.
struct PersistentBuffers {
  unsigned* flags;
  int64_t* offsets;  // null: padded
  float* sums = nullptr;
  PersistentBuffers(const Layout& l, int directions, Workspace& workspace);
  PersistentBuffers(unsigned* flags, int64_t* offsets) : flags(flags), offsets(offsets) {}
};

// The states that `rows` rows of the sequence started from, from the row first_row on. `p` holds directions, initial states and
// options of the call.
void gather_states_before(const Layout& l, const BackwardArgs& args, int64_t first_row, int64_t rows, const GatheredStates (&to)[2],
                          const StepParams& p, const PersistentBuffers& memory, const StepKernels& kernels, void* stream);

// Run the call and return true, or return false if the partition refuses. `p` holds what all steps share.
bool persistent_forward(const Layout& l, const ForwardArgs& args, const Piece& piece, const Run& run, const StepKernels& kernels,
                        const PersistentBuffers& memory, const StepParams& p);
bool persistent_backward(const Layout& l, const BackwardArgs& args, bool finish, const Run& run, const StepKernels& kernels,
                         const PersistentBuffers& memory, const std::vector<BackwardBuffers>& buffers, const StepParams& p);

}  // namespace fr
