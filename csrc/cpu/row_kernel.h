// Items of few rows, bound by memory: dot products directly from the gathered rows, dimensions along the vector lanes,
// no converted copy. Part of kernels.h; see isa.h.

constexpr int kRowKeys = 64;  // KV positions per block
constexpr int kRowScoreStride = kRowKeys + 16;
// KV is prefetched a block ahead, and again this many positions ahead: processors drop prefetches while too many are in
// flight.
constexpr int kPrefetchAgain = 16;

struct RowState {
  float* q;        // [rows][head_dim]
  float* acc;      // [rows][head_dim]
  float* scores;   // [rows][kRowScoreStride]
  float* largest;  // [rows]
  float* sum;      // [rows]

  RowState(Scratch& scratch, int32_t rows, int32_t head_dim) {
    q = scratch.floats(static_cast<size_t>(rows) * (2 * head_dim + kRowScoreStride + 2));
    acc = q + rows * head_dim;
    scores = acc + rows * head_dim;
    largest = scores + rows * kRowScoreStride;
    sum = largest + rows;
  }
};

// KV rows of `count` positions, named by `slots`.
struct KvRows {
  const char* base;
  int64_t stride;  // bytes
  const int32_t* slots;
  int32_t count;

  PREFIXPACK_INLINE const char* operator[](int32_t i) const { return base + slots[i] * stride; }
};

// Up to `most` rows of a tensor of the task, from position `begin` on. Strides in elements.
template <DType kType>
PREFIXPACK_INLINE KvRows rows_of(const ItemTask& task, const void* tensor, int64_t head_stride, int64_t slot_stride,
                                 int32_t begin, int32_t most) {
  constexpr int kBytes = bytes_of(kType);
  const int32_t left = task.kv_end - begin;
  return {static_cast<const char*>(tensor) + task.kv_head * head_stride * kBytes, slot_stride * kBytes,
          task.slots + begin, left < most ? left : most};
}
template <DType kType>
PREFIXPACK_INLINE KvRows keys_of(const ItemTask& task, int32_t begin, int32_t most) {
  const AttentionParams& p = *task.params;
  return rows_of<kType>(task, p.k, p.k_head_stride, p.k_slot_stride, begin, most);
}
template <DType kType>
PREFIXPACK_INLINE KvRows values_of(const ItemTask& task, int32_t begin, int32_t most) {
  const AttentionParams& p = *task.params;
  return rows_of<kType>(task, p.v, p.v_head_stride, p.v_slot_stride, begin, most);
}

// scores[r][i] = q[r] . keys[i]; prefetches the rows of `next` meanwhile.
template <DType kType, int R>
inline void dot_rows(const float* q, int32_t head_dim, KvRows keys, KvRows next, bool asks_again, float* scores) {
  using S = Simd<kLanes>;
  using F = typename S::F;
  constexpr int kBytes = bytes_of(kType);
  const int32_t again = asks_again ? keys.count - kPrefetchAgain : 0;
  for (int32_t i = 0; i < keys.count; i += 4) {
    const char* k[4];
    PREFIXPACK_UNROLL
    for (int j = 0; j < 4; ++j) {
      const int32_t index =
          i + j < keys.count ? i + j : keys.count - 1;  // rows beyond the end are computed and not used
      k[j] = keys[index];
      if (index < again) prefetch_row(keys[index + kPrefetchAgain], head_dim * kBytes);
      if (index < next.count) prefetch_row(next[index], head_dim * kBytes);
    }
    F sums[R][4];
    PREFIXPACK_UNROLL
    for (int r = 0; r < R; ++r) {
      PREFIXPACK_UNROLL
      for (int j = 0; j < 4; ++j) sums[r][j] = F{};
    }
    for (int32_t d = 0; d < head_dim; d += kLanes) {
      F row[4];
      PREFIXPACK_UNROLL
      for (int j = 0; j < 4; ++j) row[j] = load_as_float<kType, kLanes>(k[j], d);
      PREFIXPACK_UNROLL
      for (int r = 0; r < R; ++r) {
        const F query = S::load(q + r * head_dim + d);
        PREFIXPACK_UNROLL
        for (int j = 0; j < 4; ++j) sums[r][j] += query * row[j];
      }
    }
    // Writes kLanes floats, of which four are results: the next keys overwrite the rest, and the stride has room.
    PREFIXPACK_UNROLL
    for (int r = 0; r < R; ++r) {
      S::store(scores + r * kRowScoreStride + i, S::sum_each(sums[r][0], sums[r][1], sums[r][2], sums[r][3]));
    }
  }
}

