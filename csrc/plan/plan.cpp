#include "plan/plan.h"

#include <cmath>

namespace prefixpack {

int32_t combine_group_size(int32_t splits) {
  constexpr int32_t kMultiple = 4;
  const auto root = static_cast<int32_t>(std::ceil(std::sqrt(static_cast<double>(splits))));
  return (root + kMultiple - 1) / kMultiple * kMultiple;
}

int32_t combine_steps(int32_t partials, int32_t width) {
  const auto steps = [width](int32_t count) { return (count + width - 1) / width; };
  if (partials <= kCombineFanIn) return steps(partials);
  const int32_t group = combine_group_size(partials);
  return steps(group) + steps((partials + group - 1) / group);
}

}  // namespace prefixpack
