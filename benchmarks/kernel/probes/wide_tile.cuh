// Mainloops of a wide tile: rows of one KV head against a range of KV with page size 1, by cp.async and WGMMA.
//
// K or V of some keys at a time is gathered into a ring of stages, by one warpgroup of its own or, without producers,
// by the warps that compute. Each of these warpgroups has 64 rows. With Overlap it issues the scores of the next keys
// together with the values of these, and computes the next softmax while the values are multiplied. With InTurn
// warpgroups issue one after the other, so that one computes its softmax while another's MMAs run.
//
// No deadlock: stages are filled and read in order. Those of keys of tile i + 1 are left before the values of tile i,
// both are full before either is left, and a ring has four places. A warpgroup in its turn i waits for stages up to
// 2 i + 2 and for an earlier turn only. Who fills a stage waits for readers of stage - Places, who wait for earlier
// stages only. Without producers tile i + kAhead is filled in step i, after all have left tile i - 2 or an earlier one;
// so the slowest warpgroup waits for nobody. Parities are safe: a place is filled again only when all warps have left
// it, and left only when all copies have arrived, so nobody is two phases ahead.
#pragma once

#include <cstdint>

#include "barriers.cuh"
#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/wgmma.cuh"
#include "wide_mma.cuh"

namespace probe {

namespace ptx = prefixpack::ptx;

template <int Groups, int Keys, int Places, int LaunchRegisters, int ProducerRegisters, int ConsumerRegisters,
          bool Overlap, bool InTurn = false, bool QueriesInRegisters = false, int Producers = 128>
struct WideTile {
  static constexpr int kGroups = Groups, kKeys = Keys, kPlaces = Places;
  static constexpr int kLaunchRegisters = LaunchRegisters, kProducerRegisters = ProducerRegisters;
  static constexpr int kConsumerRegisters = ConsumerRegisters;
  static constexpr bool kOverlap = Overlap, kInTurn = InTurn, kQueriesInRegisters = QueriesInRegisters;
  static constexpr int kDims = 128, kRowBytes = kDims * 2;
  static constexpr int kRows = Groups * 64, kProducers = Producers, kThreads = kProducers + Groups * 128;
  static constexpr int kCopiers = Producers > 0 ? Producers : kThreads;
  static constexpr int kAhead = Places / 2 - 1 - Places / 8;  // tiles between copies and MMAs, without producers
  static constexpr int kSlabBytes = Keys * 128, kStageBytes = 2 * kSlabBytes;  // K or V: two slabs of 64 columns
  static constexpr int kQuerySlabBytes = kRows * 128, kQueryBytes = 2 * kQuerySlabBytes;
  static constexpr int kShared = kQueryBytes + Places * kStageBytes + 2 * Places * 8;
  static_assert(kShared <= 227 * 1024 && Places >= 4);
  static_assert(Producers == 128 || (Producers == 0 && !Overlap && kAhead >= 1 && kAhead < Places / 2));
  static_assert(kProducers * ProducerRegisters + Groups * 128 * ConsumerRegisters <= kThreads * LaunchRegisters,
                "registers are those of the launch");
};

enum class WideWork : int32_t { kAll, kNoCopies, kCopiesOnly };

struct WideStep {
  const uint16_t* q;  // [CTAs, rows, dims]
  const char *k, *v;  // [tokens, heads, dims]
  const int32_t* slots;
  int32_t tokens;  // a multiple of the keys of a stage
  int32_t heads;   // KV heads; that of a CTA is its index modulo this
  float* output;   // [CTAs, rows, dims]
  WideWork work;
};

// Stage 2 i has the keys of tile i, stage 2 i + 1 its values; they take the places of the ring in turn.
template <class T>
struct WideRing {
  ptx::SharedAddress stages, barriers;
  PREFIXPACK_DEVICE ptx::SharedAddress at(int32_t stage) const {
    return stages + static_cast<ptx::SharedAddress>(stage % T::kPlaces * T::kStageBytes);
  }
  PREFIXPACK_DEVICE ptx::SharedAddress full(int32_t stage) const {
    return barriers + static_cast<ptx::SharedAddress>(stage % T::kPlaces * 8);
  }
  PREFIXPACK_DEVICE ptx::SharedAddress empty(int32_t stage) const { return full(stage) + T::kPlaces * 8; }
  PREFIXPACK_DEVICE static int32_t parity(int32_t stage) { return stage / T::kPlaces % 2; }
};

// A thread's share of the copies: one 16-byte chunk of some rows of each stage.
template <class T>
class WideCopies {
 public:
  PREFIXPACK_DEVICE WideCopies(const WideStep& step, const WideRing<T>& ring, int32_t thread)
      : step_(step),
        ring_(ring),
        thread_(thread),
        mine_(ptx::cta_index() % step.heads * T::kRowBytes + thread % 16 * 16) {
    next_ = slot_of(0);
  }

