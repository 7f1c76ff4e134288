// How a block merges partials of its unit's queries.
#pragma once

#include "cuda/block_state.h"
#include "cuda/kernel_params.h"
#include "cuda/ptx.h"
#include "cuda/results.h"
#include "cuda/tiles.h"

namespace prefixpack {

// A row of a block's unit, finished: what its sums are multiplied by, and where the products go.
struct RowResult {
  void* target;  // [head_dim] of a partial, float, or, if the unit has no others, of the output
  float weights[kMaxKeyWarps];
  float lse;  // to base 2
};

// The heads of a query whose partials are counted together. The parts of a unit's queries follow each other.
struct QueryPart {
  int32_t token;
  MergeList list;
  bool ready;  // to be merged here
};
static_assert(sizeof(RowResult) + sizeof(QueryPart) <= kRowStateBytes, "room for each row");

// A query has one part or two.
PREFIXPACK_DEVICE int32_t query_of_part(const BlockState& state, int32_t part) {
  return state.group.parts > 1 ? part >> 1 : part;
}

PREFIXPACK_DEVICE int32_t* arrivals_of_part(const BlockState& state, int32_t part) {
  const int32_t query = query_of_part(state, part), parts = state.group.parts;
  return arrivals_of(state.params, state.item.merge_begin + query, state.kv_head * parts + part - query * parts,
                     state.params.attention.kv_heads * parts);
}

// What a block has of its unit, in shared memory.
struct UnitResults {
  const RowResult* rows;
  const QueryPart* parts;
  const float* sums;  // [rows][kSumWidth] the unit's own partial
  char* scratch;      // kMergeRoom words
};

// Merges the parts that are ready. All threads have met since results were written, and meet again before this returns.
//
// A block may come last for all of its queries, when nothing else is left to do. So memory is asked in few trips, each
// for all that can be known by then; and the code is short, for it comes from memory too.
template <int HeadDim, class Output>
PREFIXPACK_DEVICE void merge_parts(const BlockState& state, const UnitResults& own) {
  constexpr int kThreads = kBlockThreads<HeadDim>;
  const AttentionParams& attention = state.params.attention;
  const ItemRecord& item = state.item;
  const int32_t thread = ptx::thread_index_here();
  const int32_t group = state.group.heads.number, first_head = state.kv_head * group;
  const int32_t num_parts = item.query_count * state.group.parts;
  const float* lse_of_head = attention.partial_lse + first_head;
  const int32_t partial_stride = attention.q_heads * HeadDim * static_cast<int32_t>(sizeof(float));
  const int32_t most_entries = static_cast<int32_t>(uint32_t{kMergeRoom} / static_cast<uint32_t>(group + 1));
  // As many parts at a time as there is room for what is read of their partials: nearly always all. Of a single one
  // with very many of them only the slots are kept.
  const auto entries_to = [&](int32_t first, int32_t end) {
    return own.parts[end - 1].list.first + own.parts[end - 1].list.count - own.parts[first].list.first;
  };
#pragma unroll 1
  for (int32_t part = 0, end; ptx::uniform(part < num_parts); part = end) {
    end = num_parts;
#pragma unroll 1
    while (ptx::uniform(entries_to(part, end) > most_entries && end > part + 1)) --end;
    const int32_t first_entry = own.parts[part].list.first, entries = entries_to(part, end);
    const bool keeps_lse = entries <= most_entries;
    auto* slots = reinterpret_cast<int32_t*>(own.scratch);        // [entries]
    auto* lse = reinterpret_cast<float*>(own.scratch) + entries;  // [entries][group]
#pragma unroll 1
    for (int32_t entry = thread; entry < entries; entry += kThreads) {
      slots[entry] = state.plan().merge_slot(first_entry + entry);
    }
    ptx::block_sync();
    const auto lse_of = [&](int32_t slot, int32_t in_group) {
      const int32_t query = slot - item.slot_begin;
      if (query >= 0 && query < item.query_count) return own.rows[query * group + in_group].lse;
      return ptx::load_shared_result(lse_of_head + int64_t{slot} * attention.q_heads + in_group);
    };
    if (ptx::uniform(keeps_lse)) {
#pragma unroll 1
      for (int32_t i = thread; i < entries * group; i += kThreads) {
        const int32_t entry = state.group.heads.quotient(i);
        lse[i] = lse_of(slots[entry], i - entry * group);
      }
      ptx::block_sync();
    }
    const int32_t heads = state.group.heads_of_part.number, rows = (end - part) * heads, lane = thread % kMergeLanes;
    // Eight lanes have a row. Whole warps go round: lanes exchange what they have read.
#pragma unroll 1
    for (int32_t begin = thread / 32 * (32 / kMergeLanes); begin < rows; begin += kThreads / kMergeLanes) {
      const int32_t row = begin + thread % 32 / kMergeLanes < rows ? begin + thread % 32 / kMergeLanes : begin;
      const int32_t of_part = part + state.group.heads_of_part.quotient(row), query = query_of_part(state, of_part);
      const int32_t in_group = part * heads + row - query * group, head = first_head + in_group;
      const QueryPart& mine = own.parts[of_part];
      const int32_t count = mine.ready ? mine.list.count : 0;
      if (!ptx::any(count > 0)) continue;
      const int32_t first = mine.list.first - first_entry, own_slot = item.slot_begin + query;
      const auto lse_at = [&](int32_t i) {
        return keeps_lse ? lse[(first + i) * group + in_group] : lse_of(slots[first + i], in_group);
      };
      const auto* partials_of_row = reinterpret_cast<const char*>(attention.partial_o + head * HeadDim + lane * 4);
      const float* own_row = own.sums + (query * group + in_group) * kSumWidth<HeadDim> + lane * 4;
      constexpr int kQuads = HeadDim / 32;
      float sums[kQuads][4] = {};
      MergeWeights weights{};
      int32_t done = 0;
#pragma unroll 1
      do {
        float partials[kMergeAtOnce][kQuads][4];
#pragma unroll
        for (int32_t i = 0; i < kMergeAtOnce; ++i) {
          const int32_t slot = done + i < count ? slots[first + done + i] : own_slot;
          const auto* from = reinterpret_cast<const float*>(ptx::at(partials_of_row, slot, partial_stride));
          if (slot == own_slot) from = own_row;
#pragma unroll
          for (int32_t quad = 0; quad < kQuads; ++quad) ptx::load_result(from + quad * 32, partials[i][quad]);
        }
        if (ptx::uniform(done == 0)) {
          SoftmaxState joined = softmax_start();
#pragma unroll 1
          for (int32_t i = lane; i < count; i += kMergeLanes) joined = with_partial(joined, lse_at(i));
          ptx::warp_sync();
          weights = merge_weights(attention, head, joined,
                                  [](float value, int32_t mask) { return ptx::shuffle_xor(value, mask); });
        }
#pragma unroll
        for (int32_t i = 0; i < kMergeAtOnce; ++i) {
          const float weight = done + i < count ? weights.of(lse_at(done + i)) : 0.0f;
#pragma unroll
          for (int32_t j = 0; j < 4 * kQuads; ++j) {
            sums[j / 4][j % 4] = ptx::fma(weight, partials[i][j / 4][j % 4], sums[j / 4][j % 4]);
          }
        }
        done += kMergeAtOnce;
      } while (ptx::any(done < count));
      if (count == 0) continue;
      const OutputRow target = output_row(attention, mine.token, head);
#pragma unroll
      for (int32_t quad = 0; quad < kQuads; ++quad) {
        const float (&sum)[4] = sums[quad];
        ptx::store_words(target.output + lane * 4 + quad * 32, Output::pack(sum[0], sum[1]),
                         Output::pack(sum[2], sum[3]));
      }
      if (lane == 0) store_lse(target.lse, weights.lse);
    }
    ptx::block_sync();
  }
}

}  // namespace prefixpack
