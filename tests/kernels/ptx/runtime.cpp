// Compiled without sanitizers, because collectives read the lanes' stacks. Numbers and lane layouts follow the PTX ISA
// (version 9.0; section and figure at each). They are written independently of csrc/emulation, so that each checks the
// other.
#include "runtime.h"

#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>

#include "../../../csrc/emulation/memory.h"

namespace fr::ptx {

// ---- kernels by their type, as typeid and the PTX's mangled name both give it
// ----------------------------------------
namespace {

struct Known {
  emulation::Entry run;
  size_t param_bytes;
  int max_threads, blocks;
  const char* mangled;
};
std::map<std::string, Known>& kernels() {
  static std::map<std::string, Known> all;
  return all;
}

std::string demangled(const char* name) {
  char* text = abi::__cxa_demangle(name, nullptr, nullptr, nullptr);
  const std::string result = text ? text : name;
  std::free(text);
  return result;
}

// The function that replaces a kernel's host build. Every kernel must have one.
emulation::Entry find(const char* type, size_t param_bytes, int threads) {
  std::string name = demangled(type);
  for (size_t at; (at = name.find("fr::host")) != std::string::npos;) name.replace(at, 8, "fr::gpu");
  const auto found = kernels().find(name);
  if (found == kernels().end()) throw std::logic_error("no PTX of " + name);
  const Known& known = found->second;
  if (known.param_bytes != param_bytes)
    throw std::logic_error(name + ": parameters of " + std::to_string(param_bytes) + " bytes, its PTX takes " +
                           std::to_string(known.param_bytes));
  if (threads > known.max_threads) throw std::logic_error(name + ": more threads than its PTX allows");
  if (known.blocks > 0)
    counted().push_back({known.mangled, threads, known.blocks, std::vector<uint32_t>(size_t(threads) * known.blocks)});
  return known.run;
}

// Where a thread counts its basic blocks. Threads of later blocks than the first count into a buffer that is never
// read.
uint32_t* counts_of(emulation::Dim block, int thread) {
  static std::vector<uint32_t> others;
  if (counted().empty()) return nullptr;
  Counts& last = counted().back();
  if (block.x == 0 && block.y == 0 && block.z == 0) return last.of.data() + size_t(thread) * last.blocks;
  others.resize(last.blocks);
  return others.data();
}

}  // namespace

std::vector<Counts>& counted() {
  static std::vector<Counts> all;
  return all;
}

Registered::Registered(const char* mangled, emulation::Entry run, size_t param_bytes, int max_threads, int blocks) {
  const std::string name = demangled(mangled);  // void fr::gpu::NAME<KERNEL >(KERNEL::Params)
  const size_t first = name.find('<') + 1;
  size_t last = name.find(">(", first);
  while (name[last - 1] == ' ') --last;
  kernels()[name.substr(first, last - first)] = {run, param_bytes, max_threads, blocks, mangled};
  emulation::substitute = find;
}

Thread::Thread(const void* p, size_t bytes, const char* f, const Source* s, size_t count)
    : params(reinterpret_cast<uint64_t>(p)), param_bytes(bytes), file(f), sources(s), source_count(count),
      shared(reinterpret_cast<uint64_t>(emulation::shared_memory())), shared_bytes(emulation::shared_bytes()),
      tid(emulation::thread_index()), ntid(emulation::block_threads()), ctaid(emulation::block_index()),
      nctaid(emulation::grid_size()), counts(counts_of(ctaid, emulation::thread_index())) {}

void Thread::fail(const std::string& what, int line) const {
  const Source* after =
      std::upper_bound(sources, sources + source_count, line, [](int l, const Source& s) { return l < s.line; });
  emulation::fail(what + " at " + (after == sources ? "?" : after[-1].place), file, line);
}
void Thread::fail(const char* what, uint64_t address, size_t bytes, int line) const {
  char text[128];
  std::snprintf(text, sizeof text, "%s: %zu bytes at 0x%llx", what, bytes, static_cast<unsigned long long>(address));
  fail(text, line);
}

// Finds the buffer of a global access that lies outside the buffer of the last one.
void Thread::find_buffer(uint64_t address, size_t bytes, int line) {
  constexpr uint64_t kNothingBelow = 65536;  // no object lies below this
  if (address < kNothingBelow || within(address, 1, shared, shared_bytes) || within(address, 1, params, param_bytes))
    fail("no global address", address, bytes, line);
  if (!emulation::may_touch(address, bytes, last.begin, last.end))
    fail("global memory out of range", address, bytes, line);
}

void Thread::count_first_poll(bool again) {
  if (again) std::copy(counts_at_poll.begin(), counts_at_poll.end(), counts);
  else counts_at_poll.assign(counts, counts + counted().back().blocks);
}

// ---- numbers --------------------------------------------------------------------------------------------------------
namespace {
float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.f, x) : x; }
double flush(double x) { return std::fabs(x) < 0x1p-1022 ? std::copysign(0.0, x) : x; }
double upper_word(double x) { return as<double>(as<uint64_t>(x) & 0xFFFFFFFF00000000); }
}  // namespace

