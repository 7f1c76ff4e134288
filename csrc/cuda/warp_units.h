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
#include "cuda/results.h"
#include "cuda/softmax.h"
#include "cuda/tiles.h"

namespace prefixpack {

template <class TileT, class Element>
class WarpUnits {
 public:
  // shared: TileT::kBytes of this warp's own. header: of the plan, near.
  PREFIXPACK_DEVICE WarpUnits(const KernelParams& params, const PlanHeader& header, const char* shared)
      : params_(params),
        attention_(params.attention),
        plan_{params.plan.words, &header},
        lane_(ptx::thread_index() % 32),
        group_(params.attention.q_heads / params.attention.kv_heads),
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
  static constexpr int kStages = TileT::kStages;
  static constexpr int kSteps = TileT::kHeadDim / 16;
  static constexpr int kStageBytes = 2 * TileT::kTileBytes;
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
    kMergeFirst,
    kSlotsAt
  };
  PREFIXPACK_DEVICE static int32_t word(int32_t record, Word which) { return ptx::shuffle(record, which); }

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

  // What finish() needs to know of the merges, asked for before it is needed.
  PREFIXPACK_DEVICE void ask_for_merge_lists() {
    const int32_t merge = word(record_, kMergeBegin) + lane_, first = word(record_, kMergeFirst);
    const bool mine = lane_ < word(record_, kQueryCount);  // lane i looks after query i
    list_begin_ = mine ? plan_.merge_offset(merge) : 0;
    list_end_ = mine ? plan_.merge_offset(merge + 1) : 0;
    const int32_t entries = plan_.merge_offset(plan_.header().num_merges) - first;
    list_slots_ = lane_ < entries ? plan_.merge_slot(first + lane_) : -1;
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
    state_[0] = state_[1] = softmax_start();
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      output_[step][0] = output_[step][1] = output_[step][2] = output_[step][3] = 0.0f;
    }
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

  // Results ---------------------------------------------------------------------------------------------------------
  //
  // output_[step][i]: dimension step * 16 + i / 2 * 8 + lane / 4 of query row lane % 4 * 2 + i % 2.

