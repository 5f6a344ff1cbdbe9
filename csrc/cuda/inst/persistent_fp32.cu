#include "../persistent/kernel.cuh"
void fr::FR_TARGET::persistent_fp32(
    bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream) {
  launch_persistent<Fp32Math>(backward, gates, shape, params, stream);
}
