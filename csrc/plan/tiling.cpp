#include "plan/tiling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace prefixpack {

namespace {

constexpr int32_t kSplitAlignment = 16;
constexpr double kWorthSplitting = 0.97;  // of the time with fewer partials
constexpr double kEvenEnough = 1.02;      // of the time if all workers were done at once
// Even shares of a warp, or shortest splits: the combine of more partials takes a warp too long.
constexpr double kTooLongForWarps = 32;
constexpr double kLongestCounted = 2;  // even shares of a worker: longer work tiles are counted as one kind
// Longest work tiles that are tried, in even shares of a worker.
constexpr std::array<double, 9> kShares{3.0, 2.0, 1.34, 1.0, 0.8, 0.6, 0.45, 0.33, 0.2};
constexpr double kRounding = 1e-9;    // more than sums of times are rounded by
constexpr int32_t kNearbyShares = 2;  // on either side of a wider tiling's choice
constexpr std::array<double, 3> kNarrowShares{1.0, 0.67, 0.4};
constexpr int32_t kFirstOfUniform = 2;  // of kShares, in decode and verify steps: longer work tiles never won
constexpr int32_t kHalvings = 9;        // of the range in which the longest work tile is searched
// Factor of the time in which the bandwidth serves all work. The queue model lets work tiles end a little early: in
// 4,700 tilings it never was 1.08 times as fast.
constexpr double kHopeless = 1.15;
constexpr int32_t kNarrowerTries = 4;   // for which memory is taken at once: down to a quarter of the width
constexpr double kWorthFitting = 0.98;  // of the time with other splits

}  // namespace

Tiling::Tiling(const CostModel& cost)
    : cost_(&cost),
      per_worker_(static_cast<double>(cost.workers()) / cost.kv_heads()),
      longest_overhead_(cost.longest_overhead() * per_worker_),
      partial_(cost.partial() * per_worker_) {}

void Tiling::list_tiles(const PackedQueries& queries, int32_t most_queries, bool with_narrow) {
  make_room(queries, most_queries);
  list(queries, most_queries);
  if (!with_narrow) {
    widen_narrow_tiles(-1);
  } else if (narrow_work_tiles_ > 0) {
    const TileClass& narrow = cost_->tile(1);
    const double shortest = kMinSplitTokens * narrow.first_read * per_worker_ * narrow.stretch;
    const double even = narrow_ / per_worker_ / cost_->narrow_speedup();
    const double too_long = kTooLongForWarps * std::max(even, shortest);
    if (longest_narrow_tile_ > too_long) widen_narrow_tiles(too_long);
  }
}

bool Tiling::make_narrower(const PackedQueries& queries, int32_t most_queries, bool with_narrow, const Tiling& wider,
                           int64_t most_tokens, double worth) {
  list_tiles(queries, most_queries, with_narrow);
  const double limit = worth * wider.finish();
  if (tokens_ > most_tokens || streaming() > kHopeless * limit * per_worker_) return false;
  choose(&wider);
  return finish_ <= limit;
}

double Tiling::streaming() const {
  const double narrow_tiles = static_cast<double>(narrow_work_tiles_) / cost_->kv_heads();
  const double whole_tiles = static_cast<double>(num_tiles_) - narrow_tiles;
  return total_ - whole_tiles * longest_overhead_ - narrow_tiles * cost_->tile(1).overhead * per_worker_;
}

void Tiling::make_without_narrow(const PackedQueries& queries, int32_t most_queries, const Tiling& with_narrow) {
  if (with_narrow.any_widened_) {
    make(queries, most_queries, false);
    return;
  }
  make_room(queries, most_queries);
  std::copy(with_narrow.begin(), with_narrow.end(), tiles_.data());
  num_tiles_ = with_narrow.num_tiles_;
  tokens_ = with_narrow.tokens_;
  total_ = with_narrow.total_;
  narrow_ = with_narrow.narrow_;
  largest_pack_ = with_narrow.largest_pack_;
  longest_tile_ = with_narrow.longest_tile_;
  narrow_work_tiles_ = with_narrow.narrow_work_tiles_;
  whole_work_tiles_ = with_narrow.whole_work_tiles_;
  widen_narrow_tiles(-1);
  choose(nullptr);
}

