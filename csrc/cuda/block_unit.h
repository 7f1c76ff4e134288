// A unit for a whole block: the queries of a wide work item against its KV range, for one KV head.
//
// KV tiles go through a ring of stages filled by asynchronous copies. One barrier per tile: behind it everybody sees
// the tile that has arrived and nobody reads the one before it any more, so that its stage is filled again.
#pragma once

#include "cuda/index_math.h"
#include "cuda/kernel_params.h"
#include "cuda/next_unit.h"
#include "cuda/ptx.h"
#include "cuda/results.h"
#include "cuda/softmax.h"
#include "cuda/tiles.h"

namespace prefixpack {

template <class TileT, class Element>
class BlockUnit {
 public:
  // item: of the unit, near.
  PREFIXPACK_DEVICE BlockUnit(const KernelParams& params, const ItemRecord& item, int32_t kv_head, char* shared)
      : params_(params),
        attention_(params.attention),
        item_(item),
        kv_head_(kv_head),
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

  // next: gets the block's next unit, asked for late, so that no block holds back work that another could do, and early
  // enough to be here when it is needed.
  PREFIXPACK_DEVICE void run(NextUnit* next) {
    begin_loads();
    start_sums();
    const int32_t ask_at = num_tiles_ - kStages;
    int32_t ticket = ask_at < 0 ? next->ask(params_) : 0;
    for (int32_t tile = 0; ptx::uniform(tile < num_tiles_); ++tile) {
      ptx::copy_wait<kStages - 2>();
      ptx::block_sync();
      load_tile(tile + kStages - 1);
      if (ptx::uniform(tile == ask_at)) ticket = next->ask(params_);
      float scores[kRowBlocks][kKeyBlocks][4];
      multiply_keys(tile, scores);
      weigh(tile, scores);
      add_values(tile, scores);
    }
    ptx::copy_wait<0>();
    ptx::block_sync();  // the ring becomes the place where the warps' sums meet, or the next unit's
    const int32_t word = next->ask_for_record(params_, ticket);
    store_rows();
    next->keep(ticket, word);
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

  // Queries and the first tiles. What is read to find them is read all at once.
  PREFIXPACK_DEVICE void begin_loads() {
    static_assert((kStages - 1) * TileT::kKeys <= kThreads, "a thread for each key of the first tiles");
    const int32_t slot = thread_ < keys_ ? slots_[thread_ - thread_ / kChunks] : -1;
    const bool valid = thread_ < rows_;
    const Row place = row_of(valid ? thread_ : 0, kv_head_, group_);
    const int64_t token = params_.plan.query_token(item_.query_begin + place.query);
    // In the stage that is filled last.
    auto* offsets = reinterpret_cast<int64_t*>(shared_ + TileT::kQueryBytes + (kStages - 1) * 2 * TileT::kTileBytes);
    auto* first_slots = reinterpret_cast<int32_t*>(offsets + kThreads);
    offsets[thread_] = valid ? token * attention_.q_token_stride + place.head * attention_.q_head_stride : -1;
    first_slots[thread_] = slot;
    ptx::block_sync();
    const auto* q = static_cast<const uint16_t*>(attention_.q) + thread_ % kChunks * 8;
#pragma unroll 4
    for (int32_t row = thread_ / kChunks; row < TileT::kRows; row += kRowsPerPass) {
      const int64_t offset = offsets[row];
      ptx::copy_async(queries_ + swizzled(row, thread_ % kChunks, TileT::kRowBytes), q + (offset < 0 ? 0 : offset),
                      offset >= 0);
    }
#pragma unroll 1
    for (int32_t tile = 0; tile < kStages - 1; ++tile) {
#pragma unroll
      for (int32_t pass = 0; pass < kPasses; ++pass) {
        next_slots_[pass] = first_slots[tile * TileT::kKeys + pass * kRowsPerPass + thread_ / kChunks];
      }
      copy_tile(tile);
      ptx::copy_commit();
    }
    fetch_slots(kStages - 1);
  }

  // Slots of the rows that this thread copies, a tile ahead of the copies.
  PREFIXPACK_DEVICE void fetch_slots(int32_t tile) {
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t key = tile * TileT::kKeys + pass * kRowsPerPass;
      next_slots_[pass] = key + thread_ / kChunks < keys_ ? slots_[key] : -1;
    }
  }

