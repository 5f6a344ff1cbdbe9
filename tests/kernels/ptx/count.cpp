// Runs one layer, forward or backward, on an emulated H100 and prints how often each warp of a launch's first block ran
// each basic block of its kernel's PTX. Only kernels that were translated to count are printed; prepare, transpose and
// rebuild run as they are.
// usage: count forward|backward STRATEGY CELL STEPS BATCH HIDDEN PROJECTION DIRECTIONS
// output: a line "kernel NAME WARPS BLOCKS", then a line of counts for each warp. A warp's count is that of the lane
// that ran the block most.
#include "../cpp/emulation_cases.h"
#include "../../../csrc/cuda/persistent/kernel.cuh"
#include "../../../csrc/cuda/persistent/prepare.cuh"
#include "../../../csrc/cuda/persistent/projected.cuh"
#include "../../../csrc/cuda/transpose.cuh"
#include "runtime.h"

namespace fr::host {
namespace {

// Replaces launch.cuh's, without a host build of the kernel, which would take most of the compile time.
template <class Kernel>
void launch_ptx(const LaunchShape& shape, const typename Kernel::Params& params, void* stream) {
  const emulation::Size size{{shape.x, shape.y, shape.z}, shape.threads, static_cast<size_t>(shape.shared_bytes),
      shape.cluster > 0 ? shape.cluster : 1, Kernel::kCooperative};
  const emulation::Entry ptx = emulation::substitute(typeid(Kernel).name(), sizeof params, shape.threads);
  emulation::run(Kernel::kName, ptx, &params, size, *static_cast<emulation::Schedule*>(stream));
}
[[noreturn]] void not_counted() { throw std::logic_error("a kernel that is not counted"); }

}  // namespace

void persistent_bf16(bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream) {
  if (backward && gates == 1) return launch_ptx<PersistentKernel<Bf16Math, 1, true>>(shape, params, stream);
  if (!backward && gates == 3) return launch_ptx<PersistentKernel<Bf16Math, 3, false>>(shape, params, stream);
  if (!backward && gates == 4) return launch_ptx<PersistentKernel<Bf16Math, 4, false>>(shape, params, stream);
  not_counted();
}
void projected_bf16(bool backward, int, const LaunchShape& shape, const PersistentParams& params, void* stream) {
  if (backward) launch_ptx<ProjectedKernel<Bf16Math, true>>(shape, params, stream);
  else launch_ptx<ProjectedKernel<Bf16Math, false>>(shape, params, stream);
}
// These kernels run as their host builds.
void prepare(const PrepareParams& params, void* stream) {
  const auto ptx = std::exchange(emulation::substitute, nullptr);
  launch_prepare(params, stream);
  emulation::substitute = ptx;
}
void transpose(int, const TransposeParams& params, void* stream) {
  const auto ptx = std::exchange(emulation::substitute, nullptr);
  launch_transpose<uint16_t>(params, stream);
  emulation::substitute = ptx;
}

#define FR_NOT_COUNTED(name, ...) \
  void name(__VA_ARGS__) { not_counted(); }
FR_NOT_COUNTED(step_bf16, int, const LaunchShape&, const StepParams&, void*)
FR_NOT_COUNTED(step_fp16, int, const LaunchShape&, const StepParams&, void*)
FR_NOT_COUNTED(step_tf32, int, const LaunchShape&, const StepParams&, void*)
FR_NOT_COUNTED(step_fp32, int, const LaunchShape&, const StepParams&, void*)
FR_NOT_COUNTED(step_fp64, int, const LaunchShape&, const StepParams&, void*)
FR_NOT_COUNTED(block_bf16, bool, int, const LaunchShape&, const BlockParams&, void*)
FR_NOT_COUNTED(block_fp16, bool, int, const LaunchShape&, const BlockParams&, void*)
FR_NOT_COUNTED(block_tf32, bool, int, const LaunchShape&, const BlockParams&, void*)
FR_NOT_COUNTED(persistent_fp16, bool, int, const LaunchShape&, const PersistentParams&, void*)
FR_NOT_COUNTED(persistent_tf32, bool, int, const LaunchShape&, const PersistentParams&, void*)
FR_NOT_COUNTED(persistent_fp32, bool, int, const LaunchShape&, const PersistentParams&, void*)
FR_NOT_COUNTED(projected_fp16, bool, int, const LaunchShape&, const PersistentParams&, void*)
FR_NOT_COUNTED(projected_tf32, bool, int, const LaunchShape&, const PersistentParams&, void*)
FR_NOT_COUNTED(projected_fp32, bool, int, const LaunchShape&, const PersistentParams&, void*)
FR_NOT_COUNTED(elementwise, Type, bool, const LaunchShape&, const BlockParams&, void*)
FR_NOT_COUNTED(layer_norm, bool, const LayerNormArgs&)
FR_NOT_COUNTED(states_before, int, int, const StatesBeforeParams&, void*)
#undef FR_NOT_COUNTED

}  // namespace fr::host

int main(int argc, char** argv) {
  if (argc != 9)
    return std::puts("usage: count forward|backward STRATEGY CELL STEPS BATCH HIDDEN PROJECTION DIRECTIONS"), 2;
  g_only = argv[1] == std::string("forward") ? Only::kForward : Only::kBackward;
  ++argv;  // the layer
  Case c;
  const fr::CellFacts* cell = std::find_if(std::begin(fr::kCells), std::end(fr::kCells),
      [&](const auto& facts) { return argv[2] == std::string(facts.name); });
  if (cell == std::end(fr::kCells)) return std::puts("no such cell"), 2;
  c.cell = cell->code, c.type = Type::kBFloat16;
  c.steps = std::atoi(argv[3]), c.batch = std::atoi(argv[4]), c.hidden = std::atoi(argv[5]);
  c.projection = std::atoi(argv[6]), c.directions = std::atoi(argv[7]);
  g_options.strategy = argv[1];
  g_options.limits = fr::PersistentLimits{};
  g_options.limits.sms = 132, g_options.limits.max_cluster = 8;
  g_options.limits.shared_per_block = g_options.shared_limit = 227 * 1024;
  try {
    Problem p = make_problem(c, 1);
    run_kernels(p, 0);
  } catch (const std::exception& error) { return std::puts(error.what()), 1; }
  for (const fr::ptx::Counts& counts : fr::ptx::counted()) {
    const int warps = counts.threads / 32;
    std::printf("kernel %s %d %d\n", counts.kernel.c_str(), warps, counts.blocks);
    for (int warp = 0; warp < warps; ++warp) {
      for (int block = 0; block < counts.blocks; ++block) {
        uint32_t most = 0;
        for (int lane = 0; lane < 32; ++lane)
          most = std::max(most, counts.of[size_t(32 * warp + lane) * counts.blocks + block]);
        std::printf("%u ", most);
      }
      std::printf("\n");
    }
  }
}
