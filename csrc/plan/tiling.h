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
  double lone;         // time of the rest with the full bandwidth for few workers, 0 .. 1 of that with an even share
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
  double finish() const { return finish_; }             // when the last worker is done

  // Tiles that lead a pack and are split, in ascending order.
  std::vector<int32_t> long_tiles() const;
  // Past the last tile of the pack that `first` is the first tile of.
  const Tile* pack_end(const Tile* first) const {
    do ++first;
    while (first != end() && !first->first_of_pack);
    return first;
  }
  int32_t pieces(const Tile& tile) const { return pieces(tile, is_narrow(tile) ? longest_narrow_ : longest_whole_); }
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
  static constexpr int32_t kBins = 256, kShareBins = 512;

  // Units of one kind of workers by duration with an even share of the bandwidth for each worker. While few workers
  // have work, a unit takes `lone` of it.
  struct Level {
    std::array<int32_t, kBins> count;  // the last bin holds all that are longer
    double to_bin = 0, total = 0, longest = 0;
    double longest_lone = 0, lone = 1;  // of the unit that takes longest by itself
    int32_t heads = 1;                  // units are counted for one KV head
    int64_t workers = 1, units = 0;

    int32_t bin(double duration) const { return static_cast<int32_t>(std::min(duration * to_bin, kBins - 1.0)); }
    void add(double duration, double lone_duration, int32_t units_more) {
      count[bin(duration)] += units_more;
      total += duration * units_more;
      units += units_more;
      longest = std::max(longest, duration);
      if (lone_duration > longest_lone) {
        longest_lone = lone_duration;
        lone = lone_duration / duration;
      }
    }
    // When the last of its workers is done.
    double finish() const;
  };
  struct Split {
    double narrow, whole;  // longest unit of either kind
  };
  struct Finish {
    double narrow;   // when the last narrow unit is done and combined, if these alone were there
    double all;      // when the last worker is done and whole units are combined
    double combine;  // of whole units
  };

  void list(const std::vector<Pack>& packs, const BatchLens& lens, const int32_t* partials, int32_t step);
  // Those of a longer duration.
  void widen_narrow_tiles(double longer_than);
  int32_t pieces(const Tile& tile, double longest) const {
    return tile.duration <= longest ? 1 : split_pieces(tile, longest);
  }
  bool is_narrow(const Tile& tile) const { return tile.share < cost_->most_at_a_time(); }
  static int32_t split_pieces(const Tile& tile, double longest);
  double lone_duration(const Tile& tile, double duration) const;
  double split_seconds(const Tile& tile, int32_t pieces) const;
  Finish finish_time(const Split& split) const;
  void count_units();
  void count_levels();
  double even_time(double longest) const;
  void choose_longest_unit();
  void shorten_narrow_units();
  void lengthen_whole_units();
  int32_t bin(double seconds) const { return static_cast<int32_t>(seconds * to_bin_); }

  const CostModel* cost_;
  double per_worker_, longest_overhead_, partial_;
  Buffer<Tile> tiles_;
  size_t num_tiles_ = 0;
  std::vector<int32_t> splittable_;
  bool levels_counted_ = false;
  Level whole_level_, narrow_level_;  // of the tiles that are short enough whatever is chosen
  double narrow_ = 0, total_ = 0;
  std::array<int32_t, kShareBins> shares_;  // of workers by unsplit duration
  double longest_ = 0, to_bin_ = 0, longest_tile_ = 0, longest_narrow_tile_ = 0;
  double longest_whole_ = 1, longest_narrow_ = 1, finish_ = 0;
  int64_t narrow_units_ = 0, whole_units_ = 0, tokens_ = 0;
  int64_t narrow_tokens_ = 0, whole_tail_tokens_ = 0;  // the latter of single queries
};

}  // namespace prefixpack
