// Units for single warps: narrow work items, most of all the private tails of decode, which are many and short.
//
// A warp streams KV through a ring of its own, in pieces that are the K or the V of a tile, and never waits for another
// warp. The loading side runs ahead of the products into the next unit, so that memory stays busy while a unit is
// finished; what the next unit is (ticket, then record, then first slots) is asked for one step at a time, early enough
// to be known when it is needed.
//
// Products are transposed: keys, then value dimensions are the sixteen rows of an mma, and the queries its eight
// columns. The few rows that a decode tail has would leave most of a tile of sixteen query rows empty.
#pragma once

#include <cstddef>

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/online_softmax.cuh"
#include "cuda/kernel/warp_tile.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

template <class TileT, class Format>
class WarpUnits : WarpRows<TileT, Format> {
  using Rows = WarpRows<TileT, Format>;

 public:
  // shared: kWarpBytes of this warp's own.
  PREFIXPACK_DEVICE WarpUnits(const KernelParams& params, const char* shared)
      : Rows(params),
        window_(params.attention.window_left),
        first_item_(header(offsetof(PlanHeader, num_block_items))),
        num_units_((header(offsetof(PlanHeader, num_items)) - first_item_) * params.heads.units.number),
        queries_(ptx::shared_address(shared)),
        softmax_(params.attention) {}

  PREFIXPACK_DEVICE int32_t count() const { return num_units_; }
  // Warps of a block that take units.
  PREFIXPACK_DEVICE int32_t active() const { return header(offsetof(PlanHeader, active_warps)); }

  // Takes units until none is left. ticket: of the first unit, in the first lane.
  PREFIXPACK_DEVICE void run(int32_t ticket) {
    ticket_ = ticket;
    forget_products();
    for (;;) {
      refill();
      if (piece_ == num_pieces_ && !begin_unit()) {
        if (stage_ == kNone) return;
        continue;
      }
      wait_for_piece();
      if (piece_ % 2 == 0) {
        if (piece_ == 0) begin_products();
        multiply_keys();
        weigh();
      } else {
        add_values();
        ptx::warp_sync();
        if (piece_ + 1 == num_pieces_) {
          finish(TileT::kSumsInPiece ? ring() + use_place_ : ring() + kRingBytes);
          forget_products();
        }
      }
      release_piece();
    }
  }

 private:
  using Rows::ask_for_merge_lists;
  using Rows::attention_;
  using Rows::finish;
  using Rows::group_;
  using Rows::head_shift;
  using Rows::header;
  using Rows::kHighest;
  using Rows::kKvBegin;
  using Rows::kKvEnd;
  using Rows::kKvHead;
  using Rows::kLowest;
  using Rows::kQueryBegin;
  using Rows::kQueryCount;
  using Rows::kSlotBegin;
  using Rows::kSlotsAt;
  using Rows::kSteps;
  using Rows::kUnitHead;
  using Rows::lane_;
  using Rows::output_;
  using Rows::params_;
  using Rows::query_;
  using Rows::record_;
  using Rows::start_sums;
  using Rows::state_;
  using Rows::token_of_row;
  using Rows::word;

  using Product = typename Format::Product;
  static constexpr int kPieces = TileT::kPieces;
  static constexpr int kRingBytes = kPieces * TileT::kPieceBytes;
  static constexpr int kChunks = TileT::kRowBytes / 16;  // lanes that copy a row
  static constexpr int kRowsPerPass = 32 / kChunks;
  static constexpr int kPasses = TileT::kKeys / kRowsPerPass;
  static constexpr int kQueryChunks = TileT::kQueryRowBytes / 16;
  static constexpr int kStepsAtOnce = Format::kStepsAtOnce;
  static constexpr int kLoads = kSteps / kStepsAtOnce;  // of matrices, for all dimensions
  // Pieces before the end of a unit at which the next one is asked for: no earlier than needed, since a unit that is
  // taken early is one that no idle warp can take.
  static constexpr uint32_t kLookAhead = 4;

  // What is known of the next unit.
  enum Stage : int32_t { kUnasked, kTicket, kRecord, kReady, kNone };

  // Of at least one tile, of which nothing is visible where the window has left the whole item behind.
  PREFIXPACK_DEVICE static uint32_t pieces_of(int32_t keys) {
    return keys > 0 ? (static_cast<uint32_t>(keys) + TileT::kKeys - 1) / TileT::kKeys * 2 : 2;
  }

  // The loading side ------------------------------------------------------------------------------------------------

