// A unit for a whole block: the queries of a wide work item against its KV range, for one KV head.
//
// KV tiles go through a ring of stages filled by asynchronous copies. One barrier per tile: behind it everybody sees
// the tile that has arrived and nobody reads the one before it any more, so that its stage is filled again.
#pragma once

#include "cuda/index_math.h"
#include "cuda/kernel_params.h"
#include "cuda/ptx.h"
#include "cuda/results.h"
#include "cuda/softmax.h"
#include "cuda/tiles.h"

namespace prefixpack {

template <class TileT, class Element>
class BlockUnit {
 public:
  PREFIXPACK_DEVICE BlockUnit(const KernelParams& params, char* shared, Unit unit)
      : params_(params),
        attention_(params.attention),
        item_(params.step.items[unit.item]),
        kv_head_(unit.kv_head),
        group_(params.attention.q_heads / params.attention.kv_heads),
        rows_(item_.query_count * group_),
        window_(params.attention.window_left),
        shared_(shared),
        queries_(ptx::shared_address(shared)),
        ring_(queries_ + TileT::kQueryBytes),
        thread_(ptx::thread_index()),
        lane_(thread_ % 32),
        row_warp_(thread_ / 32 % TileT::kRowWarps),
        key_warp_(thread_ / 32 / TileT::kRowWarps),
        softmax_(params.attention) {
    begin_ = first_read(item_.kv_begin, item_.kv_end, item_.lowest, window_, TileT::kKeys);
    keys_ = item_.kv_end - begin_;
    num_tiles_ = (keys_ + TileT::kKeys - 1) / TileT::kKeys;
    slots_ = params.step.kv_slots + item_.slots_at + (begin_ - item_.kv_begin) + thread_ / kChunks;
    const int32_t chunk = thread_ % kChunks;
    k_ = static_cast<const char*>(attention_.k) + kv_head_ * attention_.k_head_stride * 2 + chunk * 16;
    v_ = static_cast<const char*>(attention_.v) + kv_head_ * attention_.v_head_stride * 2 + chunk * 16;
    k_stride_ = static_cast<int32_t>(attention_.k_slot_stride) * 2;
    v_stride_ = static_cast<int32_t>(attention_.v_slot_stride) * 2;
    copy_to_ = swizzled(thread_ / kChunks, chunk, TileT::kRowBytes);
  }

  // next_ticket: gets the block's next unit, asked for late, so that no block holds back work that another could do,
  // and early enough to be here when it is needed.
  PREFIXPACK_DEVICE void run(int32_t* next_ticket) {
    load_queries();
    fetch_slots(0);
#pragma unroll 1
    for (int32_t tile = 0; tile < kStages - 1; ++tile) load_tile(tile);
    start_sums();
    for (int32_t tile = 0; tile < num_tiles_; ++tile) {
      ptx::copy_wait<kStages - 2>();
      ptx::block_sync();
      load_tile(tile + kStages - 1);
      float scores[kRowBlocks][kKeyBlocks][4];
      multiply_keys(tile, scores);
      weigh(tile, scores);
      add_values(tile, scores);
    }
    const int32_t ticket = ptx::take_ticket(&params_.step.tickets[0]);
    ptx::copy_wait<0>();
    ptx::block_sync();  // the ring becomes the place where the warps' sums meet, or the next unit's
    finish();
    if (thread_ < 32) *next_ticket = ticket;
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

  PREFIXPACK_DEVICE ptx::SharedAddress key_tile(int32_t tile) const {
    return ring_ + tile % kStages * 2 * TileT::kTileBytes + key_warp_ * TileT::kKeysPerWarp * TileT::kRowBytes;
  }
  PREFIXPACK_DEVICE ptx::SharedAddress value_tile(int32_t tile) const { return key_tile(tile) + TileT::kTileBytes; }

  // Address of a chunk for ldmatrix: rows of a tile start at multiples of 256 bytes or more, or of 128 at head size
  // 64, so that the swizzle is an exclusive or with the address.
  PREFIXPACK_DEVICE static ptx::SharedAddress chunk_at(ptx::SharedAddress lane_address, int32_t chunk) {
    return lane_address ^ static_cast<ptx::SharedAddress>(chunk << 4);
  }

  // Loads ----------------------------------------------------------------------------------------------------------

  PREFIXPACK_DEVICE void load_queries() {
    const auto* q = static_cast<const uint16_t*>(attention_.q) + thread_ % kChunks * 8;
#pragma unroll 1
    for (int32_t row = thread_ / kChunks; row < TileT::kRows; row += kRowsPerPass) {
      const bool valid = row < rows_;
      const Row place = row_of(valid ? row : 0, kv_head_, group_);
      const int64_t token = params_.plan.query_token(item_.query_begin + place.query);
      ptx::copy_async(queries_ + swizzled(row, thread_ % kChunks, TileT::kRowBytes),
                      q + token * attention_.q_token_stride + place.head * attention_.q_head_stride, valid);
    }
  }

  // Slots of the rows that this thread copies, fetched a tile ahead of the copies.
  PREFIXPACK_DEVICE void fetch_slots(int32_t tile) {
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t key = tile * TileT::kKeys + pass * kRowsPerPass;
      next_slots_[pass] = key + thread_ / kChunks < keys_ ? slots_[key] : -1;
    }
  }

