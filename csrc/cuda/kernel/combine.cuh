// Combine of split-KV partials by a CTA.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/kernel/cta_state.cuh"
#include "cuda/kernel/epilogue_prefetch.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/store_rows.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// Epilogue state of a row of the tile.
struct RowEpilogue {
  float weights[kMaxKeyWarps];
  void* target;  // [head_dim] fp32 partial, or 16-bit output if the tile writes through
  float lse;     // to base 2
};

// The query heads of one query and KV head whose partials share a semaphore: all, or half of them. See query_of_unit.
struct CombineUnit {
  int32_t token;
  PartialList list;
  bool ready;  // this CTA combines it
};
static_assert(sizeof(RowEpilogue) + sizeof(CombineUnit) <= kTightRowEpilogueBytes, "room for each row");

// Results of the CTA's tile, in shared memory.
struct TileResults {
  const RowEpilogue* rows;
  const CombineUnit* units;
  const float* accumulators;  // [rows][kAccumulatorStride] the tile's own partial
  int32_t* scratch;           // [kCombineScratchWords] numbers of partials
};

// End of the units from `unit` on whose lists of partials fit into the scratch; nearly always all. Called by all
// threads.
PREFIXPACK_DEVICE int32_t scratch_unit_end(const TileResults& own, int32_t unit, int32_t num_units) {
  const int32_t first_entry = own.units[unit].list.first;
  int32_t end = num_units;
#pragma unroll 1
  for (; end > unit + 1; --end) {
    const PartialList& last = own.units[end - 1].list;
    if (ptx::uniform(last.first + last.count - first_entry <= kCombineScratchWords)) break;
  }
  return end;
}

// Loads the lists of units [unit, end) into the scratch; a barrier follows. The last warps load first,
// because the first ones handle the semaphores.
template <int HeadDim>
PREFIXPACK_DEVICE void load_lists(const CtaState& state, const TileResults& own, int32_t unit, int32_t end) {
  constexpr int kThreads = kCtaThreads<HeadDim>;
  const PartialList& last = own.units[end - 1].list;
  const int32_t first_entry = own.units[unit].list.first, entries = last.first + last.count - first_entry;
#pragma unroll 1
  for (int32_t entry = kThreads - 1 - ptx::volatile_thread_index(); entry < entries; entry += kThreads) {
    own.scratch[entry] = state.plan().list_partial(first_entry + entry);
  }
}

