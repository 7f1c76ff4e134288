// The KV ring of a warp: finds the warp's next tile, and copies queries and KV ahead of the MMAs.
//
// Stages are each the K or the V of a KV tile. Loads run ahead into the next tile, so that memory stays busy during the
// epilogue. Finding the next tile (its index, then its record and prologue) takes dependent loads, issued early enough
// to have arrived when needed.
#pragma once

#include <cstddef>

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/warp_tile.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

template <class TileT, class Format>
class WarpRing {
 public:
  // shared: kWarpBytes of this warp.
  PREFIXPACK_DEVICE WarpRing(const WarpLane& warp, const char* shared)
      : warp_(warp),
        window_(warp.attention.window_left),
        first_item_(warp.header(offsetof(PlanHeader, num_cta_items))),
        num_tiles_((warp.header(offsetof(PlanHeader, num_items)) - first_item_) *
                   warp.params.heads.virtual_heads.number),
        queries_(ptx::kept(ptx::shared_address(shared))) {}

  static constexpr int kStages = TileT::kStages;
  static constexpr int kRingBytes = kStages * TileT::kStageBytes;

  PREFIXPACK_DEVICE int32_t num_tiles() const { return num_tiles_; }
  // Query tokens before its own that a query sees; negative for all.
  PREFIXPACK_DEVICE int32_t window() const { return window_; }
  PREFIXPACK_DEVICE ptx::SharedAddress queries() const { return queries_; }
  PREFIXPACK_DEVICE ptx::SharedAddress oldest_stage() const { return ring() + use_offset_; }
  PREFIXPACK_DEVICE ptx::SharedAddress end() const { return ring() + kRingBytes; }
  // Whether no tile is left. Then `claimed` is the last claim, in the first lane.
  PREFIXPACK_DEVICE bool is_done() const { return lookahead_ == kDone; }
  PREFIXPACK_DEVICE int32_t claimed() const { return tile_index_; }
  PREFIXPACK_DEVICE void begin(int32_t claimed) { tile_index_ = claimed; }

  // Stages of a tile: at least two. With an empty range, where the window has passed the whole item, all keys are
  // masked.
  PREFIXPACK_DEVICE static uint32_t stages_of(int32_t keys) {
    return keys > 0 ? (static_cast<uint32_t>(keys) + TileT::kKeys - 1) / TileT::kKeys * 2 : 2;
  }

  // Fills the ring with all loads whose addresses are known.
  PREFIXPACK_DEVICE void fill() {
    if (load_stages_ - load_stage_ <= kLookaheadStages) advance_lookahead();
#pragma unroll 1
    while (in_flight_ < kStages) {
      if (load_stage_ == load_stages_) {
        if (tile_is_loading_ || lookahead_ != kReady) break;
        begin_tile_loads();
      }
      load_stage();
    }
  }

  // Makes the tile whose loads have begun the one that is computed, and gives its record. False: there is none.
  PREFIXPACK_DEVICE bool take_tile(int32_t& record) {
    if (!tile_is_loading_) return false;
    tile_is_loading_ = false;
    record = load_record_;
    return true;
  }

  // Whether the ring is full of stages of the tile being computed.
  PREFIXPACK_DEVICE bool is_full() const { return in_flight_ == kStages && !tile_is_loading_; }
  // Of a full ring, the loads of whole KV tiles before the next tile is claimed.
  PREFIXPACK_DEVICE int32_t quiet_loads() const {
    const auto whole_stages = static_cast<int32_t>(load_keys_ / TileT::kKeys * 2);
    const auto quiet_stages = static_cast<int32_t>(load_stages_ - kLookaheadStages);
    return (whole_stages < quiet_stages ? whole_stages : quiet_stages) - static_cast<int32_t>(load_stage_);
  }

  // Loads the next stage, of a whole KV tile, to the place of the oldest one.
  template <bool kIsValue>
  PREFIXPACK_DEVICE void replace_stage() {
    const auto stride = static_cast<int32_t>(kIsValue ? warp_.attention.v_slot_stride : warp_.attention.k_slot_stride) *
                        Format::kKvBytes;
    const ptx::SharedAddress to =
        ring() + use_offset_ + swizzled_offset(warp_.lane / kChunks, warp_.lane % kChunks, TileT::kRowBytes);
    copy_rows<true>(to, kIsValue ? load_v_ : load_k_, stride);
    finish_load();
    use_offset_ = use_offset_ == kRingBytes - TileT::kStageBytes ? 0 : use_offset_ + TileT::kStageBytes;
  }

  // Waits for the oldest stage in flight.
  PREFIXPACK_DEVICE void wait_for_stage() const {
    if (in_flight_ == kStages) {
      ptx::cp_async_wait<kStages - 1>();
    } else if (in_flight_ >= 3) {
      ptx::cp_async_wait<2>();
    } else if (in_flight_ == 2) {
      ptx::cp_async_wait<1>();
    } else {
      ptx::cp_async_wait<0>();
    }
    ptx::warp_sync();
  }

