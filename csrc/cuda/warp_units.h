// Units for single warps: narrow work items, most of all the private tails of decode, which are many and short.
//
// A warp streams KV tiles through a ring of its own and never waits for another warp. The loading side runs ahead of
// the products into the next unit, so that memory stays busy while a unit is finished; what the next unit is (ticket,
// then record, then first slots) is asked for one step at a time, early enough to be known when it is needed.
//
// Products are transposed: keys, then value dimensions are the sixteen rows of an mma, and the queries its eight
// columns. The few rows that a decode tail has would leave most of a tile of sixteen query rows empty.
#pragma once

#include "cuda/index_math.h"
#include "cuda/kernel_params.h"
#include "cuda/ptx.h"
#include "cuda/softmax.h"
#include "cuda/tiles.h"
#include "cuda/warp_rows.h"

namespace prefixpack {

template <class TileT, class Element>
class WarpUnits : WarpRows<TileT, Element> {
  using Rows = WarpRows<TileT, Element>;

 public:
  // shared: TileT::kBytes of this warp's own. header: of the plan, near.
  PREFIXPACK_DEVICE WarpUnits(const KernelParams& params, const PlanHeader& header, const char* shared)
      : Rows(params, header),
        window_(params.attention.window_left),
        first_item_(header.num_block_items),
        num_units_((header.num_items - first_item_) * params.attention.kv_heads),
        k_stride_(static_cast<int32_t>(params.attention.k_slot_stride) * 2),
        v_stride_(static_cast<int32_t>(params.attention.v_slot_stride) * 2),
        queries_(ptx::shared_address(shared)),
        ring_(queries_ + TileT::kQueryBytes),
        copy_to_(ring_ + swizzled(lane_ / kChunks, lane_ % kChunks, TileT::kRowBytes)),
        keys_at_(ring_ + swizzled(lane_ % 16, lane_ / 16, TileT::kRowBytes)),
        values_at_(ring_ + TileT::kTileBytes + swizzled(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2, TileT::kRowBytes)),
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
      float scores[4];
      multiply_keys(scores);
      weigh(scores);
      add_values(scores);
      release_tile();
    }
  }

 private:
  using Rows::ask_for_merge_lists;
  using Rows::attention_;
  using Rows::finish;
  using Rows::group_;
  using Rows::kHighest;
  using Rows::kKvBegin;
  using Rows::kKvEnd;
  using Rows::kLowest;
  using Rows::kQueryBegin;
  using Rows::kQueryCount;
  using Rows::kSlotBegin;
  using Rows::kSlotsAt;
  using Rows::kSteps;
  using Rows::kv_head_;
  using Rows::lane_;
  using Rows::output_;
  using Rows::params_;
  using Rows::plan_;
  using Rows::query_;
  using Rows::record_;
  using Rows::rows_;
  using Rows::start_sums;
  using Rows::state_;
  using Rows::token_;
  using Rows::word;

  static constexpr int kStages = TileT::kStages;
  static constexpr int kStageBytes = 2 * TileT::kTileBytes;
  static constexpr int kChunks = TileT::kRowBytes / 16;  // lanes that copy a row
  static constexpr int kRowsPerPass = 32 / kChunks;
  static constexpr int kPasses = TileT::kKeys / kRowsPerPass;
  // Tiles before the end of a unit at which the next one is asked for: no earlier than needed, since a unit that is
  // taken early is one that no idle warp can take.
  static constexpr int kLookAhead = 4;

  // What is known of the next unit.
  enum Stage : int32_t { kUnasked, kTicket, kRecord, kReady, kNone };

  // At least one, of which nothing is visible where the window has left the whole item behind.
  PREFIXPACK_DEVICE static int32_t tiles_of(int32_t keys) {
    return keys > 0 ? (keys + TileT::kKeys - 1) / TileT::kKeys : 1;
  }

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
      next_query_ = lane_ < rows ? lane_ / group_ : 0;
      next_token_ = lane_ < rows ? plan_.query_token(query_begin + next_query_) : -1;
      stage_ = kReady;
    }
  }

  PREFIXPACK_DEVICE void enter_next() {
    load_slots_ = next_slots_;
    load_keys_ = next_keys_;
    load_tile_ = 0;
    load_tiles_ = tiles_of(next_keys_);
    pair_ = next_pair_;
    following_pair_ = lane_ + 32 < load_keys_ ? load_slots_[32] : -1;
    const int64_t chunk = lane_ % kChunks * 16;
    k_ = static_cast<const char*>(attention_.k) + next_kv_head_ * attention_.k_head_stride * 2 + chunk;
    v_ = static_cast<const char*>(attention_.v) + next_kv_head_ * attention_.v_head_stride * 2 + chunk;
    upcoming_record_ = next_record_;
    upcoming_kv_head_ = next_kv_head_;
    upcoming_query_ = next_query_;
    upcoming_token_ = next_token_;
    has_upcoming_ = true;
    stage_ = kUnasked;
    load_queries();
  }

  // In the group of the unit's first tile; the queries of the unit before are in registers by now. Rows that the unit
  // has not are left as they are: a column of the products knows nothing of the others.
  PREFIXPACK_DEVICE void load_queries() const {
    const int32_t head = next_kv_head_ * group_ + lane_ - next_query_ * group_;
    const int64_t mine = next_token_ * attention_.q_token_stride + head * attention_.q_head_stride;
    const int32_t rows = word(next_record_, kQueryCount) * group_;
    const auto* q = static_cast<const uint16_t*>(attention_.q) + lane_ % kChunks * 8;
#pragma unroll 1
    for (int32_t first = 0; first < rows; first += kRowsPerPass) {
      const int32_t row = first + lane_ / kChunks;
      const int64_t offset = ptx::shuffle(mine, row);
      if (row < rows) {
        ptx::copy_async(queries_ + swizzled(row, lane_ % kChunks, TileT::kRowBytes), q + offset);
      }
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
    load_place_ = load_place_ == (kStages - 1) * kStageBytes ? 0 : load_place_ + kStageBytes;
  }

  // Rows beyond the end are zeros: values that nobody sees must still not be NaN.
  template <bool kWhole>
  PREFIXPACK_DEVICE void load_rows(ptx::SharedAddress to, int32_t first_lane) const {
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      constexpr int32_t kMixed = 8 / kRowsPerPass;  // passes after which the swizzle repeats
      const ptx::SharedAddress place = (to ^ static_cast<ptx::SharedAddress>(pass % kMixed * kRowsPerPass << 4)) +
                                       pass * kRowsPerPass * TileT::kRowBytes;
      const int32_t slot = ptx::shuffle(pair_, first_lane + pass * kRowsPerPass);
      if constexpr (kWhole) {
        ptx::copy_async(place, ptx::at(k_, slot, k_stride_));
        ptx::copy_async(place + TileT::kTileBytes, ptx::at(v_, slot, v_stride_));
      } else {
        const bool valid = slot >= 0;
        ptx::copy_async(place, ptx::at(k_, valid ? slot : 0, k_stride_), valid);
        ptx::copy_async(place + TileT::kTileBytes, ptx::at(v_, valid ? slot : 0, v_stride_), valid);
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
    query_ = upcoming_query_;
    token_ = upcoming_token_;
    kv_end_ = word(record_, kKvEnd);
    lowest_ = word(record_, kLowest);
    rows_ = word(record_, kQueryCount) * group_;
    tile_begin_ = first_read(word(record_, kKvBegin), kv_end_, lowest_, window_, TileT::kKeys);
    num_tiles_ = tiles_of(kv_end_ - tile_begin_);
    if (word(record_, kSlotBegin) != kWriteThrough) ask_for_merge_lists();
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
    use_place_ = use_place_ == (kStages - 1) * kStageBytes ? 0 : use_place_ + kStageBytes;
  }

  // Rows of a tile start where the address bits of the swizzle are zero: it is an exclusive or with the address.
  PREFIXPACK_DEVICE static ptx::SharedAddress chunk_at(ptx::SharedAddress lane_address, int32_t chunk) {
    return lane_address ^ static_cast<ptx::SharedAddress>(chunk << 4);
  }

  PREFIXPACK_DEVICE void begin_products() {
    const ptx::SharedAddress queries = queries_ + swizzled(lane_ % 8, lane_ / 8, TileT::kRowBytes);
#pragma unroll
    for (int32_t pair = 0; pair < kSteps / 2; ++pair) ptx::load_matrix(queries_of_[pair], chunk_at(queries, 4 * pair));
    start_sums();
  }

  // scores[i]: key lane / 4 + i / 2 * 8, query row lane % 4 * 2 + i % 2. Two chains of products, since each product
  // waits for the one before it in its chain.
  PREFIXPACK_DEVICE void multiply_keys(float (&scores)[4]) const {
    float odd[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    scores[0] = scores[1] = scores[2] = scores[3] = 0.0f;
    const ptx::SharedAddress keys = keys_at_ + use_place_;
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      uint32_t key[4];
      ptx::load_matrix(key, chunk_at(keys, 2 * step));
      const uint32_t (&query)[4] = queries_of_[step / 2];
      ptx::multiply<Element>(step % 2 == 0 ? scores : odd, key, query[step % 2 * 2], query[step % 2 * 2 + 1]);
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) scores[i] += odd[i];
  }

  PREFIXPACK_DEVICE void weigh(float (&scores)[4]) {
    softmax_.transform(scores);
    if (tile_begin_ + TileT::kKeys > kv_end_ || tile_begin_ + TileT::kKeys - 1 > lowest_ || window_ >= 0) {
      int32_t position[2];
      position[0] = position[1] = word(record_, kHighest);
      const int32_t query_begin = word(record_, kQueryBegin);
      if (lowest_ != position[0]) {
#pragma unroll
        for (int32_t j = 0; j < 2; ++j) {
          const int32_t query = ptx::shuffle(query_, lane_ % 4 * 2 + j);
          position[j] = params_.step.query_position[query_begin + query];
        }
      }
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t kv_position = tile_begin_ + lane_ / 4 + i / 2 * 8;
        if (kv_position >= kv_end_ || !visible(kv_position, position[i % 2], window_)) scores[i] = kMinusInfinity;
      }
    }
    softmax_.add_columns(scores, state_, output_);
  }

  PREFIXPACK_DEVICE void add_values(const float (&weights)[4]) {
    const uint32_t low = ptx::transpose(Element::pack(weights[0], weights[1]));
    const uint32_t high = ptx::transpose(Element::pack(weights[2], weights[3]));
    const ptx::SharedAddress values = values_at_ + use_place_;
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      uint32_t value[4];
      ptx::load_matrix_transposed(value, chunk_at(values, 2 * step));
      ptx::multiply<Element>(output_[step], value, low, high);
    }
  }

  const int32_t window_, first_item_, num_units_;
  const int32_t k_stride_, v_stride_;  // bytes
  const ptx::SharedAddress queries_, ring_, copy_to_, keys_at_, values_at_;
  const Softmax softmax_;

  // Next unit.
  Stage stage_ = kUnasked;
  int32_t ticket_ = 0, next_record_ = 0, next_kv_head_ = 0, next_keys_ = 0, next_pair_ = 0;
  int32_t next_query_ = 0, next_token_ = 0;  // of the row that is this lane's number: query of the item, row of q
  const int32_t* next_slots_ = nullptr;

  // Unit that is being loaded.
  int32_t load_tile_ = 0, load_tiles_ = 0, load_keys_ = 0;
  const int32_t* load_slots_ = nullptr;     // of this lane
  const char *k_ = nullptr, *v_ = nullptr;  // of this lane's chunk
  int32_t pair_ = 0, following_pair_ = 0;   // this lane's slot of the pair of tiles at load_tile_, and of the next pair
  bool has_upcoming_ = false;               // it is not yet the unit below
  int32_t upcoming_record_ = 0, upcoming_kv_head_ = 0, upcoming_query_ = 0, upcoming_token_ = 0;

  // Ring, places in bytes.
  int32_t load_place_ = 0, use_place_ = 0, in_flight_ = 0;

  // Unit that is being computed.
  int32_t tile_begin_ = 0, kv_end_ = 0, lowest_ = 0, tile_ = 0, num_tiles_ = 0;
  uint32_t queries_of_[kSteps / 2][4];
};

}  // namespace prefixpack
