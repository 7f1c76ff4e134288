// Persistent scheduler: one queue of CTA tiles and one of warp tiles, each with a kernel of its own that runs beside
// the other. Resident CTAs take tiles until none is left. The result does not depend on who takes which tile: every
// tile has outputs or partials of its own.
#pragma once

#include <type_traits>

#include "cuda/kernel/cta_state.cuh"
#include "cuda/kernel/deferred_combine.cuh"
#include "cuda/kernel/epilogue.cuh"
#include "cuda/kernel/mainloop_mma.cuh"
#include "cuda/kernel/mainloop_wgmma.cuh"
#include "cuda/kernel/mainloop_wgmma_fp8.cuh"
#include "cuda/kernel/warp_decode.cuh"
#include "plan/active_warps.h"

namespace prefixpack {

PREFIXPACK_DEVICE void copy_words(void* to, const void* from, int32_t bytes) {
#pragma unroll 1  // shorter code is fetched sooner
  for (int32_t i = ptx::thread_index(); i < bytes / 4; i += ptx::cta_size()) {
    static_cast<int32_t*>(to)[i] = static_cast<const int32_t*>(from)[i];
  }
}

// kernel_params: in constant or shared memory.
template <class Mainloop>
PREFIXPACK_DEVICE EpilogueInputs run_mainloop(const KernelParams& kernel_params, char* shared, TilePrologue prologue) {
  ptx::warp_sync();
  return Mainloop(kernel_params, *cta_state(shared), shared).run(prologue);
}
// A function per tile: if inlined side by side they would share one set of registers, and spill.
template <class Mainloop>
PREFIXPACK_DEVICE_CALL EpilogueInputs call_mainloop(char* shared, TilePrologue prologue) {
  return run_mainloop<Mainloop>(cta_state(shared)->params, shared, prologue);
}

// Tiles of the CTA kernel by rows. Tiles of wgmma serve all rows, or those above 32: with head_dim 256, which has few
// warps, and with fp8 KV, whose kernels would not fit the code that is prefetched.
template <int HeadDim, class Format>
struct TileTable {
#ifdef PREFIXPACK_WARPGROUP_PRODUCTS
  static constexpr bool kWarpgroups = true;
#else
  static constexpr bool kWarpgroups = false;
#endif
  static constexpr int kWideRows = kMaxTileRows<HeadDim>;
  static constexpr bool kMmaNarrow = !kWarpgroups || kWideRows == 64 || kPermutesDims<Format>;
  static constexpr int kMiddleRows = kWarpgroups && kMmaNarrow ? 32 : 64;
  using Narrow = MmaTile<HeadDim, 32, Format::kKvBytes>;
  using Middle = std::conditional_t<kMmaNarrow, MmaTile<HeadDim, kMiddleRows, Format::kKvBytes>,
                                    WgmmaTile<HeadDim, 64, kSharedBytes>>;
  using Wide = std::conditional_t<kWarpgroups, WgmmaTile<HeadDim, kWideRows, kSharedBytes>,
                                  MmaTile<HeadDim, kWideRows, Format::kKvBytes>>;

