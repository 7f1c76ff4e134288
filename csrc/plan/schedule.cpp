#include "plan/schedule.h"

#include <algorithm>
#include <array>
#include <cmath>

namespace prefixpack {

namespace {

constexpr int32_t kMinPieceTokens = 128;  // shorter pieces cost more in partials than they give in balance
constexpr int32_t kPieceAlignment = 16;
constexpr int32_t kMinGrowth = 16;
// A worker may be this much later than the others before a new plan is worth its time (PackInfer re-packs on drift).
constexpr double kDriftTolerance = 1.25;
constexpr int32_t kCostBins = 512;
constexpr double kWorthNarrowing = 0.95;  // of the time with tiles twice as wide
constexpr double kFullShare = 0.75;       // of the narrow items that all workers do at once

// A row tile of a pack before its KV range is split. Times are seconds of one worker for one KV head.
struct Tile {
  int32_t query_begin, query_count;
  int32_t request;
  int32_t kv_begin, kv_end;
  int32_t tile_rows;
  bool open;           // kv_end is the request's current length
  bool partial;        // the queries have other partials
  bool first_of_pack;  // the tiles behind it read the same range and are split as it is
  double seconds;      // of work
  double duration;     // from beginning to end: longer than the work where a worker does several items at a time

  int32_t tokens() const { return kv_end - kv_begin; }
};

int32_t piece_length(int32_t tokens, int32_t pieces) {
  const int32_t even = (tokens + pieces - 1) / pieces;
  return (even + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
}

class Scheduler {
 public:
  Scheduler(const Forest& forest, const BatchLens& lens, const Packing& packing, const CostModel& cost)
      : forest_(forest),
        lens_(lens),
        packing_(packing),
        cost_(cost),
        per_worker_(static_cast<double>(cost.workers()) / cost.kv_heads()),
        overhead_(cost.overhead() * per_worker_),
        partial_(cost.partial() * per_worker_) {}

  Schedule run() {
    list_queries();
    count_tokens();
    count_partials();
    split_tiles(choose_tiles());
    assign_slots();
    order_queue();
    schedule_.growth_limit = growth_limit();
    return std::move(schedule_);
  }

 private:
  void list_queries() {
    Plan& plan = schedule_.plan;
    plan.num_requests = forest_.num_requests;
    std::vector<int32_t> first_token(forest_.num_requests);
    for (int32_t request = 0, next = 0; request < forest_.num_requests; ++request) {
      first_token[request] = next;
      next += lens_.query_len(request);
      plan.num_queries = next;
    }
    for (auto* column : {&plan.query_token, &plan.query_request, &plan.query_back}) column->resize(plan.num_queries);
    int32_t query = 0;
    for (int32_t request : packing_.request_order) {
      const int32_t count = lens_.query_len(request);
      for (int32_t i = 0; i < count; ++i, ++query) {
        plan.query_token[query] = first_token[request] + i;
        plan.query_request[query] = request;
        plan.query_back[query] = count - 1 - i;
      }
    }
  }

  void count_tokens() {
    Plan& plan = schedule_.plan;
    for (int32_t node = 0; node < forest_.num_nodes(); ++node) {
      plan.kv_tokens_unique += forest_.node_end[node] - forest_.node_begin[node];
    }
    const int32_t tile = cost_.queries_per_tile();
    for (int32_t request = 0; request < forest_.num_requests; ++request) {
      const int64_t seq_len = lens_.seq_lens[request];
      const int32_t queries = lens_.query_len(request);
      plan.kv_tokens_unique += seq_len - forest_.tail_begin[request];
      for (int32_t first = 0; first < queries; first += tile) {
        plan.kv_tokens_per_request += seq_len - std::max(0, queries - first - tile);
      }
    }
  }

  void count_partials() {
    partials_.assign(schedule_.plan.num_queries, 0);
    for (const Pack& pack : packing_.packs) add_partials(pack.query_begin, pack.query_count, 1);
  }

  // Lists the tiles and returns how long a unit may be. Where wide tiles leave workers idle, narrower ones read the
  // same KV at once, from the cache, and are done sooner; but a plan never reads more than requests by themselves
  // would.
  double choose_tiles() {
    int32_t queries = cost_.queries_per_tile();
    double longest = list_tiles(queries);
    while (queries > 1 && whole_units_ > 0 && whole_units_ < cost_.workers()) {
      const double finish = finish_, narrower = list_tiles(queries / 2);
      if (finish_ > kWorthNarrowing * finish || tokens_ > schedule_.plan.kv_tokens_per_request) {
        return list_tiles(queries);
      }
      longest = narrower;
      queries /= 2;
    }
    return longest;
  }

  // Tiles of at most `step` queries, as they are before they are split.
  double list_tiles(int32_t step) {
    tiles_.clear();
    tokens_ = 0;
    tiles_.reserve(packing_.packs.size());
    for (const Pack& pack : packing_.packs) {
      const bool open = pack.kv_end == kOpenEnd;
      for (int32_t first = 0; first < pack.query_count; first += step) {
        const int32_t count = std::min(step, pack.query_count - first);
        const int32_t hidden = pack.query_count - first - count;  // tokens of an open pack after this tile
        const int32_t end = open ? static_cast<int32_t>(lens_.seq_lens[pack.request]) - hidden : pack.kv_end;
        const bool partial = partials_[pack.query_begin + first] > 1;
        Tile& tile = tiles_.emplace_back();
        tile.query_begin = pack.query_begin + first;
        tile.query_count = count;
        tile.request = pack.request;
        tile.kv_begin = pack.kv_begin;
        tile.kv_end = end;
        tile.tile_rows = cost_.tile_rows(count);
        tokens_ += tile.tokens();
        tile.open = open;
        tile.partial = partial;
        tile.first_of_pack = open || first == 0;
        tile.seconds =
            cost_.item(count, end - pack.kv_begin, first > 0) * per_worker_ + (partial ? count * partial_ : 0.0);
        tile.duration = tile.seconds * cost_.at_a_time(tile.tile_rows);
      }
    }
    widen_few_narrow_tiles();
    return choose_longest_unit();
  }

  // Too few narrow items to keep every worker busy: whole workers read them faster, and cut into fewer pieces.
  void widen_few_narrow_tiles() {
    int64_t units = 0;
    for (const Tile& tile : tiles_) units += cost_.at_a_time(tile.tile_rows) > 1 ? cost_.kv_heads() : 0;
    whole_units_ = static_cast<int64_t>(tiles_.size()) * cost_.kv_heads() - units;
    if (units == 0 || units >= kFullShare * cost_.workers() * cost_.most_at_a_time()) return;
    const int32_t rows = cost_.narrowest_whole_tile();
    for (Tile& tile : tiles_) {
      if (cost_.at_a_time(tile.tile_rows) == 1) continue;
      tile.tile_rows = rows;
      tile.duration = tile.seconds;
    }
  }

  void add_partials(int32_t query_begin, int32_t query_count, int32_t count) {
    int32_t* partials = partials_.data() + query_begin;
    for (int32_t i = 0; i < query_count; ++i) partials[i] += count;
  }

  int32_t pieces_for(const Tile& tile, double longest) const {
    if (tile.duration <= longest) return 1;
    const int32_t wanted = static_cast<int32_t>(std::ceil(tile.duration / longest));
    return std::max(1, std::min(wanted, tile.tokens() / kMinPieceTokens));
  }

  double piece_seconds(const Tile& tile, int32_t pieces) const {
    if (pieces == 1) return tile.seconds;
    const double partial = tile.query_count * partial_;
    return (tile.seconds - overhead_ - (tile.partial ? partial : 0.0)) / pieces + overhead_ + partial;
  }

  double piece_duration(const Tile& tile, int32_t pieces) const {
    return piece_seconds(tile, pieces) * cost_.at_a_time(tile.tile_rows);
  }

  // Share of a worker, in the smallest shares that there are.
  int32_t share(const Tile& tile) const { return cost_.most_at_a_time() / cost_.at_a_time(tile.tile_rows); }

  int32_t bin(double seconds) const { return static_cast<int32_t>(seconds * to_bin_); }

  // When the last worker is done if no unit is longer than `longest`: the work divided evenly, or the k-th unit of
  // the worker that must take k of the (k - 1) * workers + 1 longest.
  double finish_time(double longest) {
    std::array<int32_t, kCostBins> count = count_;
    double total = total_;
    for (int32_t i : splittable_) {
      const Tile& tile = tiles_[i];
      const int32_t pieces = pieces_for(tile, longest);
      const double seconds = piece_seconds(tile, pieces);
      total += pieces * seconds - tile.seconds;
      count[bin(tile.duration)] -= share(tile);
      count[std::min(bin(piece_duration(tile, pieces)), kCostBins - 1)] += pieces * share(tile);
    }
    double latest = total * cost_.kv_heads() / cost_.workers();
    const int64_t at_once = int64_t{cost_.workers()} * cost_.most_at_a_time();
    int64_t units = 0, waves = 0;
    for (int32_t bin = kCostBins - 1; bin >= 0; --bin) {
      units += int64_t{count[bin]} * cost_.kv_heads();
      for (; waves * at_once < units; ++waves) latest = std::max(latest, (waves + 1) * bin / to_bin_);
    }
    return latest;
  }

  double choose_longest_unit() {
    total_ = 0;
    count_.fill(0);
    splittable_.clear();
    constexpr std::array<double, 7> kShares{1.34, 1.12, 1.0, 0.67, 0.5, 0.34, 0.2};
    double longest = 0;
    for (const Tile& tile : tiles_) {
      total_ += tile.seconds;
      longest = std::max(longest, tile.duration);
    }
    if (tiles_.empty()) return 1;
    to_bin_ = (kCostBins - 1) / longest;
    const double even = total_ * cost_.kv_heads() / cost_.workers();
    for (size_t i = 0; i < tiles_.size(); ++i) {
      count_[bin(tiles_[i].duration)] += share(tiles_[i]);
      if (tiles_[i].duration > even * kShares.back()) splittable_.push_back(static_cast<int32_t>(i));
    }
    double chosen = longest;
    finish_ = finish_time(longest);
    for (double part : kShares) {
      if (finish_ <= 1.02 * even) break;
      // A unit does not get shorter than what it costs to take it up, however little there is to do.
      const double candidate = std::max(even * part, 2 * overhead_);
      if (candidate >= longest) continue;
      const double finish = finish_time(candidate);
      if (finish < 0.99 * finish_) {
        finish_ = finish;
        chosen = candidate;
      }
    }
    return chosen;
  }

  void add_item(const Tile& tile, int32_t begin, int32_t end, bool last, double duration, double key) {
    const bool open = tile.open && last;
    Plan& plan = schedule_.plan;
    // Field by field: a struct put together on the stack costs a stalled copy per item.
    WorkItem& item = plan.items.emplace_back();
    item.query_begin = tile.query_begin;
    item.query_count = tile.query_count;
    item.request = tile.request;
    item.kv_begin = begin;
    item.kv_end = open ? kOpenEnd : end;
    item.slot_begin = kWriteThrough;
    item.tile_rows = tile.tile_rows;
    plan.kv_tokens_packed += end - begin;
    key_.push_back(key);
    if (open) dearest_open_ = std::max(dearest_open_, duration);
  }

  void split_tiles(double longest) {
    schedule_.plan.items.reserve(tiles_.size() * 5 / 4);
    key_.reserve(tiles_.size() * 5 / 4);
    for (size_t first = 0; first < tiles_.size();) {
      size_t after = first + 1;
      while (after < tiles_.size() && !tiles_[after].first_of_pack) ++after;
      const Tile& lead = tiles_[first];
      const int32_t pieces = pieces_for(lead, longest);
      const int32_t length = pieces == 1 ? lead.tokens() : piece_length(lead.tokens(), pieces);
      const double key = piece_seconds(lead, pieces);
      for (int32_t begin = lead.kv_begin + length; begin < lead.kv_end; begin += length) {
        for (size_t i = first; i < after; ++i) add_partials(tiles_[i].query_begin, tiles_[i].query_count, 1);
      }
      for (int32_t begin = lead.kv_begin; begin < lead.kv_end; begin += length) {
        const int32_t end = std::min(begin + length, lead.kv_end);
        for (size_t i = first; i < after; ++i) {
          add_item(tiles_[i], begin, end, end == lead.kv_end, piece_duration(tiles_[i], pieces), key);
        }
      }
      first = after;
    }
  }

  void assign_slots() {
    Plan& plan = schedule_.plan;
    std::vector<int32_t> next(plan.num_queries);
    int32_t merges = 0, slots = 0;
    for (int32_t count : partials_) merges += count > 1;
    plan.merge_query.resize(merges);
    plan.merge_offset.resize(merges + 1);
    merges = 0;
    for (int32_t query = 0; query < plan.num_queries; ++query) {
      if (partials_[query] < 2) continue;
      next[query] = slots;
      plan.merge_query[merges] = query;
      plan.merge_offset[merges++] = slots;
      slots += partials_[query];
    }
    plan.merge_offset[merges] = slots;
    plan.merge_slot.resize(slots);
    for (WorkItem& item : plan.items) {
      if (partials_[item.query_begin] < 2) continue;
      item.slot_begin = plan.num_slots;
      plan.num_slots += item.query_count;
      int32_t* place = next.data() + item.query_begin;
      for (int32_t i = 0; i < item.query_count; ++i) plan.merge_slot[place[i]++] = item.slot_begin + i;
    }
  }

  // Dearest first, tiles that read the same KV side by side; a stable counting sort keeps both.
  void order_queue() {
    Plan& plan = schedule_.plan;
    if (plan.items.empty()) return;
    const double to_bin = (kCostBins - 1) / *std::max_element(key_.begin(), key_.end());
    std::array<int32_t, kCostBins + 1> offset{};
    const auto place = [&](size_t i) { return kCostBins - 1 - static_cast<int32_t>(key_[i] * to_bin); };
    for (size_t i = 0; i < key_.size(); ++i) ++offset[place(i) + 1];
    for (int32_t i = 0; i < kCostBins; ++i) offset[i + 1] += offset[i];
    std::vector<WorkItem> ordered(plan.items.size());
    for (size_t i = 0; i < key_.size(); ++i) ordered[offset[place(i)]++] = plan.items[i];
    plan.items = std::move(ordered);
  }

  int32_t growth_limit() const {
    const double token = cost_.item(1, 1) - cost_.overhead();
    const double unit_growth = token * per_worker_ * cost_.at_a_time(cost_.tile_rows(1));
    const double even_growth = token * forest_.num_requests;
    const double slack = kDriftTolerance * finish_ - dearest_open_;
    const double closing = unit_growth - kDriftTolerance * even_growth;
    if (closing <= 0) return INT32_MAX;
    return std::max(kMinGrowth, static_cast<int32_t>(std::min(slack / closing, 1e9)));
  }

  const Forest& forest_;
  const BatchLens lens_;
  const Packing& packing_;
  const CostModel& cost_;
  const double per_worker_, overhead_, partial_;
  std::vector<Tile> tiles_;
  std::vector<int32_t> partials_;  // of every query
  std::vector<double> key_;
  std::vector<int32_t> splittable_;
  std::array<int32_t, kCostBins> count_{};  // shares of workers by unsplit duration
  double total_ = 0, to_bin_ = 0;
  double finish_ = 0, dearest_open_ = 0;
  int64_t whole_units_ = 0;  // that take a whole worker
  int64_t tokens_ = 0;       // KV positions that the tiles read
  Schedule schedule_;
};

}  // namespace

Schedule make_schedule(const Forest& forest, const BatchLens& lens, const Packing& packing, const CostModel& cost) {
  return Scheduler(forest, lens, packing, cost).run();
}

}  // namespace prefixpack