// Makes room for the narrower tiles that are tried next.
void Tiling::make_room(const PackedQueries& queries, int32_t most_queries) {
  tiles_.make_room(queries.packs.size() + queries.num_partials / std::max(1, most_queries / kNarrowerTries));
}

void Tiling::choose(const Tiling* wider) {
  chosen_share_ = -1;
  finish_ = 0;
  if (num_tiles_ == 0) return;
  if (longest_ <= (kEvenEnough - 1) * even_share()) {  // no work tile keeps the others waiting
    longest_whole_ = longest_narrow_ = longest_;
    finish_ = even_share();
    return;
  }
  sort_out_splittable();
  choose_split(wider == nullptr ? -1 : wider->chosen_share_);
}

bool Tiling::choose_again(double worth) {
  if (chosen_share_ < 0) return false;  // all splits were tried
  const double longest_whole = longest_whole_, longest_narrow = longest_narrow_, finish = finish_;
  const int32_t chosen_share = chosen_share_;
  choose_split(chosen_share);
  if (finish_ <= worth * finish) return true;
  longest_whole_ = longest_whole;
  longest_narrow_ = longest_narrow;
  finish_ = finish;
  chosen_share_ = chosen_share;
  return false;
}

// Every work tile takes a worker for its latency and for its work at the most speed. The queue model lets each begin
// and end sooner by kSameTime of the time. More splits bring as much latency each.
double Tiling::least_finish_without_narrow() const {
  const bool any_whole_tile = cost_->share(cost_->narrowest_whole_tile()) == cost_->most_at_a_time();
  if (any_widened_ || !any_whole_tile) return 0;
  const double work = streaming() - narrow_tokens_ * cost_->narrow_reread() * per_worker_;
  const double tiles = static_cast<double>(num_tiles_), twice = 2 * kSameTime;
  const double unsplit = (work / cost_->most_speed() + tiles * longest_overhead_) / (per_worker_ + twice * tiles);
  return std::min(unsplit, longest_overhead_ / twice);
}

void Tiling::list(const PackedQueries& queries, int32_t most_queries) {
  const BatchLens& lens = queries.lens;
  const int32_t* const partials = queries.partials;
  const int32_t whole_share = cost_->most_at_a_time();
  int32_t largest_pack = 0;
  int64_t narrow_tokens = 0;
  const double per_worker = per_worker_, of_partial = partial_;
  int64_t tokens_read = 0, narrow = 0;
  double total = 0, longest = 0, longest_narrow = 0, narrow_seconds = 0;
  Tile* tile = tiles_.data();
  const auto add = [&](const Pack& pack, int32_t first, int32_t count, int32_t tokens, const TileClass& kind) {
    const int32_t query_begin = pack.query_begin + first;
    const int32_t of_query = partials[query_begin];
    const double read = first > 0 ? kind.second_read : kind.first_read;
    const double seconds = (kind.overhead + tokens * read) * per_worker + (of_query > 1 ? count * of_partial : 0.0);
    const double duration = seconds * kind.stretch;
    const bool open = pack.kv_end == kOpenEnd;
    *tile++ = {seconds, duration, query_begin,         count, pack.request,      pack.kv_begin,
               tokens,  of_query, cost_->number(kind), open,  first == 0 || open};
    tokens_read += tokens;
    total += seconds;
    if (kind.share < whole_share) {
      ++narrow;
      narrow_tokens += tokens;
      narrow_seconds += seconds;
      longest_narrow = std::max(longest_narrow, duration);
    } else {
      longest = std::max(longest, duration);
    }
  };
  for (const Pack& pack : queries.packs) {
    const bool open = pack.kv_end == kOpenEnd;
    const int32_t tokens = (open ? static_cast<int32_t>(lens.seq_lens[pack.request]) : pack.kv_end) - pack.kv_begin;
    if (pack.query_count == 1) {  // most packs
      add(pack, 0, 1, tokens, cost_->tile(1, tokens));
      continue;
    }
    largest_pack = std::max(largest_pack, pack.query_count);
    for (int32_t first = 0; first < pack.query_count; first += most_queries) {
      const int32_t count = std::min(most_queries, pack.query_count - first);
      const int32_t hidden = open ? pack.query_count - first - count : 0;  // tokens behind this tile
      // The last tile of a pack may have few rows. A lone warp would read the whole range for them.
      const TileClass& kind = first > 0 && !open ? cost_->whole_tile(count) : cost_->tile(count, tokens - hidden);
      add(pack, first, count, tokens - hidden, kind);
    }
  }
  num_tiles_ = tile - tiles_.data();
  tokens_ = tokens_read;
  total_ = total;
  narrow_ = narrow_seconds;
  longest_tile_ = longest;
  longest_narrow_tile_ = longest_narrow;
  longest_ = std::max(longest, longest_narrow);
  narrow_tokens_ = narrow_tokens;
  largest_pack_ = largest_pack;
  any_widened_ = false;
  narrow_work_tiles_ = narrow * cost_->kv_heads();
  whole_work_tiles_ = (static_cast<int64_t>(num_tiles_) - narrow) * cost_->kv_heads();
}

