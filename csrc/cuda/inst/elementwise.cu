#include "../block/elementwise.cuh"
void fr::FR_TARGET::elementwise(
    Type type, bool backward, const LaunchShape& shape, const BlockParams& params, void* stream) {
  switch (type) {
    case Type::kFloat32: return launch_elementwise<Fp32Math>(backward, shape, params, stream);
    case Type::kFloat64: return launch_elementwise<Fp64Math>(backward, shape, params, stream);
    case Type::kBFloat16: return launch_elementwise<Bf16Math>(backward, shape, params, stream);
    case Type::kFloat16: return launch_elementwise<Fp16Math>(backward, shape, params, stream);
  }
}
