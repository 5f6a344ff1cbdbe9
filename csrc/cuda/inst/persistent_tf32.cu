#include "../persistent/kernel.cuh"
void fr::FR_TARGET::persistent_tf32(
    bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream) {
  launch_persistent<Tf32Math>(backward, gates, shape, params, stream);
}
