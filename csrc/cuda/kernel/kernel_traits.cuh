// The tile table of the GPU kernels: which warps do what for a tile of so many rows.
#pragma once

#include <cstdint>

#include "cuda/common/host_device.h"
#include "cuda/common/index_math.h"

namespace prefixpack {

constexpr int kCtasPerSm = 2;
// Two blocks share the 228 KiB of an sm_90 multiprocessor, 1 KiB of each is the system's.
constexpr int kSharedBytes = 112 * 1024;
constexpr int kCtaStateBytes = 512;  // of which kSharedBytes leaves the system's share and this
constexpr int kLaunchSharedBytes = kSharedBytes + kCtaStateBytes;
constexpr int kMaxStages = 4;

// Sixteen warps on a multiprocessor hide each other's waits; sums of wider heads leave registers for eight.
template <int HeadDim>
constexpr int kCtaWarps = HeadDim > 128 ? 4 : 8;
template <int HeadDim>
constexpr int kCtaThreads = 32 * kCtaWarps<HeadDim>;

// Slots of partials that a block has room for when it merges: at least those of one query.
constexpr int kCombineScratchWords = 6 * 1024;

// What a window hides of an item is left out by so many keys at a time, whatever the tile of a block.
constexpr int kWindowGranularity = 64;

// Of a row's sums: whole 16-byte words, banks shifted from row to row. The maximum and the sum are behind the values.
template <int HeadDim>
constexpr int kAccumulatorStride = HeadDim + 8;
constexpr int kMaxKeyWarps = 4;
constexpr int kRowEpilogueBytes = 64;  // that a block keeps of a row whose sums are finished

// How a unit leaves its sums in shared memory, of `key_warps` warps that had different keys of the same rows one after
// the other: [key_warps][rows][kSumWidth]. Bytes before and behind those of the first are free then.
struct AccumulatorLayout {
  int32_t at;  // in bytes
  int32_t rows, key_warps;
  int32_t scratch_at;  // in bytes, room for kMergeRoom words
};

// In front, where the queries were, is room for the states of the rows, and for more if it is wide.
template <int HeadDim, int Rows, int KeyWarps, int QueryBytes>
constexpr AccumulatorLayout accumulator_layout() {
  static_assert(Rows * kRowEpilogueBytes <= QueryBytes && KeyWarps <= kMaxKeyWarps);
  constexpr bool kInFront = Rows * kRowEpilogueBytes + kCombineScratchWords * 4 <= QueryBytes;
  constexpr int kBehind = QueryBytes + Rows * kAccumulatorStride<HeadDim> * 4;
  static_assert(kInFront || kBehind + kCombineScratchWords * 4 <= kSharedBytes, "room for merging");
  static_assert(QueryBytes + KeyWarps * Rows * kAccumulatorStride<HeadDim> * 4 <= kSharedBytes, "sums of all key warps");
  return {QueryBytes, Rows, KeyWarps, kInFront ? Rows * kRowEpilogueBytes : kBehind};
}

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }

// Rows are (query, head in group). Few rows: the warps share out the keys of a KV tile and their sums are added at
// the end. Where there are sixteen rows for each, it has rows of its own.
// KvBytes: of a stored element.
template <int HeadDim, int Rows, int KvBytes>
struct MmaTile {
  static_assert(HeadDim % 64 == 0 && HeadDim <= 256, "the swizzle mixes groups of eight 16-byte chunks, or has four");
  static_assert(Rows == 32 || Rows == 64 || Rows == 128, "tile table");
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kRows = Rows;
  static constexpr int kThreads = kCtaThreads<HeadDim>;
  static constexpr int kRowWarps = min_of(kThreads / 32, Rows / 16);
  static constexpr int kKeyWarps = kThreads / 32 / kRowWarps;
  static constexpr int kRowBlocks = Rows / 16 / kRowWarps;  // blocks of 16 rows per warp
  static constexpr int kRowBytes = HeadDim * KvBytes;       // of K or V
  // What the registers for scores allow; many where warps share them out, and a chunk for each thread.
  static constexpr int kKeys = HeadDim > 128   ? (Rows > 32 ? 16 : 32)
                               : kKeyWarps > 2 ? kWindowGranularity
                                               : max_of(16 * kKeyWarps, kThreads * 16 / kRowBytes);
  static constexpr int kKeysPerWarp = kKeys / kKeyWarps;
  static constexpr int kQueryRowBytes = HeadDim * 2;
  static constexpr int kQueryBytes = Rows * kQueryRowBytes;
  static constexpr int kTileBytes = kKeys * kRowBytes;  // K or V of a stage
  static constexpr int kStages = min_of(kMaxStages, (kSharedBytes - kQueryBytes) / (2 * kTileBytes));
  PREFIXPACK_BOTH static constexpr AccumulatorLayout accumulators() { return accumulator_layout<HeadDim, Rows, kKeyWarps, kQueryBytes>(); }