  PREFIXPACK_DEVICE void copy_tile(int32_t tile) {
    const int32_t slots = next_;
    next_ = slot_of(tile + 1);
#pragma unroll 1
    for (int32_t is_value = 0; is_value < 2; ++is_value) copy(2 * tile + is_value, is_value ? step_.v : step_.k, slots);
  }
  // cp.async must not outlive its thread.
  PREFIXPACK_DEVICE static void finish() {
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
  }

 private:
  static constexpr int32_t kRowsPerPass = T::kCopiers / 16, kPasses = T::kKeys / kRowsPerPass;
  static_assert(kPasses <= 16, "a lane for each row that half a warp copies");
  static_assert(kRowsPerPass % 8 == 0, "the swizzle of a row is that of the first pass");

  // Lane i of a warp has the slot of the row that the warp's half i / 16 copies in pass i % 16.
  PREFIXPACK_DEVICE int32_t slot_of(int32_t tile) const {
    if (tile >= step_.tokens / T::kKeys) return 0;
    const int32_t pass = thread_ % 16 % kPasses;
    return step_.slots[tile * T::kKeys + pass * kRowsPerPass + thread_ / 32 * 2 + thread_ / 16 % 2];
  }

  PREFIXPACK_DEVICE void copy(int32_t stage, const char* from, int32_t slots) const {
    if (stage >= T::kPlaces) ptx::barrier_wait(ring_.empty(stage), ring_.parity(stage - T::kPlaces));
    if (step_.work == WideWork::kNoCopies) {
      ptx::barrier_arrive(ring_.full(stage));
      return;
    }
    const int32_t chunk = thread_ % 16;
    const int32_t place = chunk / 8 * T::kSlabBytes + prefixpack::swizzled_offset(thread_ / 16, chunk % 8, 128);
    const ptx::SharedAddress to = ring_.at(stage) + static_cast<ptx::SharedAddress>(place);
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t slot = ptx::shuffle(slots, thread_ % 32 / 16 * 16 + pass);
      ptx::cp_async(to + pass * kRowsPerPass * 128, ptx::at(from + mine_, slot, step_.heads * T::kRowBytes));
    }
    ptx::barrier_arrive_copied(ring_.full(stage));
  }

  const WideStep& step_;
  const WideRing<T>& ring_;
  const int32_t thread_, mine_;
  int32_t next_;
};

template <class T>
class WideConsumer {
 public:
  PREFIXPACK_DEVICE WideConsumer(const WideStep& step, const WideRing<T>& ring, ptx::SharedAddress queries)
      : step_(step), ring_(ring), queries_(queries + static_cast<ptx::SharedAddress>(group_ * 64 * 128)) {}

