#include "../persistent/kernel.cuh"
void fr::FR_TARGET::persistent_bf16(
    bool backward, int gates, const LaunchShape& shape, const PersistentParams& params, void* stream) {
  launch_persistent<Bf16Math>(backward, gates, shape, params, stream);
}
#if defined(__CUDACC__)
int fr::FR_TARGET::persistent_active_clusters(int blocks) {
  return active_clusters<PersistentKernel<Bf16Math, 1, true>>(blocks);
}
bool fr::FR_TARGET::persistent_has_code() { return has_code<PersistentKernel<Bf16Math, 1, true>>(); }
#endif
