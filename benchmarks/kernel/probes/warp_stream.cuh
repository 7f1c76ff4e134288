// A warp that attends up to eight rows of a KV head over ranges of KV, as the warp kernel does: a ring of stages, each
// the K or the V of 16 keys, loads that run ahead into the next range, MMAs with keys as rows and queries as columns.
#pragma once

#include <cstdint>

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel/online_softmax.cuh"

namespace probe {

namespace ptx = prefixpack::ptx;
using prefixpack::SoftmaxState;
using prefixpack::swizzled_offset;

struct WarpPool {
  const uint16_t* q;  // [rows, 128]
  const char *k, *v;  // [tokens, heads, 128]
  const int32_t* slots;
  int32_t heads;
  int32_t rows;  // of a range, at most eight
};

struct WarpRange {
  int32_t slots_at, keys;
  int32_t head;
  int32_t row;          // the first one
  int32_t first_slots;  // of key `lane`
};

// Source: advance() takes one step towards the next range, ready() and done() say what is known, take() returns it.
template <int Stages, class Source>
class WarpStream {
 public:
  static constexpr int kStages = Stages, kKeys = 16, kRowBytes = 256, kStageBytes = kKeys * kRowBytes;
  static constexpr int kQueryBytes = 8 * kRowBytes, kBytes = kQueryBytes + Stages * kStageBytes;

  // shared: kBytes of this warp.
  PREFIXPACK_DEVICE WarpStream(const WarpPool& pool, Source& source, ptx::SharedAddress shared)
      : pool_(pool), source_(source), queries_(shared), softmax_(attention()) {
    clear();
  }

  // finish(): called behind each range, with its accumulators and states. Of shared memory it may use a stage.
  template <class Finish>
  PREFIXPACK_DEVICE void run(const Finish& finish) {
    for (;;) {
      fill();
      if (stage_ == stages_) {
        if (!is_loading_) {
          if (source_.done()) return;
          continue;
        }
        is_loading_ = false;
        keys_ = load_range_.keys;
        row_ = load_range_.row;
        stage_ = 0;
        stages_ = stages_of(keys_);
      }
      wait_until<Stages - 1>();
      ptx::warp_sync();
      if (stage_ % 2 == 0) {
        if (stage_ == 0) load_query_fragments();
        compute_scores();
        if ((stage_ / 2 + 1) * kKeys > keys_) mask();
        softmax_.add_transposed(scores_, state_, accumulators_);
      } else {
        accumulate_values();
        ptx::warp_sync();
        if (stage_ + 1 == stages_) finish(*this);
      }
      ptx::warp_sync();
      --in_flight_;
      ++stage_;
      use_offset_ = use_offset_ == kRingBytes - kStageBytes ? 0 : use_offset_ + kStageBytes;
    }
  }

  PREFIXPACK_DEVICE void clear() {
    state_[0] = state_[1] = prefixpack::softmax_identity();
#pragma unroll
    for (int32_t i = 0; i < 32; ++i) accumulators_[i / 4][i % 4] = 0.0f;
  }

  PREFIXPACK_DEVICE int32_t row() const { return row_; }
  PREFIXPACK_DEVICE ptx::SharedAddress used_stage() const { return ring() + use_offset_; }
  // accumulators()[step][i]: dimension step * 16 + i / 2 * 8 + lane / 4 of row lane % 4 * 2 + i % 2.
  PREFIXPACK_DEVICE const float (&accumulators() const)[8][4] { return accumulators_; }
  PREFIXPACK_DEVICE SoftmaxState (&states())[2] { return state_; }

 private:
  static constexpr uint32_t kRingBytes = Stages * kStageBytes;
  static constexpr int32_t kLookaheadStages = 4;  // of a range, before whose end the next one is looked for

  PREFIXPACK_DEVICE static prefixpack::AttentionParams attention() {
    prefixpack::AttentionParams params{};
    params.scale = 0.08838834764f;
    return params;
  }
  PREFIXPACK_DEVICE static int32_t stages_of(int32_t keys) { return (keys + kKeys - 1) / kKeys * 2; }
  PREFIXPACK_DEVICE ptx::SharedAddress ring() const { return queries_ + kQueryBytes; }

  PREFIXPACK_DEVICE void fill() {
    if (load_stages_ - load_stage_ <= kLookaheadStages) source_.advance();
#pragma unroll 1
    while (in_flight_ < Stages) {
      if (load_stage_ == load_stages_) {
        if (is_loading_ || !source_.ready()) break;
        begin_range();
      }
      load_stage();
    }
  }

  PREFIXPACK_DEVICE void begin_range() {
    load_range_ = source_.take();
    load_stage_ = 0;
    load_stages_ = stages_of(load_range_.keys);
    slots_ = load_range_.first_slots;
    next_slots_ = slot_of(32);
    is_loading_ = true;
    // In the cp.async group of the first stage; the queries before are in registers by now. Rows that are missing stay
    // as they are: columns of an mma are independent.
    const int32_t lane = lane_again(), chunk = lane % 16;
#pragma unroll 1
    for (int32_t row = lane / 16; row < pool_.rows; row += 2) {
      ptx::cp_async(queries_ + static_cast<ptx::SharedAddress>(swizzled_offset(row, chunk, kRowBytes)),
                    pool_.q + int64_t{load_range_.row + row} * 128 + chunk * 8);
    }
  }

  PREFIXPACK_DEVICE int32_t slot_of(int32_t key) const {
    return key + lane() < load_range_.keys ? pool_.slots[load_range_.slots_at + key + lane()] : -1;
  }

