// Index arithmetic, masks and softmax algebra of the GPU kernels: everything except loads, MMAs and stores. Compiled
// for host and device, so that it is testable without a GPU.
#pragma once

#include <cstdint>

#include "cuda/common/host_device.h"
#include "plan/params.h"

namespace prefixpack {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kMinusInfinity = -__builtin_huge_valf();

struct WorkTile {
  int32_t item;  // index into the plan's items
  int32_t head;  // KV head of a CTA tile, virtual KV head of a warp tile
};

// Rows of a warp tile: the N dimension of its MMAs.
constexpr int32_t kWarpRows = 8;

// Parts of the query heads of one KV head: 2 halves of an even group of more than eight heads, else the group itself.
// Virtual KV heads number the halves: each has a share of the query heads, as if the model had more KV heads. A half's
// partials share a semaphore.
//
// Groups of up to eight heads fit a warp tile, and so do halves of 10 to 16; the warp tiles of two halves read the same
// KV at about the same time. Odd groups above eight heads, and all above sixteen, have no warp tiles.
PREFIXPACK_BOTH int32_t head_halves(int32_t group) { return group > kWarpRows && group % 2 == 0 ? 2 : 1; }

// Most rows of an item that runs as warp tiles. Larger items run as CTA tiles.
PREFIXPACK_BOTH int32_t warp_item_rows(int32_t group) { return kWarpRows * head_halves(group); }

// Division of a dividend in [0, 2^31) by a divisor known on the host, by one multiplication. (Granlund and Montgomery
// 1994, theorem 4.2: with 2^shift >= number, the error of the inverse is too small to change a quotient.)
struct Divisor {
  int32_t number;
  uint32_t inverse;  // ceil(2^(31 + shift) / number)
  int32_t shift;     // smallest with 2^shift >= number

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

// Head counts. The host computes them once, because computing them in a kernel takes 200 instructions of cold code.
struct Heads {
  Divisor kv;
  Divisor group;           // query heads per KV head
  int32_t halves;          // head_halves(group)
  Divisor heads_per_half;  // query heads per half; their partials share a semaphore
  Divisor virtual_heads;   // virtual KV heads: kv_heads * halves
};

inline Heads heads_of(int32_t q_heads, int32_t kv_heads) {
  const int32_t group = q_heads / kv_heads, halves = head_halves(group);
  return {divisor(kv_heads), divisor(group), halves, divisor(group / halves), divisor(kv_heads * halves)};
}

// Consecutive tiles read neighbouring heads of the same tokens.
PREFIXPACK_BOTH WorkTile work_tile_of(int32_t tile_index, const Divisor& heads) {
  const int32_t item = heads.quotient(tile_index);
  return {item, tile_index - item * heads.number};
}

struct Row {
  int32_t query;  // offset from the item's first query
  int32_t head;   // query head
};

PREFIXPACK_BOTH Row row_of(int32_t row, int32_t kv_head, const Divisor& group) {
  const int32_t query = group.quotient(row);
  return {query, kv_head * group.number + row - query * group.number};
}

// XOR mask of the 16-byte chunk index in row `row` of shared memory. The eight rows of an ldmatrix then lie in eight
// different bank groups. Two 64-byte rows fill all banks.
PREFIXPACK_BOTH int32_t swizzle_bits(int32_t row, int32_t row_bytes) {
  return row_bytes < 128 ? row >> 1 & 3 : row & 7;
}

// Byte offset of chunk `chunk` of row `row`.
PREFIXPACK_BOTH int32_t swizzled_offset(int32_t row, int32_t chunk, int32_t row_bytes) {
  return row * row_bytes + ((chunk ^ swizzle_bits(row, row_bytes)) << 4);
}

// Whether a query at `position` attends to `kv_position`.
PREFIXPACK_BOTH bool visible(int32_t kv_position, int32_t position, int32_t window_left) {
  return kv_position <= position && (window_left < 0 || kv_position >= position - window_left);
}

// Keys that exist and are visible, as offsets from position `first`.
struct VisibleKeys {
  int32_t begin, end;
};
PREFIXPACK_BOTH VisibleKeys visible_keys(int32_t first, int32_t kv_end, int32_t position, int32_t window_left) {
  const int32_t end = kv_end <= position ? kv_end : position + 1;
  const int32_t begin = window_left < 0 ? 0 : position - window_left;
  return {begin > first ? begin - first : 0, end - first};
}

// Drafts of a tree: a query does not see all of the kMaskedPositions positions that end with its own. Bit 63 - j of
// its `hidden` word: it does not see the position j before its own.
PREFIXPACK_BOTH uint64_t hidden_word(uint64_t visible) {
  uint64_t word = ~visible, reversed = 0;
  for (int32_t i = 0; i < kMaskedPositions; ++i, word >>= 1) reversed = reversed << 1 | (word & 1);
  return reversed;
}

// Last position up to which a query at `position` sees all.
PREFIXPACK_BOTH int32_t last_unhidden(uint64_t hidden, int32_t position) {
  if (hidden == 0) return position;
  int32_t zeros = 0;  // behind the lowest set bit, which is of the earliest hidden position
  while ((hidden >> zeros & 1) == 0) ++zeros;
  return position - (kMaskedPositions - zeros);
}

// Bit i: whether the query does not see the i-th key. ahead: position of the query, from that of the first key. Keys
// behind the query are not in it.
PREFIXPACK_BOTH uint64_t hidden_keys(uint64_t hidden, int32_t ahead) {
  const int32_t left = ahead - (kMaskedPositions - 1);
  if (left <= -kMaskedPositions || left >= kMaskedPositions) return 0;
  return left >= 0 ? hidden << left : hidden >> -left;
}

// First position that any query of the item attends to, rounded down to a multiple of `tile` from kv_begin.
PREFIXPACK_BOTH int32_t first_visited(int32_t kv_begin, int32_t kv_end, int32_t lowest, int32_t window_left,
                                      int32_t tile) {
  if (window_left < 0 || lowest - window_left <= kv_begin) return kv_begin;
  const int32_t first = kv_begin + (lowest - window_left - kv_begin) / tile * tile;
  return first < kv_end ? first : kv_end;
}

// KV tiles [begin, end) in which every query sees every key, counted from the tile at position `begin`.
struct UnmaskedTiles {
  int32_t begin, end;
};
PREFIXPACK_BOTH UnmaskedTiles unmasked_tiles(int32_t begin, int32_t kv_end, int32_t lowest, int32_t highest,
                                             int32_t window_left, int32_t tile) {
  const int32_t seen = (kv_end <= lowest ? kv_end : lowest + 1) - begin, ahead = highest - begin;
  const bool hides = window_left >= 0 && ahead > window_left;
  return {hides ? (ahead - window_left + tile - 1) / tile : 0, seen / tile};
}

// Running softmax of a row in base 2.
struct SoftmaxState {
  float max, sum;
};

PREFIXPACK_BOTH SoftmaxState softmax_identity() { return {kMinusInfinity, 0.0f}; }

// Base of the exponents. It is 0 for a row without visible keys, whose weights then are 2^-inf = 0 and not NaN.
PREFIXPACK_BOTH float safe_max(float max) { return max == kMinusInfinity ? 0.0f : max; }

// Combines two running softmaxes of one row. `scale_a` and `scale_b`: factors of their accumulators.
template <class Exp2>
PREFIXPACK_BOTH SoftmaxState softmax_combine(SoftmaxState a, SoftmaxState b, Exp2 exp2, float* scale_a,
                                             float* scale_b) {
  const float max = a.max > b.max ? a.max : b.max;
  *scale_a = exp2(a.max - safe_max(max));
  *scale_b = exp2(b.max - safe_max(max));
  return {max, a.sum * *scale_a + b.sum * *scale_b};
}

}  // namespace prefixpack
