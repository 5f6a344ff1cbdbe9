// See rnn_emulated.h.
#include "rnn_emulated.h"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>

#include "../cuda/run.h"
#include "memory.h"

namespace fr {
namespace {

// Bytes of shared memory: so few that the shapes of tests stream their weights.
constexpr int64_t kStreamingShared = 4 * 1024;

// The time a poll takes on the emulated clock if a block is to stall beyond a timeout, so that no test waits for
// seconds.
constexpr unsigned long long kPollNanoseconds = 1'000'000'000;

emulation::Schedule schedule_of(const EmulationOptions& options) {
  return {options.seed, options.stall_after < 0 || options.timeout_ns == 0 ? 0 : kPollNanoseconds, options.stall_after,
      options.stalled};
}

Run how_to_run(const EmulationOptions& options, void* workspace, emulation::Schedule& schedule) {
  Run run;
  run.block = options.strategy == "block";
  const bool cluster = options.strategy == "cluster";
  run.persistent = options.strategy == "grid" || options.strategy == "streaming" || cluster;
  if (!run.block && !run.persistent && options.strategy != "step")
    throw std::invalid_argument("strategy \"" + options.strategy +
                                "\" is not among those of the emulated device: step, block, cluster, grid, streaming");
  run.limits = options.limits;
  if (!cluster) run.limits.max_cluster = 0;
  run.limits.streaming = options.strategy == "streaming";
  if (run.limits.streaming) run.limits.resident_shared = std::min(run.limits.resident_shared, kStreamingShared);
  run.tf32 = options.tf32, run.shared_limit = options.shared_limit;
  run.workspace = workspace, run.stream = &schedule;
  run.status = options.status, run.timeout_ns = options.timeout_ns;
  return run;
}

// Scratch memory filled with NaN, with the alignment that the CUDA backend asks of its caller. If a test has registered
// its own memory, this and the status word are registered too.
struct Scratch {
  std::unique_ptr<void, void (*)(void*)> memory{nullptr, std::free};
  std::optional<emulation::Registered> registered, status;

  Scratch(int64_t bytes, const EmulationOptions& options) {
    if (bytes > 0) memory.reset(std::aligned_alloc(256, static_cast<size_t>(bytes)));
    if (bytes > 0 && !memory) throw std::bad_alloc();
    for (int64_t i = 0; i < bytes; ++i) static_cast<unsigned char*>(memory.get())[i] = 0xFF;
    if (emulation::registered_memory().empty()) return;
    registered.emplace(memory.get(), static_cast<size_t>(bytes));
    status.emplace(options.status, sizeof *options.status);
  }
};

void layer_norm(LayerNormArgs args, bool backward, const EmulationOptions& options) {
  emulation::Schedule schedule = schedule_of(options);
  args.stream = &schedule;
  run_layer_norm(args, backward, host::kKernels);
}

}  // namespace

void emulated_forward(const ForwardArgs& args, const EmulationOptions& options) {
  emulation::Schedule schedule = schedule_of(options);
  const Scratch workspace(forward_workspace(args), options);
  run_forward(
      args, {options.first, options.last}, how_to_run(options, workspace.memory.get(), schedule), host::kKernels);
}

void emulated_backward(const BackwardArgs& args, const EmulationOptions& options) {
  emulation::Schedule schedule = schedule_of(options);
  const Scratch workspace(backward_workspace(args), options);
  run_backward(args, how_to_run(options, workspace.memory.get(), schedule), host::kKernels);
}

void emulated_layer_norm(const LayerNormArgs& args, const EmulationOptions& options) {
  layer_norm(args, false, options);
}
void emulated_layer_norm_gradients(const LayerNormArgs& args, const EmulationOptions& options) {
  layer_norm(args, true, options);
}

}  // namespace fr
