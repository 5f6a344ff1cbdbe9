#include "../block/kernel.cuh"
void fr::FR_TARGET::block_bf16(
    bool backward, int gates, const LaunchShape& shape, const BlockParams& params, void* stream) {
  launch_block<Bf16Math>(backward, gates, shape, params, stream);
}
