// Warp kernel: items of few rows, above all the private tails of decode, which are many and short.
//
// A warp streams KV through a ring of its own and never waits for another warp.
//
// MMAs are transposed: keys, then value dimensions are the 16 rows of an mma, queries its eight columns. The few rows
// of a decode tail would leave most of a tile of 16 query rows empty.
#pragma once

#include <cstddef>

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/online_softmax.cuh"
#include "cuda/kernel/warp_ring.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

template <class TileT, class Format>
class WarpDecode {
 public:
  // shared: kWarpBytes of this warp.
  PREFIXPACK_DEVICE WarpDecode(const KernelParams& params, const char* shared)
      : warp_(params), tile_(warp_), ring_(warp_, shared), softmax_(params.attention) {}

  PREFIXPACK_DEVICE int32_t num_tiles() const { return ring_.num_tiles(); }
  // Warps per CTA that take tiles.
  PREFIXPACK_DEVICE int32_t active_warps() const { return warp_.header(offsetof(PlanHeader, active_warps)); }
  PREFIXPACK_DEVICE DeferredHeader deferred() const {
    return {warp_.header(sizeof(PlanHeader) + offsetof(DeferredHeader, count)),
            warp_.header(sizeof(PlanHeader) + offsetof(DeferredHeader, at)),
            warp_.header(sizeof(PlanHeader) + offsetof(DeferredHeader, part_bits))};
  }

  // Takes tiles until none is left. tile_index, in the first lane: the first claim. Returns the last one, of no tile.
  PREFIXPACK_DEVICE int32_t run(int32_t tile_index) {
    ring_.begin(tile_index);
    clear_registers();
    for (;;) {
      ring_.fill();
      if (stage_ == num_stages_ && !begin_tile()) {
        if (ring_.is_done()) return ring_.claimed();
        continue;
      }
      if (stage_ % 2 == 0 && stage_ > 0) stream_whole_tiles();
      ring_.wait_for_stage();
      if (stage_ % 2 == 0) {
        if (stage_ == 0) load_query_fragments();
        compute_scores();
        softmax_step();
      } else {
        accumulate_values();
        ptx::warp_sync();
        if (stage_ + 1 == num_stages_) {
          tile_.epilogue(TileT::kAccumulatorsInStage ? ring_.oldest_stage() : ring_.end());
          clear_registers();
        }
      }
      release_stage();
    }
  }

 private:
  using Tile = WarpTileState<TileT, Format>;
  using Ring = WarpRing<TileT, Format>;
  using Product = typename Format::Product;
  static constexpr int kStepsPerLoad = Format::kStepsPerLoad;
  static constexpr int kLoads = Tile::kSteps / kStepsPerLoad;  // ldmatrix.x4 for all dimensions

  // MMAs ------------------------------------------------------------------------------------------------------------

  PREFIXPACK_DEVICE bool begin_tile() {
    num_stages_ = stage_ = 0;
    if (!ring_.take_tile(tile_.record)) return false;
    const int32_t kv_end = word_of(tile_.record, kKvEnd);
    tile_begin_ = first_visited(word_of(tile_.record, kKvBegin), kv_end, word_of(tile_.record, kLowest), ring_.window(),
                                TileT::kKeys);
    num_stages_ = Ring::stages_of(kv_end - tile_begin_);
    const int32_t lowest = word_of(tile_.record, kLowest);
    last_whole_ = ring_.window() >= 0 ? -1 : (kv_end <= lowest ? kv_end : lowest + 1) - TileT::kKeys;
    tile_.prefetch_partial_lists();
    return true;
  }

  // KV tiles ahead of which every load is of a whole KV tile of the same work tile, nothing is looked up, and whose
  // keys all are visible. With few stages loads end as little as 49 keys before the last key, of which trees hide 64.
  PREFIXPACK_DEVICE int32_t whole_tiles() const {
    if (!ring_.is_full()) return 0;
    const int32_t loads = ring_.quiet_loads();
    const int32_t seen = tile_begin_ > last_whole_ ? 0 : (last_whole_ - tile_begin_) / TileT::kKeys + 1;
    return loads / 2 < seen ? loads / 2 : seen;
  }

  // Runs these KV tiles without the questions that every stage asks. A loaded stage takes the place of the one just
  // used, so the ring stays full.
  PREFIXPACK_DEVICE void stream_whole_tiles() {
    int32_t tiles = whole_tiles();
#pragma unroll 1
    for (; ptx::uniform(tiles > 0); --tiles) {
      ptx::cp_async_wait<Ring::kStages - 1>();
      ptx::warp_sync();
      compute_scores();
      ptx::warp_sync();
      ring_.template replace_stage<Ring::kStages % 2 == 1>();
      softmax_.transform(scores_);
      softmax_.add_transposed(scores_, tile_.softmax, tile_.sums);
      ptx::cp_async_wait<Ring::kStages - 1>();
      ptx::warp_sync();
      accumulate_values();
      ptx::warp_sync();
      ring_.template replace_stage<Ring::kStages % 2 == 0>();
      tile_begin_ += TileT::kKeys;
      stage_ += 2;
    }
  }

