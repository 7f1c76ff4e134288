#include "cuda/serialize_plan.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cuda/common/index_math.h"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel_params.h"
#include "plan/active_warps.h"
#include "plan/deferral.h"

namespace prefixpack {

namespace {

constexpr size_t kWordsPerItem = sizeof(WorkItem) / sizeof(int32_t);

// Where the KV slots of items begin. Items of one request have one copy where they would take more than the range from
// the first position to the last: the query tiles of a long prefill read nearly the same positions.
class KvSlotLists {
 public:
  KvSlotLists(const Plan& plan, const int64_t* seq_lens, int32_t growth)
      : plan_(plan), seq_lens_(seq_lens), growth_(growth), requests_(plan.num_requests) {
    for (const WorkItem& item : plan.items) {
      Positions& of_request = requests_[item.request];
      of_request.begin = std::min(of_request.begin, item.kv_begin);
      of_request.end = std::max(of_request.end, item.kv_begin + count(item));
      of_request.of_items += count(item);
    }
  }

  // With room for growth.
  int64_t count(const WorkItem& item) const {
    if (item.kv_end != kOpenEnd) return item.kv_end - item.kv_begin;
    const int32_t last = item.query_begin + item.query_count - 1;
    return seq_lens_[plan_.query_request[last]] - plan_.query_back[last] + growth_ - item.kv_begin;
  }
  int64_t place(const WorkItem& item) {
    Positions& of_request = requests_[item.request];
    if (of_request.of_items <= of_request.end - of_request.begin) return take(count(item));
    if (of_request.at < 0) of_request.at = take(of_request.end - of_request.begin);
    return of_request.at + item.kv_begin - of_request.begin;
  }
  int64_t size() const { return size_; }

 private:
  struct Positions {
    int32_t begin = INT32_MAX;
    int64_t end = 0, of_items = 0;
    int64_t at = -1;  // of the copy for all items
  };
  int64_t take(int64_t slots) { return std::exchange(size_, size_ + slots); }

