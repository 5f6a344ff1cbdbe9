// The device vocabulary on the host: the fr:: functions of cuda/device.cuh, for kernels that scheduler.h runs.
// device.cuh includes this file when the compiler is not nvcc. Lane maps are those of the PTX manual (mma.sync,
// ldmatrix), computed plainly in collectives.cpp, so that an index error in a kernel gives a wrong number here too.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "scheduler.h"

#define FR_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace fr::FR_TARGET {

// ---- indices --------------------------------------------------------------------------------------------------------
inline int thread_index() { return emulation::thread_index(); }
inline int block_threads() { return emulation::block_threads(); }
template <class T>
inline T made_anew(T value) {
  return value;
}
template <class T>
inline T* global(T* p) {
  return p;
}
inline void load_constant(uint32_t (&word)[4], const void* from, bool some) {
  if (some) std::memcpy(word, from, sizeof word);
  else word[0] = word[1] = word[2] = word[3] = 0;
}
inline int block_x() { return emulation::block_index().x; }
inline int block_y() { return emulation::block_index().y; }
inline int block_z() { return emulation::block_index().z; }
inline int grid_x() { return emulation::grid_size().x; }
inline unsigned long long global_nanoseconds() { return emulation::nanoseconds(); }  // see Schedule

// ---- memory ---------------------------------------------------------------------------------------------------------
// The block's shared memory at `offset`. A fault if `bytes` from there exceed the launched size.
inline unsigned char* shared_memory(size_t offset, size_t bytes, FR_HERE) {
  if (offset + bytes > emulation::shared_bytes())
    emulation::fail("shared memory [" + std::to_string(offset) + ", " + std::to_string(offset + bytes) + ") of " +
                        std::to_string(emulation::shared_bytes()) + " bytes",
        file, line);
  return emulation::shared_memory() + offset;
}

using SharedAddress = unsigned char*;
inline SharedAddress shared_address(const void* p) { return static_cast<unsigned char*>(const_cast<void*>(p)); }

// Loads 16 bytes, aligned to 16.
template <int kOffset = 0>
inline void load_shared(uint32_t (&to)[4], SharedAddress from, FR_HERE) {
  from += kOffset;
  if (reinterpret_cast<uintptr_t>(from) % 16) emulation::fail("load_shared of a misaligned address", file, line);
  struct [[gnu::may_alias]] Words {
    uint32_t word[4];
  };
  for (int i = 0; i < 4; ++i) to[i] = reinterpret_cast<const Words*>(from)->word[i];
}

// On the GPU a prefetch. Here a read, so that an address beyond its buffer is caught.
inline void prefetch(const void* p) { static_cast<void>(*static_cast<const volatile unsigned char*>(p)); }

inline void store_release(unsigned* p, unsigned value) {
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
  emulation::progress();
}
inline unsigned load_acquire(const unsigned* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }

// An atomic store to host memory.
inline void store_system(unsigned long long* p, unsigned long long value) {
  __atomic_store_n(p, value, __ATOMIC_RELEASE);
}

// Where wait_until (cuda/device.cuh) is called, for reports.
struct Caller {
  const char* file;
  int line;
  Caller(FR_HERE) : file(file), line(line) {}
};
inline void let_others_run(Caller caller) { emulation::pause(caller.file, caller.line); }

inline void expect(bool condition, const char* what, FR_HERE) {
  if (!condition) emulation::fail(std::string("expected ") + what, file, line);
}

// ---- barriers and shuffles ------------------------------------------------------------------------------------------
inline void block_sync(FR_HERE) { emulation::block_sync(file, line); }
// A block_sync that returns whether any thread passed true.
inline bool block_sync_any(bool value, FR_HERE) { return emulation::block_sync_any(value, file, line); }
inline void warp_sync(FR_HERE) {
  emulation::warp_collective(emulation::Collective::kSync, nullptr, nullptr, true, file, line);
}

inline int cluster_rank() { return emulation::cluster_rank(); }
inline int cluster_size() { return emulation::cluster_size(); }
inline void cluster_sync(FR_HERE) { emulation::cluster_sync(file, line); }
inline void cluster_arrive() {}  // cluster_wait does both
inline void cluster_wait(FR_HERE) { emulation::cluster_sync(file, line); }
// The address in block `rank`'s shared memory that corresponds to `own`. Valid from the first cluster_sync on. A block
// may exit only after a cluster_sync that follows the last access to its memory. A bad address or rank, and a block
// that exits too early, are faults.
template <class T>
inline T* peer_shared(T* own, int rank, FR_HERE) {
  return reinterpret_cast<T*>(
      emulation::peer_shared(reinterpret_cast<unsigned char*>(own), sizeof(T), rank, file, line));
}

