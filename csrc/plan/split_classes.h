// Tiles that may be split over their KV range, in classes of like tiles, so that every choice of a split is estimated
// in the time of the classes, not of the tiles.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "plan/cost_model.h"
#include "plan/queue_model.h"

namespace prefixpack {

constexpr int32_t kMinSplitTokens = 128;  // shorter splits cost more in partials than they give in balance

// Splits of a tile so that none takes longer than `longest` seconds, unless they would be too short.
inline int32_t splits_needed(double duration, int32_t tokens, double longest) {
  if (duration <= longest) return 1;
  const double wanted = duration / longest;
  if (!(wanted < INT32_MAX)) return 1;  // `longest` is what rounding left of no work
  auto splits = static_cast<int32_t>(wanted);
  splits += splits < wanted;  // rounded up
  return std::max(1, std::min(splits, tokens / kMinSplitTokens));
}

// Times in seconds of one worker for one KV head.
struct SplittableTile {
  double duration;            // from beginning to end
  double work;                // without the overhead, not split
  double partial;             // of one partial of each of its queries
  int32_t tokens;             // KV positions
  int32_t partials;           // of each query, if it is not split
  int32_t combine_row_steps;  // see CostModel
};

class SplitClasses {
 public:
  void clear();
  void add(const SplittableTile& tile) {
    const uint64_t key = key_of(tile);
    if (key != last_key_ || last_class_ == kMostClasses) {  // like tiles often follow each other
      last_class_ = class_of(key, tile.combine_row_steps);
      last_key_ = key;
    }
    Class& like = classes_[last_class_];
    like.duration += tile.duration;
    like.work += tile.work;
    like.partial += tile.partial;
    like.streaming += tile.work - (tile.partials > 1 ? tile.partial : 0.0);
    like.longest = std::max(like.longest, tile.duration);
    ++like.tiles;
    like.tokens = std::max(like.tokens, tile.tokens);
    like.partials = std::max(like.partials, tile.partials);
  }
  void finish_adding();

  // Cuts them into splits of at most `longest` seconds. bins() has these and `others`. Returns whether the splits are
  // not those of the last cut.
  bool cut(double longest, bool narrow, const CostModel& cost, const WorkTileBins& others);
  // If none is longer.
  int64_t work_tiles(double longest, int64_t heads) const {
    int64_t count = 0;
    for (const Class& like : classes_) {
      count += like.tiles * splits_needed(like.duration, like.tokens, longest);
    }
    return count * heads;
  }
  const WorkTileBins& bins() const { return bins_; }
  double combine() const { return combine_; }  // seconds of the longest

 private:
  // Times of its tiles together until finish_adding(), then of each.
  struct Class {
    double duration, work, partial;
    double streaming;  // work that is divided among splits
    double longest;    // duration
    int64_t tiles;
    uint64_t key;
    int32_t tokens, partials;  // the most
    int32_t combine_row_steps;
    int32_t splits;  // of each tile at the last cut; 0: there was none
  };
  static constexpr size_t kPlaceBits = 10, kPlaces = size_t{1} << kPlaceBits, kMostClasses = kPlaces / 2;
  static constexpr size_t kUsualClasses = 32;  // for which memory is taken at once

  static constexpr int32_t kLikeBits = 47;  // low bits of a duration that like tiles may differ in: up to 3 %

  static uint64_t key_of(const SplittableTile& tile) {
    uint64_t bits;
    std::memcpy(&bits, &tile.duration, sizeof bits);
    return (bits >> kLikeBits << kLikeBits) | static_cast<uint64_t>(tile.combine_row_steps) << 1 |
           static_cast<uint64_t>(tile.partials > 1);
  }
  size_t class_of(uint64_t key, int32_t combine_row_steps) {
    const int16_t found = places_[place_of(key)];
    return found >= 0 && classes_[found].key == key ? found : other_class_of(key, combine_row_steps);
  }
  static size_t place_of(uint64_t key) {
    return key * 0x9E3779B97F4A7C15 >> (64 - kPlaceBits);
  }  // 2^64 over the golden ratio
  // The class of a key that is new, or whose place another class has taken.
  size_t other_class_of(uint64_t key, int32_t combine_row_steps);

  std::vector<Class> classes_;
  uint64_t last_key_ = 0;                  // of the tile that was added last,
  size_t last_class_ = kMostClasses;       // and its class; kMostClasses: there is none
  std::array<int16_t, kPlaces> places_{};  // of the classes by hash of their keys; -1: none
  double longest_ = -1, combine_ = 0;      // of the last cut
  double longest_tile_ = 0;                // duration of the classes'
  WorkTileBins bins_;
};

}  // namespace prefixpack
