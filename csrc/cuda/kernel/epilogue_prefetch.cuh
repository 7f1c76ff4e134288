// What the end of a block's unit needs to know, asked for while its sums go to shared memory.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/kernel/cta_state.cuh"
#include "cuda/kernel/store_rows.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// A query has one part or two: the heads whose partials are counted together. The parts of a unit's queries follow each
// other.
PREFIXPACK_DEVICE int32_t query_of_part(const KernelParams& params, int32_t part) {
  return params.heads.parts > 1 ? part >> 1 : part;
}

PREFIXPACK_DEVICE int32_t* arrivals_of_part(const KernelParams& params, const BlockState& state, int32_t part) {
  const int32_t query = query_of_part(params, part), parts = params.heads.parts;
  return arrivals_of(params, state.item.merge_begin + query, state.kv_head * parts + part - query * parts);
}

// As it comes from memory: nothing is worked out yet that would wait for it.
struct UnitEnd {
  int32_t asked_before;  // see NextUnit::ask
  int32_t token;         // of the part that is this thread's number; of the row, if the unit writes the output
  int32_t arrived, list_begin, list_end;  // of the part, see MergeList

  // Called by all threads. params: wherever they are read fastest.
  static PREFIXPACK_DEVICE UnitEnd ask(const KernelParams& params, const BlockState& state) {
    const ItemRecord& item = state.item;
    const PlanReader plan{params.plan, state.header};
    const int32_t thread = ptx::thread_index_here();
    UnitEnd end{state.next.ask(params), 0, 0, 0, 0};
    const bool merges = item.slot_begin != kWriteThrough;
    const int32_t query = merges ? query_of_part(params, thread) : params.heads.group.quotient(thread);
    if (query < item.query_count) {
      end.token = plan.query_token(item.query_begin + query);
      if (merges) {
        end.list_begin = plan.merge_offset(item.merge_begin + query);
        end.list_end = plan.merge_offset(item.merge_begin + query + 1);
        end.arrived = ptx::load_shared_result(arrivals_of_part(params, state, thread));
      }
    }
    return end;
  }
};

}  // namespace prefixpack
