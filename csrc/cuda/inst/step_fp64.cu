#include "../step/kernel.cuh"
void fr::FR_TARGET::step_fp64(int gates, const LaunchShape& shape, const StepParams& params, void* stream) {
  launch_step<Fp64Math>(gates, shape, params, stream);
}
