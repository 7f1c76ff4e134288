// State of the tile that a warp computes: record, softmax and accumulators; and what needs only that, the epilogue and
// the combine.
#pragma once

#include <cstddef>

#include "cuda/common/dtype_traits.cuh"
#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel/online_softmax.cuh"
#include "cuda/kernel/store_rows.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// Words of an ItemRecord; lane i holds word i.
enum RecordWord : int32_t {
  kQueryBegin,
  kQueryCount,
  kKvBegin,
  kKvEnd,
  kLowest,
  kHighest,
  kPartialBegin,
  kList,
  kListFirst,
  kKvSlotsAt,
  kParent = kRecordWords - 2,
  kGroupPartial,
  // Behind the record, lanes hold the tile's heads.
  kVirtualHead = kRecordWords,
  kKvHead
};
PREFIXPACK_DEVICE int32_t word_of(int32_t record, RecordWord which) { return ptx::broadcast(record, which); }

// A lane of a warp, and what it reads of the kernel's parameters and of the plan's header.
struct WarpLane {
  const KernelParams& params;
  const AttentionParams& attention;
  const int32_t lane;
  const int32_t heads_per_half;  // query heads of a tile
  const int32_t query;           // query, within the item, of the row that is this lane's number
  const int32_t header_word;     // word `lane` of the plan's header

  PREFIXPACK_DEVICE explicit WarpLane(const KernelParams& kernel_params)
      : params(kernel_params),
        attention(params.attention),
        lane(ptx::thread_index() % 32),
        heads_per_half(params.heads.heads_per_half.number),
        query(ptx::kept(params.heads.heads_per_half.quotient(lane))),
        header_word(lane < kPlanHeaderWords ? params.plan.words[lane] : 0) {}

  // Word of the plan's header, which the lanes hold as well: shared memory is full, and global memory is too slow for
  // what is read often. offset: of the field in PlanHeader. Called by all lanes.
  PREFIXPACK_DEVICE int32_t header(size_t offset) const {
    return ptx::broadcast(header_word, static_cast<int32_t>(offset / sizeof(int32_t)));
  }
  // The plan's array whose offset that field says.
  PREFIXPACK_DEVICE const int32_t* array(size_t offset) const { return params.plan.words + header(offset); }
  // Virtual KV head h is of KV head h >> head_shift().
  PREFIXPACK_DEVICE int32_t head_shift() const { return params.heads.halves - 1; }

  // Token of the row that is this lane's number; -1 beyond the last row.
  PREFIXPACK_DEVICE int32_t token_of_row(int32_t record) const {
    const int32_t begin = word_of(record, kQueryBegin);
    const int32_t* tokens = array(offsetof(PlanHeader, query_token_at)) + begin;
    return query < word_of(record, kQueryCount) ? tokens[query] : -1;
  }
};

template <class TileT, class Format>
class WarpTileState {
 public:
  static constexpr int kHeadDim = TileT::kHeadDim;
  static constexpr int kSteps = kHeadDim / 16;

  PREFIXPACK_DEVICE explicit WarpTileState(const WarpLane& warp) : warp_(warp) {}

