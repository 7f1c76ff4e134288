// When a batch of work tiles would be done: a coarse simulation of the persistent scheduler for the planner's own
// choices. benchmarks/simulator has the makespan of a finished plan, work tile by work tile.
#pragma once

#include <array>
#include <cstdint>

namespace prefixpack {

constexpr double kSameTime = 0.02;  // events this share of the time so far apart are one event

// Work tiles of similar work, counted in bins by work. Work is in seconds of a worker that has an even share of the
// bandwidth.
class WorkTileBins {
 public:
  // longest: work of the longest bin. Longer work tiles share that bin.
  void reset(double longest) {
    count_.fill(0);
    work_.fill(0);
    to_bin_ = kBins / (longest > 0 ? longest : 1.0);
    longest_ = 0;
    work_tiles_ = 0;
  }
  void add(double work, int64_t work_tiles) {
    const double place = work * to_bin_;
    // Rounding may leave a little less than nothing.
    const int32_t bin = !(place < kBins - 1) ? kBins - 1 : place > 0 ? static_cast<int32_t>(place) : 0;
    count_[bin] += work_tiles;
    work_[bin] += work * static_cast<double>(work_tiles);
    work_tiles_ += work_tiles;
    if (work > longest_) longest_ = work;
  }

  static constexpr int32_t kBins = 64;
  int64_t count(int32_t bin) const { return count_[bin]; }
  // Seconds of each work tile of a bin. Those of the last bin count as the longest of them.
  double work(int32_t bin) const { return bin == kBins - 1 ? longest_ : work_[bin] / static_cast<double>(count_[bin]); }
  int64_t work_tiles() const { return work_tiles_; }

 private:
  std::array<int64_t, kBins> count_;
  std::array<double, kBins> work_;
  double to_bin_ = 0, longest_ = 0;
  int64_t work_tiles_ = 0;
};

// Workers that share a bandwidth. A worker runs one whole work tile, or several narrow ones at a time.
struct Workers {
  int64_t count;              // workers
  int64_t narrow_per_worker;  // narrow work tiles that a worker runs at a time
  double paired_speed;        // most speed of a whole work tile, of that with an even share of the bandwidth
  double lone_speed;          // likewise, while at most half of the workers have whole work tiles
  double narrow_speed;        // likewise, of a narrow work tile
  double whole_latency;       // seconds of a whole work tile without streaming: to begin and to end
  double narrow_latency;      // likewise, of a narrow work tile
};

// Seconds until the last work tile is done. Workers take whole work tiles first, the longest first, then narrow ones.
// Work tiles that stream share the bandwidth equally, none faster than its most. mostly_narrow: half of the workers
// take narrow work tiles from the start. From `limit` on, any time that is not later. O(bins^2) at worst.
double finish_of(const Workers& workers, const WorkTileBins& whole, const WorkTileBins& narrow, bool mostly_narrow,
                 double limit);

}  // namespace prefixpack
