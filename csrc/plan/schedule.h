// Cuts packs into row tiles and KV splits, orders the queue and numbers the partials.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "plan/packing.h"
#include "plan/plan.h"
#include "plan/scratch_buffer.h"
#include "plan/tiling.h"

namespace prefixpack {

struct Schedule {
  Plan plan;
  // Tokens by which every open tail may grow before its items unbalance the workers.
  int32_t growth_limit = 0;
};

// Splits follow PersistentKV (only items that have work exist, the queue is taken longest first) and PAT section 6
// (long KV is split); how far is decided by an estimate of the time at which the last worker is done. Its memory is
// kept from one schedule to the next.
class Scheduler {
 public:
  explicit Scheduler(const CostModel& cost) : cost_(cost), tilings_{Tiling(cost), Tiling(cost)} {}
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  Schedule make(const Forest& forest, const BatchLens& lens, const Packing& packing);

 private:
  // Tiles that are split alike, on their way into the queue: those of a pack, or one of a request's own tail.
  struct QueuedPack {
    const Tile* lead;  // the first of them
    double key;        // seconds of a split of that tile: what the queue is ordered by
    int32_t place;
    int32_t partial_begin;  // of its first item, or kWriteThrough
    int32_t splits, tiles;
  };

  void list_queries(const Forest& forest, const BatchLens& lens, const std::vector<int32_t>& request_order);
  void count_tokens(const Forest& forest, const BatchLens& lens);
  void count_partials(const std::vector<Pack>& packs);
  void choose_tiles(const std::vector<Pack>& packs, const BatchLens& lens);
  void count_splits();
  void place_combines();
  void number_partials();
  int32_t number_splits(int32_t query_begin, int32_t queries, int32_t splits, int32_t partial);
  void order_queue();
  void list_items();
  WorkItem* list_splits(const QueuedPack& queued, WorkItem* next);
  int32_t growth_limit(int32_t num_requests) const;

  const CostModel& cost_;
  std::array<Tiling, 2> tilings_;
  Tiling *tiling_ = nullptr, *other_ = nullptr;  // the best so far, and room for another
  std::vector<int32_t> partials_;                // of every query
  std::vector<int32_t> combine_next_;
  int64_t num_partials_ = 0;  // of all queries, by the packs alone
  ScratchBuffer<QueuedPack> queue_;
  ScratchBuffer<int32_t> order_;  // into queue_
  size_t num_queued_ = 0, num_items_ = 0;
  double longest_ = 0, longest_open_ = 0;
  int32_t longest_open_tokens_ = 0;
  Plan plan_;  // the one that is being made
};

}  // namespace prefixpack
