// Units for single warps: narrow work items, most of all the private tails of decode, which are many and short.
//
// A warp streams KV tiles through a ring of its own and never waits for another warp. The loading side runs ahead of
// the products into the next unit, so that memory stays busy while a unit is finished; what the next unit is (ticket,
// then record, then first slots) is asked for one step at a time, early enough to be known when it is needed.
#pragma once

#include "cuda/index_math.h"
#include "cuda/kernel_params.h"
#include "cuda/ptx.h"
#include "cuda/results.h"
#include "cuda/softmax.h"
#include "cuda/tiles.h"

namespace prefixpack {

template <class TileT, class Element>
class WarpUnits {
 public:
  // shared: TileT::kBytes of this warp's own.
  PREFIXPACK_DEVICE WarpUnits(const KernelParams& params, const char* shared)
      : params_(params),
        attention_(params.attention),
        lane_(ptx::thread_index() % 32),
        group_(params.attention.q_heads / params.attention.kv_heads),
        window_(params.attention.window_left),
        first_item_(params.plan.header().num_block_items),
        num_units_((params.plan.header().num_items - first_item_) * params.attention.kv_heads),
        k_stride_(static_cast<int32_t>(params.attention.k_slot_stride) * 2),
        v_stride_(static_cast<int32_t>(params.attention.v_slot_stride) * 2),
        queries_(ptx::shared_address(shared)),
        ring_(queries_ + TileT::kTileBytes),
        copy_to_(ring_ + swizzled(lane_ / kChunks, lane_ % kChunks, TileT::kRowBytes)),
        softmax_(params.attention) {}

  // Takes units until none is left.
  PREFIXPACK_DEVICE void run() {
    bool open = false;
    for (;;) {
      refill();
      if (tile_ == num_tiles_) {
        if (open) finish();
        open = begin_unit();
        if (!open) {
          if (stage_ == kNone) break;
          continue;
        }
      }
      wait_for_tile();
      if (tile_ == 0) begin_products();
      float scores[2][4];
      multiply_keys(scores);
      weigh(scores);
      add_values(scores);
      release_tile();
    }
  }

 private:
  static constexpr int kStages = TileT::kStages;
  static constexpr int kSteps = TileT::kHeadDim / 16;
  static constexpr int kValueBlocks = TileT::kHeadDim / 8;
  static constexpr int kChunks = TileT::kRowBytes / 16;  // lanes that copy a row
  static constexpr int kRowsPerPass = 32 / kChunks;
  static constexpr int kPasses = TileT::kKeys / kRowsPerPass;
  // Tiles before the end of a unit at which the next one is asked for: no earlier than needed, since a unit that is
  // taken early is one that no idle warp can take.
  static constexpr int kLookAhead = 4;

  // What is known of the next unit.
  enum Stage : int32_t { kUnasked, kTicket, kRecord, kReady, kNone };

  // Words of an ItemRecord, as the lanes hold them.
  enum Word : int32_t {
    kQueryBegin,
    kQueryCount,
    kKvBegin,
    kKvEnd,
    kLowest,
    kHighest,
    kSlotBegin,
    kMergeBegin,
    kSlotsAt
  };
  PREFIXPACK_DEVICE static int32_t word(int32_t record, Word which) { return ptx::shuffle(record, which); }

  // The loading side ------------------------------------------------------------------------------------------------

  // Fills the ring as far as what is to be loaded is known.
  PREFIXPACK_DEVICE void refill() {
    if (load_tiles_ - load_tile_ <= kLookAhead) look_ahead();
    while (in_flight_ < kStages) {
      if (load_tile_ == load_tiles_) {
        if (has_upcoming_ || stage_ != kReady) break;
        enter_next();
      }
      load_tile();
    }
  }

