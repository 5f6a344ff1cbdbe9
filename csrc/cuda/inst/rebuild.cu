#include "../persistent/rebuild.cuh"
void fr::FR_TARGET::states_before(int element_bytes, int directions, const StatesBeforeParams& params, void* stream) {
  if (element_bytes == 2) launch_states_before<uint16_t, uint32_t>(directions, params, stream);
  else if (element_bytes == 4) launch_states_before<uint32_t, uint32_t>(directions, params, stream);
  else launch_states_before<uint64_t, uint64_t>(directions, params, stream);
}
