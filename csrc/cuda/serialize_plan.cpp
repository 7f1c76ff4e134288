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

// The words of a plan: header, items, columns, records of deferred combines.
class PlanWords {
 public:
  PlanWords(const Plan& plan, const CombineLists& lists)
      : plan_(plan), lists_(lists), words_(kPlanHeaderWords + plan.items.size() * kPlanItemWords) {
    header_.num_items = static_cast<int32_t>(plan.items.size());
    header_.num_queries = plan.num_queries;
    header_.num_combines = static_cast<int32_t>(plan.combine_query.size());
    header_.mostly_narrow = plan.mostly_narrow;
    header_.items_at = kPlanHeaderWords;
    header_.item_kv_slots_at = static_cast<int32_t>(kPlanHeaderWords + plan.items.size() * kWordsPerItem);
  }

  PlanHeader& header() { return header_; }

  // Items added so far.
  int32_t num_added() const { return added_; }

  // Combine lists of the plan.
  int32_t num_lists() const {
    return lists_.offset.empty() ? header_.num_combines : static_cast<int32_t>(lists_.offset.size()) - 1;
  }

  // The next item. kv_slots_at: where its KV slots begin.
  void add_item(size_t index, int64_t kv_slots_at) {
    const size_t num_items = plan_.items.size();
    std::memcpy(words_.data() + header_.items_at + added_ * kWordsPerItem, &plan_.items[index], sizeof(WorkItem));
    int32_t* const more = words_.data() + header_.item_kv_slots_at + added_;
    more[0] = static_cast<int32_t>(kv_slots_at);
    more[num_items] = lists_.list[index];
    more[2 * num_items] = lists_.parent[index];
    more[3 * num_items] = lists_.group_partial[index];
    ++added_;
  }

  // Queries and lists of partials, behind all items.
  void add_columns() {
    header_.query_token_at = append(plan_.query_token);
    header_.query_request_at = append(plan_.query_request);
    header_.query_back_at = append(plan_.query_back);
    header_.combine_query_at = append(plan_.combine_query);
    header_.combine_offset_at = append(plan_.combine_offset);
    header_.combine_partial_at = append(plan_.combine_partial);
    const bool grouped = !lists_.offset.empty();
    header_.list_offset_at = grouped ? append(lists_.offset) : header_.combine_offset_at;
    header_.list_partial_at = grouped ? append(lists_.partial) : header_.combine_partial_at;
  }

  // Records of the deferred combines, behind the columns. q_heads: query heads, rows of a combine.
  void add_deferred(const std::vector<bool>& deferred, int32_t q_heads) {
    deferred_.count = static_cast<int32_t>(std::count(deferred.begin(), deferred.end(), true));
    deferred_.part_bits = deferred_part_bits(int64_t{deferred_.count} * q_heads);
    if (deferred_.count > 0) {
      words_.resize((words_.size() + kDeferredStride - 1) / kDeferredStride * kDeferredStride);
    }
    deferred_.at = static_cast<int32_t>(words_.size());
    for (size_t combine = 0; combine < deferred.size(); ++combine) {
      if (!deferred[combine]) continue;
      const int32_t first = lists_.offset[combine], count = lists_.offset[combine + 1] - first - 1;
      const int32_t token = plan_.query_token[plan_.combine_query[combine]];
      const DeferredRecord record{static_cast<int32_t>(combine), header_.list_partial_at + first, count, token};
      words_.resize(words_.size() + kDeferredStride, -1);
      int32_t* const place = words_.data() + words_.size() - kDeferredStride;
      std::memcpy(place, &record, sizeof(record));
      std::copy_n(lists_.partial.data() + first, std::min(count, kInlinePartials), place + kDeferredWords);
    }
  }

  std::vector<int32_t> finish() {
    words_.resize(words_.size() + kPlanPaddingWords);
    std::memcpy(words_.data(), &header_, sizeof(header_));
    std::memcpy(words_.data() + sizeof(header_) / sizeof(int32_t), &deferred_, sizeof(deferred_));
    return std::move(words_);
  }

 private:
  int32_t append(const std::vector<int32_t>& column) {
    const auto at = static_cast<int32_t>(words_.size());
    words_.insert(words_.end(), column.begin(), column.end());
    return at;
  }

  const Plan& plan_;
  const CombineLists& lists_;
  PlanHeader header_{};
  DeferredHeader deferred_{};
  std::vector<int32_t> words_;
  int32_t added_ = 0;
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
  const std::vector<bool> deferred =
      deferred_combines(plan, {kv_heads * group, group, narrow, int64_t{warp_ctas} * cta_warps});
  const CombineLists lists = make_combine_lists(plan, fan_in, deferred);
  PlanWords words(plan, lists);
  PlanHeader& header = words.header();
  KvSlotLists kv_slots(plan, seq_lens, growth);
  const auto add_item = [&](size_t index) {
    words.add_item(index, kv_slots.place(plan.items[index]));
    if (kv_slots.size() > INT32_MAX) {
      throw std::overflow_error("a plan of more than 2^31 - 1 KV slots (" + std::to_string(plan.items.size()) +
                                " items)");
    }
  };
  for (size_t i = 0; i < plan.items.size(); ++i) {
    if (plan.items[i].tile_rows > narrow) add_item(i);
  }
  header.num_cta_items = words.num_added();
  int64_t shortest = INT32_MAX, longest = 0;
  for (size_t i = 0; i < plan.items.size(); ++i) {
    if (plan.items[i].tile_rows > narrow) continue;
    add_item(i);
    shortest = std::min(shortest, kv_slots.count(plan.items[i]));
    longest = std::max(longest, kv_slots.count(plan.items[i]));
  }
  const int64_t warp_items = words.num_added() - header.num_cta_items;
  const bool alike = longest <= shortest + shortest / 4;
  const WarpLaunch launch{warp_ctas, int64_t{header.num_cta_items} * kv_heads, plan.mostly_narrow, cta_warps};
  header.active_warps = active_warps(warp_items * kv_heads * head_halves(group), alike ? longest : 0, launch);
  words.add_columns();
  words.add_deferred(deferred, kv_heads * group);
  return {words.finish(), words.num_lists(), kv_slots.size()};
}

}  // namespace prefixpack
