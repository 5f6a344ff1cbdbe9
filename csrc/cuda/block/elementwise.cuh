// The `block` strategy for cells without a product (IndRNN): a whole sequence in one launch, a thread for each unit of
// each row. No thread reads another's state. For every type and padded rows; packed rows take `step`, which launches
// once a time step. Launched by launch.cpp. The pointwise phases are those of phases.cuh, so every option works here
// too.
#pragma once

#include "steps.cuh"
#include "../launch.cuh"
#include "../tile.cuh"

namespace fr::FR_TARGET {

FR_GLOBAL(elementwise_kernel)

// work    grid (elements / 256, 1, directions); an element is a unit of a batch row, and the units of a row are
//         neighbours.
// memory  shared: two copies of StepDirection. global: what the phase reads and writes; in forward the input part of
//         the gates, the output, and the thread's old state, which is still in L1.
// sync    one block_sync a step, for the addresses of the next step. Blocks never wait for each other.
// cost    a step takes the latency of its reads (the input part of the gates from L2 or DRAM) or, with many rows, their
//         bytes. Not measured.
template <class Math, bool kBackward>
struct ElementwiseKernel {
  static constexpr const char* kName = "elementwise_kernel";
  FR_ENTRY(elementwise_kernel)
  static constexpr int kMaxThreads = kElementThreads;
  static constexpr bool kCooperative = false;
  using Params = BlockParams;
  using V = Scalar<typename Math::State, Math::kTensor>;

  struct NoSums {
    static constexpr bool kDropsState = true, kStoresEntering = false;
    FR_DEVICE typename Math::State operator()(int) const { return 0; }
    FR_DEVICE void keep(int, typename Math::Storage) const {}
  };

  FR_DEVICE static void run(const BlockParams& p) {
    const StepParams& step = p.step;
    const int thread = thread_index();
    const int64_t element = static_cast<int64_t>(block_x()) * block_threads() + thread, b = element / step.hidden,
                  j = element % step.hidden;
    StepDirection* current = reinterpret_cast<StepDirection*>(shared_memory(0, 2 * sizeof(StepDirection)));
    copy_words(current[0], step.direction[block_z()], thread);
    block_sync();
    const int64_t t0 = current[0].here.step;
    const Clips<V> clips{V(0), V(0), false, false};
    const NoSums sums{};
    for (int64_t s = 0; s <= p.last; ++s) {
      const StepDirection& d = current[s % 2];
      if (b < step.rows) {
        Element<Math, NoSums> of{step, d, clips, b, j, sums};
        of.read_roles(kBackward);
        switch (step.cell) {
#define FR_CELL(name, Type) \
  case Cell::name: \
    if constexpr (Numbers<Type>::kMultiplies) break; \
    else if constexpr (kBackward) of.template backward_first<Type>(); \
    else of.template forward_first<Type>(); \
    break;
#include "../../cells/cells.inc"
#undef FR_CELL
        }
      }
      if (s < p.last) next_step<kBackward>(p, current, s, t0, thread);
      block_sync();
    }
  }
};

template <class Math>
void launch_elementwise(bool backward, const LaunchShape& shape, const BlockParams& params, void* stream) {
  if (backward) return launch<ElementwiseKernel<Math, true>>(shape, params, stream);
  launch<ElementwiseKernel<Math, false>>(shape, params, stream);
}

}  // namespace fr::FR_TARGET
