// Rows of an item's tile: query loads, visibility, result targets. A row is one query head of one query. Part of
// kernels.h; see isa.h.

constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLn2 = 0x1.62e430p-1f;
constexpr float kInfinity = __builtin_inff();

// Factor of query rows that gives scores in units of log2, so that exp2 serves for the softmax. With a soft cap, tanh
// is applied first and the unit with it.
PREFIXPACK_INLINE float query_factor(const AttentionParams& p) {
  return p.logit_cap > 0 ? p.scale / p.logit_cap * (2 * kLog2E) : p.scale * kLog2E;
}

template <int W>
PREFIXPACK_INLINE typename Simd<W>::F cap_scores(typename Simd<W>::F s, float logit_cap) {
  return Simd<W>::tanh_of_log2(s) * (logit_cap * kLog2E);
}

// Four cache lines per iteration, because the loop costs as much as the prefetch.
PREFIXPACK_INLINE void prefetch_row(const char* row, int32_t bytes) {
  int32_t i = 0;
  for (; bytes - i >= 256; i += 256) {
    __builtin_prefetch(row + i, 0, 2);
    __builtin_prefetch(row + i + 64, 0, 2);
    __builtin_prefetch(row + i + 128, 0, 2);
    __builtin_prefetch(row + i + 192, 0, 2);
  }
  for (; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

struct Row {
  int32_t query;  // entry of Plan::query_token
  int32_t q_head;
};

PREFIXPACK_INLINE Row row_of(const ItemTask& task, int32_t group, int32_t row) {
  const int32_t query = row / group;
  return {task.item->query_begin + query, task.kv_head * group + (row - query * group)};
}

// First and last visible KV position of a query.
PREFIXPACK_INLINE int32_t first_visible(const ItemTask& task, int32_t query) {
  const int32_t window_left = task.params->window_left;
  const int32_t position = task.positions[query];
  return window_left >= 0 && position > window_left ? position - window_left : 0;
}
PREFIXPACK_INLINE int32_t last_visible(const ItemTask& task, int32_t query) { return task.positions[query]; }

// Positions up to its own that a query does not see although they are in its window: other branches of a tree of
// drafts.
PREFIXPACK_INLINE uint64_t visible_mask(const ItemTask& task, int32_t query) {
  const uint64_t* visible = task.params->visible;
  return visible == nullptr ? ~uint64_t{0} : visible[task.plan->query_token[query]];
}
// Whether the mask hides the position `back` before the query's own.
PREFIXPACK_INLINE bool is_hidden(uint64_t visible, int32_t back) {
  return back >= 0 && back < kMaskedPositions && (visible >> back & 1) == 0;
}

// dst[d] = q row * factor, d < head_dim.
template <DType kType, int W>
PREFIXPACK_INLINE void load_query(const AttentionParams& p, int64_t element, float factor, float* dst) {
  for (int32_t d = 0; d < p.head_dim; d += W) {
    Simd<W>::store(dst + d, load_as_float<kType, W>(p.q, element + d) * factor);
  }
}

PREFIXPACK_INLINE int64_t query_element(const ItemTask& task, Row row) {
  const AttentionParams& p = *task.params;
  return task.plan->query_token[row.query] * p.q_token_stride + row.q_head * p.q_head_stride;
}

PREFIXPACK_INLINE void prefetch_query_row(const ItemTask& task, Row row) {
  const AttentionParams& p = *task.params;
  const int bytes = bytes_of(p.dtype);
  prefetch_row(static_cast<const char*>(p.q) + query_element(task, row) * bytes, p.head_dim * bytes);
}

template <int W>
inline void load_query_row(const ItemTask& task, Row row, float factor, float* dst) {
  const AttentionParams& p = *task.params;
  const int64_t element = query_element(task, row);
  switch (p.dtype) {
    case DType::kFloat32:
      return load_query<DType::kFloat32, W>(p, element, factor, dst);
    case DType::kBFloat16:
      return load_query<DType::kBFloat16, W>(p, element, factor, dst);
    case DType::kFloat16:
      return load_query<DType::kFloat16, W>(p, element, factor, dst);
    case DType::kFloat8E4M3:
      __builtin_unreachable();  // KV only
  }
}

// Target of a row's result: the output, or the row's partial.
struct RowTarget {
  void* base;
  int64_t element;
  DType dtype;
  float* lse;  // or nullptr
  bool is_final;
};

inline RowTarget target_of(const ItemTask& task, Row row) {
  const AttentionParams& p = *task.params;
  const WorkItem& item = *task.item;
  if (item.partial_begin == kWriteThrough) {
    const int64_t token = task.plan->query_token[row.query];
    float* lse = p.lse == nullptr ? nullptr : p.lse + token * p.lse_token_stride + row.q_head;
    return {p.o, token * p.o_token_stride + row.q_head * p.o_head_stride, p.dtype, lse, true};
  }
  const int64_t of_query = item.partial_begin + (row.query - item.query_begin);
  const int64_t partial = of_query * p.q_heads + row.q_head;
  return {p.partial_o, partial * p.head_dim, DType::kFloat32, p.partial_lse + partial, false};
}

// A store to a missing cache line takes as long as a load.
PREFIXPACK_INLINE void prefetch_target(const RowTarget& target, int32_t head_dim) {
  const int bytes = bytes_of(target.dtype);
  char* const row = static_cast<char*>(target.base) + target.element * bytes;
  for (int32_t i = 0; i < head_dim * bytes; i += 64) __builtin_prefetch(row + i, 1, 3);
}

// Factor of a row's accumulators from its maximum and sum of exponentials (base 2), v_scale included. Writes the row's
// lse. The sink counts once, so partials leave it to the combine. A row without visible keys is 0 with lse -inf.
inline float finish_row(const AttentionParams& p, const RowTarget& target, int32_t q_head, float largest, float sum) {
  float rescale = 1;
  if (target.is_final && p.sinks != nullptr) {
    const float sink = p.sinks[q_head] * kLog2E;
    const float shared = sink > largest ? sink : largest;
    if (shared > -kInfinity) {
      rescale = __builtin_exp2f(largest - shared);
      sum = sum * rescale + __builtin_exp2f(sink - shared);
      largest = shared;
    }
  }
  if (target.lse != nullptr) *target.lse = sum == 0 ? -kInfinity : (largest + __builtin_log2f(sum)) * kLn2;
  return sum == 0 ? 0 : rescale / sum * p.v_scale;
}