  const Plan& plan_;
  const int64_t* seq_lens_;
  int32_t growth_;
  std::vector<Positions> requests_;
  int64_t size_ = 0;
};

}  // namespace

int64_t most_combine_lists(int64_t queries, int64_t partials) { return queries + partials / 2; }

int64_t most_plan_words(int64_t queries, int64_t items, int64_t partials) {
  // query_token, query_request, query_back; combine_query, combine_offset and combine_partial.
  const int64_t of_plan = 3 * queries + 2 * queries + 1 + partials;
  // CombineLists: offsets, and partials. A group's partials leave one in the lists of the queries. A deferred list has
  // one entry more.
  const int64_t of_lists = most_combine_lists(queries, partials) + 1 + partials + partials / 2 + queries;
  // Records begin at a multiple of their size.
  const int64_t of_deferred = kDeferredStride * (queries + 1);
  return kPlanHeaderWords + kPlanItemWords * items + of_plan + of_lists + of_deferred + kPlanPaddingWords;
}

SerializedPlan serialize_plan(const Plan& plan, const int64_t* seq_lens, int32_t growth, int32_t group,
                              int32_t kv_heads, int32_t warp_ctas, int32_t cta_warps, int32_t fan_in) {
  const int32_t narrow = warp_item_rows(group);
  SerializedPlan result;
  std::vector<int32_t>& words = result.words;
  const size_t num_items = plan.items.size();
  words.resize(kPlanHeaderWords + num_items * kPlanItemWords);
  PlanHeader header{};
  header.num_items = static_cast<int32_t>(num_items);
  header.num_queries = plan.num_queries;
  header.num_combines = static_cast<int32_t>(plan.combine_query.size());
  header.items_at = kPlanHeaderWords;
  header.item_kv_slots_at = static_cast<int32_t>(kPlanHeaderWords + num_items * kWordsPerItem);
  const std::vector<bool> deferred =
      deferred_combines(plan, {kv_heads * group, group, narrow, int64_t{warp_ctas} * cta_warps});
  const CombineLists lists = make_combine_lists(plan, fan_in, deferred);
  const bool grouped = !lists.offset.empty();
  result.combine_lists = grouped ? static_cast<int32_t>(lists.offset.size()) - 1 : header.num_combines;
  KvSlotLists kv_slots(plan, seq_lens, growth);
  size_t place = 0;
  const auto add_item = [&](size_t index) {
    const WorkItem& item = plan.items[index];
    std::memcpy(words.data() + header.items_at + place * kWordsPerItem, &item, sizeof(WorkItem));
    int32_t* const more = words.data() + header.item_kv_slots_at + place;
    more[0] = static_cast<int32_t>(kv_slots.place(item));
    more[num_items] = lists.list[index];
    more[2 * num_items] = lists.parent[index];
    more[3 * num_items] = lists.group_partial[index];
    ++place;
    if (kv_slots.size() > INT32_MAX) {
      throw std::overflow_error("a plan of more than 2^31 - 1 KV slots (" + std::to_string(num_items) + " items)");
    }
  };
  for (size_t i = 0; i < num_items; ++i) {
    if (plan.items[i].tile_rows > narrow) add_item(i);
  }
  header.num_cta_items = static_cast<int32_t>(place);
  header.mostly_narrow = plan.mostly_narrow;
  int64_t shortest = INT32_MAX, longest = 0, items = 0;
  for (size_t i = 0; i < num_items; ++i) {
    if (plan.items[i].tile_rows > narrow) continue;
    add_item(i);
    shortest = std::min(shortest, kv_slots.count(plan.items[i]));
    longest = std::max(longest, kv_slots.count(plan.items[i]));
    ++items;
  }
  result.kv_slots = kv_slots.size();
  const bool alike = longest <= shortest + shortest / 4;
  const WarpLaunch launch{warp_ctas, int64_t{header.num_cta_items} * kv_heads, plan.mostly_narrow, cta_warps};
  header.active_warps = active_warps(items * kv_heads * head_halves(group), alike ? longest : 0, launch);
  const auto append = [&](const std::vector<int32_t>& column) {
    const auto at = static_cast<int32_t>(words.size());
    words.insert(words.end(), column.begin(), column.end());
    return at;
  };
  header.query_token_at = append(plan.query_token);
  header.query_request_at = append(plan.query_request);
  header.query_back_at = append(plan.query_back);
  header.combine_query_at = append(plan.combine_query);
  header.combine_offset_at = append(plan.combine_offset);
  header.combine_partial_at = append(plan.combine_partial);
  header.list_offset_at = grouped ? append(lists.offset) : header.combine_offset_at;
  header.list_partial_at = grouped ? append(lists.partial) : header.combine_partial_at;
  DeferredHeader deferred_header{};
  deferred_header.count = static_cast<int32_t>(std::count(deferred.begin(), deferred.end(), true));
  deferred_header.part_bits = deferred_part_bits(int64_t{deferred_header.count} * kv_heads * group);
  if (deferred_header.count > 0) {
    words.resize((words.size() + kDeferredStride - 1) / kDeferredStride * kDeferredStride);
  }
  deferred_header.at = static_cast<int32_t>(words.size());
  for (size_t combine = 0; combine < deferred.size(); ++combine) {
    if (!deferred[combine]) continue;
    const int32_t first = lists.offset[combine], count = lists.offset[combine + 1] - first - 1;
    const int32_t token = plan.query_token[plan.combine_query[combine]];
    const DeferredRecord record{static_cast<int32_t>(combine), header.list_partial_at + first, count, token};
    words.resize(words.size() + kDeferredStride, -1);
    int32_t* const place = words.data() + words.size() - kDeferredStride;
    std::memcpy(place, &record, sizeof(record));
    std::copy_n(lists.partial.data() + first, std::min(count, kInlinePartials), place + kDeferredWords);
  }
  words.resize(words.size() + kPlanPaddingWords);
  std::memcpy(words.data(), &header, sizeof(header));
  std::memcpy(words.data() + sizeof(header) / sizeof(int32_t), &deferred_header, sizeof(deferred_header));
  return result;
}

}  // namespace prefixpack