  // Rows beyond the end are zeros: masked values still must not be NaN.
  PREFIXPACK_DEVICE void load_stage() {
    const int32_t lane = this->lane(), stride = pool_.heads * kRowBytes;
    const char* const from = (load_stage_ % 2 == 0 ? pool_.k : pool_.v) + load_range_.head * kRowBytes + lane % 16 * 16;
    const uint32_t offset = use_offset_ + static_cast<uint32_t>(in_flight_) * kStageBytes;
    const ptx::SharedAddress to = ring() + (offset < kRingBytes ? offset : offset - kRingBytes) +
                                  static_cast<uint32_t>(swizzled_offset(lane / 16, lane % 16, kRowBytes));
#pragma unroll
    for (int32_t pass = 0; pass < kKeys / 2; ++pass) {
      const auto mix = static_cast<ptx::SharedAddress>(prefixpack::swizzle_bits(pass * 2, kRowBytes) << 4);
      const int32_t slot = ptx::shuffle(slots_, load_stage_ / 2 % 2 * kKeys + pass * 2 + lane / 16);
      ptx::cp_async((to ^ mix) + pass * 2 * kRowBytes, ptx::at(from, slot >= 0 ? slot : 0, stride), slot >= 0);
    }
    ptx::cp_async_commit();
    if (load_stage_ % 4 == 3) {
      slots_ = next_slots_;
      next_slots_ = slot_of((load_stage_ / 4 + 2) * 32);
    }
    ++load_stage_;
    ++in_flight_;
  }

  // Waits for the oldest stage in flight.
  template <int Pending>
  PREFIXPACK_DEVICE void wait_until() const {
    if constexpr (Pending == 0) {
      ptx::cp_async_wait<0>();
    } else if (in_flight_ > Pending) {
      ptx::cp_async_wait<Pending>();
    } else {
      wait_until<Pending - 1>();
    }
  }

  PREFIXPACK_DEVICE static ptx::SharedAddress chunk_at(ptx::SharedAddress lane_address, int32_t chunk) {
    return lane_address ^ static_cast<ptx::SharedAddress>(chunk << 4);
  }
  PREFIXPACK_DEVICE void load_query_fragments() {
    const int32_t lane = lane_again();
    const ptx::SharedAddress queries =
        queries_ + static_cast<ptx::SharedAddress>(swizzled_offset(lane % 8, lane / 8, kRowBytes));
#pragma unroll
    for (int32_t pair = 0; pair < 4; ++pair) ptx::ldmatrix(query_fragments_[pair], chunk_at(queries, 4 * pair));
  }

  // scores_[i]: key lane / 4 + i / 2 * 8, row lane % 4 * 2 + i % 2.
  PREFIXPACK_DEVICE void compute_scores() {
    float chains[4][4] = {};
    const int32_t lane = this->lane();
    const ptx::SharedAddress keys =
        used_stage() + static_cast<ptx::SharedAddress>(swizzled_offset(lane % 16, lane / 16, kRowBytes));
#pragma unroll
    for (int32_t step = 0; step < 8; ++step) {
      uint32_t key[4];
      ptx::ldmatrix(key, chunk_at(keys, 2 * step));
      const uint32_t (&query)[4] = query_fragments_[step / 2];
      ptx::mma<ptx::BFloat16>(chains[step % 4], key, query[step % 2 * 2], query[step % 2 * 2 + 1]);
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) scores_[i] = (chains[0][i] + chains[1][i]) + (chains[2][i] + chains[3][i]);
  }
  PREFIXPACK_DEVICE void mask() {
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      if (stage_ / 2 * kKeys + lane_again() / 4 + i / 2 * 8 >= keys_) scores_[i] = prefixpack::kMinusInfinity;
    }
  }
  PREFIXPACK_DEVICE void accumulate_values() {
    const uint32_t low = ptx::movmatrix_transposed(ptx::BFloat16::pack(scores_[0], scores_[1]));
    const uint32_t high = ptx::movmatrix_transposed(ptx::BFloat16::pack(scores_[2], scores_[3]));
    const int32_t lane = this->lane();
    const ptx::SharedAddress values = used_stage() + static_cast<ptx::SharedAddress>(swizzled_offset(
                                                         lane / 16 * 8 + lane % 8, lane / 8 % 2, kRowBytes));
#pragma unroll
    for (int32_t step = 0; step < 8; ++step) {
      uint32_t value[4];
      ptx::ldmatrix_transposed(value, chunk_at(values, 2 * step));
      ptx::mma<ptx::BFloat16>(accumulators_[step], value, low, high);
    }
  }

  PREFIXPACK_DEVICE static int32_t lane() { return ptx::thread_index() % 32; }
  // Keeps what is derived from it, and seldom needed, out of registers.
  PREFIXPACK_DEVICE static int32_t lane_again() { return ptx::volatile_thread_index() % 32; }

  const WarpPool& pool_;
  Source& source_;
  const ptx::SharedAddress queries_;
  const prefixpack::Softmax softmax_;

  WarpRange load_range_{};
  int32_t load_stage_ = 0, load_stages_ = 0, slots_ = 0, next_slots_ = 0;
  bool is_loading_ = false;     // load_range_ is not yet the range that is computed
  int32_t keys_ = 0, row_ = 0;  // of the range that is computed
  uint32_t use_offset_ = 0;     // of the oldest stage in flight
  int32_t in_flight_ = 0, stage_ = 0, stages_ = 0;
  uint32_t query_fragments_[4][4];
  float scores_[4], accumulators_[8][4];
  SoftmaxState state_[2];
};

}  // namespace probe
