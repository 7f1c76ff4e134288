#include "cpu/executor.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/task.h"
#include "cpu/thread_pool.h"

namespace prefixpack {
namespace {

// Below this many multiply-adds a call is done before a second thread has woken up.
constexpr int64_t kInlineWork = 1 << 18;

std::vector<const Kernels*> find_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd")) {
    found.push_back(&kAvx512Kernels);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    found.push_back(&kAvx2Kernels);
  }
#endif
  found.push_back(&kBaselineKernels);
  return found;
}

const std::vector<const Kernels*>& all_kernels() {
  static const std::vector<const Kernels*> kernels = find_kernels();
  return kernels;
}

const Kernels& kernels_for(const char* isa) {
  if (*isa == '\0') return *all_kernels().front();
  std::string known;
  for (const Kernels* kernels : all_kernels()) {
    if (std::strcmp(kernels->isa, isa) == 0) return *kernels;
    known += std::string(known.empty() ? "" : ", ") + kernels->isa;
  }
  throw std::invalid_argument("isa '" + std::string(isa) + "' is not available here; expected one of " + known);
}

struct Range {
  int32_t begin;
  int32_t end;
};

// The KV positions of an item that any of its queries sees: what hides behind the window or the causal mask for all of
// them is not read.
Range visible_range(const AttentionParams& params, const int32_t* positions, const WorkItem& item) {
  const int32_t* begin = positions + item.query_begin;
  const int32_t* end = begin + item.query_count;
  const int32_t last = *std::max_element(begin, end);
  const int32_t stop = item.kv_end == kOpenEnd ? end[-1] + 1 : item.kv_end;
  Range range{item.kv_begin, std::min(stop, last + 1)};
  if (params.window_left >= 0) {
    const int32_t first = *std::min_element(begin, end) - params.window_left;
    range.begin = std::max(range.begin, first);
  }
  range.end = std::max(range.begin, range.end);
  return range;
}

// What the threads of one call share; kept by the calling thread, so that a step allocates nothing.
struct Prepared {
  std::vector<int32_t> positions;  // by query
  std::vector<Range> ranges;       // by item
  int64_t work;                    // multiply-adds

  void prepare(const Plan& plan, const AttentionParams& params) {
    positions.resize(plan.num_queries);
    for (int32_t query = 0; query < plan.num_queries; ++query) {
      positions[query] = static_cast<int32_t>(params.seq_lens[plan.query_request[query]] - 1 - plan.query_back[query]);
    }
    ranges.resize(plan.items.size());
    work = 0;
    for (size_t i = 0; i < plan.items.size(); ++i) {
      ranges[i] = visible_range(params, positions.data(), plan.items[i]);
      work += static_cast<int64_t>(ranges[i].end - ranges[i].begin) * plan.items[i].query_count;
    }
    work *= 2 * static_cast<int64_t>(params.q_heads) * params.head_dim;
  }
};

thread_local Prepared prepared_of_caller;
thread_local Scratch scratch_of_thread;

void require(bool holds, const char* what, int64_t index, const char* value_name, int64_t value, int64_t limit) {
  if (holds) return;
  throw std::invalid_argument(std::string(what) + " " + std::to_string(index) + ": " + value_name + " is " +
                              std::to_string(value) + ", but must be at least 0 and below " + std::to_string(limit));
}

bool inside(int64_t value, int64_t limit) { return value >= 0 && value < limit; }

}  // namespace

const char* const* supported_isas() {
  static const std::vector<const char*> names = [] {
    std::vector<const char*> found;
    for (const Kernels* kernels : all_kernels()) found.push_back(kernels->isa);
    found.push_back(nullptr);
    return found;
  }();
  return names.data();
}

void check_inputs(const Plan& plan, const AttentionParams& params, const TensorSizes& sizes) {
  if (plan.num_requests > sizes.num_requests) {
    throw std::invalid_argument("the plan is for " + std::to_string(plan.num_requests) +
                                " requests, but seq_lens has " + std::to_string(sizes.num_requests) + " entries");
  }
  for (int32_t request = 0; request < plan.num_requests; ++request) {
    require(inside(params.req_pool_indices[request], sizes.max_requests), "request", request, "req_pool_indices",
            params.req_pool_indices[request], sizes.max_requests);
    require(inside(params.seq_lens[request], sizes.max_context + 1), "request", request, "seq_lens",
            params.seq_lens[request], sizes.max_context + 1);
  }
  for (int32_t query = 0; query < plan.num_queries; ++query) {
    require(inside(plan.query_token[query], sizes.num_tokens), "query", query, "row of q", plan.query_token[query],
            sizes.num_tokens);
    const int64_t request = plan.query_request[query];
    const int64_t position = params.seq_lens[request] - 1 - plan.query_back[query];
    require(position >= 0, "query", query, "position", position, params.seq_lens[request]);
  }
  Prepared& prepared = prepared_of_caller;
  prepared.prepare(plan, params);
  for (size_t i = 0; i < plan.items.size(); ++i) {
    const int32_t request = plan.items[i].request;
    const Range range = prepared.ranges[i];
    if (range.begin == range.end) continue;
    require(inside(range.begin, sizes.max_context), "item", i, "first KV position", range.begin, sizes.max_context);
    require(range.end <= sizes.max_context, "item", i, "last KV position", range.end - 1, sizes.max_context);
    const int32_t* slots = params.req_to_token + params.req_pool_indices[request] * params.req_to_token_stride;
    uint32_t largest = 0;  // unsigned, so that a negative slot is seen as too large
    for (int32_t position = range.begin; position < range.end; ++position) {
      largest = std::max(largest, static_cast<uint32_t>(slots[position]));
    }
    if (largest < sizes.num_slots) continue;
    for (int32_t position = range.begin; position < range.end; ++position) {
      if (inside(slots[position], sizes.num_slots)) continue;
      throw std::invalid_argument("request " + std::to_string(request) + ": req_to_token names KV slot " +
                                  std::to_string(slots[position]) + " for position " + std::to_string(position) +
                                  ", but the KV cache has " + std::to_string(sizes.num_slots) + " slots");
    }
  }
}

void run_plan_cpu(const Plan& plan, const AttentionParams& params, int threads, const char* isa) {
  const Kernels& kernels = kernels_for(isa);
  Prepared& prepared = prepared_of_caller;
  prepared.prepare(plan, params);
  if (prepared.work < kInlineWork) threads = 1;
  ThreadPool& pool = ThreadPool::instance();
  const int64_t step = 1;
  const int64_t heads = (params.kv_heads + step - 1) / step;
  pool.run(static_cast<int64_t>(plan.items.size()) * heads, threads, [&](int64_t index) {
    const WorkItem& item = plan.items[index / heads];
    const Range range = prepared.ranges[index / heads];
    ItemTask task;
    task.plan = &plan;
    task.params = &params;
    task.item = &item;
    task.positions = prepared.positions.data();
    task.slots = params.req_to_token + params.req_pool_indices[item.request] * params.req_to_token_stride;
    task.kv_head = static_cast<int32_t>(index % heads * step);
    task.kv_heads = std::min<int32_t>(step, params.kv_heads - task.kv_head);
    task.kv_begin = range.begin;
    task.kv_end = range.end;
    kernels.run_item(task, scratch_of_thread);
  });
  pool.run(static_cast<int64_t>(plan.merge_query.size()), threads,
           [&](int64_t index) { kernels.merge_query(plan, params, static_cast<int32_t>(index)); });
}

}  // namespace prefixpack
