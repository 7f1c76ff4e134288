#include "plan/tiling.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace prefixpack {

namespace {

constexpr int32_t kMinPieceTokens = 128;  // shorter pieces cost more in partials than they give in balance
constexpr int32_t kPieceAlignment = 16;
constexpr double kShortestUnit = 2;       // of what it costs to take one up
constexpr double kWorthSplitting = 0.95;  // of the time with fewer partials; predictions err by more than this
constexpr double kFew = 0.2;              // narrow items, of those that all workers do at once
constexpr double kFewBesideWhole = 0.4;   // for each worker
constexpr double kEvenEnough = 1.02;      // of the time if all workers were done at once
constexpr double kWorthSplittingNarrow = 0.9;
constexpr double kDearCombine = 0.35;  // of the time until the last worker is done
constexpr double kTooLongForWarps =
    32;  // even shares of a warp or shortest pieces: a combine of so many partials takes a warp too long
constexpr double kLongestCounted = 2;  // even shares of a worker: longer units are counted as one kind
// Longest units that are tried, in even shares of a worker. A few workers read at the full bandwidth.
constexpr std::array<double, 2> kNarrowShares{1.0, 0.5};
constexpr std::array<double, 7> kShares{1.34, 1.12, 1.0, 0.67, 0.5, 0.34, 0.2};
constexpr std::array<double, 6> kFewerPieces{1.25, 1.6, 2.0, 2.8, 4.0, 6.0};

}  // namespace

Tiling::Tiling(const CostModel& cost)
    : cost_(&cost),
      per_worker_(static_cast<double>(cost.workers()) / cost.kv_heads()),
      longest_overhead_(cost.longest_overhead() * per_worker_),
      partial_(cost.partial() * per_worker_) {}

void Tiling::make(const std::vector<Pack>& packs, const BatchLens& lens, const int32_t* partials, int64_t num_partials,
                  int32_t step) {
  tiles_.make_room(packs.size() + num_partials / step);
  list(packs, lens, partials, step);
  // So few narrow items do not keep every worker busy: whole workers read them faster, and cut into fewer pieces. Where
  // whole workers have other items too, narrow ones run beside these, unless they are very few.
  const double few = whole_units_ > 0 ? kFewBesideWhole : kFew * cost_->most_at_a_time();
  // Nor do they pay where most of what single queries read is too long for them: they would come last, one by one.
  const bool seldom = narrow_tokens_ < whole_tail_tokens_;
  if (narrow_units_ > 0 && (seldom || narrow_units_ < few * cost_->workers())) {
    widen_narrow_tiles(-1);
  } else {
    const TileClass& narrow = cost_->tile(1);
    const double shortest = kMinPieceTokens * narrow.first_read * per_worker_ * narrow.stretch;
    const double even = narrow_ / per_worker_ / cost_->narrow_speedup();
    const double too_long = kTooLongForWarps * std::max(even, shortest);
    if (longest_narrow_tile_ > too_long) widen_narrow_tiles(too_long);
  }
  if (num_tiles_ == 0) return;
  count_units();
  choose_longest_unit();
  shorten_narrow_units();
  lengthen_whole_units();
}

