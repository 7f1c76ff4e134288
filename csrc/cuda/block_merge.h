// What a block does once the partials of an item are written.
#pragma once

#include "cuda/kernel_params.h"
#include "cuda/ptx.h"
#include "cuda/results.h"
#include "cuda/tiles.h"

namespace prefixpack {

// Merges the queries whose last partial the unit's were, if they have others. All threads have met since their partials
// were written, and meet again before this returns. A function of its own: products leave no registers to do it in.
//
// A block may come last for all of its queries, when nothing else is left to do. So memory is asked in few trips, each
// for all that can be known by then; and the code is short, for it comes from memory too.
template <int HeadDim, class Output>
PREFIXPACK_DEVICE_CALL void merge_what_is_ready(const KernelParams& params, const ItemRecord& item, int32_t kv_head,
                                                char* shared) {
  if (item.slot_begin == kWriteThrough) return;
  const AttentionParams& attention = params.attention;
  const DevicePlan& plan = params.plan;
  const int32_t thread = ptx::thread_index(), group = attention.q_heads / attention.kv_heads;
  const int32_t first_head = kv_head * group;
  struct Query {
    int32_t token;  // -1 if it is not ready
    MergeList list;
  };
  constexpr int32_t kQueryBytes = kThreads * sizeof(Query);  // an item has no more rows than the block threads
  auto* queries = reinterpret_cast<Query*>(shared);
  auto* lse = reinterpret_cast<float*>(shared + kQueryBytes);  // [entries][group]
  constexpr int32_t kRoom = (kSharedBytes - kQueryBytes) / sizeof(float);
  bool last = false;
  if (thread < item.query_count) {
    const int32_t merge = item.merge_begin + thread, token = plan.query_token(item.query_begin + thread);
    const MergeList list = merge_list(plan, merge);
    int32_t* arrivals = arrivals_of(params, merge, kv_head);
    last = ptx::atomic_add_release(arrivals, 1) == list.count - 1;
    if (last) *arrivals = 0;
    queries[thread] = {last ? token : -1, list};
  }
  if (!ptx::block_any(last)) return;
  // As many queries at a time as there is room for what is read of their partials: nearly always all.
  const auto entries_to = [&](int32_t first, int32_t end) {
    return queries[end - 1].list.first + queries[end - 1].list.count - queries[first].list.first;
  };
  for (int32_t query = 0, end; ptx::uniform(query < item.query_count); query = end) {
    end = item.query_count;
    while (ptx::uniform(entries_to(query, end) > kRoom / (group + 1) && end > query + 1)) --end;
    const int32_t first_entry = queries[query].list.first, entries = entries_to(query, end);
    auto* slots = reinterpret_cast<int32_t*>(lse + entries * group);
    for (int32_t entry = thread; entry < entries; entry += kThreads) {
      const int32_t slot = plan.merge_slot(first_entry + entry);
      slots[entry] = slot;
      const float* from = partial_row(attention, slot, first_head).lse;
      constexpr int kLseAtOnce = 4;
#pragma unroll 1
      for (int32_t head = 0; head < group; head += kLseAtOnce) {
        float value[kLseAtOnce];
#pragma unroll
        for (int32_t i = 0; i < kLseAtOnce; ++i) {
          value[i] = ptx::load_shared_result(from + (head + i < group ? head + i : head));
        }
#pragma unroll
        for (int32_t i = 0; i < kLseAtOnce; ++i) {
          if (head + i < group) lse[entry * group + head + i] = value[i];
        }
      }
    }
    ptx::block_sync();
    const int32_t rows = (end - query) * group, lane = thread % kMergeLanes;
    // Eight lanes have a row. Whole warps go round: lanes exchange what they have read.
#pragma unroll 1
    for (int32_t begin = thread / 32 * (32 / kMergeLanes); begin < rows; begin += kThreads / kMergeLanes) {
      const int32_t row = begin + thread % 32 / kMergeLanes, of_query = row < rows ? row / group : 0;
      const Query& mine = queries[query + of_query];
      const int32_t in_group = row < rows ? row - of_query * group : 0, head = first_head + in_group;
      const int32_t count = row < rows && mine.token >= 0 ? mine.list.count : 0;
      const int32_t first = mine.list.first - first_entry;
      const float* lse_of = lse + first * group + in_group;
      constexpr int kQuads = HeadDim / 32;
      float sums[kQuads][4] = {};
      MergeWeights weights{};
      int32_t done = 0;
#pragma unroll 1
      do {
        float partials[kMergeAtOnce][kQuads][4];
#pragma unroll
        for (int32_t i = 0; i < kMergeAtOnce; ++i) {
          const int32_t slot = slots[first + (done + i < count ? done + i : 0)];
          const float* from = partial_row(attention, slot, head).output + lane * 4;
#pragma unroll
          for (int32_t quad = 0; quad < kQuads; ++quad) ptx::load_shared_result(from + quad * 32, partials[i][quad]);
        }
        if (ptx::uniform(done == 0)) {
          SoftmaxState state = softmax_start();
#pragma unroll 1
          for (int32_t i = lane; i < count; i += kMergeLanes) state = with_partial(state, lse_of[i * group]);
          ptx::warp_sync();
          weights = merge_weights(attention, head, state,
                                  [](float value, int32_t mask) { return ptx::shuffle_xor(value, mask); });
        }
#pragma unroll
        for (int32_t i = 0; i < kMergeAtOnce; ++i) {
          const float weight = done + i < count ? weights.of(lse_of[(done + i) * group]) : 0.0f;
#pragma unroll
          for (int32_t j = 0; j < 4 * kQuads; ++j) {
            sums[j / 4][j % 4] = ptx::fma(weight, partials[i][j / 4][j % 4], sums[j / 4][j % 4]);
          }
        }
        done += kMergeAtOnce;
      } while (ptx::any(done < count));
      if (count == 0) continue;
      const OutputRow target = output_row(attention, mine.token, head);
#pragma unroll
      for (int32_t quad = 0; quad < kQuads; ++quad) {
        const float(&sum)[4] = sums[quad];
        ptx::store_words(target.output + lane * 4 + quad * 32, Output::pack(sum[0], sum[1]),
                         Output::pack(sum[2], sum[3]));
      }
      if (lane == 0) store_lse(target.lse, weights.lse);
    }
    ptx::block_sync();
  }
}

}  // namespace prefixpack
