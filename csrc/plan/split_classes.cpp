#include "plan/split_classes.h"

namespace prefixpack {

void SplitClasses::clear() {
  classes_.clear();
  classes_.reserve(kUsualClasses);
  places_.fill(-1);
  last_class_ = kMostClasses;
  longest_ = -1;
}

size_t SplitClasses::other_class_of(uint64_t key, int32_t combine_row_steps) {
  size_t place = place_of(key);
  while (places_[place] >= 0 && classes_[places_[place]].key != key) place = (place + 1) % kPlaces;
  if (places_[place] >= 0) return places_[place];
  if (classes_.size() == kMostClasses) return kMostClasses - 1;  // more kinds than are told apart
  places_[place] = static_cast<int16_t>(classes_.size());
  classes_.push_back({0, 0, 0, 0, 0, 0, key, 0, 0, combine_row_steps, 0});
  return classes_.size() - 1;
}

void SplitClasses::finish_adding() {
  longest_tile_ = 0;
  for (Class& like : classes_) {
    const double share = 1.0 / static_cast<double>(like.tiles);
    like.duration = std::min(like.duration * share, like.longest);  // rounding adds no split
    like.work *= share;
    like.partial *= share;
    like.streaming *= share;
    longest_tile_ = std::max(longest_tile_, like.duration);
  }
}

bool SplitClasses::cut(double longest, bool narrow, const CostModel& cost, const WorkTileBins& others) {
  if (longest == longest_) return false;
  bool changed = longest_ < 0;
  const bool any_split = longest < longest_tile_ || longest_ < longest_tile_;
  longest_ = longest;
  if (!any_split && !changed) return false;
  for (Class& like : classes_) {
    const int32_t splits = splits_needed(like.duration, like.tokens, longest);
    changed |= splits != like.splits;
    like.splits = splits;
  }
  if (!changed) return false;
  bins_ = others;
  combine_ = 0;
  int32_t last_partials = 0, last_row_steps = 0;  // like classes often follow each other
  const int64_t heads = cost.kv_heads();
  for (const Class& like : classes_) {
    const int32_t splits = like.splits;
    bins_.add(splits == 1 ? like.work : like.streaming / splits + like.partial, like.tiles * heads * splits);
    const int32_t partials = like.partials + splits - 1;
    if (partials == 1 || (partials == last_partials && like.combine_row_steps == last_row_steps)) continue;
    last_partials = partials;
    last_row_steps = like.combine_row_steps;
    combine_ = std::max(combine_, cost.combine(last_row_steps, partials, narrow));
  }
  return true;
}

}  // namespace prefixpack
