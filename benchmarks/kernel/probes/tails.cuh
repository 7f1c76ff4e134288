// Private tails on the warps of a persistent kernel, from a queue, as the warp kernel takes them.
#pragma once

#include "warp_stream.cuh"

namespace probe {

struct TailStep {
  WarpPool pool;  // rows: [tails, heads, pool.rows]
  int32_t slots_at, tails, tokens;
  int32_t* claims;  // zero before and after
  float* output;    // as the rows
  float* lse;       // [rows], to base 2
};

// A tile is a tail and a KV head.
class TailQueue {
 public:
  PREFIXPACK_DEVICE explicit TailQueue(const TailStep& step) : step_(step) {}
  PREFIXPACK_DEVICE bool ready() const { return state_ == kReady; }
  PREFIXPACK_DEVICE bool done() const { return state_ == kDone; }

  // One dependent read at a time, as the warp kernel: a tile's number, then its slots.
  PREFIXPACK_DEVICE void advance() {
    const int32_t lane = ptx::volatile_thread_index() % 32, tiles = step_.tails * step_.pool.heads;
    if (state_ == kIdle) {
      claim_ = lane == 0 ? ptx::atomic_increment(step_.claims) : 0;
      state_ = kClaimed;
    } else if (state_ == kClaimed) {
      claim_ = ptx::broadcast(claim_, 0);
      state_ = kReady;
      if (claim_ >= tiles) {
        state_ = kDone;
        // Each warp has one such claim.
        const int32_t warps = ptx::grid_size() * ptx::cta_size() / 32;
        if (claim_ == tiles + warps - 1 && lane == 0) *step_.claims = 0;
      } else {
        first_slots_ = lane < step_.tokens ? step_.pool.slots[slots_at() + lane] : -1;
      }
    }
  }
  PREFIXPACK_DEVICE WarpRange take() {
    state_ = kIdle;
    return {slots_at(), step_.tokens, claim_ % step_.pool.heads, claim_ * step_.pool.rows, first_slots_};
  }

 private:
  enum State : int32_t { kIdle, kClaimed, kReady, kDone };
  PREFIXPACK_DEVICE int32_t slots_at() const { return step_.slots_at + claim_ / step_.pool.heads * step_.tokens; }

  const TailStep& step_;
  State state_ = kIdle;
  int32_t claim_ = 0, first_slots_ = 0;
};

constexpr int kTailStages = 3, kTailWarps = 8;
using TailStream = WarpStream<kTailStages, TailQueue>;
constexpr int kTailShared = kTailWarps * TailStream::kBytes;
static_assert(kTailShared == 112 * 1024);

// Normalized rows as partials: through the stage that was used last, so that whole rows are stored.
PREFIXPACK_DEVICE void store_tail(const TailStep& step, TailStream& stream) {
  const int32_t lane = ptx::volatile_thread_index() % 32;
  const auto place = [&](int32_t row, int32_t column) {
    const int32_t at = row * 128 + column / 32 * 32 + ((column % 32 / 8 ^ row / 2 % 4) * 8) + column % 8;
    return stream.used_stage() + static_cast<ptx::SharedAddress>(at * 4);
  };
#pragma unroll
  for (int32_t j = 0; j < 2; ++j) {
    SoftmaxState& state = stream.states()[j];
    prefixpack::column_sum(state.sum);
    const float factor = ptx::reciprocal(state.sum);
    const int32_t row = lane % 4 * 2 + j;
#pragma unroll
    for (int32_t i = 0; i < 16; ++i) {
      ptx::store_shared(place(row, i * 8 + lane / 4), stream.accumulators()[i / 2][i % 2 * 2 + j] * factor);
    }
    if (lane < 4 && row < step.pool.rows) step.lse[stream.row() + row] = state.max + ptx::log2(state.sum);
  }
  ptx::warp_sync();
#pragma unroll 1
  for (int32_t row = 0; row < step.pool.rows; ++row) {
    float quad[4];
    ptx::load_shared(place(row, lane * 4), quad);
    ptx::store_quad(step.output + int64_t{stream.row() + row} * 128 + lane * 4, quad);
  }
}

PREFIXPACK_DEVICE void run_tails(const TailStep& step, char* shared) {
  TailQueue queue(step);
  const auto mine = static_cast<ptx::SharedAddress>(ptx::thread_index() / 32 * TailStream::kBytes);
  TailStream stream(step.pool, queue, ptx::shared_address(shared) + mine);
  stream.run([&](TailStream& here) {
    store_tail(step, here);
    here.clear();
  });
}

}  // namespace probe
