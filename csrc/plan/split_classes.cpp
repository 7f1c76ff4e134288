#include "plan/split_classes.h"

namespace prefixpack {

namespace {

constexpr uint64_t kHashFactor = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio
constexpr int32_t kHashShift = 64 - 10;

}  // namespace

void SplitClasses::clear() {
  classes_.clear();
  places_.fill(-1);
  last_class_ = kMostClasses;
  longest_ = -1;
}

size_t SplitClasses::class_of(uint64_t key, int32_t combine_row_steps) {
  size_t place = key * kHashFactor >> kHashShift;
  static_assert(kPlaces == size_t{1} << (64 - kHashShift));
  while (places_[place] >= 0 && classes_[places_[place]].key != key) place = (place + 1) % kPlaces;
  if (places_[place] >= 0) return places_[place];
  if (classes_.size() == kMostClasses) return kMostClasses - 1;  // more kinds than are told apart
  places_[place] = static_cast<int16_t>(classes_.size());
  classes_.push_back({key, 0, {0, 0, 0, 0, 0, combine_row_steps}, 0, 0, 0});
  return classes_.size() - 1;
}

void SplitClasses::finish_adding() {
  for (Class& like : classes_) {
    const double share = 1.0 / static_cast<double>(like.tiles);
    like.mean.duration = std::min(like.mean.duration * share, like.longest);  // rounding adds no split
    like.mean.work *= share;
    like.mean.partial *= share;
    like.streaming *= share;
  }
}

bool SplitClasses::cut(double longest, bool narrow, const CostModel& cost, const WorkTileBins& others) {
  if (longest == longest_) return false;
  bool changed = longest_ < 0;
  longest_ = longest;
  for (Class& like : classes_) {
    const int32_t splits = splits_needed(like.mean.duration, like.mean.tokens, longest);
    changed |= splits != like.splits;
    like.splits = splits;
  }
  if (!changed) return false;
  bins_ = others;
  combine_ = 0;
  const int64_t heads = cost.kv_heads();
  for (const Class& like : classes_) {
    const SplittableTile& tile = like.mean;
    const int32_t splits = like.splits;
    bins_.add(splits == 1 ? tile.work : like.streaming / splits + tile.partial, like.tiles * heads * splits);
    const int32_t partials = tile.partials + splits - 1;
    if (partials > 1) combine_ = std::max(combine_, cost.combine(tile.combine_row_steps, partials, narrow));
  }
  return true;
}

}  // namespace prefixpack
