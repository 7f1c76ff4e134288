// Deferred combines: rows of many partials, combined by the warps that have no tile left.
#pragma once

#include <cstdint>

#include "cuda/common/ptx.cuh"
#include "cuda/kernel/store_rows.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// A warp combines one row at a time. It waits until the row's partials have arrived: whoever brings them has taken its
// tile before, and waits for nobody.
template <int HeadDim, class Output>
class DeferredCombine {
 public:
  PREFIXPACK_DEVICE explicit DeferredCombine(const KernelParams& params)
      : params_(params), attention_(params.attention), lane_(ptx::thread_index() % 32) {}

  // Called by all lanes.
  PREFIXPACK_DEVICE void run(DeferredHeader deferred) const {
    if (ptx::uniform(deferred.count == 0)) return;
    const Heads& heads = params_.heads;
    const int32_t num_rows = deferred.count * attention_.q_heads;
    int32_t claimed = claim();
    bool may_rehearse = true;
#pragma unroll 1
    for (;;) {
      const int32_t row = ptx::broadcast(claimed, 0);
      if (ptx::uniform(row >= num_rows)) return;
      claimed = claim();
      // Virtual KV heads follow each other in a record's rows, as query heads do.
      const int32_t split = heads.split_heads.quotient(row), index = heads.virtual_heads.quotient(split);
      const int32_t word =
          lane_ < kDeferredStride ? params_.plan.words[deferred.at + index * kDeferredStride + lane_] : -1;
      const int32_t head = row - index * attention_.q_heads, virtual_head = split - index * heads.virtual_heads.number;
#pragma unroll 1
      while (ptx::uniform(!combine(word, head, virtual_head, may_rehearse))) may_rehearse = false;
      may_rehearse = false;
    }
  }

 private:
  static constexpr int32_t kRowLanes = HeadDim / 4;           // lanes that load a row, four values each
  static constexpr int32_t kRowsPerLoad = 32 / kRowLanes;     // partials that the warp loads at once
  static constexpr int32_t kBatch = 8;                        // loads in flight
  static constexpr int32_t kInBatch = kBatch * kRowsPerLoad;  // partials of them
  static_assert(32 % kInBatch == 0, "a batch lies within the 32 partials whose lse the lanes hold");

  PREFIXPACK_DEVICE int32_t claim() const {
    return lane_ == 0 ? ptx::atomic_increment(&params_.step.tile_counters[3]) : 0;
  }

  PREFIXPACK_DEVICE float lse_of(int32_t slot, int32_t head) const {
    return ptx::load_relaxed(attention_.partial_lse + int64_t{slot} * attention_.q_heads + head);
  }

