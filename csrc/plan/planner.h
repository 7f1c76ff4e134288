// Forest -> plan, and the reuse of a plan over decode or verify steps.
#pragma once

#include <memory>
#include <vector>

#include "plan/cost_model.h"
#include "plan/forest.h"
#include "plan/packing.h"
#include "plan/plan.h"
#include "plan/schedule.h"

namespace prefixpack {

struct KvTokens {
  int64_t packed = 0, per_request = 0, unique = 0;
};

class Planner {
 public:
  // max_growth: tokens a tail may grow at most before its batch is planned anew.
  // Throws std::invalid_argument on shapes or device figures out of range.
  Planner(const ModelShape& shape, const DeviceModel& device, int32_t max_growth);

  // query_lens nullptr: one token a request. Returns the last plan while the forest is the same object, every
  // request brings as many tokens as then and no tail has grown beyond what keeps the workers balanced (PAT's lazy
  // update).
  // Throws std::invalid_argument on lengths that do not fit the forest.
  std::shared_ptr<const Plan> plan(const std::shared_ptr<const Forest>& forest, const int64_t* seq_lens,
                                   const int64_t* query_lens);

  int64_t plans_made() const { return plans_made_; }
  int64_t plans_reused() const { return plans_reused_; }
  double plan_seconds() const { return plan_seconds_; }
  // KV positions of the batch last planned or reused, at its current lengths.
  KvTokens kv_tokens() const { return kv_tokens_; }

 private:
  bool reusable(const std::shared_ptr<const Forest>& forest, const int64_t* seq_lens, const int64_t* query_lens);

  // Of steps with costs of their own, see CostModel.
  struct Costs {
    Costs(const ModelShape& shape, const DeviceModel& device, bool uniform_rows)
        : cost(shape, device, uniform_rows), packer(cost), scheduler(cost) {}
    CostModel cost;
    ForestPacker packer;
    Scheduler scheduler;
  };

  Costs ragged_, uniform_;
  int32_t max_growth_;
  std::shared_ptr<const Forest> forest_;
  std::shared_ptr<const Plan> plan_;
  std::vector<int64_t> planned_lens_;
  std::vector<int64_t> planned_query_lens_;  // empty: one new token each
  std::vector<int32_t> tail_reads_;          // by request: items that grow with its tail
  int32_t growth_limit_ = -1;
  int64_t plans_made_ = 0, plans_reused_ = 0;
  double plan_seconds_ = 0;
  KvTokens kv_tokens_;
};

// Throws std::invalid_argument, naming the request, unless the lengths fit the forest.
void check_lens(const Forest& forest, const BatchLens& lens);

}  // namespace prefixpack
