#include "../transpose.cuh"
void fr::FR_TARGET::transpose(int element_bytes, const TransposeParams& params, void* stream) {
  if (element_bytes == 2) launch_transpose<uint16_t>(params, stream);
  else if (element_bytes == 4) launch_transpose<uint32_t>(params, stream);
  else launch_transpose<uint64_t>(params, stream);
}
