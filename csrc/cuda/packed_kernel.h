// One unit of the queue: the queries of a work item against its KV range, for one KV head.
//
// KV tiles go through a ring of stages filled by asynchronous copies; K and V of a stage are groups of their own, so
// that products start on K while V is on its way. Copies are waited for at two points per tile, and at each of them
// the buffer that everybody has finished reading is filled again:
//   wait K(t) | block | refill V of tile t-1's stage | scores | wait V(t) | block | refill K of tile t's stage | sums
#pragma once

#include "cuda/index_math.h"
#include "cuda/kernel_params.h"
#include "cuda/ptx.h"
#include "cuda/tiles.h"

namespace prefixpack {

template <class TileT, class Element>
class PackedUnit {
 public:
  PREFIXPACK_DEVICE PackedUnit(const KernelParams& params, char* shared, Unit unit)
      : attention_(params.attention),
        plan_(params.plan),
        item_(params.plan.item(unit.item)),
        bounds_(params.step.item_bounds[unit.item]),
        positions_(params.step.query_position + item_.query_begin),
        kv_head_(unit.kv_head),
        group_(params.attention.q_heads / params.attention.kv_heads),
        rows_(item_.query_count * group_),
        shared_(shared),
        thread_(ptx::thread_index()),
        lane_(thread_ % 32),
        row_warp_(thread_ / 32 % TileT::kRowWarps),
        key_warp_(thread_ / 32 / TileT::kRowWarps) {
    const int32_t start = first_visible(item_.kv_begin, bounds_.lowest, attention_.window_left, TileT::kKeys);
    begin_ = start < bounds_.kv_end ? start : bounds_.kv_end;
    slots_ = params.step.kv_slots + params.plan.item_slots(unit.item) + (begin_ - item_.kv_begin);
    num_tiles_ = (bounds_.kv_end - begin_ + TileT::kKeys - 1) / TileT::kKeys;
  }

  PREFIXPACK_DEVICE void run() {
    load_queries();
    fill_ring();
    start_sums();
    for (int32_t tile = 0; tile < num_tiles_; ++tile) {
      float scores[kRowBlocks][kKeyBlocks][4];
      ptx::copy_wait<2 * kStages - 2>();
      ptx::block_sync();
      if (tile > 0) load_values(tile - 1 + kStages);
      multiply_keys(tile, scores);
      ptx::copy_wait<2 * kStages - 2>();
      ptx::block_sync();
      load_keys(tile + kStages);
      mask_and_scale(tile, scores);
      add_values(tile, scores);
    }
    ptx::copy_wait<0>();
    ptx::block_sync();  // the ring becomes the place where the warps' sums meet, or the next unit's
    finish();
    ptx::block_sync();
  }

 private:
  static constexpr int kStages = TileT::kStages;
  static constexpr int kRowBlocks = TileT::kRowBlocks;
  static constexpr int kKeyBlocks = TileT::kKeysPerWarp / 8;
  static constexpr int kValueBlocks = TileT::kHeadDim / 8;
  static constexpr int kChunks = TileT::kRowBytes / 16;
  static constexpr int kRowsPerPass = kThreads / kChunks;
  static constexpr int kPasses = TileT::kKeys / kRowsPerPass;
  // Slots are fetched a tile ahead of the copies that need them; the widest tiles and heads, which products keep busy,
  // have no registers to keep them in.
  static constexpr bool kSlotsAhead = kRowBlocks * TileT::kHeadDim <= 128;
  // Unrolled whole, these keep more addresses at hand than there are registers.
  static constexpr int kUnroll = kSlotsAhead ? TileT::kHeadDim / 16 : 2;

  PREFIXPACK_DEVICE char* query_tile() const { return shared_; }
  PREFIXPACK_DEVICE char* key_tile(int32_t tile) const {
    return shared_ + TileT::kQueryBytes + tile % kStages * 2 * TileT::kTileBytes;
  }
  PREFIXPACK_DEVICE char* value_tile(int32_t tile) const { return key_tile(tile) + TileT::kTileBytes; }

  // Loads ----------------------------------------------------------------------------------------------------------

  PREFIXPACK_DEVICE void load_queries() {
    const auto* q = static_cast<const uint16_t*>(attention_.q);
#pragma unroll
    for (int32_t row = thread_ / kChunks; row < TileT::kRows; row += kRowsPerPass) {
      const int32_t chunk = thread_ % kChunks;
      const bool valid = row < rows_;
      const Row place = row_of(valid ? row : 0, kv_head_, group_);
      const int64_t token = plan_.query_token(item_.query_begin + place.query);
      const uint16_t* source =
          q + token * attention_.q_token_stride + place.head * attention_.q_head_stride + chunk * 8;
      ptx::copy_async(query_tile() + swizzled(row, chunk, TileT::kRowBytes), source, valid);
    }
  }

