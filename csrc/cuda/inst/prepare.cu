#include "../persistent/prepare.cuh"
void fr::FR_TARGET::prepare(const PrepareParams& params, void* stream) { launch_prepare(params, stream); }
