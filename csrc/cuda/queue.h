// The queue: blocks stay resident and take units until none is left, first those that need a block, then every warp by
// itself those that need a warp. Which block or warp takes which unit changes nothing in the result: every unit has
// output or partial slots of its own.
#pragma once

#include "cuda/block_unit.h"
#include "cuda/warp_units.h"

namespace prefixpack {

// A function per tile: inlined side by side they would share, and spill, one set of registers.
template <class TileT, class Element>
PREFIXPACK_DEVICE_CALL int32_t run_block_unit(const KernelParams& params, char* shared, Unit unit) {
  return BlockUnit<TileT, Element>(params, shared, unit).run();
}

// What a block keeps in shared memory behind the tiles. Parameters and header are read often, by code that is called
// and so cannot read them from where a kernel's parameters lie.
struct BlockState {
  KernelParams params;
  PlanHeader header;
  int32_t ticket;
};
static_assert(sizeof(BlockState) <= kBlockStateBytes, "shared memory for the block's state");

PREFIXPACK_DEVICE void copy_words(void* to, const void* from, int32_t bytes) {
  for (int32_t i = ptx::thread_index(); i < bytes / 4; i += kThreads) {
    static_cast<int32_t*>(to)[i] = static_cast<const int32_t*>(from)[i];
  }
}

template <int HeadDim, class Element>
PREFIXPACK_DEVICE void run_block_queue(const KernelParams& params, char* shared, int32_t* ticket_of_block) {
  const int32_t kv_heads = params.attention.kv_heads;
  const PlanHeader& header = params.plan.header();
  const int32_t num_units = (kWarpsWorkAlone<HeadDim> ? header.num_block_items : header.num_items) * kv_heads;
  if (num_units == 0) return;
  int32_t next = ptx::thread_index() == 0 ? ptx::atomic_add(&params.step.tickets[0], 1) : 0;
  for (;;) {
    if (ptx::thread_index() == 0) *ticket_of_block = next;
    ptx::block_sync();
    const int32_t ticket = *ticket_of_block;
    ptx::block_sync();
    if (ticket >= num_units) return;
    const Unit unit = unit_of(ticket, kv_heads);
    const int32_t rows = params.step.items[unit.item].tile_rows;
    if (rows <= 32) {
      next = run_block_unit<Tile<HeadDim, 32>, Element>(params, shared, unit);
    } else if (rows == 64) {
      next = run_block_unit<Tile<HeadDim, 64>, Element>(params, shared, unit);
    } else if constexpr (kMaxTileRows<HeadDim> >= 128) {
      next = run_block_unit<Tile<HeadDim, 128>, Element>(params, shared, unit);
    }
  }
}

template <int HeadDim, class Element>
PREFIXPACK_DEVICE void run_queue(const KernelParams& kernel_params, char* shared) {
  auto* state = reinterpret_cast<BlockState*>(shared + kSharedBytes);
  copy_words(&state->params, &kernel_params, sizeof(KernelParams));
  copy_words(&state->header, kernel_params.plan.words, sizeof(PlanHeader));
  ptx::block_sync();
  if (ptx::thread_index() == 0) state->params.plan.near_header = &state->header;
  ptx::block_sync();
  const KernelParams& params = state->params;
  run_block_queue<HeadDim, Element>(params, shared, &state->ticket);
  if constexpr (kWarpsWorkAlone<HeadDim>) {
    using TileT = WarpTile<HeadDim>;
    WarpUnits<TileT, Element>(kernel_params, state->header, shared + ptx::thread_index() / 32 * TileT::kBytes).run();
    ptx::block_sync();
  }
  // The last block to leave makes the counters ready for the next launch, so that a captured graph can be replayed.
  if (ptx::thread_index() == 0 && ptx::atomic_add(&params.step.tickets[2], 1) == ptx::grid_size() - 1) {
    for (int32_t i = 0; i < 3; ++i) params.step.tickets[i] = 0;
  }
}

}  // namespace prefixpack
