// Destinations of result rows, and the arithmetic of the combine: the same sums in the same order whoever computes
// them.
#pragma once

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel_params.h"
#include "plan/combine_shape.h"

namespace prefixpack {

// Final softmax of a row.
struct FinalSoftmax {
  float factor;  // of the row's accumulators
  float lse;     // to base 2
};

PREFIXPACK_DEVICE FinalSoftmax finalize(SoftmaxState state) {
  return {state.sum > 0.0f ? ptx::reciprocal(state.sum) : 0.0f,
          state.sum > 0.0f ? safe_max(state.max) + ptx::log2(state.sum) : kMinusInfinity};
}

// Instead of a head: partials, which leave the sink to the last level.
constexpr int32_t kNoSink = -1;

// finalize() with an attention sink: a logit without value, to base 2, which may exceed all others; -inf: no sink.
PREFIXPACK_DEVICE FinalSoftmax finalize_with(SoftmaxState state, float sink) {
  float scale, sink_scale;
  FinalSoftmax result =
      finalize(softmax_combine(state, {sink, 1.0f}, [](float x) { return ptx::exp2(x); }, &scale, &sink_scale));
  result.factor *= scale;
  return result;
}
PREFIXPACK_DEVICE FinalSoftmax finalize_with_sink(SoftmaxState state, const AttentionParams& attention, int32_t head) {
  if (attention.sinks == nullptr || head == kNoSink) return finalize(state);
  return finalize_with(state, attention.sinks[head] * kLog2E);
}

struct OutputRow {
  uint16_t* output;
  float* lse;  // or nullptr
};

PREFIXPACK_DEVICE OutputRow output_row(const AttentionParams& attention, int64_t token, int32_t head) {
  return {static_cast<uint16_t*>(attention.o) + token * attention.o_token_stride + head * attention.o_head_stride,
          attention.lse == nullptr ? nullptr : attention.lse + token * attention.lse_token_stride + head};
}

struct PartialRow {
  float* output;  // [head_dim]
  float* lse;     // to base 2
};

PREFIXPACK_DEVICE PartialRow partial_row(const AttentionParams& attention, int32_t partial, int32_t head) {
  const int64_t index = int64_t{partial} * attention.q_heads + head;
  return {attention.partial_o + index * attention.head_dim, attention.partial_lse + index};
}

PREFIXPACK_DEVICE void store_lse(float* lse, float base_2) {
  if (lse != nullptr) *lse = base_2 * kLn2;
}

// Instead of the partial of a tile's first query: no partial of the tile is in shared memory.
constexpr int32_t kInGlobalMemory = INT32_MIN / 2;

constexpr int32_t kCombineLanes = 8;
// Partials loaded together, of the eight whose lse the lanes hold: by a CTA, and by a warp, whose code runs for every
// tail.
constexpr int32_t kCombineBatch = kCombineWidth;
constexpr int32_t kWarpCombineBatch = kWarpCombineWidth;
static_assert(kCombineLanes % kCombineBatch == 0 && kCombineLanes % kWarpCombineBatch == 0);

// Weights of a row's partials: 2^(lse - base) * factor.
struct CombineWeights {
  float base;
  float factor;
  float lse;  // of the row, to base 2

  PREFIXPACK_DEVICE float of(float partial_lse) const { return ptx::exp2(partial_lse - base) * factor; }
};

// Weights of a row whose partials some lanes have read: lane g those with i % kLanes == g, in ascending order. A
// butterfly combines the lanes' states, which gives all lanes the same bits.
template <int kLanes = kCombineLanes, class Exchange>
PREFIXPACK_DEVICE CombineWeights combine_weights(const AttentionParams& attention, int32_t head, SoftmaxState state,
                                                 const Exchange& exchange) {
#pragma unroll
  for (int32_t mask = 1; mask < kLanes; mask *= 2) {
    const SoftmaxState other{exchange(state.max, mask), exchange(state.sum, mask)};
    const float max = ptx::max(state.max, other.max);
    state = {max, ptx::sum_of_products(state.sum, ptx::exp2(state.max - safe_max(max)), other.sum,
                                       ptx::exp2(other.max - safe_max(max)))};
  }
  const FinalSoftmax result = finalize_with_sink(state, attention, head);
  return {safe_max(state.max), result.factor, result.lse};
}

// Adds a partial to a lane's state.
PREFIXPACK_DEVICE SoftmaxState add_partial(SoftmaxState state, float lse) {
  const float max = ptx::max(state.max, lse);
  return {max,
          ptx::sum_of_products(state.sum, ptx::exp2(state.max - safe_max(max)), 1.0f, ptx::exp2(lse - safe_max(max)))};
}

// Partials of one query: entries [first, first + count) of combine_partial, in ascending KV order.
struct PartialList {
  int32_t first, count;
};

// Counts the partials of a query that have arrived, for one virtual KV head. The last arriver combines them, without a
// second launch and without waiting; of a deferred query, warps that have no tile left do. The plan fixes the order of
// summation, so the bits do not depend on the arriver.
PREFIXPACK_DEVICE int32_t* semaphore_of(const KernelParams& params, int32_t list, int32_t virtual_head) {
  return params.step.semaphores + list * params.heads.virtual_heads.number + virtual_head;
}

}  // namespace prefixpack
