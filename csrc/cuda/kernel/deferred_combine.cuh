// Deferred combines: rows of many partials, combined by the warps that have no tile left.
#pragma once

#include <cstdint>

#include "cuda/common/ptx.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/store_rows.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// What the warps of a launch claim one after the other: `first` other claims, then the parts of deferred rows.
struct PartQueue {
  int32_t* counter;
  int32_t first;
  int32_t claims;  // of the whole launch: each warp that claims ends with a claim of nothing

  // Called by all lanes; the first one gets the result.
  PREFIXPACK_DEVICE int32_t claim() const { return ptx::thread_index() % 32 == 0 ? ptx::atomic_increment(counter) : 0; }
  // The launch's last claim resets the counter for the next launch, so that a captured graph can be replayed. claimed:
  // behind the last part.
  PREFIXPACK_DEVICE void end(int32_t claimed) const {
    if (ptx::volatile_thread_index() % 32 == 0 && claimed == claims - 1) *counter = 0;
  }
};

// A warp combines a part of a row at a time: some of its dimensions, of all partials, so that no part depends on
// another one. It waits until the row's partials have arrived: whoever brings them has taken its tile before, and waits
// for nobody. Partials go through the warp's shared memory: more are in flight than in registers, and their weights are
// computed meanwhile. A lane reads what it has copied itself.
template <int HeadDim, class Output>
class DeferredCombine {
 public:
  // shared: kWarpBytes of this warp, used by run().
  PREFIXPACK_DEVICE DeferredCombine(const KernelParams& params, DeferredHeader deferred, const char* shared)
      : params_(params),
        attention_(params.attention),
        deferred_(deferred),
        lane_(ptx::thread_index() % 32),
        shared_(ptx::shared_address(shared) + lane_ * 16) {}

  PREFIXPACK_DEVICE int32_t num_parts() const { return deferred_.count * attention_.q_heads << deferred_.part_bits; }

  // claimed: in the first lane. Called by all lanes.
  PREFIXPACK_DEVICE void run(const PartQueue& queue, int32_t claimed) const {
    const Heads& heads = params_.heads;
    const int32_t end = num_parts();
    bool may_warm_icache = true;
#pragma unroll 1
    for (;;) {
      const int32_t place = ptx::broadcast(claimed, 0) - queue.first;
      if (ptx::uniform(place >= end)) return queue.end(claimed);
      const int32_t row = place >> deferred_.part_bits, part = place - (row << deferred_.part_bits);
      // Virtual KV heads follow each other in a record's rows, as query heads do.
      const int32_t unit = heads.heads_per_half.quotient(row), index = heads.virtual_heads.quotient(unit);
      const int32_t word = params_.plan.words[deferred_.at + index * kDeferredStride + lane_];
      const int32_t head = row - index * attention_.q_heads, virtual_head = unit - index * heads.virtual_heads.number;
      const DeferredRecord record{ptx::broadcast(word, 0), ptx::broadcast(word, 1), ptx::broadcast(word, 2),
                                  ptx::broadcast(word, 3)};
      const int32_t* list = params_.plan.words + record.partials_at;
      int32_t* semaphore = semaphore_of(params_, record.list, virtual_head);
      // The list is read only behind the partials that the record has.
      Pair entries{ptx::shuffle(word, kDeferredWords + lane_), 0};
      if (lane_ >= kInlinePartials && lane_ < record.count) entries.low = list[lane_];
      if (32 + lane_ < record.count) entries.high = list[32 + lane_];
      const float sink = attention_.sinks == nullptr ? kMinusInfinity : attention_.sinks[head];
      ptx::warp_sync();
#pragma unroll 1
      for (;;) {
        // A relaxed poll, then a barrier, and no acquire: see ptx::load_relaxed. The partials that are read behind it
        // come from the L2, also those that a warm-up has read before they were complete.
        const bool complete = ptx::broadcast(ptx::load_relaxed(semaphore), 0) >= record.count;
        // While partials are missing, the warp goes through the code with what lies in the first ones' places, so that
        // it is in the instruction cache when they arrive.
        const bool warms_icache = may_warm_icache && !complete;
        may_warm_icache = false;
        if (ptx::uniform(warms_icache)) prefetch_records(place);
        if (ptx::uniform(!warms_icache && !complete)) ptx::wait_at_least(semaphore, record.count);
        // Parts of one query and virtual KV head share a semaphore. The last of them that has waited resets it for the
        // next launch. A warp that waits claims nothing, because another one could do it.
        const auto arrived = [&] {
          if (ptx::uniform(!warms_icache)) {
            claimed = queue.claim();
            if (lane_ == 0) {
              ptx::increment_or_reset(semaphore,
                                      record.count + (heads.heads_per_half.number << deferred_.part_bits) - 1);
            }
            ptx::warp_sync();
          }
        };
        const int32_t count = warms_icache && record.count > kGroup ? kGroup : record.count;
        const Accumulators accumulators = accumulate(count, head, part, list, entries, sink, arrived);
        if (ptx::uniform(warms_icache)) continue;
        store(accumulators, record.token, head, part);
        break;
      }
    }
  }

