// Epilogue of a CTA tile: normalizes the accumulators, stores them, and combines the queries whose last partial this
// is. One function for all tiles, because its code has to be fetched as well.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/kernel/combine.cuh"
#include "cuda/kernel/cta_state.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/store_rows.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// Reduces the softmax state of a row over the key warps and stores its lse. accumulators: maximum and sum of the first
// key warp, `stride` floats apart for the others. token: of the row, if the tile writes the output.
PREFIXPACK_DEVICE void finalize_row(const CtaState& state, int32_t row, const float* accumulators, int32_t key_warps,
                                    int32_t stride, int32_t token, RowEpilogue* result) {
  const AttentionParams& attention = state.params.attention;
  const ItemRecord& item = state.item;
  const Row place = row_of(row, state.kv_head, state.params.heads.group);
  // All reads at once, and no exponential that waits for another one: this is in the way of every tile's end.
  SoftmaxState of_warps[kMaxKeyWarps], joined = softmax_identity();
#pragma unroll
  for (int32_t warp = 0; warp < kMaxKeyWarps; ++warp) {
    of_warps[warp] = softmax_identity();
    if (warp < key_warps) of_warps[warp] = {accumulators[warp * stride], accumulators[warp * stride + 1]};
    joined.max = ptx::max(joined.max, of_warps[warp].max);
  }
  float weights[kMaxKeyWarps];
#pragma unroll
  for (int32_t warp = 0; warp < kMaxKeyWarps; ++warp) {
    weights[warp] = ptx::exp2(of_warps[warp].max - safe_max(joined.max));
    joined.sum = ptx::fma(weights[warp], of_warps[warp].sum, joined.sum);
  }
  FinalSoftmax normalized;
  if (item.partial_begin == kWriteThrough) {
    const OutputRow output = output_row(attention, token, place.head);
    normalized = finalize_with_sink(joined, attention, place.head);
    result->target = output.output;
    store_lse(output.lse, normalized.lse);
  } else {
    const PartialRow partial = partial_row(attention, item.partial_begin + place.query, place.head);
    normalized = finalize(joined);
    result->target = partial.output;
    *partial.lse = normalized.lse;
  }
  result->lse = normalized.lse;
  const float factor = normalized.factor * attention.v_scale;
  ptx::store_quad(result->weights,
                  {weights[0] * factor, weights[1] * factor, weights[2] * factor, weights[3] * factor});
}

// Counts the tile's partial of the unit that is this thread's number; whether it was the last one.
PREFIXPACK_DEVICE bool arrive(const CtaState& state, CombineUnit* units) {
  const int32_t thread = ptx::volatile_thread_index();
  CombineUnit& unit = units[thread];
  int32_t* semaphore = semaphore_of_unit(state.params, state, state.item.list, thread);
  bool ready = unit.ready;
  if (!ready) ready = ptx::atomic_add_release(semaphore, 1) == unit.list.count - 1;
  if (ready) *semaphore = 0;
  unit.ready = ready;
  return ready;
}

// Turns to the queries' own lists, where the results of the groups that this CTA has combined are its partials. Called
// by all threads. Whether the unit that is this thread's number has such a result.
PREFIXPACK_DEVICE bool begin_second_level(CtaState& state, CombineUnit* units) {
  const int32_t thread = ptx::volatile_thread_index();
  const int32_t parent = state.item.parent;
  bool arrives = false;
  if (thread < state.item.query_count * state.params.heads.halves) {
    const int32_t list = parent + query_of_unit(state.params, thread), first = state.plan().list_offset(list);
    arrives = units[thread].ready;
    units[thread].list = {first, state.plan().list_offset(list + 1) - first};
    units[thread].ready = false;
  }
  ptx::cta_sync();
  if (thread < 32) {
    state.item.partial_begin = kInGlobalMemory;
    state.item.list = parent;
    state.item.parent = -1;
  }
  ptx::cta_sync();
  return arrives;
}

