// What a block does once the partials of an item are written.
#pragma once

#include "cuda/kernel_params.h"
#include "cuda/ptx.h"
#include "cuda/results.h"
#include "cuda/tiles.h"

namespace prefixpack {

// Merges the queries whose last partial the unit's were, if they have others. All threads have met since their partials
// were written, and meet again before this returns. A function of its own: products leave no registers to do it in.
template <int HeadDim, class Output>
PREFIXPACK_DEVICE_CALL void merge_what_is_ready(const KernelParams& params, const ItemRecord& item, int32_t kv_head,
                                                char* shared) {
  if (item.slot_begin == kWriteThrough) return;
  const AttentionParams& attention = params.attention;
  const DevicePlan& plan = params.plan;
  const int32_t thread = ptx::thread_index(), group = attention.q_heads / attention.kv_heads;
  const int32_t rows = item.query_count * group;
  const int32_t parts = units_of_group(group), heads_of_part = group / parts;
  constexpr int32_t kReadyBytes = 1024;
  auto* ready = reinterpret_cast<int32_t*>(shared);  // [queries, parts]
  bool any_ready = false;
  for (int32_t i = thread; i < item.query_count * parts; i += kThreads) {
    const int32_t merge = item.merge_begin + i / parts;
    int32_t* arrivals = arrivals_of(params, merge, kv_head * parts + i % parts, attention.kv_heads * parts);
    const int32_t count = merge_list(plan, merge).count;
    const bool last = ptx::atomic_add_release(arrivals, 1) == count - 1;
    if (last) *arrivals = 0;
    ready[i] = last;
    any_ready |= last;
  }
  if (!ptx::block_any(any_ready)) return;
  // Slots and lse of all partials at once, as far as there is room for them.
  const int32_t entries = plan.merge_offset(item.merge_begin + item.query_count) - item.merge_first;
  const int32_t room = (kSharedBytes - kReadyBytes) / static_cast<int32_t>(sizeof(float)) / (group + 1);
  const int32_t near = entries < room ? entries : room;
  auto* lse = reinterpret_cast<float*>(shared + kReadyBytes);  // [near][group]
  auto* slots = reinterpret_cast<int32_t*>(lse + near * group);
  const int32_t first_head = kv_head * group;
  const auto read_slot = [&](int32_t entry) { return plan.merge_slot(item.merge_first + entry); };
  for (int32_t i = thread; i < near * group; i += kThreads) {
    const int32_t slot = read_slot(i / group);
    lse[i] = ptx::load_shared_result(partial_row(attention, slot, first_head + i % group).lse);
    if (i % group == 0) slots[i / group] = slot;
  }
  ptx::block_sync();
  const int32_t column = thread % kMergeLanes * 4;
  // Whole warps go round: its lanes exchange what they have read.
  for (int32_t first_row = thread / 32 * 4; first_row < rows; first_row += kThreads / kMergeLanes) {
    const int32_t row = first_row + thread % 32 / kMergeLanes;
    const Row place = row_of(row < rows ? row : 0, kv_head, group);
    const bool merges = row < rows && ready[row / heads_of_part];
    const MergeList list = merge_list(plan, item.merge_begin + place.query);
    const int32_t first = list.first - item.merge_first, count = merges ? list.count : 0;
    const auto slot_of = [&](int32_t i) { return first + i < near ? slots[first + i] : read_slot(first + i); };
    const auto lse_of = [&](int32_t i) {
      return first + i < near ? lse[(first + i) * group + place.head - first_head]
                              : ptx::load_shared_result(partial_row(attention, read_slot(first + i), place.head).lse);
    };
    SoftmaxState state = softmax_start();
    for (int32_t i = thread % kMergeLanes; i < count; i += kMergeLanes) state = with_partial(state, lse_of(i));
    ptx::warp_sync();
    const MergeWeights weights = merge_weights(attention, place.head, state,
                                               [](float value, int32_t mask) { return ptx::shuffle_xor(value, mask); });
    if (!merges) continue;
    constexpr int32_t kQuads = HeadDim / 32;
    float sums[kQuads][4] = {};
    for (int32_t begin = 0; begin < count; begin += kMergeAtOnce) {
      float weight[kMergeAtOnce], partials[kMergeAtOnce][kQuads][4];
#pragma unroll
      for (int32_t k = 0; k < kMergeAtOnce; ++k) {
        const bool valid = begin + k < count;
        const int32_t i = valid ? begin + k : begin;
        weight[k] = valid ? weights.of(lse_of(i)) : 0.0f;
        const float* from = partial_row(attention, slot_of(i), place.head).output + column;
#pragma unroll
        for (int32_t quad = 0; quad < kQuads; ++quad) ptx::load_shared_result(from + quad * 32, partials[k][quad]);
      }
#pragma unroll
      for (int32_t k = 0; k < kMergeAtOnce; ++k) {
#pragma unroll
        for (int32_t j = 0; j < 4 * kQuads; ++j) {
          sums[j / 4][j % 4] = ptx::fma(weight[k], partials[k][j / 4][j % 4], sums[j / 4][j % 4]);
        }
      }
    }
    const OutputRow target = output_row(params, item.query_begin + place.query, place.head);
#pragma unroll
    for (int32_t quad = 0; quad < kQuads; ++quad) {
      store_output<Output>(target.output, column + quad * 32, sums[quad][0], sums[quad][1]);
      store_output<Output>(target.output, column + quad * 32 + 2, sums[quad][2], sums[quad][3]);
    }
    if (column == 0) store_lse(target.lse, weights.lse);
  }
}

}  // namespace prefixpack