namespace emulated {  // one lane's part of a collective; collectives.cpp computes them
struct Shuffle {
  double value;
  int from;
  double result;
};
void shuffle(void** parts);
struct Matrix {
  uint32_t row[4];
  uint32_t result[4];
};
void load_matrix(void** parts);
struct Mma {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};
void mma_bf16(void** parts);
void mma_fp16(void** parts);
void mma_tf32(void** parts);
float fp16_to_float(uint16_t bits);
uint16_t float_to_fp16(float value);
}  // namespace emulated

template <class T>
inline T warp_shuffle(T value, int from, FR_HERE) {
  emulated::Shuffle part{static_cast<double>(value), from, 0};
  emulation::warp_collective(emulation::Collective::kShuffle, &part, emulated::shuffle, false, file, line);
  return static_cast<T>(part.result);
}

// ---- asynchronous copies: performed late (at the wait) or early (at issue), by the seed; the target is poisoned in
// between ---
inline void copy_now(const emulation::Copy& copy) {
  auto* to = static_cast<unsigned char*>(copy.to);
  auto* from = static_cast<const unsigned char*>(copy.from);
  for (int i = 0; i < copy.bytes; ++i) to[i] = i < copy.valid ? from[i] : 0;
}

// Copies 16 bytes from global to shared memory; both addresses are aligned to 16. Bytes from `valid` on are
// zero-filled, not read.
inline void copy_async(void* shared, const void* global, int valid, FR_HERE) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 || (valid > 0 && reinterpret_cast<uintptr_t>(global) % 16))
    emulation::fail("copy_async of a misaligned address", file, line);
  const emulation::Copy copy{shared, global, 16, valid, 0};
  if (emulation::copy_is_early()) return copy_now(copy);
  std::memset(shared, 0xFF, 16);
  emulation::put_copy(copy, file, line);
}
inline void commit_copies() { emulation::commit_copies(); }
// Waits until at most kLeft of this thread's committed copy groups are still in flight.
template <int kLeft>
inline void wait_copies() {
  while (const emulation::Copy* copy = emulation::take_copy(kLeft)) copy_now(*copy);
}

// ---- tensor cores ---------------------------------------------------------------------------------------------------
// ldmatrix.x4: lane i passes the address of row i % 8 (16 bytes) of matrix i / 8, and receives word i % 4 of row i / 4
// of each matrix.
inline void load_matrix_x4(uint32_t (&to)[4], const void* row, FR_HERE) {
  if (reinterpret_cast<uintptr_t>(row) % 16) emulation::fail("load_matrix_x4 of a misaligned row", file, line);
  emulated::Matrix part{};
  const auto* words = static_cast<const uint32_t*>(row);
  for (int i = 0; i < 4; ++i) part.row[i] = words[i];
  emulation::warp_collective(emulation::Collective::kMatrix, &part, emulated::load_matrix, false, file, line);
  for (int i = 0; i < 4; ++i) to[i] = part.result[i];
}

inline void mma_bf16_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], FR_HERE) {
  emulated::Mma part{d, a, b};
  emulation::warp_collective(emulation::Collective::kMma, &part, emulated::mma_bf16, false, file, line);
}
inline void mma_fp16_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], FR_HERE) {
  emulated::Mma part{d, a, b};
  emulation::warp_collective(emulation::Collective::kMma, &part, emulated::mma_fp16, false, file, line);
}
inline void mma_tf32_m16n8k8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], FR_HERE) {
  emulated::Mma part{d, a, b};
  emulation::warp_collective(emulation::Collective::kMma, &part, emulated::mma_tf32, false, file, line);
}
// Rounds to the nearest TF32 (10 mantissa bits), ties away from zero, as cvt.rna.tf32.f32 does.
inline uint32_t round_to_tf32(uint32_t bits) {
  return (bits & 0x7F800000u) == 0x7F800000u ? bits : (bits + 0x1000u) & 0xFFFFE000u;
}

// ---- storage types --------------------------------------------------------------------------------------------------
inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline uint16_t float_to_bf16_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (value != value) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
}
inline float fp16_bits_to_float(uint16_t bits) { return emulated::fp16_to_float(bits); }
inline uint16_t float_to_fp16_bits(float value) { return emulated::float_to_fp16(value); }

}  // namespace fr::FR_TARGET
#undef FR_HERE
