// Mainloop of a CTA tile of more than 32 rows with warpgroup MMA (wgmma).
//
// The warpgroups of a CTA share the KV tiles, each has 64 rows. While one of those on an SM computes its softmax, the
// tensor cores serve the others. One barrier per KV tile: behind it the arrived tile is visible to all,
// and no warp reads the previous one.
#pragma once

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernel/cta_tile.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/online_softmax.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// 64 rows for each warpgroup. Operands lie in shared memory as slabs of 64 columns with 128-byte swizzled rows.
template <int HeadDim, int SharedBytes>
struct WgmmaTile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kThreads = kCtaThreads<HeadDim>;
  static constexpr int kRows = kThreads / 2;
  static constexpr int kRowWarps = kThreads / 32;
  static constexpr int kKeyWarps = 1;
  static constexpr int kRowBlocks = 1;
  static constexpr int kKeys = HeadDim > 128 ? 32 : 64;  // two KV tiles have to fit
  static constexpr int kKeysPerWarp = kKeys;
  static constexpr int kRowBytes = HeadDim * 2;
  static constexpr int kQueryRowBytes = kRowBytes;
  static constexpr int kSlabRowBytes = 128;
  static constexpr int kAtomBytes = 8 * kSlabRowBytes;
  static constexpr int kQueryBytes = kRows * kRowBytes;
  static constexpr int kQuerySlabBytes = kRows * kSlabRowBytes;
  static constexpr int kTileBytes = kKeys * kRowBytes;  // K or V of a KV tile
  static constexpr int kSlabBytes = kKeys * kSlabRowBytes;
  PREFIXPACK_BOTH static constexpr AccumulatorLayout accumulators() {
    return accumulator_layout<HeadDim, kRows, kKeyWarps, kQueryBytes>();
  }

  PREFIXPACK_BOTH static int32_t query_place(int32_t row, int32_t chunk) {
    return chunk / 8 * kQuerySlabBytes + swizzled_offset(row, chunk % 8, kSlabRowBytes);
  }
  PREFIXPACK_BOTH static int32_t first_row(int32_t row_warp, int32_t) { return row_warp * 16; }

  static_assert(kRows == kMaxTileRows<HeadDim>);
  static_assert(kQueryBytes + 4 * kTileBytes + kThreads * sizeof(int64_t) <= SharedBytes, "two KV tiles, and offsets");
};

// For KV in the dtype of the MMA.
template <class TileT, class Format>
class WgmmaMainloop : CtaTile<TileT, Format> {
  using Rows = CtaTile<TileT, Format>;
  using Element = typename Format::Product;

 public:
  PREFIXPACK_DEVICE WgmmaMainloop(const KernelParams& params, const CtaState& state, char* shared)
      : Rows(params, state, shared), ring_(queries_ + TileT::kQueryBytes), kv_head_(state.kv_head) {
    first_slot_ = item_.slots_at + (begin_ - item_.kv_begin);
  }

