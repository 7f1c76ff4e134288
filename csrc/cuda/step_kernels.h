// Before the layers: lengths and KV slots of a step. After a packed launch: the partials of a query become one output.
#pragma once

#include "cuda/index_math.h"
#include "cuda/kernel_params.h"
#include "cuda/ptx.h"
#include "cuda/tiles.h"

namespace prefixpack {

// Once per step, outside captured graphs: fills item_bounds, query_position and kv_slots, so that the layers read
// nothing that the scheduler may change. One block per item, in turn.
PREFIXPACK_DEVICE void prepare_step(const KernelParams& params) {
  const AttentionParams& attention = params.attention;
  const DevicePlan& plan = params.plan;
  const StepState& step = params.step;
  const int32_t thread = ptx::thread_index();
  const auto position_of = [&](int32_t query) {
    return static_cast<int32_t>(attention.seq_lens[plan.query_request(query)]) - 1 - plan.query_back(query);
  };
  for (int32_t query = ptx::block_index() * kThreads + thread; query < plan.header().num_queries;
       query += ptx::grid_size() * kThreads) {
    step.query_position[query] = position_of(query);
  }
  for (int32_t index = ptx::block_index(); index < plan.header().num_items; index += ptx::grid_size()) {
    const WorkItem item = plan.item(index);
    const int32_t last = item.query_begin + item.query_count - 1;
    const int32_t end = item.kv_end == kOpenEnd ? position_of(last) + 1 : item.kv_end;
    if (thread < 32) {
      int32_t lowest = INT32_MAX, highest = INT32_MIN;
      for (int32_t query = item.query_begin + thread; query <= last; query += 32) {
        const int32_t position = position_of(query);
        lowest = position < lowest ? position : lowest;
        highest = position > highest ? position : highest;
      }
      for (int32_t mask = 16; mask > 0; mask /= 2) {
        const int32_t low = ptx::shuffle_xor(lowest, mask), high = ptx::shuffle_xor(highest, mask);
        lowest = low < lowest ? low : lowest;
        highest = high > highest ? high : highest;
      }
      if (thread == 0) step.item_bounds[index] = {end, lowest, highest};
    }
    const int32_t* row =
        attention.req_to_token + attention.req_pool_indices[item.request] * attention.req_to_token_stride;
    int32_t* slots = step.kv_slots + plan.item_slots(index);
    for (int32_t position = item.kv_begin + thread; position < end; position += kThreads) {
      slots[position - item.kv_begin] = row[position];
    }
  }
}

// One warp per (query, head) with more than one partial. Partials are added in ascending KV order.
template <int HeadDim, class Element>
PREFIXPACK_DEVICE void merge_partials(const KernelParams& params) {
  const AttentionParams& attention = params.attention;
  const DevicePlan& plan = params.plan;
  const int32_t lane = ptx::thread_index() % 32;
  const int32_t num_rows = plan.header().num_merges * attention.q_heads;
  for (int32_t row = ptx::block_index() * kWarps + ptx::thread_index() / 32; row < num_rows;
       row += ptx::grid_size() * kWarps) {
    const int32_t merge = row / attention.q_heads, head = row % attention.q_heads;
    const int64_t token = plan.query_token(plan.merge_query(merge));
    constexpr int32_t kPairs = HeadDim / 64;
    float left[kPairs] = {}, right[kPairs] = {};
    float max = kMinusInfinity;
    for (int32_t i = plan.merge_offset(merge); i < plan.merge_offset(merge + 1); ++i) {
      const float lse = attention.partial_lse[int64_t{plan.merge_slot(i)} * attention.q_heads + head];
      max = lse > max ? lse : max;
    }
    float sum = 0.0f;
    for (int32_t i = plan.merge_offset(merge); i < plan.merge_offset(merge + 1); ++i) {
      const int64_t index = int64_t{plan.merge_slot(i)} * attention.q_heads + head;
      const float weight = ptx::exp2((attention.partial_lse[index] - safe_max(max)) * kLog2E);
      sum += weight;
      const float* partial = attention.partial_o + index * HeadDim;
#pragma unroll
      for (int32_t pair = 0; pair < kPairs; ++pair) {
        left[pair] += weight * partial[pair * 64 + lane * 2];
        right[pair] += weight * partial[pair * 64 + lane * 2 + 1];
      }
    }
    if (attention.sinks != nullptr) sum += ptx::exp2((attention.sinks[head] - safe_max(max)) * kLog2E);
    const float normalize = sum > 0.0f ? 1.0f / sum : 0.0f;
    auto* output =
        static_cast<uint16_t*>(attention.o) + token * attention.o_token_stride + head * attention.o_head_stride;
#pragma unroll
    for (int32_t pair = 0; pair < kPairs; ++pair) {
      *reinterpret_cast<uint32_t*>(output + pair * 64 + lane * 2) =
          Element::pack(left[pair] * normalize, right[pair] * normalize);
    }
    if (attention.lse != nullptr && lane == 0) {
      attention.lse[token * attention.lse_token_stride + head] =
          sum > 0.0f ? safe_max(max) + ptx::log2(sum) * kLn2 : kMinusInfinity;
    }
  }
}

}  // namespace prefixpack