// Rounded towards minus infinity: the product is exact in double, and so is the sum's rounding error (Knuth's two-sum).
float fma_down(float a, float b, float c) {
  const double product = static_cast<double>(a) * b, sum = product + c, back = sum - product;
  const double rest = (product - (sum - back)) + (c - back);
  const float rounded = static_cast<float>(sum);
  if (!std::isfinite(rounded)) return rounded;
  const double above = rounded - sum;
  return above > 0 || (above == 0 && rest < 0) ? std::nextafter(rounded, -INFINITY) : rounded;
}
// Rounded to the nearest float, and one step back if that lies beyond the sum, whose rounding error in double is
// `rest`.
float add_toward_zero(float a, float b) {
  const double sum = static_cast<double>(a) + b, back = sum - a, rest = (a - (sum - back)) + (b - back);
  const float rounded = static_cast<float>(sum);
  if (!std::isfinite(sum) || rounded == 0) return rounded;
  const double beyond = (rounded - sum) - rest;
  return (rounded > 0 ? beyond > 0 : beyond < 0) ? std::nextafter(rounded, 0.f) : rounded;
}
// The hardware's approximations have errors (9.7.3.18, "ex2": 2 ulp; 9.7.3.12, "rcp": 1 ulp) that are not modelled
// here.
float ex2_approx_ftz(float x) { return flush(std::exp2(flush(x))); }
float rcp_approx_ftz(float x) { return flush(1 / flush(x)); }
// 9.7.3.13, "rcp.approx.ftz.f64": computed from the upper word only, 20 bits; the lower word of the result is zero.
double rcp_approx_ftz(double x) { return upper_word(flush(1 / flush(upper_word(x)))); }

float fp16_to_float(uint16_t bits) { return as<_Float16>(bits); }
uint16_t to_fp16(float x) { return std::isnan(x) ? 0x7FFF : as<uint16_t>(static_cast<_Float16>(x)); }
uint16_t to_bf16(float x) {  // nearest, ties to even
  if (std::isnan(x)) return 0x7FFF;
  const uint32_t bits = as<uint32_t>(x), low = bits & 0xFFFF, up = bits >> 16;
  return static_cast<uint16_t>(up + (low > 0x8000 || (low == 0x8000 && up % 2 == 1)));
}
uint16_t to_bf16_toward_zero(float x) { return std::isnan(x) ? 0x7FFF : static_cast<uint16_t>(as<uint32_t>(x) >> 16); }
// Nearest with 10 mantissa bits, ties away from zero. Code must not rely on the 13 bits below (5.2.3, "Alternate
// Floating-Point Data Formats"), so they are set.
uint32_t to_tf32(float x) {
  const uint32_t bits = as<uint32_t>(x);
  if (std::isnan(x)) return 0x7FFFFFFF;
  if (std::isinf(x)) return bits;
  const uint32_t rounded = ((bits >> 13) + ((bits >> 12) & 1)) << 13;
  return std::isinf(as<float>(rounded)) ? rounded : rounded | 0x1FFF;
}