  PREFIXPACK_DEVICE void run() {
    const int32_t tiles = step_.tokens / T::kKeys;
    if (step_.work == WideWork::kCopiesOnly) {
      WideCopies<T> copies(step_, ring_, thread_);
      if constexpr (T::kProducers == 0) begin_copies(copies, tiles);
      for (int32_t tile = 0; tile < tiles; ++tile) {
        if (T::kProducers == 0 && tile + T::kAhead < tiles) copies.copy_tile(tile + T::kAhead);
        wait(2 * tile);
        leave(2 * tile);
        wait(2 * tile + 1);
        leave(2 * tile + 1);
      }
      return;
    }
#pragma unroll
    for (int32_t i = 0; i < 64; ++i) output_[i / 4][i % 4] = 0;
    if constexpr (T::kQueriesInRegisters) {
      const int32_t row = thread_ / 32 % 4 * 16 + thread_ % 16;
#pragma unroll
      for (int32_t i = 0; i < T::kDims / 16; ++i) {
        const int32_t chunk = 2 * i + thread_ / 16 % 2;
        const int32_t place = chunk / 8 * T::kQuerySlabBytes + prefixpack::swizzled_offset(row, chunk % 8, 128);
        ptx::ldmatrix(query_fragments_[i], queries_ + static_cast<ptx::SharedAddress>(place));
      }
    }
    if constexpr (T::kOverlap) {
      run_overlapped(tiles);
    } else {
      run_plainly(tiles);
    }
    store();
  }

 private:
  static constexpr int32_t kBlocks = T::kKeys / 8, kSteps = T::kKeys / 16;
  static constexpr float kScaleLog2 = 0.08838834764f * 1.44269504f, kRescaleThreshold = 8.0f;

  PREFIXPACK_DEVICE static void begin_copies(WideCopies<T>& copies, int32_t tiles) {
    for (int32_t tile = 0; tile < T::kAhead && tile < tiles; ++tile) copies.copy_tile(tile);
  }

  PREFIXPACK_DEVICE void run_plainly(int32_t tiles) {
    WideCopies<T> copies(step_, ring_, thread_);
    if constexpr (T::kProducers == 0) begin_copies(copies, tiles);
#pragma unroll 1
    for (int32_t tile = 0; tile < tiles; ++tile) {
      if (T::kProducers == 0 && tile + T::kAhead < tiles) copies.copy_tile(tile + T::kAhead);
      wait(2 * tile);
      ptx::wgmma_fence();
      issue_scores(2 * tile);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(scores_);
      leave(2 * tile);
      if (softmax()) rescale();
      pack();
      wait(2 * tile + 1);
      ptx::wgmma_fence_operand(weights_);
      ptx::wgmma_fence_operand(output_);
      ptx::wgmma_fence();
      issue_values(2 * tile + 1);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(output_);
      leave(2 * tile + 1);
    }
  }

  PREFIXPACK_DEVICE void run_overlapped(int32_t tiles) {
    wait(0);
    ptx::wgmma_fence();
    issue_scores(0);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(scores_);
    leave(0);
    softmax();
    pack();
    if (T::kInTurn && group_ == T::kGroups - 1) ptx::named_arrive(1, 256);
#pragma unroll 1
    for (int32_t tile = 0; tile + 1 < tiles; ++tile) {
      const int32_t values = 2 * tile + 1, keys = 2 * tile + 2;
      wait(values);
      wait(keys);
      if constexpr (T::kInTurn) ptx::named_sync(1 + group_, 256);
      ptx::wgmma_fence_operand(weights_);
      ptx::wgmma_fence_operand(output_);
      ptx::wgmma_fence();
      issue_scores(keys);
      issue_values(values);
      // The first warpgroup has no turn after its last.
      if constexpr (T::kInTurn) {
        if (group_ + 1 < T::kGroups) {
          ptx::named_arrive(2 + group_, 256);
        } else if (tile + 2 < tiles) {
          ptx::named_arrive(1, 256);
        }
      }
      ptx::wgmma_wait<1>();
      ptx::wgmma_fence_operand(scores_);
      leave(keys);
      const bool rescales = softmax();
      ptx::computed_here(sum_[0] + sum_[1]);
      ptx::wgmma_wait<0>();
      ptx::wgmma_fence_operand(output_);
      leave(values);
      if (rescales) rescale();
      pack();
    }
    wait(2 * tiles - 1);
    ptx::wgmma_fence_operand(weights_);
    ptx::wgmma_fence_operand(output_);
    ptx::wgmma_fence();
    issue_values(2 * tiles - 1);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(output_);
  }

