// Index arithmetic, masks and softmax algebra of the GPU kernels: all that is no load, no product and no store.
// Compiled for both sides so that it is tested without a GPU.
#pragma once

#include <cstdint>

#include "cuda/common/host_device.h"

namespace prefixpack {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kMinusInfinity = -__builtin_huge_valf();

struct WorkTile {
  int32_t item, head;  // KV head of a unit for a block, unit head of one for a warp
};

// Rows of a unit for a warp: the columns of its products.
constexpr int32_t kWarpRows = 8;

// Units for warps that the heads of a group are: 2 for larger groups, which then read the same KV at about the same
// time. Each has a part of the query heads, as if there were so many times the KV heads; unit heads are counted so.
// Groups that cannot be halved have no units for warps.
PREFIXPACK_BOTH int32_t head_splits(int32_t group) { return group > kWarpRows && group % 2 == 0 ? 2 : 1; }

// Items of so many rows or fewer are work for warps, the others for blocks.
PREFIXPACK_BOTH int32_t warp_item_rows(int32_t group) { return kWarpRows * head_splits(group); }

// Division of numbers from 0 to 2^31 - 1 by one that the host knows: a multiplication. (Granlund and Montgomery 1994,
// theorem 4.2: with 2^shift no less than the number, the inverse is large by so little that no quotient changes.)
struct Divisor {
  int32_t number;
  uint32_t inverse;  // 2^(31 + shift) / number, rounded up
  int32_t shift;     // the smallest for which 2^shift is no less than the number

  PREFIXPACK_BOTH int32_t quotient(int32_t dividend) const {
    return static_cast<int32_t>(uint64_t{2u * static_cast<uint32_t>(dividend)} * inverse >> 32 >> shift);
  }
};

inline Divisor divisor(int32_t number) {
  int32_t shift = 0;
  while (int64_t{1} << shift < number) ++shift;
  const auto by = static_cast<uint64_t>(number);
  return {number, static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + by - 1) / by), shift};
}

// How many heads there are of each kind, worked out once by the host: a kernel would take two hundred instructions,
// which it has to fetch before it begins.
struct Heads {
  Divisor kv;
  Divisor group;    // query heads of a KV head
  int32_t splits;    // units_of_group
  Divisor split_heads;  // query heads of each, whose partials are counted together
  Divisor virtual_heads;    // unit heads: parts of all KV heads
};

inline Heads heads_of(int32_t q_heads, int32_t kv_heads) {
  const int32_t group = q_heads / kv_heads, splits = head_splits(group);
  return {divisor(kv_heads), divisor(group), splits, divisor(group / splits), divisor(kv_heads * splits)};
}

// Neighbouring units read neighbouring heads of the same tokens.
PREFIXPACK_BOTH WorkTile work_tile_of(int32_t tile_index, const Divisor& heads) {
  const int32_t item = heads.quotient(tile_index);
  return {item, tile_index - item * heads.number};
}

struct Row {
  int32_t query;  // offset into the item's queries
  int32_t head;   // query head
};

PREFIXPACK_BOTH Row row_of(int32_t row, int32_t kv_head, const Divisor& group) {
  const int32_t query = group.quotient(row);
  return {query, kv_head * group.number + row - query * group.number};
}

// What the index of a 16-byte chunk of row `row` is mixed with in shared memory (exclusive or), so that the eight rows
// of an ldmatrix lie in eight different bank groups. Rows of 64 bytes: two of them fill all banks.
PREFIXPACK_BOTH int32_t swizzle_bits(int32_t row, int32_t row_bytes) { return row_bytes < 128 ? row >> 1 & 3 : row & 7; }

// Byte offset of chunk `chunk` of that row.
PREFIXPACK_BOTH int32_t swizzled_offset(int32_t row, int32_t chunk, int32_t row_bytes) {
  return row * row_bytes + ((chunk ^ swizzle_bits(row, row_bytes)) << 4);
}

// Which KV positions a query at `position` sees.
PREFIXPACK_BOTH bool visible(int32_t kv_position, int32_t position, int32_t window_left) {
  return kv_position <= position && (window_left < 0 || kv_position >= position - window_left);
}

// Of the keys behind position `first`, counted from it, those that exist and are seen.
struct VisibleKeys {
  int32_t begin, end;
};
PREFIXPACK_BOTH VisibleKeys visible_keys(int32_t first, int32_t kv_end, int32_t position, int32_t window_left) {
  const int32_t end = kv_end <= position ? kv_end : position + 1;
  const int32_t begin = window_left < 0 ? 0 : position - window_left;
  return {begin > first ? begin - first : 0, end - first};
}

// First position that any query of the item sees, rounded down to a whole KV tile of the item.
PREFIXPACK_BOTH int32_t first_visited(int32_t kv_begin, int32_t kv_end, int32_t lowest, int32_t window_left,
                                   int32_t tile) {
  if (window_left < 0 || lowest - window_left <= kv_begin) return kv_begin;
  const int32_t first = kv_begin + (lowest - window_left - kv_begin) / tile * tile;
  return first < kv_end ? first : kv_end;
}

// Tiles of an item, from the first that is read at `begin`, of which every query sees every key.
struct UnmaskedTiles {
  int32_t begin, end;
};
PREFIXPACK_BOTH UnmaskedTiles unmasked_tiles(int32_t begin, int32_t kv_end, int32_t lowest, int32_t highest,
                                       int32_t window_left, int32_t tile) {
  const int32_t seen = (kv_end <= lowest ? kv_end : lowest + 1) - begin, ahead = highest - begin;
  const bool hides = window_left >= 0 && ahead > window_left;
  return {hides ? (ahead - window_left + tile - 1) / tile : 0, seen / tile};
}

// Running softmax of a row in base 2: maximum and sum so far.
struct SoftmaxState {
  float max, sum;
};

PREFIXPACK_BOTH SoftmaxState softmax_identity() { return {kMinusInfinity, 0.0f}; }

// Exponents are taken against this, so that a row that has seen nothing yet yields 2^-inf = 0 and not NaN.
PREFIXPACK_BOTH float safe_max(float max) { return max == kMinusInfinity ? 0.0f : max; }

// What two partial sums of one row add up to; `scale_a` and `scale_b` are what their outputs are multiplied by.
template <class Exp2>
PREFIXPACK_BOTH SoftmaxState softmax_merge(SoftmaxState a, SoftmaxState b, Exp2 exp2, float* scale_a, float* scale_b) {
  const float max = a.max > b.max ? a.max : b.max;
  *scale_a = exp2(a.max - safe_max(max));
  *scale_b = exp2(b.max - safe_max(max));
  return {max, a.sum * *scale_a + b.sum * *scale_b};
}

}  // namespace prefixpack
