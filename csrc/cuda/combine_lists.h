// The lists of partials that the GPU kernels combine. Host only.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace prefixpack {

// A query's partials are in one list. If an item has more than `fan_in` KV splits, consecutive splits form
// groups of equal size, about the square root of their number. The last CTA or warp of a group combines its partials
// into the partial of the group's first split, and only these partials remain in the query's list. Groups and their
// order follow from the plan alone, so the result has the same bits whoever combines.
//
// A deferred list (plan/deferral.h) has one entry more than partials: no arriver is the last one, and the list is left
// to the warps.
struct CombineLists {
  // Both are empty without groups and deferred lists: Plan::combine_offset and Plan::combine_partial serve then. Lists
  // [0, num_combines) are those of Plan::combine_query; the lists of groups follow, one for each query of a tile.
  std::vector<int32_t> offset;   // [num_lists + 1] into partial
  std::vector<int32_t> partial;  // partials in ascending KV position: the order of summation
  // Per item of the plan; unspecified for items without partials.
  std::vector<int32_t> list;           // list of the item's first query; those of its other queries follow
  std::vector<int32_t> parent;         // list of the query that the item's group belongs to, or -1 without a group
  std::vector<int32_t> group_partial;  // partial of the first query in the group's first split
};

// fan_in: most KV splits of an item that are combined in one level, four times as many if all its queries are deferred.
// deferred: [num_combines].
CombineLists make_combine_lists(const Plan& plan, int32_t fan_in, const std::vector<bool>& deferred);

}  // namespace prefixpack