  PREFIXPACK_DEVICE void release_stage() {
    --in_flight_;
    use_offset_ = use_offset_ == kRingBytes - TileT::kStageBytes ? 0 : use_offset_ + TileT::kStageBytes;
  }

 private:
  static constexpr int kChunks = TileT::kRowBytes / 16;  // lanes that copy a row
  static constexpr int kRowsPerPass = 32 / kChunks;
  static constexpr int kPasses = TileT::kKeys / kRowsPerPass;
  static constexpr int kQueryChunks = TileT::kQueryRowBytes / 16;
  // Stages before the end of a tile at which the next one is claimed: not earlier than needed, because a claimed tile
  // is lost to idle warps.
  static constexpr uint32_t kLookaheadStages = 4;

  // What is known of the next tile.
  enum Lookahead : int32_t { kIdle, kTileIndex, kRecord, kReady, kDone };

  PREFIXPACK_DEVICE ptx::SharedAddress ring() const { return queries_ + TileT::kQueryBytes; }

  PREFIXPACK_DEVICE void advance_lookahead() {
    if (lookahead_ == kIdle) {
      tile_index_ = warp_.lane == 0 ? ptx::atomic_increment(&warp_.params.step.tile_counters[1]) : 0;
      lookahead_ = kTileIndex;
    } else if (lookahead_ == kTileIndex) {
      const int32_t tile_index = ptx::broadcast(tile_index_, 0);
      lookahead_ = kDone;
      if (tile_index < num_tiles_) {
        const WorkTile tile = work_tile_of(tile_index, warp_.params.heads.virtual_heads);
        const int32_t item = first_item_ + tile.item;
        const auto* record = reinterpret_cast<const int32_t*>(warp_.params.step.items + item);
        const int32_t head = warp_.lane == kVirtualHead ? tile.head : tile.head >> warp_.head_shift();
        next_record_ = warp_.lane < kRecordWords ? record[warp_.lane] : head;
        has_prologue_ = item < warp_.params.step.num_prologues;
        if (ptx::uniform(has_prologue_)) {
          upcoming_slots_ = warp_.params.step.prologues[item].slots[warp_.lane];
          next_token_ = warp_.params.step.prologues[item].tokens[warp_.query];
        }
        lookahead_ = kRecord;
      }
    } else if (lookahead_ == kRecord) {
      const int32_t kv_begin = word_of(next_record_, kKvBegin), kv_end = word_of(next_record_, kKvEnd);
      const int32_t begin = first_visited(kv_begin, kv_end, word_of(next_record_, kLowest), window_, TileT::kKeys);
      next_first_slot_ = word_of(next_record_, kKvSlotsAt) + (begin - kv_begin) + warp_.lane;
      next_keys_ = kv_end - begin;
      // Where the window has passed the item's first keys, not its first slots are needed.
      if (ptx::uniform(!has_prologue_ || begin != kv_begin)) {
        upcoming_slots_ = warp_.lane < next_keys_ ? warp_.params.step.kv_slots[next_first_slot_] : -1;
        next_token_ = warp_.token_of_row(next_record_);
      }
      lookahead_ = kReady;
    }
  }

  // The opaque copies keep the compiler from hoisting the lane's part of record, slots and token out of the loop, where
  // every stage would wait for them.
  PREFIXPACK_DEVICE void begin_tile_loads() {
    const int32_t record = ptx::opaque(next_record_), slots = ptx::opaque(upcoming_slots_);
    const int32_t token = warp_.query < word_of(record, kQueryCount) ? ptx::opaque(next_token_) : -1;
    load_first_slot_ = next_first_slot_;
    load_keys_ = next_keys_;
    load_stage_ = 0;
    load_stages_ = stages_of(load_keys_);
    slots_ = warp_.lane < load_keys_ ? slots : -1;
    next_slots_ = warp_.lane + 32 < load_keys_ ? warp_.params.step.kv_slots[load_first_slot_ + 32] : -1;
    load_record_ = record;
    const int64_t head = word_of(record, kKvHead);
    load_k_ = static_cast<const char*>(warp_.attention.k) + head * warp_.attention.k_head_stride * Format::kKvBytes +
              warp_.lane % kChunks * 16;
    load_v_ = static_cast<const char*>(warp_.attention.v) + head * warp_.attention.v_head_stride * Format::kKvBytes +
              warp_.lane % kChunks * 16;
    tile_is_loading_ = true;
    lookahead_ = kIdle;
    load_queries(token);
  }