  // word: lane i holds word i of the row's record. may_rehearse: if partials are still missing, goes through the code
  // without them and returns false, so that the code is in the instruction cache when they arrive.
  PREFIXPACK_DEVICE bool combine(int32_t word, int32_t head, int32_t virtual_head, bool may_rehearse) const {
    const DeferredRecord query{ptx::broadcast(word, 0), ptx::broadcast(word, 1), ptx::broadcast(word, 2),
                               ptx::broadcast(word, 3)};
    const PlanHeader& header = *reinterpret_cast<const PlanHeader*>(params_.plan.words);
    const int32_t* slots = params_.plan.words + header.list_slot_at + query.first;
    int32_t* semaphore = semaphore_of(params_, query.list, virtual_head);
    const bool rehearses = may_rehearse && ptx::broadcast(ptx::load_relaxed(semaphore), 0) < query.count;
    int32_t slot = ptx::shuffle(word, kDeferredWords + lane_);
    if (lane_ >= kInlineSlots) slot = lane_ < query.count ? slots[lane_] : -1;
    if (rehearses) slot = -1;
    if (ptx::uniform(!rehearses)) ptx::wait_at_least(semaphore, query.count);
    ptx::warp_sync();
    float lse = slot >= 0 ? lse_of(slot, head) : kMinusInfinity;
    const auto* partials = attention_.partial_o + head * HeadDim + lane_ % kRowLanes * 4;
    const int64_t stride = int64_t{attention_.q_heads} * HeadDim;
    CombineWeights weights{};
    float sums[4] = {};
#pragma unroll 1
    for (int32_t begin = 0; ptx::uniform(begin < query.count); begin += 32) {
      if (ptx::uniform(begin > 0)) {
        slot = begin + lane_ < query.count ? slots[begin + lane_] : -1;
        lse = slot >= 0 ? lse_of(slot, head) : kMinusInfinity;
      }
      float weight = 0.0f;
#pragma unroll 1
      for (int32_t first = 0; ptx::uniform(first < 32 && begin + first < query.count); first += kInBatch) {
        float quads[kBatch][4];
#pragma unroll
        for (int32_t i = 0; i < kBatch; ++i) {
          const int32_t of = ptx::shuffle(slot, first + i * kRowsPerLoad + lane_ / kRowLanes);
          quads[i][0] = quads[i][1] = quads[i][2] = quads[i][3] = 0.0f;
          if (of >= 0) ptx::load_relaxed(partials + of * stride, quads[i]);
        }
        if (ptx::uniform(first == 0)) {
          // While the first partials are in flight.
          if (ptx::uniform(begin == 0)) weights = weights_of(query, head, slots, lse);
          weight = slot >= 0 ? weights.of(lse) : 0.0f;
          ptx::warp_sync();
        }
#pragma unroll
        for (int32_t i = 0; i < kBatch; ++i) {
          const float of_partial = ptx::shuffle(weight, first + i * kRowsPerLoad + lane_ / kRowLanes);
#pragma unroll
          for (int32_t j = 0; j < 4; ++j) sums[j] = ptx::fma(of_partial, quads[i][j], sums[j]);
        }
      }
    }
#pragma unroll
    for (int32_t mask = kRowLanes; mask < 32; mask *= 2) {
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) sums[j] += ptx::shuffle_xor(sums[j], mask);
    }
    if (ptx::uniform(rehearses)) return false;
    const OutputRow target = output_row(attention_, query.token, head);
    if (lane_ < kRowLanes) {
      ptx::store_words(target.output + lane_ * 4, Output::pack(sums[0], sums[1]), Output::pack(sums[2], sums[3]));
    }
    if (lane_ == 0) {
      store_lse(target.lse, weights.lse);
      // Rows of one query and virtual KV head share a semaphore. The last of them resets it for the next launch.
      const int32_t last = query.count + params_.heads.split_heads.number - 1;
      // The lane is added, which is 0: the compiler would aggregate what it takes for an addition of the whole warp.
      int32_t* mine = semaphore + ptx::volatile_thread_index() % 32;
      if (ptx::atomic_add_release(mine, 1) == last) *semaphore = 0;
    }
    ptx::warp_sync();
    return true;
  }

  // lse: of partial `lane`.
  PREFIXPACK_DEVICE CombineWeights weights_of(const DeferredRecord& query, int32_t head, const int32_t* slots,
                                              float lse) const {
    SoftmaxState state = softmax_identity();
    if (lane_ < query.count) state = add_partial(state, lse);
#pragma unroll 1
    for (int32_t next = 32; ptx::uniform(next < query.count); next += 32) {
      const int32_t i = next + lane_;
      const float further = i < query.count ? lse_of(slots[i], head) : kMinusInfinity;
      if (i < query.count) state = add_partial(state, further);
    }
    ptx::warp_sync();
    return combine_weights<32>(attention_, head, state,
                               [](float value, int32_t mask) { return ptx::shuffle_xor(value, mask); });
  }

  const KernelParams& params_;
  const AttentionParams& attention_;
  const int32_t lane_;
};

}  // namespace prefixpack
