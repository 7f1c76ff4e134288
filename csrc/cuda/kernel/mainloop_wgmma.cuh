// Mainloop of a CTA tile with warpgroup MMA (wgmma), for KV in the dtype of the MMA.
//
// The warpgroups of a CTA share the KV tiles: each has 64 rows, or half of the keys. While one of those on an SM
// computes its softmax, the tensor cores serve the others. One barrier per KV tile: behind it the arrived tile is
// visible to all, and no warp reads the previous one.
#pragma once

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernel/mainloop_wgmma_base.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

template <class TileT, class Format>
class WgmmaMainloop : WgmmaRows<TileT, Format> {
  using Rows = WgmmaRows<TileT, Format>;

 public:
  PREFIXPACK_DEVICE WgmmaMainloop(const KernelParams& params, const CtaState& state, char* shared)
      : Rows(params, state, shared), ring_(queries_ + TileT::kQueryBytes) {}

  // Leaves the accumulators in shared memory, see run_epilogue.
  PREFIXPACK_DEVICE EpilogueInputs run(TilePrologue prologue) {
    begin_loads(prologue);
    this->clear_accumulators();
    // A warpgroup without rows only copies. It has a loop of its own: a branch around wgmma would serialize them.
    const int32_t work = this->computed_tiles();
    for (int32_t tile = work; ptx::uniform(tile < num_tiles_); ++tile) {
      ptx::cp_async_wait<kAhead - 1>();
      ptx::fence_proxy_async();
      ptx::cta_sync();
      load_tile(tile + kAhead);
    }
    for (int32_t tile = 0; ptx::uniform(tile < work); ++tile) {
      ptx::cp_async_wait<kAhead - 1>();
      ptx::fence_proxy_async();
      ptx::cta_sync();
      float scores[kKeyBlocks][4];
      this->issue_scores(key_tile(tile), scores);
      load_tile(tile + kAhead);
      this->finish_scores(scores);
      this->softmax_step(tile, 0, scores);
      uint32_t weights[Rows::kSteps][4];
      this->pack(scores, weights);
      this->issue_values(key_tile(tile) + TileT::kTileBytes, weights);
      this->finish_values();
    }
    ptx::cp_async_wait<0>();
    ptx::cta_sync();  // the accumulators overlay the ring
    return this->store_accumulators();
  }

 private:
  using Rows::kChunks;
  using Rows::kKeyBlocks;
  using Rows::kRowsPerPass;
  using Rows::kThreads;
  static constexpr int kAhead = TileT::kStages - 1;  // KV tiles between copies and MMAs
  static constexpr int kPasses = TileT::kKeys / kRowsPerPass;
  static constexpr int kWarpRowsPerPass = 32 / kChunks;
  static_assert(kRowsPerPass % 4 == 0, "the swizzle of a row follows from that of the first pass");
  static_assert(kPasses <= kChunks, "a lane for each row that a warp copies");

  PREFIXPACK_DEVICE ptx::SharedAddress key_tile(int32_t tile) const {
    return ring_ + tile % TileT::kStages * 2 * TileT::kTileBytes;
  }

  // Loads -----------------------------------------------------------------------------------------------------------

  // Rows that this warp copies: lane i has row i / kChunks of those of pass i % kChunks.
  PREFIXPACK_DEVICE int32_t copied_row() const {
    return lane_ % kChunks * kRowsPerPass + thread_ / 32 * kWarpRowsPerPass + lane_ / kChunks;
  }
  // KV slots of these rows.
  PREFIXPACK_DEVICE int32_t slots_of(int32_t tile) const { return this->slot_of(tile * TileT::kKeys + copied_row()); }

  // Addresses are recomputed for each tile to save registers. Without any key to read, zeros are copied: masked values
  // still must not be NaN.
  PREFIXPACK_DEVICE void copy_tile(int32_t tile, int32_t slots) const {
    const int32_t thread = ptx::volatile_thread_index(), chunk = thread % kChunks;
    const ptx::SharedAddress to = key_tile(tile) + chunk / 8 * TileT::kSlabBytes +
                                  swizzled_offset(thread / kChunks, chunk % 8, TileT::kSlabRowBytes);
    const int32_t head = ptx::opaque(kv_head_);
    const char* k = static_cast<const char*>(attention_.k) + head * attention_.k_head_stride * 2 + chunk * 16;
    const char* v = static_cast<const char*>(attention_.v) + head * attention_.v_head_stride * 2 + chunk * 16;
    const auto k_stride = static_cast<int32_t>(attention_.k_slot_stride) * 2;
    const auto v_stride = static_cast<int32_t>(attention_.v_slot_stride) * 2;
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t slot = ptx::shuffle_in<kChunks>(slots, pass), first = pass * kRowsPerPass;
      const int32_t mix = swizzle_bits(first, TileT::kSlabRowBytes) << 4;
      const ptx::SharedAddress place = (to ^ static_cast<ptx::SharedAddress>(mix)) + first * TileT::kSlabRowBytes;
      ptx::cp_async(place, ptx::at(k, slot, k_stride), keys_ > 0);
      ptx::cp_async(place + TileT::kTileBytes, ptx::at(v, slot, v_stride), keys_ > 0);
    }
  }

  // The same of a tile whose slots came with the prologue.
  PREFIXPACK_DEVICE int32_t known_slots_of(int32_t tile) const {
    // Beyond the KV tile's rows only lanes whose slot no pass asks for.
    return this->first_slots()[tile * TileT::kKeys + copied_row() % TileT::kKeys];
  }

  // Loads the queries and the first KV tiles, the first one even if it is empty. The slots of all of them are known:
  // reading them would be one dependent read more.
  PREFIXPACK_DEVICE void begin_loads(TilePrologue prologue) {
    static_assert((kAhead + 1) * TileT::kKeys <= TileT::kKnownSlots);
    this->store_prologue(prologue);
    ptx::cta_sync();
    copy_tile(0, known_slots_of(0));
    this->load_queries(this->offsets());
    ptx::cp_async_commit();
    for (int32_t tile = 1; tile < kAhead; ++tile) copy_if_any(tile, known_slots_of(tile));
    next_slots_ = known_slots_of(kAhead);
  }

  PREFIXPACK_DEVICE void copy_if_any(int32_t tile, int32_t slots) const {
    if (ptx::uniform(tile < num_tiles_)) copy_tile(tile, slots);
    ptx::cp_async_commit();
  }
  PREFIXPACK_DEVICE void load_tile(int32_t tile) {
    copy_if_any(tile, next_slots_);
    next_slots_ = slots_of(tile + 1);
  }

  using Rows::attention_;
  using Rows::keys_;
  using Rows::kv_head_;
  using Rows::lane_;
  using Rows::num_tiles_;
  using Rows::queries_;
  using Rows::thread_;
  const ptx::SharedAddress ring_;
  int32_t next_slots_;
};

}  // namespace prefixpack
