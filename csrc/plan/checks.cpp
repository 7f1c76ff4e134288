#include "plan/checks.h"

#include <stdexcept>
#include <string>

namespace prefixpack {

namespace {

// Rates and times beyond these are no machine's, and sums of them could leave the range of doubles. NaN is neither.
constexpr double kLeastRate = 1e-30, kMostRate = 1e30, kMostSeconds = 1e30;

// The most workers, rows, bytes and the like. Tables by rows stay small, and products of three of them fit 64 bits.
constexpr int32_t kMost = 1 << 16;
constexpr int32_t kMostKvHeads = 1 << 12;

bool is_rate(double rate) { return rate >= kLeastRate && rate <= kMostRate; }
bool is_time(double seconds) { return seconds >= 0 && seconds <= kMostSeconds; }

void require_range(const char* name, int64_t value, int64_t least, int64_t most) {
  require(value >= least && value <= most, std::string(name) + " is " + std::to_string(value) + "; expected " +
                                               std::to_string(least) + " to " + std::to_string(most));
}

}  // namespace

void require(bool condition, const std::string& message) {
  if (!condition) throw std::invalid_argument(message);
}

const ModelShape& checked(const ModelShape& shape) {
  require(shape.q_heads >= 1 && shape.kv_heads >= 1 && shape.q_heads % shape.kv_heads == 0,
          "q_heads " + std::to_string(shape.q_heads) + " is no multiple of kv_heads " + std::to_string(shape.kv_heads));
  require_range("q_heads", shape.q_heads, 1, kMostHeads);
  require_range("kv_heads", shape.kv_heads, 1, kMostKvHeads);
  require_range("head_dim", shape.head_dim, 1, kMost);
  require_range("kv_bytes", shape.kv_bytes, 1, kMost);
  require_range("partial_bytes", shape.partial_bytes, 1, kMost);
  return shape;
}

const DeviceModel& checked(const DeviceModel& device) {
  require_range("workers", device.workers, 1, kMost);
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
  require_range("combine_rows", device.combine_rows, 1, kMost);
  require_range("combine_width", device.combine_width, 1, kMost);
  require_range("combine_fan_in", device.combine_fan_in, 1, INT32_MAX);
  require(device.reread >= 0 && device.reread <= 1, "reread must lie in 0 .. 1");
  require(device.narrow_reread >= 0 && device.narrow_reread <= 1, "narrow_reread must lie in 0 .. 1");
  require_range("narrow_rows", device.narrow_rows, 0, kMost);
  require_range("wide_rows", device.wide_rows, 0, kMost);
  require_range("narrow_per_worker", device.narrow_per_worker, 1, kMost);
  require_range("narrow_to_fill", device.narrow_to_fill, 1, device.narrow_per_worker);
  require_range("narrow_parts", device.narrow_parts, 1, kMost);
  require(device.overlap >= 0 && device.overlap <= 1, "overlap must lie in 0 .. 1");
  require(!device.tile_rows.empty(), "tile_rows is empty; expected at least one number of rows");
  int32_t before = 0;
  for (int32_t rows : device.tile_rows) {
    require_range("a number of tile_rows", rows, 1, kMost);
    require(rows > before, "tile_rows must ascend");
    before = rows;
  }
  return device;
}

}  // namespace prefixpack
