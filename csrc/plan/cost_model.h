// Costs of an attention step: what the packing, the KV splits and the queue order are decided by.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "plan/combine_shape.h"
#include "plan/queue_model.h"

namespace prefixpack {

struct ModelShape {
  int32_t q_heads = 1, kv_heads = 1, head_dim = 1;
  int32_t kv_bytes = 2;       // bytes of one stored K or V element
  int32_t partial_bytes = 4;  // bytes of one element of a partial output
  int32_t group() const { return q_heads / kv_heads; }
};

struct DeviceModel {
  int32_t workers = 1;             // work items in flight: CTAs on a GPU, threads on a CPU
  double bandwidth = 1;            // bytes per second that all workers read together
  double flops = 1;                // multiply-adds count two; all workers together, full tiles
  int32_t wide_rows = 0;           // fewest rows of a wide tile; 0: no tile is wide
  double wide_flops = 1;           // multiply-adds count two; all workers together, wide tiles
  double item_overhead = 0;        // seconds of a worker to take up an item
  double reread = 1;               // cost of reading KV again right after a sibling tile did, 0 .. 1
  std::vector<int32_t> tile_rows;  // tile table, ascending
  int32_t narrow_rows = 0;         // most rows of a narrow item, which takes a part of a worker
  int32_t narrow_per_worker = 1;   // narrow items that a worker runs at a time
  int32_t narrow_to_fill = 1;      // narrow items that take all of a worker's bandwidth
  double narrow_overhead = 0;      // seconds of a worker to take up a narrow item
  int32_t narrow_parts = 1;        // work tiles of a narrow item, each of which reads its KV
  double narrow_reread = 1;        // cost of the reads by all parts but the first, 0 .. 1
  double lone_speedup = 1;         // factor of a worker's arithmetic while most others have nothing to do
  // One worker adds a row's partials, one step after the other. Narrow items: an eighth of the rows, half of the width.
  double combine_step = 0;           // seconds of a step of a combine
  int32_t combine_rows = 1;          // rows of a step
  int32_t combine_width = 1;         // partials of a row in a step
  double combine_latency = 0;        // seconds of a combine before its first step
  int32_t combine_fan_in = 1 << 30;  // most partials in one level; more take two, in groups of the square root
  double overlap = 1;                // 1: a worker computes while it waits for KV; 0: one after the other

  // Figures of decode and verify steps, whose requests have as many rows each. 0: these have the costs of mixed steps.
  double widest_flops = 0;           // multiply-adds count two; all workers together, widest tiles
  double medium_flops = 0;           // multiply-adds count two; all workers together, other wide tiles
  double deferred_combine = 0;       // seconds of a deferred combine, one of four steps or more
  double deferred_combine_step = 0;  // seconds per eight partials of a deferred combine
};

// What a tile costs and takes, by its number of queries.
struct TileClass {
  double overhead;                 // seconds to take up an item
  double first_read, second_read;  // seconds per KV position; the second where a sibling tile has just read it
  double computing;        // seconds per KV position of arithmetic alone, or of all if a worker does not overlap
  int32_t rows;            // of the smallest tile that holds them
  int32_t stretch, share;  // see CostModel
};

// Seconds of the whole device unless said otherwise; all KV heads of an item together. The cost of partials follows
// PAT section 5.1 (an intermediate is written and read once) with the group size, head size and width put in.
class CostModel {
 public:
  // uniform_rows: of a step in which each request has as many query rows: a decode or a verify step.
  CostModel(const ModelShape& shape, const DeviceModel& device, bool uniform_rows = false)
      : device_(device),
        uniform_rows_(uniform_rows && device.widest_flops > 0),
        group_(shape.group()),
        kv_heads_(shape.kv_heads),
        max_rows_(device.tile_rows.back()),
        queries_per_tile_(std::max(1, max_rows_ / group_)),
        token_seconds_(2.0 * shape.kv_heads * shape.head_dim * shape.kv_bytes / device.bandwidth),
        row_token_flops_(4.0 * shape.kv_heads * shape.head_dim),
        partial_seconds_(2.0 * shape.q_heads * (shape.head_dim * double(shape.partial_bytes) + 4) / device.bandwidth),
        overhead_seconds_(device.item_overhead * shape.kv_heads / device.workers),
        narrow_overhead_seconds_(device.narrow_overhead * shape.kv_heads / device.workers) {
    for (int32_t queries = 0; queries <= queries_per_tile(); ++queries) {
      tiles_.push_back(tile_of(smallest_tile(queries * group_)));
      for (bool narrow : {false, true}) {
        const int32_t rows = std::max(1, narrow ? device_.combine_rows / 8 : device_.combine_rows);
        combine_row_steps_.push_back((queries * group_ + rows - 1) / rows);
      }
    }
    for (int32_t partials = 0; partials < kTabulated; ++partials) {
      for (bool narrow : {false, true}) combine_levels_[narrow][partials] = levels_of(partials, narrow);
    }
    tiles_.push_back(tile_of(narrowest_whole_tile()));
    longest_narrow_ = longest_narrow();
  }

