// The persistent strategies: a call in one launch of kernel.cuh, or one launch for each direction.
// partition.h decides how the weights spread. Called by run.cpp.
#pragma once

#include <vector>

#include "timeout.h"
#include "../layout.h"
#include "partition.h"

namespace fr {

// Flags, offsets of packed steps and partial sums, taken from a call's scratch memory.
struct PersistentBuffers {
  unsigned* flags;
  int64_t* offsets;  // null: padded rows
  float* sums = nullptr;
  PersistentBuffers(const Layout& l, int directions, Workspace& workspace);
  PersistentBuffers(unsigned* flags, int64_t* offsets) : flags(flags), offsets(offsets) {}
};

// Writes to `to` the states that rows [first_row, first_row + rows) of the sequence started from. `p` holds the call's
// directions, initial states and options.
void gather_states_before(const Layout& l, const BackwardArgs& args, int64_t first_row, int64_t rows,
    const GatheredStates (&to)[2], const StepParams& p, const PersistentBuffers& memory, const Kernels& kernels,
    void* stream);

// Run the call and return true; return false if the partition refuses it. `p` holds what all steps share.
bool persistent_forward(const Layout& l, const ForwardArgs& args, const std::vector<WholeWeights>& weights,
    const StepRange& range, const Run& run, const Kernels& kernels, const PersistentBuffers& memory,
    const StepParams& p);
bool persistent_backward(const Layout& l, const BackwardArgs& args, bool finish, const Run& run, const Kernels& kernels,
    const PersistentBuffers& memory, const std::vector<BackwardBuffers>& buffers, const StepParams& p);

}  // namespace fr