  PREFIXPACK_DEVICE static AccumulatorLayout accumulators(int32_t rows) {
    if (kMmaNarrow && rows <= 32) return Narrow::accumulators();
    return rows <= kMiddleRows ? Middle::accumulators() : Wide::accumulators();
  }
};

// The prologue of the CTA's current tile. Loads it if the item has none, or if the window has passed its first keys.
PREFIXPACK_DEVICE TilePrologue complete_prologue(const KernelParams& params, const CtaState& state,
                                                 TilePrologue prologue) {
  const ItemRecord& item = state.item;
  int32_t begin = item.kv_begin;
  if (params.attention.window_left >= 0) {
    begin = first_visited(item.kv_begin, item.kv_end, item.lowest, params.attention.window_left, kWindowGranularity);
  }
  if (ptx::uniform(prologue.slot < 0 || begin != item.kv_begin)) {
    const int32_t thread = ptx::volatile_thread_index(), keys = item.kv_end - begin;
    const int32_t* slots = params.step.kv_slots + item.kv_slots_at + (begin - item.kv_begin);
    if (keys > 0) prologue.slot = slots[thread < keys ? thread : keys - 1];
    const int32_t query = params.heads.group.quotient(thread);
    prologue.token = state.plan().query_token(item.query_begin + (query < item.query_count ? query : 0));
  }
  return prologue;
}

// Runs the mainloop of the CTA's current tile. kernel_params: in constant memory.
template <int HeadDim, class Format>
PREFIXPACK_DEVICE EpilogueInputs run_current_tile(const KernelParams& kernel_params, char* shared,
                                                  TilePrologue prologue) {
  using Table = TileTable<HeadDim, Format>;
  const int32_t rows = cta_state(shared)->item.tile_rows;
  EpilogueInputs::prefetch_to_l2(kernel_params, *cta_state(shared));
  prologue = complete_prologue(kernel_params, *cta_state(shared), prologue);
  if constexpr (Table::kMmaNarrow) {
    if (ptx::uniform(rows <= 32)) return call_mainloop<MmaMainloop<typename Table::Narrow, Format>>(shared, prologue);
    if constexpr (Table::kMiddleRows > 32 && Table::kMiddleRows < Table::kWideRows) {
      if (ptx::uniform(rows <= Table::kMiddleRows))
        return call_mainloop<MmaMainloop<typename Table::Middle, Format>>(shared, prologue);
    }
  }
  // wgmma is not in a function of its own: at a function's begin and end the compiler assumes wgmma in flight, and
  // serializes them.
  if constexpr (Table::kWarpgroups) {
    if constexpr (!Table::kMmaNarrow) {
      if (ptx::uniform(rows <= Table::kMiddleRows))
        return run_mainloop<WgmmaMainloop<typename Table::Middle, Format>>(kernel_params, shared, prologue);
    }
    using Mainloop = std::conditional_t<kPermutesDims<Format>, WgmmaFp8Mainloop<typename Table::Wide, Format>,
                                        WgmmaMainloop<typename Table::Wide, Format>>;
    return run_mainloop<Mainloop>(kernel_params, shared, prologue);
  } else {
    return call_mainloop<MmaMainloop<typename Table::Wide, Format>>(shared, prologue);
  }
}

// Makes the claimed tile the current one; false if there is none.
PREFIXPACK_DEVICE bool take_tile(char* shared) {
  CtaState* state = cta_state(shared);
  // All lanes of the first warp write the same words: a branch for one lane would diverge the warp.
  const int32_t thread = ptx::volatile_thread_index();
  if (thread < 32) {
    state->tile_index = state->next.tile_index;
    state->kv_head = work_tile_of(state->next.tile_index, state->params.heads.kv).head;
  }
  if (thread < kRecordWords) NextTile::store_record(&state->item, state->next.record[thread]);
  ptx::cta_sync();
  return state->tile_index < state->next.num_tiles;
}

// Runs the current tile and those behind it. Keeps nothing in registers across tiles: a mainloop needs them all.
// kernel_params: in constant memory. prologue: of the current tile.
template <int HeadDim, class Format>
PREFIXPACK_DEVICE void run_tiles(const KernelParams& kernel_params, char* shared, TilePrologue prologue) {
  CtaState* state = cta_state(shared);
  do {
    const EpilogueInputs inputs = run_current_tile<HeadDim, Format>(kernel_params, shared, prologue);
    const AccumulatorLayout layout = TileTable<HeadDim, Format>::accumulators(state->item.tile_rows);
    prologue = run_epilogue<HeadDim, typename Format::Output>(shared, layout, inputs);
    ptx::cta_sync();
  } while (ptx::uniform(take_tile(shared)));
}

// Prefetches the first records and prologues of the warp kernel to the L2, where its warps find them.
// cta: number of this CTA among those without a tile.
template <int kWarps>
PREFIXPACK_DEVICE void prefetch_warp_items_to_l2(const StepState& step, const PlanHeader& header, int32_t cta) {
  const int32_t thread = ptx::thread_index(), lane = thread % 32;
  const int32_t item = header.num_cta_items + cta * kWarps + thread / 32;
  if (ptx::uniform(item < (header.num_items < step.num_prologues ? header.num_items : step.num_prologues))) {
    const int32_t* prologue = step.prologues[item].slots + lane;
    ptx::prefetch_l2(prologue);
    ptx::prefetch_l2(prologue + kPrologueSlots);  // tokens
    ptx::prefetch_l2(&step.items[item]);
    ptx::prefetch_l2(&step.items[item].group_partial);  // in another sector
  }
}

// few_ctas: as in LaunchSize. shared: kSharedBytes and the state.
template <int HeadDim, class Format>
PREFIXPACK_DEVICE void run_cta_kernel(const KernelParams& kernel_params, char* shared, int32_t few_ctas) {
  CtaState* state = cta_state(shared);
  const int32_t thread = ptx::thread_index(), tile_index = ptx::cta_index();
  const WorkTile tile = work_tile_of(tile_index, kernel_params.heads.kv);
  // The first tile's record and prologue are asked for beside the header, before it is known whether there is such a
  // tile.
  constexpr int32_t kHeaderWords = sizeof(PlanHeader) / sizeof(int32_t);
  const int32_t header_word = thread < kHeaderWords ? kernel_params.plan.words[thread] : 0;
  const int32_t word = NextTile::record_word(kernel_params, tile.item);
  const TilePrologue prologue = TilePrologue::load(kernel_params, tile.item);
  copy_words(&state->params, &kernel_params, sizeof(KernelParams));
  if (thread < 32) {
    state->tile_index = tile_index;
    state->kv_head = tile.head;
  }
  if (thread < kHeaderWords) reinterpret_cast<int32_t*>(&state->header)[thread] = header_word;
  NextTile::store_record(&state->item, word);
  ptx::cta_sync();
  // The launch comes no earlier: with work for CTAs the step would take longer.
  ptx::pdl_launch_dependents();
  const int32_t num_items = kHasWarpKernel<HeadDim> ? state->header.num_cta_items : state->header.num_items;
  const int32_t num_tiles = num_items * kernel_params.attention.kv_heads;
  // The warp kernel then has the other half of each SM from the start, and memory stays busy while CTAs compute.
  const int32_t active_ctas = state->header.mostly_narrow ? few_ctas : ptx::grid_size();
  const int32_t busy_ctas = num_tiles < active_ctas ? num_tiles : active_ctas;
  if (ptx::uniform(tile_index < busy_ctas)) {
    if (thread < 32) {  // read behind the mainloop's barriers
      state->next.num_tiles = num_tiles;
      state->next.static_tiles = active_ctas;
    }
    run_tiles<HeadDim, Format>(kernel_params, shared, prologue);
  } else if constexpr (kHasWarpKernel<HeadDim>) {
    prefetch_warp_items_to_l2<kCtaWarps<HeadDim>>(kernel_params.step, state->header, tile_index - busy_ctas);
  }
}

// shared: kWarpBytes for each warp.
template <int HeadDim, class Format>
PREFIXPACK_DEVICE void run_warp_kernel(const KernelParams& params, char* shared) {
  const int32_t warp = ptx::thread_index() / 32, warps = ptx::cta_size() / 32;
  PartQueue queue{&params.step.tile_counters[1], 0, 0};
  // Issued beside the header's load, by the warps that take part in every case.
  int32_t claimed = warp < kMinActiveWarps ? queue.claim() : 0;
  const char* own = shared + warp * kWarpBytes;
  WarpDecode<WarpTile<HeadDim, Format::kKvBytes>, Format> decode(params, own);
  if (ptx::uniform(decode.num_tiles() > 0 && warp < decode.active_warps())) {
    if (warp >= kMinActiveWarps) claimed = queue.claim();
    claimed = decode.run(claimed);
  }
  // What follows is computed here and not before the tiles, whose loop needs all registers.
  const DeferredCombine<HeadDim, typename Format::Output> combine(params, decode.deferred(), own);
  const int32_t parts = combine.num_parts(), active = decode.active_warps();
  queue.first = decode.num_tiles();
  // A warp that claims a tile and gets none has claimed a part of a deferred row, unless there are warps that must not
  // claim tiles.
  const bool works = queue.first + parts > 0, one_queue = parts == 0 || active == warps;
  const int32_t claiming = works ? active : kMinActiveWarps;
  queue.claims = queue.first + (one_queue ? parts : 0) + claiming * ptx::grid_size();
  if (ptx::uniform(queue.first == 0 && warp >= kMinActiveWarps && warp < claiming)) claimed = queue.claim();
  if (ptx::uniform(!one_queue)) {
    if (ptx::uniform(warp < claiming)) queue.end(claimed);
    ptx::warp_sync();
    queue = {&params.step.tile_counters[2], 0, parts + warps * ptx::grid_size()};
    claimed = queue.claim();
  }
  if (ptx::uniform(warp < claiming || !one_queue)) combine.run(queue, claimed);
  // The next kernel of the stream waits for this kernel, and thereby for the first one.
  if (ptx::cta_index() == 0) ptx::pdl_wait();
}

}  // namespace prefixpack
