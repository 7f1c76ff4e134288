// What a block does after its present unit, asked for while it stores what that one came to.
#pragma once

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// The unit that a block does after its present one, in shared memory. The first warp looks after it; the others get
// nothing and keep nothing.
struct NextUnit {
  int32_t num_units;
  int32_t dealt;  // units that blocks began with: each the one of its own number
  int32_t ticket;
  int32_t record[kRecordWords];

  // How many units blocks asked for before, in the first lane, once it is here: nothing is done with it yet that would
  // wait for it. Asked for when the present unit is done but for its results, no earlier, so that no block holds back
  // work that another could do.
  PREFIXPACK_DEVICE int32_t ask(const KernelParams& params) const {
    if (dealt >= num_units) return 0;
    return ptx::thread_index_here() == 0 ? ptx::count_up(&params.step.tickets[0]) : 0;
  }
  // The ticket, for all lanes.
  PREFIXPACK_DEVICE int32_t ticket_of(int32_t asked_before) const { return dealt + ptx::shuffle(asked_before, 0); }
  // A word of the item's record for each lane.
  PREFIXPACK_DEVICE int32_t ask_for_record(const KernelParams& params, int32_t ticket) const {
    return ticket < num_units ? record_word(params, ticket) : 0;
  }
  // ticket: also of a unit that there is not, up to the number of blocks.
  PREFIXPACK_DEVICE static int32_t record_word(const KernelParams& params, int32_t ticket) {
    const int32_t thread = ptx::thread_index();
    if (thread >= kRecordWords) return 0;
    const ItemRecord* item = params.step.items + unit_of(ticket, params.heads.kv).item;
    return reinterpret_cast<const int32_t*>(item)[thread];
  }
  PREFIXPACK_DEVICE void keep(int32_t next_ticket, int32_t word) {
    const int32_t thread = ptx::thread_index();
    if (thread < 32) ticket = next_ticket;
    if (thread < kRecordWords) record[thread] = word;
  }
};

}  // namespace prefixpack
