// Tests the emulated fr:: functions: lane maps of mma and ldmatrix element by element against the tables of the PTX
// manual, the tile's swizzle, conversions, asynchronous copies, flags and barriers; and that each kind of broken kernel
// is caught.
// usage: emulation_words_test [check | race NAME]
//   check       all that a plain build can decide; exit status 1 on failure
//   race NAME   runs one kernel (correct, no_barrier, ..., or with a cluster: cluster_correct, ...) for a
//   ThreadSanitizer build, which must be silent on the correct ones and report the others
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "lane_maps.cuh"

namespace {

using namespace fr;
using namespace fr::host;
using emulation::Schedule;

int g_failures = 0;
void check(bool condition, const std::string& what) {
  if (condition) return;
  ++g_failures;
  std::printf("FAIL %s\n", what.c_str());
}

template <class Kernel>
std::string run(const typename Kernel::Params& params, LaunchShape shape, Schedule schedule = {}) {
  try {
    launch<Kernel>(shape, params, &schedule);
  } catch (const emulation::Fault& fault) { return fault.what(); }
  return "";
}

struct KernelBase {
  static constexpr int kMaxThreads = 1024;
  static constexpr bool kCooperative = false;
};

// ---- lane maps ------------------------------------------------------------------------------------------------------
void check_lanes() {
  Schedule schedule{0};
  std::vector<std::vector<unsigned char>> memory;
  check_lane_maps(
      &schedule,
      [&](int bytes) {
        memory.emplace_back(bytes);
        return static_cast<void*>(memory.back().data());
      },
      [] {}, check);
}

// The eight rows that one matrix of a load addresses, and the eight rows that a column of float4 reads touches, cover
// all 32 banks.
void check_swizzle() {
  for (int row0 : {0, 8, 16, 40})
    for (int piece = 0; piece < kRowPieces; ++piece) {
      unsigned banks = 0;
      for (int row = row0; row < row0 + 8; ++row)
        for (int word = 0; word < 4; ++word) banks |= 1u << ((piece_offset(row, piece) / 4 + word) % 32);
      check(banks == 0xFFFFFFFFu, "swizzle: rows from " + std::to_string(row0) + " piece " + std::to_string(piece));
    }
  std::vector<bool> used(64 * kRowPieces);
  for (int row = 0; row < 64; ++row)
    for (int piece = 0; piece < kRowPieces; ++piece) {
      const int place = piece_offset(row, piece) / kPieceBytes;
      check(piece_offset(row, piece) % kPieceBytes == 0 && place < int(used.size()) && !used[place],
          "swizzle is one to one");
      used[place] = true;
    }
}

void check_conversions() {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float half = fp16_bits_to_float(uint16_t(bits));
    if (half == half) check(float_to_fp16_bits(half) == bits, "fp16 round trip " + std::to_string(bits));
    const float brain = to_state(BFloat16{uint16_t(bits)});
    if (brain == brain) check(float_to_bf16_bits(brain) == bits, "bf16 round trip " + std::to_string(bits));
  }
  check(float_to_fp16_bits(65519.f) == 0x7BFF && float_to_fp16_bits(65520.f) == 0x7C00, "fp16 overflow");
  check(float_to_fp16_bits(1.0f + 1.0f / 2048) == 0x3C00 && float_to_fp16_bits(1.0f + 3.0f / 2048) == 0x3C02,
      "fp16 ties to even");
  check(float_to_bf16_bits(1.0f + 1.0f / 256) == 0x3F80 && float_to_bf16_bits(1.0f + 3.0f / 256) == 0x3F82,
      "bf16 ties to even");
  check((float_to_bf16_bits(NAN) & 0x7FFF) > 0x7F80 && (float_to_fp16_bits(NAN) & 0x7FFF) > 0x7C00, "NaN stays NaN");
  check(
      round_to_tf32(0x3F801000u) == 0x3F802000u && round_to_tf32(0x3F800FFFu) == 0x3F800000u, "tf32 rounds to nearest");
}