  // Fills the ring as far as what is to be loaded is known.
  PREFIXPACK_DEVICE void refill() {
    if (load_pieces_ - load_piece_ <= kLookAhead) look_ahead();
#pragma unroll 1
    while (in_flight_ < kPieces) {
      if (load_piece_ == load_pieces_) {
        if (has_upcoming_ || stage_ != kReady) break;
        enter_next();
      }
      load_piece();
    }
  }

  PREFIXPACK_DEVICE void look_ahead() {
    if (stage_ == kUnasked) {
      ticket_ = lane_ == 0 ? ptx::count_up(&params_.step.tickets[1]) : 0;
      stage_ = kTicket;
    } else if (stage_ == kTicket) {
      const int32_t ticket = ptx::broadcast(ticket_, 0);
      stage_ = kNone;
      if (ticket < num_units_) {
        const Unit unit = unit_of(ticket, params_.heads.units);
        const auto* record = reinterpret_cast<const int32_t*>(params_.step.items + first_item_ + unit.item);
        const int32_t head = lane_ == kUnitHead ? unit.head : unit.head >> head_shift();
        next_record_ = lane_ < kRecordWords ? record[lane_] : head;
        stage_ = kRecord;
      }
    } else if (stage_ == kRecord) {
      const int32_t kv_begin = word(next_record_, kKvBegin), kv_end = word(next_record_, kKvEnd);
      const int32_t begin = first_read(kv_begin, kv_end, word(next_record_, kLowest), window_, TileT::kKeys);
      next_slots_ = word(next_record_, kSlotsAt) + (begin - kv_begin) + lane_;
      next_keys_ = kv_end - begin;
      next_pair_ = lane_ < next_keys_ ? params_.step.kv_slots[next_slots_] : -1;
      next_token_ = token_of_row(next_record_);
      stage_ = kReady;
    }
  }

  // The record and the token as of this place: a compiler that asks them for the lane's part ahead of the loop round
  // this would let every piece wait for them.
  PREFIXPACK_DEVICE void enter_next() {
    const int32_t record = ptx::here(next_record_), token = ptx::here(next_token_);
    load_slots_ = next_slots_;
    load_keys_ = next_keys_;
    load_piece_ = 0;
    load_pieces_ = pieces_of(load_keys_);
    pair_ = next_pair_;
    following_pair_ = lane_ + 32 < load_keys_ ? params_.step.kv_slots[load_slots_ + 32] : -1;
    load_record_ = record;
    const int64_t head = word(record, kKvHead);
    load_k_ = static_cast<const char*>(attention_.k) + head * attention_.k_head_stride * Format::kKvBytes +
              lane_ % kChunks * 16;
    load_v_ = static_cast<const char*>(attention_.v) + head * attention_.v_head_stride * Format::kKvBytes +
              lane_ % kChunks * 16;
    has_upcoming_ = true;
    stage_ = kUnasked;
    load_queries(token);
  }

  // In the group of the unit's first piece; the queries of the unit before are in registers by now. Rows that the unit
  // has not are left as they are: a column of the products knows nothing of the others.
  PREFIXPACK_DEVICE void load_queries(int32_t token) const {
    const int32_t head = word(load_record_, kUnitHead) * group_ + lane_ - query_ * group_;
    const int64_t mine = token < 0 ? -1 : token * attention_.q_token_stride + head * attention_.q_head_stride;
    const int32_t rows = word(load_record_, kQueryCount) * group_;
    const int32_t chunk = lane_ % kQueryChunks;
    const auto* q = static_cast<const uint16_t*>(attention_.q) + chunk * 8;
#pragma unroll 1
    for (int32_t first = 0; first < rows; first += 32 / kQueryChunks) {
      const int32_t row = first + lane_ / kQueryChunks;
      const int64_t offset = ptx::shuffle(mine, row);
      if (offset >= 0) ptx::copy_async(queries_ + swizzled(row, chunk, TileT::kQueryRowBytes), q + offset);
    }
  }

  PREFIXPACK_DEVICE void load_piece() {
    const bool is_value = load_piece_ % 2 == 1;
    const char* from = is_value ? load_v_ : load_k_;
    const auto stride =
        static_cast<int32_t>(is_value ? attention_.v_slot_stride : attention_.k_slot_stride) * Format::kKvBytes;
    const int32_t load_place = use_place_ + in_flight_ * TileT::kPieceBytes;
    const ptx::SharedAddress to = ring() + (load_place < kRingBytes ? load_place : load_place - kRingBytes) +
                                  swizzled(lane_ / kChunks, lane_ % kChunks, TileT::kRowBytes);
    if (static_cast<int32_t>((load_piece_ / 2 + 1) * TileT::kKeys) <= load_keys_) {
      copy_rows<true>(to, from, stride);
    } else {
      copy_rows<false>(to, from, stride);
    }
    ptx::copy_commit();
    if (load_piece_ % 4 == 3) {
      pair_ = following_pair_;
      const auto key = static_cast<int32_t>((load_piece_ / 4 + 2) * 32);
      following_pair_ = key + lane_ < load_keys_ ? params_.step.kv_slots[load_slots_ + key] : -1;
    }
    ++load_piece_;
    ++in_flight_;
  }

