// Loads that the epilogue of a CTA tile needs, issued while the accumulators are stored in shared memory.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/kernel/cta_state.cuh"
#include "cuda/kernel/store_rows.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// A query has one combine unit, or two if its heads are halved (see head_halves), each with a semaphore of its own.
// Units of a tile's queries are numbered consecutively.
PREFIXPACK_DEVICE int32_t query_of_unit(const KernelParams& params, int32_t unit) {
  return params.heads.halves > 1 ? unit >> 1 : unit;
}

// list: of the item's first query.
PREFIXPACK_DEVICE int32_t* semaphore_of_unit(const KernelParams& params, const CtaState& state, int32_t list,
                                             int32_t unit) {
  const int32_t query = query_of_unit(params, unit), halves = params.heads.halves;
  return semaphore_of(params, list + query, state.kv_head * halves + unit - query * halves);
}

// Loaded values. Nothing here is used yet, because that would wait for it.
struct EpilogueInputs {
  int32_t claimed;  // see NextTile::claim
  int32_t token;    // of the unit that is this thread's number; of the row, if the tile writes the output
  int32_t arrived, list_begin, list_end;  // of the unit, see PartialList

  // Prefetches them to the L2 when the tile begins, where prefetch() finds them: all wait for what it reads.
  static PREFIXPACK_DEVICE void prefetch_to_l2(const KernelParams& params, const CtaState& state) {
    const ItemRecord& item = state.item;
    const PlanReader plan{params.plan, state.header};
    const int32_t thread = ptx::volatile_thread_index();
    const bool combines = item.partial_begin != kWriteThrough;
    const int32_t query = combines ? query_of_unit(params, thread) : params.heads.group.quotient(thread);
    if (query < item.query_count) {
      ptx::prefetch_l2(&plan.words[plan.header.query_token_at + item.query_begin + query]);
      if (combines) {
        ptx::prefetch_l2(&plan.words[plan.header.list_offset_at + item.list + query + 1]);
        ptx::prefetch_l2(semaphore_of_unit(params, state, item.list, thread));
      }
    }
  }

  // Called by all threads. params: in constant or shared memory.
  static PREFIXPACK_DEVICE EpilogueInputs prefetch(const KernelParams& params, const CtaState& state) {
    const ItemRecord& item = state.item;
    const PlanReader plan{params.plan, state.header};
    const int32_t thread = ptx::volatile_thread_index();
    EpilogueInputs inputs{state.next.claim(params), 0, 0, 0, 0};
    const bool combines = item.partial_begin != kWriteThrough;
    const int32_t query = combines ? query_of_unit(params, thread) : params.heads.group.quotient(thread);
    if (query < item.query_count) {
      inputs.token = plan.query_token(item.query_begin + query);
      if (combines) {
        inputs.list_begin = plan.list_offset(item.list + query);
        inputs.list_end = plan.list_offset(item.list + query + 1);
        inputs.arrived = ptx::load_relaxed(semaphore_of_unit(params, state, item.list, thread));
      }
    }
    return inputs;
  }
};

}  // namespace prefixpack
