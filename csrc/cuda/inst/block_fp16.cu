#include "../block/kernel.cuh"
void fr::FR_TARGET::block_fp16(
    bool backward, int gates, const LaunchShape& shape, const BlockParams& params, void* stream) {
  launch_block<Fp16Math>(backward, gates, shape, params, stream);
}
