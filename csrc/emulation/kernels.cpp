// All kernels of cuda/, compiled for the host.
#pragma GCC diagnostic ignored "-Wunknown-pragmas"  // nvcc's #pragma unroll
#include "../cuda/inst/block_bf16.cu"
#include "../cuda/inst/block_fp16.cu"
#include "../cuda/inst/block_tf32.cu"
#include "../cuda/inst/step_bf16.cu"
#include "../cuda/inst/step_fp16.cu"
#include "../cuda/inst/step_fp32.cu"
#include "../cuda/inst/step_fp64.cu"
#include "../cuda/inst/step_tf32.cu"
#include "../cuda/inst/transpose.cu"
