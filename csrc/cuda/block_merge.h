// What a block does once the partials of an item are written.
#pragma once

#include "cuda/kernel_params.h"
#include "cuda/ptx.h"
#include "cuda/results.h"
#include "cuda/tiles.h"

namespace prefixpack {

// Merges the queries whose last partial the unit's were, if they have others. All threads have met since their partials
// were written, and meet again before this returns. A function of its own: products leave no registers to do it in.
template <int HeadDim, class Element>
PREFIXPACK_DEVICE_CALL void merge_what_is_ready(const KernelParams& params, char* shared, Unit unit) {
  const ItemRecord& item = params.step.items[unit.item];
  if (item.slot_begin == kWriteThrough) return;
  const int32_t kv_head = unit.kv_head;
  const AttentionParams& attention = params.attention;
  const DevicePlan& plan = params.plan;
  const int32_t thread = ptx::thread_index(), group = attention.q_heads / attention.kv_heads;
  const int32_t rows = item.query_count * group;
  constexpr int32_t kReadyBytes = 1024;
  auto* ready = reinterpret_cast<int32_t*>(shared);  // [queries]
  bool any_ready = false;
  for (int32_t query = thread; query < item.query_count; query += kThreads) {
    const int32_t merge = item.merge_begin + query;
    int32_t* arrivals = arrivals_of(params, merge, kv_head);
    const bool last = ptx::atomic_add_release(arrivals, 1) == merge_list(plan, merge).count - 1;
    if (last) *arrivals = 0;
    ready[query] = last;
    any_ready |= last;
  }
  if (!ptx::block_any(any_ready)) return;
  // The lse of all partials at once, as far as there is room for them.
  const int32_t entries = plan.merge_offset(item.merge_begin + item.query_count) - item.merge_first;
  auto* lse = reinterpret_cast<float*>(shared + kReadyBytes);  // [near][group]
  const int32_t room = (kSharedBytes - kReadyBytes) / static_cast<int32_t>(sizeof(float)) / group;
  const int32_t near = entries < room ? entries : room;
  const auto read_lse = [&](int32_t entry, int32_t head) {
    const int32_t slot = plan.merge_slot(item.merge_first + entry);
    return ptx::load_shared_result(partial_row(attention, slot, head).lse);
  };
  for (int32_t i = thread; i < near * group; i += kThreads) {
    lse[i] = read_lse(i / group, kv_head * group + i % group);
  }
  ptx::block_sync();
  // Eight lanes to a row, four columns at a time.
  const int32_t column = thread % 32 % 8 * 4;
  for (int32_t row = thread / 8; row < rows; row += kThreads / 8) {
    const Row place = row_of(row, kv_head, group);
    if (!ready[place.query]) continue;
    const MergeList list = merge_list(plan, item.merge_begin + place.query);
    const int32_t first = list.first - item.merge_first;
    const auto lse_of = [&](int32_t i) {
      return first + i < near ? lse[(first + i) * group + place.head - kv_head * group]
                              : read_lse(first + i, place.head);
    };
    const MergeWeights weights = merge_weights(attention, place.head, list.count, lse_of);
    constexpr int32_t kQuads = HeadDim / 32;
    float sums[kQuads][4] = {};
    for (int32_t i = 0; i < list.count; ++i) {
      const float weight = weights.of(lse_of(i));
      const float* from = partial_row(attention, plan.merge_slot(list.first + i), place.head).output + column;
#pragma unroll
      for (int32_t quad = 0; quad < kQuads; ++quad) {
        float partial[4];
        ptx::load_shared_result(from + quad * 32, partial);
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) sums[quad][j] = ptx::fma(weight, partial[j], sums[quad][j]);
      }
    }
    const OutputRow target = output_row(params, item.query_begin + place.query, place.head);
#pragma unroll
    for (int32_t quad = 0; quad < kQuads; ++quad) {
      store_output<Element>(target.output, column + quad * 32, sums[quad][0], sums[quad][1]);
      store_output<Element>(target.output, column + quad * 32 + 2, sums[quad][2], sums[quad][3]);
    }
    if (column == 0) store_lse(target.lse, weights.lse);
  }
}

}  // namespace prefixpack
