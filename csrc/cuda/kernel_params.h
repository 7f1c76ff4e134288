// What the GPU kernels read: a plan, what a step makes of it, and one layer's tensors. Their partials differ from those
// that AttentionParams describes in one thing: partial_lse is to base 2.
#pragma once

#include <cstdint>

#include "cuda/common/host_device.h"
#include "cuda/common/index_math.h"
#include "plan/params.h"
#include "plan/plan.h"

namespace prefixpack {

// A plan as one block of 32-bit words, so that one copy brings it to the device: this header, then the arrays of
// Plan in the order of the header, each beginning `*_at` words after the header. A captured launch reads whatever
// plan lies there.
struct PlanHeader {
  int32_t num_items, num_queries, num_merges;
  int32_t items_at;
  int32_t item_slots_at;  // [num_items] where the item's KV slots begin in StepState::kv_slots; then [num_items] the
                          // merge of its first query (its other queries have the next ones), if it has partials
  int32_t query_token_at, query_request_at, query_back_at;
  int32_t merge_query_at, merge_offset_at, merge_slot_at;
  int32_t num_cta_items;  // the first items of the queue: those whose tile takes a whole block
  int32_t active_warps;     // of each block of warps: those that take the others
  int32_t narrow_prevails;  // whether most of the work is in the others
};

constexpr int32_t kPlanHeaderWords = sizeof(PlanHeader) / sizeof(int32_t);
// Words behind the last array: a warp reads the first 32 entries of a merge list before it knows how many there are.
constexpr int32_t kPlanPaddingWords = 32;
constexpr int32_t kPlanItemWords = sizeof(WorkItem) / sizeof(int32_t) + 2;  // with its slots and its merge

struct DevicePlan {
  const int32_t* words;
};

// Reads a plan. header: of its words, or a copy that is nearer.
struct PlanReader {
  const int32_t* words;
  const PlanHeader& header;

  PREFIXPACK_BOTH explicit PlanReader(const DevicePlan& plan)
      : PlanReader(plan, *reinterpret_cast<const PlanHeader*>(plan.words)) {}
  PREFIXPACK_BOTH PlanReader(const DevicePlan& plan, const PlanHeader& near_header)
      : words(plan.words), header(near_header) {}

  PREFIXPACK_BOTH const WorkItem& item(int32_t index) const {
    return reinterpret_cast<const WorkItem*>(words + header.items_at)[index];
  }
  PREFIXPACK_BOTH int32_t item_slots(int32_t index) const { return words[header.item_slots_at + index]; }
  PREFIXPACK_BOTH int32_t item_merge(int32_t index) const {
    return words[header.item_slots_at + header.num_items + index];
  }
  PREFIXPACK_BOTH int32_t query_token(int32_t query) const { return words[header.query_token_at + query]; }
  PREFIXPACK_BOTH int32_t query_request(int32_t query) const { return words[header.query_request_at + query]; }
  PREFIXPACK_BOTH int32_t query_back(int32_t query) const { return words[header.query_back_at + query]; }
  PREFIXPACK_BOTH int32_t merge_query(int32_t merge) const { return words[header.merge_query_at + merge]; }
  PREFIXPACK_BOTH int32_t merge_offset(int32_t merge) const { return words[header.merge_offset_at + merge]; }
  PREFIXPACK_BOTH int32_t merge_slot(int32_t index) const { return words[header.merge_slot_at + index]; }
};

// A work item at this step's lengths, all that the layers need of it in one place.
struct ItemRecord {
  int32_t query_begin, query_count;
  int32_t kv_begin, kv_end;
  int32_t lowest;      // position of its earliest query
  int32_t highest;     // position of its latest query
  int32_t slot_begin;  // as in WorkItem
  int32_t merge_begin;
  int32_t merge_first;  // its first entry of merge_slot; those of the item's other queries follow
  int32_t slots_at;
  int32_t tile_rows;
};
constexpr int32_t kRecordWords = sizeof(ItemRecord) / sizeof(int32_t);

// Written by the preparation kernel once per step and read by every layer, but for the counters.
struct StepState {
  ItemRecord* items;        // [num_items], and room for as many as there are blocks
  int32_t* query_position;  // [num_queries]
  int32_t* kv_slots;        // KV slots of all items, gathered: layers never read the scheduler's tables
  int32_t* tile_counters;         // [3] next unit of the blocks' queue, of the warps' queue, blocks that are done
  int32_t* semaphores;        // [num_merges, unit heads] partials that are ready; all counters are 0 between launches
};

struct KernelParams {
  AttentionParams attention;
  Heads heads;
  DevicePlan plan;
  StepState step;
};

}  // namespace prefixpack
