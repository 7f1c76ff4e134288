// Mainloop of a CTA tile with mma.sync: the queries of an item against its KV range, for one KV head.
//
// KV tiles go through a ring of stages filled by cp.async. There is one barrier per KV tile: behind it the arrived tile
// is visible to all, and no warp reads the previous one, so that its stage can be refilled.
#pragma once

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel/cta_tile.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/online_softmax.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

template <class TileT, class Format>
class MmaMainloop : CtaTile<TileT, Format> {
  using Rows = CtaTile<TileT, Format>;

 public:
  PREFIXPACK_DEVICE MmaMainloop(const KernelParams& params, const CtaState& state, char* shared)
      : Rows(params, state, shared), ring_(queries_ + TileT::kQueryBytes) {
    first_slot_ = item_.kv_slots_at + (begin_ - item_.kv_begin) + thread_ / kChunks;
    const int32_t chunk = thread_ % kChunks;
    k_ = static_cast<const char*>(attention_.k) + state.kv_head * attention_.k_head_stride * Format::kKvBytes +
         chunk * 16;
    v_ = static_cast<const char*>(attention_.v) + state.kv_head * attention_.v_head_stride * Format::kKvBytes +
         chunk * 16;
  }

  // Leaves the accumulators in shared memory, see run_epilogue.
  PREFIXPACK_DEVICE EpilogueInputs run(TilePrologue prologue) {
    begin_loads(prologue);
    this->clear_accumulators();
    if constexpr (kPermutesDims<Format>) {
      ptx::cp_async_wait<kStages - 2>();
      ptx::cta_sync();
      this->convert_queries();  // visible behind the first tile's barrier
    }
    for (int32_t tile = 0; ptx::uniform(tile < num_tiles_); ++tile) {
      ptx::cp_async_wait<kStages - 2>();
      ptx::cta_sync();
      load_tile(tile + kStages - 1);
      float scores[kRowBlocks][kKeyBlocks][4];
      compute_scores(tile, scores);
#pragma unroll
      for (int32_t block = 0; block < kRowBlocks; ++block) this->softmax_step(tile, block, scores[block]);
      accumulate_values(tile, scores);
    }
    ptx::cp_async_wait<0>();
    ptx::cta_sync();  // the accumulators overlay the ring
    return this->store_accumulators();
  }

 private:
  using Product = typename Format::Product;
  static constexpr int kStages = TileT::kStages;
  static constexpr int kStepsPerLoad = Format::kStepsPerLoad;
  static constexpr int kLoads = TileT::kHeadDim / 16 / kStepsPerLoad;  // ldmatrix.x4 per 16 keys, for all dimensions
  using Rows::kChunks;
  using Rows::kKeyBlocks;
  using Rows::kRowBlocks;
  using Rows::kRowsPerPass;
  using Rows::kThreads;
  static constexpr int kPasses = TileT::kKeys / kRowsPerPass;

  PREFIXPACK_DEVICE ptx::SharedAddress key_tile(int32_t tile) const {
    return ring_ + tile % kStages * 2 * TileT::kTileBytes + key_warp_ * TileT::kKeysPerWarp * TileT::kRowBytes;
  }
  PREFIXPACK_DEVICE ptx::SharedAddress value_tile(int32_t tile) const { return key_tile(tile) + TileT::kTileBytes; }

  // Address of a chunk for ldmatrix. Rows start where the swizzled address bits are zero, so that the swizzle is an XOR
  // of the address.
  PREFIXPACK_DEVICE static ptx::SharedAddress chunk_at(ptx::SharedAddress lane_address, int32_t chunk) {
    return lane_address ^ static_cast<ptx::SharedAddress>(chunk << 4);
  }

  // Loads -----------------------------------------------------------------------------------------------------------

  // Loads the queries and the first KV tiles.
  PREFIXPACK_DEVICE void begin_loads(TilePrologue prologue) {
    static_assert((kStages - 1) * TileT::kKeys <= kThreads && (kStages - 1) * TileT::kKeys <= kPrologueSlots);
    const int32_t slot = thread_ < keys_ ? prologue.slot : -1;
    const int64_t offset = this->query_offset(prologue);
    // Overlays the stage that is filled last.
    auto* offsets = reinterpret_cast<int64_t*>(shared_ + TileT::kQueryBytes + (kStages - 1) * 2 * TileT::kTileBytes);
    auto* first_slots = reinterpret_cast<int32_t*>(offsets + kThreads);
    offsets[thread_] = offset;
    first_slots[thread_] = slot;
    ptx::cta_sync();
    this->load_queries(offsets);
#pragma unroll 1
    for (int32_t tile = 0; tile < kStages - 1; ++tile) {
#pragma unroll
      for (int32_t pass = 0; pass < kPasses; ++pass) {
        next_slots_[pass] = first_slots[tile * TileT::kKeys + pass * kRowsPerPass + thread_ / kChunks];
      }
      copy_tile(tile);
      ptx::cp_async_commit();
    }
    fetch_slots(kStages - 1);
  }