  // The copies are complete; the fence shows them to wgmma.
  PREFIXPACK_DEVICE void wait(int32_t stage) const {
    ptx::barrier_wait(ring_.full(stage), ring_.parity(stage));
    ptx::fence_proxy_async();
  }
  PREFIXPACK_DEVICE void leave(int32_t stage) const {
    if (thread_ % 32 == 0) ptx::barrier_arrive(ring_.empty(stage));
  }

  PREFIXPACK_DEVICE void issue_scores(int32_t stage) {
    const auto b = ptx::smem_descriptor(ring_.at(stage), 0, 1024);
    if constexpr (T::kQueriesInRegisters) {
      ptx::wgmma_queries<false>(scores_, query_fragments_[0], b);
#pragma unroll
      for (int32_t i = 1; i < T::kDims / 16; ++i) {
        ptx::wgmma_queries<true>(scores_, query_fragments_[i], ptx::advance(b, i / 4 * T::kSlabBytes + i % 4 * 32));
      }
    } else {
      const auto a = ptx::smem_descriptor(queries_, 0, 1024);
      ptx::wgmma<ptx::BFloat16, false>(scores_, a, b);
#pragma unroll
      for (int32_t i = 1; i < T::kDims / 16; ++i) {
        ptx::wgmma<ptx::BFloat16, true>(scores_, ptx::advance(a, i / 4 * T::kQuerySlabBytes + i % 4 * 32),
                                        ptx::advance(b, i / 4 * T::kSlabBytes + i % 4 * 32));
      }
    }
    ptx::wgmma_commit();
  }
  PREFIXPACK_DEVICE void issue_values(int32_t stage) {
    const auto b = ptx::smem_descriptor(ring_.at(stage), T::kSlabBytes, 1024);
#pragma unroll
    for (int32_t i = 0; i < kSteps; ++i) {
      ptx::wgmma<ptx::BFloat16>(output_, weights_[i], ptx::advance(b, i * 2048));
    }
    ptx::wgmma_commit();
  }