  // Leaves the accumulators in shared memory, see run_epilogue.
  PREFIXPACK_DEVICE EpilogueInputs run() {
    begin_loads();
    this->clear_accumulators();
    // A warpgroup without rows only copies. It has a loop of its own: a branch around wgmma would serialize them.
    const int32_t work = ptx::uniform(warpgroup_ * 64 >= rows_) ? 0 : num_tiles_;
    for (int32_t tile = work; ptx::uniform(tile < num_tiles_); ++tile) {
      ptx::cp_async_wait<0>();
      ptx::fence_proxy_async();
      ptx::cta_sync();
      load_tile(tile + 1);
    }
    for (int32_t tile = 0; ptx::uniform(tile < work); ++tile) {
      ptx::cp_async_wait<0>();
      ptx::fence_proxy_async();
      ptx::cta_sync();
      float scores[kKeyBlocks][4];
      compute_scores(tile, scores);
      load_tile(tile + 1);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(scores);
      this->softmax_step(tile, 0, scores);
      accumulate_values(tile, scores);
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
  static constexpr int kSteps = TileT::kKeys / 16;
  static constexpr int kPasses = TileT::kKeys / kRowsPerPass;
  static constexpr int kWarpRowsPerPass = 32 / kChunks;
  static_assert(kRowsPerPass % 4 == 0, "the swizzle of a row follows from that of the first pass");
  static_assert(kPasses <= kChunks, "a lane for each row that a warp copies");

  PREFIXPACK_DEVICE ptx::SharedAddress key_tile(int32_t tile) const { return ring_ + tile % 2 * 2 * TileT::kTileBytes; }
  PREFIXPACK_DEVICE ptx::SharedAddress value_tile(int32_t tile) const { return key_tile(tile) + TileT::kTileBytes; }

  // Loads -----------------------------------------------------------------------------------------------------------

  // KV slots of the rows that this warp copies: lane i has row i / kChunks of those of pass i % kChunks. Beyond the
  // last key the last slot repeats; such keys are masked.
  PREFIXPACK_DEVICE int32_t slots_of(int32_t tile) const {
    const int32_t key =
        tile * TileT::kKeys + lane_ % kChunks * kRowsPerPass + thread_ / 32 * kWarpRowsPerPass + lane_ / kChunks;
    return keys_ > 0 ? params_.step.kv_slots[first_slot_ + (key < keys_ ? key : keys_ - 1)] : 0;
  }

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

  // Loads the queries and the first KV tile, even if it is empty. All loads of their addresses are issued at once.
  PREFIXPACK_DEVICE void begin_loads() {
    const int32_t first_slots = slots_of(0);
    const int64_t offset = this->query_offset();
    auto* offsets = reinterpret_cast<int64_t*>(shared_ + TileT::kQueryBytes + 4 * TileT::kTileBytes);
    offsets[thread_] = offset;
    next_slots_ = slots_of(1);
    ptx::cta_sync();
    this->load_queries(offsets);
    copy_tile(0, first_slots);
    ptx::cp_async_commit();
  }

  PREFIXPACK_DEVICE void load_tile(int32_t tile) {
    if (ptx::uniform(tile < num_tiles_)) copy_tile(tile, next_slots_);
    ptx::cp_async_commit();
    next_slots_ = slots_of(tile + 1);
  }

  // MMAs ------------------------------------------------------------------------------------------------------------

  // Issues Q*K^T of this warpgroup's queries.
  PREFIXPACK_DEVICE void compute_scores(int32_t tile, float (&scores)[kKeyBlocks][4]) {
    const auto queries = ptx::smem_descriptor(queries_ + warpgroup_ * 64 * TileT::kSlabRowBytes, 0, TileT::kAtomBytes);
    const auto keys = ptx::smem_descriptor(key_tile(tile), 0, TileT::kAtomBytes);
    ptx::wgmma_fence();
#pragma unroll
    for (int32_t step = 0; step < TileT::kHeadDim / 16; ++step) {
      const int32_t slab = step / 4, in_row = step % 4 * 32;
      const auto a = ptx::advance(queries, slab * TileT::kQuerySlabBytes + in_row);
      const auto b = ptx::advance(keys, slab * TileT::kSlabBytes + in_row);
      if (step == 0) {
        ptx::wgmma<Element, false>(scores, a, b);
      } else {
        ptx::wgmma<Element, true>(scores, a, b);
      }
    }
    ptx::wgmma_commit();
  }

  PREFIXPACK_DEVICE void accumulate_values(int32_t tile, const float (&scores)[kKeyBlocks][4]) {
    const auto values = ptx::smem_descriptor(value_tile(tile), TileT::kSlabBytes, TileT::kAtomBytes);
    uint32_t weights[kSteps][4];
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) pack_weights<Element>(scores, step, weights[step]);
    ptx::wgmma_fence_operand(weights);  // before the fence: operands written later would be read too early
    ptx::wgmma_fence_operand(accumulators_[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      ptx::wgmma<Element>(accumulators_[0], weights[step], ptx::advance(values, step * 2 * TileT::kAtomBytes));
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(accumulators_[0]);
  }

  using Rows::accumulators_;
  using Rows::attention_;
  using Rows::begin_;
  using Rows::item_;
  using Rows::keys_;
  using Rows::lane_;
  using Rows::num_tiles_;
  using Rows::params_;
  using Rows::queries_;
  using Rows::rows_;
  using Rows::shared_;
  using Rows::thread_;
  const ptx::SharedAddress ring_;
  const int32_t kv_head_;
  int32_t first_slot_;                                          // in StepState::kv_slots
  const int32_t warpgroup_ = ptx::broadcast(thread_ / 128, 0);  // uniform for the compiler
  int32_t next_slots_;
};

}  // namespace prefixpack
