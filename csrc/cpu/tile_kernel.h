// Items of many rows. Rows lie along the vector lanes, so that the softmax needs no cross-lane operation. Keys and
// values are converted once per block of positions and then broadcast. Part of kernels.h; see isa.h.

constexpr int kTileKeys = 64;  // KV positions per block
constexpr int kKvStride =
    256 + 16;                  // floats between converted rows; not a power of two, to spread rows over the sets of L1
constexpr int kRowsAhead = 6;  // prefetch distance in rows
constexpr int kRowAlign = 16;  // row padding

struct TileState {
  float* k;       // [kTileKeys][kKvStride] of the current block of positions
  float* v;       // as k
  float* next_k;  // as k, of the next block
  float* next_v;
  float* q;           // by block of rows: [head_dim][rows of the block]
  float* acc;         // as q
  float* largest;     // [rows] running maximum, in units of log2
  float* sum;         // [rows] sum of exponentials
  int32_t* first;     // [rows] first visible position
  int32_t* last;      // [rows] last visible position
  uint64_t* visible;  // [rows] see AttentionParams

  TileState(Scratch& scratch, int32_t rows, int32_t head_dim) {
    const size_t padded = (rows + kRowAlign - 1) / kRowAlign * kRowAlign;
    k = scratch.floats(4 * kTileKeys * kKvStride + padded * (2 * head_dim + 6));
    v = k + kTileKeys * kKvStride;
    next_k = v + kTileKeys * kKvStride;
    next_v = next_k + kTileKeys * kKvStride;
    q = next_v + kTileKeys * kKvStride;
    acc = q + padded * head_dim;
    largest = acc + padded * head_dim;
    sum = largest + padded;
    first = reinterpret_cast<int32_t*>(sum + padded);
    last = first + padded;
    visible = reinterpret_cast<uint64_t*>(last + padded);
  }

  void turn_to_next_block() {
    float* const k_done = k;
    float* const v_done = v;
    k = next_k;
    v = next_v;
    next_k = k_done;
    next_v = v_done;
  }
};

// KV rows that will be read soon, prefetched a few at a time between other work: a burst of prefetches would stall the
// loads behind it.
struct KvAhead {
  KvRows keys;
  KvRows values;
  int32_t row_bytes;
  int32_t asked;
  int32_t end;

  PREFIXPACK_INLINE void ask() {
    if (asked >= end) return;
    prefetch_row(keys[asked], row_bytes);
    prefetch_row(values[asked], row_bytes);
    ++asked;
  }
};

// Converted KV positions [begin, end).
struct KeyBlock {
  int32_t begin;
  int32_t end;
};

// Block of W * V rows.
template <int W, int V>
struct TileBlock {
  using S = Simd<W>;
  using F = typename S::F;
  static constexpr int kRows = W * V;

  static inline void start(const ItemTask& task, const TileState& state, int32_t group, int32_t row, int32_t rows) {
    const AttentionParams& p = *task.params;
    const float factor = query_factor(p);
    const int32_t head_dim = p.head_dim;
    const int32_t all_rows = task.item->query_count * group;
    float* q = state.q + static_cast<int64_t>(row) * head_dim;
    alignas(64) float gathered[W * 256];
    for (int v = 0; v < V; ++v) {
      for (int lane = 0; lane < W; ++lane) {
        const int32_t index = row + v * W + lane;
        // Lanes beyond the last row repeat it.
        const Row source = row_of(task, group, index < row + rows ? index : row + rows - 1);
        if (index + kRowsAhead < all_rows) prefetch_query_row(task, row_of(task, group, index + kRowsAhead));
        state.first[index] = first_visible(task, source.query);
        state.last[index] = last_visible(task, source.query);
        state.visible[index] = visible_mask(task, source.query);
        load_query_row<W>(task, source, factor, gathered + lane * head_dim);
      }
      for (int32_t d = 0; d < head_dim; d += W) {
        F block[W];
        PREFIXPACK_UNROLL
        for (int lane = 0; lane < W; ++lane) block[lane] = S::load(gathered + lane * head_dim + d);
        S::transpose(block);
        PREFIXPACK_UNROLL
        for (int i = 0; i < W; ++i) S::store(q + ((d + i) * V + v) * W, block[i]);
      }
      S::store(state.largest + row + v * W, S::splat(-kInfinity));
      S::store(state.sum + row + v * W, F{});
    }
    float* acc = state.acc + static_cast<int64_t>(row) * head_dim;
    for (int32_t i = 0; i < head_dim * V; ++i) S::store(acc + i * W, F{});
  }