  PREFIXPACK_DEVICE void clear() {
    softmax[0] = softmax[1] = softmax_identity();
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      sums[step][0] = sums[step][1] = sums[step][2] = sums[step][3] = 0.0f;
    }
  }

  PREFIXPACK_DEVICE int32_t rows() const { return word_of(record, kQueryCount) * warp_.heads_per_half; }
  PREFIXPACK_DEVICE int32_t virtual_head() const { return word_of(record, kVirtualHead); }
  // Positions of the two rows whose scores this lane has, and what is hidden from them. lowest: of the tile.
  PREFIXPACK_DEVICE void read_positions(int32_t lowest, int32_t (&position)[2], uint64_t (&hidden)[2]) const {
    position[0] = position[1] = word_of(record, kHighest);
    const int32_t query_begin = word_of(record, kQueryBegin), last = word_of(record, kQueryCount) - 1;
    if (lowest == position[0]) return;
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      const int32_t query = ptx::shuffle(warp_.query, warp_.lane % 4 * 2 + j);
      const int32_t index = query_begin + (query < last ? query : last);
      position[j] = warp_.params.step.query_position[index];
      if constexpr (Format::kTrees) hidden[j] = warp_.params.step.hidden[index];
    }
  }

  // Prefetches what epilogue() needs. Lane i handles query i.
  PREFIXPACK_DEVICE void prefetch_partial_lists() {
    token_ = warp_.token_of_row(record);
    list_begin_ = list_end_ = list_partials_ = arrived_ = 0;
    const int32_t combine = word_of(record, kList) + warp_.lane, first = word_of(record, kListFirst);
    const bool mine = warp_.lane < word_of(record, kQueryCount);
    const int32_t head = virtual_head();
    if (word_of(record, kPartialBegin) == kWriteThrough) return;
    const int32_t* offsets = warp_.array(offsetof(PlanHeader, list_offset_at));
    const int32_t* partials = warp_.array(offsetof(PlanHeader, list_partial_at));
    if (mine) {
      list_begin_ = offsets[combine];
      list_end_ = offsets[combine + 1];
      arrived_ = ptx::load_relaxed(semaphore_of(warp_.params, combine, head));
    }
    list_partials_ = partials[first + warp_.lane];
  }

  // accumulators: free shared memory, [kRows, kHeadDim] floats.
  PREFIXPACK_DEVICE void epilogue(ptx::SharedAddress accumulators) {
    const float own_lse = store_accumulators(accumulators);
    const bool mine = warp_.lane < word_of(record, kQueryCount);
    int32_t pending = mine;  // this lane's query gets a partial of this warp
#pragma unroll 1
    for (bool stored = false;; stored = true) {
      const int32_t partial_begin = word_of(record, kPartialBegin);
      int32_t complete = pending;
      if (partial_begin != kWriteThrough) {
        // If all other partials of a query have arrived, its own is not written.
        const int32_t others = list_end_ - list_begin_ - 1;
        const int32_t list = word_of(record, kList) + (mine ? warp_.lane : 0);
        int32_t* semaphores = semaphore_of(warp_.params, list, virtual_head());
        complete = pending != 0 && arrived_ == others;
        ptx::warp_sync();
        if (ptx::any(pending != complete)) {
          if (ptx::uniform(!stored)) write_partials(accumulators, own_lse, partial_begin, complete);
          ptx::warp_sync();
          if (pending != complete) complete = ptx::atomic_add_release(semaphores, 1) == others;
          ptx::warp_sync();
          if (!ptx::any(complete != 0)) return;
        }
        if (complete != 0) *semaphores = 0;
      }
      const int32_t num_rows = rows();
#pragma unroll 1
      for (int32_t first_row = 0; first_row < num_rows; first_row += kWarpCombineRows) {
        combine(accumulators, first_row, own_lse, partial_begin, complete);
      }
      if (word_of(record, kParent) < 0) return;
      begin_second_level();
      pending = complete;
    }
  }

 private:
  static constexpr int32_t kRowLanes = kHeadDim / 4;        // lanes per row, four values each
  static constexpr int32_t kRowsPerStore = 32 / kRowLanes;  // rows that the warp stores at once
  static constexpr int32_t kPasses = kWarpCombineRows / kRowsPerStore;
  static_assert(kWarpCombineRows == 32 / kCombineLanes);

  // Address of dimension `column` of row `row`, swizzled so that the stores of a fragment hit all banks.
  PREFIXPACK_DEVICE static ptx::SharedAddress accumulator_at(ptx::SharedAddress accumulators, int32_t row,
                                                             int32_t column) {
    return accumulators + (row * kHeadDim + column / 32 * 32 + ((column % 32 / 8 ^ row / 2 % 4) * 8) + column % 8) * 4;
  }

  // Stores the normalized accumulators in shared memory, from where whole rows are read. Returns the lse of row lane %
  // 8.
  PREFIXPACK_DEVICE float store_accumulators(ptx::SharedAddress accumulators) {
    float lse[2];
#pragma unroll
    for (int32_t j = 0; j < 2; ++j) {
      column_sum(softmax[j].sum);
      const FinalSoftmax result = finalize(softmax[j]);
      const float factor = result.factor * warp_.attention.v_scale;
      lse[j] = result.lse;
      const int32_t row = warp_.lane % 4 * 2 + j;
      if constexpr (kPermutesDims<Format>) {
#pragma unroll
        for (int32_t odd = 0; odd < 2; ++odd) {
          const ptx::SharedAddress to = accumulator_at(accumulators, row, odd * 16 + warp_.lane / 4 * 2);
#pragma unroll
          for (int32_t step = odd; step < kSteps; step += 2) {
            ptx::store_shared_pair(to + step / 2 * 128, sums[step][j] * factor, sums[step][2 + j] * factor);
          }
        }
      } else {
#pragma unroll
        for (int32_t eight = 0; eight < 4; ++eight) {
          const ptx::SharedAddress to = accumulator_at(accumulators, row, eight * 8 + warp_.lane / 4);
#pragma unroll
          for (int32_t step = eight / 2; step < kSteps; step += 2) {
            ptx::store_shared(to + step / 2 * 128, sums[step][eight % 2 * 2 + j] * factor);
          }
        }
      }
    }
    ptx::warp_sync();
    // Lane r / 2 of the first quad holds row r.
    const float even = ptx::shuffle(lse[0], warp_.lane % 8 / 2), odd = ptx::shuffle(lse[1], warp_.lane % 8 / 2);
    return warp_.lane % 2 == 0 ? even : odd;
  }

  PREFIXPACK_DEVICE int32_t head_of(int32_t row, int32_t query) const {
    return virtual_head() * warp_.heads_per_half + row - query * warp_.heads_per_half;
  }

  // Writes the partials of the queries that are not flagged in lane `query` of `complete`.
  PREFIXPACK_DEVICE void write_partials(ptx::SharedAddress accumulators, float own_lse, int32_t partial_begin,
                                        int32_t complete) const {
    const int32_t num_rows = rows();
    const int32_t column = warp_.lane % kRowLanes * 4;
#pragma unroll 1
    for (int32_t first = 0; first < num_rows; first += kRowsPerStore) {
      const int32_t row = first + warp_.lane / kRowLanes;
      const int32_t query = ptx::shuffle(warp_.query, row);
      const bool written = ptx::shuffle(complete, query) == 0;
      const float lse = ptx::shuffle(own_lse, row);
      const int32_t head = head_of(row, query);
      if (written && row < num_rows) {
        const PartialRow target = partial_row(warp_.attention, partial_begin + query, head);
        float quad[4];
        ptx::load_shared(accumulator_at(accumulators, row, column), quad);
        ptx::store_quad(target.output + column, quad);
        if (column == 0) *target.lse = lse;
      }
    }
  }

  // Turns to the query's own list, where the group's result is the warp's partial.
  PREFIXPACK_DEVICE void begin_second_level() {
    const int32_t parent = word_of(record, kParent);
    const int32_t first = warp_.array(offsetof(PlanHeader, list_offset_at))[parent];
    if (warp_.lane == kList) record = parent;
    if (warp_.lane == kListFirst) record = first;
    if (warp_.lane == kPartialBegin) record = kInGlobalMemory;
    if (warp_.lane == kParent) record = -1;
    prefetch_partial_lists();
  }

  // Combines kWarpCombineRows rows of the queries that are flagged in `complete`: their partials in global memory and
  // the warp's own in shared memory. Eight lanes compute the weights of a row, then kRowLanes lanes sum it. Results go
  // to the output, or, if the tile belongs to a group, to the group's partial.
  PREFIXPACK_DEVICE void combine(ptx::SharedAddress own_accumulators, int32_t first_row, float own_lse,
                                 int32_t partial_begin, int32_t complete) const {
    const int32_t row = first_row + warp_.lane / kCombineLanes;
    const int32_t query = ptx::shuffle(warp_.query, row), token = ptx::shuffle(token_, row);
    const int32_t head = head_of(row, query), own_partial = partial_begin + query;
    const float lse = ptx::shuffle(own_lse, row);
    const int32_t list_begin = ptx::shuffle(list_begin_, query), list_end = ptx::shuffle(list_end_, query);
    const bool ready = ptx::shuffle(complete, query) != 0, writes = ready && token >= 0;
    const bool writes_through = partial_begin == kWriteThrough, of_group = word_of(record, kParent) >= 0;
    const int32_t count = !writes ? 0 : writes_through ? 1 : list_end - list_begin;
    int32_t longest = count;
#pragma unroll
    for (int32_t mask = kCombineLanes; mask < 32; mask *= 2) {
      const int32_t other = ptx::shuffle_xor(longest, mask);
      longest = other > longest ? other : longest;
    }
    const int32_t first_entry = list_begin - word_of(record, kListFirst);
    const int32_t* partials = warp_.array(offsetof(PlanHeader, list_partial_at));
    // A partial of the row. index: in partial_lse, or -1 for the warp's own. Called by all lanes.
    struct Partial {
      int32_t index;
      float lse;
    };
    const auto partial_of = [&](int32_t i) {
      int32_t number = ptx::shuffle(list_partials_, first_entry + i);
      if (i >= count || writes_through) return Partial{-1, lse};
      if (first_entry + i >= 32) number = partials[list_begin + i];
      if (number == own_partial) return Partial{-1, lse};
      const int32_t index = number * warp_.attention.q_heads + head;
      return Partial{index, ptx::load_relaxed(warp_.attention.partial_lse + index)};
    };
    const int32_t column = warp_.lane % kRowLanes * 4;
    float quads[kWarpCombineBatch][kPasses][4];
    const auto load_quads = [&](Partial partial, int32_t first) {
#pragma unroll
      for (int32_t k = 0; k < kWarpCombineBatch; ++k) {
#pragma unroll
        for (int32_t pass = 0; pass < kPasses; ++pass) {
          const int32_t of_row = pass * kRowsPerStore + warp_.lane / kRowLanes;
          const int32_t index = ptx::shuffle(partial.index, of_row * kCombineLanes + first + k);
          if (index >= 0) {
            ptx::load_relaxed(warp_.attention.partial_o + int64_t{index} * kHeadDim + column, quads[k][pass]);
          } else {
            ptx::load_shared(accumulator_at(own_accumulators, first_row + of_row, column), quads[k][pass]);
          }
        }
      }
    };
    CombineWeights weights{};
    float accumulators[kPasses][4] = {};
#pragma unroll 1
    for (int32_t begin = 0; ptx::uniform(begin < longest); begin += kCombineLanes) {
      const int32_t i = begin + warp_.lane % kCombineLanes;
      const Partial partial = partial_of(i);
      float weight = 0.0f;
      const int32_t here = longest - begin < kCombineLanes ? longest - begin : kCombineLanes;
#pragma unroll 1
      for (int32_t first = 0; ptx::uniform(first < here); first += kWarpCombineBatch) {
        load_quads(partial, first);
        if (ptx::uniform(first == 0)) {
          // While the first partials are in flight; most rows have no others.
          if (ptx::uniform(begin == 0)) {
            SoftmaxState state = softmax_identity();
            if (i < count) state = add_partial(state, partial.lse);
#pragma unroll 1
            for (int32_t next = kCombineLanes; ptx::uniform(next < longest); next += kCombineLanes) {
              const int32_t j = next + warp_.lane % kCombineLanes;
              const float further = partial_of(j).lse;
              if (j < count) state = add_partial(state, further);
            }
            ptx::warp_sync();
            weights = combine_weights(warp_.attention,
                                      of_group ? kNoSink
                                      : writes ? head
                                               : 0,
                                      state, [](float value, int32_t mask) { return ptx::shuffle_xor(value, mask); });
          }
          weight = i < count ? weights.of(partial.lse) : 0.0f;
          ptx::warp_sync();
        }
#pragma unroll
        for (int32_t k = 0; k < kWarpCombineBatch; ++k) {
#pragma unroll
          for (int32_t pass = 0; pass < kPasses; ++pass) {
            const int32_t of_row = pass * kRowsPerStore + warp_.lane / kRowLanes;
            const float quad_weight = ptx::shuffle(weight, of_row * kCombineLanes + first + k);
#pragma unroll
            for (int32_t j = 0; j < 4; ++j) {
              accumulators[pass][j] = ptx::fma(quad_weight, quads[k][pass][j], accumulators[pass][j]);
            }
          }
        }
      }
    }
    if (ptx::uniform(of_group)) {
      const int32_t index = (word_of(record, kGroupPartial) + query) * warp_.attention.q_heads + head;
      if (writes && warp_.lane % kCombineLanes == 0) warp_.attention.partial_lse[index] = weights.lse;
      ptx::warp_sync();
#pragma unroll
      for (int32_t pass = 0; pass < kPasses; ++pass) {
        const int32_t of_row = pass * kRowsPerStore + warp_.lane / kRowLanes;
        const int32_t target = ptx::shuffle(writes ? index : -1, of_row * kCombineLanes);
        if (target >= 0)
          ptx::store_quad(warp_.attention.partial_o + int64_t{target} * kHeadDim + column, accumulators[pass]);
      }
      return;
    }
    if (writes && warp_.attention.lse != nullptr && warp_.lane % kCombineLanes == 0) {
      warp_.attention.lse[token * warp_.attention.lse_token_stride + head] = weights.lse * kLn2;
    }
    const int64_t mine = writes ? token * warp_.attention.o_token_stride + head * warp_.attention.o_head_stride : -1;
    ptx::warp_sync();
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int64_t offset = ptx::shuffle(mine, (pass * kRowsPerStore + warp_.lane / kRowLanes) * kCombineLanes);
      if (offset >= 0) {
        auto* to = static_cast<uint16_t*>(warp_.attention.o) + offset + column;
        using Output = typename Format::Output;
        ptx::store_words(to, Output::pack(accumulators[pass][0], accumulators[pass][1]),
                         Output::pack(accumulators[pass][2], accumulators[pass][3]));
      }
    }
  }

 public:
  // Tile being computed: lane i holds word i of its record.
  int32_t record = 0;
  SoftmaxState softmax[2];
  // sums[step][i]: dimension step * 16 + i / 2 * 8 + lane / 4 of query row lane % 4 * 2 + i % 2; permuted as
  // dtype_traits.cuh says.
  float sums[kSteps][4];

 private:
  const WarpLane warp_;
  int32_t token_ = -1;                     // of the row that is this lane's number
  int32_t list_begin_ = 0, list_end_ = 0;  // partial list of this lane's query
  int32_t list_partials_ = 0;              // entry `lane` of combine_partial from the item's first on
  int32_t arrived_ = 0;                    // partials of this lane's query that had arrived when the tile began
};

}  // namespace prefixpack
