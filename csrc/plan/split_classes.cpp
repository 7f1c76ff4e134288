#include "plan/split_classes.h"

#include <cstring>

namespace prefixpack {

namespace {

constexpr int32_t kLikeBits = 47;  // low bits of a double that durations of like tiles may differ in: up to 3 %
constexpr uint64_t kHashFactor = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio
constexpr int32_t kHashShift = 64 - 10;

}  // namespace

void SplitClasses::clear() {
  classes_.clear();
  places_.fill(-1);
  longest_ = -1;
}

uint64_t SplitClasses::key_of(const SplittableTile& tile) {
  uint64_t bits;
  std::memcpy(&bits, &tile.duration, sizeof bits);
  return (bits >> kLikeBits << kLikeBits) | static_cast<uint64_t>(tile.combine_row_steps) << 1 |
         static_cast<uint64_t>(tile.partials > 1);
}

SplitClasses::Class& SplitClasses::class_of(const SplittableTile& tile) {
  const uint64_t key = key_of(tile);
  size_t place = key * kHashFactor >> kHashShift;
  static_assert(kPlaces == size_t{1} << (64 - kHashShift));
  while (places_[place] >= 0 && classes_[places_[place]].key != key) place = (place + 1) % kPlaces;
  if (places_[place] >= 0) return classes_[places_[place]];
  if (classes_.size() == kMostClasses) return classes_.back();  // more kinds than are told apart
  places_[place] = static_cast<int16_t>(classes_.size());
  return classes_.emplace_back(Class{key, 0, {0, 0, 0, 0, 0, tile.combine_row_steps}, 0, 0});
}

void SplitClasses::add(const SplittableTile& tile) {
  Class& like = class_of(tile);
  ++like.tiles;
  like.mean.duration += tile.duration;
  like.mean.work += tile.work;
  like.mean.partial += tile.partial;
  like.mean.tokens = std::max(like.mean.tokens, tile.tokens);
  like.mean.partials = std::max(like.mean.partials, tile.partials);
  like.longest = std::max(like.longest, tile.duration);
  like.streaming += tile.work - (tile.partials > 1 ? tile.partial : 0.0);
}

void SplitClasses::finish_adding() {
  for (Class& like : classes_) {
    const double share = 1.0 / static_cast<double>(like.tiles);
    like.mean.duration = std::min(like.mean.duration * share, like.longest);  // rounding adds no piece
    like.mean.work *= share;
    like.mean.partial *= share;
    like.streaming *= share;
  }
}

void SplitClasses::cut(double longest, bool narrow, const CostModel& cost, const WorkTileBins& others) {
  if (longest == longest_) return;
  longest_ = longest;
  bins_ = others;
  combine_ = 0;
  const int64_t heads = cost.kv_heads();
  for (const Class& like : classes_) {
    const SplittableTile& tile = like.mean;
    const int32_t pieces = split_pieces(tile.duration, tile.tokens, longest);
    bins_.add(pieces == 1 ? tile.work : like.streaming / pieces + tile.partial, like.tiles * heads * pieces);
    const int32_t partials = tile.partials + pieces - 1;
    if (partials > 1) combine_ = std::max(combine_, cost.combine(tile.combine_row_steps, partials, narrow));
  }
}

}  // namespace prefixpack