void Tiling::widen_narrow_tiles(double longer_than) {
  any_widened_ = true;
  const int32_t whole = cost_->number(cost_->narrowest_whole());
  const double overhead = cost_->narrowest_whole().overhead * per_worker_;
  const double reread = cost_->narrow_reread() * per_worker_;
  double longest_narrow = 0;
  for (size_t i = 0; i < num_tiles_; ++i) {
    Tile& tile = tiles_[i];
    if (!is_narrow(tile)) continue;
    if (tile.duration <= longer_than) {
      longest_narrow = std::max(longest_narrow, tile.duration);
      continue;
    }
    const double added = overhead - this->overhead(tile) - tile.tokens * reread;
    tile.kind = whole;
    total_ += added;
    narrow_ -= tile.seconds;
    narrow_work_tiles_ -= cost_->kv_heads();
    whole_work_tiles_ += cost_->kv_heads();
    tile.seconds += added;
    tile.duration = tile.seconds;
    longest_tile_ = std::max(longest_tile_, tile.duration);
  }
  longest_narrow_tile_ = longest_narrow;
  longest_ = std::max(longest_tile_, longest_narrow);
}

int32_t Tiling::split_length(const Tile& tile, int32_t splits) {
  if (splits == 1) return tile.tokens;
  const int32_t even = (tile.tokens - 1) / splits + 1;
  return (even + kSplitAlignment - 1) / kSplitAlignment * kSplitAlignment;
}

double Tiling::seconds_if_split(const Tile& tile, int32_t splits) const {
  const double partial = tile.query_count * partial_, overhead = this->overhead(tile);
  return (tile.seconds - overhead - (tile.partials > 1 ? partial : 0.0)) / splits + overhead + partial;
}

// Tiles that some split concerns, in classes; the others in bins.
void Tiling::sort_out_splittable() {
  const double whole = kShares.back() * share();
  const double narrow = std::min(whole, kNarrowShares.back() * narrow_ / per_worker_ / cost_->narrow_speedup());
  splittable_whole_.clear();
  splittable_narrow_.clear();
  whole_.reset(std::min(longest_tile_, kLongestCounted * even_share()));
  narrow_bins_.reset(std::min(longest_narrow_tile_ / cost_->tile(1).stretch, even_share()));
  const int64_t heads = cost_->kv_heads();
  double all_work = 0, computing = 0;
  double duration = 0;  // of the tile that decides: the first of a pack
  const TileClass* const kinds = &cost_->numbered(0);
  const double per_worker = per_worker_, of_partial = partial_;
  const int32_t whole_share = cost_->most_at_a_time();
  const bool each_decides = !cost_->uniform_rows();
  for (const Tile& tile : *this) {
    if (tile.first_of_pack || each_decides) duration = tile.duration;
    const TileClass& kind = kinds[tile.kind];
    const bool is_narrow = kind.share < whole_share;
    const double work = tile.seconds - kind.overhead * per_worker;
    if (!is_narrow) {
      all_work += work;
      computing += tile.tokens * kind.computing * per_worker;
    }
    if (duration <= (is_narrow ? narrow : whole)) {
      (is_narrow ? narrow_bins_ : whole_).add(work, heads);
      continue;
    }
    const int32_t queries = tile.query_count;
    (is_narrow ? splittable_narrow_ : splittable_whole_)
        .add({duration, work, queries * of_partial, tile.tokens, tile.partials,
              cost_->combine_row_steps(queries, is_narrow)});
  }
  splittable_whole_.finish_adding();
  splittable_narrow_.finish_adding();
  workers_ = cost_->queue_workers(all_work > 0 ? computing / all_work : 1.0);
}

