// Few requests in one launch: KV splits over CTAs, and the last CTA to arrive combines. No queue and no records: a CTA
// knows its request, KV head and split by its number, and reads the request's length and row of the slot table.
#pragma once

#include <cstring>

#include "warp_stream.cuh"

namespace probe {

struct Request {
  int32_t row, tokens;  // row of the slot table
};

struct FewStep {
  WarpPool pool;            // rows: [requests, heads, pool.rows]; slots: the table
  const Request* requests;  // in memory: a captured graph replays with other ones
  int32_t slot_stride, splits;
  float* partials;      // [requests, splits, heads, pool.rows, 128]
  float* lse;           // [requests, splits, heads, pool.rows], to base 2
  int32_t* semaphores;  // [requests, heads], zero before and after
  uint16_t* output;     // bf16, as the rows
};

// One range, known from the start.
class OneRange {
 public:
  PREFIXPACK_DEVICE explicit OneRange(const WarpRange& range) : range_(range), is_left_(range.keys > 0) {}
  PREFIXPACK_DEVICE void advance() {}
  PREFIXPACK_DEVICE bool ready() const { return is_left_; }
  PREFIXPACK_DEVICE bool done() const { return !is_left_; }
  PREFIXPACK_DEVICE WarpRange take() {
    is_left_ = false;
    return range_;
  }

 private:
  const WarpRange range_;
  bool is_left_;
};

constexpr int kFewWarps = 8, kFewThreads = 32 * kFewWarps, kMostSplits = 128;
constexpr int kFewRowFloats = 132;  // padded, so that a fragment's stores hit all banks
template <int Stages>
constexpr int kFewShared = kFewWarps * WarpStream<Stages, OneRange>::kBytes;

// Weights of some partials in the lanes, 32 in each of Count registers. Returns the log-sum-exp to base 2.
template <int Count>
PREFIXPACK_DEVICE float normalize(const SoftmaxState (&states)[Count], float (&weights)[Count]) {
  float most = prefixpack::kMinusInfinity, total = 0.0f;
#pragma unroll
  for (const SoftmaxState& state : states) most = ptx::max(most, state.max);
#pragma unroll
  for (int32_t mask = 1; mask < 32; mask *= 2) most = ptx::max(most, ptx::shuffle_xor(most, mask));
#pragma unroll
  for (int32_t i = 0; i < Count; ++i) {
    weights[i] = ptx::exp2(states[i].max - prefixpack::safe_max(most));
    total += weights[i] * states[i].sum;
  }
#pragma unroll
  for (int32_t mask = 1; mask < 32; mask *= 2) total += ptx::shuffle_xor(total, mask);
  const float factor = total > 0.0f ? ptx::reciprocal(total) : 0.0f;
#pragma unroll
  for (float& weight : weights) weight *= factor;
  return total > 0.0f ? most + ptx::log2(total) : prefixpack::kMinusInfinity;
}

// Sums the warps' accumulators: warp w has row w, a lane four dimensions. Returns the row's log-sum-exp.
PREFIXPACK_DEVICE float sum_warps(ptx::SharedAddress sums, ptx::SharedAddress states, int32_t rows, float (&out)[4]) {
  const int32_t lane = ptx::thread_index() % 32, row = ptx::thread_index() / 32;
  SoftmaxState state[1] = {prefixpack::softmax_identity()};
  if (lane < kFewWarps) {
    uint32_t words[2];
    ptx::load_shared(states + static_cast<ptx::SharedAddress>((lane * 8 + row) * 8), words);
    std::memcpy(&state[0].max, &words[0], 4);
    std::memcpy(&state[0].sum, &words[1], 4);
  }
  float weights[1];
  const float lse = normalize(state, weights);
#pragma unroll
  for (int32_t warp = 0; warp < kFewWarps; ++warp) {
    float part[4];
    const int32_t at = ((warp * rows + row) * kFewRowFloats + lane * 4) * 4;
    ptx::load_shared(sums + static_cast<ptx::SharedAddress>(at), part);
    const float weight = ptx::shuffle(weights[0], warp);
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) out[i] = ptx::fma(weight, part[i], out[i]);
  }
  return lse;
}

// Combines the splits of this warp's row, always in the same order. first: of partials and lse; stride: of a split.
PREFIXPACK_DEVICE void combine_splits(const FewStep& step, int64_t first, int64_t stride, float (&out)[4]) {
  constexpr int32_t kBatch = 8;
  const int32_t lane = ptx::thread_index() % 32;
  SoftmaxState states[kMostSplits / 32];
  float weights[kMostSplits / 32], parts[kBatch][4];
  const auto load = [&](int32_t begin) {
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const int32_t split = begin + i < step.splits ? begin + i : step.splits - 1;
      ptx::load_relaxed(step.partials + (first + split * stride) * 128 + lane * 4, parts[i]);
    }
  };