// Stores the results of a tile, and combines those of its queries of which it brought the last partial. A barrier
// precedes the call, and another one its return. The next tile's record and prologue are prefetched meanwhile.
//
// If all other partials of a query have arrived, it is combined at once: its own partial does not go through global
// memory.
template <int HeadDim, class Output>
PREFIXPACK_DEVICE_CALL TilePrologue run_epilogue(char* shared, AccumulatorLayout layout, EpilogueInputs inputs) {
  constexpr int kThreads = kCtaThreads<HeadDim>;
  constexpr int kWidth = kAccumulatorStride<HeadDim>;
  CtaState& state = *cta_state(shared);
  const ItemRecord& item = state.item;
  const int32_t thread = ptx::volatile_thread_index();
  auto* results = reinterpret_cast<RowEpilogue*>(shared);
  auto* units = reinterpret_cast<CombineUnit*>(results + layout.rows);
  auto* accumulators = reinterpret_cast<float*>(shared + layout.at);
  const int32_t rows = item.query_count * state.params.heads.group.number, stride = layout.rows * kWidth;

  const bool combines = item.partial_begin != kWriteThrough;
  const bool has_unit = combines && thread < item.query_count * state.params.heads.halves;
  if (thread < rows) {
    finalize_row(state, thread, accumulators + thread * kWidth + HeadDim, layout.key_warps, stride, inputs.token,
                 results + thread);
  }
  // Behind the rows' arithmetic, which waits for none of the inputs of a tile with partials.
  if (has_unit) {
    const PartialList list{inputs.list_begin, inputs.list_end - inputs.list_begin};
    units[thread] = {inputs.token, list, inputs.arrived == list.count - 1};
  }
  const int32_t claimed_tile = state.next.tile_index_of(inputs.claimed);
  if (thread < 32) state.next.tile_index = claimed_tile;
  ptx::cta_sync();
  TilePrologue next{0, 0};
  int32_t word = 0;
  const int32_t next_tile = state.next.tile_index;
  if (ptx::uniform(next_tile < state.next.num_tiles)) {
    const int32_t next_item = work_tile_of(next_tile, state.params.heads.kv).item;
    word = NextTile::record_word(state.params, next_item);
    next = TilePrologue::load(state.params, next_item);
  }

  constexpr int kQuads = HeadDim / 4, kAtOnce = 4, kRowsApart = kThreads / kQuads;
  const int32_t column = thread % kQuads * 4;
  const Divisor heads_per_half = state.params.heads.heads_per_half;
#pragma unroll 1
  for (int32_t first = thread / kQuads; first < rows; first += kAtOnce * kRowsApart) {
    float* own = accumulators + first * kWidth + column;
    void* targets[kAtOnce];  // nullptr if the unit is combined here
    float quads[kAtOnce][4] = {};
#pragma unroll
    for (int32_t k = 0; k < kAtOnce; ++k) {
      const int32_t row = first + k * kRowsApart < rows ? first + k * kRowsApart : first;
      targets[k] = combines && units[heads_per_half.quotient(row)].ready ? nullptr : results[row].target;
    }
#pragma unroll 1
    for (int32_t warp = 0; warp < layout.key_warps; ++warp) {
#pragma unroll
      for (int32_t k = 0; k < kAtOnce; ++k) {
        float theirs[4];
        ptx::load_quad(own + warp * stride + k * kRowsApart * kWidth, theirs);
        const float weight = results[first + k * kRowsApart].weights[warp];
#pragma unroll
        for (int32_t j = 0; j < 4; ++j) quads[k][j] = ptx::fma(theirs[j], weight, quads[k][j]);
      }
    }
#pragma unroll
    for (int32_t k = 0; k < kAtOnce; ++k) {
      const float (&quad)[4] = quads[k];
      if (first + k * kRowsApart >= rows) break;
      if (combines) {
        ptx::store_quad(own + k * kRowsApart * kWidth, quad);
        if (targets[k] != nullptr) ptx::store_quad(static_cast<float*>(targets[k]) + column, quad);
      } else {
        ptx::store_words(static_cast<uint16_t*>(targets[k]) + column, Output::pack(quad[0], quad[1]),
                         Output::pack(quad[2], quad[3]));
      }
    }
  }
  NextTile::store_record(state.next.record, word);
  ptx::cta_sync();
  if (!combines) return next;
  const TileResults own{results, units, accumulators, reinterpret_cast<int32_t*>(shared + layout.scratch_at)};
#pragma unroll 1
  for (bool arrives = has_unit;;) {
    // Before the semaphores' values are known: the CTA that arrives last has nothing else to do.
    const int32_t end = scratch_unit_end(own, 0, item.query_count * state.params.heads.halves);
    load_lists<HeadDim>(state, own, 0, end);
    if (arrives) arrives = arrive(state, units);
    if (!ptx::cta_any(arrives)) return next;
    combine_units<HeadDim, Output>(state, own, end);
    if (ptx::uniform(item.parent < 0)) return next;
    arrives = begin_second_level(state, units);
  }
}

}  // namespace prefixpack
