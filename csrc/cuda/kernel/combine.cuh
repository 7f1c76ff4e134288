// How a block merges partials of its unit's queries.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/kernel/cta_state.cuh"
#include "cuda/kernel/epilogue_prefetch.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/store_rows.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// A row of a block's unit, finished: what its sums are multiplied by, and where the products go.
struct RowResult {
  void* target;  // [head_dim] of a partial, float, or, if the unit has no others, of the output
  float weights[kMaxKeyWarps];
  float lse;  // to base 2
};

// Of a query, see query_of_part.
struct QueryPart {
  int32_t token;
  MergeList list;
  bool ready;  // to be merged here
};
static_assert(sizeof(RowResult) + sizeof(QueryPart) <= kRowStateBytes, "room for each row");

// What a block has of its unit, in shared memory.
struct UnitResults {
  const RowResult* rows;
  const QueryPart* parts;
  const float* sums;  // [rows][kSumWidth] the unit's own partial
  int32_t* scratch;   // [kMergeRoom]
};

// The end of the parts from `part` on whose slots there is room for at a time: nearly always all. Called by all
// threads.
PREFIXPACK_DEVICE int32_t end_of_parts_at_once(const UnitResults& own, int32_t part, int32_t num_parts) {
  const int32_t first_entry = own.parts[part].list.first;
  int32_t end = num_parts;
#pragma unroll 1
  for (; end > part + 1; --end) {
    const MergeList& last = own.parts[end - 1].list;
    if (ptx::uniform(last.first + last.count - first_entry <= kMergeRoom)) break;
  }
  return end;
}

// Brings the slots of the partials of these parts to the scratch, for all threads that meet afterwards. The last warps
// first, since the first ones have parts to look after.
template <int HeadDim>
PREFIXPACK_DEVICE void bring_slots(const BlockState& state, const UnitResults& own, int32_t part, int32_t end) {
  constexpr int kThreads = kBlockThreads<HeadDim>;
  const MergeList& last = own.parts[end - 1].list;
  const int32_t first_entry = own.parts[part].list.first, entries = last.first + last.count - first_entry;
#pragma unroll 1
  for (int32_t entry = kThreads - 1 - ptx::thread_index_here(); entry < entries; entry += kThreads) {
    own.scratch[entry] = state.plan().merge_slot(first_entry + entry);
  }
}

