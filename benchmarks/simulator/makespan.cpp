#include "makespan.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <queue>
#include <utility>
#include <vector>

#include "plan/active_warps.h"
#include "plan/checks.h"
#include "plan/combine_shape.h"
#include "plan/deferral.h"

namespace prefixpack {

namespace {

constexpr int32_t kPartialBytes = 4, kOutputBytes = 2;
constexpr int64_t kMostWorkTiles = int64_t{1} << 26;  // they are numbered in 32 bits, and more would take gigabytes
// Stream classes: two for each of three tile widths, first reader and sibling, then two for warps. The last one is of
// rows that CTAs store.
constexpr int32_t kWarpClass = 6, kStores = 8, kClasses = 9;

enum class Kind : uint8_t { kStream, kArrive, kFree };

struct Event {
  double time;
  Kind kind;
  int32_t work_tile;
  bool operator>(const Event& other) const {
    return time != other.time ? time > other.time : work_tile > other.work_tile;
  }
};

// Work tiles that stream at the same rate: as much as the class can take, or its share of the bandwidth.
struct StreamClass {
  double most = 0;    // bytes of the bandwidth per second and work tile
  double served = 0;  // bytes that every work tile has had since the begin
  double rate = 0;
  using Entry = std::pair<double, int32_t>;  // bytes served when it is done, work tile
  std::priority_queue<Entry, std::vector<Entry>, std::greater<>> active;
};

// Rows of one query and KV head whose combine is deferred.
struct Deferred {
  double ready;
  int32_t rows, partials;
};

struct WorkTile {
  int32_t item, head, part;
  int32_t stream_class;
  double bytes, stored;  // stored: behind the bytes
};

class Simulation {
 public:
  Simulation(const Plan& plan, const int64_t* seq_lens, const ModelShape& shape, const Machine& machine)
      : plan_(plan), seq_lens_(seq_lens), shape_(shape), machine_(machine) {
    position_bytes_ = 2.0 * shape.head_dim * shape.kv_bytes;
    list_classes();
    list_work_tiles();
    count_partials();
    find_deferred();
  }

  Makespan run() {
    begin();
    double last = machine_.begin;
    while (true) {
      const int32_t stream = next_stream();
      const double streamed = stream < 0 ? 0 : now_ + left(classes_[stream]) / classes_[stream].rate;
      if (stream < 0 && events_.empty()) break;
      if (stream >= 0 && (events_.empty() || streamed <= events_.top().time)) {
        advance(streamed);
        const int32_t work_tile = classes_[stream].active.top().second;
        classes_[stream].active.pop();
        const bool stores = stream != kStores && !is_narrow(work_tile);
        if (stores) {
          begin_stream(kStores, list_[work_tile].stored, work_tile);
        } else {
          share_bandwidth();
          events_.push({now_ + end_seconds(work_tile, speed()), Kind::kArrive, work_tile});
        }
        continue;
      }
      const Event event = events_.top();
      events_.pop();
      advance(event.time);
      last = std::max(last, now_);
      handle(event);
    }
    last = combine_deferred(last);
    return {last, streaming_ / machine_.bandwidth, longest_, work_};
  }

 private:
  bool is_narrow(int32_t work_tile) const { return work_tile >= static_cast<int32_t>(cta_work_tiles_); }

  // From when a work tile's KV has arrived to its end. A CTA multiplies the positions behind the last one as well.
  double end_seconds(int32_t index, double speed) const {
    if (is_narrow(index)) return 0;
    const auto beyond = static_cast<int32_t>(item_tokens(plan_.items[list_[index].item]) % machine_.key_tile);
    const int32_t padded = beyond == 0 ? 0 : machine_.key_tile - beyond;
    return machine_.cta_end + padded * multiply_[list_[index].stream_class] / speed;
  }

  static int32_t row_class(int32_t rows) { return rows <= 32 ? 0 : rows <= 64 ? 1 : 2; }

  void list_classes() {
    const double flops[] = {machine_.flops32, machine_.flops64, machine_.flops128};
    constexpr int32_t kRows[] = {32, 64, 128};
    for (int32_t i = 0; i < kWarpClass; ++i) {
      multiply_[i] = 4.0 * shape_.head_dim * kRows[i / 2] / (flops[i / 2] / machine_.resident_ctas);
    }
    multiply_[kWarpClass] = multiply_[kWarpClass + 1] = position_bytes_ / machine_.warp_rate;
    classes_[kStores].most = machine_.cta_store;
    set_rates();
  }