  PREFIXPACK_DEVICE void look_ahead() {
    if (stage_ == kUnasked) {
      ticket_ = lane_ == 0 ? ptx::atomic_add(&params_.step.tickets[1], 1) : 0;
      stage_ = kTicket;
    } else if (stage_ == kTicket) {
      const int32_t ticket = ptx::shuffle(ticket_, 0);
      stage_ = kNone;
      if (ticket < num_units_) {
        const Unit unit = unit_of(ticket, attention_.kv_heads);
        next_kv_head_ = unit.kv_head;
        const auto* record = reinterpret_cast<const int32_t*>(params_.step.items + first_item_ + unit.item);
        next_record_ = lane_ < kRecordWords ? record[lane_] : 0;
        stage_ = kRecord;
      }
    } else if (stage_ == kRecord) {
      const int32_t kv_begin = word(next_record_, kKvBegin), kv_end = word(next_record_, kKvEnd);
      const int32_t begin = first_read(kv_begin, kv_end, word(next_record_, kLowest), window_, TileT::kKeys);
      next_slots_ = params_.step.kv_slots + word(next_record_, kSlotsAt) + (begin - kv_begin) + lane_;
      next_keys_ = kv_end - begin;
      next_pair_ = lane_ < next_keys_ ? next_slots_[0] : -1;
      const int32_t query_begin = word(next_record_, kQueryBegin), rows = word(next_record_, kQueryCount) * group_;
      const Row place = row_of(lane_ < rows ? lane_ : 0, next_kv_head_, group_);
      next_token_ = lane_ < rows ? params_.plan.query_token(query_begin + place.query) : -1;
      next_head_ = place.head;
      stage_ = kReady;
    }
  }

  PREFIXPACK_DEVICE void enter_next() {
    load_slots_ = next_slots_;
    load_keys_ = next_keys_;
    load_tile_ = 0;
    load_tiles_ = (next_keys_ + TileT::kKeys - 1) / TileT::kKeys;
    pair_ = next_pair_;
    following_pair_ = lane_ + 32 < load_keys_ ? load_slots_[32] : -1;
    const int64_t chunk = lane_ % kChunks * 16;
    k_ = static_cast<const char*>(attention_.k) + next_kv_head_ * attention_.k_head_stride * 2 + chunk;
    v_ = static_cast<const char*>(attention_.v) + next_kv_head_ * attention_.v_head_stride * 2 + chunk;
    upcoming_record_ = next_record_;
    upcoming_kv_head_ = next_kv_head_;
    has_upcoming_ = true;
    stage_ = kUnasked;
    load_queries();
  }

  // In the group of the unit's first tile. The queries before them are in registers by now.
  PREFIXPACK_DEVICE void load_queries() const {
    const int64_t mine = next_token_ * attention_.q_token_stride + next_head_ * attention_.q_head_stride;
    const auto* q = static_cast<const uint16_t*>(attention_.q) + lane_ % kChunks * 8;
#pragma unroll 2
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t row = pass * kRowsPerPass + lane_ / kChunks;
      const bool valid = ptx::shuffle(next_token_, row) >= 0;
      const int64_t offset = ptx::shuffle(mine, row);
      ptx::copy_async(queries_ + swizzled(row, lane_ % kChunks, TileT::kRowBytes), q + (valid ? offset : 0), valid);
    }
  }

  PREFIXPACK_DEVICE void load_tile() {
    const ptx::SharedAddress to = copy_to_ + load_place_;
    const int32_t first_lane = load_tile_ % 2 * TileT::kKeys + lane_ / kChunks;
    if ((load_tile_ + 1) * TileT::kKeys <= load_keys_) {
      load_rows<true>(to, first_lane);
    } else {
      load_rows<false>(to, first_lane);
    }
    ptx::copy_commit();
    if (load_tile_ % 2 == 1) {
      pair_ = following_pair_;
      const int32_t key = (load_tile_ + 3) * TileT::kKeys;
      following_pair_ = key + lane_ < load_keys_ ? load_slots_[key] : -1;
    }
    ++load_tile_;
    ++in_flight_;
    load_place_ = load_place_ == (kStages - 1) * 2 * TileT::kTileBytes ? 0 : load_place_ + 2 * TileT::kTileBytes;
  }