  PREFIXPACK_DEVICE void fetch_slots(int32_t tile, int32_t (&slots)[kPasses]) const {
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t key = tile * TileT::kKeys + pass * kRowsPerPass + thread_ / kChunks;
      slots[pass] = begin_ + key < bounds_.kv_end ? slots_[key] : -1;
    }
  }

  PREFIXPACK_DEVICE void load_rows(const void* pool, int64_t slot_stride, int64_t head_stride, char* shared,
                                   const int32_t (&slots)[kPasses]) const {
    const int32_t chunk = thread_ % kChunks;
    const uint16_t* source = static_cast<const uint16_t*>(pool) + kv_head_ * head_stride + chunk * 8;
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t row = pass * kRowsPerPass + thread_ / kChunks;
      const bool valid = slots[pass] >= 0;
      const int64_t slot = valid ? slots[pass] : 0;
      ptx::copy_async(shared + swizzled(row, chunk, TileT::kRowBytes), source + slot * slot_stride, valid);
    }
  }

  // A tile beyond the last still commits its (empty) group: waits count groups.
  PREFIXPACK_DEVICE void load_keys(int32_t tile) {
    if (tile < num_tiles_) {
      if constexpr (!kSlotsAhead) fetch_slots(tile, next_slots_);
      load_rows(attention_.k, attention_.k_slot_stride, attention_.k_head_stride, key_tile(tile), next_slots_);
      if constexpr (kSlotsAhead) {
#pragma unroll
        for (int32_t pass = 0; pass < kPasses; ++pass) value_slots_[pass] = next_slots_[pass];
        fetch_slots(tile + 1, next_slots_);
      }
    }
    ptx::copy_commit();
  }

  PREFIXPACK_DEVICE void load_values(int32_t tile) {
    if (tile < num_tiles_) {
      if constexpr (!kSlotsAhead) fetch_slots(tile, value_slots_);
      load_rows(attention_.v, attention_.v_slot_stride, attention_.v_head_stride, value_tile(tile), value_slots_);
    }
    ptx::copy_commit();
  }

  PREFIXPACK_DEVICE void fill_ring() {
    if constexpr (kSlotsAhead) fetch_slots(0, next_slots_);
#pragma unroll
    for (int32_t tile = 0; tile < kStages; ++tile) {
      load_keys(tile);
      load_values(tile);
    }
  }

  // Products -------------------------------------------------------------------------------------------------------

  // Row of the tile that the fragments of this thread hold: `half` 0 or 1 for its two rows of a row block.
  PREFIXPACK_DEVICE int32_t fragment_row(int32_t block, int32_t half) const {
    return (row_warp_ * kRowBlocks + block) * 16 + half * 8 + lane_ / 4;
  }

  // Read when a mask needs it, which is seldom; kept, it would cost the widest tile registers that it has not.
  PREFIXPACK_DEVICE int32_t position_of(int32_t row) const {
    return row < rows_ ? positions_[row_of(row, kv_head_, group_).query] : bounds_.highest;
  }

  PREFIXPACK_DEVICE void start_sums() {
#pragma unroll
    for (int32_t block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        state_[block][half] = softmax_start();
      }
#pragma unroll
      for (int32_t column = 0; column < kValueBlocks; ++column) {
        output_[block][column][0] = output_[block][column][1] = 0.0f;
        output_[block][column][2] = output_[block][column][3] = 0.0f;
      }
    }
  }

  PREFIXPACK_DEVICE void multiply_keys(int32_t tile, float (&scores)[kRowBlocks][kKeyBlocks][4]) const {
#pragma unroll
    for (int32_t block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int32_t key = 0; key < kKeyBlocks; ++key) {
        scores[block][key][0] = scores[block][key][1] = scores[block][key][2] = scores[block][key][3] = 0.0f;
      }
    }
    const char* keys = key_tile(tile);
    const int32_t first_key = key_warp_ * TileT::kKeysPerWarp;