// ---- a small persistent recurrent kernel, correct and broken
// ---------------------------------------------------------
// h[t+1][i] = (h[t][i] + h[t][(i + 1) % n]) / 2 over the slices of all blocks, exchanged through global memory and
// flags. Within a block asynchronous copies stage the old state in shared memory, double-buffered.
enum class Broken { kNo, kNoBarrier, kWrongHalf, kEarlyFlag, kLateCopy, kNoFlag, kDiverges, kOffByOne, kTooMuchShared };
struct LoopParams {
  float* h;         // [2][n]
  unsigned* flags;  // [blocks]
  int steps, n;
  Broken broken;
};
struct LoopKernel : KernelBase {
  static constexpr const char* kName = "loop_kernel";
  static constexpr bool kCooperative = true;
  using Params = LoopParams;
  static void run(const LoopParams& p) {
    const int thread = thread_index(), block = block_x(), blocks = grid_x(), each = block_threads();
    const int bytes = p.n * 4 + (p.broken == Broken::kTooMuchShared ? 4 : 0);
    float* staged = reinterpret_cast<float*>(shared_memory(0, size_t(2) * bytes));
    if (p.broken == Broken::kDiverges) {
      if (thread % 2) warp_sync();
      else warp_shuffle(0, 0);
    }
    for (int step = 0; step < p.steps; ++step) {
      const float* from = p.h + step % 2 * p.n;
      const int half = step % 2 * p.n;
      for (int i = 4 * thread; i < p.n; i += 4 * each) copy_async(staged + half + i, from + i, 16);
      commit_copies();
      if (p.broken != Broken::kLateCopy) wait_copies<0>();
      if (p.broken != Broken::kNoBarrier) block_sync();
      const int i = block * each + thread;
      const float value =
          (staged[half + i] + staged[half + (i + 1) % p.n + (p.broken == Broken::kOffByOne ? p.n : 0)]) / 2;
      if (p.broken == Broken::kEarlyFlag && thread == 0) store_release(p.flags + block, step + 1);
      p.h[(p.broken == Broken::kWrongHalf ? step : step + 1) % 2 * p.n + i] = value;  // others still read the old half
      block_sync();  // all of this block's slice is written before its flag
      if (p.broken != Broken::kEarlyFlag && p.broken != Broken::kNoFlag && thread == 0)
        store_release(p.flags + block, step + 1);
      if (thread < blocks) wait_until([&] { return load_acquire(p.flags + thread) > unsigned(step); }, 0, nullptr);
      block_sync();
    }
  }
};

struct LoopResult {
  std::string fault;
  bool right;
};
LoopResult run_loop(Broken broken, uint64_t seed) {
  const int blocks = 3, threads = 64, n = blocks * threads, steps = 5;
  std::vector<float> h(2 * n, NAN), want(n), next(n);
  std::vector<unsigned> flags(blocks, 0);
  for (int i = 0; i < n; ++i) h[i] = want[i] = float(i * 7 % 31);
  for (int step = 0; step < steps; ++step) {
    for (int i = 0; i < n; ++i) next[i] = (want[i] + want[(i + 1) % n]) / 2;
    want.swap(next);
  }
  LoopResult result;
  result.fault =
      run<LoopKernel>({h.data(), flags.data(), steps, n, broken}, {blocks, 1, 1, threads, 2 * n * 4}, {seed});
  result.right = true;
  for (int i = 0; i < n; ++i) result.right = result.right && h[steps % 2 * n + i] == want[i];
  return result;
}

// The fast formulas of sigmoid and tanh, for rounded products. On a GPU ex2 and rcp add a few roundings.
void check_fast_gates() {
  double worst = 0;
  for (float x = -30; x <= 30; x += 1.0f / 1024) {
    const double sigmoid = 1 / (1 + std::exp(-double(x))), tangent = std::tanh(double(x));
    worst = std::max(worst, std::abs(fr_sigmoid(Scalar<float, true>(x)).value / sigmoid - 1));
    if (x != 0) worst = std::max(worst, std::abs(fr_tanh(Scalar<float, true>(x)).value / tangent - 1));
  }
  check(worst < 1e-6, "fast gates: relative error " + std::to_string(worst));
  const float beyond = INFINITY;
  check(fast_tanh(beyond) == 1 && fast_tanh(-beyond) == -1 && fast_tanh(0) == 0, "fast tanh at its ends");
  check(fast_logistic_of_minus(beyond) == 0 && fast_logistic_of_minus(-beyond) == 1, "fast sigmoid at its ends");
  check(std::isnan(fast_tanh(NAN)) && std::isnan(fast_logistic_of_minus(NAN)), "NaN stays NaN in fast gates");
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

void check_loop() {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const LoopResult result = run_loop(Broken::kNo, seed);
    check(result.fault.empty() && result.right,
        "the correct loop kernel, seed " + std::to_string(seed) + " " + result.fault);
  }
  const auto wrong_in_some_seed = [](Broken broken) {
    for (uint64_t seed = 0; seed < 6; ++seed) {
      const LoopResult result = run_loop(broken, seed);
      if (!result.fault.empty() || !result.right) return true;
    }
    return false;
  };
  check(wrong_in_some_seed(Broken::kLateCopy), "copies that nobody waits for give wrong numbers");
  check(wrong_in_some_seed(Broken::kNoBarrier), "a missing barrier gives wrong numbers in some order");
  check(wrong_in_some_seed(Broken::kWrongHalf), "writing the half that is read gives wrong numbers");
  const std::string never = run_loop(Broken::kNoFlag, 1).fault;
  check(contains(never, "can never end") && contains(never, "a signal at emulation_words_test.cpp:"),
      "a missing flag is reported: " + never);
  check(contains(run_loop(Broken::kDiverges, 0).fault, "different collectives"), "diverging lanes are reported");
  const std::string beyond = run_loop(Broken::kTooMuchShared, 0).fault;
  check(contains(beyond, "of 1536 bytes"), "shared memory beyond the launch is reported: " + beyond);
}

