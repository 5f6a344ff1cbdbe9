// The product of a tile: sums[m][unit][row] += sum over k of weight[m][unit][k] * operand[row][k], for kGates gate rows of 16
// units and 32 rows a warp, from shared memory. One accumulator layout (that of mma.sync) for every arithmetic.
//
// A tile in shared memory is a list of rows of 128 bytes, cut in 8 pieces of 16; piece p of row r lies at piece p ^ (r % 8), so
// that eight rows' equal pieces fall on different banks. One mma takes two pieces (32 bytes of depth): 16 values of 16 bit or
// 8 of TF32, with the same byte geometry.
#pragma once

#include <type_traits>

#include "device.cuh"
#include "step_params.h"

namespace fr::FR_TARGET {

constexpr int kRowBytes = 128, kPieceBytes = 16, kRowPieces = kRowBytes / kPieceBytes;
constexpr int kWarpUnits = 16, kWarpRows = 32, kRowTiles = kWarpRows / 8;
constexpr int kStages = 2;

FR_HD int piece_offset(int row, int piece) { return row * kRowBytes + ((piece ^ (row & 7)) * kPieceBytes); }

// A piece element by element; those from `valid` on are zero. Put together from words: a compiler that writes elements into a union
// takes twice as many instructions, and each fragment of weights in registers has a copy of this.
template <class Storage>
FR_DEVICE void load_elements(uint32_t (&word)[4], const Storage* from, int valid) {
  using Bits = std::conditional_t<sizeof(Storage) == 2, uint16_t, uint32_t>;
  static_assert(sizeof(Bits) == sizeof(Storage));
  constexpr int kOfWord = 4 / sizeof(Storage);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    word[i] = 0;
#pragma unroll
    for (int e = 0; e < kOfWord; ++e) {
      uint32_t bits = 0;
      if (i * kOfWord + e < valid) bits = reinterpret_cast<const Bits*>(from)[i * kOfWord + e];
      word[i] |= bits << (16 * e);
    }
  }
}

struct Bf16Math {
  using Storage = BFloat16;
  using State = float;
  static constexpr bool kTensor = true;
  FR_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_bf16_m16n8k16(d, a, b); }
  FR_DEVICE static void prepare(uint32_t (&)[4]) {}
};
struct Fp16Math {
  using Storage = Float16;
  using State = float;
  static constexpr bool kTensor = true;
  FR_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_fp16_m16n8k16(d, a, b); }
  FR_DEVICE static void prepare(uint32_t (&)[4]) {}
};
struct Tf32Math {
  using Storage = float;
  using State = float;
  static constexpr bool kTensor = true;
  FR_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) { mma_tf32_m16n8k8(d, a, b); }
  FR_DEVICE static void prepare(uint32_t (&words)[4]) {
    for (int i = 0; i < 4; ++i) words[i] = round_to_tf32(words[i]);
  }
};
struct Fp32Math {
  using Storage = float;
  using State = float;
  static constexpr bool kTensor = false;
  FR_DEVICE static void prepare(uint32_t (&)[4]) {}
};
struct Fp64Math {
  using Storage = double;
  using State = double;
  static constexpr bool kTensor = false;
};

template <class State, int kGates>
struct Accumulators {
  State value[kGates][kRowTiles][4];
};

// One slice of 128 bytes of depth. weights: rows m * tile_units + unit; operands: rows of the batch. unit0, row0: the warp's.
template <class Math, int kGates>
FR_DEVICE void multiply_slice(Accumulators<typename Math::State, kGates>& sums, const unsigned char* weights, int tile_units,
                              int unit0, const unsigned char* operands, int row0, int lane) {
  if constexpr (Math::kTensor) {
    const int matrix = lane / 8, line = lane % 8;  // what this lane names to load_matrix_x4
#pragma unroll
    for (int piece = 0; piece < kRowPieces; piece += 2) {
      uint32_t b[kRowTiles][2];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; tile += 2) {  // matrices: rows 0-7 both pieces, rows 8-15 both pieces
        uint32_t words[4];
        load_matrix_x4(words, operands + piece_offset(row0 + 8 * tile + matrix / 2 * 8 + line, piece + matrix % 2));
        Math::prepare(words);
        b[tile][0] = words[0], b[tile][1] = words[1], b[tile + 1][0] = words[2], b[tile + 1][1] = words[3];
      }
#pragma unroll
      for (int m = 0; m < kGates; ++m) {  // matrices: units 0-7, units 8-15 of the first piece, then of the second
        uint32_t a[4];
        load_matrix_x4(a, weights + piece_offset(m * tile_units + unit0 + matrix % 2 * 8 + line, piece + matrix / 2));
        Math::prepare(a);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) Math::multiply(sums.value[m][tile], a, b[tile]);
      }
    }
  } else {
    using State = typename Math::State;
    struct alignas(kPieceBytes) Piece { State value[kPieceBytes / sizeof(State)]; };
    const auto load = [](const unsigned char* tile, int row, int piece) {
      return *reinterpret_cast<const Piece*>(tile + piece_offset(row, piece));
    };
    const int unit = unit0 + lane / 4, row = row0 + lane % 4 * 2;
#pragma unroll 1
    for (int piece = 0; piece < kRowPieces; ++piece) {
      Piece b[kRowTiles][2];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile)
        b[tile][0] = load(operands, row + 8 * tile, piece), b[tile][1] = load(operands, row + 8 * tile + 1, piece);
#pragma unroll
      for (int m = 0; m < kGates; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Piece a = load(weights, m * tile_units + unit + 8 * half, piece);
#pragma unroll
          for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
            for (int column = 0; column < 2; ++column)
#pragma unroll
              for (unsigned k = 0; k < kPieceBytes / sizeof(State); ++k)
                sums.value[m][tile][2 * half + column] += a.value[k] * b[tile][column].value[k];
        }
    }
  }
}

}  // namespace fr::FR_TARGET
