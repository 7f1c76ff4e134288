#include "plan/deferral.h"

#include <algorithm>

#include "plan/combine_shape.h"

namespace prefixpack {

namespace {

// Most deferred rows of a warp. With more, the rows that CTAs would combine beside each other wait for the warps.
constexpr int64_t kMostRowsOfWarp = 2;
// Most rows in four parts, and in two. An H100 or H200 has 2,112 warps for them.
constexpr int64_t kMostRowsInFour = 256, kMostRowsInTwo = 1024;
// A longer list is not deferred: its row would keep one warp busy for too long.
constexpr int32_t kMostPartials = 1024;

// Steps of a CTA that combines `partials` partials of `rows` rows.
int64_t steps_of(int64_t rows, int32_t partials) {
  const CombineLevels levels = combine_levels(partials, kCombineFanIn, kCombineWidth);
  return (rows + kCombineRows - 1) / kCombineRows * levels.count * levels.steps;
}

// [num_combines] steps of the largest CTA that combines a row; 0 if the combine is not to be deferred.
std::vector<int64_t> steps_of_combines(const Plan& plan, const DeferralLimits& limits) {
  std::vector<int64_t> most_rows(plan.num_queries, 0);  // of an item that a CTA runs
  for (const WorkItem& item : plan.items) {
    if (item.partial_begin == kWriteThrough || item.tile_rows <= limits.narrow_rows) continue;
    for (int32_t query = item.query_begin; query < item.query_begin + item.query_count; ++query) {
      most_rows[query] = std::max(most_rows[query], int64_t{item.query_count} * limits.group);
    }
  }
  std::vector<int64_t> steps(plan.combine_query.size(), 0);
  for (size_t combine = 0; combine < steps.size(); ++combine) {
    const int64_t rows = most_rows[plan.combine_query[combine]];
    const int32_t partials = plan.combine_offset[combine + 1] - plan.combine_offset[combine];
    if (rows > 0 && partials <= kMostPartials) steps[combine] = steps_of(rows, partials);
  }
  return steps;
}

}  // namespace

std::vector<bool> deferred_combines(const Plan& plan, const DeferralLimits& limits) {
  std::vector<bool> deferred(plan.combine_query.size(), false);
  if (limits.warps == 0) return deferred;
  const std::vector<int64_t> steps = steps_of_combines(plan, limits);
  const int64_t most = limits.warps * kMostRowsOfWarp / limits.q_heads;
  const int64_t longest = steps.empty() ? 0 : *std::max_element(steps.begin(), steps.end());
  // The longest combines first, if there are too many.
  for (int64_t fewest = kDeferredSteps; fewest <= longest; fewest *= 2) {
    if (std::count_if(steps.begin(), steps.end(), [&](int64_t count) { return count >= fewest; }) > most) continue;
    for (size_t combine = 0; combine < steps.size(); ++combine) deferred[combine] = steps[combine] >= fewest;
    break;
  }
  return deferred;
}

int32_t deferred_part_bits(int64_t rows) { return rows <= kMostRowsInFour ? 2 : rows <= kMostRowsInTwo ? 1 : 0; }

}  // namespace prefixpack
