// The queues: units for blocks, and units for warps by themselves, each with a kernel of its own that runs beside the
// other. Blocks stay resident and take units until none is left. Which block or warp takes which unit changes nothing
// in the result: every unit has output or partial slots of its own.
#pragma once

#include <type_traits>

#include "cuda/kernel/cta_state.cuh"
#include "cuda/kernel/epilogue.cuh"
#include "cuda/kernel/mainloop_mma.cuh"
#include "cuda/kernel/mainloop_wgmma.cuh"
#include "cuda/kernel/warp_decode.cuh"

namespace prefixpack {

PREFIXPACK_DEVICE void copy_words(void* to, const void* from, int32_t bytes) {
#pragma unroll 1  // short code is there sooner
  for (int32_t i = ptx::thread_index(); i < bytes / 4; i += ptx::block_size()) {
    static_cast<int32_t*>(to)[i] = static_cast<const int32_t*>(from)[i];
  }
}

// kernel_params: wherever they are read fastest.
template <class Unit>
PREFIXPACK_DEVICE UnitEnd run_unit(const KernelParams& kernel_params, char* shared) {
  ptx::warp_sync();
  return Unit(kernel_params, *block_state(shared), shared).run();
}
// A function per tile: inlined side by side they would share, and spill, one set of registers.
template <class Unit>
PREFIXPACK_DEVICE_CALL UnitEnd call_unit(char* shared) {
  return run_unit<Unit>(block_state(shared)->params, shared);
}

// The tiles of a kernel, for up to so many rows. With products of a warpgroup one is for all of more than 32.
template <int HeadDim, class Format>
struct Tiles {
#ifdef PREFIXPACK_WARPGROUP_PRODUCTS
  static constexpr bool kWarpgroups = HeadDim == 128 && Format::kKvBytes == 2;
#else
  static constexpr bool kWarpgroups = false;
#endif
  static constexpr int kMiddleRows = kWarpgroups ? 32 : 64, kWideRows = kMaxTileRows<HeadDim>;
  using Narrow = Tile<HeadDim, 32, Format::kKvBytes>;
  using Middle = Tile<HeadDim, kMiddleRows, Format::kKvBytes>;
  using Wide =
      std::conditional_t<kWarpgroups, WideTile<HeadDim, kSharedBytes>, Tile<HeadDim, kWideRows, Format::kKvBytes>>;

