// Persistent scheduler: one queue of CTA tiles and one of warp tiles, each with a kernel of its own that runs beside
// the other. Resident CTAs take tiles until none is left. The result does not depend on who takes which tile: every
// tile has outputs or partial slots of its own.
#pragma once

#include <type_traits>

#include "cuda/kernel/cta_state.cuh"
#include "cuda/kernel/deferred_combine.cuh"
#include "cuda/kernel/epilogue.cuh"
#include "cuda/kernel/mainloop_mma.cuh"
#include "cuda/kernel/mainloop_wgmma.cuh"
#include "cuda/kernel/mainloop_wgmma_fp8.cuh"
#include "cuda/kernel/warp_decode.cuh"

namespace prefixpack {

PREFIXPACK_DEVICE void copy_words(void* to, const void* from, int32_t bytes) {
#pragma unroll 1  // shorter code is fetched sooner
  for (int32_t i = ptx::thread_index(); i < bytes / 4; i += ptx::cta_size()) {
    static_cast<int32_t*>(to)[i] = static_cast<const int32_t*>(from)[i];
  }
}

// kernel_params: in constant or shared memory.
template <class Mainloop>
PREFIXPACK_DEVICE EpilogueInputs run_mainloop(const KernelParams& kernel_params, char* shared) {
  ptx::warp_sync();
  return Mainloop(kernel_params, *cta_state(shared), shared).run();
}
// A function per tile: if inlined side by side they would share one set of registers, and spill.
template <class Mainloop>
PREFIXPACK_DEVICE_CALL EpilogueInputs call_mainloop(char* shared) {
  return run_mainloop<Mainloop>(cta_state(shared)->params, shared);
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

// Runs the mainloop of the CTA's current tile. kernel_params: in constant memory.
template <int HeadDim, class Format>
PREFIXPACK_DEVICE EpilogueInputs run_current_tile(const KernelParams& kernel_params, char* shared) {
  using Table = TileTable<HeadDim, Format>;
  const int32_t rows = cta_state(shared)->item.tile_rows;
  if constexpr (Table::kMmaNarrow) {
    if (ptx::uniform(rows <= 32)) return call_mainloop<MmaMainloop<typename Table::Narrow, Format>>(shared);
    if constexpr (Table::kMiddleRows > 32 && Table::kMiddleRows < Table::kWideRows) {
      if (ptx::uniform(rows <= Table::kMiddleRows))
        return call_mainloop<MmaMainloop<typename Table::Middle, Format>>(shared);
    }
  }
  // wgmma is not in a function of its own: at a function's begin and end the compiler assumes wgmma in flight, and
  // serializes them.
  if constexpr (Table::kWarpgroups) {
    if constexpr (!Table::kMmaNarrow) {
      if (ptx::uniform(rows <= Table::kMiddleRows))
        return run_mainloop<WgmmaMainloop<typename Table::Middle, Format>>(kernel_params, shared);
    }
    using Mainloop = std::conditional_t<kPermutesDims<Format>, WgmmaFp8Mainloop<typename Table::Wide, Format>,
                                        WgmmaMainloop<typename Table::Wide, Format>>;
    return run_mainloop<Mainloop>(kernel_params, shared);
  } else {
    return call_mainloop<MmaMainloop<typename Table::Wide, Format>>(shared);
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
  if (thread < kRecordWords) reinterpret_cast<int32_t*>(&state->item)[thread] = state->next.record[thread];
  ptx::cta_sync();
  return state->tile_index < state->next.num_tiles;
}

// Keeps nothing in registers across tiles: a mainloop needs them all. kernel_params: in constant memory.
template <int HeadDim, class Format>
PREFIXPACK_DEVICE void run_tiles(const KernelParams& kernel_params, char* shared) {
  CtaState* state = cta_state(shared);
  while (ptx::uniform(take_tile(shared))) {
    const EpilogueInputs inputs = run_current_tile<HeadDim, Format>(kernel_params, shared);
    const AccumulatorLayout layout = TileTable<HeadDim, Format>::accumulators(state->item.tile_rows);
    run_epilogue<HeadDim, typename Format::Output>(shared, layout, inputs);
    ptx::cta_sync();
  }
}

// The last CTA of both kernels resets the counters for the next launch, so that a captured graph can be replayed.
PREFIXPACK_DEVICE void exit_grid(const StepState& step, int32_t total_ctas) {
  if (ptx::thread_index() == 0 && ptx::atomic_increment(&step.tile_counters[2]) == total_ctas - 1) {
    for (int32_t i = 0; i < kTileCounters; ++i) step.tile_counters[i] = 0;
  }
}

// total_ctas: of both kernels. few_ctas: as in LaunchSize. shared: kSharedBytes and the state.
template <int HeadDim, class Format>
PREFIXPACK_DEVICE void run_cta_kernel(const KernelParams& kernel_params, char* shared, int32_t total_ctas,
                                      int32_t few_ctas) {
  CtaState* state = cta_state(shared);
  // Issued beside the header's load, before it is known whether there is such a tile.
  const int32_t tile_index = ptx::cta_index(), word = NextTile::record_word(kernel_params, tile_index);
  copy_words(&state->params, &kernel_params, sizeof(KernelParams));
  copy_words(&state->header, kernel_params.plan.words, sizeof(PlanHeader));
  ptx::cta_sync();
  // Not earlier: with work for CTAs the step would take longer, see docs/design-notes.md.
  ptx::pdl_launch_dependents();
  const int32_t num_items = kHasWarpKernel<HeadDim> ? state->header.num_cta_items : state->header.num_items;
  const int32_t num_tiles = num_items * kernel_params.attention.kv_heads;
  // The warp kernel then has the other half of each SM from the start, and memory stays busy while CTAs compute.
  const int32_t active_ctas = state->header.narrow_prevails ? few_ctas : ptx::grid_size();
  if (ptx::uniform(tile_index < (num_tiles < active_ctas ? num_tiles : active_ctas))) {
    if (ptx::thread_index() < 32) {
      state->next.num_tiles = num_tiles;
      state->next.static_tiles = active_ctas;
    }
    state->next.store(tile_index, word);
    ptx::cta_sync();
    run_tiles<HeadDim, Format>(kernel_params, shared);
  }
  exit_grid(kernel_params.step, total_ctas);
}

// shared: kWarpBytes for each warp.
template <int HeadDim, class Format>
PREFIXPACK_DEVICE void run_warp_kernel(const KernelParams& params, char* shared, int32_t total_ctas) {
  const int32_t warp = ptx::thread_index() / 32, lane = ptx::thread_index() % 32;
  const auto claim = [&] { return lane == 0 ? ptx::atomic_increment(&params.step.tile_counters[1]) : 0; };
  // Issued beside the header's load, by the warps that take part in every case.
  int32_t tile_index = warp < kMinActiveWarps ? claim() : 0;
  WarpDecode<WarpTile<HeadDim, Format::kKvBytes>, Format> decode(params, shared + warp * kWarpBytes);
  if (ptx::uniform(warp < decode.active_warps() && decode.num_tiles() > 0)) {
    if (warp >= kMinActiveWarps) tile_index = claim();
    decode.run(tile_index);
  }
  DeferredCombine<HeadDim, typename Format::Output>(params).run(decode.deferred());
  ptx::cta_sync();
  exit_grid(params.step, total_ctas);
  // The next kernel of the stream waits for this kernel, and thereby for the first one.
  if (ptx::cta_index() == 0) ptx::pdl_wait();
}

}  // namespace prefixpack
