// Rows of a CTA tile, common to both mainloops: queries, masks, accumulators, and their way to the epilogue.
#pragma once

#include "cuda/common/dtype_traits.cuh"
#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel/cta_state.cuh"
#include "cuda/kernel/epilogue_prefetch.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/online_softmax.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// TileT: layout of the queries in shared memory (which they begin), and the rows and keys of a KV tile for each warp.
template <class TileT, class Format>
class CtaTile {
 protected:
  // params: in constant or shared memory, whichever the caller reads faster.
  PREFIXPACK_DEVICE CtaTile(const KernelParams& params, const CtaState& state, char* shared)
      : params_(params),
        cta_(state),
        attention_(params.attention),
        item_(state.item),
        rows_(item_.query_count * params.heads.group.number),
        window_(params.attention.window_left),
        shared_(shared),
        queries_(ptx::shared_address(shared)),
        thread_(ptx::volatile_thread_index()),
        lane_(thread_ % 32),
        row_warp_(thread_ / 32 % TileT::kRowWarps),
        key_warp_(thread_ / 32 / TileT::kRowWarps),
        begin_(first_visited(item_.kv_begin, item_.kv_end, item_.lowest, params.attention.window_left,
                             kWindowGranularity)),
        keys_(item_.kv_end - begin_),
        num_tiles_((keys_ + TileT::kKeys - 1) / TileT::kKeys),
        unmasked_(unmasked_tiles(begin_, item_.kv_end, item_.lowest, item_.highest, window_, TileT::kKeys)),
        softmax_(params.attention) {}

  static constexpr int kRowBlocks = TileT::kRowBlocks;
  static constexpr int kKeyBlocks = TileT::kKeysPerWarp / 8;
  static constexpr int kValueBlocks = TileT::kHeadDim / 8;
  static constexpr int kChunks = TileT::kRowBytes / 16;
  static constexpr int kThreads = TileT::kThreads;
  static constexpr int kRowsPerPass = kThreads / kChunks;
  static constexpr int kQueryChunks = TileT::kQueryRowBytes / 16;

  // Queries ---------------------------------------------------------------------------------------------------------

  // Offset in q of the row that is this thread's number, in elements; -1 beyond the last row.
  PREFIXPACK_DEVICE int64_t query_offset(TilePrologue prologue) const {
    const Row place = row_of(thread_, cta_.kv_head, params_.heads.group);
    const int64_t token = prologue.token;
    return thread_ < rows_ ? token * attention_.q_token_stride + place.head * attention_.q_head_stride : -1;
  }

  // offsets: [kRows] from query_offset().
  PREFIXPACK_DEVICE void load_queries(const int64_t* offsets) const {
    const int32_t chunk = thread_ % kQueryChunks;
    const auto* q = static_cast<const uint16_t*>(attention_.q) + chunk * 8;
    constexpr int32_t kRowsAtOnce = kThreads / kQueryChunks;
    static_assert(TileT::kRows % kRowsAtOnce == 0);
#pragma unroll 2
    for (int32_t first = 0; first < TileT::kRows; first += kRowsAtOnce) {
      const int32_t row = first + thread_ / kQueryChunks;
      const int64_t offset = offsets[row];
      ptx::cp_async(queries_ + TileT::query_place(row, chunk), q + (offset < 0 ? 0 : offset), offset >= 0);
    }
  }

  // Converts the queries in shared memory to the MMA's dtype, and permutes their dimensions as those of fp8 keys are.
  PREFIXPACK_DEVICE void convert_queries() const {
    const int32_t thread = ptx::volatile_thread_index();
    constexpr int32_t kPairs = kQueryChunks / 2;
#pragma unroll 1
    for (int32_t i = thread; i < TileT::kRows * kPairs; i += kThreads) {
      const int32_t row = i / kPairs, chunk = i % kPairs * 2;
      const ptx::SharedAddress left = queries_ + TileT::query_place(row, chunk);
      const ptx::SharedAddress right = queries_ + TileT::query_place(row, chunk + 1);
      uint32_t words[2][4], moved[2][4];
      ptx::load_shared(left, words[0]);
      ptx::load_shared(right, words[1]);
#pragma unroll
      for (int32_t pair = 0; pair < 8; ++pair) {
        moved[pair % 2][pair / 2] = Format::Output::to_fp16(words[pair / 4][pair % 4]);
      }
      ptx::store_shared(left, moved[0]);
      ptx::store_shared(right, moved[1]);
    }
  }

  // Accumulators ----------------------------------------------------------------------------------------------------

  // Row of the tile that a thread's fragment holds. half: 0 or 1, for its two rows of a row block.
  PREFIXPACK_DEVICE static int32_t fragment_row(int32_t thread, int32_t block, int32_t half) {
    return TileT::first_row(thread / 32 % TileT::kRowWarps, block) + half * 8 + thread % 32 / 4;
  }