 private:
  static constexpr int32_t kGroup = 4;                             // loads that are issued together
  static constexpr int32_t kGroupBytes = kGroup * 32 * 16;         // of the warp
  static constexpr int32_t kGroups = kWarpBytes / kGroupBytes;     // in flight
  static constexpr int32_t kRowLaneBits = HeadDim == 128 ? 5 : 4;  // of the number of lanes that load a row
  static_assert(HeadDim == 4 << kRowLaneBits, "four values for each lane");

  // Values of the partials `lane` and 32 + `lane` of 64.
  struct Pair {
    int32_t low, high;
  };
  struct Accumulators {
    float values[4];
    float lse;
  };

  // Lanes that load a part of a partial, four values each. The warp loads the parts of several partials at once.
  PREFIXPACK_DEVICE int32_t lane_bits() const { return kRowLaneBits - deferred_.part_bits; }
  PREFIXPACK_DEVICE int32_t column(int32_t part) const {
    return (part << lane_bits() | (lane_ & ((1 << lane_bits()) - 1))) * 4;
  }

  // For warps that have no time to wait for memory. place: the first warps to wait have the first ones.
  PREFIXPACK_DEVICE void prefetch_records(int32_t place) const {
    const int32_t index = place * 32 + lane_;
    if (index < deferred_.count) ptx::prefetch_l2(params_.plan.words + deferred_.at + index * kDeferredStride);
    ptx::warp_sync();
  }

