#include "../persistent/projected.cuh"
void fr::FR_TARGET::projected_fp32(
    bool backward, int, const LaunchShape& shape, const PersistentParams& params, void* stream) {
  launch_projected<Fp32Math>(backward, shape, params, stream);
}
