#include "../step/kernel.cuh"
void fr::FR_TARGET::step_fp16(int gates, const LaunchShape& shape, const StepParams& params, void* stream) {
  launch_step<Fp16Math>(gates, shape, params, stream);
}
