// The operands of a step in a cluster: every block keeps those of its group's rows whole in its shared memory, and what a block
// finds out about its own units it tells the others. Used by persistent.cuh.
#pragma once

#include "persistent_product.cuh"

namespace fr::FR_TARGET {

// memory  Of each product slices of 128 bytes of depth, kPersistentChunk rows each, laid out as persistent.cuh says. The first
//         product's operand twice, for steps of even and odd number: it is written while that of the step before is read. Once only
//         where nothing is written before all have read: if it comes from the second phase alone (forward with two products).
//         The second product's once: written in the first phase, read in the second.
// sync    place: of the own block. tell_peers: after a block_sync that follows the writing, before the cluster_sync that ends the phase.
template <class Product>
struct ClusterOperand {
  using Storage = typename Product::Storage;
  static constexpr int kPieceDepth = Product::kPieceDepth, kSliceDepth = Product::kSliceDepth;

  const PersistentParams& p;
  int odd;  // of the step that the first product's operand is meant for

  // Where value `number` of a unit and row lies. Forward 0: the state, 1: the second product's operand. Backward the gradient of
  // that gate; the split gate's lies in slices of its own.
  FR_DEVICE Storage* place(int number, int row, int unit) const {
    const bool second = number == p.second_gate, split = number == p.split_gate;
    const int k = second || split ? unit : number * static_cast<int>(p.step.hidden) + unit;
    const int slice = (split ? p.phase[0].first_slices : 0) + k / kSliceDepth, piece = k % kSliceDepth / kPieceDepth;
    const int offset = p.operand_at[second][odd] + slice * kPersistentChunk * kRowBytes + Product::operand_offset(row, piece);
    return reinterpret_cast<Storage*>(shared_memory(offset, kPieceBytes)) + k % kPieceDepth;
  }

  // What a phase wrote for the block's `units` units from unit0 on, into the other blocks' memory. Pieces of 16 bytes belong to one block
  // and value, if gates begin with a piece.
  FR_DEVICE void tell_peers(const PersistentPhase& phase, int unit0, int units, int rows, int thread) const {
    if (unit0 + units > phase.units) units = phase.units - unit0;
    if (phase.told_last > 1 && p.step.hidden % kPieceDepth != 0) copy<Storage>(phase, unit0, units, rows, thread);
    else copy<typename Product::Piece>(phase, unit0, units, rows, thread);
  }

 private:
  template <class Unit>
  FR_DEVICE void copy(const PersistentPhase& phase, int unit0, int units, int rows, int thread) const {
    constexpr int kDepth = sizeof(Unit) / sizeof(Storage);
    const int columns = (units + kDepth - 1) / kDepth, blocks = cluster_size(), rank = cluster_rank();
    for (int number = phase.told_first; number < phase.told_last; ++number)
      for (int i = thread; i < rows * columns; i += block_threads()) {
        Unit* const place_here = reinterpret_cast<Unit*>(place(number, i / columns, unit0 + i % columns * kDepth));
        const Unit value = *place_here;
        for (int away = 1; away < blocks; ++away) *peer_shared(place_here, (rank + away) & (blocks - 1)) = value;  // a power of two
      }
  }
};

}  // namespace fr::FR_TARGET