  // A tile beyond the last still commits its (empty) group: waits count groups.
  PREFIXPACK_DEVICE void load_tile(int32_t tile) {
    if (tile < num_tiles_) {
      const ptx::SharedAddress to = ring_ + tile % kStages * 2 * TileT::kTileBytes + copy_to_;
#pragma unroll
      for (int32_t pass = 0; pass < kPasses; ++pass) {
        // kRowsPerPass is a multiple of 8 or a divisor of it that the swizzle has to know of.
        const ptx::SharedAddress place = (to ^ static_cast<ptx::SharedAddress>((pass * kRowsPerPass & 7) << 4)) +
                                         pass * kRowsPerPass * TileT::kRowBytes;
        const bool valid = next_slots_[pass] >= 0;
        const int32_t slot = valid ? next_slots_[pass] : 0;
        ptx::copy_async(place, ptx::at(k_, slot, k_stride_), valid);
        ptx::copy_async(place + TileT::kTileBytes, ptx::at(v_, slot, v_stride_), valid);
      }
      fetch_slots(tile + 1);
    }
    ptx::copy_commit();
  }

  // Products -------------------------------------------------------------------------------------------------------

  // Row of the tile that the fragments of this thread hold: `half` 0 or 1 for its two rows of a row block.
  PREFIXPACK_DEVICE int32_t fragment_row(int32_t block, int32_t half) const {
    return (row_warp_ * kRowBlocks + block) * 16 + half * 8 + lane_ / 4;
  }

  // Read when a mask needs it, which is seldom; kept, it would cost the widest tile registers that it has not.
  PREFIXPACK_DEVICE int32_t position_of(int32_t row) const {
    return row < rows_ ? params_.step.query_position[item_.query_begin + row / group_] : item_.highest;
  }

