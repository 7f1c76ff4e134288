// How many warps of each CTA of the warp kernel take work tiles.
#pragma once

#include <algorithm>
#include <cstdint>

namespace prefixpack {

constexpr int32_t kMinActiveWarps = 4;          // per CTA, enough to saturate memory bandwidth
constexpr int32_t kBandwidthBoundTokens = 256;  // tiles of this length are bound by bandwidth, shorter ones by latency

// resident_ctas: CTAs of either kernel that are resident at a time.
struct WarpLaunch {
  int64_t resident_ctas, cta_tiles;
  bool mostly_narrow;  // CTA tiles then take half of the resident_ctas at most
  int32_t warps;       // of a CTA

  int64_t free_ctas() const {
    return resident_ctas - std::min(cta_tiles, mostly_narrow ? std::max<int64_t>(1, resident_ctas / 2) : resident_ctas);
  }
};

// Warps per CTA that take tiles. Many tiles of one length run in waves, and a partial last wave leaves memory idle.
// Where fewer warps saturate the bandwidth, the number that fills its waves best takes part. But if all tiles have a
// warp beside the CTA tiles from the start, none has to wait for these.
//
// tokens: KV positions of each tile; 0: various.
inline int32_t active_warps(int64_t work_tiles, int64_t tokens, const WarpLaunch& launch) {
  if (tokens < kBandwidthBoundTokens || launch.resident_ctas == 0) return launch.warps;
  const int64_t free = launch.free_ctas(), ctas = work_tiles <= free * launch.warps ? free : launch.resident_ctas;
  int32_t best = launch.warps;
  float best_share = 0.0f;
  for (int32_t warps = launch.warps; warps >= kMinActiveWarps && ctas > 0; --warps) {
    const int64_t at_once = warps * ctas, rounds = (work_tiles + at_once - 1) / at_once;
    const float share = static_cast<float>(work_tiles) / static_cast<float>(rounds * at_once);
    if (share > best_share + 0.02f) best = warps, best_share = share;
  }
  return best;
}

}  // namespace prefixpack
