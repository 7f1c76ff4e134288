// What a plan is run on: tensors as raw pointers and strides (in elements), and the attention variant.
#pragma once

#include <cstdint>

namespace prefixpack {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat8E4M3 = 3 };  // the last: KV only

// Positions, ending with a query's own, that AttentionParams::visible tells apart.
constexpr int32_t kMaskedPositions = 64;

struct AttentionParams {
  const void* q;                          // [num_tokens, q_heads, head_dim], dtype `dtype`
  const void* k;                          // [kv_slots, kv_heads, head_dim], dtype `kv_dtype`
  const void* v;                          // as k
  void* o;                                // as q
  float* lse;                             // [num_tokens, q_heads] natural logarithm, or nullptr
  int64_t q_token_stride, q_head_stride;  // the innermost stride of q, k, v and o is 1
  int64_t k_slot_stride, k_head_stride;
  int64_t v_slot_stride, v_head_stride;
  int64_t o_token_stride, o_head_stride;
  int64_t lse_token_stride;
  const int32_t* req_to_token;  // [max_requests, max_context] KV slot of a position
  int64_t req_to_token_stride;
  const int64_t* req_pool_indices;  // [num_requests] row of req_to_token by batch index
  const int64_t* seq_lens;          // [num_requests] KV length, the step's own tokens included
  // [num_tokens] bit j: the query sees the position j before its own; earlier positions are visible. nullptr: all are.
  const uint64_t* visible;
  const float* sinks;  // [q_heads] attention sink logits, or nullptr
  float* partial_o;    // [num_partials, q_heads, head_dim] workspace
  float* partial_lse;  // [num_partials, q_heads] workspace, natural logarithm
  DType dtype;
  DType kv_dtype;
  int32_t q_heads, kv_heads, head_dim;
  int32_t window_left;  // visible positions are >= position - window_left; negative: no window
  float scale;          // softmax scale, times what stored keys are multiplied by
  float v_scale;        // what stored values are multiplied by
  float logit_cap;      // logits become cap * tanh(logit / cap); 0: off
};

}  // namespace prefixpack
