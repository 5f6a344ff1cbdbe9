// The device vocabulary: kernels reach everything beyond plain C++ through the fr:: functions below. For nvcc this file
// holds their CUDA bodies. Any other compiler gets the host bodies in emulation/device.h, which run the same kernels on
// fibers. asm, __shared__ and threadIdx appear only here and in launch.cuh.
//
// FR_TARGET is the inner namespace (gpu or host), so that one binary can hold both builds of a kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../cells/noise.h"

#if defined(__CUDACC__)
#define FR_DEVICE __device__ __forceinline__
#define FR_TARGET gpu
#else
#define FR_DEVICE inline
#define FR_TARGET host
#include "../emulation/device.h"
#endif

#if defined(__CUDACC__)
namespace fr::FR_TARGET {

// ---- indices --------------------------------------------------------------------------------------------------------
FR_DEVICE int thread_index() { return threadIdx.x; }
FR_DEVICE int block_threads() { return blockDim.x; }
// Hides the value from the optimiser, so expressions of it are recomputed where they are used instead of kept in
// registers across a loop.
template <class T>
FR_DEVICE T made_anew(T value) {
  if constexpr (sizeof value == 8) asm volatile("" : "+l"(value));
  else asm volatile("" : "+r"(value));
  return value;
}
FR_DEVICE int block_x() { return blockIdx.x; }
FR_DEVICE int block_y() { return blockIdx.y; }
FR_DEVICE int block_z() { return blockIdx.z; }
FR_DEVICE int grid_x() { return gridDim.x; }

// Nanoseconds on a clock that all SMs share (PTX ISA, "%globaltimer"). Good for timeouts, too coarse for timing.
FR_DEVICE unsigned long long global_nanoseconds() {
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// ---- memory ---------------------------------------------------------------------------------------------------------
// The block's shared memory at `offset`. The emulation checks that `bytes` from there lie within the launched size.
FR_DEVICE unsigned char* shared_memory(size_t offset, size_t) {
  extern __shared__ __align__(128) unsigned char fr_shared_memory[];
  return fr_shared_memory + offset;
}
// Returns p, telling the compiler that it points to global memory. For an address read from memory it would otherwise
// use generic loads and stores, which take longer.
template <class T>
FR_DEVICE T* global(T* p) {
  __builtin_assume(__isGlobal(p));
  return p;
}
// Loads 16 bytes of global memory that nothing writes during the launch; zeros unless `some`. Word by word, because a
// wide load fills neighbouring registers, but weights need another order there. All in one asm, because the compiler
// would put a branch around each word, and persistent kernels were a tenth larger. volatile: out of this order the
// loads took more registers than there are.
FR_DEVICE void load_constant(uint32_t (&word)[4], const void* from, bool some) {
  word[0] = word[1] = word[2] = word[3] = 0;
  asm volatile(
      "{\n"
      "  .reg .pred %%some;\n"
      "  setp.ne.u32 %%some, %5, 0;\n"
      "  @%%some ld.global.nc.u32 %0, [%4];\n"
      "  @%%some ld.global.nc.u32 %1, [%4+4];\n"
      "  @%%some ld.global.nc.u32 %2, [%4+8];\n"
      "  @%%some ld.global.nc.u32 %3, [%4+12];\n"
      "}"
      : "+r"(word[0]), "+r"(word[1]), "+r"(word[2]), "+r"(word[3])
      : "l"(from), "r"(static_cast<unsigned>(some)));
}
// An address in the shared memory window, as ld.shared and cp.async take it.
using SharedAddress = unsigned;
FR_DEVICE SharedAddress shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }

// Loads 16 bytes, aligned to 16, from `from` + kOffset.
template <int kOffset = 0>
FR_DEVICE void load_shared(uint32_t (&word)[4], SharedAddress from) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4+%5];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(from), "n"(kOffset)
               : "memory");
}

// Prefetches the line of global memory that holds p.
FR_DEVICE void prefetch(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

FR_DEVICE void store_release(unsigned* p, unsigned value) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}
FR_DEVICE unsigned load_acquire(const unsigned* p) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}
// An atomic store to pinned host memory, which the host may read at any time.
FR_DEVICE void store_system(unsigned long long* p, unsigned long long value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(value) : "memory");
}

// Stands for where wait_until is called. Only the emulation needs it: there a poll lets other threads run.
struct Caller {};
FR_DEVICE void let_others_run(Caller) {}

FR_DEVICE void expect(bool, const char*) {}  // checked in emulation only

// ---- barriers and shuffles ------------------------------------------------------------------------------------------
FR_DEVICE void block_sync() { __syncthreads(); }
// A block_sync that returns whether any thread passed true.
FR_DEVICE bool block_sync_any(bool value) { return __syncthreads_or(value); }
FR_DEVICE void warp_sync() { __syncwarp(); }
template <class T>
FR_DEVICE T warp_shuffle(T value, int from) {
  return __shfl_sync(0xFFFFFFFFu, value, from);
}

