// Serializes a plan to the words that DevicePlan points to. Host only.
#pragma once

#include <cstdint>
#include <vector>

#include "cuda/combine_lists.h"
#include "plan/combine_shape.h"
#include "plan/plan.h"

namespace prefixpack {

struct SerializedPlan {
  std::vector<int32_t> words;
  int32_t combine_lists = 0;  // entries per virtual KV head that StepState::semaphores needs
  int64_t kv_slots = 0;       // entries of StepState::kv_slots
};

// Upper bounds of SerializedPlan::words and SerializedPlan::combine_lists by the size of a plan: buffers are allocated
// before it is known. A query has at most one list. A group of KV splits has one list for each query of its tile, of
// two partials or more, and no partial is in two groups: there are at most half as many of these lists as partials.
int64_t most_combine_lists(int64_t queries, int64_t partials);
int64_t most_plan_words(int64_t queries, int64_t items, int64_t partials);

// seq_lens: [num_requests] lengths that the plan was made for. Items of one request may share KV slots. growth: tokens
// by which open-ended items may grow before the plan is serialized again; room for their slots is reserved. group:
// query heads per KV head. warp_ctas: CTAs of the warp kernel; 0: unknown, or there is none: all warps take part, and
// no combine is deferred. cta_warps: warps of each. fan_in: see CombineLists. Throws std::overflow_error beyond 2^31 -
// 1 slots.
SerializedPlan serialize_plan(const Plan& plan, const int64_t* seq_lens, int32_t growth, int32_t group,
                              int32_t kv_heads, int32_t warp_ctas, int32_t cta_warps, int32_t fan_in = kCombineFanIn);

}  // namespace prefixpack
