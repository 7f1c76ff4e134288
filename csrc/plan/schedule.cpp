#include "plan/schedule.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "plan/checks.h"

namespace prefixpack {

namespace {

constexpr int32_t kMinGrowth = 16;
// A worker may be this much later than the others before a new plan is worth its time (PackInfer re-packs on drift).
constexpr double kDriftTolerance = 1.25;
constexpr int32_t kQueueBins = 512;
constexpr double kWorthNarrowing = 0.95;  // of the time with tiles twice as wide
constexpr double kWorthWidening = 0.95;   // of the time with narrow items
// Most partial results of a plan, and most work items. They are numbered in 32 bits; more would take gigabytes.
constexpr int64_t kMostPartials = int64_t{1} << 26;

void require_few(int64_t number, const char* of) {
  if (number <= kMostPartials) return;  // no string is made for it
  require(false, "the step needs " + std::to_string(number) + " or more " + of +
                     "; a plan has at most 2^26: fewer workers split its KV less often");
}

int32_t queries_of(const Tile* lead, const Tile* after) {
  return after[-1].query_begin + after[-1].query_count - lead->query_begin;
}

}  // namespace

Schedule Scheduler::make(const Forest& forest, const BatchLens& lens, const Packing& packing) {
  plan_ = Plan();
  list_queries(forest, lens, packing.request_order);
  count_tokens(forest, lens);
  count_partials(packing.packs);
  choose_tiles(packing.packs, lens);
  count_splits();
  place_combines();
  number_partials();
  order_queue();
  list_items();
  plan_.mostly_narrow = tiling_->mostly_narrow();
  return {std::move(plan_), growth_limit(forest.num_requests)};
}

void Scheduler::list_queries(const Forest& forest, const BatchLens& lens, const std::vector<int32_t>& request_order) {
  plan_.num_requests = forest.num_requests;
  if (lens.query_lens == nullptr) {
    plan_.num_queries = plan_.num_requests;
    plan_.query_token = plan_.query_request = request_order;
    plan_.query_back.assign(plan_.num_queries, 0);
    return;
  }
  std::vector<int32_t> first_token(forest.num_requests);
  for (int32_t request = 0, next = 0; request < forest.num_requests; ++request) {
    first_token[request] = next;
    next += lens.query_len(request);
    plan_.num_queries = next;
  }
  for (auto* column : {&plan_.query_token, &plan_.query_request, &plan_.query_back}) column->resize(plan_.num_queries);
  int32_t query = 0;
  for (int32_t request : request_order) {
    const int32_t count = lens.query_len(request);
    for (int32_t i = 0; i < count; ++i, ++query) {
      plan_.query_token[query] = first_token[request] + i;
      plan_.query_request[query] = request;
      plan_.query_back[query] = count - 1 - i;
    }
  }
}

void Scheduler::count_tokens(const Forest& forest, const BatchLens& lens) {
  int64_t unique = 0, per_request = 0;
  for (int32_t node = 0; node < forest.num_nodes(); ++node) unique += forest.node_end[node] - forest.node_begin[node];
  for (int32_t request = 0; request < forest.num_requests; ++request) {
    unique -= forest.tail_begin[request];
    per_request += lens.seq_lens[request];  // by the last tile of queries; those before it see less
  }
  unique += per_request;
  if (lens.query_lens != nullptr) {
    const int32_t tile = cost_.queries_per_tile();
    for (int32_t request = 0; request < forest.num_requests; ++request) {
      for (int32_t hidden = lens.query_len(request) - tile; hidden > 0; hidden -= tile) {
        per_request += lens.seq_lens[request] - hidden;
      }
    }
  }
  plan_.kv_tokens_unique = unique;
  plan_.kv_tokens_per_request = per_request;
}

// Counts the partials of every query, without KV splits.
void Scheduler::count_partials(const std::vector<Pack>& packs) {
  num_partials_ = 0;
  partials_.assign(plan_.num_queries, 0);
  int32_t* const partials = partials_.data();
  for (const Pack& pack : packs) {
    num_partials_ += pack.query_count;
    require_few(num_partials_, "partial results");
    int32_t* const first = partials + pack.query_begin;
    ++first[0];
    for (int32_t i = 1; i < pack.query_count; ++i) ++first[i];
  }
}

// Narrow items that do not keep every worker busy may be done sooner by whole workers, in fewer splits. Where wide
// tiles leave workers idle, narrower ones read the same KV at once, from the cache, and may be done sooner; but a
// plan never reads more than requests by themselves would.
void Scheduler::choose_tiles(const std::vector<Pack>& packs, const BatchLens& lens) {
  tiling_ = &tilings_[0], other_ = &tilings_[1];
  const PackedQueries queries{packs, lens, partials_.data(), num_partials_};
  int32_t most_queries = cost_.queries_per_tile();
  bool with_narrow = true;
  tiling_->make(queries, most_queries);
  if (tiling_->narrow_work_tiles() > 0 &&
      tiling_->narrow_work_tiles() < int64_t{cost_.workers()} * cost_.most_at_a_time() &&
      tiling_->least_finish_without_narrow() < kWorthWidening * tiling_->finish()) {
    other_->make_without_narrow(queries, most_queries, *tiling_);
    if (other_->finish() < kWorthWidening * tiling_->finish()) {
      std::swap(tiling_, other_);
      with_narrow = false;
    }
  }
  while (most_queries > 1 && tiling_->whole_work_tiles() > 0 && tiling_->whole_work_tiles() < cost_.workers()) {
    most_queries /= 2;
    if (tiling_->largest_pack() <= most_queries) {  // the same tiles
      if (tiling_->tokens() > plan_.kv_tokens_per_request || !tiling_->choose_again(kWorthNarrowing)) break;
      continue;
    }
    if (!other_->make_narrower(queries, most_queries, with_narrow, *tiling_, plan_.kv_tokens_per_request,
                               kWorthNarrowing))
      break;
    std::swap(tiling_, other_);
  }
}

// Lists the packs with their splits, and adds the partials that these bring.
void Scheduler::count_splits() {
  queue_.make_room(tiling_->size());
  QueuedPack* queued = queue_.data();
  num_items_ = tiling_->size();
  int64_t num_partials = num_partials_;
  for (const Tile *lead = tiling_->begin(), *end = tiling_->end(); lead != end;) {
    const Tile* const after = tiling_->pack_end(lead);
    const int32_t splits = tiling_->splits(*lead);
    *queued++ = {lead,   tiling_->split_seconds(*lead, splits), 0, kWriteThrough,
                 splits, static_cast<int32_t>(after - lead)};
    if (splits > 1) {
      const int32_t more = Tiling::num_splits(*lead, splits) - 1, queries = queries_of(lead, after);
      num_partials += int64_t{more} * queries;
      num_items_ += more * (after - lead);
      require_few(num_partials, "partial results");
      require_few(static_cast<int64_t>(num_items_), "work items");
      int32_t* const partials = partials_.data() + lead->query_begin;
      for (int32_t i = 0; i < queries; ++i) partials[i] += more;
    }
    lead = after;
  }
  num_queued_ = queued - queue_.data();
}

// Partials of a query follow each other in combine_partial; combine_next_ says where its next one goes, or -1.
void Scheduler::place_combines() {
  int32_t combines = 0, partials = 0;
  for (int32_t count : partials_) {
    combines += count > 1;
    partials += count > 1 ? count : 0;
  }
  plan_.combine_query.resize(combines);
  plan_.combine_offset.resize(combines + 1);
  plan_.combine_partial.resize(partials);
  combine_next_.resize(plan_.num_queries);
  combines = partials = 0;
  for (int32_t query = 0; query < plan_.num_queries; ++query) {
    const int32_t count = partials_[query];
    combine_next_[query] = count < 2 ? -1 : partials;
    if (count < 2) continue;
    plan_.combine_query[combines] = query;
    plan_.combine_offset[combines++] = partials;
    partials += count;
  }
  plan_.combine_offset[combines] = partials;
}

// Partials are numbered pack by pack and, in a pack, split by split: so a query's partials ascend with its KV
// positions.
void Scheduler::number_partials() {
  int32_t *const next = combine_next_.data(), *const list = plan_.combine_partial.data();
  int32_t num_partials = 0;
  double longest = 0, longest_open = 0;
  longest_open_tokens_ = 0;
  for (QueuedPack *queued = queue_.data(), *end = queued + num_queued_; queued != end; ++queued) {
    const Tile* const lead = queued->lead;
    const int32_t begin = lead->query_begin;
    if (next[begin] >= 0) {
      queued->partial_begin = num_partials;
      if (queued->splits == 1 && queued->tiles == 1 && lead->query_count == 1) {  // most tiles
        list[next[begin]++] = num_partials++;
      } else {
        const int32_t queries = queries_of(lead, lead + queued->tiles);
        num_partials = number_splits(begin, queries, Tiling::num_splits(*lead, queued->splits), num_partials);
      }
    }
    longest = std::max(longest, queued->key);
    const double duration = queued->key * tiling_->kind(*lead).stretch;
    if (lead->open && duration > longest_open) {
      longest_open = duration;
      longest_open_tokens_ = lead->tokens;
    }
  }
  plan_.num_partials = num_partials;
  plan_.kv_tokens_packed = tiling_->tokens();
  longest_ = longest;
  longest_open_ = longest_open;
}

int32_t Scheduler::number_splits(int32_t query_begin, int32_t queries, int32_t splits, int32_t partial) {
  int32_t* const next = combine_next_.data() + query_begin;
  int32_t* const list = plan_.combine_partial.data();
  for (int32_t split = 0; split < splits; ++split) {
    for (int32_t i = 0; i < queries; ++i) list[next[i]++] = partial++;
  }
  return partial;
}

// Longest first; a stable counting sort. The two halves of the queue are counted apart, so that a run of alike packs
// waits less for the counter before it.
void Scheduler::order_queue() {
  order_.make_room(num_queued_);
  const double to_bin = (kQueueBins - 1) / longest_;
  std::array<std::array<int32_t, 2>, kQueueBins> next{};
  const size_t half = num_queued_ / 2, rest = num_queued_ - half;
  for (size_t i = 0; i < num_queued_; ++i) {
    const double bin = queue_[i].key * to_bin;  // rounding may leave anything where overheads dwarf the work
    queue_[i].place = kQueueBins - 1 - (bin > 0 ? static_cast<int32_t>(std::min(bin, kQueueBins - 1.0)) : 0);
  }
  for (size_t i = 0; i < half; ++i) {
    ++next[queue_[i].place][0];
    ++next[queue_[half + i].place][1];
  }
  if (rest > half) ++next[queue_[num_queued_ - 1].place][1];
  int32_t begin = 0;
  for (auto& halves : next) {
    for (int32_t& of_half : halves) begin += std::exchange(of_half, begin);
  }
  for (size_t i = 0; i < half; ++i) {
    order_[next[queue_[i].place][0]++] = static_cast<int32_t>(i);
    order_[next[queue_[half + i].place][1]++] = static_cast<int32_t>(half + i);
  }
  if (rest > half) order_[next[queue_[num_queued_ - 1].place][1]++] = static_cast<int32_t>(num_queued_ - 1);
}

void Scheduler::list_items() {
  plan_.items.resize(num_items_);
  WorkItem* next = plan_.items.data();
  for (size_t i = 0; i < num_queued_; ++i) {
    const QueuedPack& queued = queue_[order_[i]];
    if (queued.splits == 1 && queued.tiles == 1) {
      *next = tiling_->item(*queued.lead);
      next->partial_begin = queued.partial_begin;
      ++next;
    } else {
      next = list_splits(queued, next);
    }
  }
}

// Tiles of a pack are split as the first of them is, and those that read the same KV stand side by side.
WorkItem* Scheduler::list_splits(const QueuedPack& queued, WorkItem* next) {
  const Tile* const lead = queued.lead;
  const int32_t length = Tiling::split_length(*lead, queued.splits);
  const int32_t kv_begin = lead->kv_begin, kv_end = kv_begin + lead->tokens;
  int32_t partial = queued.partial_begin;
  for (int64_t next_begin = kv_begin; next_begin < kv_end; next_begin += length) {
    const auto begin = static_cast<int32_t>(next_begin);
    for (const Tile* tile = lead; tile != lead + queued.tiles; ++tile, ++next) {
      *next = tiling_->item(*tile);
      next->kv_begin = begin;
      if (length < kv_end - begin) next->kv_end = begin + length;
      next->partial_begin = partial;
      if (partial != kWriteThrough) partial += tile->query_count;
    }
  }
  return next;
}

int32_t Scheduler::growth_limit(int32_t num_requests) const {
  const TileClass& tail = cost_.tile(1, longest_open_tokens_);
  const double token = tail.first_read;
  const double work_tile_growth = token * tiling_->per_worker() * tail.stretch;
  const double even_growth = token * num_requests;
  const double slack = kDriftTolerance * tiling_->finish() - longest_open_;
  const double closing = work_tile_growth - kDriftTolerance * even_growth;
  if (closing <= 0) return INT32_MAX;
  return static_cast<int32_t>(std::clamp(slack / closing, double{kMinGrowth}, 1e9));
}

}  // namespace prefixpack