// ---- clusters: sm_90 and newer; on older cards every block is its own cluster ---------------------------------------
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// The cluster's blocks are neighbours in x (PTX ISA, "%cluster_ctarank", "%cluster_nctarank").
FR_DEVICE int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
FR_DEVICE int cluster_size() {
  int size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}
// A barrier for all threads of the cluster. Split into arrive and wait, it lets a thread work while others are late.
// What threads wrote to shared or global memory before they arrived is visible to all after the wait (PTX ISA,
// "barrier.cluster").
FR_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
FR_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
FR_DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}
// The address in block `rank`'s shared memory that corresponds to `own`: a generic address for loads and stores (PTX
// ISA, "mapa"). Valid from the first cluster_sync on, when all blocks have started. A block may exit only after a
// cluster_sync that follows the last access to its memory.
template <class T>
FR_DEVICE T* peer_shared(T* own, int rank) {
  T* peer;
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(peer) : "l"(own), "r"(rank));
  return peer;
}
#else
FR_DEVICE int cluster_rank() { return 0; }
FR_DEVICE int cluster_size() { return 1; }
FR_DEVICE void cluster_arrive() {}
FR_DEVICE void cluster_wait() { __syncthreads(); }
FR_DEVICE void cluster_sync() { __syncthreads(); }
template <class T>
FR_DEVICE T* peer_shared(T* own, int) {
  return own;
}
#endif

// ---- asynchronous copies --------------------------------------------------------------------------------------------
// Copies 16 bytes from global to shared memory; both addresses are aligned to 16. Bytes from `valid` on are
// zero-filled, not read.
FR_DEVICE void copy_async(SharedAddress shared, const void* global, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(valid) : "memory");
}
FR_DEVICE void copy_async(void* shared, const void* global, int valid) {
  copy_async(shared_address(shared), global, valid);
}
FR_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kLeft of this thread's committed copy groups are still in flight.
template <int kLeft>
FR_DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// ---- tensor cores ---------------------------------------------------------------------------------------------------
// ldmatrix.x4: lane i passes the address of row i % 8 (16 bytes) of matrix i / 8, and receives word i % 4 of row i / 4
// of each matrix.
FR_DEVICE void load_matrix_x4(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
FR_DEVICE void mma_bf16_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
FR_DEVICE void mma_fp16_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
FR_DEVICE void mma_tf32_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Rounds to the nearest TF32 (10 mantissa bits), ties away from zero.
FR_DEVICE uint32_t round_to_tf32(uint32_t bits) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(__uint_as_float(bits)));
  return rounded;
}