void Tiling::list(const std::vector<Pack>& packs, const BatchLens& lens, const int32_t* partials, int32_t step) {
  int64_t tokens_read = 0, narrow = 0, narrow_tokens = 0, whole_tail_tokens = 0;
  double total = 0, longest = 0, longest_narrow = 0, narrow_seconds = 0;
  Tile* tile = tiles_.data();
  const auto add = [&](const Pack& pack, int32_t first, int32_t count, int32_t tokens, const TileClass& kind) {
    const int32_t query_begin = pack.query_begin + first;
    const bool partial = partials[query_begin] > 1;
    tile->item = {query_begin, count, pack.request, pack.kv_begin, pack.kv_end, kWriteThrough, kind.rows};
    tile->tokens = tokens;
    tile->stretch = kind.stretch;
    tile->share = kind.share;
    tile->partial = partial;
    tile->overhead = kind.overhead * per_worker_;
    tile->lone = kind.lone;
    tile->first_of_pack = first == 0 || pack.kv_end == kOpenEnd;
    tile->seconds = cost_->item(kind, tokens, first > 0) * per_worker_ + (partial ? count * partial_ : 0.0);
    tile->duration = tile->seconds * kind.stretch;
    tokens_read += tokens;
    total += tile->seconds;
    if (kind.share < cost_->most_at_a_time()) {
      ++narrow;
      narrow_tokens += tokens;
      narrow_seconds += tile->seconds;
      longest_narrow = std::max(longest_narrow, tile->duration);
    } else {
      if (pack.query_count == 1) whole_tail_tokens += tokens;
      longest = std::max(longest, tile->duration);
    }
    ++tile;
  };
  for (const Pack& pack : packs) {
    const bool open = pack.kv_end == kOpenEnd;
    const int32_t tokens = (open ? static_cast<int32_t>(lens.seq_lens[pack.request]) : pack.kv_end) - pack.kv_begin;
    if (pack.query_count == 1) {  // most packs
      add(pack, 0, 1, tokens, cost_->tile(1, tokens));
      continue;
    }
    for (int32_t first = 0; first < pack.query_count; first += step) {
      const int32_t count = std::min(step, pack.query_count - first);
      const int32_t hidden = open ? pack.query_count - first - count : 0;  // tokens behind this tile
      add(pack, first, count, tokens - hidden, cost_->tile(count, tokens - hidden));
    }
  }
  num_tiles_ = tile - tiles_.data();
  tokens_ = tokens_read;
  total_ = total;
  narrow_ = narrow_seconds;
  narrow_tokens_ = narrow_tokens;
  whole_tail_tokens_ = whole_tail_tokens;
  longest_tile_ = longest;
  longest_narrow_tile_ = longest_narrow;
  longest_ = std::max(longest, longest_narrow);
  narrow_units_ = narrow * cost_->kv_heads();
  whole_units_ = (static_cast<int64_t>(num_tiles_) - narrow) * cost_->kv_heads();
}

void Tiling::widen_narrow_tiles(double longer_than) {
  const int32_t rows = cost_->narrowest_whole_tile();
  const double reread = cost_->narrow_reread() * per_worker_;
  const double lone = cost_->whole_lone();
  double longest_narrow = 0;
  for (size_t i = 0; i < num_tiles_; ++i) {
    Tile& tile = tiles_[i];
    if (!is_narrow(tile)) continue;
    if (tile.duration <= longer_than) {
      longest_narrow = std::max(longest_narrow, tile.duration);
      continue;
    }
    tile.item.tile_rows = rows;
    tile.stretch = cost_->stretch(rows);
    tile.share = cost_->share(rows);
    const double overhead = cost_->overhead(rows) * per_worker_;
    const double added = overhead - tile.overhead - tile.tokens * reread;
    total_ += added;
    narrow_ -= tile.seconds;
    narrow_units_ -= cost_->kv_heads();
    whole_units_ += cost_->kv_heads();
    tile.seconds += added;
    tile.overhead = overhead;
    tile.duration = tile.seconds;
    tile.lone = lone;
    longest_tile_ = std::max(longest_tile_, tile.duration);
  }
  longest_narrow_tile_ = longest_narrow;
  longest_ = std::max(longest_tile_, longest_narrow);
}

int32_t Tiling::split_pieces(const Tile& tile, double longest) {
  const int32_t wanted = static_cast<int32_t>(std::ceil(tile.duration / longest));
  return std::max(1, std::min(wanted, tile.tokens / kMinPieceTokens));
}