  int32_t group() const { return group_; }
  // Whether the step has costs of its own, and with them splits that were judged by the makespan simulator.
  bool uniform_rows() const { return uniform_rows_; }
  int32_t queries_per_tile() const { return queries_per_tile_; }
  // The most of `queries` that fill their tiles.
  int32_t whole_tiles(int32_t queries) const {
    return queries < queries_per_tile_ ? 0 : queries / queries_per_tile_ * queries_per_tile_;
  }
  int32_t workers() const { return device_.workers; }
  int32_t kv_heads() const { return kv_heads_; }
  // Seconds to take up an item in a tile of `tile_rows` rows.
  double overhead(int32_t tile_rows) const {
    return tile_rows <= device_.narrow_rows ? narrow_overhead_seconds_ : overhead_seconds_;
  }
  double longest_overhead() const { return overhead_seconds_; }

  // By how much an item takes longer than a worker's time for it, which does several of them at a time. Where a worker
  // has more of them than take all of its bandwidth, the sum of their times says how long they take.
  int32_t stretch(int32_t tile_rows) const { return tile_rows <= device_.narrow_rows ? device_.narrow_to_fill : 1; }
  // Share of a worker that an item takes, in the smallest shares that there are.
  int32_t share(int32_t tile_rows) const { return tile_rows <= device_.narrow_rows ? 1 : most_at_a_time(); }
  // Rows of the smallest tile that takes a whole worker; the widest tile if none does.
  int32_t narrowest_whole_tile() const {
    for (int32_t rows : device_.tile_rows) {
      if (rows > device_.narrow_rows) return rows;
    }
    return max_rows_;
  }
  int32_t most_at_a_time() const { return device_.narrow_per_worker; }
  // How much faster a narrow item is read while few are.
  double narrow_speedup() const { return static_cast<double>(device_.narrow_per_worker) / device_.narrow_to_fill; }
  // Rows of one KV head and `queries` queries, at most queries_per_tile, in steps of a combine.
  int32_t combine_row_steps(int32_t queries, bool narrow) const { return combine_row_steps_[2 * queries + narrow]; }
  // Seconds of a worker to combine `partials` partials of the rows of `rows` steps.
  double combine(int32_t rows, int32_t partials, bool narrow) const {
    const CombineLevels levels =
        partials < kTabulated ? combine_levels_[narrow][partials] : levels_of(partials, narrow);
    const int64_t steps = int64_t{rows} * levels.steps;
    const double by_worker =
        levels.count * (device_.combine_latency + device_.combine_step * static_cast<double>(steps));
    if (!uniform_rows_ || narrow || levels.count * steps < kDeferredSteps) return by_worker;
    const int32_t turns = (partials + kDeferredWidth - 1) / kDeferredWidth;
    return std::min(by_worker, device_.deferred_combine + device_.deferred_combine_step * turns);
  }

  // A number for each class, by which it is found again.
  int32_t number(const TileClass& tile) const { return static_cast<int32_t>(&tile - tiles_.data()); }
  const TileClass& numbered(int32_t number) const { return tiles_[number]; }
  // The class of `queries`, at most queries_per_tile. Packs are chosen by its costs, which are linear in the length.
  const TileClass& tile(int32_t queries) const { return tiles_[queries]; }
  // The same class, unless one query has too many KV positions for a narrow item. The positions count before the
  // splits: the work tiles of every KV split read as often, so splits make the items shorter, not the reading less.
  const TileClass& tile(int32_t queries, int32_t tokens) const {
    return queries == 1 && tokens > longest_narrow_ ? narrowest_whole() : tiles_[queries];
  }
  // The class of `queries` in a tile that takes a whole worker.
  const TileClass& whole_tile(int32_t queries) const {
    return tiles_[queries].rows <= device_.narrow_rows ? narrowest_whole() : tiles_[queries];
  }
  // The class of the narrowest tile that takes a whole worker.
  const TileClass& narrowest_whole() const { return tiles_.back(); }
  // computing: share of the whole items' work that is arithmetic. With more of the bandwidth they are as fast as that,
  // up to kMostPairedSpeed.
  Workers queue_workers(double computing) const {
    const double paired = std::min(std::max(1.0, 1 / computing), kMostPairedSpeed);
    return {workers(),
            device_.narrow_per_worker,
            paired,
            paired * device_.lone_speedup,
            1.0 / device_.narrow_to_fill,
            device_.item_overhead,
            device_.narrow_overhead * device_.narrow_per_worker};
  }
  // Most speed of a whole work tile, see Workers.
  double most_speed() const { return kMostPairedSpeed * std::max(1.0, device_.lone_speedup); }
  // Seconds per KV position that the work tiles of a narrow item after the first take.
  double narrow_reread() const { return token_seconds_ * device_.narrow_reread * (device_.narrow_parts - 1); }

