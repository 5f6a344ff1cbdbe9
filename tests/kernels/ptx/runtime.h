// The functions that translated PTX (translate.py) calls: one Thread for each CUDA thread, on a fiber of
// csrc/emulation/scheduler.h. Every access is checked for alignment to its whole width (PTX ISA 6.4.1, "Addresses as
// Operands") and for bounds: shared memory and parameters always, global memory if a test has registered any
// (csrc/emulation/memory.h). `line` is the PTX line: where threads must meet at one instruction, it identifies that
// instruction. Messages name the source line behind it.
//
// Generic and global addresses are host addresses. Shared ones begin at kSharedBase, because real ones do not begin at
// 0 either. Parameters have the address of the launch's struct. Loads and stores are inline, so that a sanitizer sees
// them in the kernel.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <string>
#include <type_traits>
#include <vector>

#include "../../../csrc/emulation/scheduler.h"

namespace fr::ptx {

constexpr uint64_t kSharedBase = 1024;
constexpr uint32_t kWholeWarp = 0xFFFFFFFF;

// ---- facts of a kernel
struct Source {
  int line;
  const char* place;
};
struct Registered {
  Registered(const char* mangled, emulation::Entry run, size_t param_bytes, int max_threads, int blocks);
};

// Counts for each launch of a kernel that was translated to count (blocks > 0): how often each thread of the first
// block ran each basic block, a row for each thread. Of a wait only the first poll counts, because the others depend on
// when the emulation runs the awaited threads.
struct Counts {
  std::string kernel;
  int threads, blocks;
  std::vector<uint32_t> of;
};
std::vector<Counts>& counted();

// ---- numbers: reinterprets the bits of one type as another of the same size; converts integers
template <class To, class From>
inline To as(From from) {
  if constexpr (std::is_integral_v<To> && std::is_integral_v<From> && !std::is_same_v<To, bool> &&
                !std::is_same_v<From, bool>) {
    return static_cast<To>(from);
  } else {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
  }
}
inline float float_of(uint32_t bits) { return as<float>(bits); }
inline double double_of(uint64_t bits) { return as<double>(bits); }
template <class T>
inline T shl(T value, uint32_t count) {
  return count < 8 * sizeof(T) ? static_cast<T>(value << count) : T(0);
}
template <class T>
inline T shr(T value, uint32_t count) {
  return count < 8 * sizeof(T) ? static_cast<T>(value >> count) : value < 0 ? T(-1) : T(0);
}
// Inserts the `count` low bits of a into b, from bit `first` on (9.7.1.22, "bfi").
template <class T>
inline T insert_bits(T a, T b, uint32_t first, uint32_t count) {
  first &= 255, count &= 255;
  if (first >= 8 * sizeof(T)) return b;
  const T mask = shl<T>(shl<T>(T(1), count) - T(1), first);
  return (b & static_cast<T>(~mask)) | (shl<T>(a, first) & mask);
}
// Four of the bytes of a (numbers 0 to 3) and b (4 to 7). Each half byte of `choice` names one, the lowest first; with
// its highest bit set, it takes the byte's sign for all bits (9.7.9.7, "prmt").
inline uint32_t permute_bytes(uint32_t a, uint32_t b, uint32_t choice) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i, choice >>= 4) {
    const uint8_t byte = static_cast<uint8_t>(bytes >> 8 * (choice & 7));
    result |= uint32_t(choice & 8 ? (byte & 0x80 ? 0xFF : 0) : byte) << 8 * i;
  }
  return result;
}
float fma_down(float a, float b, float c);
float add_toward_zero(float a, float b);
float ex2_approx_ftz(float x);
float rcp_approx_ftz(float x);
double rcp_approx_ftz(double x);
inline float saturate(float x) { return std::isnan(x) ? 0.f : std::min(std::max(x, 0.f), 1.f); }
float fp16_to_float(uint16_t bits);
uint16_t to_fp16(float x);
uint16_t to_bf16(float x);
uint16_t to_bf16_toward_zero(float x);
uint32_t to_tf32(float x);

// ---- one lane's part of a warp collective (runtime.cpp)
struct Mma {
  float d[4];
  uint32_t a[4], b[2];
};
void mma_bf16(void** parts);
void mma_fp16(void** parts);
void mma_tf32(void** parts);
struct Shuffle {
  uint32_t value, from, clamp, result;
  bool in_range;
};
struct Matrix {
  std::array<uint32_t, 4> row, result;
};

struct Range {
  uint64_t begin, end;
};