  static inline void add_keys(const ItemTask& task, const TileState& state, int32_t row, KeyBlock keys,
                              KvAhead& ahead) {
    int32_t first_of_any = state.first[row], first_of_all = first_of_any;
    int32_t last_of_any = state.last[row], last_of_all = last_of_any;
    for (int i = 1; i < kRows; ++i) {
      const int32_t first = state.first[row + i], last = state.last[row + i];
      first_of_any = first < first_of_any ? first : first_of_any;
      first_of_all = first > first_of_all ? first : first_of_all;
      last_of_any = last > last_of_any ? last : last_of_any;
      last_of_all = last < last_of_all ? last : last_of_all;
    }
    if (keys.end <= first_of_any || keys.begin > last_of_any) return;
    const bool in_tree = task.params->visible != nullptr && keys.end + kMaskedPositions > last_of_all;
    const bool masked = keys.begin < first_of_all || keys.end - 1 > last_of_all || in_tree;

    alignas(64) float scores[(kTileKeys + kScoreKeys) * kRows];
    F largest[V];
    for (int v = 0; v < V; ++v) largest[v] = S::load(state.largest + row + v * W);
    const int32_t count = keys.end - keys.begin;
    constexpr int32_t kTail = kScoreKeys > 8 ? 8 : 4;
    int32_t key = 0;
    for (; count - key > kTail; key += kScoreKeys) {
      add_scores<kScoreKeys>(task, state, row, keys, key, masked, scores, largest, ahead);
    }
    if (count - key > 4) {
      add_scores<kTail>(task, state, row, keys, key, masked, scores, largest, ahead);
    } else if (count > key) {
      add_scores<4>(task, state, row, keys, key, masked, scores, largest, ahead);
    }

    F decay[V];
    for (int v = 0; v < V; ++v) {
      const F previous = S::load(state.largest + row + v * W);
      const F base = largest[v] == -kInfinity ? F{} : largest[v];  // row without visible keys so far
      decay[v] = S::exp2(previous - base);
      F sum = S::load(state.sum + row + v * W) * decay[v];
      for (int32_t i = 0; i < count; ++i) {
        float* s = scores + (i * V + v) * W;
        const F weight = S::exp2(S::load(s) - base);
        S::store(s, weight);
        sum += weight;
      }
      S::store(state.largest + row + v * W, largest[v]);
      S::store(state.sum + row + v * W, sum);
    }

    const int32_t head_dim = task.params->head_dim;
    float* acc = state.acc + static_cast<int64_t>(row) * head_dim;
    for (int32_t d = 0; d < head_dim; d += kValueDims) {
      ahead.ask();
      add_values(scores, count, state.v + d, decay, acc + static_cast<int64_t>(d) * kRows);
    }
  }

  static inline void finish(const ItemTask& task, const TileState& state, int32_t group, int32_t row, int32_t rows) {
    const AttentionParams& p = *task.params;
    const int32_t head_dim = p.head_dim;
    const float* acc = state.acc + static_cast<int64_t>(row) * head_dim;
    for (int v = 0; v < V; ++v) {
      const int32_t begin = row + v * W;
      const int32_t count = row + rows - begin < W ? row + rows - begin : W;
      if (count <= 0) return;
      RowTarget targets[W];
      alignas(64) float factors[W] = {};
      for (int32_t i = 0; i < count; ++i) {
        const Row source = row_of(task, group, begin + i);
        targets[i] = target_of(task, source);
        prefetch_target(targets[i], head_dim);
        factors[i] = finish_row(p, targets[i], source.q_head, state.largest[begin + i], state.sum[begin + i]);
      }
      const F factor = S::load(factors);
      for (int32_t d = 0; d < head_dim; d += W) {
        F block[W];
        PREFIXPACK_UNROLL
        for (int i = 0; i < W; ++i) block[i] = S::load(acc + ((d + i) * V + v) * W) * factor;
        S::transpose(block);
        alignas(64) float out[W * W];
        PREFIXPACK_UNROLL
        for (int i = 0; i < W; ++i) S::store(out + i * W, block[i]);
        for (int32_t i = 0; i < count; ++i) {
          store_as<W>(targets[i].dtype, targets[i].base, targets[i].element + d, S::load(out + i * W));
        }
      }
    }
  }