// Combines those of the units [unit, end) that are ready. Their lists are in the scratch. Results go to the output,
// or, if the tile belongs to a group of KV splits, to the group's partial.
template <int HeadDim, class Output>
PREFIXPACK_DEVICE void combine_ready(const CtaState& state, const TileResults& own, int32_t unit, int32_t end) {
  constexpr int kThreads = kCtaThreads<HeadDim>;
  const AttentionParams& attention = state.params.attention;
  const Heads& all_heads = state.params.heads;
  const int32_t thread = ptx::volatile_thread_index(), lane = thread % kCombineLanes;
  const int32_t heads_per_kv_head = all_heads.group.number, first_head = state.kv_head * heads_per_kv_head;
  const float* lse_of_head = attention.partial_lse + first_head;
  const int32_t partial_stride = attention.q_heads * HeadDim * static_cast<int32_t>(sizeof(float));
  const int32_t first_entry = own.units[unit].list.first;
  const int32_t heads = all_heads.heads_per_half.number, rows = (end - unit) * heads;
  // Eight lanes combine a row. All lanes of a warp iterate alike, because they exchange what they loaded.
#pragma unroll 1
  for (int32_t begin = thread / 32 * (32 / kCombineLanes); begin < rows; begin += kThreads / kCombineLanes) {
    const int32_t row = begin + thread % 32 / kCombineLanes < rows ? begin + thread % 32 / kCombineLanes : begin;
    const int32_t unit_index = unit + all_heads.heads_per_half.quotient(row),
                  query = query_of_unit(state.params, unit_index);
    const int32_t in_kv_head = unit * heads + row - query * heads_per_kv_head, head = first_head + in_kv_head;
    const CombineUnit& mine = own.units[unit_index];
    const int32_t count = mine.ready ? mine.list.count : 0;
    if (!ptx::any(count > 0)) continue;
    const int32_t* list = own.scratch + (mine.list.first - first_entry);
    const int32_t own_partial = state.item.partial_begin + query;
    const auto lse_at = [&](int32_t i) {
      if (i >= count) return kMinusInfinity;
      const int32_t partial = list[i];
      if (partial == own_partial) return own.rows[query * heads_per_kv_head + in_kv_head].lse;
      return ptx::load_relaxed(lse_of_head + int64_t{partial} * attention.q_heads + in_kv_head);
    };
    const auto* partials_of_row = reinterpret_cast<const char*>(attention.partial_o + head * HeadDim + lane * 4);
    const float* own_row =
        own.accumulators + (query * heads_per_kv_head + in_kv_head) * kAccumulatorStride<HeadDim> + lane * 4;
    constexpr int kQuads = HeadDim / 32;
    float accumulators[kQuads][4] = {};
    CombineWeights weights{};
    float lse = 0.0f, weight = 0.0f;  // of partial `lane` of the eight in turn
    int32_t done = 0;
#pragma unroll 1
    do {
      const bool begins = done % kCombineLanes == 0;
      if (ptx::uniform(begins)) lse = lse_at(done + lane);
      float partials[kCombineBatch][kQuads][4];
#pragma unroll
      for (int32_t i = 0; i < kCombineBatch; ++i) {
        const int32_t partial = done + i < count ? list[done + i] : own_partial;
        const auto* from = reinterpret_cast<const float*>(ptx::at(partials_of_row, partial, partial_stride));
        if (partial == own_partial) from = own_row;
#pragma unroll
        for (int32_t quad = 0; quad < kQuads; ++quad) ptx::load_relaxed_generic(from + quad * 32, partials[i][quad]);
      }
      if (ptx::uniform(done == 0)) {
        SoftmaxState joined = softmax_identity();
        if (lane < count) joined = add_partial(joined, lse);
#pragma unroll 1
        for (int32_t i = lane + kCombineLanes; i < count; i += kCombineLanes) joined = add_partial(joined, lse_at(i));
        ptx::warp_sync();
        weights = combine_weights(attention, state.item.parent >= 0 ? kNoSink : head, joined,
                                  [](float value, int32_t mask) { return ptx::shuffle_xor(value, mask); });
      }
      if (ptx::uniform(begins)) weight = weights.of(lse);
#pragma unroll
      for (int32_t i = 0; i < kCombineBatch; ++i) {
        const float of_partial = ptx::shuffle(weight, thread % 32 - lane + done % kCombineLanes + i);
#pragma unroll
        for (int32_t j = 0; j < 4 * kQuads; ++j) {
          accumulators[j / 4][j % 4] = ptx::fma(of_partial, partials[i][j / 4][j % 4], accumulators[j / 4][j % 4]);
        }
      }
      done += kCombineBatch;
    } while (ptx::any(done < count));
    if (count == 0) continue;
    if (state.item.parent >= 0) {
      const PartialRow target =
          partial_row(attention, state.item.group_partial + own_partial - state.item.partial_begin, head);
#pragma unroll
      for (int32_t quad = 0; quad < kQuads; ++quad) {
        ptx::store_quad(target.output + lane * 4 + quad * 32, accumulators[quad]);
      }
      if (lane == 0) *target.lse = weights.lse;
      continue;
    }
    const OutputRow target = output_row(attention, mine.token, head);
#pragma unroll
    for (int32_t quad = 0; quad < kQuads; ++quad) {
      const float (&sum)[4] = accumulators[quad];
      ptx::store_words(target.output + lane * 4 + quad * 32, Output::pack(sum[0], sum[1]),
                       Output::pack(sum[2], sum[3]));
    }
    if (lane == 0) store_lse(target.lse, weights.lse);
  }
}

// Combines the units that are ready; the lists of those before `end` are loaded. A barrier precedes the call, and
// another one its return.
template <int HeadDim, class Output>
PREFIXPACK_DEVICE void combine_units(const CtaState& state, const TileResults& own, int32_t end) {
  const int32_t num_units = state.item.query_count * state.params.heads.halves;
#pragma unroll 1
  for (int32_t unit = 0;;) {
    combine_ready<HeadDim, Output>(state, own, unit, end);
    ptx::cta_sync();
    if (ptx::uniform(end == num_units)) return;
    unit = end;
    end = scratch_unit_end(own, unit, num_units);
    load_lists<HeadDim>(state, own, unit, end);
    ptx::cta_sync();
  }
}

}  // namespace prefixpack