// acc[r][d] = acc[r][d] * decay[r] + sum of weights[r][i] * values[i][d], for C vectors of dimensions from d on.
template <DType kType, int R, int C>
inline void add_dimensions(const float* weights, KvRows values, KvRows next, bool asks_again, const float* decay,
                           int32_t d, int32_t head_dim, float* acc) {
  using S = Simd<kLanes>;
  using F = typename S::F;
  constexpr int kBytes = bytes_of(kType);
  F sums[R][C];
  PREFIXPACK_UNROLL
  for (int r = 0; r < R; ++r) {
    PREFIXPACK_UNROLL
    for (int c = 0; c < C; ++c) sums[r][c] = S::load(acc + r * head_dim + d + c * kLanes) * decay[r];
  }
  const int32_t again = asks_again && d == 0 ? values.count - kPrefetchAgain : 0;
  for (int32_t i = 0; i < values.count; ++i) {
    if (i < again) prefetch_row(values[i + kPrefetchAgain], head_dim * kBytes);
    if (i < next.count) prefetch_row(next[i], head_dim * kBytes);
    const char* row = values[i];
    F value[C];
    PREFIXPACK_UNROLL
    for (int c = 0; c < C; ++c) value[c] = load_as_float<kType, kLanes>(row, d + c * kLanes);
    PREFIXPACK_UNROLL
    for (int r = 0; r < R; ++r) {
      const float weight = weights[r * kRowScoreStride + i];
      PREFIXPACK_UNROLL
      for (int c = 0; c < C; ++c) sums[r][c] += value[c] * weight;
    }
  }
  PREFIXPACK_UNROLL
  for (int r = 0; r < R; ++r) {
    PREFIXPACK_UNROLL
    for (int c = 0; c < C; ++c) S::store(acc + r * head_dim + d + c * kLanes, sums[r][c]);
  }
}

template <DType kType, int R, int C>
PREFIXPACK_INLINE void add_values(const float* weights, KvRows values, KvRows next, bool asks_again, const float* decay,
                                  int32_t d, int32_t head_dim, float* acc) {
  for (; head_dim - d >= C * kLanes; d += C * kLanes) {
    add_dimensions<kType, R, C>(weights, values, next, asks_again, decay, d, head_dim, acc);
    next.count = 0;  // prefetched once
  }
  if constexpr (C > 1) add_values<kType, R, C / 2>(weights, values, next, asks_again, decay, d, head_dim, acc);
}

// Turns scores[0 .. count) into softmax weights against the running maximum; returns the decay of the sums so far.
// Scores outside [first, last] are masked, and so are those that `visible` hides; `last` is the query's own.
inline float softmax_step(const AttentionParams& p, float* scores, int32_t count, int32_t first, int32_t last,
                          uint64_t visible, float* largest, float* sum) {
  using S = Simd<kLanes>;
  using F = typename S::F;
  if (p.logit_cap > 0) {
    for (int32_t i = 0; i < count; i += kLanes)
      S::store(scores + i, cap_scores<kLanes>(S::load(scores + i), p.logit_cap));
  }
  for (int32_t i = 0; i < first; ++i) scores[i] = -kInfinity;
  for (int32_t i = last < 0 ? 0 : last + 1; i < count; ++i) scores[i] = -kInfinity;
  if (visible != ~uint64_t{0}) {
    for (int32_t i = 0; i < count; ++i) {
      if (is_hidden(visible, last - i)) scores[i] = -kInfinity;
    }
  }
  S::store(scores + count, S::splat(-kInfinity));
  F block_largest = S::splat(*largest);
  for (int32_t i = 0; i < count; i += kLanes) block_largest = S::max(block_largest, S::load(scores + i));
  const float shared = S::largest(block_largest);
  const float base = shared == -kInfinity ? 0 : shared;
  const float decay = S::exp2(S::splat(*largest - base))[0];
  F sums{};
  for (int32_t i = 0; i < count; i += kLanes) {
    const F weight = S::exp2(S::load(scores + i) - base);
    S::store(scores + i, weight);
    sums += weight;
  }
  *sum = *sum * decay + S::sum(sums);
  *largest = shared;
  return decay;
}

