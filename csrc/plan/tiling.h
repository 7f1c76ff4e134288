// Row tiles of the packs of a batch, and how long a unit of work may be before its KV range is split.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "plan/buffer.h"
#include "plan/cost_model.h"
#include "plan/packing.h"
#include "plan/plan.h"

namespace prefixpack {

// A row tile of a pack before its KV range is split. Times are seconds of one worker for one KV head.
struct Tile {
  WorkItem item;  // what it becomes if it is not split, but for its slots
  int32_t tokens;
  int32_t stretch;     // of its duration, see CostModel
  int32_t share;       // of a worker, in the smallest shares that there are
  bool partial;        // the queries have other partials
  bool first_of_pack;  // the tiles behind it read the same range and are split as it is
  double overhead;     // of taking it up
  double seconds;      // of work
  double duration;     // from beginning to end: longer than the work where a worker does several items at a time
};

class Tiling {
 public:
  explicit Tiling(const CostModel& cost);

  // Cuts packs into tiles of at most `step` queries and chooses the longest unit. `partials`: of every query, by the
  // packs alone; `num_partials`: of all queries together.
  void make(const std::vector<Pack>& packs, const BatchLens& lens, const int32_t* partials, int64_t num_partials,
            int32_t step);

  const Tile* begin() const { return tiles_.data(); }
  const Tile* end() const { return tiles_.data() + num_tiles_; }
  size_t size() const { return num_tiles_; }
  int64_t tokens() const { return tokens_; }            // KV positions that the tiles read
  int64_t whole_units() const { return whole_units_; }  // that take a whole worker, before they are split
  int64_t whole_pieces() const;                         // the same, split
  double longest_unit() const { return longest_unit_; }
  double finish() const { return finish_; }  // when the last worker is done

  // Tiles that lead a pack and are longer than the longest unit, in ascending order.
  std::vector<int32_t> long_tiles() const;
  // Past the last tile of the pack that `first` is the first tile of.
  const Tile* pack_end(const Tile* first) const {
    do ++first;
    while (first != end() && !first->first_of_pack);
    return first;
  }
  int32_t pieces(const Tile& tile) const { return pieces(tile, longest_unit_); }
  static int32_t piece_length(const Tile& tile, int32_t pieces);
  // Pieces of that length; at times fewer than were asked for.
  static int32_t num_pieces(const Tile& tile, int32_t pieces) {
    return pieces == 1 ? 1 : (tile.tokens - 1) / piece_length(tile, pieces) + 1;
  }
  double piece_seconds(const Tile& tile, int32_t pieces) const {
    return pieces == 1 ? tile.seconds : split_seconds(tile, pieces);
  }
  double piece_duration(const Tile& tile, int32_t pieces) const { return piece_seconds(tile, pieces) * tile.stretch; }
  double per_worker() const { return per_worker_; }
  // Work in items that take only a part of a worker, for each second of the others.
  double narrow_to_whole() const { return narrow_ / std::max(total_ - narrow_, 1e-12); }

 private:
  static constexpr int32_t kBins = 512;

  void list(const std::vector<Pack>& packs, const BatchLens& lens, const int32_t* partials, int32_t step);
  void widen_narrow_tiles();
  int32_t pieces(const Tile& tile, double longest) const {
    return tile.duration <= longest ? 1 : split_pieces(tile, longest);
  }
  static int32_t split_pieces(const Tile& tile, double longest);
  double split_seconds(const Tile& tile, int32_t pieces) const;
  int32_t bin(double seconds) const { return static_cast<int32_t>(seconds * to_bin_); }
  double finish_time(double longest) const;
  void count_units(double splittable);
  void choose_longest_unit();

  const CostModel* cost_;
  double per_worker_, longest_overhead_, partial_;
  Buffer<Tile> tiles_;
  size_t num_tiles_ = 0;
  std::vector<int32_t> splittable_;
  std::array<int32_t, kBins> count_;  // shares of workers by unsplit duration
  double narrow_ = 0, total_ = 0, longest_ = 0, to_bin_ = 0;
  double longest_unit_ = 1, finish_ = 0;
  int64_t narrow_units_ = 0, whole_units_ = 0, tokens_ = 0;
  int64_t narrow_tokens_ = 0, whole_tail_tokens_ = 0;  // the latter of single queries
};

}  // namespace prefixpack
