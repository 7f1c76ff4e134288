// Parameters of the GPU kernels: the plan, the step's state, and one layer's tensors. Unlike AttentionParams states,
// partial_lse is to base 2 here.
#pragma once

#include <cstdint>

#include "cuda/common/host_device.h"
#include "cuda/common/index_math.h"
#include "plan/params.h"
#include "plan/plan.h"

namespace prefixpack {

// Header of the serialized plan: one array of 32-bit words, copied to the device at once. The arrays of Plan follow the
// header in the order of its `*_at` fields, which are offsets in words. A captured graph reads whichever plan lies at
// the address.
struct PlanHeader {
  int32_t num_items, num_queries;
  int32_t num_combines;  // entries of Plan::combine_query; only the Triton kernels read it
  int32_t items_at;
  // Four arrays of [num_items]: the item's first entry in StepState::kv_slots; then `list`, `parent` and
  // `group_partial` of CombineLists.
  int32_t item_kv_slots_at;
  int32_t query_token_at, query_request_at, query_back_at;
  int32_t combine_query_at, combine_offset_at, combine_partial_at;  // only the Triton kernels read them
  int32_t num_cta_items;  // items at the front of the queue whose tile takes a whole CTA
  int32_t active_warps;   // warps per CTA of the warp kernel that take tiles
  int32_t mostly_narrow;  // 1 if the warp kernel has more work than the CTA kernel
  // CombineLists, which the CUDA kernels read; in a plan without groups the arrays of combine_offset_at and
  // combine_partial_at.
  int32_t list_offset_at, list_partial_at;
};

// Follows the header. Not a part of it, because CTAs hold the header in shared memory, which is full.
struct DeferredHeader {
  int32_t count;      // queries
  int32_t at;         // DeferredRecord of each: offset in words
  int32_t part_bits;  // of the number of parts of a row
};

constexpr int32_t kPlanHeaderWords = (sizeof(PlanHeader) + sizeof(DeferredHeader)) / sizeof(int32_t);
// Padding behind the last array: a warp loads the first 32 entries of a partial list before it knows the list's length.
constexpr int32_t kPlanPaddingWords = 32;
constexpr int32_t kPlanItemWords = sizeof(WorkItem) / sizeof(int32_t) + 4;  // with its words of item_kv_slots_at

// A query whose partials the warp kernel combines after its last tile.
struct DeferredRecord {
  int32_t list;         // of PlanHeader::list_offset_at
  int32_t partials_at;  // partials of the list: offset in words
  int32_t count;        // partials: one less than the list has entries
  int32_t token;        // row of the output
};
constexpr int32_t kDeferredWords = sizeof(DeferredRecord) / sizeof(int32_t);
// Behind each record: the first partials of its list, so that they are loaded together, by a warp at once and from
// one line of the cache.
constexpr int32_t kDeferredStride = 32, kInlinePartials = kDeferredStride - kDeferredWords;

struct DevicePlan {
  const int32_t* words;  // device address of the serialized plan
};

// Accessors of a serialized plan. header: the plan's own, or a copy in shared memory.
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
  PREFIXPACK_BOTH int32_t item_kv_slots(int32_t index) const { return words[header.item_kv_slots_at + index]; }
  PREFIXPACK_BOTH int32_t item_list(int32_t index) const {
    return words[header.item_kv_slots_at + header.num_items + index];
  }
  PREFIXPACK_BOTH int32_t item_parent(int32_t index) const {
    return words[header.item_kv_slots_at + 2 * header.num_items + index];
  }
  PREFIXPACK_BOTH int32_t item_group_partial(int32_t index) const {
    return words[header.item_kv_slots_at + 3 * header.num_items + index];
  }
  PREFIXPACK_BOTH int32_t query_token(int32_t query) const { return words[header.query_token_at + query]; }
  PREFIXPACK_BOTH int32_t query_request(int32_t query) const { return words[header.query_request_at + query]; }
  PREFIXPACK_BOTH int32_t query_back(int32_t query) const { return words[header.query_back_at + query]; }
  PREFIXPACK_BOTH int32_t list_offset(int32_t list) const { return words[header.list_offset_at + list]; }
  PREFIXPACK_BOTH int32_t list_partial(int32_t index) const { return words[header.list_partial_at + index]; }
};

// A work item with the lengths of this step: all that a layer needs of it in one record.
struct ItemRecord {
  int32_t query_begin, query_count;  // as in WorkItem
  int32_t kv_begin, kv_end;          // KV positions
  int32_t lowest;                    // position of the earliest query; in a tree, up to which all queries see all
  int32_t highest;                   // position of the latest query
  int32_t partial_begin;             // as in WorkItem
  int32_t list;                      // combine list of the first query; those of the other queries follow
  int32_t list_first;                // first entry of that list in the plan's list_partial
  int32_t kv_slots_at;               // first entry in StepState::kv_slots
  int32_t tile_rows;                 // as in WorkItem
  int32_t parent;                    // as in CombineLists
  int32_t group_partial;             // as in CombineLists
};
constexpr int32_t kRecordWords = sizeof(ItemRecord) / sizeof(int32_t);

// KV slots and queries whose copies begin a tile: those of the stages that are filled at once, and of the widest tile.
constexpr int32_t kPrologueSlots = 192, kPrologueQueries = 128;

// What the first copies of a tile need, at an address that follows from the item's number. It is read together with the
// record; at the addresses that the record says it would be one dependent read more.
struct ItemPrologue {
  int32_t slots[kPrologueSlots];     // from kv_begin on. Beyond kv_end the last one repeats; 0 if there is none
  int32_t tokens[kPrologueQueries];  // [query_count] rows of q
};
constexpr int32_t kItemPrologueWords = sizeof(ItemPrologue) / sizeof(int32_t);

constexpr int32_t kTileCounters = 3;

// Written by the prepare kernel once per step and read by all layers, except for the counters.
struct StepState {
  ItemRecord* items;        // [max(num_items, CTAs of the launch)]
  ItemPrologue* prologues;  // [num_prologues] of the first items; fewer than 2^31 words
  int32_t* query_position;  // [num_queries]
  int32_t* kv_slots;        // KV slots of all items, gathered, so that layers never read the scheduler's tables
  int32_t* tile_counters;   // [kTileCounters] next CTA tile, next warp tile (or, behind them, part of a deferred row),
                            // next part where some warps must not take tiles; see run_warp_kernel
  int32_t* semaphores;      // [combine lists, virtual KV heads] partials that have arrived; 0 between launches, as all
                            // counters are
  uint64_t* hidden;         // [num_queries] hidden_word() of each query; nullptr but for trees of drafts
  int32_t num_prologues;    // where more items are, the step is long and prologues of tiles hardly matter
};

// All parameters of a launch.
struct KernelParams {
  AttentionParams attention;
  Heads heads;
  DevicePlan plan;
  StepState step;
};

}  // namespace prefixpack