  // Rows beyond the end are zeros.
  template <bool kWhole>
  PREFIXPACK_DEVICE void load_rows(ptx::SharedAddress to, int32_t first_lane) const {
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      constexpr int32_t kMixed = 8 / kRowsPerPass;  // passes after which the swizzle repeats
      const ptx::SharedAddress place = (to ^ static_cast<ptx::SharedAddress>(pass % kMixed * kRowsPerPass << 4)) +
                                       pass * kRowsPerPass * TileT::kRowBytes;
      const int32_t slot = ptx::shuffle(pair_, first_lane + pass * kRowsPerPass);
      if constexpr (kWhole) {
        ptx::copy_async(place, k_ + int64_t{slot} * k_stride_);
        ptx::copy_async(place + TileT::kTileBytes, v_ + int64_t{slot} * v_stride_);
      } else {
        const bool valid = slot >= 0;
        ptx::copy_async(place, k_ + int64_t{valid ? slot : 0} * k_stride_, valid);
        ptx::copy_async(place + TileT::kTileBytes, v_ + int64_t{valid ? slot : 0} * v_stride_, valid);
      }
    }
  }

  // The products' side ----------------------------------------------------------------------------------------------

  PREFIXPACK_DEVICE bool begin_unit() {
    num_tiles_ = tile_ = 0;
    if (!has_upcoming_) return false;
    has_upcoming_ = false;
    record_ = upcoming_record_;
    kv_head_ = upcoming_kv_head_;
    kv_end_ = word(record_, kKvEnd);
    lowest_ = word(record_, kLowest);
    rows_ = word(record_, kQueryCount) * group_;
    tile_begin_ = first_read(word(record_, kKvBegin), kv_end_, lowest_, window_, TileT::kKeys);
    num_tiles_ = (kv_end_ - tile_begin_ + TileT::kKeys - 1) / TileT::kKeys;
    return true;
  }

  // Makes the oldest tile in flight readable.
  PREFIXPACK_DEVICE void wait_for_tile() const {
    if (in_flight_ == kStages) {
      ptx::copy_wait<kStages - 1>();
    } else {
      ptx::copy_wait<0>();
    }
    ptx::warp_sync();
  }

  PREFIXPACK_DEVICE void release_tile() {
    ptx::warp_sync();
    --in_flight_;
    ++tile_;
    tile_begin_ += TileT::kKeys;
    use_place_ = use_place_ == (kStages - 1) * 2 * TileT::kTileBytes ? 0 : use_place_ + 2 * TileT::kTileBytes;
  }

  PREFIXPACK_DEVICE static ptx::SharedAddress chunk_at(ptx::SharedAddress lane_address, int32_t chunk) {
    return lane_address ^ static_cast<ptx::SharedAddress>(chunk << 4);
  }

  PREFIXPACK_DEVICE void begin_products() {
    const ptx::SharedAddress queries = queries_ + swizzled(lane_ % 16, lane_ / 16, TileT::kRowBytes);
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) ptx::load_matrix(query_[step], chunk_at(queries, 2 * step));
    state_[0] = state_[1] = softmax_start();
#pragma unroll
    for (int32_t column = 0; column < kValueBlocks; ++column) {
      output_[column][0] = output_[column][1] = output_[column][2] = output_[column][3] = 0.0f;
    }
  }

  // Two chains of products per block of keys, since each product waits for the one before it in its chain.
  PREFIXPACK_DEVICE void multiply_keys(float (&scores)[2][4]) const {
    float odd[2][4];
#pragma unroll
    for (int32_t i = 0; i < 8; ++i) scores[i / 4][i % 4] = odd[i / 4][i % 4] = 0.0f;
    const ptx::SharedAddress keys =
        ring_ + use_place_ + swizzled(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2, TileT::kRowBytes);
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      uint32_t key[4];
      ptx::load_matrix(key, chunk_at(keys, 2 * step));
      ptx::multiply<Element>(step % 2 == 0 ? scores[0] : odd[0], query_[step], key[0], key[1]);
      ptx::multiply<Element>(step % 2 == 0 ? scores[1] : odd[1], query_[step], key[2], key[3]);
    }