// Threads that exit before a barrier: the wait of the others is reported with its line.
struct EarlyReturn : KernelBase {
  static constexpr const char* kName = "early_return";
  struct Params {};
  static void run(const Params&) {
    if (thread_index() == 3) return;
    block_sync();
  }
};
void check_early_return() {
  const std::string fault = run<EarlyReturn>({}, {1, 1, 1, 64, 0});
  check(contains(fault, "63 threads wait for block_sync at emulation_words_test.cpp:") &&
            contains(fault, "1 threads have returned"),
      "an early return before a barrier is reported: " + fault);
}

// ---- clusters
// --------------------------------------------------------------------------------------------------------
// The same loop in every cluster: each block keeps the whole old state, double-buffered, and a thread writes its new
// value to all blocks.
enum class Torn {
  kNo,
  kNoBarrier,
  kWrongHalf,
  kWrongPeer,
  kNoSuchPeer,
  kNotShared,
  kNoFirstBarrier,
  kNoLastBarrier,
  kKeptAddress,
  kLeavesEarly,
  kOneStaysAway
};
struct ClusterParams {
  const float* from;  // [clusters][n]
  float* to;          // [clusters][n]
  int steps;
  Torn torn;
};
struct ClusterKernel : KernelBase {
  static constexpr const char* kName = "cluster_kernel";
  using Params = ClusterParams;
  static void run(const ClusterParams& p) {
    const int thread = thread_index(), size = cluster_size(), rank = cluster_rank(), n = size * block_threads();
    const int cluster = block_x() / size + block_z() * (grid_x() / size), own = rank * block_threads() + thread;
    float* state = reinterpret_cast<float*>(shared_memory(0, size_t(2) * n * sizeof(float)));
    for (int i = thread; i < n; i += block_threads()) state[i] = p.from[cluster * n + i];
    if (p.torn == Torn::kOneStaysAway && rank == 1) return;
    if (p.torn == Torn::kNoFirstBarrier) block_sync();
    else cluster_sync();
    float* kept = peer_shared(state, (rank + 1) % size);
    for (int step = 0; step < p.steps; ++step) {
      const float* old = state + step % 2 * n;
      const int next = (p.torn == Torn::kWrongHalf ? step : step + 1) % 2 * n;
      const float value = (old[own] + old[(own + 1) % n]) / 2;
      for (int peer = 0; peer < size; ++peer) {
        const int to = p.torn == Torn::kWrongPeer && peer == 1 ? 0 : p.torn == Torn::kNoSuchPeer ? peer + 1 : peer;
        *(peer_shared(p.torn == Torn::kNotShared ? const_cast<float*>(p.from) : state, to) + next + own) = value;
      }
      if (p.torn == Torn::kNoBarrier) block_sync();
      else if (step + 1 < p.steps || p.torn != Torn::kNoLastBarrier) cluster_sync();
    }
    p.to[cluster * n + own] = state[p.steps % 2 * n + own];
    if (p.torn == Torn::kKeptAddress) kept[own] = 0;  // the peer may have exited
    if (p.torn == Torn::kLeavesEarly && rank == 1) {
      for (int i = 0; i < 100; ++i) block_sync();
      peer_shared(state, 0)[own] = 0;
    }
  }
};

LoopResult run_cluster(Torn torn, uint64_t seed) {
  const int size = 3, threads = 32, n = size * threads, clusters = 4, steps = 5;
  std::vector<float> from(clusters * n), to(clusters * n, NAN), want, next(n);
  for (int i = 0; i < clusters * n; ++i) from[i] = float(i * 7 % 31);
  LoopResult result;
  const LaunchShape shape{2 * size, 1, 2, threads, 2 * n * 4, size};
  result.fault = run<ClusterKernel>({from.data(), to.data(), steps, torn}, shape, {seed});
  result.right = true;
  for (int cluster = 0; cluster < clusters; ++cluster) {
    want.assign(from.begin() + cluster * n, from.begin() + (cluster + 1) * n);
    for (int step = 0; step < steps; ++step) {
      for (int i = 0; i < n; ++i) next[i] = (want[i] + want[(i + 1) % n]) / 2;
      want.swap(next);
    }
    for (int i = 0; i < n; ++i) result.right = result.right && to[cluster * n + i] == want[i];
  }
  return result;
}