  // arrived(): called once, while partials are in flight.
  template <class Arrived>
  PREFIXPACK_DEVICE Accumulators accumulate(int32_t count, int32_t head, int32_t part, const int32_t* list,
                                            Pair entries, float sink, const Arrived& arrived) const {
    const int32_t group_bits = 7 - lane_bits();  // of partials in a group
    const int32_t of_load = lane_ >> lane_bits(), per_load = 32 >> lane_bits();
    const auto* partials = reinterpret_cast<const char*>(attention_.partial_o + head * HeadDim + column(part));
    const float* lse_of_head = attention_.partial_lse + head;
    const int32_t stride = attention_.q_heads * HeadDim * static_cast<int32_t>(sizeof(float));
    Accumulators accumulators{};
    FinalSoftmax softmax{};
    float max = kMinusInfinity, weight_sum = 0.0f;  // the sum: of this lane's partials
#pragma unroll 1
    for (int32_t begin = 0; ptx::uniform(begin < count); begin += 64) {
      const int32_t left = count - begin;
      // Behind the list's end the last partial is read again, with weight 0.
      const int32_t last = left < 64 ? left - 1 : 63;
      float low = kMinusInfinity, high = kMinusInfinity;
      if (lane_ <= last) low = ptx::load_relaxed(lse_of_head + int64_t{entries.low} * attention_.q_heads);
      if (32 + lane_ <= last) high = ptx::load_relaxed(lse_of_head + int64_t{entries.high} * attention_.q_heads);
      ptx::warp_sync();
      // cp.async.cg: past the L1, as the relaxed loads.
      const auto load = [&](int32_t group, ptx::SharedAddress to) {
        const int32_t first = group << group_bits;
        const int32_t mine = first < 32 ? entries.low : entries.high;
#pragma unroll
        for (int32_t i = 0; i < kGroup; ++i) {
          const int32_t at = first + i * per_load + of_load;
          const int32_t partial = ptx::shuffle(mine, at < last ? at : last);
          ptx::cp_async(to + i * 512, ptx::at(partials, partial, stride));
        }
        ptx::cp_async_commit();
      };
      const int32_t groups = (last >> group_bits) + 1;
      int32_t loaded = 0;
#pragma unroll 1
      for (; ptx::uniform(loaded < groups && loaded < kGroups); ++loaded) load(loaded, shared_ + loaded * kGroupBytes);

      // While the partials are in flight. Weights are relative to the largest so far. The condition, which always
      // holds, keeps the compiler from waiting for these values ahead of the loop.
      low = loaded > 0 ? low : 0.0f;
      high = loaded > 0 ? high : 0.0f;
      const float late_sink = loaded > 0 ? sink : 0.0f;
      const float next_max = ptx::max(max, ptx::warp_max(ptx::max(low, high))), base = safe_max(next_max);
      const float scale = ptx::exp2(max - base);
      max = next_max;
      low = ptx::exp2(low - base);
      high = ptx::exp2(high - base);
      weight_sum = ptx::fma(weight_sum, scale, low + high);
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) accumulators.values[j] *= scale;
      if (ptx::uniform(begin == 0)) arrived();
      if (ptx::uniform(left <= 64)) softmax = finish({max, weight_sum}, late_sink);

      ptx::SharedAddress from = shared_;
#pragma unroll 1
      for (int32_t group = 0; ptx::uniform(group < groups); ++group) {
        if (ptx::uniform(loaded < groups)) {
          ptx::cp_async_wait<kGroups - 1>();
        } else {
          ptx::cp_async_wait<0>();
        }
        const int32_t first = group << group_bits;
        const float mine = first < 32 ? low : high;
#pragma unroll
        for (int32_t i = 0; i < kGroup; ++i) {
          float quad[4];
          ptx::load_shared(from + i * 512, quad);
          const float weight = ptx::shuffle(mine, first + i * per_load + of_load);
#pragma unroll
          for (int32_t j = 0; j < 4; ++j) accumulators.values[j] = ptx::fma(weight, quad[j], accumulators.values[j]);
        }
        if (ptx::uniform(loaded < groups)) load(loaded++, from);
        from = from == shared_ + (kGroups - 1) * kGroupBytes ? shared_ : from + kGroupBytes;
      }
      if (ptx::uniform(left > 64)) {
        entries.low = entries.high = 0;
        if (64 + lane_ < left) entries.low = list[begin + 64 + lane_];
        if (96 + lane_ < left) entries.high = list[begin + 96 + lane_];
        ptx::warp_sync();
      }
    }
    // Partials that other lanes have added.
#pragma unroll 1
    for (int32_t mask = 1 << lane_bits(); ptx::uniform(mask < 32); mask *= 2) {
#pragma unroll
      for (int32_t j = 0; j < 4; ++j) accumulators.values[j] += ptx::shuffle_xor(accumulators.values[j], mask);
    }
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) accumulators.values[j] *= softmax.factor;
    accumulators.lse = softmax.lse;
    return accumulators;
  }

  // Combines the lanes' sums of weights.
  PREFIXPACK_DEVICE static FinalSoftmax finish(SoftmaxState state, float sink) {
#pragma unroll
    for (int32_t mask = 1; mask < 32; mask *= 2) state.sum += ptx::shuffle_xor(state.sum, mask);
    return finalize_with(state, sink * kLog2E);
  }

  PREFIXPACK_DEVICE void store(const Accumulators& accumulators, int32_t token, int32_t head, int32_t part) const {
    const OutputRow target = output_row(attention_, token, head);
    if (lane_ >> lane_bits() == 0) {
      ptx::store_words(target.output + column(part), Output::pack(accumulators.values[0], accumulators.values[1]),
                       Output::pack(accumulators.values[2], accumulators.values[3]));
    }
    if (lane_ == 0 && part == 0) store_lse(target.lse, accumulators.lse);
    ptx::warp_sync();
  }

  const KernelParams& params_;
  const AttentionParams& attention_;
  const DeferredHeader deferred_;
  const int32_t lane_;
  const ptx::SharedAddress shared_;  // of this lane's 16 bytes of the first load
};

}  // namespace prefixpack
