// When a batch of units would be done: a coarse simulation of the persistent scheduler for the planner's own choices.
// The makespan of a finished plan, unit by unit, is in makespan.h.
#pragma once

#include <array>
#include <cstdint>

namespace prefixpack {

// Units of similar work, counted in bins by work. Work is in seconds of a worker that has an even share of the
// bandwidth.
class UnitBins {
 public:
  // longest: work of the longest bin. Longer units share that bin.
  void reset(double longest) {
    count_.fill(0);
    work_.fill(0);
    to_bin_ = kBins / (longest > 0 ? longest : 1.0);
    longest_ = 0;
    units_ = 0;
  }
  void add(double work, int64_t units) {
    const double place = work * to_bin_;
    // Rounding may leave a little less than nothing.
    const int32_t bin = !(place < kBins - 1) ? kBins - 1 : place > 0 ? static_cast<int32_t>(place) : 0;
    count_[bin] += units;
    work_[bin] += work * static_cast<double>(units);
    units_ += units;
    if (work > longest_) longest_ = work;
  }

  static constexpr int32_t kBins = 64;
  int64_t count(int32_t bin) const { return count_[bin]; }
  // Of each unit. The last bin's units count as the longest of them.
  double work(int32_t bin) const { return bin == kBins - 1 ? longest_ : work_[bin] / static_cast<double>(count_[bin]); }
  int64_t units() const { return units_; }

 private:
  std::array<int64_t, kBins> count_;
  std::array<double, kBins> work_;
  double to_bin_ = 0, longest_ = 0;
  int64_t units_ = 0;
};

// Workers that share a bandwidth. A worker runs one whole unit, or several narrow ones at a time.
struct Workers {
  int64_t count;              // workers
  int64_t narrow_per_worker;  // narrow units that a worker runs at a time
  double paired_speed;        // most speed of a whole unit, of that with an even share of the bandwidth
  double lone_speed;          // likewise, while at most half of the workers have whole units
  double narrow_speed;        // likewise, of a narrow unit
  double whole_latency;       // seconds of a whole unit without streaming: to begin and to end
  double narrow_latency;      // likewise, of a narrow unit
};

// Seconds until the last unit is done. Workers take whole units first, the longest first, then narrow ones. Units that
// stream share the bandwidth equally, none faster than its most. narrow_prevails: half of the workers take narrow units
// from the start. O(bins^2) at worst.
double finish_of(const Workers& workers, const UnitBins& whole, const UnitBins& narrow, bool narrow_prevails);

}  // namespace prefixpack
