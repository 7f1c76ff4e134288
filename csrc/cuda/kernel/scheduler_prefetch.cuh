// Prefetch of the CTA's next work tile during the epilogue of the current one.
#pragma once

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// The CTA's next tile, in shared memory. The first warp maintains it; the others keep nothing.
struct NextTile {
  int32_t num_tiles;
  int32_t static_tiles;  // tiles assigned statically: CTA i starts with tile i
  int32_t tile_index;
  int32_t record[kRecordWords];

  // Claims a tile; the first lane gets the number of tiles claimed before, once it has arrived. Claimed after the
  // mainloop and not earlier, so that no CTA holds work that another one could do. A CTA claims once for each tile that
  // it has run, so the last claim of a launch is known, and resets the counter for the next launch. A captured graph
  // can be replayed, and no CTA waits for a count of CTAs.
  PREFIXPACK_DEVICE int32_t claim(const KernelParams& params) const {
    if (static_tiles >= num_tiles) return 0;
    return ptx::volatile_thread_index() == 0
               ? ptx::atomic_increment_or_reset(&params.step.tile_counters[0], num_tiles - 1)
               : 0;
  }
  // Index of the claimed tile, for all lanes.
  PREFIXPACK_DEVICE int32_t tile_index_of(int32_t claimed) const { return static_tiles + ptx::shuffle(claimed, 0); }
  // A word of the item's record per lane.
  PREFIXPACK_DEVICE int32_t prefetch_record(const KernelParams& params, int32_t tile_index) const {
    return tile_index < num_tiles ? record_word(params, tile_index) : 0;
  }
  // tile_index: may exceed the last tile, up to the number of CTAs.
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
