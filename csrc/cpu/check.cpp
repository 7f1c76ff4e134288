#include <algorithm>
#include <stdexcept>
#include <string>

#include "cpu/executor.h"
#include "cpu/step.h"

namespace prefixpack {
namespace {

void require(bool holds, const char* what, int64_t index, const char* value_name, int64_t value, int64_t limit) {
  if (holds) return;
  throw std::invalid_argument(std::string(what) + " " + std::to_string(index) + ": " + value_name + " is " +
                              std::to_string(value) + ", but must be at least 0 and below " + std::to_string(limit));
}

bool inside(int64_t value, int64_t limit) { return value >= 0 && value < limit; }

// Query heads of a KV head times queries of an item: a thread's scratch buffer has memory for them.
constexpr int64_t kMostItemRows = int64_t{1} << 20;
constexpr int64_t kMostPositions = INT32_MAX;  // of a request

}  // namespace

void check_inputs(const Plan& plan, const AttentionParams& params, const TensorSizes& sizes) {
  const int64_t group = params.q_heads / params.kv_heads, context = std::min(sizes.max_context, kMostPositions);
  if (plan.num_requests > sizes.num_requests) {
    throw std::invalid_argument("the plan is for " + std::to_string(plan.num_requests) +
                                " requests, but seq_lens has " + std::to_string(sizes.num_requests) + " entries");
  }
  for (int32_t request = 0; request < plan.num_requests; ++request) {
    require(inside(params.req_pool_indices[request], sizes.max_requests), "request", request, "req_pool_indices",
            params.req_pool_indices[request], sizes.max_requests);
    require(inside(params.seq_lens[request], context + 1), "request", request, "seq_lens", params.seq_lens[request],
            context + 1);
  }
  for (int32_t query = 0; query < plan.num_queries; ++query) {
    require(inside(plan.query_token[query], sizes.num_tokens), "query", query, "row of q", plan.query_token[query],
            sizes.num_tokens);
    const int64_t request = plan.query_request[query];
    const int64_t position = params.seq_lens[request] - 1 - plan.query_back[query];
    require(position >= 0, "query", query, "position", position, params.seq_lens[request]);
  }
  thread_local Step step;
  find_ranges(plan, params, step);
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const int32_t request = plan.items[i].request;
    require(plan.items[i].query_count * group <= kMostItemRows, "item", i, "number of rows",
            plan.items[i].query_count * group, kMostItemRows + 1);
    const KvRange range = step.ranges[i];
    if (range.begin == range.end) continue;
    require(inside(range.begin, context), "item", i, "first KV position", range.begin, context);
    require(range.end <= context, "item", i, "last KV position", range.end - 1, context);
    const int32_t* slots = params.req_to_token + params.req_pool_indices[request] * params.req_to_token_stride;
    uint32_t largest = 0;  // unsigned, so that a negative slot counts as too large
    for (int32_t position = range.begin; position < range.end; ++position) {
      largest = std::max(largest, static_cast<uint32_t>(slots[position]));
    }
    if (largest < sizes.kv_slots) continue;
    for (int32_t position = range.begin; position < range.end; ++position) {
      if (inside(slots[position], sizes.kv_slots)) continue;
      throw std::invalid_argument("request " + std::to_string(request) + ": req_to_token names KV slot " +
                                  std::to_string(slots[position]) + " for position " + std::to_string(position) +
                                  ", but the KV cache has " + std::to_string(sizes.kv_slots) + " slots");
    }
  }
}

}  // namespace prefixpack
