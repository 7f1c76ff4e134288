// Layout of a plan for one call: query positions, KV ranges and work chunks.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/params.h"
#include "plan/plan.h"

namespace prefixpack {

struct KvRange {
  int32_t begin;
  int32_t end;
};

// Unit of scheduling: consecutive KV heads of one item, run one after the other by a thread.
struct WorkChunk {
  int32_t item;
  int32_t first_head;
  int32_t head_count;
};

// Reused by the calling thread, so that a call allocates nothing.
struct Step {
  std::vector<int32_t> positions;  // [num_queries]
  std::vector<KvRange> ranges;     // [num_items] KV positions that any query of the item attends to
  // Compute-bound chunks, then memory-bound ones; each in the order of the plan's items.
  std::vector<WorkChunk> chunks;
  int64_t compute_bound_chunks = 0;
  double multiply_adds = 0;

  void lay_out(const Plan& plan, const AttentionParams& params, int threads);
};

// Uses only seq_lens and window_left of `params`.
void find_ranges(const Plan& plan, const AttentionParams& params, Step& step);

}  // namespace prefixpack