  // Rows beyond the end are zeros: values that nobody sees must still not be NaN.
  template <bool kWhole>
  PREFIXPACK_DEVICE void copy_rows(ptx::SharedAddress to, const char* from, int32_t stride) const {
    const auto first_lane = static_cast<int32_t>(load_piece_ / 2 % 2 * TileT::kKeys) + lane_ / kChunks;
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t mix = chunk_mix(pass * kRowsPerPass, TileT::kRowBytes);
      const ptx::SharedAddress place =
          (to ^ static_cast<ptx::SharedAddress>(mix << 4)) + pass * kRowsPerPass * TileT::kRowBytes;
      const int32_t slot = ptx::shuffle(pair_, first_lane + pass * kRowsPerPass);
      if constexpr (kWhole) {
        ptx::copy_async(place, ptx::at(from, slot, stride));
      } else {
        ptx::copy_async(place, ptx::at(from, slot >= 0 ? slot : 0, stride), slot >= 0);
      }
    }
  }

  // The products' side ----------------------------------------------------------------------------------------------

  PREFIXPACK_DEVICE bool begin_unit() {
    num_pieces_ = piece_ = 0;
    if (!has_upcoming_) return false;
    has_upcoming_ = false;
    record_ = load_record_;
    const int32_t kv_end = word(record_, kKvEnd);
    tile_begin_ = first_read(word(record_, kKvBegin), kv_end, word(record_, kLowest), window_, TileT::kKeys);
    num_pieces_ = pieces_of(kv_end - tile_begin_);
    ask_for_merge_lists();
    return true;
  }

  // Makes the oldest piece in flight readable.
  PREFIXPACK_DEVICE void wait_for_piece() const {
    if (in_flight_ == kPieces) {
      ptx::copy_wait<kPieces - 1>();
    } else if (in_flight_ >= 3) {
      ptx::copy_wait<2>();
    } else if (in_flight_ == 2) {
      ptx::copy_wait<1>();
    } else {
      ptx::copy_wait<0>();
    }
    ptx::warp_sync();
  }

  PREFIXPACK_DEVICE void release_piece() {
    ptx::warp_sync();
    --in_flight_;
    ++piece_;
    use_place_ = use_place_ == kRingBytes - TileT::kPieceBytes ? 0 : use_place_ + TileT::kPieceBytes;
  }

  // Rows of a tile start where the address bits of the swizzle are zero: it is an exclusive or with the address.
  PREFIXPACK_DEVICE static ptx::SharedAddress chunk_at(ptx::SharedAddress lane_address, int32_t chunk) {
    return lane_address ^ static_cast<ptx::SharedAddress>(chunk << 4);
  }

  PREFIXPACK_DEVICE void begin_products() {
    if constexpr (kDimensionsMoved<Format>) {
#pragma unroll
      for (int32_t step = 0; step < kSteps; ++step) {
        uint32_t words[2];
        ptx::load_shared(
            queries_ + swizzled(lane_ / 4, step * 2 + lane_ % 4 / 2, TileT::kQueryRowBytes) + lane_ % 2 * 8, words);
#pragma unroll
        for (int32_t i = 0; i < 2; ++i) queries_of_[step / 2][step % 2 * 2 + i] = Format::Output::to_float16(words[i]);
      }
    } else {
      const ptx::SharedAddress queries = queries_ + swizzled(lane_ % 8, lane_ / 8, TileT::kQueryRowBytes);
#pragma unroll
      for (int32_t pair = 0; pair < kSteps / 2; ++pair)
        ptx::load_matrix(queries_of_[pair], chunk_at(queries, 4 * pair));
    }
  }

  // At the end of a unit, so that finishing it has the registers.
  PREFIXPACK_DEVICE void forget_products() {
    start_sums();
#pragma unroll
    for (int32_t i = 0; i < kSteps * 2; ++i) queries_of_[i / 4][i % 4] = 0;
  }

  // scores_[i]: key lane / 4 + i / 2 * 8, query row lane % 4 * 2 + i % 2. Several chains of products, since each
  // product waits for the one before it in its chain.
  PREFIXPACK_DEVICE void multiply_keys() {
    constexpr int kChains = 4;
    float sums[kChains][4] = {};
    const ptx::SharedAddress keys = ring() + use_place_ + swizzled(lane_ % 16, lane_ / 16, TileT::kRowBytes);
#pragma unroll
    for (int32_t load = 0; load < kLoads; ++load) {
      uint32_t loaded[4];
      ptx::load_matrix(loaded, chunk_at(keys, 2 * load));
#pragma unroll
      for (int32_t i = 0; i < kStepsAtOnce; ++i) {
        uint32_t key[4];
        Format::keys_as_rows(loaded, i, key);
        const int32_t step = load * kStepsAtOnce + i;
        const uint32_t (&query)[4] = queries_of_[step / 2];
        ptx::multiply<Product>(sums[step % kChains], key, query[step % 2 * 2], query[step % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) scores_[i] = (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
  }

  PREFIXPACK_DEVICE void weigh() {
    softmax_.transform(scores_);
    const int32_t kv_end = word(record_, kKvEnd), lowest = word(record_, kLowest);
    if (tile_begin_ + TileT::kKeys > kv_end || tile_begin_ + TileT::kKeys - 1 > lowest || window_ >= 0) {
      int32_t position[2];
      position[0] = position[1] = word(record_, kHighest);
      const int32_t query_begin = word(record_, kQueryBegin), last = word(record_, kQueryCount) - 1;
      if (lowest != position[0]) {
#pragma unroll
        for (int32_t j = 0; j < 2; ++j) {
          const int32_t query = ptx::shuffle(query_, lane_ % 4 * 2 + j);
          position[j] = params_.step.query_position[query_begin + (query < last ? query : last)];
        }
      }
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) {
        const int32_t kv_position = tile_begin_ + lane_ / 4 + i / 2 * 8;
        if (kv_position >= kv_end || !visible(kv_position, position[i % 2], window_)) scores_[i] = kMinusInfinity;
      }
    }
    softmax_.add_columns(scores_, state_, output_);
    tile_begin_ += TileT::kKeys;
  }

  PREFIXPACK_DEVICE void add_values() {
    const uint32_t low = ptx::transpose(Product::pack(scores_[0], scores_[1]));
    const uint32_t high = ptx::transpose(Product::pack(scores_[2], scores_[3]));
    const ptx::SharedAddress values =
        ring() + use_place_ + swizzled(lane_ / 16 * 8 + lane_ % 8, lane_ / 8 % 2, TileT::kRowBytes);
#pragma unroll
    for (int32_t load = 0; load < kLoads; ++load) {
      uint32_t loaded[4];
      ptx::load_matrix_transposed(loaded, chunk_at(values, 2 * load));
#pragma unroll
      for (int32_t i = 0; i < kStepsAtOnce; ++i) {
        uint32_t value[4];
        Format::values_as_rows(loaded, i, value);
        ptx::multiply<Product>(output_[load * kStepsAtOnce + i], value, low, high);
      }
    }
  }

  PREFIXPACK_DEVICE ptx::SharedAddress ring() const { return queries_ + TileT::kQueryBytes; }

  const int32_t window_, first_item_, num_units_;
  const ptx::SharedAddress queries_;
  const Softmax softmax_;

  // Next unit. Slots: where this lane's first is in the step's.
  Stage stage_ = kTicket;
  int32_t ticket_ = 0, next_record_ = 0, next_keys_ = 0, next_slots_ = 0, next_pair_ = 0;
  int32_t next_token_ = 0;  // of the row that is this lane's number

  // Unit that is being loaded. Pieces: K of its first tile, V of its first tile, K of its second and so on.
  int32_t load_record_ = 0, load_keys_ = 0, load_slots_ = 0;
  uint32_t load_piece_ = 0, load_pieces_ = 0;
  int32_t pair_ = 0, following_pair_ = 0;  // this lane's slot of the pair of tiles at load_piece_, and of the next pair
  const char *load_k_ = nullptr, *load_v_ = nullptr;  // of this lane's chunk
  bool has_upcoming_ = false;                         // it is not yet the unit below

  int32_t use_place_ = 0, in_flight_ = 0;  // in the ring; the place in bytes

  // Unit that is being computed.
  int32_t tile_begin_ = 0;
  uint32_t piece_ = 0, num_pieces_ = 0;
  uint32_t queries_of_[kSteps / 2][4];
  float scores_[4];  // of the tile, then its weights
};

}  // namespace prefixpack