struct Thread {
  const uint64_t params, param_bytes;
  const char* const file;
  const Source* const sources;
  const size_t source_count;
  const uint64_t shared, shared_bytes;
  const uint32_t tid, ntid;
  const emulation::Dim ctaid, nctaid;
  uint32_t* const counts;  // of this thread's basic blocks; null: not counted
  std::vector<uint32_t> counts_at_poll;
  uint64_t peers[16] = {};      // where mapa has found the shared memory of the cluster's other blocks
  mutable uint64_t polled = 0;  // 0 after a barrier
  Range last = {0, 0};          // the buffer of the last global access
  bool arrived = false;

  Thread(const void* params, size_t param_bytes, const char* file, const Source* sources, size_t source_count);

  [[noreturn, gnu::cold]] void fail(const std::string& what, int line) const;
  [[noreturn, gnu::cold]] void fail(const char* what, uint64_t address, size_t bytes, int line) const;

  // ---- addresses
  static bool within(uint64_t address, size_t bytes, uint64_t begin, uint64_t size) {
    return address - begin < size && size - (address - begin) >= bytes;
  }
  void check_alignment(uint64_t address, size_t bytes, int line) const {
    if (address % bytes != 0) fail("misaligned address", address, bytes, line);
  }
  uint64_t param_address(int offset) const { return params + offset; }
  uint64_t shared_to_generic(uint64_t address) const { return address - kSharedBase + shared; }
  uint64_t generic_to_shared(uint64_t address) const { return address - shared + kSharedBase; }

  uint64_t at_param(uint64_t address, size_t bytes, int line) const {
    if (!within(address, bytes, params, param_bytes)) fail("parameters out of range", address - params, bytes, line);
    check_alignment(address - params, bytes, line);
    return address;
  }
  uint64_t at_shared(uint64_t address, size_t bytes, int line) const {
    if (!within(address, bytes, kSharedBase, shared_bytes))
      fail("shared memory out of range", address - kSharedBase, bytes, line);
    check_alignment(address, bytes, line);
    return address - kSharedBase + shared;
  }
  uint64_t at_global(uint64_t address, size_t bytes, int line) {
    check_alignment(address, bytes, line);
    check_global(address, bytes, line);
    return address;
  }
  void check_global(uint64_t address, size_t bytes, int line) {
    if (within(address, bytes, last.begin, last.end - last.begin)) return;
    find_buffer(address, bytes, line);
  }
  void find_buffer(uint64_t address, size_t bytes, int line);
  uint64_t at_generic(uint64_t address, size_t bytes, int line) {
    check_alignment(address, bytes, line);
    if (within(address, bytes, shared, shared_bytes)) return address;
    for (int i = 0; i < 16 && peers[i]; ++i)
      if (within(address, bytes, peers[i], shared_bytes)) return address;
    check_global(address, bytes, line);
    return address;
  }

  // ---- loads and stores of one value, or of the N of a vector
  template <class T>
  struct [[gnu::may_alias]] Any {
    T value;
  };
  template <class T, int N>
  struct Vector {
    T value[N];
    T operator[](int i) const { return value[i]; }
  };
  template <class T>
  static T get(uint64_t address) {
    return reinterpret_cast<const Any<T>*>(address)->value;
  }
  template <class T>
  static void put(uint64_t address, T value) {
    reinterpret_cast<Any<T>*>(address)->value = value;
  }
  template <class T, int N>
  static Vector<T, N> get(uint64_t address) {
    Vector<T, N> to;
    for (int i = 0; i < N; ++i) to.value[i] = get<T>(address + i * sizeof(T));
    return to;
  }
  template <class T, int N>
  static void put(uint64_t address, const Vector<T, N>& from) {
    for (int i = 0; i < N; ++i) put<T>(address + i * sizeof(T), from.value[i]);
  }
  template <class T>
  T load_param(uint64_t address, int line) const {
    return get<T>(at_param(address, sizeof(T), line));
  }
  template <class T>
  T load_shared(uint64_t address, int line) const {
    return get<T>(at_shared(address, sizeof(T), line));
  }
  template <class T>
  T load_global(uint64_t address, int line) {
    return get<T>(at_global(address, sizeof(T), line));
  }
  template <class T>
  T load_generic(uint64_t address, int line) {
    return get<T>(at_generic(address, sizeof(T), line));
  }
  template <class T>
  void store_shared(uint64_t address, T value, int line) const {
    put<T>(at_shared(address, sizeof(T), line), value);
  }
  template <class T>
  void store_global(uint64_t address, T value, int line) {
    put<T>(at_global(address, sizeof(T), line), value);
  }
  template <class T>
  void store_generic(uint64_t address, T value, int line) {
    put<T>(at_generic(address, sizeof(T), line), value);
  }
  template <class T, int N>
  Vector<T, N> load_param(uint64_t address, int line) const {
    return get<T, N>(at_param(address, N * sizeof(T), line));
  }
  template <class T, int N>
  Vector<T, N> load_shared(uint64_t address, int line) const {
    return get<T, N>(at_shared(address, N * sizeof(T), line));
  }
  template <class T, int N>
  Vector<T, N> load_global(uint64_t address, int line) {
    return get<T, N>(at_global(address, N * sizeof(T), line));
  }
  template <class T, int N>
  Vector<T, N> load_generic(uint64_t address, int line) {
    return get<T, N>(at_generic(address, N * sizeof(T), line));
  }
  template <class T, int N>
  void store_shared(uint64_t address, const Vector<T, N>& from, int line) const {
    put(at_shared(address, N * sizeof(T), line), from);
  }
  template <class T, int N>
  void store_global(uint64_t address, const Vector<T, N>& from, int line) {
    put(at_global(address, N * sizeof(T), line), from);
  }
  template <class T, int N>
  void store_generic(uint64_t address, const Vector<T, N>& from, int line) {
    put(at_generic(address, N * sizeof(T), line), from);
  }

