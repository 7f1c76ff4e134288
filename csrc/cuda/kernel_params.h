// What the GPU kernels read: a plan, what a step makes of it, and one layer's tensors.
#pragma once

#include <cstdint>

#include "cuda/both_sides.h"
#include "plan/params.h"
#include "plan/plan.h"

namespace prefixpack {

// A plan as one block of 32-bit words, so that one copy brings it to the device: this header, then the arrays of
// Plan in the order of the header, each beginning `*_at` words after the header. A captured launch reads whatever
// plan lies there.
struct PlanHeader {
  int32_t num_items, num_queries, num_merges;
  int32_t items_at;
  int32_t item_slots_at;  // [num_items] where the item's KV slots begin in StepState::kv_slots
  int32_t query_token_at, query_request_at, query_back_at;
  int32_t merge_query_at, merge_offset_at, merge_slot_at;
  int32_t unused;  // whole 16-byte words
};

struct DevicePlan {
  const int32_t* words;

  PREFIXPACK_BOTH const PlanHeader& header() const { return *reinterpret_cast<const PlanHeader*>(words); }
  PREFIXPACK_BOTH const WorkItem& item(int32_t index) const {
    return reinterpret_cast<const WorkItem*>(words + header().items_at)[index];
  }
  PREFIXPACK_BOTH int32_t item_slots(int32_t index) const { return words[header().item_slots_at + index]; }
  PREFIXPACK_BOTH int32_t query_token(int32_t query) const { return words[header().query_token_at + query]; }
  PREFIXPACK_BOTH int32_t query_request(int32_t query) const { return words[header().query_request_at + query]; }
  PREFIXPACK_BOTH int32_t query_back(int32_t query) const { return words[header().query_back_at + query]; }
  PREFIXPACK_BOTH int32_t merge_query(int32_t merge) const { return words[header().merge_query_at + merge]; }
  PREFIXPACK_BOTH int32_t merge_offset(int32_t merge) const { return words[header().merge_offset_at + merge]; }
  PREFIXPACK_BOTH int32_t merge_slot(int32_t index) const { return words[header().merge_slot_at + index]; }
};

// What the queries of an item have in common, at this step's lengths.
struct ItemBounds {
  int32_t kv_end;   // end of the item's range
  int32_t lowest;   // position of its earliest query
  int32_t highest;  // position of its latest query
};

// Written by the preparation kernel once per step and read by every layer.
struct StepState {
  ItemBounds* item_bounds;  // [num_items]
  int32_t* query_position;  // [num_queries]
  int32_t* kv_slots;        // KV slots of all items, gathered: layers never read the scheduler's tables
  int32_t* tickets;         // [2] next unit of the queue, blocks that found it empty; both 0 between launches
};

struct KernelParams {
  AttentionParams attention;
  DevicePlan plan;
  StepState step;
};

}  // namespace prefixpack
