// Online softmax over the accumulator fragments of mma.m16n8k16: a thread holds two rows, four lanes hold each row.
#pragma once

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// Masks the scores of row `half` of the fragment. first: KV position of the thread's first column.
template <int KeyBlocks>
PREFIXPACK_DEVICE void mask_scores(float (&scores)[KeyBlocks][4], int32_t half, int32_t first, int32_t kv_end,
                                   int32_t position, int32_t window_left) {
  const VisibleKeys seen = visible_keys(first, kv_end, position, window_left);
#pragma unroll
  for (int32_t i = 0; i < 2 * KeyBlocks; ++i) {
    const int32_t key = i / 2 * 8 + i % 2;
    if (key >= seen.end || key < seen.begin) scores[i / 2][2 * half + i % 2] = kMinusInfinity;
  }
}

// Masks the scores that a query of a tree does not see. ahead: its position, from that of the thread's first column.
template <int KeyBlocks>
PREFIXPACK_DEVICE void mask_hidden(float (&scores)[KeyBlocks][4], int32_t half, uint64_t hidden, int32_t ahead) {
  const uint64_t keys = hidden_keys(hidden, ahead);
#pragma unroll
  for (int32_t i = 0; i < 2 * KeyBlocks; ++i) {
    if (keys >> (i / 2 * 8 + i % 2) & 1) scores[i / 2][2 * half + i % 2] = kMinusInfinity;
  }
}

// Masks the scores of a transposed fragment, whose columns are two queries. first: KV position of the first row.
template <bool kTrees>
PREFIXPACK_DEVICE void mask_transposed(float (&scores)[4], int32_t first, int32_t kv_end, const int32_t (&position)[2],
                                       const uint64_t (&hidden)[2], int32_t window_left) {
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t kv_position = first + i / 2 * 8, query = position[i % 2];
    const bool hides = kTrees && (hidden_keys(hidden[i % 2], query - kv_position) & 1) != 0;
    if (hides || kv_position >= kv_end || !visible(kv_position, query, window_left)) scores[i] = kMinusInfinity;
  }
}

// Packs the weights of 16 keys as the A operand of P*V.
template <class Element, int KeyBlocks>
PREFIXPACK_DEVICE void pack_weights(const float (&weights)[KeyBlocks][4], int32_t step, uint32_t (&packed)[4]) {
  packed[0] = Element::pack(weights[2 * step][0], weights[2 * step][1]);
  packed[1] = Element::pack(weights[2 * step][2], weights[2 * step][3]);
  packed[2] = Element::pack(weights[2 * step + 1][0], weights[2 * step + 1][1]);
  packed[3] = Element::pack(weights[2 * step + 1][2], weights[2 * step + 1][3]);
}

// Lazy rescaling, as in FlashAttention-4: the maximum in use may lag the largest logit by this power of two. Sums then
// are larger than necessary, which is harmless, and most tiles need neither a rescale nor a shuffle.
constexpr float kRescaleThreshold = 8.0f;

class Softmax {
 public:
  PREFIXPACK_DEVICE explicit Softmax(const AttentionParams& attention)
      : cap_(attention.logit_cap),
        to_cap_(attention.logit_cap > 0.0f ? 2.0f * kLog2E * attention.scale * ptx::reciprocal(attention.logit_cap)
                                           : 0.0f),
        to_base_2_(attention.logit_cap > 0.0f ? kLog2E : attention.scale * kLog2E) {}

  // Applies the soft cap. add() applies the scale.
  PREFIXPACK_DEVICE void transform(float (&scores)[4]) const {
    if (cap_ > 0.0f) {
#pragma unroll
      for (int32_t i = 0; i < 4; ++i) scores[i] = soft_cap(scores[i]);
    }
  }
  template <int KeyBlocks>
  PREFIXPACK_DEVICE void transform(float (&scores)[KeyBlocks][4]) const {
    if (cap_ > 0.0f) {
#pragma unroll
      for (int32_t i = 0; i < 4 * KeyBlocks; ++i) {
        scores[i / 4][i % 4] = soft_cap(scores[i / 4][i % 4]);
      }
    }
  }