#pragma unroll
  for (int32_t i = 0; i < kMostSplits / 32; ++i) {
    states[i] = prefixpack::softmax_identity();
    if (i * 32 + lane < step.splits) states[i] = {ptx::load_relaxed(step.lse + first + (i * 32 + lane) * stride), 1.0f};
  }
  load(0);  // in flight together with what the weights need
  ptx::warp_sync();
  normalize(states, weights);
#pragma unroll
  for (int32_t word = 0; word < kMostSplits / 32; ++word) {
#pragma unroll 1
    for (int32_t begin = 0; begin < 32 && word * 32 + begin < step.splits; begin += kBatch) {
      if (word + begin > 0) load(word * 32 + begin);
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        const float weight = ptx::shuffle(weights[word], begin + i);  // 0 beyond the last split
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) out[j] = ptx::fma(weight, parts[i][j], out[j]);
      }
    }
  }
}

// shared: kFewShared<Stages>. Grid: [requests, splits, heads].
template <int Stages>
PREFIXPACK_DEVICE void run_few(const FewStep& step, char* shared) {
  using Stream = WarpStream<Stages, OneRange>;
  const int32_t lane = ptx::thread_index() % 32, warp = ptx::thread_index() / 32, rows = step.pool.rows;
  const int32_t head = ptx::cta_index() % step.pool.heads, rest = ptx::cta_index() / step.pool.heads;
  const int32_t split = rest % step.splits, request = rest / step.splits;
  const Request of = step.requests[request];
  // Each warp has a whole number of stages.
  const int32_t share = (of.tokens + step.splits * kFewWarps * 16 - 1) / (step.splits * kFewWarps * 16) * 16;
  const int32_t begin = (split * kFewWarps + warp) * share, left = of.tokens - begin;
  WarpRange range{of.row * step.slot_stride + begin, left < share ? left : share, head,
                  (request * step.pool.heads + head) * rows, -1};
  if (lane < range.keys) range.first_slots = step.pool.slots[range.slots_at + lane];
  ptx::warp_sync();
  OneRange source(range);
  const ptx::SharedAddress base = ptx::shared_address(shared);
  Stream stream(step.pool, source, base + static_cast<ptx::SharedAddress>(warp * Stream::kBytes));
  stream.run([](Stream&) {});

  // Accumulators of the warps overlay their rings.
  ptx::cta_sync();
  const ptx::SharedAddress states = base + kFewWarps * 8 * kFewRowFloats * 4, arrived_at = states + kFewWarps * 8 * 8;
  static_assert(kFewWarps * (8 * kFewRowFloats * 4 + 8 * 8) + 16 <= kFewShared<Stages>);
#pragma unroll
  for (int32_t j = 0; j < 2; ++j) {
    SoftmaxState state = stream.states()[j];
    prefixpack::column_sum(state.sum);
    const int32_t row = lane % 4 * 2 + j;
    if (row < rows) {
      const int32_t at = ((warp * rows + row) * kFewRowFloats + lane / 4) * 4;
#pragma unroll
      for (int32_t i = 0; i < 16; ++i) {
        ptx::store_shared(base + static_cast<ptx::SharedAddress>(at + i * 32),
                          stream.accumulators()[i / 2][i % 2 * 2 + j]);
      }
      const int32_t state_at = (warp * 8 + row) * 8;
      if (lane < 4) ptx::store_shared_pair(states + static_cast<ptx::SharedAddress>(state_at), state.max, state.sum);
    }
  }
  ptx::cta_sync();
  float out[4] = {};
  const int64_t row = int64_t{range.row} + warp;
  const int64_t stride = step.pool.heads * rows;
  const int64_t first = (int64_t{request} * step.splits * step.pool.heads + head) * rows + warp;
  if (ptx::uniform(warp < rows)) {
    const float lse = sum_warps(base, states, rows, out);
    if (step.splits > 1) {
      ptx::store_quad(step.partials + (first + split * stride) * 128 + lane * 4, out);
      if (lane == 0) step.lse[first + split * stride] = lse;
    }
  }
  if (step.splits > 1) {
    ptx::cta_sync();
    int32_t* const semaphore = step.semaphores + request * step.pool.heads + head;
    if (ptx::thread_index() == 0) {
      const int32_t before = ptx::atomic_add_release(semaphore, 1);
      ptx::store_shared(arrived_at, static_cast<float>(before));
      if (before == step.splits - 1) *semaphore = 0;
    }
    ptx::cta_sync();
    uint32_t word[2];
    float before;
    ptx::load_shared(arrived_at, word);
    std::memcpy(&before, &word[0], 4);
    if (before != static_cast<float>(step.splits - 1)) return;
    out[0] = out[1] = out[2] = out[3] = 0.0f;
    if (ptx::uniform(warp < rows)) combine_splits(step, first, stride, out);
  }
  if (warp < rows) {
    ptx::store_words(step.output + row * 128 + lane * 4, ptx::BFloat16::pack(out[0], out[1]),
                     ptx::BFloat16::pack(out[2], out[3]));
  }
}

}  // namespace probe
