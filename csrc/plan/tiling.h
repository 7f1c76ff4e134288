// Row tiles of the packs of a batch, and how long a work tile may be before its KV range is split.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/cost_model.h"
#include "plan/packing.h"
#include "plan/plan.h"
#include "plan/queue_model.h"
#include "plan/scratch_buffer.h"
#include "plan/split_classes.h"

namespace prefixpack {

// A row tile of a pack before its KV range is split. Times are seconds of one worker for one KV head.
// There may be thousands, which are read several times.
struct Tile {
  double seconds;       // of work
  double duration;      // from beginning to end: longer than the work where a worker does several items at a time
  int32_t query_begin;  // as in WorkItem
  int32_t query_count;
  int32_t request;
  int32_t kv_begin;
  int32_t tokens;
  int32_t partials;    // of each query, by the packs alone
  int32_t kind;        // number of its class
  bool open;           // ends with its last query
  bool first_of_pack;  // the tiles behind it read the same range and are split as it is
};

// Queries of a batch in packed order, with the packs that read them. Partials are those of the packs alone.
struct PackedQueries {
  const std::vector<Pack>& packs;
  const BatchLens& lens;
  const int32_t* partials;  // of every query
  int64_t num_partials;     // of all queries together
};

class Tiling {
 public:
  explicit Tiling(const CostModel& cost);

  // Cuts packs into tiles of at most `most_queries` queries and chooses the longest work tile. Without narrow items,
  // all take a whole worker.
  void make(const PackedQueries& queries, int32_t most_queries, bool with_narrow = true) {
    list_tiles(queries, most_queries, with_narrow);
    choose(nullptr);
  }
  // Like make(), with narrower tiles than `wider`, near whose choice splits are tried. Returns whether it is done in
  // `worth` of that one's time and reads no more than most_tokens; if not, there may be no choice.
  bool make_narrower(const PackedQueries& queries, int32_t most_queries, bool with_narrow, const Tiling& wider,
                     int64_t most_tokens, double worth);
  // Equals make(queries, most_queries, false); takes the tiles of `with_narrow`, which has the same queries and width.
  void make_without_narrow(const PackedQueries& queries, int32_t most_queries, const Tiling& with_narrow);
  // A time before which the last worker of make_without_narrow() would not be done; 0 if none is known.
  double least_finish_without_narrow() const;
  // What make(queries, most_queries, with_narrow, this) would choose if its tiles were these. Keeps it if it is done in
  // `worth` of the time; returns whether.
  bool choose_again(double worth);

  const Tile* begin() const { return tiles_.data(); }
  const Tile* end() const { return tiles_.data() + num_tiles_; }
  size_t size() const { return num_tiles_; }
  int32_t largest_pack() const { return largest_pack_; }          // queries
  int64_t tokens() const { return tokens_; }                      // KV positions that the tiles read
  int64_t whole_work_tiles() const { return whole_work_tiles_; }  // that take a whole worker, before they are split
  int64_t narrow_work_tiles() const { return narrow_work_tiles_; }
  double finish() const { return finish_; }  // when the last worker is done

  // What a tile becomes if it is not split, but for its partials.
  WorkItem item(const Tile& tile) const {
    const int32_t kv_end = tile.open ? kOpenEnd : tile.kv_begin + tile.tokens;
    return {tile.query_begin, tile.query_count, tile.request, tile.kv_begin, kv_end, kWriteThrough, kind(tile).rows};
  }
  const TileClass& kind(const Tile& tile) const { return cost_->numbered(tile.kind); }
  // Past the last tile of the pack that `first` is the first tile of.
  const Tile* pack_end(const Tile* first) const {
    do ++first;
    while (first != end() && !first->first_of_pack);
    return first;
  }
  int32_t splits(const Tile& tile) const { return splits(tile, is_narrow(tile) ? longest_narrow_ : longest_whole_); }
  static int32_t split_length(const Tile& tile, int32_t splits);
  // Splits of that length; at times fewer than were asked for.
  static int32_t num_splits(const Tile& tile, int32_t splits) {
    return splits == 1 ? 1 : (tile.tokens - 1) / split_length(tile, splits) + 1;
  }
  double split_seconds(const Tile& tile, int32_t splits) const {
    return splits == 1 ? tile.seconds : seconds_if_split(tile, splits);
  }
  double per_worker() const { return per_worker_; }
  // Whether narrow items are more work than the others.
  bool mostly_narrow() const { return narrow_ > total_ - narrow_; }

 private:
  struct SplitLimits {
    double whole, narrow;  // longest work tile of either kind
  };

  void make_room(const PackedQueries& queries, int32_t most_queries);
  void list(const PackedQueries& queries, int32_t most_queries);
  void list_tiles(const PackedQueries& queries, int32_t most_queries, bool with_narrow);
  // Those of a longer duration.
  void widen_narrow_tiles(double longer_than);
  void choose(const Tiling* wider);
  int32_t splits(const Tile& tile, double longest) const { return splits_needed(tile.duration, tile.tokens, longest); }
  bool is_narrow(const Tile& tile) const { return kind(tile).share < cost_->most_at_a_time(); }
  double overhead(const Tile& tile) const { return kind(tile).overhead * per_worker_; }
  double seconds_if_split(const Tile& tile, int32_t splits) const;
  double streaming() const;                                   // seconds of work without overheads, unless any is split
  double even_share() const { return total_ / per_worker_; }  // seconds of work for each worker
  // Seconds of work for each worker, but no less than is worth taking up.
  double share() const { return std::max(even_share(), 2 * longest_overhead_); }
  void sort_out_splittable();
  double finish_time(const SplitLimits& limits, double limit);
  // nearby: of kShares, the one near which splits are tried; -1: all are.
  void choose_split(int32_t nearby);
  // Tries splits whose work tiles just fit the workers once; returns when the last worker is done.
  double fit_workers(SplitLimits* best, double finish);

  const CostModel* cost_;
  double per_worker_, longest_overhead_, partial_;
  ScratchBuffer<Tile> tiles_;
  size_t num_tiles_ = 0;
  bool any_widened_ = false;  // of the narrow tiles
  SplitClasses splittable_whole_, splittable_narrow_;
  Workers workers_{};
  WorkTileBins whole_, narrow_bins_;  // of the other tiles
  int32_t chosen_share_ = -1;         // of kShares; -1: no split
  double narrow_ = 0, total_ = 0;
  double longest_ = 0, longest_tile_ = 0, longest_narrow_tile_ = 0;
  double longest_whole_ = 1, longest_narrow_ = 1, finish_ = 0, last_finish_ = 0;
  int64_t narrow_tokens_ = 0;
  int32_t largest_pack_ = 0;
  int64_t narrow_work_tiles_ = 0, whole_work_tiles_ = 0, tokens_ = 0;
};

}  // namespace prefixpack
