// Kernels that show the lane maps of mma.sync and ldmatrix element by element, and how numbers are rounded. Each lane
// fills its registers by the per-element formulas of the PTX manual, so the result is the matrix product only if the
// hardware (gpu_lanes_test.cu) or the emulation (emulation_words_test.cpp) agrees with them.
#pragma once

#include <cmath>

#include "../../../csrc/cuda/launch.cuh"
#include "../../../csrc/cuda/tile.cuh"

namespace fr::FR_TARGET {

FR_GLOBAL(mma_kernel)
FR_GLOBAL(matrix_kernel)
FR_GLOBAL(round_kernel)

struct MmaParams {
  const float* a;  // [16][depth]
  const float* b;  // [depth][8]
  float* d;        // [16][8]; 1 is added to the product
  int type;        // 0 bf16, 1 fp16, 2 tf32
};
struct MmaKernel {
  static constexpr const char* kName = "mma_kernel";
  FR_ENTRY(mma_kernel)
  static constexpr int kMaxThreads = 32;
  static constexpr bool kCooperative = false;
  using Params = MmaParams;
  FR_DEVICE static void run(const MmaParams& p) {
    const int lane = thread_index(), group = lane >> 2, in_group = lane % 4;
    uint32_t a[4] = {}, b[2] = {};
    if (p.type < 2) {
      for (int i = 0; i < 8; ++i) {
        const int row = (i < 2 || (i >= 4 && i < 6)) ? group : group + 8;
        const int column = i < 4 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8;
        const float v = p.a[row * 16 + column];
        a[i / 2] |= static_cast<uint32_t>(p.type == 0 ? float_to_bf16_bits(v) : float_to_fp16_bits(v))
                    << (16 * (i % 2));
      }
      for (int i = 0; i < 4; ++i) {
        const int row = i < 2 ? in_group * 2 + (i & 1) : in_group * 2 + (i & 1) + 8;
        const float v = p.b[row * 8 + group];
        b[i / 2] |= static_cast<uint32_t>(p.type == 0 ? float_to_bf16_bits(v) : float_to_fp16_bits(v))
                    << (16 * (i % 2));
      }
    } else {
      const uint32_t* bits_a = reinterpret_cast<const uint32_t*>(p.a);
      const uint32_t* bits_b = reinterpret_cast<const uint32_t*>(p.b);
      for (int i = 0; i < 4; ++i) {
        const int row = (i == 0 || i == 2) ? group : group + 8, column = i < 2 ? in_group : in_group + 4;
        a[i] = bits_a[row * 8 + column];
      }
      for (int i = 0; i < 2; ++i) b[i] = bits_b[(i == 0 ? in_group : in_group + 4) * 8 + group];
    }
    float d[4] = {1, 1, 1, 1};
    if (p.type == 0) mma_bf16_m16n8k16(d, a, b);
    else if (p.type == 1) mma_fp16_m16n8k16(d, a, b);
    else mma_tf32_m16n8k8(d, a, b);
    for (int i = 0; i < 4; ++i) {
      const int row = i < 2 ? group : group + 8, column = in_group * 2 + (i & 1);
      p.d[row * 8 + column] = d[i];
    }
  }
};

// ldmatrix.x4 over a swizzled tile of 16 rows, whose words are numbered row * 1000 + piece * 10 + word.
struct MatrixParams {
  uint32_t* got;
};  // [32][4]
struct MatrixKernel {
  static constexpr const char* kName = "matrix_kernel";
  FR_ENTRY(matrix_kernel)
  static constexpr int kMaxThreads = 32, kSharedBytes = 16 * kRowBytes;
  static constexpr bool kCooperative = false;
  using Params = MatrixParams;
  FR_DEVICE static void run(const MatrixParams& p) {
    unsigned char* tile = shared_memory(0, kSharedBytes);
    const int lane = thread_index();
    for (int i = lane; i < 16 * kRowPieces * 4; i += 32) {
      const int row = i / (kRowPieces * 4), piece = i / 4 % kRowPieces, word = i % 4;
      reinterpret_cast<uint32_t*>(tile + piece_offset(row, piece))[word] = row * 1000 + piece * 10 + word;
    }
    block_sync();
    uint32_t words[4];
    load_matrix_x4(words, tile + piece_offset(lane / 8 % 2 * 8 + lane % 8, 2 + lane / 16));
    for (int i = 0; i < 4; ++i) p.got[lane * 4 + i] = words[i];
  }
};

// Numbers rounded to the storage types and to TF32: each lane takes the number of the fifth lane after it.
struct RoundParams {
  const float* x;
  uint32_t* got;  // [32][4]: bits in bf16, in fp16, in TF32, and of the fp16 value read back
};
struct RoundKernel {
  static constexpr const char* kName = "round_kernel";
  FR_ENTRY(round_kernel)
  static constexpr int kMaxThreads = 32;
  static constexpr bool kCooperative = false;
  using Params = RoundParams;
  FR_DEVICE static void run(const RoundParams& p) {
    const int i = thread_index(), from = (i + 5) % 32;
    const float x = warp_shuffle(p.x[i], from);
    const uint16_t half = float_to_fp16_bits(x);
    p.got[4 * i] = float_to_bf16_bits(x), p.got[4 * i + 1] = half;
    p.got[4 * i + 2] = round_to_tf32(reinterpret_cast<const uint32_t*>(p.x)[from]);
    reinterpret_cast<float*>(p.got)[4 * i + 3] = fp16_bits_to_float(half);
  }
};
struct Rounded {
  float x;
  uint32_t bf16, fp16, tf32;
  float back;
};
inline constexpr Rounded kRounded[] = {
    {1.f, 0x3F80, 0x3C00, 0x3F800000, 1.f},
    {0x1.01p0f, 0x3F80, 0x3C04, 0x3F808000, 0x1.01p0f},     // bf16: a tie, to even below
    {0x1.03p0f, 0x3F82, 0x3C0C, 0x3F818000, 0x1.03p0f},     // a tie, to even above
    {0x1.01001p0f, 0x3F81, 0x3C04, 0x3F808000, 0x1.01p0f},  // a little more than a tie
    {0x1.002p0f, 0x3F80, 0x3C00, 0x3F802000, 1.f},          // fp16: a tie, to even; TF32: away from zero
    {-0x1.002p0f, 0xBF80, 0xBC00, 0xBF802000, -1.f}, {0x1.802p0f, 0x3FC0, 0x3E00, 0x3FC02000, 1.5f},
    {65520.f, 0x4780, 0x7C00, 0x47800000, HUGE_VALF},    // beyond fp16
    {0x1.8p-25f, 0x3340, 0x0001, 0x33400000, 0x1p-24f},  // subnormal in fp16
};

// Runs them on `stream` with buffers from allocate(bytes), and calls check(condition, what) for every element.
template <class Allocate, class Wait, class Check>
void check_lane_maps(void* stream, Allocate allocate, Wait wait, Check check) {
  for (int type = 0; type < 3; ++type) {
    const int depth = type == 2 ? 8 : 16;
    auto* a = static_cast<float*>(allocate(16 * depth * 4));
    auto* b = static_cast<float*>(allocate(depth * 8 * 4));
    auto* d = static_cast<float*>(allocate(16 * 8 * 4));
    for (int i = 0; i < 16 * depth; ++i)
      a[i] = static_cast<float>(i * 37 % 17 - 8);  // small integers: exact in every type
    for (int i = 0; i < depth * 8; ++i) b[i] = static_cast<float>(i * 23 % 13 - 6);
    launch<MmaKernel>({1, 1, 1, 32, 0}, {a, b, d, type}, stream);
    wait();
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < 8; ++column) {
        float want = 1;
        for (int k = 0; k < depth; ++k) want += a[row * depth + k] * b[k * 8 + column];
        check(d[row * 8 + column] == want,
            "mma type " + std::to_string(type) + " element " + std::to_string(row) + "," + std::to_string(column));
      }
  }
  auto* x = static_cast<float*>(allocate(32 * 4));
  auto* rounded = static_cast<uint32_t*>(allocate(128 * 4));
  constexpr int kNumbers = sizeof kRounded / sizeof *kRounded;
  for (int i = 0; i < 32; ++i) x[i] = kRounded[i % kNumbers].x;
  launch<RoundKernel>({1, 1, 1, 32, 0}, {x, rounded}, stream);
  wait();
  for (int i = 0; i < 32; ++i) {
    const int number = (i + 5) % 32 % kNumbers;
    const Rounded& want = kRounded[number];
    const uint32_t* of = rounded + 4 * i;
    const std::string name = "number " + std::to_string(number) + " in ";
    check(of[0] == want.bf16, name + "bf16"), check(of[1] == want.fp16, name + "fp16");
    check((of[2] & 0xFFFFE000u) == want.tf32, name + "TF32");  // the low bits are not specified
    check(reinterpret_cast<const float*>(of)[3] == want.back, name + "fp16, read back");
  }
  auto* got = static_cast<uint32_t*>(allocate(128 * 4));
  launch<MatrixKernel>({1, 1, 1, 32, MatrixKernel::kSharedBytes}, {got}, stream);
  wait();
  for (int lane = 0; lane < 32; ++lane)
    for (int matrix = 0; matrix < 4; ++matrix) {
      // thread T holds row T/4, elements 2*(T%4), +1 (one word) of each matrix
      const int row = matrix % 2 * 8 + lane / 4, piece = 2 + matrix / 2, word = lane % 4;
      check(got[lane * 4 + matrix] == static_cast<uint32_t>(row * 1000 + piece * 10 + word),
          "ldmatrix lane " + std::to_string(lane));
    }
}

}  // namespace fr::FR_TARGET