  PREFIXPACK_BOTH static int32_t query_place(int32_t row, int32_t chunk) {
    return swizzled_offset(row, chunk, kQueryRowBytes);
  }
  // First row of a warp's row block.
  PREFIXPACK_BOTH static int32_t first_row(int32_t row_warp, int32_t block) {
    return (row_warp * kRowBlocks + block) * 16;
  }

  static_assert(kWindowGranularity % kKeys == 0, "whole tiles are left out");
  static_assert(kKeysPerWarp % 16 == 0, "a warp takes whole 16-key fragments");
  static_assert(kStages >= 2, "a tile needs two stages in flight");
};

// A warp on its own: its queries, and a ring of pieces, each the K or the V of a KV tile. Two blocks of eight such
// warps share a multiprocessor, or one beside a block of the other kernel.
constexpr int kDecodeWarps = 8;
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kDecodeCtasPerSm = 2;
constexpr int kWarpBytes = 14 * 1024;
constexpr int kMinActiveWarps = 4;       // of a block, to use all of the memory's bandwidth
constexpr int kBandwidthBoundTokens = 256;  // units so long are bound by bandwidth, shorter ones by latency

template <int HeadDim, int KvBytes>
struct WarpTile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kRows = kWarpRows;
  static constexpr int kKeys = 16;
  static constexpr int kRowBytes = HeadDim * KvBytes;  // of K or V
  static constexpr int kQueryRowBytes = HeadDim * 2;
  static constexpr int kQueryBytes = kRows * kQueryRowBytes;
  static constexpr int kStageBytes = kKeys * kRowBytes;
  static constexpr bool kAccumulatorsInStage = kRows * HeadDim * 4 <= kStageBytes;  // sums lie where a piece was
  static constexpr int kAccumulatorBytes = kAccumulatorsInStage ? 0 : kRows * HeadDim * 4;  // or in a place of their own
  static constexpr int kStages = min_of(8, (kWarpBytes - kQueryBytes - kAccumulatorBytes) / kStageBytes);

  static_assert(kStages >= 3, "a piece in use and two in flight");
};

// Warps of each of `blocks` blocks that take units, of `tokens` KV positions each; 0: of various lengths. Many units of
// one length are done in rounds, and a last round of a few warps leaves memory idle: where fewer warps are enough for
// all of its bandwidth, as many take part as fill their rounds best.
inline int32_t active_warps(int64_t units, int64_t tokens, int32_t blocks) {
  if (tokens < kBandwidthBoundTokens || blocks == 0) return kDecodeWarps;
  int32_t best = kDecodeWarps;
  float best_share = 0.0f;
  for (int32_t warps = kDecodeWarps; warps >= kMinActiveWarps; --warps) {
    const int64_t at_once = int64_t{warps} * blocks, rounds = (units + at_once - 1) / at_once;
    const float share = static_cast<float>(units) / static_cast<float>(rounds * at_once);
    if (share > best_share + 0.02f) best = warps, best_share = share;
  }
  return best;
}

// Wider heads leave a warp neither the registers nor the shared memory for work of its own.
template <int HeadDim>
constexpr bool kHasWarpKernel = HeadDim <= 128;

// Nor the registers for two row blocks per warp.
template <int HeadDim>
constexpr int kMaxTileRows = HeadDim > 128 ? 64 : 128;

}  // namespace prefixpack
