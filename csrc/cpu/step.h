// A plan laid out for one call: where each query stands now, what each item reads now, and how the work is handed out.
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

// What a thread draws from the queue: neighbouring KV heads of one item, run one after the other.
struct Ticket {
  int32_t item;
  int32_t first_head;
  int32_t head_count;
};

// Kept by the calling thread and reused, so that a call allocates nothing.
struct Step {
  std::vector<int32_t> positions;  // by query
  std::vector<KvRange> ranges;     // by item: the KV positions that any of its queries sees
  // Those that keep a thread computing, then those that keep it waiting for memory; both in the order of the plan's
  // items.
  std::vector<Ticket> tickets;
  int64_t computing_tickets = 0;
  int64_t multiply_adds = 0;

  void lay_out(const Plan& plan, const AttentionParams& params, int threads);
};

// Uses nothing but seq_lens and window_left of `params`.
void find_ranges(const Plan& plan, const AttentionParams& params, Step& step);

}  // namespace prefixpack
