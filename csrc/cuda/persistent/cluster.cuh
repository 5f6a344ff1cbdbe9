// The operands of a step in a cluster. Every block keeps the operands of all its group's rows in its own shared memory
// and broadcasts the values of its own units to its peers. Used by kernel.cuh.
#pragma once

#include "product.cuh"

namespace fr::FR_TARGET {

// memory  Each product's operand is a list of slices (128 bytes of depth) of kPersistentBand rows each, laid out as in
//         kernel.cuh. The first product's operand is double-buffered by even and odd steps, because the next step's
//         values are written while this step's are read. Forward with two products needs only one buffer: the state is
//         written in the second phase, when all have read it. The second product's operand needs one as well: it is
//         written in the first phase and read in the second.
// stores  16-byte pieces. For LSTM 512 on 8 blocks and 8 rows, a block sends 8 rows * 64 units * 2 bytes = 1 KiB to
//         each of 7 peers: 448 stores, where single values would take 3584. Backward takes four times that. If H * s is
//         no multiple of 16, two gates share a piece, and backward stores value by value.
// sync    Threads write to the block's own copy (place). broadcast is called after a block_sync that follows these
//         writes, and before the cluster_arrive that ends the phase. On sm_90 the cluster barrier's arrive.release
//         compiles to MEMBAR.ALL.GPU, which also waits for the thread's global stores. wait.acquire compiles to
//         CCTL.IVALL, which drops prefetched lines from L1 but not from L2. A fence of cluster scope compiles to the
//         same, and a relaxed arrival would order nothing. st.async with an mbarrier at the receiver would need
//         neither; it is not built.
template <class Product>
struct ClusterOperand {
  using Storage = typename Product::Storage;
  static constexpr int kPieceDepth = Product::kPieceDepth;

  const PersistentParams& p;
  int odd;  // parity of the step that the first product's operand is meant for

  // Where value `number` of a unit and row lies. Forward: 0 is the state, 1 the second product's operand. Backward: the
  // gradient of that gate; the split gate's lies in slices of its own.
  FR_DEVICE Storage* place(int number, int row, int unit) const {
    const ClusterValue& value = p.value[number];
    const unsigned byte = value.first_byte + unit * static_cast<unsigned>(sizeof(Storage));
    return reinterpret_cast<Storage*>(shared_memory(value.at[odd] + Product::value_offset(row, byte), sizeof(Storage)));
  }

  // Broadcasts what a phase wrote for the units of this block to the other blocks. Whole 16-byte pieces move if every
  // gate begins with one, since each piece then belongs to one block and one value.
  FR_DEVICE void broadcast(const PersistentPhase& phase, int unit0, int rows, int thread) const {
    if (phase.sent_last > 1 && p.step.hidden % kPieceDepth != 0) copy<Storage>(phase, unit0, rows, thread);
    else copy<typename Product::Piece>(phase, unit0, rows, thread);
  }

 private:
  template <class Unit>
  FR_DEVICE void copy(const PersistentPhase& phase, int unit0, int rows, int thread) const {
    constexpr int kDepth = sizeof(Unit) / sizeof(Storage), kDepthBits = kDepth == 1 ? 0 : kDepth == 4 ? 2 : 3;
    static_assert(kDepth == 1 << kDepthBits && kPersistentBand == 16);
    const int column_bits = phase.unit_bits - kDepthBits, value_bits = column_bits + 4;  // log2 of columns; of items
    const int blocks = cluster_size(), rank = cluster_rank();
    for (int i = thread; i < (phase.sent_last - phase.sent_first) << value_bits; i += block_threads()) {
      const int row = (i >> column_bits) & (kPersistentBand - 1),
                unit = unit0 + (i & ((1 << column_bits) - 1)) * kDepth;
      if (row >= rows || unit >= phase.units) continue;
      Unit* const place_here = reinterpret_cast<Unit*>(place(phase.sent_first + (i >> value_bits), row, unit));
      const Unit value = *place_here;
      // & because the number of blocks is a power of two
      for (int away = 1; away < blocks; ++away) *peer_shared(place_here, (rank + away) & (blocks - 1)) = value;
    }
  }
};

}  // namespace fr::FR_TARGET
