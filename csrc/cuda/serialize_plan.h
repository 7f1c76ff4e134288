// A plan as the block of words that DevicePlan describes. Host only, no CUDA.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace prefixpack {

struct SerializedPlan {
  std::vector<int32_t> words;
  int64_t kv_slots = 0;  // entries that StepState::kv_slots needs
};

// seq_lens: [num_requests] the lengths the plan was made for. growth: tokens by which open ends may grow before the
// words are made anew; their slots get that much room. group: query heads of each of the kv_heads. warp_blocks:
// of a launch; if 0, all of their warps take part. Throws std::overflow_error beyond 2^31 - 1 slots.
SerializedPlan serialize_plan(const Plan& plan, const int64_t* seq_lens, int32_t growth, int32_t group,
                              int32_t kv_heads, int32_t warp_ctas);

}  // namespace prefixpack
