#include "plan/schedule.h"

#include <algorithm>
#include <array>
#include <utility>

#include "plan/buffer.h"
#include "plan/tiling.h"

namespace prefixpack {

namespace {

constexpr int32_t kMinGrowth = 16;
// A worker may be this much later than the others before a new plan is worth its time (PackInfer re-packs on drift).
constexpr double kDriftTolerance = 1.25;
constexpr int32_t kQueueBins = 512;
constexpr double kWorthNarrowing = 0.95;  // of the time with tiles twice as wide
constexpr double kWorthWidening = 0.95;   // of the time with narrow items

// Tiles that are split alike, on their way into the queue: those of a pack, or one of a request's own tail.
struct QueuedPack {
  const Tile* lead;  // the first of them
  double key;        // seconds of a piece of that tile: what the queue is ordered by
  int32_t place;
  int32_t slot_begin;  // of its first item, or kWriteThrough
};

class Scheduler {
 public:
  Scheduler(const Forest& forest, const BatchLens& lens, const Packing& packing, const CostModel& cost)
      : forest_(forest), lens_(lens), packing_(packing), cost_(cost), tiling_(cost), narrower_(cost) {}

  Schedule run() {
    list_queries();
    count_tokens();
    count_partials();
    choose_tiles();
    count_pieces();
    place_combines();
    take_slots();
    order_queue();
    list_items();
    schedule_.plan.narrow_prevails = tiling_.narrow_prevails();
    schedule_.growth_limit = growth_limit();
    return std::move(schedule_);
  }

 private:
  void list_queries() {
    Plan& plan = schedule_.plan;
    plan.num_requests = forest_.num_requests;
    if (lens_.query_lens == nullptr) {
      plan.num_queries = plan.num_requests;
      plan.query_token = plan.query_request = packing_.request_order;
      plan.query_back.assign(plan.num_queries, 0);
      return;
    }
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
    int64_t unique = 0, per_request = 0;
    for (int32_t node = 0; node < forest_.num_nodes(); ++node) {
      unique += forest_.node_end[node] - forest_.node_begin[node];
    }
    const int32_t tile = cost_.queries_per_tile();
    for (int32_t request = 0; request < forest_.num_requests; ++request) {
      const int64_t seq_len = lens_.seq_lens[request];
      unique += seq_len - forest_.tail_begin[request];
      per_request += seq_len;  // by the last tile of queries; those before it see less
      for (int32_t hidden = lens_.query_len(request) - tile; hidden > 0; hidden -= tile)
        per_request += seq_len - hidden;
    }
    schedule_.plan.kv_tokens_unique = unique;
    schedule_.plan.kv_tokens_per_request = per_request;
  }

  // Of every query by the packs alone.
  void count_partials() {
    num_partials_ = 0;
    partials_.assign(schedule_.plan.num_queries, 0);
    for (const Pack& pack : packing_.packs) {
      add_partials(pack.query_begin, pack.query_count, 1);
      num_partials_ += pack.query_count;
    }
  }

  void add_partials(int32_t query_begin, int32_t query_count, int32_t more) {
    int32_t* const partials = partials_.data() + query_begin;
    if (query_count == 1) {
      *partials += more;
      return;
    }
    for (int32_t i = 0; i < query_count; ++i) partials[i] += more;
  }

  // Narrow items that do not keep every worker busy may be done sooner by whole workers, in fewer pieces. Where wide
  // tiles leave workers idle, narrower ones read the same KV at once, from the cache, and may be done sooner; but a
  // plan never reads more than requests by themselves would.
  void choose_tiles() {
    int32_t queries = cost_.queries_per_tile();
    bool with_narrow = true;
    make(tiling_, queries, with_narrow);
    if (tiling_.narrow_work_tiles() > 0 &&
        tiling_.narrow_work_tiles() < int64_t{cost_.workers()} * cost_.most_at_a_time()) {
      make(narrower_, queries, false);
      if (narrower_.finish() < kWorthWidening * tiling_.finish()) {
        std::swap(tiling_, narrower_);
        with_narrow = false;
      }
    }
    while (queries > 1 && tiling_.whole_work_tiles() > 0 && tiling_.whole_work_tiles() < cost_.workers()) {
      queries /= 2;
      make(narrower_, queries, with_narrow, &tiling_);
      if (narrower_.finish() > kWorthNarrowing * tiling_.finish()) break;
      if (narrower_.tokens() > schedule_.plan.kv_tokens_per_request) break;
      std::swap(tiling_, narrower_);
    }
  }

