#include "../step/kernel.cuh"
void fr::FR_TARGET::step_bf16(int gates, const LaunchShape& shape, const StepParams& params, void* stream) {
  launch_step<Bf16Math>(gates, shape, params, stream);
}