#pragma unroll
    for (int32_t i = 0; i < 8; ++i) scores[i / 4][i % 4] += odd[i / 4][i % 4];
  }

  PREFIXPACK_DEVICE void weigh(float (&scores)[2][4]) {
    softmax_.transform(scores);
    const bool partly_hidden = tile_begin_ + TileT::kKeys > kv_end_ || tile_begin_ + TileT::kKeys - 1 > lowest_ ||
                               window_ >= 0;
    if (partly_hidden) {
      const int32_t highest = word(record_, kHighest), query_begin = word(record_, kQueryBegin);
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t row = half * 8 + lane_ / 4;
        int32_t position = highest;
        if (lowest_ != highest && row < rows_) {
          position = params_.step.query_position[query_begin + row / group_];
        }
        hide(scores, half, tile_begin_ + lane_ % 4 * 2, kv_end_, position, window_);
      }
    }
    softmax_.add(scores, state_, output_);
  }

  PREFIXPACK_DEVICE void add_values(const float (&weights)[2][4]) {
    const ptx::SharedAddress values =
        ring_ + use_place_ + TileT::kTileBytes + swizzled(lane_ % 16, lane_ / 16, TileT::kRowBytes);
    uint32_t weight[4];
    pack_weights<Element>(weights, 0, weight);
#pragma unroll
    for (int32_t pair = 0; pair < kValueBlocks / 2; ++pair) {
      uint32_t value[4];
      ptx::load_matrix_transposed(value, chunk_at(values, 2 * pair));
      ptx::multiply<Element>(output_[2 * pair], weight, value[0], value[1]);
      ptx::multiply<Element>(output_[2 * pair + 1], weight, value[2], value[3]);
    }
  }

  // Results ---------------------------------------------------------------------------------------------------------

  PREFIXPACK_DEVICE void finish() {
    add_up_quad(state_[0].sum);
    add_up_quad(state_[1].sum);
    const int32_t query_begin = word(record_, kQueryBegin), queries = word(record_, kQueryCount);
    const int32_t slot_begin = word(record_, kSlotBegin), merge_begin = word(record_, kMergeBegin);
    if (slot_begin == kWriteThrough) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t row = half * 8 + lane_ / 4;
        if (row >= rows_) continue;
        const Row place = row_of(row, kv_head_, group_);
        const Normalised result = normalised(with_sink(state_[half], attention_, place.head));
        const OutputRow target = output_row(params_, query_begin + place.query, place.head);
        uint16_t* to = target.output + lane_ % 4 * 2;
#pragma unroll
        for (int32_t column = 0; column < kValueBlocks; ++column) {
          store_output<Element>(to, column * 8, output_[column][2 * half] * result.factor,
                                output_[column][2 * half + 1] * result.factor);
        }
        if (lane_ % 4 == 0) store_lse(target.lse, result.lse);
      }
      return;
    }
    // Lane i looks after query i. If all other partials of a query are there, its own need not be written.
    MergeList list{0, 0};
    int32_t* arrivals = nullptr;
    bool complete = false;
    if (lane_ < queries) {
      const int32_t merge = merge_begin + lane_;
      list = merge_list(params_.plan, merge);
      arrivals = arrivals_of(params_, merge, kv_head_);
      complete = ptx::load_acquire(arrivals) == list.count - 1;
    }
    ptx::warp_sync();
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const Normalised result = normalised(state_[half]);
      state_[half].max = result.lse;  // from here on: the row's lse and its outputs' factor applied
