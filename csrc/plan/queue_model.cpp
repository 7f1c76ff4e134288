#include "plan/queue_model.h"

#include <algorithm>
#include <array>
#include <limits>

namespace prefixpack {

namespace {

constexpr int32_t kMostGroups = 160;  // of a kind, that begin or stream; more count as one
constexpr int32_t kRing = 256;        // a power of two, so that places in it cost no division
// Work tiles that stream end early by kSameTime of the time at most, and times are rounded by far less than 1e-9.
constexpr double kLeastShare = (1 - 1e-9) / (1 + kSameTime);
static_assert(kRing >= kMostGroups && (kRing & (kRing - 1)) == 0);

// Work tiles that began together.
struct Group {
  double until;  // work served when they are done
  int64_t work_tiles;
};

// Groups in descending order of `until`, so that the next one is the last.
class Groups {
 public:
  bool empty() const { return size_ == 0; }
  int64_t work_tiles() const { return work_tiles_; }
  const Group& next() const { return groups_[size_ - 1]; }
  const Group& last() const { return groups_[0]; }
  void add(double until, int64_t work_tiles) {
    work_tiles_ += work_tiles;
    if (size_ == kMostGroups) {  // as if it were done with the next
      groups_[size_ - 1].work_tiles += work_tiles;
      return;
    }
    int32_t place = size_++;
    for (; place > 0 && groups_[place - 1].until < until; --place) groups_[place] = groups_[place - 1];
    groups_[place] = {until, work_tiles};
  }
  Group take() {
    work_tiles_ -= groups_[--size_].work_tiles;
    return groups_[size_];
  }

 private:
  std::array<Group, kMostGroups> groups_;
  int32_t size_ = 0;
  int64_t work_tiles_ = 0;
};

// Work tiles of one kind, from the queue to their end.
class Kind {
 public:
  Kind(const WorkTileBins& bins, double most_speed, double latency)
      : queue_(bins), most_speed_(most_speed), least_seconds_(1 / most_speed), latency_(latency) {
    skip_empty();
  }

  bool queue_is_empty() const { return bin_ < 0; }
  int64_t streaming() const { return streaming_.work_tiles(); }
  double most_speed() const { return most_speed_; }
  void set_speed(double speed) { speed_ = speed; }

  // Takes work tiles from the queue; returns how many workers are left.
  int64_t start(double now, int64_t free) {
    while (bin_ >= 0 && free > 0) {
      const int64_t work_tiles = std::min(free, queue_.count(bin_) - taken_);
      if (starts_ - begun_ == kMostGroups) {
        start_[(starts_ - 1) % kRing].work_tiles += work_tiles;
      } else {
        start_[starts_++ % kRing] = {now + latency_, queue_.work(bin_), work_tiles};
      }
      free -= work_tiles;
      taken_ += work_tiles;
      if (taken_ < queue_.count(bin_)) break;
      --bin_;
      taken_ = 0;
      skip_empty();
    }
    return free;
  }

  // Time of the next begin or end of streaming.
  double next(double now) const {
    double time = std::numeric_limits<double>::infinity();
    if (begun_ < starts_) time = start_[begun_ % kRing].at;
    if (!streaming_.empty()) time = std::min(time, now + (streaming_.next().until - served_) / speed_);
    return time;
  }
  // A time before which those that stream now are not done.
  double least_end(double now) const {
    return streaming_.empty() ? 0 : (now + (streaming_.last().until - served_) * least_seconds_) * kLeastShare;
  }
  void advance(double seconds) {
    if (!streaming_.empty()) served_ += speed_ * seconds;
  }
  // Begins and ends what is due until then; returns how many work tiles are done.
  int64_t settle(double now, double until) {
    for (; begun_ < starts_ && start_[begun_ % kRing].at <= until; ++begun_) {
      const Start& start = start_[begun_ % kRing];
      streaming_.add(served_ + start.work, start.work_tiles);
    }
    int64_t done = 0;
    while (!streaming_.empty() && streaming_.next().until <= served_ + speed_ * (until - now)) {
      done += streaming_.take().work_tiles;
    }
    return done;
  }

 private:
  struct Start {
    double at, work;
    int64_t work_tiles;
  };
  void skip_empty() {
    while (bin_ >= 0 && queue_.count(bin_) == 0) --bin_;
  }

  const WorkTileBins& queue_;
  const double most_speed_, least_seconds_, latency_;
  int32_t bin_ = WorkTileBins::kBins - 1;
  int64_t taken_ = 0;               // of the bin
  std::array<Start, kRing> start_;  // a ring, in order of time
  uint64_t starts_ = 0, begun_ = 0;
  Groups streaming_;
  double served_ = 0;  // work that each streaming work tile has had since the begin
  double speed_ = 1;
};

}  // namespace

double finish_of(const Workers& workers, const WorkTileBins& whole_bins, const WorkTileBins& narrow_bins,
                 bool mostly_narrow, double limit) {
  const bool paired = whole_bins.work_tiles() > workers.count / 2;
  Kind whole(whole_bins, paired ? workers.paired_speed : workers.lone_speed, workers.whole_latency);
  Kind narrow(narrow_bins, workers.narrow_speed, workers.narrow_latency);
  const auto bandwidth = static_cast<double>(workers.count);
  // So many or fewer work tiles do not fill the bandwidth, whatever is rounded.
  const double few = bandwidth * (1 - 1e-9) / narrow.most_speed();
  int64_t free = mostly_narrow ? workers.count / 2 : workers.count;
  int64_t narrow_free = (workers.count - free) * workers.narrow_per_worker;
  double now = 0;
  for (;;) {
    free = whole.start(now, free);
    if (whole.queue_is_empty()) {
      narrow_free += free * workers.narrow_per_worker;
      free = 0;
    }
    narrow_free = narrow.start(now, narrow_free);
    const auto wholes = static_cast<double>(whole.streaming()), narrows = static_cast<double>(narrow.streaming());
    if (wholes + narrows > 0) {
      double narrow_speed = narrow.most_speed();
      if (wholes + narrows > few) narrow_speed = std::min(narrow_speed, bandwidth / (wholes + narrows));
      narrow.set_speed(narrow_speed);
      if (wholes > 0) whole.set_speed(std::min(whole.most_speed(), (bandwidth - narrows * narrow_speed) / wholes));
    }
    const double next = std::min(whole.next(now), narrow.next(now));
    if (next == std::numeric_limits<double>::infinity() || now >= limit) return now;
    const double least = std::max(whole.least_end(now), narrow.least_end(now));
    if (least >= limit) return least;
    const double seconds = std::max(0.0, next - now);
    whole.advance(seconds);
    narrow.advance(seconds);
    now += seconds;
    const double until = now * (1 + kSameTime);
    free += whole.settle(now, until);
    narrow_free += narrow.settle(now, until);
  }
}

}  // namespace prefixpack
