// The rows of a warp's unit: their running sums, and where these go when the unit is done.
#pragma once

#include "cuda/index_math.h"
#include "cuda/kernel_params.h"
#include "cuda/ptx.h"
#include "cuda/results.h"
#include "cuda/softmax.h"

namespace prefixpack {

template <class TileT, class Element>
class WarpRows {
 protected:
  static constexpr int kSteps = TileT::kHeadDim / 16;

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

  PREFIXPACK_DEVICE WarpRows(const KernelParams& params, const PlanHeader& header)
      : params_(params),
        attention_(params.attention),
        plan_{params.plan.words, &header},
        lane_(ptx::thread_index() % 32),
        group_(params.attention.q_heads / params.attention.kv_heads) {}

  PREFIXPACK_DEVICE void start_sums() {
    state_[0] = state_[1] = softmax_start();
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      output_[step][0] = output_[step][1] = output_[step][2] = output_[step][3] = 0.0f;
    }
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
  const int32_t lane_, group_;

  // Unit that is being computed. query_, token_: of the row that is this lane's number.
  int32_t record_ = 0, kv_head_ = 0, query_ = 0, token_ = 0, rows_ = 0;
  int32_t list_begin_ = 0, list_end_ = 0;  // this lane's query's entries of merge_slot
  int32_t list_slots_ = 0;                 // entry of merge_slot that is this lane's number, from the item's first on
  SoftmaxState state_[2];
  // output_[step][i]: dimension step * 16 + i / 2 * 8 + lane / 4 of query row lane % 4 * 2 + i % 2.
  float output_[kSteps][4];
};

}  // namespace prefixpack
