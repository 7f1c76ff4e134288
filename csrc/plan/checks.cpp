#include "plan/checks.h"

#include <stdexcept>
#include <string>

namespace prefixpack {

namespace {

// Rates and times beyond these are no machine's, and sums of them could leave the range of doubles. NaN is neither.
constexpr double kLeastRate = 1e-30, kMostRate = 1e30, kMostSeconds = 1e30;

// Rows of a tile, and of a step of a combine. The cost model tabulates the queries of a tile.
constexpr int32_t kMostRows = 1 << 16;

bool is_rate(double rate) { return rate >= kLeastRate && rate <= kMostRate; }
bool is_time(double seconds) { return seconds >= 0 && seconds <= kMostSeconds; }

}  // namespace

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

const ModelShape& checked(const ModelShape& shape) {
  require(shape.q_heads >= 1 && shape.kv_heads >= 1 && shape.q_heads % shape.kv_heads == 0,
          "q_heads " + std::to_string(shape.q_heads) + " is no multiple of kv_heads " + std::to_string(shape.kv_heads));
  require(shape.q_heads <= kMostHeads, "q_heads " + std::to_string(shape.q_heads) + " is more than 2^16");
  require(shape.head_dim >= 1, "head_dim " + std::to_string(shape.head_dim) + " is not positive");
  require(shape.kv_bytes >= 1 && shape.partial_bytes >= 1, "kv_bytes and partial_bytes must be positive");
  return shape;
}

const DeviceModel& checked(const DeviceModel& device) {
  require(device.workers >= 1, "workers " + std::to_string(device.workers) + " is not positive");
  require(is_rate(device.bandwidth) && is_rate(device.flops), "bandwidth and flops must be positive and finite");
  require(device.wide_rows == 0 || is_rate(device.wide_flops), "wide_flops must be positive and finite");
  require(is_rate(device.lone_speedup), "lone_speedup must be positive and finite");
  require(is_time(device.item_overhead) && is_time(device.narrow_overhead),
          "item_overhead or narrow_overhead is negative or not finite");
  require(device.widest_flops == 0 || (is_rate(device.widest_flops) && is_rate(device.medium_flops)),
          "widest_flops is negative or not finite, or medium_flops is not positive and finite beside it");
  require(is_time(device.combine_latency) && is_time(device.combine_step) && is_time(device.deferred_combine) &&
              is_time(device.deferred_combine_step),
          "a time of combines is negative or not finite");
  require(device.combine_rows >= 1 && device.combine_width >= 1 && device.combine_fan_in >= 1,
          "combine_rows, combine_width and combine_fan_in must be positive");
  require(device.combine_rows <= kMostRows && device.combine_width <= kMostRows,
          "combine_rows and combine_width must be at most 2^16");
  require(device.reread >= 0 && device.reread <= 1, "reread must lie in 0 .. 1");
  require(device.narrow_reread >= 0 && device.narrow_reread <= 1, "narrow_reread must lie in 0 .. 1");
  require(device.narrow_to_fill >= 1 && device.narrow_per_worker >= device.narrow_to_fill,
          "narrow_to_fill must be positive, and narrow_per_worker at least as large");
  require(device.narrow_parts >= 1, "narrow_parts " + std::to_string(device.narrow_parts) + " is not positive");
  require(device.overlap >= 0 && device.overlap <= 1, "overlap must lie in 0 .. 1");
  require(!device.tile_rows.empty() && device.tile_rows.front() >= 1, "tile_rows needs at least one positive entry");
  for (size_t i = 1; i < device.tile_rows.size(); ++i) {
    require(device.tile_rows[i] > device.tile_rows[i - 1], "tile_rows must ascend");
  }
  require(device.tile_rows.back() <= kMostRows,
          "tile_rows has " + std::to_string(device.tile_rows.back()) + ", which is more than 2^16");
  return device;
}

const Machine& checked(const Machine& machine) {
  require(machine.resident_ctas >= 1 && machine.warps >= 1 && machine.narrow_parts >= 1 && machine.few_ctas >= 1 &&
              machine.key_tile >= 1,
          "resident_ctas, few_ctas, warps, narrow_parts and key_tile must be positive");
  for (double rate : {machine.bandwidth, machine.cta_store, machine.warp_rate, machine.flops32, machine.flops64,
                      machine.flops128, machine.lone_speedup, machine.sibling}) {
    require(is_rate(rate), "rates of the machine must be positive and finite");
  }
  for (double seconds : {machine.begin, machine.warp_begin, machine.cta_start, machine.cta_end, machine.warp_start,
                         machine.cta_combine, machine.warp_combine, machine.cta_combine_step, machine.warp_combine_step,
                         machine.deferred_combine, machine.deferred_combine_step}) {
    require(is_time(seconds), "times of the machine must be finite and not negative");
  }
  return machine;
}

}  // namespace prefixpack
