// Forest -> plan, and the reuse of a plan over decode or verify steps.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "plan/cost_model.h"
#include "plan/forest.h"
#include "plan/packing.h"
#include "plan/plan.h"
#include "plan/schedule.h"

namespace prefixpack {

constexpr size_t kKeptPlans = 8;  // of the batches planned last

struct KvTokens {
  int64_t packed = 0, per_request = 0, unique = 0;
};

class Planner {
 public:
  // max_growth: tokens a tail may grow at most before its batch is planned anew.
  // Throws std::invalid_argument on shapes or device figures out of range.
  Planner(const ModelShape& shape, const DeviceModel& device, int32_t max_growth);

  // query_lens nullptr: one token a request. Returns the last plan of the forest, the same object, while every request
  // brings as many tokens as then and no tail has grown beyond what keeps the workers balanced (PAT's lazy update).
  // Plans of the forests that were planned last are kept: microbatches of a pipeline take turns.
  // Throws std::invalid_argument on lengths that do not fit the forest.
  std::shared_ptr<const Plan> plan(const std::shared_ptr<const Forest>& forest, const int64_t* seq_lens,
                                   const int64_t* query_lens);

  int64_t plans_made() const { return plans_made_; }
  int64_t plans_reused() const { return plans_reused_; }
  double plan_seconds() const { return plan_seconds_; }
  // KV positions of the batch last planned or reused, at its current lengths.
  KvTokens kv_tokens() const { return kv_tokens_; }

 private:
  // The last plan of a batch, and what it was made for.
  struct Planned {
    std::shared_ptr<const Forest> forest;
    std::shared_ptr<const Plan> plan;
    std::vector<int64_t> lens;
    std::vector<int64_t> query_lens;  // empty: one new token each
    std::vector<int32_t> tail_reads;  // by request: items that grow with its tail
    int32_t growth_limit = -1;
    int64_t used = -1;  // plans made and reused before its last use
  };

  bool reusable(const Planned& planned, const int64_t* seq_lens, const int64_t* query_lens);

  // Costs of one kind of step, with what plans by them; see CostModel.
  struct Costs {
    Costs(const ModelShape& shape, const DeviceModel& device, bool uniform_rows)
        : cost(shape, device, uniform_rows), packer(cost), scheduler(cost) {}
    CostModel cost;
    ForestPacker packer;
    Scheduler scheduler;
  };

  Costs ragged_, uniform_;
  int32_t max_growth_;
  std::array<Planned, kKeptPlans> planned_;
  int64_t plans_made_ = 0, plans_reused_ = 0;
  double plan_seconds_ = 0;
  KvTokens kv_tokens_;
};

// Throws std::invalid_argument, naming the request, unless the lengths fit the forest.
void check_lens(const Forest& forest, const BatchLens& lens);

}  // namespace prefixpack
