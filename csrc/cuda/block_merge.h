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
  const int32_t parts_of_query = units_of_group(group), heads_of_part = group / parts_of_query;
  constexpr int kThreads = kBlockThreads<HeadDim>;
  // The heads of a query whose partials are counted together.
  struct Part {
    int32_t token;  // -1 if it is not ready
    MergeList list;
  };
  constexpr int32_t kPartBytes = kThreads * sizeof(Part);  // an item has no more rows than the block threads
  auto* parts = reinterpret_cast<Part*>(shared);
  auto* lse = reinterpret_cast<float*>(shared + kPartBytes);  // [entries][group]
  static_assert(kPartBytes + kMergeRoom * sizeof(float) <= kSharedBytes, "room beside the parts");
  const int32_t num_parts = item.query_count * parts_of_query;
  bool last = false;
  if (thread < num_parts) {
    const int32_t query = thread / parts_of_query, merge = item.merge_begin + query;
    const int32_t token = plan.query_token(item.query_begin + query);
    const MergeList list = merge_list(plan, merge);
    int32_t* arrivals = arrivals_of(params, merge, kv_head * parts_of_query + thread - query * parts_of_query,
                                    attention.kv_heads * parts_of_query);
    last = ptx::atomic_add_release(arrivals, 1) == list.count - 1;
    if (last) *arrivals = 0;
    parts[thread] = {last ? token : -1, list};
  }
  if (!ptx::block_any(last)) return;
  // As many parts at a time as there is room for what is read of their partials: nearly always all. For one there is.
  const auto entries_to = [&](int32_t first, int32_t end) {
    return parts[end - 1].list.first + parts[end - 1].list.count - parts[first].list.first;
  };
  for (int32_t part = 0, end; ptx::uniform(part < num_parts); part = end) {
    end = num_parts;
    while (ptx::uniform(entries_to(part, end) > kMergeRoom / (group + 1) && end > part + 1)) --end;
    const int32_t first_entry = parts[part].list.first, entries = entries_to(part, end);
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
    const int32_t rows = (end - part) * heads_of_part, lane = thread % kMergeLanes;
    // Eight lanes have a row. Whole warps go round: lanes exchange what they have read.
#pragma unroll 1
    for (int32_t begin = thread / 32 * (32 / kMergeLanes); begin < rows; begin += kThreads / kMergeLanes) {
      const int32_t row = begin + thread % 32 / kMergeLanes, part_of_row = row < rows ? row / heads_of_part : 0;
      const Part& mine = parts[part + part_of_row];
      const int32_t in_part = row < rows ? row - part_of_row * heads_of_part : 0;
      const int32_t in_group = (part + part_of_row) % parts_of_query * heads_of_part + in_part;
      const int32_t head = first_head + in_group;
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
        const float (&sum)[4] = sums[quad];
        ptx::store_words(target.output + lane * 4 + quad * 32, Output::pack(sum[0], sum[1]),
                         Output::pack(sum[2], sum[3]));
      }
      if (lane == 0) store_lse(target.lse, weights.lse);
    }
    ptx::block_sync();
  }
}

}  // namespace prefixpack
