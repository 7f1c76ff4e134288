// Shape of a combine of partials: steps and levels. The GPU kernels run it; the planner's models estimate it.
#pragma once

#include <cmath>
#include <cstdint>

namespace prefixpack {

// KV splits of a tile up to which the GPU kernels combine their partials in one level. One CTA reads some 100 GB/s, so
// that hundreds of partials of many rows would keep it busy long after all others have finished.
constexpr int32_t kCombineFanIn = 16;
// Rows that a CTA combines at once, and partials of each that it adds in a step; then those of a warp.
constexpr int32_t kCombineRows = 32, kCombineWidth = 4;
constexpr int32_t kWarpCombineRows = kCombineRows / 8, kWarpCombineWidth = kCombineWidth / 2;
// Fewest steps of a combine that is deferred (see deferral.h). A deferred row takes about 4 us from its last partial to
// its output, as long as three steps of a CTA.
constexpr int32_t kDeferredSteps = 4;
constexpr int32_t kDeferredWidth = 8;  // partials of a deferred row that a model's step has

// Two levels: groups of about the square root of the partials.
inline int32_t combine_root(int32_t partials) {
  return static_cast<int32_t>(std::ceil(std::sqrt(static_cast<double>(partials))));
}

// KV splits of a group, of a tile that is combined in two levels: whole steps of a CTA.
inline int32_t combine_group_size(int32_t splits) {
  return (combine_root(splits) + kCombineWidth - 1) / kCombineWidth * kCombineWidth;
}

// What the models assume. The kernels follow CombineLists, which differs:
// - It groups the KV splits of a tile. A model counts all partials of a query, which other packs bring as well.
// - Its groups are whole steps of a CTA. That is the same number of steps for a CTA, and at most one more for a warp.
// - Its second level has a partial of each group, often fewer than the root.
// - A tile of deferred queries stays in one level up to four times the fan-in. A model asks what its CTA would take.
// - With head_dim 256 a CTA has half of the warps, and combines half of the rows at once.
// This is harmless: a model chooses KV splits and what is deferred. Whatever it chooses, CombineLists alone decides the
// order of summation.
struct CombineLevels {
  int32_t count;  // 1 or 2
  int32_t steps;  // of a row's partials in one of them
};
inline CombineLevels combine_levels(int32_t partials, int32_t fan_in, int32_t width) {
  const bool grouped = partials > fan_in;
  const int32_t in_group = grouped ? combine_root(partials) : partials;
  return {grouped ? 2 : 1, (in_group + width - 1) / width};
}

}  // namespace prefixpack
