// What both mainloops with warpgroup MMA (wgmma) share: the tile, and the MMAs of a warpgroup.
#pragma once

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernel/cta_tile.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/online_softmax.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// A warpgroup has 64 rows. Where a tile has fewer rows than its warpgroups take, they share the keys of a KV tile and
// are reduced in the epilogue. Operands lie in shared memory as slabs of 64 columns with 128-byte swizzled rows.
template <int HeadDim, int Rows, int SharedBytes>
struct WgmmaTile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kThreads = kCtaThreads<HeadDim>;
  static constexpr int kRows = Rows;
  static constexpr int kRowWarps = Rows / 16;
  static constexpr int kKeyWarps = kThreads / 32 / kRowWarps;
  static constexpr int kRowBlocks = 1;
  static constexpr int kKeys = HeadDim > 128 ? 32 : 64;  // two KV tiles have to fit
  static constexpr int kKeysPerWarp = kKeys / kKeyWarps;
  static constexpr int kRowBytes = HeadDim * 2;
  static constexpr int kQueryRowBytes = kRowBytes;
  static constexpr int kSlabRowBytes = 128;
  static constexpr int kAtomBytes = 8 * kSlabRowBytes;
  static constexpr int kQueryBytes = kRows * kRowBytes;
  static constexpr int kQuerySlabBytes = kRows * kSlabRowBytes;
  static constexpr int kTileBytes = kKeys * kRowBytes;  // K or V of a KV tile
  static constexpr int kSlabBytes = kKeys * kSlabRowBytes;
  static constexpr int kStages = min_of(3, (SharedBytes - kQueryBytes) / (2 * kTileBytes));
  // Byte offset of the query offsets, and of the slots behind them. They are read before a third KV tile is copied.
  static constexpr int kOffsetsAt = kQueryBytes + 4 * kTileBytes;
  static constexpr int kKnownSlots = min_of(kThreads, kPrologueSlots);
  PREFIXPACK_BOTH static constexpr AccumulatorLayout accumulators() {
    return accumulator_layout<HeadDim, kRows, kKeyWarps, kQueryBytes>();
  }

  PREFIXPACK_BOTH static int32_t query_place(int32_t row, int32_t chunk) {
    return chunk / 8 * kQuerySlabBytes + swizzled_offset(row, chunk % 8, kSlabRowBytes);
  }
  PREFIXPACK_BOTH static int32_t first_row(int32_t row_warp, int32_t) { return row_warp * 16; }

  static_assert(Rows % 64 == 0 && Rows <= kMaxTileRows<HeadDim> && kKeysPerWarp % 32 == 0);
  static_assert(kStages >= 2 && kOffsetsAt + kThreads * sizeof(int64_t) + kKnownSlots * sizeof(int32_t) <= SharedBytes,
                "two KV tiles, query offsets, first slots");
};

// The MMAs of a warpgroup. The compiler serializes wgmma around a call or a branch: all of this is inlined, and callers
// must not branch on the warpgroup's rows.
template <class TileT, class Format>
class WgmmaRows : protected CtaTile<TileT, Format> {
  using Rows = CtaTile<TileT, Format>;
  using Element = typename Format::Product;

 protected:
  using Rows::kKeyBlocks;
  using Rows::kThreads;
  static constexpr int kSteps = TileT::kKeysPerWarp / 16;

  PREFIXPACK_DEVICE WgmmaRows(const KernelParams& params, const CtaState& state, char* shared)
      : Rows(params, state, shared), kv_head_(state.kv_head) {
    first_slot_ = item_.kv_slots_at + (begin_ - item_.kv_begin);
  }

  // KV tiles that this warpgroup computes. One without rows only copies.
  PREFIXPACK_DEVICE int32_t computed_tiles() const { return ptx::uniform(first_row_ >= rows_) ? 0 : num_tiles_; }

  // KV slot of a key of the item. Beyond the last key the last slot repeats; such keys are masked.
  PREFIXPACK_DEVICE int32_t slot_of(int32_t key) const {
    return keys_ > 0 ? params_.step.kv_slots[first_slot_ + (key < keys_ ? key : keys_ - 1)] : 0;
  }

  // Room for the query offsets and for the slots of the first KV tiles.
  PREFIXPACK_DEVICE int64_t* offsets() const { return reinterpret_cast<int64_t*>(shared_ + TileT::kOffsetsAt); }
  PREFIXPACK_DEVICE int32_t* first_slots() const { return reinterpret_cast<int32_t*>(offsets() + kThreads); }

  // Spreads what the first copies need. A barrier follows.
  PREFIXPACK_DEVICE void store_prologue(TilePrologue prologue) const {
    static_assert(TileT::kRows <= kPrologueQueries);
    offsets()[thread_] = this->query_offset(prologue);
    if (thread_ < TileT::kKnownSlots) first_slots()[thread_] = keys_ > 0 ? prologue.slot : 0;
  }

  // Issues Q*K^T of this warpgroup's queries and keys.
  PREFIXPACK_DEVICE void issue_scores(ptx::SharedAddress key_tile, float (&scores)[kKeyBlocks][4]) const {
    const auto queries = ptx::smem_descriptor(queries_ + first_row_ * TileT::kSlabRowBytes, 0, TileT::kAtomBytes);
    const auto keys = ptx::smem_descriptor(key_tile + first_key_ * TileT::kSlabRowBytes, 0, TileT::kAtomBytes);
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
  PREFIXPACK_DEVICE static void finish_scores(float (&scores)[kKeyBlocks][4]) {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(scores);
  }

  PREFIXPACK_DEVICE static void pack(const float (&scores)[kKeyBlocks][4], uint32_t (&weights)[kSteps][4]) {
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) pack_weights<Element>(scores, step, weights[step]);
  }
  // Issues P*V. weights: read until finish_values().
  PREFIXPACK_DEVICE void issue_values(ptx::SharedAddress value_tile, uint32_t (&weights)[kSteps][4]) {
    const auto values =
        ptx::smem_descriptor(value_tile + first_key_ * TileT::kSlabRowBytes, TileT::kSlabBytes, TileT::kAtomBytes);
    ptx::wgmma_fence_operand(weights);  // before the fence: operands written later would be read too early
    ptx::wgmma_fence_operand(accumulators_[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      ptx::wgmma<Element>(accumulators_[0], weights[step], ptx::advance(values, step * 2 * TileT::kAtomBytes));
    }
    ptx::wgmma_commit();
  }
  PREFIXPACK_DEVICE void finish_values() {
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(accumulators_[0]);
  }

  using Rows::accumulators_;
  using Rows::begin_;
  using Rows::item_;
  using Rows::keys_;
  using Rows::num_tiles_;
  using Rows::params_;
  using Rows::queries_;
  using Rows::rows_;
  using Rows::shared_;
  using Rows::thread_;
  const int32_t kv_head_;
  int32_t first_slot_;  // in StepState::kv_slots
  // First row and key of this warpgroup; uniform for the compiler.
  const int32_t first_row_ = TileT::kKeyWarps == 1 ? ptx::broadcast(thread_ / 128, 0) * 64 : 0;
  const int32_t first_key_ = TileT::kKeyWarps == 1 ? 0 : ptx::broadcast(thread_ / 128, 0) * TileT::kKeysPerWarp;
};

}  // namespace prefixpack