void check_clusters() {
  for (uint64_t seed = 0; seed < 6; ++seed) {
    const LoopResult result = run_cluster(Torn::kNo, seed);
    check(result.fault.empty() && result.right,
        "the correct cluster kernel, seed " + std::to_string(seed) + " " + result.fault);
  }
  for (const auto& [torn, what] : {std::pair(Torn::kNoBarrier, "a missing cluster barrier"),
           {Torn::kWrongHalf, "writing the half that is read"}, {Torn::kWrongPeer, "writing to the wrong peer"},
           {Torn::kKeptAddress, "writing to a peer that may have returned"}}) {
#if defined(__SANITIZE_ADDRESS__)
    if (torn == Torn::kKeptAddress) continue;  // ends the program there: `race cluster_kept_address`
#endif
    bool seen = false;
    for (uint64_t seed = 0; seed < 6 && !seen; ++seed) {
      const LoopResult result = run_cluster(torn, seed);
      seen = !result.fault.empty() || !result.right;
    }
    check(seen, std::string(what) + " is seen in some order");
  }
  const std::pair<Torn, const char*> faults[] = {
      {Torn::kNoSuchPeer, "rank 3 of a cluster of 3"},
      {Torn::kNotShared, "not in this block's 768 bytes of shared memory"},
      {Torn::kNoFirstBarrier, "before the first cluster_sync"},
      {Torn::kNoLastBarrier, "a block returns while a peer may still use its shared memory"},
      {Torn::kLeavesEarly, "the block of rank 0 has returned"},
      {Torn::kOneStaysAway, "threads wait for cluster_sync at emulation_words_test.cpp:"},
  };
  for (const auto& [torn, text] : faults) {
    const std::string fault = run_cluster(torn, 0).fault;
    check(contains(fault, text), std::string("expected: ") + text + "; got: " + fault);
  }
  bool refused = false;
  try {
    run<ClusterKernel>({}, {4, 1, 1, 32, 768, 3});
  } catch (const std::logic_error&) { refused = true; }
  check(refused, "a grid that is no multiple of its clusters is refused");
}

// ---- the clock
// -------------------------------------------------------------------------------------------------------
// Waits for a flag that never comes, until a timeout.
struct TimeoutKernel : KernelBase {
  static constexpr const char* kName = "timeout_kernel";
  struct Params {
    unsigned* flag;
    unsigned long long nanoseconds;
    int* late;
  };
  static void run(const Params& p) {
    if (!wait_until([&] { return load_acquire(p.flag) != 0; }, p.nanoseconds, nullptr)) ++*p.late;
  }
};
void check_clock() {
  unsigned flag = 0;
  int late = 0;
  const TimeoutKernel::Params params{&flag, 10'000'000'000ull, &late};
  const std::string stands = run<TimeoutKernel>(params, {1, 1, 1, 1, 0});
  check(contains(stands, "can never end") && late == 0,
      "while the clock stands, a wait without end is a fault: " + stands);
  const std::string goes = run<TimeoutKernel>(params, {1, 1, 1, 1, 0}, {0, 100'000'000ull});
  check(goes.empty() && late == 1, "a timeout ends a wait: " + goes);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "check", name = argc > 2 ? argv[2] : "correct";
  if (mode == "race") {
    const std::pair<const char*, Broken> kinds[] = {{"correct", Broken::kNo}, {"no_barrier", Broken::kNoBarrier},
        {"wrong_half", Broken::kWrongHalf}, {"early_flag", Broken::kEarlyFlag}, {"late_copy", Broken::kLateCopy},
        {"off_by_one", Broken::kOffByOne}};
    for (const auto& [known, broken] : kinds)
      if (name == known) {
        const LoopResult result = run_loop(broken, 3);
        std::printf("%s: %s %s\n", known, result.right ? "right" : "wrong", result.fault.c_str());
        return 0;
      }
    const std::pair<const char*, Torn> torn_kinds[] = {{"cluster_correct", Torn::kNo},
        {"cluster_no_barrier", Torn::kNoBarrier}, {"cluster_wrong_half", Torn::kWrongHalf},
        {"cluster_kept_address", Torn::kKeptAddress}};
    for (const auto& [known, torn] : torn_kinds)
      if (name == known) {
        const LoopResult result = run_cluster(torn, 3);
        std::printf("%s: %s %s\n", known, result.right ? "right" : "wrong", result.fault.c_str());
        return 0;
      }
    return 2;
  }
  check_lanes();
  check_swizzle();
  check_conversions();
  check_fast_gates();
  check_loop();
  check_early_return();
  check_clusters();
  check_clock();
  std::printf("%d failures\n", g_failures);
  return g_failures ? 1 : 0;
}
