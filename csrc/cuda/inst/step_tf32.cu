#include "../step/kernel.cuh"
void fr::FR_TARGET::step_tf32(int gates, const LaunchShape& shape, const StepParams& params, void* stream) {
  launch_step<Tf32Math>(gates, shape, params, stream);
}