// ---- storage types --------------------------------------------------------------------------------------------------
FR_DEVICE float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
FR_DEVICE uint16_t float_to_bf16_bits(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
FR_DEVICE float fp16_bits_to_float(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
FR_DEVICE uint16_t float_to_fp16_bits(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

}  // namespace fr::FR_TARGET
#endif

namespace fr::FR_TARGET {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// Polls ready() until it is true. Returns false after `nanoseconds` (0: no timeout), or once *abort_flag is not 0
// (null: no abort flag). Both are checked only every 256 polls, to keep the common wait short.
template <class Ready>
FR_DEVICE bool wait_until(Ready ready, unsigned long long nanoseconds, const unsigned* abort_flag, Caller caller = {}) {
  unsigned long long deadline = 0;
  for (unsigned polls = 1; !ready(); ++polls) {
    let_others_run(caller);
    if (polls % 256 != 0) continue;
    if (abort_flag && load_acquire(abort_flag) != 0) return false;
    if (nanoseconds == 0) continue;
    const unsigned long long now = global_nanoseconds();
    if (deadline == 0) deadline = now + nanoseconds;
    else if (now > deadline) return false;
  }
  return true;
}

FR_DEVICE float to_state(float value) { return value; }
FR_DEVICE double to_state(double value) { return value; }
FR_DEVICE float to_state(BFloat16 value) { return bits_to_float(static_cast<uint32_t>(value.bits) << 16); }
FR_DEVICE float to_state(Float16 value) { return fp16_bits_to_float(value.bits); }

FR_DEVICE void set(float& to, float value) { to = value; }
FR_DEVICE void set(double& to, double value) { to = value; }
FR_DEVICE void set(BFloat16& to, float value) { to.bits = float_to_bf16_bits(value); }
FR_DEVICE void set(Float16& to, float value) { to.bits = float_to_fp16_bits(value); }

// The scalar that the cells (cells/*.h) are instantiated with: one unit of one row per thread. A type of its own, so
// that the linker never merges these instantiations with another backend's. kFast: sigmoid and tanh in a few
// instructions, for products that round their operands to 16 bits or TF32 anyway.
template <class T, bool kFast = false>
struct Scalar {
  using Lane = T;
  T value;
  Scalar() = default;
  FR_HD explicit Scalar(T v) : value(v) {}
  FR_HD explicit Scalar(int v) : value(static_cast<T>(v)) {}
  FR_HD friend Scalar operator+(Scalar a, Scalar b) { return Scalar(a.value + b.value); }
  FR_HD friend Scalar operator-(Scalar a, Scalar b) { return Scalar(a.value - b.value); }
  FR_HD friend Scalar operator*(Scalar a, Scalar b) { return Scalar(a.value * b.value); }
  FR_HD friend Scalar operator/(Scalar a, Scalar b) { return Scalar(a.value / b.value); }
};

FR_HD float exponential(float x) { return expf(x); }
FR_HD double exponential(double x) { return exp(x); }
FR_HD float hyperbolic_tangent(float x) { return tanhf(x); }
FR_HD double hyperbolic_tangent(double x) { return tanh(x); }
FR_HD float log_one_plus(float x) { return log1pf(x); }
FR_HD double log_one_plus(double x) { return log1p(x); }

// 1 / (1 + e^x), to about 2^-21 of its value: ex2.approx and rcp.approx are off by 2^-22 and 2^-23 (PTX ISA), and the
// product with log2(e) by 2^-24 of x.
FR_HD float fast_logistic_of_minus(float x) {
#if defined(__CUDA_ARCH__)
  float power, result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * 1.44269504f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(1.0f + power));
  return result;
#else
  return 1 / (1 + expf(x));
#endif
}
// 1 - 2 / (1 + e^2x). This loses digits near 0 by cancellation, so the Taylor series is used for |x| < 0.25. At 0.25
// the series' next term is 3e-7 of the value.
FR_HD float fast_tanh(float x) {
  const float square = x * x;
  const float near = x + x * square * (-1.0f / 3 + square * (2.0f / 15 - square * (17.0f / 315)));
  const float far = 1 - 2 * fast_logistic_of_minus(2 * x);
  return square < 0.0625f ? near : far;
}

template <class T, bool kFast>
FR_HD Scalar<T, kFast> fr_sigmoid(Scalar<T, kFast> x) {
  if constexpr (kFast) return Scalar<T, kFast>(fast_logistic_of_minus(-x.value));
  else return Scalar<T, kFast>(T(1) / (T(1) + exponential(-x.value)));
}
template <class T, bool kFast>
FR_HD Scalar<T, kFast> fr_exp(Scalar<T, kFast> x) {
  return Scalar<T, kFast>(exponential(x.value));
}
template <class T, bool kFast>
FR_HD Scalar<T, kFast> fr_log_sigmoid(Scalar<T, kFast> x) {
  const T least = x.value < T(0) ? x.value : T(0);
  return Scalar<T, kFast>(least - log_one_plus(exponential(x.value < T(0) ? x.value : -x.value)));
}
template <class T, bool kFast>
FR_HD Scalar<T, kFast> fr_tanh(Scalar<T, kFast> x) {
  if constexpr (kFast) return Scalar<T, kFast>(fast_tanh(x.value));
  else return Scalar<T, kFast>(hyperbolic_tangent(x.value));
}
template <class T, bool kFast>
FR_HD Scalar<T, kFast> fr_max(Scalar<T, kFast> a, Scalar<T, kFast> b) {
  return a.value > b.value ? a : b;
}
template <class T, bool kFast>
FR_HD Scalar<T, kFast> fr_min(Scalar<T, kFast> a, Scalar<T, kFast> b) {
  return a.value < b.value ? a : b;
}
template <class T, bool kFast>
FR_HD Scalar<T, kFast> fr_if_less(Scalar<T, kFast> a, Scalar<T, kFast> b, Scalar<T, kFast> yes, Scalar<T, kFast> no) {
  return a.value < b.value ? yes : no;
}

}  // namespace fr::FR_TARGET

namespace fr {

template <class T, bool kFast>
struct Draws<FR_TARGET::Scalar<T, kFast>> {
  uint32_t word = 0;
  Draws() = default;
  FR_HD Draws(NoiseKind kind, uint64_t seed, const NoisePlace& place) {
    uint32_t counter[4] = {place.unit / 4, place.row, place.step, noise_stream(kind, place.direction)};
    philox<OneCounter>(counter, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    // Not counter[unit % 4]: an index would put the array into local memory.
    const uint32_t even = place.unit & 2 ? counter[2] : counter[0], odd = place.unit & 2 ? counter[3] : counter[1];
    word = place.unit % 2 ? odd : even;
  }
  using V = FR_TARGET::Scalar<T, kFast>;
  FR_HD V if_below(uint32_t bound, V yes, V no) const { return word < bound ? yes : no; }
};

}  // namespace fr
