// Prefetch of the CTA's next work tile during the epilogue of the current one.
#pragma once

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// What a thread has of an ItemPrologue, on its way to the mainloop. As loaded: a use would wait for it. Nothing has to
// be known of the item.
struct TilePrologue {
  int32_t slot;   // KV slot that is this thread's number; negative in all threads if the item has no prologue
  int32_t token;  // of the row that is this thread's number

  // Called by all threads. item: may exceed the last item, up to the number of CTAs.
  static PREFIXPACK_DEVICE TilePrologue load(const KernelParams& params, int32_t item) {
    if (ptx::uniform(item >= params.step.num_prologues)) return {-1, 0};
    const int32_t thread = ptx::volatile_thread_index(), at = item * kItemPrologueWords;
    const auto* words = reinterpret_cast<const int32_t*>(params.step.prologues);
    TilePrologue prologue{0, 0};
    if (thread < kPrologueSlots) prologue.slot = words[at + thread];
    if (thread < kPrologueQueries) prologue.token = words[at + kPrologueSlots + params.heads.group.quotient(thread)];
    return prologue;
  }
};

// The CTA's next tile, in shared memory. The first warp claims it.
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
  // A word of the record for each of the first threads. item: as above.
  PREFIXPACK_DEVICE static int32_t record_word(const KernelParams& params, int32_t item) {
    const int32_t thread = ptx::volatile_thread_index();
    const auto* words = reinterpret_cast<const int32_t*>(params.step.items);
    return thread < kRecordWords ? words[item * kRecordWords + thread] : 0;
  }
  PREFIXPACK_DEVICE static void store_record(void* to, int32_t word) {
    const int32_t thread = ptx::volatile_thread_index();
    if (thread < kRecordWords) static_cast<int32_t*>(to)[thread] = word;
  }
};

}  // namespace prefixpack