  // Values exchanged with other threads. Loading the same address twice in a row counts as polling: other threads run
  // in between.
  template <class T, int kOrder>
  T load_atomic(uint64_t address, const char* place, int line) {
    at_global(address, sizeof(T), line);
    if (polled == address) emulation::pause(place, line);
    if (counts) count_first_poll(polled == address);
    polled = address;
    return __atomic_load_n(reinterpret_cast<const T*>(address), kOrder);
  }
  void count_first_poll(bool again);
  template <class T, int kOrder>
  void store_atomic(uint64_t address, T value, bool others_may_wait, int line) {
    at_global(address, sizeof(T), line);
    __atomic_store_n(reinterpret_cast<T*>(address), value, kOrder);
    if (others_may_wait) emulation::progress();
  }
  void prefetch(uint64_t address, int line) {
    check_global(address, 1, line);
    static_cast<void>(*reinterpret_cast<const volatile unsigned char*>(address));
  }

  // cp.async (9.7.9.25.3.1): 16 bytes, of which those from `valid` on become zero and are not read; performed early or
  // late, by the seed.
  void copy_async(uint64_t to, uint64_t from, uint32_t valid, const char* place, int line) {
    if (valid > 16) fail("cp.async of more bytes than it copies", line);
    check_alignment(from, 16, line);
    if (valid > 0) check_global(from, valid, line);
    const emulation::Copy copy{reinterpret_cast<void*>(at_shared(to & 0xFFFFFFFF, 16, line)),
        reinterpret_cast<const void*>(from), 16, static_cast<int>(valid), 0};
    if (emulation::copy_is_early()) return copy_now(copy);
    for (int i = 0; i < 16; ++i) static_cast<unsigned char*>(copy.to)[i] = 0xFF;
    emulation::put_copy(copy, place, line);
  }
  void wait_copies(int left) const {
    while (const emulation::Copy* copy = emulation::take_copy(left)) copy_now(*copy);
  }
  static void copy_now(const emulation::Copy& copy) {
    for (int i = 0; i < copy.bytes; ++i)
      static_cast<unsigned char*>(copy.to)[i] = i < copy.valid ? static_cast<const unsigned char*>(copy.from)[i] : 0;
  }

  template <class T>
  T divide(T a, T b, int line) const {
    if (b == 0) fail("division by zero", line);
    return a / b;
  }
  template <class T>
  T remainder(T a, T b, int line) const {
    if (b == 0) fail("remainder of a division by zero", line);
    return a % b;
  }

  // ---- collectives of a warp, a block or a cluster (runtime.cpp)
  void warp_sync(uint32_t mask, const char* place, int line) const;
  void barrier(const char* place, int line) const;
  bool barrier_or(bool value, const char* place, int line) const;
  Shuffle shuffle(uint32_t value, uint32_t from, uint32_t clamp, uint32_t mask, const char* place, int line) const;
  std::array<uint32_t, 4> load_matrix(uint64_t row, const char* place, int line) const;
  void mma(void (*how)(void** parts), Mma& part, const char* place, int line) const;
  uint64_t map_peer(uint64_t own, uint32_t rank, const char* place, int line);
  void cluster_arrive(int line);
  void cluster_wait(const char* place, int line);
};

}  // namespace fr::ptx