  PREFIXPACK_DEVICE static BlockSums sums(int32_t rows) {
    return rows <= 32 ? Narrow::sums() : rows <= kMiddleRows ? Middle::sums() : Wide::sums();
  }
};

// Runs the block's present unit as far as its sums. kernel_params: as the kernel has them.
template <int HeadDim, class Format>
PREFIXPACK_DEVICE UnitEnd run_present_unit(const KernelParams& kernel_params, char* shared) {
  using Tiles = Tiles<HeadDim, Format>;
  const int32_t rows = block_state(shared)->item.tile_rows;
  if (ptx::uniform(rows <= 32)) return call_unit<BlockUnit<typename Tiles::Narrow, Format>>(shared);
  if constexpr (Tiles::kMiddleRows > 32 && Tiles::kMiddleRows < Tiles::kWideRows) {
    if (ptx::uniform(rows <= Tiles::kMiddleRows)) return call_unit<BlockUnit<typename Tiles::Middle, Format>>(shared);
  }
  // Products of warpgroups not in a function of their own: at its begin and end the compiler would take them for under
  // way, and let each wait for the one before it.
  if constexpr (Tiles::kWarpgroups) {
    return run_unit<WideUnit<typename Tiles::Wide, Format>>(kernel_params, shared);
  } else {
    return call_unit<BlockUnit<typename Tiles::Wide, Format>>(shared);
  }
}

// The unit that was asked for becomes the present one; false if there is none.
PREFIXPACK_DEVICE bool take_unit(char* shared) {
  BlockState* state = block_state(shared);
  // The first warp writes the same words with all its lanes: a branch for one of them would split the warp.
  const int32_t thread = ptx::thread_index_here();
  if (thread < 32) {
    state->ticket = state->next.ticket;
    state->kv_head = unit_of(state->next.ticket, state->params.heads.kv).head;
  }
  if (thread < kRecordWords) reinterpret_cast<int32_t*>(&state->item)[thread] = state->next.record[thread];
  ptx::block_sync();
  return state->ticket < state->next.num_units;
}

// Nothing is kept in registers while a unit runs: it needs them all. kernel_params: as the kernel has them.
template <int HeadDim, class Format>
PREFIXPACK_DEVICE void run_block_queue(const KernelParams& kernel_params, char* shared) {
  BlockState* state = block_state(shared);
  while (ptx::uniform(take_unit(shared))) {
    const UnitEnd end = run_present_unit<HeadDim, Format>(kernel_params, shared);
    const BlockSums sums = Tiles<HeadDim, Format>::sums(state->item.tile_rows);
    finish_unit<HeadDim, typename Format::Output>(shared, sums, end);
    ptx::block_sync();
  }
}

// The last block of both kernels to leave makes the counters ready for the next launch, so that a captured graph can be
// replayed.
PREFIXPACK_DEVICE void leave(const StepState& step, int32_t blocks) {
  if (ptx::thread_index() == 0 && ptx::count_up(&step.tickets[2]) == blocks - 1) {
    for (int32_t i = 0; i < 3; ++i) step.tickets[i] = 0;
  }
}

// blocks: of both kernels. few_blocks: as in LaunchSize. shared: kLaunchSharedBytes.
template <int HeadDim, class Format>
PREFIXPACK_DEVICE void run_blocks(const KernelParams& kernel_params, char* shared, int32_t blocks, int32_t few_blocks) {
  BlockState* state = block_state(shared);
  // Beside the header, which says whether there is such a unit.
  const int32_t ticket = ptx::block_index(), word = NextUnit::record_word(kernel_params, ticket);
  copy_words(&state->params, &kernel_params, sizeof(KernelParams));
  copy_words(&state->header, kernel_params.plan.words, sizeof(PlanHeader));
  ptx::block_sync();
  // No sooner: where blocks have work the step would take longer, see docs/gpu-tried.md.
  ptx::let_next_launch_begin();
  const int32_t num_items = kWarpsWorkAlone<HeadDim> ? state->header.num_block_items : state->header.num_items;
  const int32_t num_units = num_items * kernel_params.attention.kv_heads;
  // Warps then have the other half of each multiprocessor from the start: memory is busy while blocks compute.
  const int32_t active = state->header.narrow_prevails ? few_blocks : ptx::grid_size();
  if (ptx::uniform(ticket < (num_units < active ? num_units : active))) {
    if (ptx::thread_index() < 32) {
      state->next.num_units = num_units;
      state->next.dealt = active;
    }
    state->next.keep(ticket, word);
    ptx::block_sync();
    run_block_queue<HeadDim, Format>(kernel_params, shared);
  }
  leave(kernel_params.step, blocks);
}

// shared: kLoneWarps * kWarpBytes.
template <int HeadDim, class Format>
PREFIXPACK_DEVICE void run_warps(const KernelParams& params, char* shared, int32_t blocks) {
  const int32_t warp = ptx::thread_index() / 32, lane = ptx::thread_index() % 32;
  const auto ask = [&] { return lane == 0 ? ptx::count_up(&params.step.tickets[1]) : 0; };
  // Beside the header, by warps that take part however many there are.
  int32_t ticket = warp < kEnoughLoneWarps ? ask() : 0;
  WarpUnits<WarpTile<HeadDim, Format::kKvBytes>, Format> units(params, shared + warp * kWarpBytes);
  if (ptx::uniform(warp < units.active() && units.count() > 0)) {
    if (warp >= kEnoughLoneWarps) ticket = ask();
    units.run(ticket);
  }
  ptx::block_sync();
  leave(params.step, blocks);
  // What comes next in the stream waits for this kernel, and so for the other.
  if (ptx::block_index() == 0) ptx::wait_for_launch_before();
}

}  // namespace prefixpack
