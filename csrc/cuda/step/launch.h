// The `step` strategy: one or two launches a time step, for any shape. Called by run.cpp. `block` too begins with the
// parameters of a first step (block/launch.cpp), and gates are rebuilt as if they were one such step.
#pragma once

#include <vector>

#include "../layout.h"

namespace fr {

// The tile of a launch, and its shared memory as kernel.cuh lays it out.
StepTile step_tile(int gates, Type type, int64_t depth_bytes, int64_t rows, int64_t shared_limit);
int64_t step_shared_bytes(const StepTile& tile, int gates, Type type);

// What all launches of a call share.
struct Launcher {
  const Layout& layout;
  Math math;
  int64_t shared_limit;
  const Kernels& kernels;
  void* stream;
  int directions;

  // Launches `phase` of the step that p describes, over `units`. The product's depth is direction 0's, the same in
  // both.
  void operator()(StepParams& p, Phase phase, int gates, int64_t units) const;
};

// A backward call over a range of steps. finish: after the last step one more iteration completes its gradients, those
// of the initial state.
struct BackwardSteps {
  int64_t count;
  bool finish;
  int64_t last() const { return finish ? count : count - 1; }  // iteration
};

// Fill p, which holds what all steps share, for iteration s.
void place_forward_step(const Layout& l, const ForwardArgs& args, const StepRange& range, int64_t s, StepParams& p);
void place_backward_step(const Layout& l, const BackwardArgs& args, const std::vector<BackwardBuffers>& buffers,
    const BackwardSteps& steps, int64_t s, StepParams& p);

void step_forward(const Launcher& launch, const ForwardArgs& args, const StepRange& range, StepParams& p);
void step_backward(const Launcher& launch, const BackwardArgs& args, const std::vector<BackwardBuffers>& buffers,
    const BackwardSteps& steps, StepParams& p);

struct PersistentBuffers;  // persistent/launch.h

// Rebuilds the gates that forward did not keep, for all rows of the range at once. Every row's old state is known, so
// no step waits for another: to the kernels all rows belong to one first step, which starts from those states. Inactive
// rows hold garbage that is never read. `call` holds the call's directions, initial states and options.
void rebuild_gates(const Launcher& launch, const BackwardArgs& args, const std::vector<BackwardBuffers>& buffers,
    const StepParams& call, const PersistentBuffers& memory);

}  // namespace fr