 private:
  // Scores of K keys from `key` on; `largest` includes those inside the block.
  template <int K>
  static PREFIXPACK_INLINE void add_scores(const ItemTask& task, const TileState& state, int32_t row, KeyBlock keys,
                                           int32_t key, bool masked, float* scores, F* largest, KvAhead& ahead) {
    const int32_t head_dim = task.params->head_dim;
    const float* q = state.q + static_cast<int64_t>(row) * head_dim;
    const float* const q_end = q + head_dim * kRows;
    const float* k = state.k + key * kKvStride;
    F sums[K][V];
    PREFIXPACK_UNROLL
    for (int i = 0; i < K; ++i) {
      PREFIXPACK_UNROLL
      for (int v = 0; v < V; ++v) sums[i][v] = F{};
    }
    while (q != q_end) {
      ahead.ask();
      // Narrow vectors make more calls that prefetch; in such short loops prefetches would cost more.
      const float* const stop = W < 16 ? q_end : q + 16 * kRows;
      for (; q != stop; q += kRows, ++k) {
        F rows[V];
        PREFIXPACK_UNROLL
        for (int v = 0; v < V; ++v) rows[v] = S::load(q + v * W);
        PREFIXPACK_UNROLL
        for (int i = 0; i < K; ++i) {
          const float element = k[i * kKvStride];
          PREFIXPACK_UNROLL
          for (int v = 0; v < V; ++v) sums[i][v] += rows[v] * element;
        }
      }
    }
    if (task.params->logit_cap > 0) {
      PREFIXPACK_UNROLL
      for (int i = 0; i < K; ++i) {
        PREFIXPACK_UNROLL
        for (int v = 0; v < V; ++v) sums[i][v] = cap_scores<W>(sums[i][v], task.params->logit_cap);
      }
    }
    const int32_t inside = keys.end - keys.begin - key;
    PREFIXPACK_UNROLL
    for (int i = 0; i < K; ++i) {
      PREFIXPACK_UNROLL
      for (int v = 0; v < V; ++v) {
        F score = sums[i][v];
        if (masked) {
          const int32_t position = keys.begin + key + i;
          auto hidden =
              (S::load(state.first + row + v * W) > position) | (S::load(state.last + row + v * W) < position);
          if (task.params->visible != nullptr) {
            alignas(64) int32_t lanes[W];
            for (int lane = 0; lane < W; ++lane) {
              const int32_t index = row + v * W + lane;
              lanes[lane] = is_hidden(state.visible[index], state.last[index] - position) ? -1 : 0;
            }
            hidden |= S::load(lanes);
          }
          score = hidden ? S::splat(-kInfinity) : score;
        }
        if (i < inside) largest[v] = S::max(largest[v], score);
        S::store(scores + ((key + i) * V + v) * W, score);
      }
    }
  }

  // acc = acc * decay + weights x values, for kValueDims dimensions.
  static PREFIXPACK_INLINE void add_values(const float* weights, int32_t count, const float* values, const F* decay,
                                           float* acc) {
    F sums[kValueDims][V];
    PREFIXPACK_UNROLL
    for (int d = 0; d < kValueDims; ++d) {
      PREFIXPACK_UNROLL
      for (int v = 0; v < V; ++v) sums[d][v] = S::load(acc + (d * V + v) * W) * decay[v];
    }
    for (const float* const end = weights + count * kRows; weights != end; weights += kRows, values += kKvStride) {
      F weight[V];
      PREFIXPACK_UNROLL
      for (int v = 0; v < V; ++v) weight[v] = S::load(weights + v * W);
      PREFIXPACK_UNROLL
      for (int d = 0; d < kValueDims; ++d) {
        const float element = values[d];
        PREFIXPACK_UNROLL
        for (int v = 0; v < V; ++v) sums[d][v] += weight[v] * element;
      }
    }
    PREFIXPACK_UNROLL
    for (int d = 0; d < kValueDims; ++d) {
      PREFIXPACK_UNROLL
      for (int v = 0; v < V; ++v) S::store(acc + (d * V + v) * W, sums[d][v]);
    }
  }
};