// R rows of the item from `row` on, against one block of positions.
template <DType kType, int R>
inline void add_keys_to_rows(const ItemTask& task, const RowState& state, int32_t row, int32_t begin, KvRows keys,
                             KvRows values, KvRows next_keys, KvRows next_values) {
  const AttentionParams& p = *task.params;
  const int32_t group = p.q_heads / p.kv_heads;
  float* scores = state.scores + row * kRowScoreStride;
  dot_rows<kType, R>(state.q + row * p.head_dim, p.head_dim, keys, row == 0 ? next_keys : KvRows{}, row == 0, scores);
  float decay[R];
  for (int r = 0; r < R; ++r) {
    const Row source = row_of(task, group, row + r);
    const int32_t first = first_visible(task, source.query) - begin, last = last_visible(task, source.query) - begin;
    decay[r] = softmax_step(p, scores + r * kRowScoreStride, keys.count, first < keys.count ? first : keys.count, last,
                            visible_mask(task, source.query), state.largest + row + r, state.sum + row + r);
  }
  // Vectors whose accumulators fit in registers beside the converted values.
  constexpr int kVectors = R == 1 ? 8 : (kLanes == 16 ? 16 : 8) / (R == 3 ? 4 : R);
  add_values<kType, R, kVectors>(scores, values, row == 0 ? next_values : KvRows{}, row == 0, decay, 0, p.head_dim,
                                 state.acc + row * p.head_dim);
}

template <DType kType>
inline void run_rows(const ItemTask& task, Scratch& scratch) {
  const AttentionParams& p = *task.params;
  const int32_t group = p.q_heads / p.kv_heads;
  const int32_t rows = task.item->query_count * group;
  const int32_t head_dim = p.head_dim;
  const RowState state(scratch, rows, head_dim);
  for (int32_t row = 0; row < rows; ++row) {
    prefetch_target(target_of(task, row_of(task, group, row)), head_dim);
    load_query_row<kLanes>(task, row_of(task, group, row), query_factor(p), state.q + row * head_dim);
    for (int32_t d = 0; d < head_dim; ++d) state.acc[row * head_dim + d] = 0;
    state.largest[row] = -kInfinity;
    state.sum[row] = 0;
  }
  for (int32_t begin = task.kv_begin; begin < task.kv_end; begin += kRowKeys) {
    const KvRows keys = keys_of<kType>(task, begin, kRowKeys);
    const KvRows values = values_of<kType>(task, begin, kRowKeys);
    KvRows next_keys = keys_of<kType>(task, begin + keys.count, kRowKeys);
    KvRows next_values = values_of<kType>(task, begin + keys.count, kRowKeys);
    if (next_keys.count == 0 && task.next != nullptr) {
      next_keys = keys_of<kType>(*task.next, task.next->kv_begin, kRowKeys);
      next_values = values_of<kType>(*task.next, task.next->kv_begin, kRowKeys);
      prefetch_query_row(*task.next, row_of(*task.next, group, 0));
    }
    int32_t row = 0;
    for (; rows - row >= 4; row += 4)
      add_keys_to_rows<kType, 4>(task, state, row, begin, keys, values, next_keys, next_values);
    if (rows - row == 3) add_keys_to_rows<kType, 3>(task, state, row, begin, keys, values, next_keys, next_values);
    if (rows - row == 2) add_keys_to_rows<kType, 2>(task, state, row, begin, keys, values, next_keys, next_values);
    if (rows - row == 1) add_keys_to_rows<kType, 1>(task, state, row, begin, keys, values, next_keys, next_values);
  }
  for (int32_t row = 0; row < rows; ++row) {
    const Row source = row_of(task, group, row);
    const RowTarget target = target_of(task, source);
    const float factor = finish_row(p, target, source.q_head, state.largest[row], state.sum[row]);
    const float* acc = state.acc + row * head_dim;
    for (int32_t d = 0; d < head_dim; d += kLanes) {
      store_as<kLanes>(target.dtype, target.base, target.element + d, Simd<kLanes>::load(acc + d) * factor);
    }
  }
}
