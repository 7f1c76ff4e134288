// Prices of an attention step: what the packing, the KV splits and the queue order are decided by.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

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
  int32_t wide_rows = 0;           // tiles of so many rows or more, if not 0, do
  double wide_flops = 1;           // so many
  double item_overhead = 0;        // seconds of a worker to take up an item
  double reread = 1;               // price of reading KV again right after a sibling tile did, 0 .. 1
  std::vector<int32_t> tile_rows;  // tile table, ascending
  int32_t narrow_rows = 0;         // an item of so many rows or fewer takes only a part of a worker,
  int32_t narrow_per_worker = 1;   // which does so many of them at a time,
  int32_t narrow_to_fill = 1;      // of which so many take all of its bandwidth,
  double narrow_overhead = 0;      // and is taken up in so many seconds of a worker
  double overlap = 1;              // 1: a worker computes while it waits for KV; 0: one after the other
};

// What a tile costs and takes, by its number of queries.
struct TileClass {
  double overhead;                 // seconds to take up an item
  double first_read, second_read;  // seconds per KV position; the second where a sibling tile has just read it
  int32_t rows;                    // of the smallest tile that holds them
  int32_t stretch, share;          // see CostModel
};

// Seconds of the whole device unless said otherwise; all KV heads of an item together. The partial price follows
// PAT section 5.1 (an intermediate is written and read once) with the group size, head size and width put in.
class CostModel {
 public:
  CostModel(const ModelShape& shape, const DeviceModel& device)
      : device_(device),
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
      const int32_t rows = smallest_tile(queries * group_);
      const bool wide = device.wide_rows > 0 && rows >= device.wide_rows;
      const double multiply = row_token_flops_ / (wide ? device.wide_flops : device.flops) * rows;
      tiles_.push_back({overhead(rows), both(token_seconds_, multiply), both(token_seconds_ * device.reread, multiply),
                        rows, stretch(rows), share(rows)});
    }
  }

  int32_t group() const { return group_; }
  int32_t queries_per_tile() const { return queries_per_tile_; }
  // The most of `queries` that fill their tiles.
  int32_t whole_tiles(int32_t queries) const {
    return queries < queries_per_tile_ ? 0 : queries / queries_per_tile_ * queries_per_tile_;
  }
  int32_t workers() const { return device_.workers; }
  int32_t kv_heads() const { return kv_heads_; }
  // To take up an item of whose tile so many rows are.
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

  // Of `queries`, at most queries_per_tile.
  const TileClass& tile(int32_t queries) const { return tiles_[queries]; }

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
  int32_t smallest_tile(int32_t rows) const {
    for (int32_t tile : device_.tile_rows) {
      if (tile >= rows) return tile;
    }
    return (rows + max_rows_ - 1) / max_rows_ * max_rows_;
  }

  // Seconds for reading and for arithmetic, as far as they do not overlap.
  double both(double a, double b) const { return std::max(a, b) + (1 - device_.overlap) * std::min(a, b); }

  DeviceModel device_;
  int32_t group_, kv_heads_, max_rows_, queries_per_tile_;
  double token_seconds_, row_token_flops_, partial_seconds_, overhead_seconds_, narrow_overhead_seconds_;
  std::vector<TileClass> tiles_;
};

// Packs of different numbers of queries that read the same KV range.
class PackPrice {
 public:
  PackPrice(const CostModel& cost, double tokens)
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

inline double CostModel::pack(int32_t queries, double tokens) const { return PackPrice(*this, tokens)(queries); }

}  // namespace prefixpack
