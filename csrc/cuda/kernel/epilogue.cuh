// What becomes of the sums of a block's unit: they are finished, stored, and merged with other partials of their
// queries if these are there. One function for all tiles, since its code comes from memory too.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/kernel/combine.cuh"
#include "cuda/kernel/cta_state.cuh"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel/store_rows.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

// Joins what the key warps have of a row, whose maximum and sum of the first of them are at `sums`. Stores its lse.
// stride: from one key warp to the next. token: of the row, if the unit writes the output.
PREFIXPACK_DEVICE void finish_row(const BlockState& state, int32_t row, const float* sums, int32_t key_warps,
                                  int32_t stride, int32_t token, RowResult* result) {
  const AttentionParams& attention = state.params.attention;
  const ItemRecord& item = state.item;
  const Row place = row_of(row, state.kv_head, state.params.heads.group);
  SoftmaxState joined = softmax_start();
#pragma unroll 1
  for (int32_t warp = 0; warp < key_warps; ++warp) {
    const SoftmaxState theirs{sums[warp * stride], sums[warp * stride + 1]};
    float keep, add;
    joined = softmax_join(joined, theirs, [](float x) { return ptx::exp2(x); }, &keep, &add);
  }
  Normalised normal;
  if (item.slot_begin == kWriteThrough) {
    const OutputRow output = output_row(attention, token, place.head);
    normal = normalised_with_sink(joined, attention, place.head);
    result->target = output.output;
    store_lse(output.lse, normal.lse);
  } else {
    const PartialRow partial = partial_row(attention, item.slot_begin + place.query, place.head);
    normal = normalised(joined);
    result->target = partial.output;
    *partial.lse = normal.lse;
  }
  result->lse = normal.lse;
  const float factor = normal.factor * attention.v_scale;
#pragma unroll 1
  for (int32_t warp = 0; warp < key_warps; ++warp) {
    result->weights[warp] = ptx::exp2(sums[warp * stride] - safe_max(joined.max)) * factor;
  }
}

// Stores what a unit came to, and merges those of its queries of which it was the last partial. All threads have met
// since the sums were written, and meet again before this returns. The next unit's record is asked for while rows are
// stored.
//
// A query whose other partials are all there is merged at once: what this unit has of it need not go through memory.
template <int HeadDim, class Output>
PREFIXPACK_DEVICE_CALL void finish_unit(char* shared, BlockSums layout, UnitEnd known) {
  constexpr int kThreads = kBlockThreads<HeadDim>;
  constexpr int kWidth = kSumWidth<HeadDim>;
  BlockState& state = *block_state(shared);
  const ItemRecord& item = state.item;
  const int32_t thread = ptx::thread_index_here();
  auto* results = reinterpret_cast<RowResult*>(shared);
  auto* parts = reinterpret_cast<QueryPart*>(results + layout.rows);
  auto* sums = reinterpret_cast<float*>(shared + layout.at);
  const int32_t rows = item.query_count * state.params.heads.group.number, stride = layout.rows * kWidth;

  const bool merges = item.slot_begin != kWriteThrough;
  const bool has_part = merges && thread < item.query_count * state.params.heads.parts;
  int32_t* arrivals = nullptr;
  QueryPart part{};
  if (has_part) {
    arrivals = arrivals_of_part(state.params, state, thread);
    const MergeList list{known.list_begin, known.list_end - known.list_begin};
    part = {known.token, list, known.arrived == list.count - 1};
    if (part.ready) *arrivals = 0;
    parts[thread] = part;
  }
  if (thread < rows) {
    finish_row(state, thread, sums + thread * kWidth + HeadDim, layout.key_warps, stride, known.token,
               results + thread);
  }
  const int32_t ticket = state.next.ticket_of(known.asked_before);
  const int32_t word = state.next.ask_for_record(state.params, ticket);
  ptx::block_sync();

  constexpr int kQuads = HeadDim / 4, kAtOnce = 4, kRowsApart = kThreads / kQuads;
  const int32_t column = thread % kQuads * 4;
  const Divisor heads_of_part = state.params.heads.of_part;
#pragma unroll 1
  for (int32_t first = thread / kQuads; first < rows; first += kAtOnce * kRowsApart) {
    float* own = sums + first * kWidth + column;
    void* targets[kAtOnce];  // nullptr where the part is merged here
    float quads[kAtOnce][4] = {};
#pragma unroll
    for (int32_t k = 0; k < kAtOnce; ++k) {
      const int32_t row = first + k * kRowsApart < rows ? first + k * kRowsApart : first;
      targets[k] = merges && parts[heads_of_part.quotient(row)].ready ? nullptr : results[row].target;
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
      if (merges) {
        ptx::store_quad(own + k * kRowsApart * kWidth, quad);
        if (targets[k] != nullptr) ptx::store_quad(static_cast<float*>(targets[k]) + column, quad);
      } else {
        ptx::store_words(static_cast<uint16_t*>(targets[k]) + column, Output::pack(quad[0], quad[1]),
                         Output::pack(quad[2], quad[3]));
      }
    }
  }
  state.next.keep(ticket, word);
  ptx::block_sync();
  if (!merges) return;
  const UnitResults own{results, parts, sums, reinterpret_cast<int32_t*>(shared + layout.scratch_at)};
  // While it is not known yet which parts are ready: a block that comes last has nothing else to do.
  const int32_t end = end_of_parts_at_once(own, 0, item.query_count * state.params.heads.parts);
  bring_slots<HeadDim>(state, own, 0, end);
  if (has_part && !part.ready) {
    part.ready = ptx::atomic_add_release(arrivals, 1) == part.list.count - 1;
    if (part.ready) *arrivals = 0;
    parts[thread].ready = part.ready;
  }
  if (!ptx::block_any(part.ready)) return;
  merge_parts<HeadDim, Output>(state, own, end);
}

}  // namespace prefixpack