  void make(Tiling& tiling, int32_t queries, bool with_narrow, const Tiling* wider = nullptr) const {
    tiling.make(packing_.packs, lens_, partials_.data(), num_partials_, queries, with_narrow, wider);
  }

  // Adds the partials that splitting brings.
  void count_pieces() {
    num_items_ = tiling_.size();
    for (int32_t i : tiling_.long_tiles()) {
      const Tile* const lead = tiling_.begin() + i;
      const Tile* const after = tiling_.pack_end(lead);
      const int32_t more = Tiling::num_pieces(*lead, tiling_.pieces(*lead)) - 1;
      add_partials(lead->item.query_begin, queries_of(lead, after), more);
      num_items_ += more * (after - lead);
    }
  }

  // Slots of a query follow each other in combine_slot; combine_next_ says where its next one goes, or -1.
  void place_combines() {
    Plan& plan = schedule_.plan;
    int32_t combines = 0, slots = 0;
    for (int32_t count : partials_) combines += count > 1;
    plan.combine_query.resize(combines);
    plan.combine_offset.resize(combines + 1);
    combine_next_.resize(plan.num_queries);
    combines = 0;
    for (int32_t query = 0; query < plan.num_queries; ++query) {
      const int32_t count = partials_[query];
      combine_next_[query] = count < 2 ? -1 : slots;
      if (count < 2) continue;
      plan.combine_query[combines] = query;
      plan.combine_offset[combines++] = slots;
      slots += count;
    }
    plan.combine_offset[combines] = slots;
    plan.combine_slot.resize(slots);
  }

  // Slots are dealt pack by pack and, in a pack, piece by piece: so a query's slots ascend with its KV positions.
  void take_slots() {
    Plan& plan = schedule_.plan;
    queue_.make_room(tiling_.size());
    QueuedPack* queued = queue_.data();
    int32_t num_slots = 0;
    double longest = 0, longest_open = 0;
    for (const Tile* lead = tiling_.begin(); lead != tiling_.end();) {
      const Tile* const after = tiling_.pack_end(lead);
      const int32_t pieces = tiling_.pieces(*lead), begin = lead->item.query_begin;
      const double key = tiling_.piece_seconds(*lead, pieces);
      queued->lead = lead;
      queued->key = key;
      queued->slot_begin = kWriteThrough;
      if (combine_next_[begin] >= 0) {
        queued->slot_begin = num_slots;
        num_slots = fill_slots(begin, queries_of(lead, after), Tiling::num_pieces(*lead, pieces), num_slots);
      }
      ++queued;
      longest = std::max(longest, key);
      if (lead->item.kv_end == kOpenEnd && key * lead->stretch > longest_open) {
        longest_open = key * lead->stretch;
        longest_open_tokens_ = lead->tokens;
      }
      lead = after;
    }
    num_queued_ = queued - queue_.data();
    plan.num_slots = num_slots;
    plan.kv_tokens_packed = tiling_.tokens();
    longest_ = longest;
    longest_open_ = longest_open;
  }

  static int32_t queries_of(const Tile* lead, const Tile* after) {
    return after[-1].item.query_begin + after[-1].item.query_count - lead->item.query_begin;
  }

  int32_t fill_slots(int32_t query_begin, int32_t queries, int32_t pieces, int32_t slot) {
    int32_t* const next = combine_next_.data() + query_begin;
    int32_t* const slots = schedule_.plan.combine_slot.data();
    if (queries == 1 && pieces == 1) {
      slots[next[0]++] = slot;
      return slot + 1;
    }
    for (int32_t piece = 0; piece < pieces; ++piece) {
      for (int32_t i = 0; i < queries; ++i) slots[next[i]++] = slot++;
    }
    return slot;
  }