#pragma unroll kUnroll
    for (int32_t step = 0; step < TileT::kHeadDim / 16; ++step) {
      uint32_t query[kRowBlocks][4];
#pragma unroll
      for (int32_t block = 0; block < kRowBlocks; ++block) {
        const int32_t row = (row_warp_ * kRowBlocks + block) * 16 + lane_ % 16;
        ptx::load_matrix(query[block], query_tile() + swizzled(row, 2 * step + lane_ / 16, TileT::kRowBytes));
      }
#pragma unroll
      for (int32_t pair = 0; pair < (kKeyBlocks + 1) / 2; ++pair) {
        // Matrices: keys 0-7 low half, keys 0-7 high half, keys 8-15 low, keys 8-15 high; with a single block of
        // keys the second pair repeats the first.
        const int32_t upper = kKeyBlocks > 1 ? lane_ / 16 * 8 : 0;
        const int32_t row = first_key + pair * 16 + upper + lane_ % 8;
        uint32_t key[4];
        ptx::load_matrix(key, keys + swizzled(row, 2 * step + lane_ / 8 % 2, TileT::kRowBytes));
#pragma unroll
        for (int32_t block = 0; block < kRowBlocks; ++block) {
          ptx::multiply<Element>(scores[block][2 * pair], query[block], key[0], key[1]);
          if constexpr (kKeyBlocks > 1) {
            ptx::multiply<Element>(scores[block][2 * pair + 1], query[block], key[2], key[3]);
          }
        }
      }
    }
  }

  // Scores become weights 2^(score - running maximum); sums and outputs are brought to the new maximum.
  PREFIXPACK_DEVICE void mask_and_scale(int32_t tile, float (&scores)[kRowBlocks][kKeyBlocks][4]) {
    const int32_t tile_begin = begin_ + tile * TileT::kKeys;
    const int32_t window = attention_.window_left;
    const bool partly_hidden = tile_begin + TileT::kKeys > bounds_.kv_end ||
                               tile_begin + TileT::kKeys - 1 > bounds_.lowest ||
                               (window >= 0 && tile_begin < bounds_.highest - window);
    const float to_base_2 = attention_.scale * kLog2E;
    const float cap = attention_.logit_cap;
#pragma unroll
    for (int32_t block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        float max = state_[block][half].max;
#pragma unroll
        for (int32_t i = 0; i < 2 * kKeyBlocks; ++i) {
          float& score = scores[block][i / 2][2 * half + i % 2];
          score = cap > 0.0f ? cap * kLog2E * ptx::tanh(score * attention_.scale / cap) : score * to_base_2;
        }
        if (partly_hidden) {
          const int32_t position = position_of(fragment_row(block, half));
#pragma unroll
          for (int32_t i = 0; i < 2 * kKeyBlocks; ++i) {
            const int32_t kv_position =
                tile_begin + key_warp_ * TileT::kKeysPerWarp + i / 2 * 8 + lane_ % 4 * 2 + i % 2;
            const bool shown = kv_position < bounds_.kv_end && visible(kv_position, position, window);
            if (!shown) scores[block][i / 2][2 * half + i % 2] = kMinusInfinity;
          }
        }
#pragma unroll
        for (int32_t i = 0; i < 2 * kKeyBlocks; ++i) {
          const float score = scores[block][i / 2][2 * half + i % 2];
          max = score > max ? score : max;
        }
        // The four lanes of a quad hold one row.
        for (int32_t mask = 1; mask <= 2; mask *= 2) {
          const float other = ptx::shuffle_xor(max, mask);
          max = other > max ? other : max;
        }
        const float base = safe_max(max);
        const float rescale = ptx::exp2(state_[block][half].max - base);
        float sum = state_[block][half].sum * rescale;
#pragma unroll
        for (int32_t i = 0; i < 2 * kKeyBlocks; ++i) {
          float& score = scores[block][i / 2][2 * half + i % 2];
          score = ptx::exp2(score - base);
          sum += score;
        }
        state_[block][half] = {max, sum};
#pragma unroll
        for (int32_t column = 0; column < kValueBlocks; ++column) {
          output_[block][column][2 * half] *= rescale;
          output_[block][column][2 * half + 1] *= rescale;
        }
      }
    }
  }

  PREFIXPACK_DEVICE void add_values(int32_t tile, const float (&weights)[kRowBlocks][kKeyBlocks][4]) {
    const char* values = value_tile(tile);
    const int32_t first_key = key_warp_ * TileT::kKeysPerWarp;
#pragma unroll
    for (int32_t step = 0; step < (kKeyBlocks + 1) / 2; ++step) {
      // With 8 keys a warp the second half of the fragment is zeros against keys that are read again.
      constexpr bool kWhole = kKeyBlocks > 1;
      uint32_t weight[kRowBlocks][4];
#pragma unroll
      for (int32_t block = 0; block < kRowBlocks; ++block) {
        weight[block][0] = Element::pack(weights[block][2 * step][0], weights[block][2 * step][1]);
        weight[block][1] = Element::pack(weights[block][2 * step][2], weights[block][2 * step][3]);
        weight[block][2] =
            kWhole ? Element::pack(weights[block][2 * step + kWhole][0], weights[block][2 * step + kWhole][1]) : 0u;
        weight[block][3] =
            kWhole ? Element::pack(weights[block][2 * step + kWhole][2], weights[block][2 * step + kWhole][3]) : 0u;
      }
      const int32_t row = first_key + step * 16 + (kWhole ? lane_ % 16 : lane_ % 8);
#pragma unroll
      for (int32_t pair = 0; pair < kValueBlocks / 2; ++pair) {
        uint32_t value[4];
        ptx::load_matrix_transposed(value, values + swizzled(row, 2 * pair + lane_ / 16, TileT::kRowBytes));
#pragma unroll
        for (int32_t block = 0; block < kRowBlocks; ++block) {
          ptx::multiply<Element>(output_[block][2 * pair], weight[block], value[0], value[1]);
          ptx::multiply<Element>(output_[block][2 * pair + 1], weight[block], value[2], value[3]);
        }
      }
    }
  }

  // Results --------------------------------------------------------------------------------------------------------

  PREFIXPACK_DEVICE void finish() {
#pragma unroll
    for (int32_t block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        float& sum = state_[block][half].sum;
        sum += ptx::shuffle_xor(sum, 1);
        sum += ptx::shuffle_xor(sum, 2);
      }
    }
    if constexpr (TileT::kKeyWarps == 1) {
      store_fragments();
    } else {
      join_warps();
    }
  }

  PREFIXPACK_DEVICE void store_fragments() const {
#pragma unroll
    for (int32_t block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t row = fragment_row(block, half);
        if (row >= rows_) continue;
        const RowTarget target = target_of(row, state_[block][half]);
#pragma unroll
        for (int32_t column = 0; column < kValueBlocks; ++column) {
          store(target, column * 8 + lane_ % 4 * 2, output_[block][column][2 * half],
                output_[block][column][2 * half + 1]);
        }
        if (lane_ % 4 == 0) store_lse(target);
      }
    }
  }

  // Warps that had different keys of the same rows leave their sums in shared memory; they are added in warp order.
  PREFIXPACK_DEVICE void join_warps() const {
    constexpr int32_t kWidth = TileT::kHeadDim + 2;
    auto* sums = reinterpret_cast<float*>(shared_ + TileT::kQueryBytes);
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      float* mine = sums + (key_warp_ * TileT::kRows + fragment_row(0, half)) * kWidth;
#pragma unroll
      for (int32_t column = 0; column < kValueBlocks; ++column) {
        mine[column * 8 + lane_ % 4 * 2] = output_[0][column][2 * half];
        mine[column * 8 + lane_ % 4 * 2 + 1] = output_[0][column][2 * half + 1];
      }
      if (lane_ % 4 == 0) {
        mine[TileT::kHeadDim] = state_[0][half].max;
        mine[TileT::kHeadDim + 1] = state_[0][half].sum;
      }
    }
    ptx::block_sync();
    const auto exp2_of = [](float x) { return ptx::exp2(x); };
    constexpr int32_t kPairs = TileT::kHeadDim / 2;
    const int32_t count = rows_ * kPairs;
    for (int32_t i = thread_; i < count; i += kThreads) {
      const int32_t row = i / kPairs, column = i % kPairs * 2;
      SoftmaxState state = softmax_start();
      float left = 0.0f, right = 0.0f;
#pragma unroll
      for (int32_t warp = 0; warp < TileT::kKeyWarps; ++warp) {
        const float* theirs = sums + (warp * TileT::kRows + row) * kWidth;
        float keep, add;
        state = softmax_join(state, {theirs[TileT::kHeadDim], theirs[TileT::kHeadDim + 1]}, exp2_of, &keep, &add);
        left = left * keep + theirs[column] * add;
        right = right * keep + theirs[column + 1] * add;
      }
      const RowTarget target = target_of(row, state);
      store(target, column, left, right);
      if (column == 0) store_lse(target);
    }
  }

  struct RowTarget {
    float* partial;    // row of a partial, or nullptr
    uint16_t* output;  // row of the output, or nullptr
    float* lse;        // or nullptr
    float normalize;
    float lse_value;
  };

  PREFIXPACK_DEVICE RowTarget target_of(int32_t row, SoftmaxState state) const {
    const Row place = row_of(row, kv_head_, group_);
    RowTarget target{};
    float sum = state.sum;
    if (item_.slot_begin == kWriteThrough) {
      const int64_t token = plan_.query_token(item_.query_begin + place.query);
      if (attention_.sinks != nullptr) sum += ptx::exp2(attention_.sinks[place.head] * kLog2E - safe_max(state.max));
      target.output = static_cast<uint16_t*>(attention_.o) + token * attention_.o_token_stride +
                      place.head * attention_.o_head_stride;
      if (attention_.lse != nullptr) target.lse = attention_.lse + token * attention_.lse_token_stride + place.head;
    } else {
      const int64_t slot = item_.slot_begin + place.query;
      const int64_t index = slot * attention_.q_heads + place.head;
      target.partial = attention_.partial_o + index * TileT::kHeadDim;
      target.lse = attention_.partial_lse + index;
    }
    target.normalize = sum > 0.0f ? 1.0f / sum : 0.0f;
    target.lse_value = sum > 0.0f ? (safe_max(state.max) + ptx::log2(sum)) * kLn2 : kMinusInfinity;
    return target;
  }

  PREFIXPACK_DEVICE static void store(const RowTarget& target, int32_t column, float left, float right) {
    left *= target.normalize;
    right *= target.normalize;
    if (target.partial != nullptr) {
      ptx::store_pair(target.partial + column, left, right);
    } else {
      *reinterpret_cast<uint32_t*>(target.output + column) = Element::pack(left, right);
    }
  }

  PREFIXPACK_DEVICE static void store_lse(const RowTarget& target) {
    if (target.lse != nullptr) *target.lse = target.lse_value;
  }

  const AttentionParams& attention_;
  const DevicePlan& plan_;
  const WorkItem& item_;
  const ItemBounds bounds_;
  const int32_t* const positions_;
  const int32_t kv_head_, group_, rows_;
  char* const shared_;
  const int32_t thread_, lane_, row_warp_, key_warp_;
  int32_t begin_, num_tiles_;
  const int32_t* slots_;
  int32_t next_slots_[kPasses], value_slots_[kPasses];  // of the next K and the next V tile, as this thread copies it
  SoftmaxState state_[kRowBlocks][2];
  float output_[kRowBlocks][kValueBlocks][4];
};

}  // namespace prefixpack

