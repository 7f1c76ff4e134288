// The queue: blocks stay resident and take units until none is left, first those that need a block, then every warp by
// itself those that need a warp. Which block or warp takes which unit changes nothing in the result: every unit has
// output or partial slots of its own.
#pragma once

#include "cuda/block_merge.h"
#include "cuda/block_unit.h"
#include "cuda/warp_units.h"

namespace prefixpack {

// What a block keeps in shared memory behind the tiles. Parameters and header are read often, by code that is called
// and so cannot read them from where a kernel's parameters lie.
struct BlockState {
  KernelParams params;
  PlanHeader header;
  int32_t ticket, next_ticket;
};
static_assert(sizeof(BlockState) <= kBlockStateBytes, "shared memory for the block's state");

PREFIXPACK_DEVICE void copy_words(void* to, const void* from, int32_t bytes) {
  for (int32_t i = ptx::thread_index(); i < bytes / 4; i += ptx::block_size()) {
    static_cast<int32_t*>(to)[i] = static_cast<const int32_t*>(from)[i];
  }
}

PREFIXPACK_DEVICE BlockState* block_state(char* shared) { return reinterpret_cast<BlockState*>(shared + kSharedBytes); }

// A function per tile: inlined side by side they would share, and spill, one set of registers.
template <class TileT, class Element>
PREFIXPACK_DEVICE_CALL void run_block_unit(char* shared) {
  BlockState* state = block_state(shared);
  const KernelParams& params = state->params;
  ptx::warp_sync();
  BlockUnit<TileT, Element>(params, shared, unit_of(state->ticket, params.attention.kv_heads)).run(&state->next_ticket);
}

// Nothing is kept in registers while a unit runs: it needs them all.
template <int HeadDim, class Element>
PREFIXPACK_DEVICE void run_block_queue(char* shared, int32_t first_ticket) {
  BlockState* state = block_state(shared);
  const KernelParams& params = state->params;
  const auto num_units = [&] {
    return (kWarpsWorkAlone<HeadDim> ? state->header.num_block_items : state->header.num_items) *
           params.attention.kv_heads;
  };
  if (num_units() == 0) return;
  // The first warp writes the same word with all its lanes: a branch for one of them would split the warp.
  const bool writes = ptx::thread_index() < 32;
  if (writes) state->next_ticket = first_ticket;
  for (;;) {
    ptx::warp_sync();
    if (writes) state->ticket = state->next_ticket;
    ptx::block_sync();
    if (state->ticket >= num_units()) return;
    const int32_t rows = params.step.items[unit_of(state->ticket, params.attention.kv_heads).item].tile_rows;
    if (rows <= 32) {
      run_block_unit<Tile<HeadDim, 32>, Element>(shared);
    } else if (rows <= 64) {
      run_block_unit<Tile<HeadDim, 64>, Element>(shared);
    } else if constexpr (kMaxTileRows<HeadDim> >= 128) {
      run_block_unit<Tile<HeadDim, 128>, Element>(shared);
    }
    merge_what_is_ready<HeadDim, Element>(params, shared, unit_of(state->ticket, params.attention.kv_heads));
    ptx::block_sync();
  }
}

template <int HeadDim, class Element>
PREFIXPACK_DEVICE void run_queue(const KernelParams& kernel_params, char* shared) {
  BlockState* state = block_state(shared);
  const int32_t ticket = ptx::take_ticket(&kernel_params.step.tickets[0]);  // on its way while the header is
  copy_words(&state->params, &kernel_params, sizeof(KernelParams));
  copy_words(&state->header, kernel_params.plan.words, sizeof(PlanHeader));
  ptx::block_sync();
  if (ptx::thread_index() < 32) state->params.plan.near_header = &state->header;
  ptx::block_sync();
  run_block_queue<HeadDim, Element>(shared, ticket);
  if constexpr (kWarpsWorkAlone<HeadDim>) {
    using TileT = WarpTile<HeadDim>;
    WarpUnits<TileT, Element>(kernel_params, state->header, shared + ptx::thread_index() / 32 * TileT::kBytes).run();
    ptx::block_sync();
  }
  // The last block to leave makes the counters ready for the next launch, so that a captured graph can be replayed.
  if (ptx::thread_index() == 0 && ptx::atomic_add(&kernel_params.step.tickets[2], 1) == ptx::grid_size() - 1) {
    for (int32_t i = 0; i < 3; ++i) kernel_params.step.tickets[i] = 0;
  }
}

}  // namespace prefixpack
