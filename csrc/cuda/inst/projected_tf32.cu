#include "../persistent/projected.cuh"
void fr::FR_TARGET::projected_tf32(
    bool backward, int, const LaunchShape& shape, const PersistentParams& params, void* stream) {
  launch_projected<Tf32Math>(backward, shape, params, stream);
}