  PREFIXPACK_DEVICE void copy_tile(int32_t tile) const {
    if (ptx::uniform(tile >= num_tiles_)) return;
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
  }

  // A tile beyond the last still commits its (empty) group: waits count groups.
  PREFIXPACK_DEVICE void load_tile(int32_t tile) {
    copy_tile(tile);
    ptx::copy_commit();
    fetch_slots(tile + 1);
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
      if (ptx::uniform(partly_hidden)) {
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

  // Where a row goes.
  struct Target {
    float* partial;    // [head_dim], nullptr if the row has no other partial: then
    uint16_t* output;  // [head_dim]
    float weights[TileT::kKeyWarps];
  };
  static_assert(TileT::kRows * sizeof(Target) <= TileT::kQueryBytes, "targets lie where the queries were");

  // Sums go through shared memory, where the ring was: warps that had different keys of the same rows meet there, in
  // warp order, and rows leave it in one piece.
  PREFIXPACK_DEVICE void store_rows() {
    constexpr int32_t kWidth = TileT::kSumWidth;
    auto* sums = reinterpret_cast<float*>(shared_ + TileT::kQueryBytes);
    auto* targets = reinterpret_cast<Target*>(shared_);
#pragma unroll
    for (int32_t block = 0; block < kRowBlocks; ++block) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        add_up_quad(state_[block][half].sum);
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
    if (thread_ < rows_) targets[thread_] = target_of(thread_, sums + thread_ * kWidth);
    ptx::block_sync();
    constexpr int32_t kQuads = TileT::kHeadDim / 4;
    const int32_t count = rows_ * kQuads;
#pragma unroll 4
    for (int32_t i = thread_; i < count; i += kThreads) {
      const int32_t row = i / kQuads, column = i % kQuads * 4;
      float quad[4] = {};
#pragma unroll
      for (int32_t warp = 0; warp < TileT::kKeyWarps; ++warp) {
        const float* theirs = sums + (warp * TileT::kRows + row) * kWidth + column;
        const float weight = targets[row].weights[warp];
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) quad[j] = ptx::fma(theirs[j], weight, quad[j]);
      }
      if (targets[row].partial != nullptr) {
        ptx::store_quad(targets[row].partial + column, quad);
      } else {
        ptx::store_words(targets[row].output + column, Element::pack(quad[0], quad[1]),
                         Element::pack(quad[2], quad[3]));
      }
    }
  }

  // Joins what the key warps have of a row, and stores its lse. sums: of the first key warp.
  PREFIXPACK_DEVICE Target target_of(int32_t row, const float* sums) const {
    const Row place = row_of(row, kv_head_, group_);
    const auto state_of = [&](int32_t warp) {
      const float* theirs = sums + warp * TileT::kRows * TileT::kSumWidth + TileT::kHeadDim;
      return SoftmaxState{theirs[0], theirs[1]};
    };
    const auto exp2 = [](float x) { return ptx::exp2(x); };
    SoftmaxState state = state_of(0);
    float keep, add;
#pragma unroll
    for (int32_t warp = 1; warp < TileT::kKeyWarps; ++warp) {
      state = softmax_join(state, state_of(warp), exp2, &keep, &add);
    }
    Target target{};
    Normalised result;
    if (item_.slot_begin == kWriteThrough) {
      const OutputRow output = output_row(params_, item_.query_begin + place.query, place.head);
      result = normalised_with_sink(state, attention_, place.head);
      target.output = output.output;
      store_lse(output.lse, result.lse);
    } else {
      const PartialRow partial = partial_row(attention_, item_.slot_begin + place.query, place.head);
      result = normalised(state);
      target.partial = partial.output;
      *partial.lse = result.lse;
    }
#pragma unroll
    for (int32_t warp = 0; warp < TileT::kKeyWarps; ++warp) {
      target.weights[warp] = exp2(state_of(warp).max - safe_max(state.max)) * result.factor;
    }
    return target;
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