  // Loaded only for masked tiles: keeping it in a register would spill in the widest tile.
  PREFIXPACK_DEVICE int32_t position_of(int32_t row) const {
    const int32_t query = params_.heads.group.quotient(row);
    return row < rows_ ? params_.step.query_position[item_.query_begin + query] : item_.highest;
  }

  PREFIXPACK_DEVICE uint64_t hidden_of(int32_t row) const {
    const int32_t query = params_.heads.group.quotient(row);
    return row < rows_ ? params_.step.hidden[item_.query_begin + query] : 0;
  }

  PREFIXPACK_DEVICE void clear_accumulators() {
#pragma unroll
    for (int32_t block = 0; block < kRowBlocks; ++block) {
      softmax_state_[block][0] = softmax_state_[block][1] = softmax_identity();
#pragma unroll
      for (int32_t column = 0; column < kValueBlocks; ++column) {
        accumulators_[block][column][0] = accumulators_[block][column][1] = 0.0f;
        accumulators_[block][column][2] = accumulators_[block][column][3] = 0.0f;
      }
    }
  }

  // Turns the scores of a row block into softmax weights: scale, mask, online softmax.
  PREFIXPACK_DEVICE void softmax_step(int32_t tile, int32_t block, float (&scores)[kKeyBlocks][4]) {
    softmax_.transform(scores);
    if (ptx::uniform(tile < unmasked_.begin || tile >= unmasked_.end)) {
      const int32_t thread = ptx::volatile_thread_index();
      const int32_t first = begin_ + tile * TileT::kKeys + key_warp_ * TileT::kKeysPerWarp + thread % 4 * 2;
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t row = fragment_row(thread, block, half), position = position_of(row);
        mask_scores(scores, half, first, item_.kv_end, position, window_);
        if constexpr (Format::kTrees) mask_hidden(scores, half, hidden_of(row), position - first);
      }
    }
    softmax_.add(scores, softmax_state_[block], accumulators_[block]);
  }

  // Epilogue --------------------------------------------------------------------------------------------------------

  // Stores the accumulators in shared memory, over the ring. Warps that had different keys of the same rows are reduced
  // there in warp order, and rows are stored to global memory contiguously.
  PREFIXPACK_DEVICE EpilogueInputs store_accumulators() {
    const EpilogueInputs inputs = EpilogueInputs::prefetch(params_, cta_);
    const int32_t thread = ptx::volatile_thread_index(), lane = thread % 32;
    constexpr int32_t kWidth = kAccumulatorStride<TileT::kHeadDim>;
    auto* accumulators = reinterpret_cast<float*>(shared_ + TileT::accumulators().at);
#pragma unroll
    for (int32_t block = 0; block < kRowBlocks; ++block) {
      if (ptx::uniform(TileT::first_row(row_warp_, block) >= rows_)) break;
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        quad_sum(softmax_state_[block][half].sum);
        float* mine = accumulators + (key_warp_ * TileT::kRows + fragment_row(thread, block, half)) * kWidth;
        store_accumulator_row(mine, lane, accumulators_[block], half);
        if (lane % 4 == 0)
          ptx::store_pair(mine + TileT::kHeadDim, softmax_state_[block][half].max, softmax_state_[block][half].sum);
      }
    }
    ptx::cta_sync();
    return inputs;
  }
  // Stores the accumulators of one row of a row block.
  static PREFIXPACK_DEVICE void store_accumulator_row(float* row, int32_t lane, const float (&output)[kValueBlocks][4],
                                                      int32_t half) {
#pragma unroll
    for (int32_t column = 0; column < kValueBlocks; column += 2) {
      const float left[2] = {output[column][2 * half], output[column][2 * half + 1]};
      const float right[2] = {output[column + 1][2 * half], output[column + 1][2 * half + 1]};
      if constexpr (kPermutesDims<Format>) {
        ptx::store_quad(row + column * 8 + lane % 4 * 4, {left[0], right[0], left[1], right[1]});
      } else {
        ptx::store_pair(row + column * 8 + lane % 4 * 2, left[0], left[1]);
        ptx::store_pair(row + column * 8 + 8 + lane % 4 * 2, right[0], right[1]);
      }
    }
  }

  const KernelParams& params_;
  const CtaState& cta_;
  const AttentionParams& attention_;
  const ItemRecord& item_;
  const int32_t rows_, window_;
  char* const shared_;
  const ptx::SharedAddress queries_;
  const int32_t thread_, lane_, row_warp_, key_warp_;
  const int32_t begin_, keys_, num_tiles_;  // visited KV positions, in KV tiles
  const UnmaskedTiles unmasked_;
  const Softmax softmax_;
  SoftmaxState softmax_state_[kRowBlocks][2];
  float accumulators_[kRowBlocks][kValueBlocks][4];
};

}  // namespace prefixpack