  // One tile against `tokens` KV positions, without partials.
  double item(const TileClass& tile, double tokens, bool sibling_read_before = false) const {
    return tile.overhead + tokens * (sibling_read_before ? tile.second_read : tile.first_read);
  }
  double item(int32_t queries, double tokens, bool sibling_read_before = false) const {
    return item(tile(queries), tokens, sibling_read_before);
  }

  // One partial of every query head of a query, written once and read once.
  double partial() const { return partial_seconds_; }

  // A pack: as few tiles as hold its queries, one after the other.
  double pack(int32_t queries, double tokens) const;

  // A request's own positions [begin, seq_len) with its last `queries` tokens asking, causally.
  double tail(int32_t queries, int32_t begin, int64_t seq_len) const {
    const int32_t tile = queries_per_tile_;
    if (queries == 1) return item(1, static_cast<double>(seq_len - begin));
    double cost = 0;
    for (int32_t first = 0; first < queries; first += tile) {
      const int32_t count = std::min(tile, queries - first);
      const int64_t end = seq_len - queries + first + count;
      cost += item(count, static_cast<double>(end - begin), first > 0);
    }
    return cost;
  }

 private:
  static constexpr double kMostPairedSpeed = 2;
  double flops_of(int32_t rows) const {
    if (device_.wide_rows == 0 || rows < device_.wide_rows) return device_.flops;
    if (!uniform_rows_) return device_.wide_flops;
    return rows < max_rows_ ? device_.medium_flops : device_.widest_flops;
  }

  TileClass tile_of(int32_t rows) const {
    const double multiply = row_token_flops_ / flops_of(rows) * rows;
    const double reread = rows <= device_.narrow_rows ? narrow_reread() : 0.0;
    return {overhead(rows),
            both(token_seconds_ + reread, multiply),
            both(token_seconds_ * device_.reread + reread, multiply),
            device_.overlap < 1 ? both(token_seconds_, multiply) : multiply,
            rows,
            stretch(rows),
            share(rows)};
  }

  // KV positions of one query up to which a narrow item, which is taken up sooner, is cheaper than one that takes a
  // whole worker and reads them once. No limit for items of one work tile.
  int32_t longest_narrow() const {
    const TileClass& narrow = tiles_[1];
    const TileClass& whole = narrowest_whole();
    const double saved = whole.overhead - narrow.overhead, lost = narrow.first_read - whole.first_read;
    if (narrow.rows > device_.narrow_rows || lost <= 0) return INT32_MAX;
    return static_cast<int32_t>(std::min(std::max(saved / lost, 0.0), double{INT32_MAX}));
  }

  CombineLevels levels_of(int32_t partials, bool narrow) const {
    const int32_t width = std::max(1, narrow ? device_.combine_width / 2 : device_.combine_width);
    return combine_levels(partials, device_.combine_fan_in, width);
  }

  int32_t smallest_tile(int32_t rows) const {
    for (int32_t tile : device_.tile_rows) {
      if (tile >= rows) return tile;
    }
    return (rows + max_rows_ - 1) / max_rows_ * max_rows_;
  }

  // Seconds for reading and for arithmetic, as far as they do not overlap.
  double both(double a, double b) const { return std::max(a, b) + (1 - device_.overlap) * std::min(a, b); }

  DeviceModel device_;
  bool uniform_rows_;
  int32_t group_, kv_heads_, max_rows_, queries_per_tile_;
  double token_seconds_, row_token_flops_, partial_seconds_, overhead_seconds_, narrow_overhead_seconds_;
  static constexpr int32_t kTabulated = 64;
  std::array<std::array<CombineLevels, kTabulated>, 2> combine_levels_;  // of wide and narrow items, by partials
  std::vector<TileClass> tiles_;            // by queries; behind them the narrowest that takes a whole worker
  std::vector<int32_t> combine_row_steps_;  // by queries: of a wide item and of a narrow one
  int32_t longest_narrow_;
};

// Packs of different numbers of queries that read the same KV range.
class PackCost {
 public:
  PackCost(const CostModel& cost, double tokens)
      : cost_(cost),
        tokens_(tokens),
        first_tile_(cost.item(cost.queries_per_tile(), tokens)),
        next_tile_(cost.item(cost.queries_per_tile(), tokens, true)) {}

  double operator()(int32_t queries) const {
    const int32_t tile = cost_.queries_per_tile();
    if (queries <= tile) return cost_.item(queries, tokens_);
    const int32_t full = queries / tile, rest = queries % tile;
    const double whole = first_tile_ + (full - 1) * next_tile_;
    return rest == 0 ? whole : whole + cost_.item(rest, tokens_, true);
  }

 private:
  const CostModel& cost_;
  double tokens_, first_tile_, next_tile_;
};

inline double CostModel::pack(int32_t queries, double tokens) const { return PackCost(*this, tokens)(queries); }

}  // namespace prefixpack
