#include "cpu/step.h"

#include <algorithm>

namespace prefixpack {
namespace {

// Work in query rows times KV positions; loading a position counts as kFetchRows rows. Heads of an item are adjacent in
// memory, so a thread takes several of them, up to kChunkWork to keep the threads balanced.
constexpr int64_t kFetchRows = 8;
constexpr int64_t kChunkWork = 1 << 16;
constexpr int64_t kChunksPerThread = 8;

// KV positions that any query attends to; positions masked for all queries are not read.
KvRange visible_range(const AttentionParams& params, const int32_t* positions, const WorkItem& item) {
  const int32_t* begin = positions + item.query_begin;
  const int32_t* end = begin + item.query_count;
  const int32_t last = *std::max_element(begin, end);
  const int32_t stop = item.kv_end == kOpenEnd ? end[-1] + 1 : item.kv_end;
  KvRange range{item.kv_begin, std::min(stop, last + 1)};
  if (params.window_left >= 0) {
    range.begin = std::max(range.begin, *std::min_element(begin, end) - params.window_left);
  }
  range.end = std::max(range.begin, range.end);
  return range;
}

}  // namespace

void find_ranges(const Plan& plan, const AttentionParams& params, Step& step) {
  step.positions.resize(plan.num_queries);
  for (int32_t query = 0; query < plan.num_queries; ++query) {
    const int64_t length = params.seq_lens[plan.query_request[query]];
    step.positions[query] = static_cast<int32_t>(length - 1 - plan.query_back[query]);
  }
  step.ranges.resize(plan.items.size());
  for (size_t i = 0; i < plan.items.size(); ++i) {
    step.ranges[i] = visible_range(params, step.positions.data(), plan.items[i]);
  }
}

void Step::lay_out(const Plan& plan, const AttentionParams& params, int threads) {
  find_ranges(plan, params, *this);
  const int64_t group = params.q_heads / params.kv_heads;
  const auto work_of_head = [&](size_t i) {
    return (ranges[i].end - ranges[i].begin) * (plan.items[i].query_count * group + kFetchRows);
  };
  int64_t work = 0, row_tokens = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    work += work_of_head(i);
    row_tokens += (ranges[i].end - ranges[i].begin) * (plan.items[i].query_count * group);
  }
  multiply_adds = 2.0 * static_cast<double>(row_tokens) * params.kv_heads * params.head_dim;
  // More work than this makes no larger chunks.
  work = std::min(work, kChunkWork * threads * kChunksPerThread);
  const int64_t chunk_work = std::min(kChunkWork, work * params.kv_heads / (threads * kChunksPerThread));
  chunks.clear();
  const auto add_chunks = [&](bool computing) {
    for (size_t i = 0; i < ranges.size(); ++i) {
      if ((plan.items[i].query_count * group > kFetchRows) != computing) continue;
      const int64_t fitting = chunk_work / std::max<int64_t>(1, work_of_head(i));
      const auto heads = static_cast<int32_t>(std::clamp<int64_t>(fitting, 1, params.kv_heads));
      for (int32_t head = 0; head < params.kv_heads; head += heads) {
        chunks.push_back({static_cast<int32_t>(i), head, std::min(heads, params.kv_heads - head)});
      }
    }
  };
  add_chunks(true);
  compute_bound_chunks = static_cast<int64_t>(chunks.size());
  add_chunks(false);
}

}  // namespace prefixpack