  // Replaces scores by weights 2^(logit - running maximum) of both rows, and rescales sums and accumulators to the new
  // maximum, if there is one. The sums are this thread's share.
  template <int KeyBlocks, int ValueBlocks>
  PREFIXPACK_DEVICE void add(float (&scores)[KeyBlocks][4], SoftmaxState (&state)[2],
                             float (&output)[ValueBlocks][4]) const {
    float max[2];
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      max[half] = scores[0][2 * half];
#pragma unroll
      for (int32_t i = 1; i < 2 * KeyBlocks; ++i) max[half] = ptx::max(max[half], scores[i / 2][2 * half + i % 2]);
    }
    if (exceeds_threshold(max, state)) {
      for (int32_t mask = 1; mask <= 2; mask *= 2) {
        max[0] = ptx::max(max[0], ptx::shuffle_xor(max[0], mask));
        max[1] = ptx::max(max[1], ptx::shuffle_xor(max[1], mask));
      }
#pragma unroll
      for (int32_t half = 0; half < 2; ++half) {
        const float rescale = advance(max[half], state[half]);
#pragma unroll
        for (int32_t column = 0; column < ValueBlocks; ++column) {
          output[column][2 * half] *= rescale;
          output[column][2 * half + 1] *= rescale;
        }
      }
    }
#pragma unroll
    for (int32_t half = 0; half < 2; ++half) {
      const float base = -safe_max(state[half].max);
#pragma unroll
      for (int32_t i = 0; i < 2 * KeyBlocks; ++i) {
        float& score = scores[i / 2][2 * half + i % 2];
        score = ptx::exp2(ptx::fma(score, to_base_2_, base));
        state[half].sum += score;
      }
    }
  }

  // The same for transposed fragments, whose columns are query rows: two columns per thread, each over eight lanes.
  template <int ValueBlocks>
  PREFIXPACK_DEVICE void add_transposed(float (&scores)[4], SoftmaxState (&state)[2],
                                        float (&output)[ValueBlocks][4]) const {
    float max[2] = {ptx::max(scores[0], scores[2]), ptx::max(scores[1], scores[3])};
    if (exceeds_threshold(max, state)) {
#pragma unroll
      for (int32_t mask = 4; mask <= 16; mask *= 2) {
        max[0] = ptx::max(max[0], ptx::shuffle_xor(max[0], mask));
        max[1] = ptx::max(max[1], ptx::shuffle_xor(max[1], mask));
      }
#pragma unroll
      for (int32_t column = 0; column < 2; ++column) {
        const float rescale = advance(max[column], state[column]);
#pragma unroll
        for (int32_t block = 0; block < ValueBlocks; ++block) {
          output[block][column] *= rescale;
          output[block][2 + column] *= rescale;
        }
      }
    }
#pragma unroll
    for (int32_t i = 0; i < 4; ++i) {
      scores[i] = ptx::exp2(ptx::fma(scores[i], to_base_2_, -safe_max(state[i % 2].max)));
      state[i % 2].sum += scores[i];
    }
  }

 private:
  // cap * tanh(score * scale / cap) = cap - 2 cap / (1 + e^(2 score scale / cap)), with an absolute error below
  // 1e-6 cap. The library's tanh branches, and would add its code to every kernel for a rare option.
  PREFIXPACK_DEVICE float soft_cap(float score) const {
    return ptx::fma(-2.0f * cap_, ptx::reciprocal(1.0f + ptx::exp2(score * to_cap_)), cap_);
  }

  // Whether any lane's maximum exceeds the threshold.
  PREFIXPACK_DEVICE bool exceeds_threshold(const float (&max)[2], const SoftmaxState (&state)[2]) const {
    return ptx::any(max[0] * to_base_2_ > state[0].max + kRescaleThreshold ||
                    max[1] * to_base_2_ > state[1].max + kRescaleThreshold);
  }

  // Advances a state to the maximum of these scores if it lags too far; returns the factor of the row's accumulators.
  // Other rows must not matter: unused rows of a tile hold arbitrary values.
  PREFIXPACK_DEVICE float advance(float max_score, SoftmaxState& state) const {
    const float seen = max_score * to_base_2_, max = seen > state.max + kRescaleThreshold ? seen : state.max;
    const float rescale = ptx::exp2(state.max - safe_max(max));
    state = {max, state.sum * rescale};
    return rescale;
  }

  const float cap_, to_cap_;  // to_cap_: factor of a score in the exponent of soft_cap()
  const float to_base_2_;
};

PREFIXPACK_DEVICE void quad_sum(float& sum) {
  sum += ptx::shuffle_xor(sum, 1);
  sum += ptx::shuffle_xor(sum, 2);
}

PREFIXPACK_DEVICE void column_sum(float& sum) {
  sum += ptx::shuffle_xor(sum, 4);
  sum += ptx::shuffle_xor(sum, 8);
  sum += ptx::shuffle_xor(sum, 16);
}

}  // namespace prefixpack
