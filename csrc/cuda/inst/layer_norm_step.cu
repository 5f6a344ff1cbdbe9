#include "../layer_norm.cuh"
void fr::FR_TARGET::layer_norm(bool backward, const LayerNormArgs& args) {
  if (args.type == Type::kFloat32) launch_layer_norm<float>(backward, args);
  else launch_layer_norm<double>(backward, args);
}