// ---- warps ----------------------------------------------------------------------------------------------------------
namespace {

constexpr int kLanes = 32;
struct At {
  int row, column;
};

// 9.7.14.5.8, "Matrix Fragments for mma.m16n8k16 with floating point type": element i of a lane, figures 79 (A), 81
// (B), 83 (C, D).
struct M16N8K16 {
  static constexpr int kDepth = 16;
  static At a(int group, int t, int i) {
    return {(0 <= i && i < 2) || (4 <= i && i < 6) ? group : group + 8, t * 2 + (i & 1) + (i < 4 ? 0 : 8)};
  }
  static At b(int group, int t, int i) { return {t * 2 + (i & 1) + (i < 2 ? 0 : 8), group}; }
};
// 9.7.14.5.7, "Matrix Fragments for mma.m16n8k8", .tf32: figures 72 (A), 75 (B), 77 (C, D, as in figure 83).
struct M16N8K8 {
  static constexpr int kDepth = 8;
  static At a(int group, int t, int i) { return {i == 0 || i == 2 ? group : group + 8, i < 2 ? t : t + 4}; }
  static At b(int group, int t, int i) { return {i == 0 ? t : t + 4, group}; }
};
At accumulator(int group, int t, int i) { return {i < 2 ? group : group + 8, t * 2 + (i & 1)}; }

// D = A B + C in float, over the depth in order. element(registers, i) is element i of a lane; the low half of a
// register comes first.
template <class Shape, class Element>
void multiply(void** parts, Element element) {
  constexpr int kOfA = 16 * Shape::kDepth / kLanes, kOfB = 8 * Shape::kDepth / kLanes;
  float a[16][Shape::kDepth], b[Shape::kDepth][8], d[16][8];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Mma& part = *static_cast<Mma*>(parts[lane]);
    const int group = lane >> 2, t = lane % 4;
    for (int i = 0; i < kOfA; ++i) {
      const At at = Shape::a(group, t, i);
      a[at.row][at.column] = element(part.a, i);
    }
    for (int i = 0; i < kOfB; ++i) {
      const At at = Shape::b(group, t, i);
      b[at.row][at.column] = element(part.b, i);
    }
    for (int i = 0; i < 4; ++i) {
      const At at = accumulator(group, t, i);
      d[at.row][at.column] = part.d[i];
    }
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < Shape::kDepth; ++k)
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < kLanes; ++lane)
    for (int i = 0; i < 4; ++i) {
      const At at = accumulator(lane >> 2, lane % 4, i);
      static_cast<Mma*>(parts[lane])->d[i] = d[at.row][at.column];
    }
}

uint16_t half(const uint32_t* registers, int i) { return static_cast<uint16_t>(registers[i / 2] >> (i % 2 * 16)); }

// 9.7.9.6, "shfl.sync", mode idx.
void shuffle_lanes(void** parts) {
  for (int lane = 0; lane < kLanes; ++lane) {
    Shuffle& part = *static_cast<Shuffle*>(parts[lane]);
    const int from = part.from & 31, clamp = part.clamp & 31, segment = part.clamp >> 8 & 31;
    const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    const int source = least | (from & ~segment);
    part.in_range = source <= most;
    part.result = static_cast<Shuffle*>(parts[part.in_range ? source : lane])->value;
  }
}

