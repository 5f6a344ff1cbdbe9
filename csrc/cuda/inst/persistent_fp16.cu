#include "../persistent/kernel.cuh"
void fr::FR_TARGET::persistent_fp16(
    bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream) {
  launch_persistent<Fp16Math>(backward, gates, shape, params, stream);
}