  // How much faster CTAs multiply than if two ran on every SM. They spread over the SMs.
  double speed() const {
    const double sms = machine_.resident_ctas / 2.0, paired = running_ctas_ <= sms ? 0 : 2 * (1 - sms / running_ctas_);
    return paired + (1 - paired) * machine_.lone_speedup;
  }

  // What a work tile of each class can read with as many CTAs as run now.
  void set_rates() {
    for (int32_t i = 0; i < kStores; ++i) {
      const double bytes = position_bytes_ * (i % 2 == 1 ? machine_.sibling : 1.0);
      classes_[i].most = bytes / multiply_[i] * (i < kWarpClass ? speed() : 1.0);
    }
    share_bandwidth();
  }

  int64_t item_tokens(const WorkItem& item) const {
    const int32_t last = item.query_begin + item.query_count - 1;
    const int64_t end =
        item.kv_end == kOpenEnd ? seq_lens_[plan_.query_request[last]] - plan_.query_back[last] : item.kv_end;
    return std::max<int64_t>(0, end - item.kv_begin);  // less if seq_lens are not those of the plan
  }

  void add_work_tiles(int32_t index, int32_t work_tiles, bool narrow, bool follows_sibling) {
    const WorkItem& item = plan_.items[index];
    const int64_t tokens = item_tokens(item);
    const double rows = static_cast<double>(item.query_count) * shape_.group() / work_tiles;
    const bool partial = item.partial_begin != kWriteThrough;
    const double fastest = narrow ? 1.0 : std::max(1.0, machine_.lone_speedup);
    const double stored = rows * (partial ? shape_.head_dim * kPartialBytes + 4.0 : shape_.head_dim * kOutputBytes);
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      for (int32_t part = 0; part < work_tiles; ++part) {
        const int32_t sibling = follows_sibling || part > 0 ? 1 : 0;
        const int32_t kind = (narrow ? kWarpClass : 2 * row_class(item.tile_rows)) + sibling;
        const double read = tokens * position_bytes_ * (sibling != 0 ? machine_.sibling : 1.0);
        list_.push_back({index, head, part, kind, narrow ? read + stored : read, stored});
        streaming_ += read + stored;
        longest_ = std::max(longest_, tokens * multiply_[kind] / fastest);
      }
    }
  }

  void list_work_tiles() {
    const auto count = static_cast<int32_t>(plan_.items.size());
    const WorkItem* before = nullptr;
    for (int32_t i = 0; i < count; ++i) {
      const WorkItem& item = plan_.items[i];
      if (item.tile_rows <= machine_.narrow_rows) continue;
      const bool sibling = before != nullptr && before->request == item.request && before->kv_begin == item.kv_begin &&
                           before->kv_end == item.kv_end;
      add_work_tiles(i, 1, false, sibling);
      before = &item;
    }
    cta_work_tiles_ = list_.size();
    int64_t shortest = INT32_MAX, longest = 0, narrow_items = 0;
    for (int32_t i = 0; i < count; ++i) {
      if (plan_.items[i].tile_rows > machine_.narrow_rows) continue;
      const int64_t tokens = item_tokens(plan_.items[i]);
      shortest = std::min(shortest, tokens);
      longest = std::max(longest, tokens);
      ++narrow_items;
      add_work_tiles(i, machine_.narrow_parts, true, false);
    }
    const bool alike = longest <= shortest + shortest / 4;
    const WarpLaunch launch{machine_.resident_ctas, static_cast<int64_t>(cta_work_tiles_), plan_.mostly_narrow,
                            machine_.warps};
    active_warps_ = active_warps(narrow_items * shape_.kv_heads * machine_.narrow_parts, alike ? longest : 0, launch);
  }

  void count_partials() {
    partials_.assign(plan_.num_queries, 1);
    for (size_t i = 0; i < plan_.combine_query.size(); ++i) {
      partials_[plan_.combine_query[i]] = plan_.combine_offset[i + 1] - plan_.combine_offset[i];
    }
    parts_ = machine_.narrow_parts;
    arrived_.assign(static_cast<size_t>(plan_.num_queries) * shape_.kv_heads * parts_, 0);
  }

