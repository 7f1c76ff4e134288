// Which combines of split-KV partials the last arriver leaves to idle warps.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace prefixpack {

struct DeferralLimits {
  int32_t q_heads, group;  // query heads, and those of a KV head
  int32_t narrow_rows;     // most rows of an item that a warp runs
  int64_t warps;           // that combine deferred rows; 0: nothing is deferred
};

// A CTA that brings the last partials of a tile combines all its rows alone, while the CTAs of the other KV splits have
// nothing left to do. Where that takes several steps, the warps of the warp kernel combine the rows after their last
// tile, one row or a part of it each.
//
// Returns a flag for each entry of Plan::combine_query. It depends on the plan and the limits alone.
std::vector<bool> deferred_combines(const Plan& plan, const DeferralLimits& limits);

// Few rows are combined in parts, ranges of their dimensions, each by a warp: the base-2 logarithm of their number. It
// depends on the plan alone, because the order of summation depends on it. rows: deferred, of all query heads.
int32_t deferred_part_bits(int64_t rows);

}  // namespace prefixpack