int32_t Tiling::piece_length(const Tile& tile, int32_t pieces) {
  if (pieces == 1) return tile.tokens;
  const int32_t even = (tile.tokens + pieces - 1) / pieces;
  return (even + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

double Tiling::lone_duration(const Tile& tile, double duration) const {
  const double overhead = is_narrow(tile) ? tile.overhead * cost_->most_at_a_time() : tile.overhead;
  return overhead + (duration - overhead) * tile.lone;
}

double Tiling::split_seconds(const Tile& tile, int32_t pieces) const {
  const double partial = tile.item.query_count * partial_;
  return (tile.seconds - tile.overhead - (tile.partial ? partial : 0.0)) / pieces + tile.overhead + partial;
}

// Work beyond a level to which all workers can be filled is done by the units that are longer, side by side; and units
// do not share a worker, so that a round is as long as its longest.
double Tiling::Level::finish() const {
  if (units == 0) return 0;
  const double width = 1 / to_bin, at_least = lone;
  int64_t longer = units;
  const double per_unit = static_cast<double>(heads) / static_cast<double>(workers);
  double below = 0, filled = 0;  // work of units up to this duration, level to which they fill the workers
  double beyond = 0;
  for (int32_t i = 0; i < kBins - 1; ++i) {
    longer -= count[i];
    below += count[i] * (i + 0.5) * width;
    const double level = (i + 1) * width;
    if ((below + static_cast<double>(longer) * level) * per_unit >= level) {
      filled = level;
      continue;
    }
    if (longer > 0) beyond += width * std::max(at_least, static_cast<double>(longer) * per_unit);
  }
  double latest = std::max({total * per_unit, filled + beyond, longest_lone});
  if (longest * to_bin > kBins) latest = std::max(latest, filled + beyond + (longest - kBins * width) * at_least);
  int64_t seen = 0, rounds = 0;
  const int64_t all = units * heads;
  for (int32_t i = kBins - 1; i >= 0; --i) {
    seen += int64_t{count[i]} * heads;
    for (; rounds * workers < seen; ++rounds) {
      const auto left = static_cast<double>(std::min(workers, all - rounds * workers));
      const double duration = (i + 0.5) * width;
      latest = std::max(
          latest, duration * (static_cast<double>(rounds) + std::max(at_least, left / static_cast<double>(workers))));
    }
  }
  return latest;
}

// When the last worker is done if no unit is longer than this. Narrow units come once whole ones leave workers idle.
Tiling::Finish Tiling::finish_time(const Split& split) const {
  Level whole = whole_level_, narrow = narrow_level_;
  double work = total_, narrow_combine = 0, whole_combine = 0;
  for (int32_t i : splittable_) {
    const Tile& tile = tiles_[i];
    const bool is_narrow = this->is_narrow(tile);
    const int32_t pieces = this->pieces(tile, is_narrow ? split.narrow : split.whole);
    const double seconds = piece_seconds(tile, pieces);
    work += pieces * seconds - tile.seconds;
    const double duration = is_narrow ? seconds * cost_->most_at_a_time() : seconds;
    (is_narrow ? narrow : whole).add(duration, lone_duration(tile, duration), pieces);
    if (pieces > 1) {
      double& combine = is_narrow ? narrow_combine : whole_combine;
      combine = std::max(combine, cost_->combine(tile.item.query_count, pieces, is_narrow));
    }
  }
  const double even = work / per_worker_, whole_finish = whole.finish(), narrow_finish = narrow.finish();
  const double narrow_loss =
      narrow.units > 0 ? narrow_finish - narrow.total * narrow.heads / static_cast<double>(narrow.workers) : 0;
  return {narrow_finish + narrow_combine, std::max(whole_finish, even + narrow_loss) + whole_combine, whole_combine};
}

// Alike tiles stand together; counting a run of them in a register does not wait for the count in memory.
void Tiling::count_units() {
  to_bin_ = (kShareBins - 1) / longest_;
  shares_.fill(0);
  splittable_.clear();
  levels_counted_ = false;
  const double whole = kShares.back() * total_ / per_worker_;
  const double narrow = std::min(whole, kNarrowShares.back() * narrow_ / per_worker_ / cost_->narrow_speedup());
  int32_t run_bin = 0, run_shares = 0;
  for (const Tile& tile : *this) {
    const int32_t tile_bin = bin(tile.duration);
    if (tile_bin != run_bin) {
      shares_[run_bin] += run_shares;
      run_bin = tile_bin;
      run_shares = 0;
    }
    run_shares += tile.share;
    if (tile.duration > (is_narrow(tile) ? narrow : whole))
      splittable_.push_back(static_cast<int32_t>(&tile - begin()));
  }
  shares_[run_bin] += run_shares;
}

// Of the tiles that no longest unit splits. Most batches are even without it.
void Tiling::count_levels() {
  if (levels_counted_) return;
  levels_counted_ = true;
  const double at_a_time = cost_->most_at_a_time();
  for (Level* level : {&whole_level_, &narrow_level_}) {
    level->count.fill(0);
    level->heads = cost_->kv_heads();
    level->total = level->longest = level->longest_lone = 0;
    level->lone = 1;
    level->units = 0;
  }
  const double even = total_ / per_worker_, narrow_even = narrow_ / per_worker_;
  whole_level_.workers = cost_->workers();
  whole_level_.to_bin = kBins / std::max(std::min(longest_tile_, kLongestCounted * even) * 1.001, 1e-12);
  narrow_level_.workers = int64_t{cost_->workers()} * cost_->most_at_a_time();
  const double counted = std::min(longest_narrow_tile_ * cost_->narrow_speedup(), kLongestCounted * narrow_even);
  narrow_level_.to_bin = kBins / std::max(counted * 1.001, 1e-12);
  size_t next = 0;
  for (size_t i = 0; i < num_tiles_; ++i) {
    if (next < splittable_.size() && splittable_[next] == static_cast<int32_t>(i)) {
      ++next;
      continue;
    }
    const Tile& tile = tiles_[i];
    const bool narrow = is_narrow(tile);
    const double duration = narrow ? tile.seconds * at_a_time : tile.seconds;
    (narrow ? narrow_level_ : whole_level_).add(duration, lone_duration(tile, duration), 1);
  }
}

// When the last worker is done if no unit is longer than `longest`: the work divided evenly, or the k-th unit of
// the worker that must take k of the (k - 1) * workers + 1 longest.
double Tiling::even_time(double longest) const {
  std::array<int32_t, kShareBins> count = shares_;
  double total = total_;
  for (int32_t i : splittable_) {
    const Tile& tile = tiles_[i];
    const int32_t pieces = this->pieces(tile, longest);
    const double seconds = piece_seconds(tile, pieces);
    total += pieces * seconds - tile.seconds;
    count[bin(tile.duration)] -= tile.share;
    count[std::min(bin(piece_duration(tile, pieces)), kShareBins - 1)] += pieces * tile.share;
  }
  double latest = total * cost_->kv_heads() / cost_->workers();
  const int64_t at_once = int64_t{cost_->workers()} * cost_->most_at_a_time();
  int64_t units = 0, waves = 0;
  for (int32_t bin = kShareBins - 1; bin >= 0; --bin) {
    units += int64_t{count[bin]} * cost_->kv_heads();
    for (; waves * at_once < units; ++waves) latest = std::max(latest, (waves + 1) * bin / to_bin_);
  }
  return latest;
}

void Tiling::choose_longest_unit() {
  const double even = total_ / per_worker_;
  longest_whole_ = longest_;
  finish_ = even_time(longest_);
  for (double part : kShares) {
    if (finish_ <= kEvenEnough * even) break;
    // A unit does not get shorter than what it costs to take it up, however little there is to do.
    const double candidate = std::max(even * part, kShortestUnit * longest_overhead_);
    if (candidate >= longest_) continue;
    const double finish = even_time(candidate);
    if (finish < kWorthSplitting * finish_) {
      finish_ = finish;
      longest_whole_ = candidate;
    }
  }
  longest_narrow_ = longest_whole_;
}

// With many narrow units the bandwidth is shared by all warps: none should be longer than an even share of these.
void Tiling::shorten_narrow_units() {
  const double even = narrow_ / per_worker_ / cost_->narrow_speedup();
  if (longest_narrow_tile_ <= even ||
      narrow_units_ * cost_->narrow_speedup() < cost_->workers() * cost_->most_at_a_time())
    return;
  count_levels();
  double best = finish_time({longest_narrow_, longest_whole_}).narrow;
  for (double part : kNarrowShares) {
    const double candidate = even * part;
    if (candidate >= std::min(longest_narrow_, longest_narrow_tile_)) continue;
    const double finish = finish_time({candidate, longest_whole_}).narrow;
    if (finish >= kWorthSplittingNarrow * best) continue;
    best = finish;
    longest_narrow_ = candidate;
  }
}

// A row's partials are combined one after the other: more of them can cost more than shorter units save.
void Tiling::lengthen_whole_units() {
  double combine = 0;
  for (int32_t i : splittable_) {
    const Tile& tile = tiles_[i];
    const int32_t pieces = this->pieces(tile);
    if (pieces > 1 && !is_narrow(tile)) {
      combine = std::max(combine, cost_->combine(tile.item.query_count, pieces, false));
    }
  }
  if (combine == 0 || combine <= kDearCombine / 2 * finish_) return;
  count_levels();
  Finish best = finish_time({longest_narrow_, longest_whole_});
  if (best.combine <= kDearCombine * best.all) return;
  const double chosen = longest_whole_;
  for (double times : kFewerPieces) {
    const double candidate = chosen * times;
    if (candidate >= longest_) break;
    const Finish finish = finish_time({longest_narrow_, candidate});
    if (finish.all >= kWorthSplitting * best.all) continue;
    best = finish;
    longest_whole_ = candidate;
  }
  if (longest_whole_ != chosen) finish_ = best.all;
}

int64_t Tiling::whole_pieces() const {
  int64_t found = 0;
  for (const Tile& tile : *this) {
    if (!is_narrow(tile)) found += pieces(tile);
  }
  return found * cost_->kv_heads();
}

std::vector<int32_t> Tiling::long_tiles() const {
  std::vector<int32_t> found;
  for (int32_t i : splittable_) {
    if (tiles_[i].first_of_pack && pieces(tiles_[i]) > 1) found.push_back(i);
  }
  return found;
}

}  // namespace prefixpack