  // Weights of the scores. Whether the output has to be rescaled, as by the kernels' lazy rule.
  PREFIXPACK_DEVICE bool softmax() {
    float seen[2];
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      seen[half] = scores_[0][2 * half];
#pragma unroll
      for (int32_t i = 1; i < 2 * kBlocks; ++i) seen[half] = ptx::max(seen[half], scores_[i / 2][2 * half + i % 2]);
    }
    const bool rescales = ptx::any(seen[0] * kScaleLog2 > max_[0] + kRescaleThreshold ||
                                   seen[1] * kScaleLog2 > max_[1] + kRescaleThreshold);
    if (rescales) {
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        float most = ptx::max(seen[half], ptx::shuffle_xor(seen[half], 1));
        most = ptx::max(most, ptx::shuffle_xor(most, 2)) * kScaleLog2;
        const float now = most > max_[half] + kRescaleThreshold ? most : max_[half];
        scale_[half] = ptx::exp2(max_[half] - now);
        max_[half] = now;
        sum_[half] *= scale_[half];
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 4 * kBlocks; ++i) {
      float& score = scores_[i / 4][i % 4];
      score = ptx::exp2(ptx::fma(score, kScaleLog2, -max_[i % 4 / 2]));
      sum_[i % 4 / 2] += score;
    }
    return rescales;
  }
  PREFIXPACK_DEVICE void rescale() {
#pragma unroll
    for (int32_t i = 0; i < 64; ++i) output_[i / 4][i % 4] *= scale_[i % 4 / 2];
  }
  PREFIXPACK_DEVICE void pack() {
#pragma unroll
    for (int32_t i = 0; i < kSteps; ++i) {
      weights_[i][0] = ptx::BFloat16::pack(scores_[2 * i][0], scores_[2 * i][1]);
      weights_[i][1] = ptx::BFloat16::pack(scores_[2 * i][2], scores_[2 * i][3]);
      weights_[i][2] = ptx::BFloat16::pack(scores_[2 * i + 1][0], scores_[2 * i + 1][1]);
      weights_[i][3] = ptx::BFloat16::pack(scores_[2 * i + 1][2], scores_[2 * i + 1][3]);
    }
  }

  PREFIXPACK_DEVICE void store() const {
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      float total = sum_[half];
      total += ptx::shuffle_xor(total, 1);
      total += ptx::shuffle_xor(total, 2);
      const float scale = 1.0f / total;
      const int32_t row = ptx::cta_index() * T::kRows + thread_ / 32 * 16 + half * 8 + thread_ % 32 / 4;
      float* const to = step_.output + int64_t{row} * T::kDims + thread_ % 4 * 2;
#pragma unroll
      for (int32_t i = 0; i < 16; ++i) {
        ptx::store_pair(to + i * 8, output_[i][2 * half] * scale, output_[i][2 * half + 1] * scale);
      }
    }
  }

  const WideStep& step_;
  const WideRing<T>& ring_;
  const int32_t thread_ = ptx::thread_index() - T::kProducers, group_ = ptx::broadcast(thread_ / 128, 0);
  const ptx::SharedAddress queries_;
  float output_[16][4], scores_[kBlocks][4];
  float max_[2] = {prefixpack::kMinusInfinity, prefixpack::kMinusInfinity}, sum_[2] = {}, scale_[2] = {};
  uint32_t weights_[kSteps][4];
  uint32_t query_fragments_[T::kQueriesInRegisters ? T::kDims / 16 : 1][4];
};

// shared: at a multiple of 1,024 bytes.
template <class T>
PREFIXPACK_DEVICE void run_wide_tile(const WideStep& step, char* shared) {
  const int32_t thread = ptx::thread_index();
  const ptx::SharedAddress queries = ptx::shared_address(shared), stages = queries + T::kQueryBytes;
  const WideRing<T> ring{stages, stages + T::kPlaces * T::kStageBytes};
  if (thread == 0) {
    for (int32_t place = 0; place < T::kPlaces; ++place) {
      ptx::barrier_init(ring.full(place), T::kCopiers);
      ptx::barrier_init(ring.empty(place), T::kGroups * 4);
    }
  }
  for (int32_t i = thread; i < T::kRows * 16; i += T::kThreads) {
    const int32_t row = i / 16, chunk = i % 16;
    const int32_t place = chunk / 8 * T::kQuerySlabBytes + prefixpack::swizzled_offset(row, chunk % 8, 128);
    ptx::cp_async(queries + static_cast<ptx::SharedAddress>(place),
                  step.q + (int64_t{ptx::cta_index()} * T::kRows + row) * T::kDims + chunk * 8);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::fence_proxy_async();
  ptx::cta_sync();
  if constexpr (T::kProducers == 0) {
    WideConsumer<T>(step, ring, queries).run();
    WideCopies<T>::finish();
  } else if (thread < T::kProducers) {
    ptx::registers_down<T::kProducerRegisters>();
    WideCopies<T> copies(step, ring, thread);
#pragma unroll 1
    for (int32_t tile = 0; tile < step.tokens / T::kKeys; ++tile) copies.copy_tile(tile);
    copies.finish();
  } else {
    ptx::registers_up<T::kConsumerRegisters>();
    WideConsumer<T>(step, ring, queries).run();
  }
}

}  // namespace probe