// dst[i] = rows[i] as fp32.
template <DType kType>
PREFIXPACK_INLINE void convert_row(const KvRows& rows, int32_t i, int32_t head_dim, float* dst) {
  const char* row = rows[i];
  dst += i * kKvStride;
  for (int32_t d = 0; d < head_dim; d += kLanes) {
    Simd<kLanes>::store(dst + d, load_as_float<kType, kLanes>(row, d));
  }
}

// Calls visit(block type, first row, rows) for the blocks of a tile of `rows` rows.
template <typename Visit>
PREFIXPACK_INLINE void for_each_block(int32_t rows, Visit visit) {
  constexpr int kHalf = kLanes == 16 ? 8 : kLanes;  // a last block of few rows uses vectors of half the width
  int32_t row = 0;
  while (rows - row > kLanes + (kHalf < kLanes ? kHalf : 0)) {
    const int32_t count = rows - row < 2 * kLanes ? rows - row : 2 * kLanes;
    visit(TileBlock<kLanes, 2>{}, row, count);
    row += 2 * kLanes;
  }
  if (rows - row > kHalf) {
    visit(TileBlock<kLanes, 1>{}, row, rows - row < kLanes ? rows - row : kLanes);
    row += kLanes;
  }
  if (rows > row) visit(TileBlock<kHalf, 1>{}, row, rows - row);
}

template <DType kType>
inline void run_tile(const ItemTask& task, Scratch& scratch) {
  const AttentionParams& p = *task.params;
  const int32_t group = p.q_heads / p.kv_heads;
  const int32_t rows = task.item->query_count * group;
  TileState state(scratch, rows, p.head_dim);
  for_each_block(rows, [&](auto block, int32_t row, int32_t count) { block.start(task, state, group, row, count); });

  const auto rows_from = [&](const ItemTask& source, int32_t begin) {
    const KvRows keys = keys_of<kType>(source, begin, kTileKeys);
    constexpr int kBytes = bytes_of(kType);
    return KvAhead{keys, values_of<kType>(source, begin, kTileKeys), p.head_dim * kBytes, 0, keys.count};
  };
  if (task.kv_begin < task.kv_end) {
    KvAhead first = rows_from(task, task.kv_begin);
    const int32_t count = first.end;
    for (int32_t i = 0; i < kRowsAhead; ++i) first.ask();
    for (int32_t i = 0; i < count; ++i) {
      first.ask();
      convert_row<kType>(first.keys, i, p.head_dim, state.next_k);
      convert_row<kType>(first.values, i, p.head_dim, state.next_v);
    }
  }
  for (int32_t begin = task.kv_begin; begin < task.kv_end; begin += kTileKeys) {
    const int32_t end = task.kv_end - begin < kTileKeys ? task.kv_end : begin + kTileKeys;
    state.turn_to_next_block();
    // The next block of positions is converted in parts between the blocks of rows, so that its KV arrives meanwhile.
    // After the last block the next task's KV is prefetched only.
    const bool is_last = end == task.kv_end;
    KvAhead next = is_last && task.next != nullptr ? rows_from(*task.next, task.next->kv_begin) : rows_from(task, end);
    const int32_t count = next.end;
    int32_t converted = 0;
    for_each_block(rows, [&](auto block, int32_t row, int32_t row_count) {
      const int32_t stop = static_cast<int64_t>(count) * (row + row_count) / rows;
      next.end = stop;
      block.add_keys(task, state, row, KeyBlock{begin, end}, next);
      if (is_last) return;
      for (; converted < stop; ++converted) {
        convert_row<kType>(next.keys, converted, p.head_dim, state.next_k);
        convert_row<kType>(next.values, converted, p.head_dim, state.next_v);
      }
    });
  }
  for_each_block(rows, [&](auto block, int32_t row, int32_t count) { block.finish(task, state, group, row, count); });
}