// When the last worker is done and the last partials are combined. From `limit` on, any time that is not later.
double Tiling::finish_time(const SplitLimits& limits, double limit) {
  const bool whole = splittable_whole_.cut(std::min(limits.whole, longest_tile_), false, *cost_, whole_);
  const bool narrow = splittable_narrow_.cut(std::min(limits.narrow, longest_narrow_tile_), true, *cost_, narrow_bins_);
  if (whole || narrow || last_finish_ < limit) {
    const double combine = std::max(splittable_whole_.combine(), splittable_narrow_.combine());
    const double until = (limit - combine) * (1 + kRounding);
    last_finish_ =
        combine + finish_of(workers_, splittable_whole_.bins(), splittable_narrow_.bins(), mostly_narrow(), until);
  }
  return last_finish_;
}

// A few work tiles more than the workers take at a time make all wait for them, and a few less leave workers idle. The
// short tiles, which nothing splits, may be among them or follow.
double Tiling::fit_workers(SplitLimits* best, double finish) {
  const int64_t workers = mostly_narrow() ? cost_->workers() / 2 : cost_->workers(), heads = cost_->kv_heads();
  const double shortest = kShares.back() * share();  // of a split; shorter tiles are not in splittable_
  if (longest_tile_ <= shortest) return finish;
  for (int64_t room : {workers, workers - whole_.work_tiles()}) {
    if (finish <= kEvenEnough * even_share()) break;
    double low = shortest, high = longest_tile_;
    if (splittable_whole_.work_tiles(high, heads) > room || splittable_whole_.work_tiles(low, heads) <= room) continue;
    for (int32_t i = 0; i < kHalvings; ++i) {
      const double middle = std::sqrt(low * high);
      (splittable_whole_.work_tiles(middle, heads) <= room ? high : low) = middle;
    }
    const SplitLimits limits{high, std::min(best->narrow, high)};
    const double limit = kWorthFitting * finish, time = finish_time(limits, limit);
    if (time < limit) *best = limits, finish = time;
    if (whole_.work_tiles() == 0) break;
  }
  return finish;
}

// Chooses the split with which the last worker is done first. More splits bring more partials, and estimates err, so a
// finer split has to save something.
void Tiling::choose_split(int32_t nearby) {
  SplitLimits best{longest_, longest_};
  double finish = finish_time(best, std::numeric_limits<double>::infinity());
  int32_t first = cost_->uniform_rows() ? kFirstOfUniform : 0, last = static_cast<int32_t>(kShares.size()) - 1;
  if (nearby >= 0) {
    first = std::max(first, nearby - kNearbyShares);
    last = std::min(last, nearby + kNearbyShares);
  }
  chosen_share_ = -1;
  for (int32_t i = first; i <= last && finish > kEvenEnough * even_share(); ++i) {
    const double candidate = share() * kShares[i];
    if (candidate >= longest_) continue;
    const SplitLimits limits{candidate, std::min(best.narrow, candidate)};
    const double limit = kWorthSplitting * finish, time = finish_time(limits, limit);
    if (time < limit) best = limits, finish = time, chosen_share_ = i;
  }
  if (cost_->uniform_rows() && nearby < 0) finish = fit_workers(&best, finish);
  const double narrow_even = narrow_ / per_worker_ / cost_->narrow_speedup();
  for (double part : kNarrowShares) {
    // Where all narrow tiles have been widened, narrow_ is what rounding left.
    if (narrow_work_tiles_ == 0 || finish <= kEvenEnough * even_share()) break;
    const double candidate = narrow_even * part;
    if (candidate >= std::min(best.narrow, longest_narrow_tile_)) continue;
    const double limit = kWorthSplitting * finish, time = finish_time({best.whole, candidate}, limit);
    if (time < limit) best.narrow = candidate, finish = time;
  }
  longest_whole_ = best.whole;
  longest_narrow_ = best.narrow;
  finish_ = finish;
}

}  // namespace prefixpack