  PREFIXPACK_DEVICE void start_sums() {
#pragma unroll
    for (int32_t block = 0; block < kRowBlocks; ++block) {
      state_[block][0] = state_[block][1] = softmax_start();
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
    // Matrices of a K fragment: keys 0-7 low half, keys 0-7 high half, keys 8-15 low, keys 8-15 high.
    const ptx::SharedAddress keys =
        key_tile(tile) + swizzled(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2, TileT::kRowBytes);
    const ptx::SharedAddress queries =
        queries_ + swizzled(row_warp_ * kRowBlocks * 16 + lane_ % 16, lane_ / 16, TileT::kRowBytes);
#pragma unroll
    for (int32_t step = 0; step < TileT::kHeadDim / 16; ++step) {
      uint32_t query[kRowBlocks][4];
#pragma unroll
      for (int32_t block = 0; block < kRowBlocks; ++block) {
        ptx::load_matrix(query[block], chunk_at(queries, 2 * step) + block * 16 * TileT::kRowBytes);
      }
#pragma unroll
      for (int32_t pair = 0; pair < kKeyBlocks / 2; ++pair) {
        uint32_t key[4];
        ptx::load_matrix(key, chunk_at(keys, 2 * step) + pair * 16 * TileT::kRowBytes);
#pragma unroll
        for (int32_t block = 0; block < kRowBlocks; ++block) {
          ptx::multiply<Element>(scores[block][2 * pair], query[block], key[0], key[1]);
          ptx::multiply<Element>(scores[block][2 * pair + 1], query[block], key[2], key[3]);
        }
      }
    }
  }

  PREFIXPACK_DEVICE void weigh(int32_t tile, float (&scores)[kRowBlocks][kKeyBlocks][4]) {
    const int32_t tile_begin = begin_ + tile * TileT::kKeys;
    const bool partly_hidden = tile_begin + TileT::kKeys > item_.kv_end ||
                               tile_begin + TileT::kKeys - 1 > item_.lowest ||
                               (window_ >= 0 && tile_begin < item_.highest - window_);
#pragma unroll
    for (int32_t block = 0; block < kRowBlocks; ++block) {
      softmax_.transform(scores[block]);
      if (partly_hidden) {
#pragma unroll
        for (int32_t half = 0; half < 2; ++half) {
          const int32_t position = position_of(fragment_row(block, half));
          const int32_t first = tile_begin + key_warp_ * TileT::kKeysPerWarp + lane_ % 4 * 2;
          hide(scores[block], half, first, item_.kv_end, position, window_);
        }
      }
      softmax_.add(scores[block], state_[block], output_[block]);
    }
  }

  PREFIXPACK_DEVICE void add_values(int32_t tile, const float (&weights)[kRowBlocks][kKeyBlocks][4]) {
    const ptx::SharedAddress values = value_tile(tile) + swizzled(lane_ % 16, lane_ / 16, TileT::kRowBytes);
#pragma unroll
    for (int32_t step = 0; step < kKeyBlocks / 2; ++step) {
      uint32_t weight[kRowBlocks][4];
#pragma unroll
      for (int32_t block = 0; block < kRowBlocks; ++block) pack_weights<Element>(weights[block], step, weight[block]);
#pragma unroll
      for (int32_t pair = 0; pair < kValueBlocks / 2; ++pair) {
        uint32_t value[4];
        ptx::load_matrix_transposed(value, chunk_at(values, 2 * pair) + step * 16 * TileT::kRowBytes);
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
      for (int32_t half = 0; half < 2; ++half) add_up_quad(state_[block][half].sum);
    }
    store_rows();
  }

  // Sums go through shared memory, where the ring was: warps that had different keys of the same rows meet there, in
  // warp order, and rows leave it in one piece.
  PREFIXPACK_DEVICE void store_rows() const {
    constexpr int32_t kWidth = TileT::kSumWidth;
    auto* sums = reinterpret_cast<float*>(shared_ + TileT::kQueryBytes);
#pragma unroll
    for (int32_t block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        float* mine = sums + (key_warp_ * TileT::kRows + fragment_row(block, half)) * kWidth;
#pragma unroll
        for (int32_t column = 0; column < kValueBlocks; ++column) {
          ptx::store_pair(mine + column * 8 + lane_ % 4 * 2, output_[block][column][2 * half],
                          output_[block][column][2 * half + 1]);
        }
        if (lane_ % 4 == 0) ptx::store_pair(mine + TileT::kHeadDim, state_[block][half].max, state_[block][half].sum);
      }
    }
    ptx::block_sync();
    constexpr int32_t kQuads = TileT::kHeadDim / 4;
    const int32_t count = rows_ * kQuads;
#pragma unroll 1
    for (int32_t i = thread_; i < count; i += kThreads) {
      const int32_t row = i / kQuads, column = i % kQuads * 4;
      SoftmaxState state = softmax_start();
      float quad[4] = {};
#pragma unroll
      for (int32_t warp = 0; warp < TileT::kKeyWarps; ++warp) {
        const float* theirs = sums + (warp * TileT::kRows + row) * kWidth;
        float keep, add;
        state = softmax_join(
            state, {theirs[TileT::kHeadDim], theirs[TileT::kHeadDim + 1]}, [](float x) { return ptx::exp2(x); }, &keep,
            &add);
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) quad[j] = quad[j] * keep + theirs[column + j] * add;
      }
      const Target target = target_of(row, state);
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) quad[j] *= target.result.factor;
      if (target.partial.output != nullptr) {
        ptx::store_pair(target.partial.output + column, quad[0], quad[1]);
        ptx::store_pair(target.partial.output + column + 2, quad[2], quad[3]);
      } else {
        store_output<Element>(target.output.output, column, quad[0], quad[1]);
        store_output<Element>(target.output.output, column + 2, quad[2], quad[3]);
      }
      if (column == 0) store_lse_of(target);
    }
  }

  struct Target {
    PartialRow partial;  // of nullptr if the row has no other partial
    OutputRow output;
    Normalised result;
  };

  PREFIXPACK_DEVICE Target target_of(int32_t row, SoftmaxState state) const {
    const Row place = row_of(row, kv_head_, group_);
    Target target{};
    if (item_.slot_begin == kWriteThrough) {
      target.output = output_row(params_, item_.query_begin + place.query, place.head);
      target.result = normalised_with_sink(state, attention_, place.head);
    } else {
      target.partial = partial_row(attention_, item_.slot_begin + place.query, place.head);
      target.result = normalised(state);
    }
    return target;
  }

  PREFIXPACK_DEVICE static void store_lse_of(const Target& target) {
    if (target.partial.lse != nullptr) {
      *target.partial.lse = target.result.lse;
    } else {
      store_lse(target.output.lse, target.result.lse);
    }
  }

  const KernelParams& params_;
  const AttentionParams& attention_;
  const ItemRecord& item_;
  const int32_t kv_head_, group_, rows_, window_;
  char* const shared_;
  const ptx::SharedAddress queries_, ring_;
  const int32_t thread_, lane_, row_warp_, key_warp_;
  const Softmax softmax_;
  int32_t begin_, keys_, num_tiles_;
  const int32_t* slots_;         // of the row that this thread copies first
  const char *k_, *v_;           // of this thread's chunk
  int32_t k_stride_, v_stride_;  // bytes
  ptx::SharedAddress copy_to_;
  int32_t next_slots_[kPasses];
  SoftmaxState state_[kRowBlocks][2];
  float output_[kRowBlocks][kValueBlocks][4];
};

}  // namespace prefixpack
