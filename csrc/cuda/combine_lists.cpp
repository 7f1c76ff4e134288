#include "cuda/combine_lists.h"

#include <algorithm>

#include "plan/combine_shape.h"

namespace prefixpack {

namespace {

// A warp combines one row of a deferred list, and a CTA up to 128 rows of another one.
constexpr int32_t kDeferredFanIn = 4;

bool follows(const WorkItem& item, const WorkItem& before) {
  return item.query_count == before.query_count && item.tile_rows == before.tile_rows &&
         item.kv_begin == before.kv_end && item.partial_begin > before.partial_begin &&
         before.partial_begin != kWriteThrough;
}

// The KV splits of each tile, as indices of items in ascending KV position.
std::vector<std::vector<int32_t>> find_splits(const Plan& plan) {
  std::vector<std::vector<int32_t>> tiles;
  std::vector<int32_t> tile_of(plan.num_queries, -1);  // latest tile that begins with the query
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const WorkItem& item = plan.items[i];
    if (item.partial_begin == kWriteThrough) continue;
    int32_t& tile = tile_of[item.query_begin];
    if (tile < 0 || !follows(item, plan.items[tiles[tile].back()])) {
      tile = static_cast<int32_t>(tiles.size());
      tiles.emplace_back();
    }
    tiles[tile].push_back(static_cast<int32_t>(i));
  }
  return tiles;
}

class Builder {
 public:
  Builder(const Plan& plan, const std::vector<bool>& deferred) : plan_(plan), deferred_(deferred) {
    const size_t num_items = plan.items.size();
    std::vector<int32_t> combine_of(plan.num_queries, 0);
    for (size_t combine = 0; combine < plan.combine_query.size(); ++combine) {
      combine_of[plan.combine_query[combine]] = static_cast<int32_t>(combine);
    }
    lists_.list.resize(num_items);
    for (size_t i = 0; i < num_items; ++i) lists_.list[i] = combine_of[plan.items[i].query_begin];
    lists_.parent.assign(num_items, -1);
    lists_.group_partial.assign(num_items, kWriteThrough);
    absorbed_.assign(plan.num_partials, false);
  }

  void add_groups(int32_t fan_in) {
    for (const std::vector<int32_t>& splits : find_splits(plan_)) {
      const auto count = static_cast<int32_t>(splits.size());
      if (count <= (all_deferred(splits[0]) ? kDeferredFanIn : 1) * fan_in) continue;
      const int32_t size = combine_group_size(count);
      for (int32_t begin = 0; begin + 1 < count; begin += size) {
        add_group(splits.data() + begin, std::min(size, count - begin));
      }
    }
  }

  CombineLists finish() {
    if (group_end_.empty() && std::find(deferred_.begin(), deferred_.end(), true) == deferred_.end()) {
      return std::move(lists_);
    }
    lists_.offset.push_back(0);
    for (size_t combine = 0; combine < plan_.combine_query.size(); ++combine) {
      for (int32_t i = plan_.combine_offset[combine]; i < plan_.combine_offset[combine + 1]; ++i) {
        if (!absorbed_[plan_.combine_partial[i]]) lists_.partial.push_back(plan_.combine_partial[i]);
      }
      if (deferred_[combine]) lists_.partial.push_back(lists_.partial.back());
      lists_.offset.push_back(static_cast<int32_t>(lists_.partial.size()));
    }
    const auto shift = static_cast<int32_t>(lists_.partial.size());
    for (int32_t end : group_end_) lists_.offset.push_back(shift + end);
    lists_.partial.insert(lists_.partial.end(), group_partials_.begin(), group_partials_.end());
    return std::move(lists_);
  }

 private:
  bool all_deferred(int32_t item) const {
    const int32_t first = lists_.list[item], count = plan_.items[item].query_count;
    for (int32_t combine = first; combine < first + count; ++combine) {
      if (!deferred_[combine]) return false;
    }
    return true;
  }

  void add_group(const int32_t* splits, int32_t size) {
    const WorkItem& first = plan_.items[splits[0]];
    const auto list = static_cast<int32_t>(plan_.combine_query.size() + group_end_.size());
    for (int32_t query = 0; query < first.query_count; ++query) {
      for (int32_t i = 0; i < size; ++i) group_partials_.push_back(plan_.items[splits[i]].partial_begin + query);
      group_end_.push_back(static_cast<int32_t>(group_partials_.size()));
    }
    for (int32_t i = 0; i < size; ++i) {
      const int32_t item = splits[i], partial = plan_.items[item].partial_begin;
      lists_.parent[item] = lists_.list[item];
      lists_.list[item] = list;
      lists_.group_partial[item] = first.partial_begin;
      if (i > 0) std::fill_n(absorbed_.begin() + partial, first.query_count, true);
    }
  }

  const Plan& plan_;
  const std::vector<bool>& deferred_;
  CombineLists lists_;
  std::vector<bool> absorbed_;  // [num_partials] partials that the first partial of their group stands for
  std::vector<int32_t> group_end_, group_partials_;
};

}  // namespace

CombineLists make_combine_lists(const Plan& plan, int32_t fan_in, const std::vector<bool>& deferred) {
  Builder builder(plan, deferred);
  int32_t longest = 0;
  for (size_t combine = 0; combine < plan.combine_query.size(); ++combine) {
    longest = std::max(longest, plan.combine_offset[combine + 1] - plan.combine_offset[combine]);
  }
  if (longest > fan_in) builder.add_groups(fan_in);
  return builder.finish();
}

}  // namespace prefixpack