#pragma unroll
      for (int32_t column = 0; column < kValueBlocks; ++column) {
        output_[column][2 * half] *= result.factor;
        output_[column][2 * half + 1] *= result.factor;
      }
    }
    if (ptx::any(lane_ < queries && !complete)) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t row = half * 8 + lane_ / 4;
        const Row place = row_of(row < rows_ ? row : 0, kv_head_, group_);
        const bool unwritten = ptx::shuffle(static_cast<int32_t>(complete), place.query) == 0;
        if (row < rows_ && unwritten) write_partial(half, partial_row(attention_, slot_begin + place.query, place.head));
      }
      ptx::fence();
      ptx::warp_sync();
      if (lane_ < queries && !complete) {
        complete = ptx::atomic_add(arrivals, 1) == list.count - 1;
        ptx::fence();
      }
      ptx::warp_sync();
    }
    if (ptx::any(complete)) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const int32_t row = half * 8 + lane_ / 4;
        const Row place = row_of(row < rows_ ? row : 0, kv_head_, group_);
        const bool mine = ptx::shuffle(static_cast<int32_t>(complete), place.query) != 0;
        const MergeList partials{ptx::shuffle(list.first, place.query), ptx::shuffle(list.count, place.query)};
        if (row < rows_ && mine) {
          merge(half, slot_begin + place.query, query_begin + place.query, place.head, partials);
        }
      }
      if (complete) *arrivals = 0;
    }
  }

  PREFIXPACK_DEVICE void write_partial(int32_t half, PartialRow target) const {
    float* to = target.output + lane_ % 4 * 2;
#pragma unroll
    for (int32_t column = 0; column < kValueBlocks; ++column) {
      ptx::store_pair(to + column * 8, output_[column][2 * half], output_[column][2 * half + 1]);
    }
    if (lane_ % 4 == 0) *target.lse = state_[half].max;
  }

  // The row's partials and its own sums, which need not be in memory.
  PREFIXPACK_DEVICE void merge(int32_t half, int32_t own_slot, int32_t query, int32_t head, MergeList list) const {
    float sums[kValueBlocks][2];
#pragma unroll
    for (int32_t column = 0; column < kValueBlocks; ++column) sums[column][0] = sums[column][1] = 0.0f;
    SoftmaxState state = softmax_start();
    int32_t next_slot = params_.plan.merge_slot(list.first);
    for (int32_t at = 1; at <= list.count; ++at) {
      const int32_t slot = next_slot;
      if (at < list.count) next_slot = params_.plan.merge_slot(list.first + at);
      float partials[kValueBlocks][2];
      float lse = state_[half].max;
      if (slot == own_slot) {
#pragma unroll
        for (int32_t column = 0; column < kValueBlocks; ++column) {
          partials[column][0] = output_[column][2 * half];
          partials[column][1] = output_[column][2 * half + 1];
        }
      } else {
        const PartialRow partial = partial_row(attention_, slot, head);
        const float* from = partial.output + lane_ % 4 * 2;
        lse = ptx::load_shared_result(partial.lse);
#pragma unroll
        for (int32_t column = 0; column < kValueBlocks; ++column) {
          ptx::load_shared_result(from + column * 8, partials[column][0], partials[column][1]);
        }
      }
      const MergeFactors factors = merge_partial(state, lse);
#pragma unroll
      for (int32_t column = 0; column < kValueBlocks; ++column) {
        sums[column][0] = ptx::fma(factors.add, partials[column][0], sums[column][0] * factors.keep);
        sums[column][1] = ptx::fma(factors.add, partials[column][1], sums[column][1] * factors.keep);
      }
    }
    const Normalised result = normalised(with_sink(state, attention_, head));
    const OutputRow target = output_row(params_, query, head);
    uint16_t* to = target.output + lane_ % 4 * 2;
#pragma unroll
    for (int32_t column = 0; column < kValueBlocks; ++column) {
      store_output<Element>(to, column * 8, sums[column][0] * result.factor, sums[column][1] * result.factor);
    }
    if (lane_ % 4 == 0) store_lse(target.lse, result.lse);
  }

  const KernelParams& params_;
  const AttentionParams& attention_;
  const int32_t lane_, group_, window_, first_item_, num_units_;
  const int32_t k_stride_, v_stride_;  // bytes
  const ptx::SharedAddress queries_, ring_, copy_to_;
  const Softmax softmax_;

  // Next unit.
  Stage stage_ = kUnasked;
  int32_t ticket_ = 0, next_record_ = 0, next_kv_head_ = 0, next_keys_ = 0, next_pair_ = 0;
  int32_t next_token_ = 0, next_head_ = 0;  // of the row that is this lane's number; token -1: no such row
  const int32_t* next_slots_ = nullptr;

  // Unit that is being loaded.
  int32_t load_tile_ = 0, load_tiles_ = 0, load_keys_ = 0;
  const int32_t* load_slots_ = nullptr;    // of this lane
  const char *k_ = nullptr, *v_ = nullptr;  // of this lane's chunk
  int32_t pair_ = 0, following_pair_ = 0;  // this lane's slot of the pair of tiles at load_tile_, and of the next pair
  bool has_upcoming_ = false;              // it is not yet the unit below
  int32_t upcoming_record_ = 0, upcoming_kv_head_ = 0;

  // Ring, places in bytes.
  int32_t load_place_ = 0, use_place_ = 0, in_flight_ = 0;

  // Unit that is being computed.
  int32_t record_ = 0, kv_head_ = 0, tile_begin_ = 0, kv_end_ = 0, lowest_ = 0, rows_ = 0, tile_ = 0, num_tiles_ = 0;
  uint32_t query_[kSteps][4];
  SoftmaxState state_[2];
  float output_[kValueBlocks][4];
};

}  // namespace prefixpack
