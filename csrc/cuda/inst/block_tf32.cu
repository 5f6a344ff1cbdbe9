#include "../block/kernel.cuh"
void fr::FR_TARGET::block_tf32(
    bool backward, int gates, const LaunchShape& shape, const BlockParams& params, void* stream) {
  launch_block<Tf32Math>(backward, gates, shape, params, stream);
}