// Merges those of the parts [part, end) that are ready. Slots are in the scratch.
template <int HeadDim, class Output>
PREFIXPACK_DEVICE void merge_ready(const BlockState& state, const UnitResults& own, int32_t part, int32_t end) {
  constexpr int kThreads = kBlockThreads<HeadDim>;
  const AttentionParams& attention = state.params.attention;
  const Heads& all_heads = state.params.heads;
  const int32_t thread = ptx::thread_index_here(), lane = thread % kMergeLanes;
  const int32_t group = all_heads.group.number, first_head = state.kv_head * group;
  const float* lse_of_head = attention.partial_lse + first_head;
  const int32_t partial_stride = attention.q_heads * HeadDim * static_cast<int32_t>(sizeof(float));
  const int32_t first_entry = own.parts[part].list.first;
  const int32_t heads = all_heads.of_part.number, rows = (end - part) * heads;
  // Eight lanes have a row. Whole warps go round: lanes exchange what they have read.
#pragma unroll 1
  for (int32_t begin = thread / 32 * (32 / kMergeLanes); begin < rows; begin += kThreads / kMergeLanes) {
    const int32_t row = begin + thread % 32 / kMergeLanes < rows ? begin + thread % 32 / kMergeLanes : begin;
    const int32_t of_part = part + all_heads.of_part.quotient(row), query = query_of_part(state.params, of_part);
    const int32_t in_group = part * heads + row - query * group, head = first_head + in_group;
    const QueryPart& mine = own.parts[of_part];
    const int32_t count = mine.ready ? mine.list.count : 0;
    if (!ptx::any(count > 0)) continue;
    const int32_t* slots = own.scratch + (mine.list.first - first_entry);
    const int32_t own_slot = state.item.slot_begin + query;
    const auto lse_at = [&](int32_t i) {
      if (i >= count) return kMinusInfinity;
      const int32_t slot = slots[i];
      if (slot == own_slot) return own.rows[query * group + in_group].lse;
      return ptx::load_shared_result(lse_of_head + int64_t{slot} * attention.q_heads + in_group);
    };
    const auto* partials_of_row = reinterpret_cast<const char*>(attention.partial_o + head * HeadDim + lane * 4);
    const float* own_row = own.sums + (query * group + in_group) * kSumWidth<HeadDim> + lane * 4;
    constexpr int kQuads = HeadDim / 32;
    float sums[kQuads][4] = {};
    MergeWeights weights{};
    float lse = 0.0f, weight = 0.0f;  // of partial `lane` of eight
    int32_t done = 0;
#pragma unroll 1
    do {
      const bool begins = done % kMergeLanes == 0;
      if (ptx::uniform(begins)) lse = lse_at(done + lane);
      float partials[kMergeAtOnce][kQuads][4];
#pragma unroll
      for (int32_t i = 0; i < kMergeAtOnce; ++i) {
        const int32_t slot = done + i < count ? slots[done + i] : own_slot;
        const auto* from = reinterpret_cast<const float*>(ptx::at(partials_of_row, slot, partial_stride));
        if (slot == own_slot) from = own_row;
#pragma unroll
        for (int32_t quad = 0; quad < kQuads; ++quad) ptx::load_result(from + quad * 32, partials[i][quad]);
      }
      if (ptx::uniform(done == 0)) {
        SoftmaxState joined = softmax_start();
        if (lane < count) joined = with_partial(joined, lse);
#pragma unroll 1
        for (int32_t i = lane + kMergeLanes; i < count; i += kMergeLanes) joined = with_partial(joined, lse_at(i));
        ptx::warp_sync();
        weights = merge_weights(attention, head, joined,
                                [](float value, int32_t mask) { return ptx::shuffle_xor(value, mask); });
      }
      if (ptx::uniform(begins)) weight = weights.of(lse);
#pragma unroll
      for (int32_t i = 0; i < kMergeAtOnce; ++i) {
        const float of_partial = ptx::shuffle(weight, thread % 32 - lane + done % kMergeLanes + i);
#pragma unroll
        for (int32_t j = 0; j < 4 * kQuads; ++j) {
          sums[j / 4][j % 4] = ptx::fma(of_partial, partials[i][j / 4][j % 4], sums[j / 4][j % 4]);
        }
      }
      done += kMergeAtOnce;
    } while (ptx::any(done < count));
    if (count == 0) continue;
    const OutputRow target = output_row(attention, mine.token, head);
#pragma unroll
    for (int32_t quad = 0; quad < kQuads; ++quad) {
      const float (&sum)[4] = sums[quad];
      ptx::store_words(target.output + lane * 4 + quad * 32, Output::pack(sum[0], sum[1]),
                       Output::pack(sum[2], sum[3]));
    }
    if (lane == 0) store_lse(target.lse, weights.lse);
  }
}

// Merges the parts that are ready, of which the slots of those before `end` were brought. All threads have met since,
// and meet again before this returns.
template <int HeadDim, class Output>
PREFIXPACK_DEVICE void merge_parts(const BlockState& state, const UnitResults& own, int32_t end) {
  const int32_t num_parts = state.item.query_count * state.params.heads.parts;
#pragma unroll 1
  for (int32_t part = 0;;) {
    merge_ready<HeadDim, Output>(state, own, part, end);
    ptx::block_sync();
    if (ptx::uniform(end == num_parts)) return;
    part = end;
    end = end_of_parts_at_once(own, part, num_parts);
    bring_slots<HeadDim>(state, own, part, end);
    ptx::block_sync();
  }
}

}  // namespace prefixpack
