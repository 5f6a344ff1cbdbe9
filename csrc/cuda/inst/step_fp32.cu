#include "../step/kernel.cuh"
void fr::FR_TARGET::step_fp32(int gates, const LaunchShape& shape, const StepParams& params, void* stream) {
  launch_step<Fp32Math>(gates, shape, params, stream);
}
