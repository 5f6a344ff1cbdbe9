// Waits for the other blocks of a group, with a timeout. Used by kernel.cuh and projected.cuh.
#pragma once

#include "timeout.h"
#include "../device.cuh"
#include "params.h"

namespace fr::FR_TARGET {

// Waits until block i of the group has published `wanted`; i == blocks polls the group's abort flag instead. One load
// and one branch serve both, so that the lanes of a warp wait together. Returns false if the group aborts; by then the
// host has the report, and the group's abort flag is set. flags: the group's, one for each block, then the abort flag.
// seen: takes the flag's value.
template <bool kBackward>
FR_DEVICE bool wait_for(
    const PersistentParams& p, unsigned* flags, int i, unsigned wanted, int phase, int64_t step, unsigned& seen) {
  const int blocks = grid_x();
  if (i == blocks) wanted = 0;
  const bool came =
      wait_until([&] { return (seen = load_acquire(flags + i)) >= wanted; }, p.timeout_ns, flags + blocks);
  if (came) return i < blocks || seen == 0;
  if (load_acquire(flags + blocks) == 0) {
    store_system(p.status, status_of({kBackward, p.first_direction + block_z(), phase, block_y(), block_x(), step}));
    store_release(flags + blocks, 1);
  }
  return false;
}

// A missing sum: NaN after an abort, else zero.
FR_DEVICE float sum_unless(bool aborted) { return aborted ? bits_to_float(0x7FC00000u) : 0; }

}  // namespace fr::FR_TARGET