  // Longest first; a stable counting sort. Alike packs stand together: what belongs to the place of the last one is
  // kept in a register, so that a run of them does not wait for memory.
  void order_queue() {
    order_.make_room(num_queued_);
    const double to_bin = (kQueueBins - 1) / longest_;
    std::array<int32_t, kQueueBins + 1> offset{};
    int32_t place = 0, count = 0;
    for (size_t i = 0; i < num_queued_; ++i, ++count) {
      const int32_t next_place = kQueueBins - 1 - static_cast<int32_t>(queue_[i].key * to_bin);
      queue_[i].place = next_place;
      if (next_place == place) continue;
      offset[place + 1] += count;
      place = next_place;
      count = 0;
    }
    offset[place + 1] += count;
    for (int32_t i = 0; i < kQueueBins; ++i) offset[i + 1] += offset[i];
    int32_t next = offset[place = 0];
    for (size_t i = 0; i < num_queued_; ++i) {
      if (queue_[i].place != place) {
        offset[place] = next;
        place = queue_[i].place;
        next = offset[place];
      }
      order_[next++] = static_cast<int32_t>(i);
    }
  }

  void list_items() {
    auto& items = schedule_.plan.items;
    items.reserve(num_items_);
    for (size_t i = 0; i < num_queued_; ++i) {
      const QueuedPack& queued = queue_[order_[i]];
      const Tile* const lead = queued.lead;
      if (tiling_.pieces(*lead) == 1 && tiling_.pack_end(lead) == lead + 1) {
        items.push_back(lead->item);
        items.back().slot_begin = queued.slot_begin;
      } else {
        list_pieces(lead, queued.slot_begin);
      }
    }
  }

  // Tiles of a pack are split as the first of them is, and those that read the same KV stand side by side.
  void list_pieces(const Tile* lead, int32_t slot) {
    const Tile* const after = tiling_.pack_end(lead);
    const int32_t length = Tiling::piece_length(*lead, tiling_.pieces(*lead));
    const int32_t kv_begin = lead->item.kv_begin, kv_end = kv_begin + lead->tokens;
    for (int32_t begin = kv_begin; begin < kv_end; begin += length) {
      for (const Tile* tile = lead; tile != after; ++tile) {
        WorkItem& item = schedule_.plan.items.emplace_back(tile->item);
        item.kv_begin = begin;
        if (begin + length < kv_end) item.kv_end = begin + length;
        item.slot_begin = slot;
        if (slot != kWriteThrough) slot += item.query_count;
      }
    }
  }

  int32_t growth_limit() const {
    const TileClass& tail = cost_.tile(1, longest_open_tokens_);
    const double token = tail.first_read;
    const double work_tile_growth = token * tiling_.per_worker() * tail.stretch;
    const double even_growth = token * forest_.num_requests;
    const double slack = kDriftTolerance * tiling_.finish() - longest_open_;
    const double closing = work_tile_growth - kDriftTolerance * even_growth;
    if (closing <= 0) return INT32_MAX;
    return std::max(kMinGrowth, static_cast<int32_t>(std::min(slack / closing, 1e9)));
  }

  const Forest& forest_;
  const BatchLens lens_;
  const Packing& packing_;
  const CostModel& cost_;
  Tiling tiling_, narrower_;
  std::vector<int32_t> partials_;  // of every query
  std::vector<int32_t> combine_next_;
  int64_t num_partials_ = 0;  // of all queries, by the packs alone
  Buffer<QueuedPack> queue_;
  Buffer<int32_t> order_;  // into queue_
  size_t num_queued_ = 0, num_items_ = 0;
  double longest_ = 0, longest_open_ = 0;
  int32_t longest_open_tokens_ = 0;
  Schedule schedule_;
};

}  // namespace

Schedule make_schedule(const Forest& forest, const BatchLens& lens, const Packing& packing, const CostModel& cost) {
  return Scheduler(forest, lens, packing, cost).run();
}

}  // namespace prefixpack