namespace prefixpack {

// A function of its own per tile: inlined side by side they would share, and spill, one set of registers.
template <class TileT, class Element>
PREFIXPACK_DEVICE_CALL void run_unit(const KernelParams& params, char* shared, Unit unit) {
  PackedUnit<TileT, Element>(params, shared, unit).run();
}

// The queue: blocks stay resident and take units until none is left. Which block takes which unit changes nothing in
// the result: every unit has output or partial slots of its own.
template <int HeadDim, class Element>
PREFIXPACK_DEVICE void run_queue(const KernelParams& params, char* shared) {
  auto* ticket_of_block = reinterpret_cast<int32_t*>(shared + kSharedBytes);
  const int32_t kv_heads = params.attention.kv_heads;
  const int32_t num_units = params.plan.header().num_items * kv_heads;
  for (;;) {
    if (ptx::thread_index() == 0) *ticket_of_block = ptx::atomic_add(&params.step.tickets[0], 1);
    ptx::block_sync();
    const int32_t ticket = *ticket_of_block;
    ptx::block_sync();
    if (ticket >= num_units) break;
    const Unit unit = unit_of(ticket, kv_heads);
    switch (params.plan.item(unit.item).tile_rows) {
      case 16:
        run_unit<Tile<HeadDim, 16>, Element>(params, shared, unit);
        break;
      case 32:
        run_unit<Tile<HeadDim, 32>, Element>(params, shared, unit);
        break;
      case 64:
        run_unit<Tile<HeadDim, 64>, Element>(params, shared, unit);
        break;
      default:
        if constexpr (kMaxTileRows<HeadDim> >= 128) {
          run_unit<Tile<HeadDim, 128>, Element>(params, shared, unit);
        }
    }
  }
  // The last block to leave makes the counters ready for the next launch, so that a captured graph can be replayed.
  if (ptx::thread_index() == 0 && ptx::atomic_add(&params.step.tickets[1], 1) == ptx::grid_size() - 1) {
    params.step.tickets[0] = 0;
    params.step.tickets[1] = 0;
  }
}

}  // namespace prefixpack
