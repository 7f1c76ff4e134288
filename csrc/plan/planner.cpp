#include "plan/planner.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "plan/checks.h"

namespace prefixpack {

namespace {

// Levels of a forest: the packing recurses once per level, and partials grow with the square of the depth.
constexpr int32_t kMaxDepth = 4096;

}  // namespace

void check_lens(const Forest& forest, const BatchLens& lens) {
  int64_t num_queries = 0;
  for (int32_t request = 0; request < forest.num_requests; ++request) {
    const int64_t seq_len = lens.seq_lens[request];
    const int64_t query_len = lens.query_lens == nullptr ? 1 : lens.query_lens[request];
    const auto fail = [&](const std::string& message) {
      throw std::invalid_argument("request " + std::to_string(request) + ": " + message);
    };
    if (query_len < 1) fail("query length " + std::to_string(query_len) + " is not positive");
    if (seq_len > INT32_MAX) fail("sequence length " + std::to_string(seq_len) + " exceeds 2^31 - 1");
    if (seq_len < query_len || seq_len - query_len < forest.tail_begin[request]) {
      fail("sequence length " + std::to_string(seq_len) + " is shorter than its shared prefix (" +
           std::to_string(forest.tail_begin[request]) + ") and its " + std::to_string(query_len) + " new tokens");
    }
    num_queries += query_len;
    if (num_queries > kMostNewTokens) fail("with it the step has more than 2^24 new tokens");
  }
}

Planner::Planner(const ModelShape& shape, const DeviceModel& device, int32_t max_growth)
    : ragged_(checked(shape), checked(device), false), uniform_(shape, device, true), max_growth_(max_growth) {
  require(max_growth >= 0, "max_growth " + std::to_string(max_growth) + " is negative");
}

bool Planner::reusable(const Planned& planned, const int64_t* seq_lens, const int64_t* query_lens) {
  if ((query_lens == nullptr) != planned.query_lens.empty()) return false;
  if (query_lens != nullptr && !std::equal(planned.query_lens.begin(), planned.query_lens.end(), query_lens)) {
    return false;
  }
  int64_t grown = 0, grown_reads = 0;
  for (size_t request = 0; request < planned.lens.size(); ++request) {
    if (seq_lens[request] < planned.lens[request]) return false;
    const int64_t growth = seq_lens[request] - planned.lens[request];
    if (growth > planned.growth_limit) return false;
    grown += growth;
    grown_reads += growth * planned.tail_reads[request];
  }
  const Plan& plan = *planned.plan;
  kv_tokens_ = {plan.kv_tokens_packed + grown_reads, plan.kv_tokens_per_request + grown_reads,
                plan.kv_tokens_unique + grown};
  return true;
}

std::shared_ptr<const Plan> Planner::plan(const std::shared_ptr<const Forest>& forest, const int64_t* seq_lens,
                                          const int64_t* query_lens) {
  Planned* planned = &planned_[0];
  for (Planned& kept : planned_) {
    if (kept.forest == forest) {
      planned = &kept;
      break;
    }
    if (kept.used < planned->used) planned = &kept;
  }
  const bool same_forest = planned->forest == forest;
  planned->used = plans_made_ + plans_reused_;
  if (same_forest && reusable(*planned, seq_lens, query_lens)) {
    ++plans_reused_;
    return planned->plan;
  }
  const auto start = std::chrono::steady_clock::now();
  const BatchLens lens{seq_lens, query_lens};
  check_lens(*forest, lens);
  require(forest->depth <= kMaxDepth, "the forest is " + std::to_string(forest->depth) +
                                          " nodes deep; the planner supports " + std::to_string(kMaxDepth));
  Costs& costs = lens.uniform_rows(forest->num_requests) ? uniform_ : ragged_;
  Schedule schedule = costs.scheduler.make(*forest, lens, costs.packer.pack(*forest, lens));
  planned->forest.reset();  // without memory for what follows, no plan is reused
  planned->plan = std::make_shared<const Plan>(std::move(schedule.plan));
  const Plan& plan = *planned->plan;
  planned->query_lens.clear();
  if (query_lens != nullptr) planned->query_lens.assign(query_lens, query_lens + forest->num_requests);
  planned->tail_reads.assign(forest->num_requests, 0);
  for (const WorkItem& item : plan.items) planned->tail_reads[item.request] += item.kv_end == kOpenEnd;
  planned->lens.assign(seq_lens, seq_lens + forest->num_requests);
  int64_t longest = 0;
  for (int64_t length : planned->lens) longest = std::max(longest, length);
  const int64_t room = INT32_MAX - longest;  // a length beyond is refused, also where the plan could be reused
  planned->growth_limit = static_cast<int32_t>(std::min<int64_t>({schedule.growth_limit, max_growth_, room}));
  planned->forest = forest;
  kv_tokens_ = {plan.kv_tokens_packed, plan.kv_tokens_per_request, plan.kv_tokens_unique};
  ++plans_made_;
  plan_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return planned->plan;
}

}  // namespace prefixpack
