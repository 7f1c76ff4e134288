// State of a CTA in shared memory, behind the tiles.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/scheduler_prefetch.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// Parameters and header are copied to shared memory, because called functions cannot read kernel parameters from
// constant memory.
struct CtaState {
  KernelParams params;
  PlanHeader header;
  ItemRecord item;
  int32_t tile_index;  // of the current tile
  int32_t kv_head;
  NextTile next;

  PREFIXPACK_DEVICE PlanReader plan() const { return {params.plan, header}; }
};
static_assert(sizeof(CtaState) <= kCtaStateBytes, "shared memory for the CTA's state");

PREFIXPACK_DEVICE CtaState* cta_state(char* shared) { return reinterpret_cast<CtaState*>(shared + kSharedBytes); }

}  // namespace prefixpack
