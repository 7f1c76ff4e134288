// Preparation of a step: lengths and KV slots.
#pragma once

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// Once per step, outside captured graphs: fills items, prologues, query_position and kv_slots, so that layers read
// nothing that the scheduler may change. One CTA per item, in turn.
PREFIXPACK_DEVICE void prepare_step(const KernelParams& params) {
  const AttentionParams& attention = params.attention;
  const PlanReader plan(params.plan);
  const StepState& step = params.step;
  const int32_t thread = ptx::thread_index();
  const auto position_of = [&](int32_t query) {
    return static_cast<int32_t>(attention.seq_lens[plan.query_request(query)]) - 1 - plan.query_back(query);
  };
  const auto hidden_of = [&](int32_t query) { return hidden_word(attention.visible[plan.query_token(query)]); };
  for (int32_t query = ptx::cta_index() * ptx::cta_size() + thread; query < plan.header.num_queries;
       query += ptx::grid_size() * ptx::cta_size()) {
    step.query_position[query] = position_of(query);
    if (attention.visible != nullptr) step.hidden[query] = hidden_of(query);
  }
  for (int32_t index = ptx::cta_index(); index < plan.header.num_items; index += ptx::grid_size()) {
    const WorkItem item = plan.item(index);
    const int32_t last = item.query_begin + item.query_count - 1;
    // A step that was planned by bounds of its lengths may end before some of its splits do, or begin.
    const int32_t reached = position_of(last) + 1;
    int32_t end = item.kv_end == kOpenEnd || item.kv_end > reached ? reached : item.kv_end;
    end = end < item.kv_begin ? item.kv_begin : end;
    if (thread < 32) {
      int32_t lowest = INT32_MAX, highest = INT32_MIN;
      for (int32_t query = item.query_begin + thread; query <= last; query += 32) {
        const int32_t position = position_of(query);
        const int32_t low = attention.visible == nullptr ? position : last_unhidden(hidden_of(query), position);
        lowest = low < lowest ? low : lowest;
        highest = position > highest ? position : highest;
      }
      for (int32_t mask = 16; mask > 0; mask /= 2) {
        const int32_t low = ptx::shuffle_xor(lowest, mask), high = ptx::shuffle_xor(highest, mask);
        lowest = low < lowest ? low : lowest;
        highest = high > highest ? high : highest;
      }
      if (thread == 0) {
        const bool writes_through = item.partial_begin == kWriteThrough;
        const int32_t list = plan.item_list(index), list_first = writes_through ? 0 : plan.list_offset(list);
        step.items[index] = {item.query_begin,
                             item.query_count,
                             item.kv_begin,
                             end,
                             lowest,
                             highest,
                             item.partial_begin,
                             list,
                             list_first,
                             plan.item_kv_slots(index),
                             item.tile_rows,
                             plan.item_parent(index),
                             plan.item_group_partial(index)};
      }
    }
    const int32_t* row =
        attention.req_to_token + attention.req_pool_indices[item.request] * attention.req_to_token_stride;
    int32_t* slots = step.kv_slots + plan.item_kv_slots(index);
    for (int32_t position = item.kv_begin + thread; position < end; position += ptx::cta_size()) {
      slots[position - item.kv_begin] = row[position];
    }
    if (index >= step.num_prologues) continue;
    ItemPrologue& prologue = step.prologues[index];
    for (int32_t i = thread; i < kPrologueSlots; i += ptx::cta_size()) {
      const int32_t position = item.kv_begin + i < end ? item.kv_begin + i : end - 1;
      prologue.slots[i] = position >= item.kv_begin ? row[position] : 0;
    }
    for (int32_t i = thread; i < kPrologueQueries && i < item.query_count; i += ptx::cta_size()) {
      prologue.tokens[i] = plan.query_token(item.query_begin + i);
    }
  }
}

}  // namespace prefixpack