// 9.7.14.5.15, "ldmatrix" .m8n8.x4: lanes 8 m to 8 m + 7 hold the addresses of matrix m's rows, and register m of a
// lane gets the two elements of figure 104: of row lane / 4, a word for each of four lanes.
void distribute_matrices(void** parts) {
  for (int lane = 0; lane < kLanes; ++lane)
    for (int m = 0; m < 4; ++m)
      static_cast<Matrix*>(parts[lane])->result[m] = static_cast<Matrix*>(parts[8 * m + lane / 4])->row[lane % 4];
}

}  // namespace

void mma_bf16(void** parts) {
  multiply<M16N8K16>(
      parts, [](const uint32_t* r, int i) { return as<float>(static_cast<uint32_t>(half(r, i)) << 16); });
}
void mma_fp16(void** parts) {
  multiply<M16N8K16>(parts, [](const uint32_t* r, int i) { return fp16_to_float(half(r, i)); });
}
void mma_tf32(void** parts) {
  multiply<M16N8K8>(parts, [](const uint32_t* r, int i) { return as<float>(r[i] & 0xFFFFE000); });
}

void Thread::warp_sync(uint32_t mask, const char* place, int line) const {
  if (mask != kWholeWarp) fail("bar.warp.sync of a part of the warp", line);
  emulation::warp_collective(emulation::Collective::kSync, nullptr, nullptr, true, place, line);
}
Shuffle Thread::shuffle(
    uint32_t value, uint32_t from, uint32_t clamp, uint32_t mask, const char* place, int line) const {
  if (mask != kWholeWarp) fail("shfl.sync of a part of the warp", line);
  Shuffle part{value, from, clamp, 0, false};
  emulation::warp_collective(emulation::Collective::kShuffle, &part, shuffle_lanes, false, place, line);
  return part;
}
std::array<uint32_t, 4> Thread::load_matrix(uint64_t row, const char* place, int line) const {
  Matrix part;
  const auto words = Thread::get<uint32_t, 4>(at_shared(row & 0xFFFFFFFF, 16, line));
  for (int i = 0; i < 4; ++i) part.row[i] = words[i];
  emulation::warp_collective(emulation::Collective::kMatrix, &part, distribute_matrices, false, place, line);
  return part.result;
}
void Thread::mma(void (*how)(void** parts), Mma& part, const char* place, int line) const {
  emulation::warp_collective(emulation::Collective::kMma, &part, how, false, place, line);
}

// ---- blocks and clusters --------------------------------------------------------------------------------------------
// bar.sync is aligned (9.7.13.1): all lanes of a warp are at the same one.
void Thread::barrier(const char* place, int line) const {
  polled = 0;
  emulation::warp_collective(emulation::Collective::kSync, nullptr, nullptr, false, place, line);
  emulation::block_sync(place, line);
}
bool Thread::barrier_or(bool value, const char* place, int line) const {
  polled = 0;
  emulation::warp_collective(emulation::Collective::kSync, nullptr, nullptr, false, place, line);
  return emulation::block_sync_any(value, place, line);
}

uint64_t Thread::map_peer(uint64_t own, uint32_t rank, const char* place, int line) {
  if (!within(own, 1, shared, shared_bytes)) fail("mapa of an address that is not in this block's shared memory", line);
  if (rank >= std::size(peers)) fail("mapa: rank " + std::to_string(rank), line);
  const uint64_t peer = reinterpret_cast<uint64_t>(
      emulation::peer_shared(reinterpret_cast<unsigned char*>(own), 1, static_cast<int>(rank), place, line));
  const uint64_t base = peer - (own - shared);
  for (uint64_t& known : peers) {
    if (known == 0) known = base;
    if (known == base) break;
  }
  return peer;
}
void Thread::cluster_arrive(int line) {
  if (arrived) fail("barrier.cluster.arrive twice", line);
  arrived = true;
}
void Thread::cluster_wait(const char* place, int line) {
  if (!arrived) fail("barrier.cluster.wait without arrive", line);
  arrived = false;
  emulation::cluster_sync(place, line);
}

}  // namespace fr::ptx
