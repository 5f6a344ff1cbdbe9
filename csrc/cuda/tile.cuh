// The tile product: sums[m][unit][row] += sum over k of weight[m][unit][k] * operand[row][k]. A warp covers kGates gate
// rows of 16 units and 32 batch rows, read from shared memory. Every arithmetic uses mma.sync's accumulator layout.
//
// A tile in shared memory is a list of rows of 128 bytes, each cut in 8 pieces of 16 bytes. Piece p of row r is stored
// at piece p ^ (r % 8), so that the same piece of eight rows falls on different banks. One mma consumes two pieces (32
// bytes of depth): 16 values of a 16-bit type or 8 of TF32, with the same byte geometry.
#pragma once

#include <type_traits>

#include "device.cuh"
#include "params.h"

namespace fr::FR_TARGET {

constexpr int kPieceBytes = 16, kRowPieces = kRowBytes / kPieceBytes, kRowTiles = kWarpRows / 8;

FR_HD int piece_offset(int row, int piece) { return row * kRowBytes + ((piece ^ (row & 7)) * kPieceBytes); }

// Loads a piece element by element, with zeros from `valid` on. It assembles words by shifts, because writing elements
// into a union compiles to twice as many instructions, and this is inlined once for each weight fragment in registers.
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
  FR_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_bf16_m16n8k16(d, a, b);
  }
  FR_DEVICE static void prepare(uint32_t (&)[4]) {}
};
struct Fp16Math {
  using Storage = Float16;
  using State = float;
  static constexpr bool kTensor = true;
  FR_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_fp16_m16n8k16(d, a, b);
  }
  FR_DEVICE static void prepare(uint32_t (&)[4]) {}
};
struct Tf32Math {
  using Storage = float;
  using State = float;
  static constexpr bool kTensor = true;
  FR_DEVICE static void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma_tf32_m16n8k8(d, a, b);
  }
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

// Multiplies one slice (128 bytes of depth). weights has rows m * tile_units + unit, operands has the batch rows; unit0
// and row0 are the warp's first.
template <class Math, int kGates>
FR_DEVICE void multiply_slice(Accumulators<typename Math::State, kGates>& sums, const unsigned char* weights,
    int tile_units, int unit0, const unsigned char* operands, int row0, int lane) {
  if constexpr (Math::kTensor) {
    const int matrix = lane / 8, line = lane % 8;  // the address that this lane passes to load_matrix_x4
#pragma unroll
    for (int piece = 0; piece < kRowPieces; piece += 2) {
      uint32_t b[kRowTiles][2];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; tile += 2) {  // matrices: rows 0-7, both pieces; rows 8-15, both pieces
        uint32_t words[4];
        load_matrix_x4(words, operands + piece_offset(row0 + 8 * tile + matrix / 2 * 8 + line, piece + matrix % 2));
        Math::prepare(words);
        b[tile][0] = words[0], b[tile][1] = words[1], b[tile + 1][0] = words[2], b[tile + 1][1] = words[3];
      }
#pragma unroll
      for (int m = 0; m < kGates; ++m) {  // matrices: the first piece of units 0-7 and 8-15, then the second
        uint32_t a[4];
        load_matrix_x4(a, weights + piece_offset(m * tile_units + unit0 + matrix % 2 * 8 + line, piece + matrix / 2));
        Math::prepare(a);
#pragma unroll
        for (int tile = 0; tile < kRowTiles; ++tile) Math::multiply(sums.value[m][tile], a, b[tile]);
      }
    }
  } else {
    using State = typename Math::State;
    struct alignas(kPieceBytes) Piece {
      State value[kPieceBytes / sizeof(State)];
    };
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
