#include "plan/tiling.h"

#include <algorithm>
#include <cmath>

namespace prefixpack {

namespace {

constexpr int32_t kMinPieceTokens = 128;  // shorter pieces cost more in partials than they give in balance
constexpr int32_t kPieceAlignment = 16;
constexpr double kShortestUnit = 2;       // of what it costs to take one up
constexpr double kWorthSplitting = 0.95;  // of the time with fewer partials; predictions err by more than this
constexpr double kFew = 0.2;              // narrow items, of those that all workers do at once
constexpr double kFewBesideWhole = 0.4;   // for each worker

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
  if (narrow_units_ > 0 && (seldom || narrow_units_ < few * cost_->workers())) widen_narrow_tiles();
  choose_longest_unit();
}

void Tiling::list(const std::vector<Pack>& packs, const BatchLens& lens, const int32_t* partials, int32_t step) {
  int64_t tokens_read = 0, narrow = 0, narrow_tokens = 0, whole_tail_tokens = 0;
  double total = 0, longest = 0, narrow_seconds = 0;
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
    tile->first_of_pack = first == 0 || pack.kv_end == kOpenEnd;
    tile->seconds = cost_->item(kind, tokens, first > 0) * per_worker_ + (partial ? count * partial_ : 0.0);
    tile->duration = tile->seconds * kind.stretch;
    tokens_read += tokens;
    total += tile->seconds;
    longest = std::max(longest, tile->duration);
    if (kind.share < cost_->most_at_a_time()) {
      ++narrow;
      narrow_tokens += tokens;
      narrow_seconds += tile->seconds;
    } else if (pack.query_count == 1) {
      whole_tail_tokens += tokens;
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
  longest_ = longest;
  narrow_units_ = narrow * cost_->kv_heads();
  whole_units_ = (static_cast<int64_t>(num_tiles_) - narrow) * cost_->kv_heads();
}

void Tiling::widen_narrow_tiles() {
  const int32_t rows = cost_->narrowest_whole_tile();
  const double reread = cost_->narrow_reread() * per_worker_;
  double longest = 0;
  for (size_t i = 0; i < num_tiles_; ++i) {
    Tile& tile = tiles_[i];
    if (tile.share < cost_->most_at_a_time()) {
      tile.item.tile_rows = rows;
      tile.stretch = cost_->stretch(rows);
      tile.share = cost_->share(rows);
      const double overhead = cost_->overhead(rows) * per_worker_;
      const double added = overhead - tile.overhead - tile.tokens * reread;
      total_ += added;
      tile.seconds += added;
      tile.overhead = overhead;
      tile.duration = tile.seconds;
    }
    longest = std::max(longest, tile.duration);
  }
  longest_ = longest;
  narrow_ = 0;
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

double Tiling::split_seconds(const Tile& tile, int32_t pieces) const {
  const double partial = tile.item.query_count * partial_;
  return (tile.seconds - tile.overhead - (tile.partial ? partial : 0.0)) / pieces + tile.overhead + partial;
}

// When the last worker is done if no unit is longer than `longest`: the work divided evenly, or the k-th unit of
// the worker that must take k of the (k - 1) * workers + 1 longest.
double Tiling::finish_time(double longest) const {
  std::array<int32_t, kBins> count = count_;
  double total = total_;
  for (int32_t i : splittable_) {
    const Tile& tile = tiles_[i];
    const int32_t pieces = this->pieces(tile, longest);
    const double seconds = piece_seconds(tile, pieces);
    total += pieces * seconds - tile.seconds;
    count[bin(tile.duration)] -= tile.share;
    count[std::min(bin(piece_duration(tile, pieces)), kBins - 1)] += pieces * tile.share;
  }
  double latest = total * cost_->kv_heads() / cost_->workers();
  const int64_t at_once = int64_t{cost_->workers()} * cost_->most_at_a_time();
  int64_t units = 0, waves = 0;
  for (int32_t bin = kBins - 1; bin >= 0; --bin) {
    units += int64_t{count[bin]} * cost_->kv_heads();
    for (; waves * at_once < units; ++waves) latest = std::max(latest, (waves + 1) * bin / to_bin_);
  }
  return latest;
}

// Alike tiles stand together; counting a run of them in a register does not wait for the count in memory.
void Tiling::count_units(double splittable) {
  count_.fill(0);
  splittable_.clear();
  int32_t run_bin = 0, run_shares = 0;
  for (const Tile& tile : *this) {
    const int32_t tile_bin = bin(tile.duration);
    if (tile_bin != run_bin) {
      count_[run_bin] += run_shares;
      run_bin = tile_bin;
      run_shares = 0;
    }
    run_shares += tile.share;
    if (tile.duration > splittable) splittable_.push_back(static_cast<int32_t>(&tile - begin()));
  }
  count_[run_bin] += run_shares;
}

void Tiling::choose_longest_unit() {
  constexpr std::array<double, 7> kShares{1.34, 1.12, 1.0, 0.67, 0.5, 0.34, 0.2};
  if (num_tiles_ == 0) return;
  to_bin_ = (kBins - 1) / longest_;
  const double even = total_ * cost_->kv_heads() / cost_->workers();
  count_units(even * kShares.back());
  longest_unit_ = longest_;
  finish_ = finish_time(longest_);
  for (double part : kShares) {
    if (finish_ <= 1.02 * even) break;
    // A unit does not get shorter than what it costs to take it up, however little there is to do.
    const double candidate = std::max(even * part, kShortestUnit * longest_overhead_);
    if (candidate >= longest_) continue;
    const double finish = finish_time(candidate);
    if (finish < kWorthSplitting * finish_) {
      finish_ = finish;
      longest_unit_ = candidate;
    }
  }
}

int64_t Tiling::whole_pieces() const {
  int64_t found = 0;
  for (const Tile& tile : *this) {
    if (tile.share == cost_->most_at_a_time()) found += pieces(tile);
  }
  return found * cost_->kv_heads();
}

std::vector<int32_t> Tiling::long_tiles() const {
  std::vector<int32_t> found;
  for (int32_t i : splittable_) {
    if (tiles_[i].first_of_pack && tiles_[i].duration > longest_unit_) found.push_back(i);
  }
  return found;
}

}  // namespace prefixpack