  void begin() {
    now_ = machine_.begin;
    const int32_t active = plan_.mostly_narrow ? machine_.few_ctas : machine_.resident_ctas;
    const auto taken = static_cast<int32_t>(std::min<size_t>(cta_work_tiles_, active));
    next_cta_ = 0;
    next_narrow_ = static_cast<int32_t>(cta_work_tiles_);
    for (int32_t i = 0; i < taken; ++i) start(next_cta_++);
    for (int32_t i = taken; i < machine_.resident_ctas; ++i) give_to_warps();
  }

  void start(int32_t work_tile) {
    const bool narrow = is_narrow(work_tile);
    if (!narrow) ++running_ctas_, set_rates();
    const double delay = narrow ? machine_.warp_start : machine_.cta_start;
    const double workers =
        machine_.resident_ctas * (narrow ? machine_.warps : std::max(1.0, machine_.lone_speedup / 2));
    const WorkTile& started = list_[work_tile];
    const double reading =
        static_cast<double>(item_tokens(plan_.items[started.item])) * multiply_[started.stream_class];
    work_ += (delay + reading + end_seconds(work_tile, 1.0)) / workers;
    events_.push({now_ + delay, Kind::kStream, work_tile});
  }

  void give_to_warps() {
    if (next_narrow_ == static_cast<int32_t>(list_.size())) {
      idle_warps_ = std::min(idle_warps_, now_ + machine_.warp_begin);
      return;
    }
    for (int32_t i = 0; i < active_warps_; ++i) events_.push({now_ + machine_.warp_begin, Kind::kFree, next_narrow_});
  }

  void handle(const Event& event) {
    switch (event.kind) {
      case Kind::kStream:
        begin_stream(list_[event.work_tile].stream_class, list_[event.work_tile].bytes, event.work_tile);
        break;
      case Kind::kArrive:
        events_.push({now_ + combine_seconds(event.work_tile), Kind::kFree, event.work_tile});
        break;
      case Kind::kFree:
        if (is_narrow(event.work_tile)) {
          take_narrow();
          break;
        }
        --running_ctas_;
        set_rates();
        if (next_cta_ < static_cast<int32_t>(cta_work_tiles_)) {
          start(next_cta_++);
        } else {
          give_to_warps();
        }
        break;
    }
  }

  void take_narrow() {
    if (next_narrow_ < static_cast<int32_t>(list_.size())) {
      start(next_narrow_++);
    } else {
      idle_warps_ = std::min(idle_warps_, now_);
    }
  }

  void find_deferred() {
    deferred_.assign(plan_.num_queries, false);
    const int64_t warps = machine_.narrow_rows > 0 ? int64_t{machine_.resident_ctas} * machine_.warps : 0;
    const std::vector<bool> combines =
        deferred_combines(plan_, {shape_.q_heads, shape_.group(), machine_.narrow_rows, warps});
    for (size_t i = 0; i < combines.size(); ++i) deferred_[plan_.combine_query[i]] = combines[i];
  }

  // Warps that have no tile left combine the deferred rows in the order in which they are complete.
  double combine_deferred(double last) const {
    double next = std::min(idle_warps_, last);
    for (const Deferred& rows : deferred_rows_) {
      const double bytes = static_cast<double>(rows.rows) * rows.partials * shape_.head_dim * kPartialBytes;
      next = std::max(next, rows.ready) + bytes / machine_.bandwidth;
      const int32_t turns = (rows.partials + kDeferredWidth - 1) / kDeferredWidth;
      last = std::max(last, next + machine_.deferred_combine + turns * machine_.deferred_combine_step);
    }
    return last;
  }

  // Counts the work tile's partials; the combines of queries that are complete with it.
  double combine_seconds(int32_t index) {
    const WorkTile& work_tile = list_[index];
    const WorkItem& item = plan_.items[work_tile.item];
    if (item.partial_begin == kWriteThrough) return 0;
    const bool narrow = is_narrow(index);
    int32_t rows = 0, most = 0;
    for (int32_t query = item.query_begin; query < item.query_begin + item.query_count; ++query) {
      const int32_t first = narrow ? work_tile.part : 0, last = narrow ? work_tile.part + 1 : parts_;
      for (int32_t part = first; part < last; ++part) {
        int32_t& arrived = arrived_[(static_cast<size_t>(query) * shape_.kv_heads + work_tile.head) * parts_ + part];
        if (++arrived < partials_[query]) continue;
        if (deferred_[query]) {
          deferred_rows_.push_back({now_, shape_.group() / parts_, partials_[query]});
          continue;
        }
        rows += shape_.group() / parts_;
        most = std::max(most, partials_[query]);
      }
    }
    if (rows == 0) return 0;
    const int32_t at_once = narrow ? kWarpCombineRows : kCombineRows;
    const CombineLevels levels = combine_levels(most, kCombineFanIn, narrow ? kWarpCombineWidth : kCombineWidth);
    const int32_t steps = (rows + at_once - 1) / at_once * levels.count * levels.steps;
    return narrow ? levels.count * machine_.warp_combine + steps * machine_.warp_combine_step
                  : levels.count * machine_.cta_combine + steps * machine_.cta_combine_step;
  }

