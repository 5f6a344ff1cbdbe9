// See rnn_emulated.h.
#include "rnn_emulated.h"

#include <cstdlib>
#include <memory>
#include <stdexcept>

#include "../cuda/step.h"
#include "scheduler.h"

namespace fr {
namespace {

void check_strategy(const EmulationOptions& options) {
  if (options.strategy != "step" && options.strategy != "block")
    throw std::invalid_argument("strategy \"" + options.strategy + "\" is not among those of the emulated device: step, block");
}

Run run(const EmulationOptions& options, void* workspace, emulation::Schedule& schedule) {
  return {options.strategy == "block", options.tf32, options.shared_limit, workspace, &schedule};
}

// Scratch memory filled with NaN, aligned as a caller of the CUDA backend aligns it.
std::unique_ptr<void, void (*)(void*)> scratch(int64_t bytes) {
  void* memory = nullptr;
  if (bytes > 0) {
    memory = std::aligned_alloc(256, static_cast<size_t>(bytes));
    if (!memory) throw std::bad_alloc();
    for (int64_t i = 0; i < bytes; ++i) static_cast<unsigned char*>(memory)[i] = 0xFF;
  }
  return {memory, std::free};
}

}  // namespace

void emulated_forward(const ForwardArgs& args, const EmulationOptions& options) {
  check_strategy(options);
  emulation::Schedule schedule{options.seed};
  const auto workspace = scratch(step_forward_workspace(args));
  step_forward(args, {options.first, options.last}, run(options, workspace.get(), schedule), host::kStepKernels);
}

void emulated_backward(const BackwardArgs& args, const EmulationOptions& options) {
  check_strategy(options);
  emulation::Schedule schedule{options.seed};
  const auto workspace = scratch(step_backward_workspace(args));
  step_backward(args, run(options, workspace.get(), schedule), host::kStepKernels);
}

}  // namespace fr
