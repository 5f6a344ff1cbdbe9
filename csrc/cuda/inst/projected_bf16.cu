#include "../persistent/projected.cuh"
void fr::FR_TARGET::projected_bf16(
    bool backward, int, const LaunchShape& shape, const PersistentParams& params, void* stream) {
  launch_projected<Bf16Math>(backward, shape, params, stream);
}
