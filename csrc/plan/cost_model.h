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
  double item_overhead = 0;        // seconds of a worker to take up an item
  double reread = 1;               // price of reading KV again right after a sibling tile did, 0 .. 1
  std::vector<int32_t> tile_rows;  // tile table, ascending
  int32_t narrow_rows = 0;         // an item of so many rows or fewer takes only a part of a worker,
  int32_t narrow_per_worker = 1;   // which does so many of them at a time
  double overlap = 1;              // 1: a worker computes while it waits for KV; 0: one after the other
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
        token_seconds_(2.0 * shape.kv_heads * shape.head_dim * shape.kv_bytes / device.bandwidth),
        row_token_seconds_(4.0 * shape.kv_heads * shape.head_dim / device.flops),
        partial_seconds_(2.0 * shape.q_heads * (shape.head_dim * double(shape.partial_bytes) + 4) / device.bandwidth),
        overhead_seconds_(device.item_overhead * shape.kv_heads / device.workers) {
    for (int32_t queries = 0; queries <= queries_per_tile(); ++queries) {
      const double multiply = row_token_seconds_ * tile_rows(queries);
      first_read_.push_back(both(token_seconds_, multiply));
      second_read_.push_back(both(token_seconds_ * device.reread, multiply));
    }
  }

  int32_t group() const { return group_; }
  int32_t queries_per_tile() const { return std::max(1, max_rows_ / group_); }
  int32_t workers() const { return device_.workers; }
  int32_t kv_heads() const { return kv_heads_; }
  double overhead() const { return overhead_seconds_; }

  // How many items like this one a worker does at a time; each takes that much longer than by itself.
  int32_t at_a_time(int32_t tile_rows) const {
    return tile_rows <= device_.narrow_rows ? device_.narrow_per_worker : 1;
  }
  // Rows of the smallest tile that takes a whole worker; the widest tile if none does.
  int32_t narrowest_whole_tile() const {
    for (int32_t rows : device_.tile_rows) {
      if (rows > device_.narrow_rows) return rows;
    }
    return max_rows_;
  }
  int32_t most_at_a_time() const { return device_.narrow_per_worker; }

  int32_t tile_rows(int32_t queries) const {
    const int32_t rows = queries * group_;
    for (int32_t tile : device_.tile_rows) {
      if (tile >= rows) return tile;
    }
    return (rows + max_rows_ - 1) / max_rows_ * max_rows_;
  }

  // One tile of `queries` (at most queries_per_tile) against `tokens` KV positions, without partials.
  double item(int32_t queries, double tokens, bool sibling_read_before = false) const {
    return overhead_seconds_ + tokens * (sibling_read_before ? second_read_ : first_read_)[queries];
  }

  // One partial of every query head of a query, written once and read once.
  double partial() const { return partial_seconds_; }

  // A pack: as few tiles as hold its queries, one after the other.
  double pack(int32_t queries, double tokens) const {
    const int32_t tile = queries_per_tile(), full = queries / tile, rest = queries % tile;
    double cost = 0;
    if (full > 0) cost += item(tile, tokens) + (full - 1) * item(tile, tokens, true);
    if (rest > 0) cost += item(rest, tokens, full > 0);
    return cost;
  }

  // A request's own positions [begin, seq_len) with its last `queries` tokens asking, causally.
  double tail(int32_t queries, int32_t begin, int64_t seq_len) const {
    const int32_t tile = queries_per_tile();
    double cost = 0;
    for (int32_t first = 0; first < queries; first += tile) {
      const int32_t count = std::min(tile, queries - first);
      const int64_t end = seq_len - queries + first + count;
      cost += item(count, static_cast<double>(end - begin), first > 0);
    }
    return cost;
  }

 private:
  // Seconds for reading and for arithmetic, as far as they do not overlap.
  double both(double a, double b) const { return std::max(a, b) + (1 - device_.overlap) * std::min(a, b); }

  DeviceModel device_;
  int32_t group_, kv_heads_, max_rows_;
  double token_seconds_, row_token_seconds_, partial_seconds_, overhead_seconds_;
  std::vector<double> first_read_, second_read_;  // seconds per KV position by queries of a tile
};

}  // namespace prefixpack
