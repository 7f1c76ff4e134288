// Cuts packs into row tiles and KV splits, orders the queue and lays out the partial slots.
#pragma once

#include "plan/packing.h"
#include "plan/plan.h"

namespace prefixpack {

struct Schedule {
  Plan plan;
  // Tokens by which every open tail may grow before its items unbalance the workers.
  int32_t growth_limit = 0;
};

// Splits follow PersistentKV (only items that have work exist, the queue is taken longest first) and PAT section 6
// (long KV is split); how far is decided by an estimate of the time at which the last worker is done.
Schedule make_schedule(const Forest& forest, const BatchLens& lens, const Packing& packing, const CostModel& cost);

}  // namespace prefixpack
