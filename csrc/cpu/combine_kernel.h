// Combine of a query's partials, in the order of Plan::combine_partial. Part of kernels.h; see isa.h.

inline void combine_query(const Plan& plan, const AttentionParams& p, int32_t combine) {
  using S = Simd<kLanes>;
  const int64_t token = plan.query_token[plan.combine_query[combine]];
  const int32_t* list = plan.combine_partial.data() + plan.combine_offset[combine];
  const int32_t count = plan.combine_offset[combine + 1] - plan.combine_offset[combine];
  for (int32_t head = 0; head < p.q_heads; ++head) {
    float largest = p.sinks == nullptr ? -kInfinity : p.sinks[head];
    for (int32_t i = 0; i < count; ++i) {
      const float lse = p.partial_lse[static_cast<int64_t>(list[i]) * p.q_heads + head];
      largest = lse > largest ? lse : largest;
    }
    const float base = largest > -kInfinity ? largest : 0;
    float sum = p.sinks == nullptr ? 0 : __builtin_exp2f((p.sinks[head] - base) * kLog2E);
    alignas(64) float acc[256];
    for (int32_t d = 0; d < p.head_dim; ++d) acc[d] = 0;
    for (int32_t i = 0; i < count; ++i) {
      const int64_t partial = static_cast<int64_t>(list[i]) * p.q_heads + head;
      const float weight = __builtin_exp2f((p.partial_lse[partial] - base) * kLog2E);
      if (weight == 0) continue;
      sum += weight;
      const float* o = p.partial_o + partial * p.head_dim;
      for (int32_t d = 0; d < p.head_dim; d += kLanes) S::store(acc + d, S::load(acc + d) + S::load(o + d) * weight);
    }
    const float factor = sum == 0 ? 0 : 1 / sum;
    const int64_t element = token * p.o_token_stride + head * p.o_head_stride;
    for (int32_t d = 0; d < p.head_dim; d += kLanes)
      store_as<kLanes>(p.dtype, p.o, element + d, S::load(acc + d) * factor);
    if (p.lse != nullptr) {
      p.lse[token * p.lse_token_stride + head] = sum == 0 ? -kInfinity : base + __builtin_log2f(sum) * kLn2;
    }
  }
}
