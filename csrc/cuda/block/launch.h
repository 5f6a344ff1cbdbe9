// The `block` strategy: a call in one launch of kernel.cuh, or of elementwise.cuh for cells without a product. Called
// by run.cpp; plan.cpp asks what it can run.
#pragma once

#include <string>
#include <vector>

#include "../step/launch.h"

namespace fr {

// "" if the strategy can run such a layer, else the reason.
std::string block_refusal(Cell cell, Type type, bool tf32, int64_t hidden, int64_t shared_limit);

// Shared memory that such a layer needs.
int64_t block_shared_bytes(Cell cell, Type type, int64_t hidden);

// Whether the strategy can run a call of this layout: rows are padded, and block_refusal is empty.
bool serves_block(const Layout& l, const Run& run);

// p holds what all steps share.
void block_forward(const Launcher& launch, const ForwardArgs& args, const std::vector<WholeWeights>& weights,
    const StepRange& range, StepParams& p);
void block_backward(const Launcher& launch, const BackwardArgs& args, const std::vector<WholeWeights>& weights,
    const std::vector<BackwardBuffers>& buffers, const BackwardSteps& steps, StepParams& p);

}  // namespace fr
