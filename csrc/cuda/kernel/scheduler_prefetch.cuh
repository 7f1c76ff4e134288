// What a block does after its present unit, asked for while it stores what that one came to.
#pragma once

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// The unit that a block does after its present one, in shared memory. The first warp looks after it; the others get
// nothing and keep nothing.
struct NextTile {
  int32_t num_tiles;
  int32_t static_tiles;  // units that blocks began with: each the one of its own number
  int32_t tile_index;
  int32_t record[kRecordWords];

  // How many units blocks asked for before, in the first lane, once it is here: nothing is done with it yet that would
  // wait for it. Asked for when the present unit is done but for its results, no earlier, so that no block holds back
  // work that another could do.
  PREFIXPACK_DEVICE int32_t claim(const KernelParams& params) const {
    if (static_tiles >= num_tiles) return 0;
    return ptx::volatile_thread_index() == 0 ? ptx::atomic_increment(&params.step.tile_counters[0]) : 0;
  }
  // The ticket, for all lanes.
  PREFIXPACK_DEVICE int32_t tile_index_of(int32_t claimed) const { return static_tiles + ptx::shuffle(claimed, 0); }
  // A word of the item's record for each lane.
  PREFIXPACK_DEVICE int32_t prefetch_record(const KernelParams& params, int32_t tile_index) const {
    return tile_index < num_tiles ? record_word(params, tile_index) : 0;
  }
  // ticket: also of a unit that there is not, up to the number of blocks.
  PREFIXPACK_DEVICE static int32_t record_word(const KernelParams& params, int32_t tile_index) {
    const int32_t thread = ptx::thread_index();
    if (thread >= kRecordWords) return 0;
    const ItemRecord* item = params.step.items + work_tile_of(tile_index, params.heads.kv).item;
    return reinterpret_cast<const int32_t*>(item)[thread];
  }
  PREFIXPACK_DEVICE void store(int32_t next_tile, int32_t word) {
    const int32_t thread = ptx::thread_index();
    if (thread < 32) tile_index = next_tile;
    if (thread < kRecordWords) record[thread] = word;
  }
};

}  // namespace prefixpack