  PREFIXPACK_DEVICE void finish() {
    add_up_columns(state_[0].sum);
    add_up_columns(state_[1].sum);
    int32_t row[2], query[2], head[2];
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      row[j] = lane_ % 4 * 2 + j;
      query[j] = ptx::shuffle(query_, row[j]);
      head[j] = kv_head_ * group_ + row[j] - query[j] * group_;
      if (row[j] >= rows_) head[j] = 0;
    }
    const int32_t slot_begin = word(record_, kSlotBegin);
    float row_lse[2];
    if (slot_begin == kWriteThrough) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        const Normalised result = normalised_with_sink(state_[j], attention_, head[j]);
        row_lse[j] = result.lse;
        scale_row(j, result.factor);
      }
      write_output(row_lse, -1);
      return;
    }
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      const Normalised result = normalised(state_[j]);
      row_lse[j] = result.lse;
      scale_row(j, result.factor);
    }
    // If all other partials of a query are there, its own need not be written.
    const bool mine = lane_ < word(record_, kQueryCount);
    const int32_t others = list_end_ - list_begin_ - 1;
    int32_t* arrivals = arrivals_of(params_, word(record_, kMergeBegin) + (mine ? lane_ : 0), kv_head_);
    bool complete = mine && ptx::load_shared_result(arrivals) == others;
    ptx::warp_sync();
    if (ptx::any(mine && !complete)) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        const bool unwritten = ptx::shuffle(static_cast<int32_t>(complete), query[j]) == 0;
        if (row[j] < rows_ && unwritten) {
          write_partial(j, row_lse[j], partial_row(attention_, slot_begin + query[j], head[j]));
        }
      }
      ptx::warp_sync();
      if (mine && !complete) complete = ptx::atomic_add_release(arrivals, 1) == others;
      ptx::warp_sync();
    }
    if (ptx::any(complete)) {
#pragma unroll
      for (int32_t j = 0; j < 2; ++j) {
        const MergeList list{ptx::shuffle(list_begin_, query[j]),
                             ptx::shuffle(list_end_, query[j]) - ptx::shuffle(list_begin_, query[j])};
        const bool merges = ptx::shuffle(static_cast<int32_t>(complete), query[j]) != 0 && row[j] < rows_;
        merge(j, slot_begin + query[j], head[j], merges, list, row_lse[j]);
      }
      write_output(row_lse, static_cast<int32_t>(complete));
      if (complete) *arrivals = 0;
    }
  }

  PREFIXPACK_DEVICE void scale_row(int32_t j, float factor) {
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      output_[step][j] *= factor;
      output_[step][2 + j] *= factor;
    }
  }

  PREFIXPACK_DEVICE void write_partial(int32_t j, float lse, PartialRow target) const {
    float* to = target.output + lane_ / 4;
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      to[step * 16] = output_[step][j];
      to[step * 16 + 8] = output_[step][2 + j];
    }
    if (lane_ < 4) *target.lse = lse;
  }

  // Rows of the queries that are flagged in lane `query` of `complete`; all if it is -1. Transposed back, so that a
  // lane has neighbours of one row.
  PREFIXPACK_DEVICE void write_output(const float (&row_lse)[2], int32_t complete) const {
    const int32_t row = lane_ / 4;
    const int32_t query = ptx::shuffle(query_, row), token = ptx::shuffle(token_, row);
    const bool written = ptx::shuffle(complete, query) != 0 && row < rows_;
    const int32_t head = kv_head_ * group_ + row - query * group_;
    auto* to = static_cast<uint16_t*>(attention_.o) + token * attention_.o_token_stride +
               head * attention_.o_head_stride + lane_ % 4 * 2;
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const uint32_t pair = ptx::transpose(Element::pack(output_[step][2 * half], output_[step][2 * half + 1]));
        if (written) *reinterpret_cast<uint32_t*>(to + step * 16 + half * 8) = pair;
      }
    }
    if (attention_.lse == nullptr) return;
    // Lane r / 2 of the first quad has row r's.
    const float even = ptx::shuffle(row_lse[0], row / 2), odd = ptx::shuffle(row_lse[1], row / 2);
    if (written && lane_ % 4 == 0) {
      attention_.lse[token * attention_.lse_token_stride + head] = (row % 2 == 0 ? even : odd) * kLn2;
    }
  }

  // The row's partials and its own sums, which need not be in memory.
  PREFIXPACK_DEVICE void merge(int32_t j, int32_t own_slot, int32_t head, bool merges, MergeList list, float& lse) {
    const int32_t first = word(record_, kMergeFirst);
    int32_t longest = merges ? list.count : 0;
    for (int32_t mask = 1; mask <= 2; mask *= 2) {
      const int32_t other = ptx::shuffle_xor(longest, mask);
      longest = other > longest ? other : longest;
    }
    const float own_lse = lse;
    const auto slot_of = [&](int32_t i) {  // called by all lanes
      const int32_t entry = list.first - first + i;
      const int32_t near = ptx::shuffle(list_slots_, entry);
      return entry < 32 || i >= list.count ? near : plan_.merge_slot(list.first + i);
    };
    const auto lse_of = [&](int32_t slot) {
      return slot == own_slot ? own_lse : ptx::load_shared_result(partial_row(attention_, slot, head).lse);
    };
    const int32_t count = merges ? list.count : 0;
    SoftmaxState state = softmax_start();
    for (int32_t begin = 0; begin < longest; begin += kMergeLanes) {
      const int32_t i = begin + lane_ / 4;
      const int32_t slot = slot_of(i);
      if (i < count) state = with_partial(state, lse_of(slot));
    }
    ptx::warp_sync();
    const MergeWeights weights = merge_weights(
        attention_, head, state, [](float value, int32_t mask) { return ptx::shuffle_xor(value, 4 * mask); });
    float sums[kSteps][2];
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) sums[step][0] = sums[step][1] = 0.0f;
    for (int32_t begin = 0; begin < longest; begin += kMergeAtOnceByWarp) {
      float weight[kMergeAtOnceByWarp], partials[kMergeAtOnceByWarp][kSteps][2];
#pragma unroll
      for (int32_t k = 0; k < kMergeAtOnceByWarp; ++k) {
        const int32_t slot = slot_of(begin + k);
        weight[k] = 0.0f;
#pragma unroll
        for (int32_t step = 0; step < kSteps; ++step) {
          partials[k][step][0] = output_[step][j];
          partials[k][step][1] = output_[step][2 + j];
        }
        if (begin + k < count) {
          weight[k] = weights.of(lse_of(slot));
          if (slot != own_slot) {
            const float* from = partial_row(attention_, slot, head).output + lane_ / 4;
#pragma unroll
            for (int32_t step = 0; step < kSteps; ++step) {
              partials[k][step][0] = ptx::load_shared_result(from + step * 16);
              partials[k][step][1] = ptx::load_shared_result(from + step * 16 + 8);
            }
          }
        }
      }
#pragma unroll
      for (int32_t k = 0; k < kMergeAtOnceByWarp; ++k) {
#pragma unroll
        for (int32_t step = 0; step < kSteps; ++step) {
          sums[step][0] = ptx::fma(weight[k], partials[k][step][0], sums[step][0]);
          sums[step][1] = ptx::fma(weight[k], partials[k][step][1], sums[step][1]);
        }
      }
    }
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      output_[step][j] = sums[step][0];
      output_[step][2 + j] = sums[step][1];
    }
    lse = weights.lse;
  }

  const KernelParams& params_;
  const AttentionParams& attention_;
  const DevicePlan plan_;
  const int32_t lane_, group_, window_, first_item_, num_units_;
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
  int32_t record_ = 0, kv_head_ = 0, query_ = 0, token_ = 0;
  int32_t tile_begin_ = 0, kv_end_ = 0, lowest_ = 0, rows_ = 0, tile_ = 0, num_tiles_ = 0;
  int32_t list_begin_ = 0, list_end_ = 0;  // this lane's query's entries of merge_slot
  int32_t list_slots_ = 0;                 // entry of merge_slot that is this lane's number, from the item's first on
  uint32_t queries_of_[kSteps / 2][4];
  SoftmaxState state_[2];
  float output_[kSteps][4];
};

}  // namespace prefixpack