  // KV slots of the rows that this thread copies, one tile ahead of the copies.
  PREFIXPACK_DEVICE void fetch_slots(int32_t tile) {
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t key = tile * TileT::kKeys + pass * kRowsPerPass;
      next_slots_[pass] = key + thread_ / kChunks < keys_ ? params_.step.kv_slots[first_slot_ + key] : -1;
    }
  }

  PREFIXPACK_DEVICE void copy_tile(int32_t tile) const {
    if (ptx::uniform(tile >= num_tiles_)) return;
    // Recomputed for each tile to save registers.
    const int32_t thread = ptx::volatile_thread_index();
    const int32_t copy_to = swizzled_offset(thread / kChunks, thread % kChunks, TileT::kRowBytes);
    const ptx::SharedAddress to = ring_ + tile % kStages * 2 * TileT::kTileBytes + copy_to;
    const auto k_stride = static_cast<int32_t>(attention_.k_slot_stride) * Format::kKvBytes;
    const auto v_stride = static_cast<int32_t>(attention_.v_slot_stride) * Format::kKvBytes;
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      // kRowsPerPass is a multiple of 8, or a divisor of it that the swizzle accounts for.
      const int32_t mix = swizzle_bits(pass * kRowsPerPass, TileT::kRowBytes);
      const ptx::SharedAddress place =
          (to ^ static_cast<ptx::SharedAddress>(mix << 4)) + pass * kRowsPerPass * TileT::kRowBytes;
      const bool valid = next_slots_[pass] >= 0;
      const int32_t slot = valid ? next_slots_[pass] : 0;
      ptx::cp_async(place, ptx::at(k_, slot, k_stride), valid);
      ptx::cp_async(place + TileT::kTileBytes, ptx::at(v_, slot, v_stride), valid);
    }
  }

  // Commits an empty group beyond the last tile, because waits count groups.
  PREFIXPACK_DEVICE void load_tile(int32_t tile) {
    copy_tile(tile);
    ptx::cp_async_commit();
    fetch_slots(tile + 1);
  }

  // MMAs ------------------------------------------------------------------------------------------------------------

  PREFIXPACK_DEVICE void compute_scores(int32_t tile, float (&scores)[kRowBlocks][kKeyBlocks][4]) const {
#pragma unroll
    for (int32_t block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int32_t key = 0; key < kKeyBlocks; ++key) {
        scores[block][key][0] = scores[block][key][1] = scores[block][key][2] = scores[block][key][3] = 0.0f;
      }
    }
    // Matrices of a K fragment: keys 0-7 low half, keys 0-7 high half, keys 8-15 low, keys 8-15 high.
    const int32_t lane = ptx::volatile_thread_index() % 32;
    const ptx::SharedAddress keys =
        key_tile(tile) + swizzled_offset(lane / 16 * 8 + lane % 8, lane / 8 % 2, TileT::kRowBytes);
    const ptx::SharedAddress queries =
        queries_ + swizzled_offset(row_warp_ * kRowBlocks * 16 + lane % 16, lane / 16, TileT::kQueryRowBytes);
#pragma unroll
    for (int32_t load = 0; load < kLoads; ++load) {
      uint32_t query[kStepsPerLoad][kRowBlocks][4];
#pragma unroll
      for (int32_t i = 0; i < kStepsPerLoad * kRowBlocks; ++i) {
        const int32_t step = i / kRowBlocks, block = i % kRowBlocks;
        ptx::ldmatrix(query[step][block],
                      chunk_at(queries, 2 * (load * kStepsPerLoad + step)) + block * 16 * TileT::kQueryRowBytes);
      }
#pragma unroll
      for (int32_t pair = 0; pair < kKeyBlocks / 2; ++pair) {
        uint32_t loaded[4];
        ptx::ldmatrix(loaded, chunk_at(keys, 2 * load) + pair * 16 * TileT::kRowBytes);
#pragma unroll
        for (int32_t step = 0; step < kStepsPerLoad; ++step) {
          uint32_t key[4];
          Format::key_b_fragments(loaded, step, key);
#pragma unroll
          for (int32_t block = 0; block < kRowBlocks; ++block) {
            ptx::mma<Product>(scores[block][2 * pair], query[step][block], key[0], key[1]);
            ptx::mma<Product>(scores[block][2 * pair + 1], query[step][block], key[2], key[3]);
          }
        }
      }
    }
  }

  PREFIXPACK_DEVICE void accumulate_values(int32_t tile, const float (&weights)[kRowBlocks][kKeyBlocks][4]) {
    const ptx::SharedAddress values = value_tile(tile) + swizzled_offset(lane_ % 16, lane_ / 16, TileT::kRowBytes);
#pragma unroll
    for (int32_t step = 0; step < kKeyBlocks / 2; ++step) {
      uint32_t weight[kRowBlocks][4];
#pragma unroll
      for (int32_t block = 0; block < kRowBlocks; ++block) pack_weights<Product>(weights[block], step, weight[block]);
#pragma unroll
      for (int32_t load = 0; load < kLoads; ++load) {
        uint32_t loaded[4];
        ptx::ldmatrix_transposed(loaded, chunk_at(values, 2 * load) + step * 16 * TileT::kRowBytes);
#pragma unroll
        for (int32_t i = 0; i < kStepsPerLoad; ++i) {
          uint32_t value[4];
          Format::value_b_fragments(loaded, i, value);
          const int32_t column = 2 * (load * kStepsPerLoad + i);
#pragma unroll
          for (int32_t block = 0; block < kRowBlocks; ++block) {
            ptx::mma<Product>(accumulators_[block][column], weight[block], value[0], value[1]);
            ptx::mma<Product>(accumulators_[block][column + 1], weight[block], value[2], value[3]);
          }
        }
      }
    }
  }

  using Rows::accumulators_;
  using Rows::attention_;
  using Rows::begin_;
  using Rows::item_;
  using Rows::key_warp_;
  using Rows::keys_;
  using Rows::lane_;
  using Rows::num_tiles_;
  using Rows::params_;
  using Rows::queries_;
  using Rows::row_warp_;
  using Rows::shared_;
  using Rows::thread_;
  const ptx::SharedAddress ring_;
  int32_t first_slot_;  // in StepState::kv_slots, of the first row that this thread copies
  const char *k_, *v_;  // at this thread's chunk
  int32_t next_slots_[kPasses];
};

}  // namespace prefixpack