  // Joins the cp.async group of the tile's first stage; the previous tile's queries are in registers by now. Missing
  // rows are left as they are: columns of an mma are independent.
  PREFIXPACK_DEVICE void load_queries(int32_t token) const {
    const int32_t head =
        word_of(load_record_, kVirtualHead) * warp_.heads_per_half + warp_.lane - warp_.query * warp_.heads_per_half;
    const int64_t mine = token < 0 ? -1 : token * warp_.attention.q_token_stride + head * warp_.attention.q_head_stride;
    const int32_t rows = word_of(load_record_, kQueryCount) * warp_.heads_per_half;
    const int32_t chunk = warp_.lane % kQueryChunks;
    const auto* q = static_cast<const uint16_t*>(warp_.attention.q) + chunk * 8;
#pragma unroll 1
    for (int32_t first = 0; first < rows; first += 32 / kQueryChunks) {
      const int32_t row = first + warp_.lane / kQueryChunks;
      const int64_t offset = ptx::shuffle(mine, row);
      if (offset >= 0) ptx::cp_async(queries_ + swizzled_offset(row, chunk, TileT::kQueryRowBytes), q + offset);
    }
  }

  PREFIXPACK_DEVICE void load_stage() {
    const bool is_value = load_stage_ % 2 == 1;
    const char* from = is_value ? load_v_ : load_k_;
    const auto stride = static_cast<int32_t>(is_value ? warp_.attention.v_slot_stride : warp_.attention.k_slot_stride) *
                        Format::kKvBytes;
    const int32_t load_offset = use_offset_ + in_flight_ * TileT::kStageBytes;
    const ptx::SharedAddress to = ring() + (load_offset < kRingBytes ? load_offset : load_offset - kRingBytes) +
                                  swizzled_offset(warp_.lane / kChunks, warp_.lane % kChunks, TileT::kRowBytes);
    if (static_cast<int32_t>((load_stage_ / 2 + 1) * TileT::kKeys) <= load_keys_) {
      copy_rows<true>(to, from, stride);
    } else {
      copy_rows<false>(to, from, stride);
    }
    finish_load();
    ++in_flight_;
  }

  PREFIXPACK_DEVICE void finish_load() {
    ptx::cp_async_commit();
    if (load_stage_ % 4 == 3) {
      // A shuffle, where a copy would do: the assembler moves copies, so that every stage waits for the next slots.
      slots_ = ptx::shuffle(next_slots_, warp_.lane);
      const auto key = static_cast<int32_t>((load_stage_ / 4 + 2) * 32);
      next_slots_ = key + warp_.lane < load_keys_ ? warp_.params.step.kv_slots[load_first_slot_ + key] : -1;
    }
    ++load_stage_;
  }

  // Rows beyond the end are zeros: masked values still must not be NaN.
  template <bool kWhole>
  PREFIXPACK_DEVICE void copy_rows(ptx::SharedAddress to, const char* from, int32_t stride) const {
    const auto first_lane = static_cast<int32_t>(load_stage_ / 2 % 2 * TileT::kKeys) + warp_.lane / kChunks;
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t mix = swizzle_bits(pass * kRowsPerPass, TileT::kRowBytes);
      const ptx::SharedAddress place =
          (to ^ static_cast<ptx::SharedAddress>(mix << 4)) + pass * kRowsPerPass * TileT::kRowBytes;
      const int32_t slot = ptx::shuffle(slots_, first_lane + pass * kRowsPerPass);
      if constexpr (kWhole) {
        ptx::cp_async(place, ptx::at(from, slot, stride));
      } else {
        ptx::cp_async(place, ptx::at(from, slot >= 0 ? slot : 0, stride), slot >= 0);
      }
    }
  }

  const WarpLane warp_;
  const int32_t window_, first_item_, num_tiles_;
  const ptx::SharedAddress queries_;

  // Next tile.
  Lookahead lookahead_ = kTileIndex;
  bool has_prologue_ = false;
  int32_t tile_index_ = 0, next_record_ = 0, next_keys_ = 0, next_first_slot_ = 0, upcoming_slots_ = 0;
  int32_t next_token_ = 0;  // of the row that is this lane's number

  // Tile being loaded. Its stages: K of the first KV tile, V of the first, K of the second and so on.
  int32_t load_record_ = 0, load_keys_ = 0, load_first_slot_ = 0;
  uint32_t load_stage_ = 0, load_stages_ = 0;
  int32_t slots_ = 0, next_slots_ = 0;                // this lane's KV slot of the current 32 keys, and of the next 32
  const char *load_k_ = nullptr, *load_v_ = nullptr;  // at this lane's chunk
  bool tile_is_loading_ = false;                      // the tile being loaded is not yet the one being computed

  int32_t use_offset_ = 0, in_flight_ = 0;  // of the ring: byte offset of the oldest stage, stages in flight
};

}  // namespace prefixpack