  PREFIXPACK_DEVICE void release_stage() {
    ptx::warp_sync();
    ring_.release_stage();
    ++stage_;
  }

  // Address of a chunk for ldmatrix. Rows start where the swizzled address bits are zero, so that the swizzle is an XOR
  // of the address.
  PREFIXPACK_DEVICE static ptx::SharedAddress chunk_at(ptx::SharedAddress lane_address, int32_t chunk) {
    return lane_address ^ static_cast<ptx::SharedAddress>(chunk << 4);
  }

  PREFIXPACK_DEVICE void load_query_fragments() {
    if constexpr (kPermutesDims<Format>) {
#pragma unroll
      for (int32_t step = 0; step < Tile::kSteps; ++step) {
        uint32_t words[2];
        ptx::load_shared(ring_.queries() +
                             swizzled_offset(warp_.lane / 4, step * 2 + warp_.lane % 4 / 2, TileT::kQueryRowBytes) +
                             warp_.lane % 2 * 8,
                         words);
#pragma unroll
        for (int32_t i = 0; i < 2; ++i)
          query_fragments_[step / 2][step % 2 * 2 + i] = Format::Output::to_fp16(words[i]);
      }
    } else {
      const ptx::SharedAddress queries =
          ring_.queries() + swizzled_offset(warp_.lane % 8, warp_.lane / 8, TileT::kQueryRowBytes);
#pragma unroll
      for (int32_t pair = 0; pair < Tile::kSteps / 2; ++pair)
        ptx::ldmatrix(query_fragments_[pair], chunk_at(queries, 4 * pair));
    }
  }

  // At the end of a tile, so that the epilogue has the registers.
  PREFIXPACK_DEVICE void clear_registers() {
    tile_.clear();
#pragma unroll
    for (int32_t i = 0; i < Tile::kSteps * 2; ++i) query_fragments_[i / 4][i % 4] = 0;
  }

  // scores_[i]: key lane / 4 + i / 2 * 8, query row lane % 4 * 2 + i % 2. Several accumulator chains, because the MMAs
  // of a chain wait for each other.
  PREFIXPACK_DEVICE void compute_scores() {
    constexpr int kChains = 4;
    float accumulators[kChains][4] = {};
    const ptx::SharedAddress keys =
        ring_.oldest_stage() + swizzled_offset(warp_.lane % 16, warp_.lane / 16, TileT::kRowBytes);
#pragma unroll
    for (int32_t load = 0; load < kLoads; ++load) {
      uint32_t loaded[4];
      ptx::ldmatrix(loaded, chunk_at(keys, 2 * load));
#pragma unroll
      for (int32_t i = 0; i < kStepsPerLoad; ++i) {
        uint32_t key[4];
        Format::key_a_fragments(loaded, i, key);
        const int32_t step = load * kStepsPerLoad + i;
        const uint32_t (&query)[4] = query_fragments_[step / 2];
        ptx::mma<Product>(accumulators[step % kChains], key, query[step % 2 * 2], query[step % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i)
      scores_[i] = (accumulators[0][i] + accumulators[1][i]) + (accumulators[2][i] + accumulators[3][i]);
  }

  PREFIXPACK_DEVICE void softmax_step() {
    softmax_.transform(scores_);
    if (tile_begin_ > last_whole_) {
      int32_t position[2];
      uint64_t hidden[2] = {};
      tile_.read_positions(word_of(tile_.record, kLowest), position, hidden);
      mask_transposed<Format::kTrees>(scores_, tile_begin_ + warp_.lane / 4, word_of(tile_.record, kKvEnd), position,
                                      hidden, ring_.window());
    }
    softmax_.add_transposed(scores_, tile_.softmax, tile_.sums);
    tile_begin_ += TileT::kKeys;
  }

  PREFIXPACK_DEVICE void accumulate_values() {
    const uint32_t low = ptx::movmatrix_transposed(Product::pack(scores_[0], scores_[1]));
    const uint32_t high = ptx::movmatrix_transposed(Product::pack(scores_[2], scores_[3]));
    const ptx::SharedAddress values = ring_.oldest_stage() + swizzled_offset(warp_.lane / 16 * 8 + warp_.lane % 8,
                                                                             warp_.lane / 8 % 2, TileT::kRowBytes);
#pragma unroll
    for (int32_t load = 0; load < kLoads; ++load) {
      uint32_t loaded[4];
      ptx::ldmatrix_transposed(loaded, chunk_at(values, 2 * load));
#pragma unroll
      for (int32_t i = 0; i < kStepsPerLoad; ++i) {
        uint32_t value[4];
        Format::value_a_fragments(loaded, i, value);
        ptx::mma<Product>(tile_.sums[load * kStepsPerLoad + i], value, low, high);
      }
    }
  }

  const WarpLane warp_;
  Tile tile_;
  Ring ring_;
  const Softmax softmax_;

  // Tile being computed.
  int32_t tile_begin_ = 0;
  int32_t last_whole_ = 0;  // last begin of a KV tile of which every query sees every key
  uint32_t stage_ = 0, num_stages_ = 0;
  uint32_t query_fragments_[Tile::kSteps / 2][4];
  float scores_[4];  // of a KV tile, then its softmax weights
};

}  // namespace prefixpack