  void begin_stream(int32_t index, double bytes, int32_t work_tile) {
    StreamClass& kind = classes_[index];
    kind.active.emplace(kind.served + bytes, work_tile);
    share_bandwidth();
  }

  static double left(const StreamClass& kind) { return std::max(0.0, kind.active.top().first - kind.served); }

  int32_t next_stream() const {
    int32_t found = -1;
    double soonest = 0;
    for (int32_t i = 0; i < kClasses; ++i) {
      if (classes_[i].active.empty()) continue;
      const double seconds = left(classes_[i]) / classes_[i].rate;
      if (found < 0 || seconds < soonest) found = i, soonest = seconds;
    }
    return found;
  }

  void advance(double time) {
    const double seconds = time - now_;
    for (StreamClass& kind : classes_) {
      if (!kind.active.empty()) kind.served += kind.rate * seconds;
    }
    now_ = time;
  }

  // The same share for every work tile, but none more than it can take.
  void share_bandwidth() {
    std::array<StreamClass*, kClasses> by_most;
    int32_t count = 0;
    int64_t work_tiles = 0;
    for (StreamClass& kind : classes_) {
      if (kind.active.empty()) continue;
      work_tiles += static_cast<int64_t>(kind.active.size());
      int32_t place = count++;
      for (; place > 0 && by_most[place - 1]->most > kind.most; --place) by_most[place] = by_most[place - 1];
      by_most[place] = &kind;
    }
    double bandwidth = machine_.bandwidth;
    for (int32_t i = 0; i < count; ++i) {
      StreamClass& kind = *by_most[i];
      kind.rate = std::min(kind.most, bandwidth / static_cast<double>(work_tiles));
      const auto active = static_cast<int64_t>(kind.active.size());
      bandwidth -= kind.rate * static_cast<double>(active);
      work_tiles -= active;
    }
  }

  const Plan& plan_;
  const int64_t* seq_lens_;
  const ModelShape& shape_;
  const Machine& machine_;
  double position_bytes_;
  std::array<double, kStores> multiply_{};  // seconds of a position by class: of its products, or of a warp
  std::array<StreamClass, kClasses> classes_;
  std::vector<WorkTile> list_;  // those for CTAs, then those for warps
  size_t cta_work_tiles_ = 0;
  int32_t active_warps_ = 0, parts_ = 1, running_ctas_ = 0, next_cta_ = 0, next_narrow_ = 0;
  std::vector<int32_t> partials_, arrived_;
  std::vector<bool> deferred_;
  std::vector<Deferred> deferred_rows_;
  double idle_warps_ = std::numeric_limits<double>::infinity();  // since when warps have no tile left
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  double now_ = 0, streaming_ = 0, longest_ = 0, work_ = 0;
};

}  // namespace

Makespan simulate_makespan(const Plan& plan, const int64_t* seq_lens, const ModelShape& shape, const Machine& machine) {
  for (int32_t request = 0; request < plan.num_requests; ++request) {
    require(seq_lens[request] >= 1 && seq_lens[request] <= INT32_MAX, "seq_lens must lie in 1 .. 2^31 - 1");
  }
  const int64_t heads_and_parts = int64_t{checked(shape).kv_heads} * machine.narrow_parts;
  const int64_t most = std::max(static_cast<int64_t>(plan.items.size()), int64_t{plan.num_queries});
  require(most * heads_and_parts <= kMostWorkTiles,
          "the plan has up to " + std::to_string(most * heads_and_parts) + " work tiles; expected at most 2^26");
  return Simulation(plan, seq_lens, shape, machine).run();
}

}  // namespace prefixpack
