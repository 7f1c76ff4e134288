// Tile table of the GPU kernels: tile sizes, shared-memory layouts, and the roles of the warps.
#pragma once

#include <cstdint>

#include "cuda/common/host_device.h"
#include "cuda/common/index_math.h"

namespace prefixpack {

// Compute capability, 10 * major + minor, that the code is compiled for. Host code only uses what is equal for all.
#if defined(PREFIXPACK_EMULATED_CAPABILITY)
constexpr int kCapability = PREFIXPACK_EMULATED_CAPABILITY;
#elif defined(__CUDA_ARCH__)
constexpr int kCapability = __CUDA_ARCH__ / 10;
#else
constexpr int kCapability = 90;
#endif

// Shared memory of a CTA for its tiles, in code compiled for a compute capability.
struct SharedMemory {
  int tile_bytes;
  int ctas_per_sm;
};
PREFIXPACK_BOTH constexpr SharedMemory shared_memory(int capability) {
  // These have 100 KiB for an SM and 99 for a CTA, and run one CTA.
  if (capability == 86 || capability == 89 || capability == 120 || capability == 121) return {98 * 1024, 1};
  // Two CTAs share the 228 KiB of an sm_90 SM, one has an older SM for itself; 1 KiB per CTA is reserved by the system.
  return {112 * 1024, capability < 90 ? 1 : 2};
}

constexpr int kSharedBytes = shared_memory(kCapability).tile_bytes;
constexpr int kCtaStateBytes = 576;  // shared_memory() leaves room for this and the reserved 1 KiB
constexpr int kMaxStages = 4;

// 16 warps per SM hide each other's latency. Wider heads need the registers of eight.
template <int HeadDim>
constexpr int kCtaWarps = HeadDim > 128 ? 4 : 8;
template <int HeadDim>
constexpr int kCtaThreads = 32 * kCtaWarps<HeadDim>;

// Entries of partial lists that a CTA can hold while it combines: at least those of one query.
constexpr int kCombineScratchWords = 6 * 1024;

// A sliding window skips KV in multiples of this, whatever the CTA's KV tile.
constexpr int kWindowGranularity = 64;

// Floats of a row's accumulators in shared memory: head_dim, then the maximum and the sum; padded to 16 bytes and so
// that consecutive rows differ in banks.
template <int HeadDim>
constexpr int kAccumulatorStride = HeadDim + 8;
constexpr int kMaxKeyWarps = 4;
constexpr int kRowEpilogueBytes = 64;       // epilogue state of a row
constexpr int kTightRowEpilogueBytes = 48;  // where shared memory is little

// Layout of a tile's accumulators in shared memory: [key_warps][rows][kAccumulatorStride]. key_warps: warps that had
// different keys of the same rows. Bytes before and behind those of the first key warp are free after the reduction.
struct AccumulatorLayout {
  int32_t at;  // byte offset
  int32_t rows, key_warps;
  int32_t scratch_at;  // byte offset of the scratch of kCombineScratchWords words
};

// The epilogue state of the rows overlays the queries, in front. If they leave enough room, so does the scratch of the
// combine. Accumulators that do not fit behind the queries overlay them as well, behind the epilogue state.
template <int HeadDim, int Rows, int KeyWarps, int QueryBytes>
PREFIXPACK_BOTH constexpr AccumulatorLayout accumulator_layout() {
  static_assert(Rows * kRowEpilogueBytes <= QueryBytes && KeyWarps <= kMaxKeyWarps);
  constexpr int kKeyWarpBytes = Rows * kAccumulatorStride<HeadDim> * 4;
  constexpr bool kOverlay = QueryBytes + KeyWarps * kKeyWarpBytes > kSharedBytes;
  constexpr int kAt = kOverlay ? Rows * kTightRowEpilogueBytes : QueryBytes;
  constexpr bool kInFront = Rows * kRowEpilogueBytes + kCombineScratchWords * 4 <= kAt;
  constexpr int kBehind = kAt + kKeyWarpBytes;
  static_assert(kInFront || kBehind + kCombineScratchWords * 4 <= kSharedBytes, "room for combining");
  static_assert(kAt + KeyWarps * kKeyWarpBytes <= kSharedBytes, "accumulators of all key warps");
  return {kAt, Rows, KeyWarps, kInFront ? Rows * kRowEpilogueBytes : kBehind};
}

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int max_of(int a, int b) { return a > b ? a : b; }

// CTA tile of mma.sync. Rows are (query, head of the group). With few rows the warps share the keys of a KV tile and
// are reduced in the epilogue. From 16 rows per warp on, each warp has rows of its own. KvBytes: of a stored element.
template <int HeadDim, int Rows, int KvBytes>
struct MmaTile {
  static_assert(HeadDim % 64 == 0 && HeadDim <= 256, "the swizzle mixes groups of eight 16-byte chunks, or has four");
  static_assert(Rows == 32 || Rows == 64 || Rows == 128, "tile table");
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kRows = Rows;
  static constexpr int kThreads = kCtaThreads<HeadDim>;
  static constexpr int kRowWarps = min_of(kThreads / 32, Rows / 16);
  static constexpr int kKeyWarps = kThreads / 32 / kRowWarps;
  static constexpr int kRowBlocks = Rows / 16 / kRowWarps;  // 16-row blocks per warp
  static constexpr int kRowBytes = HeadDim * KvBytes;       // of K or V
  // Limited by the registers for scores. More keys where warps share them, and at least a 16-byte chunk per thread.
  static constexpr int kKeys = HeadDim > 128   ? (Rows > 32 ? 16 : 32)
                               : kKeyWarps > 2 ? kWindowGranularity
                                               : max_of(16 * kKeyWarps, kThreads * 16 / kRowBytes);
  static constexpr int kKeysPerWarp = kKeys / kKeyWarps;
  static constexpr int kQueryRowBytes = HeadDim * 2;
  static constexpr int kQueryBytes = Rows * kQueryRowBytes;
  static constexpr int kTileBytes = kKeys * kRowBytes;  // K or V of a stage
  static constexpr int kStages = min_of(kMaxStages, (kSharedBytes - kQueryBytes) / (2 * kTileBytes));
  PREFIXPACK_BOTH static constexpr AccumulatorLayout accumulators() {
    return accumulator_layout<HeadDim, Rows, kKeyWarps, kQueryBytes>();
  }

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

// Warp kernel: a warp has its queries and a ring of stages, each the K or the V of a KV tile. On sm_90 two such CTAs of
// eight warps share an SM, or one shares it with a CTA of the CTA kernel.
constexpr int kWarpBytes = 14 * 1024;
constexpr int kDecodeWarps = 8;  // at most
constexpr int kDecodeThreads = 32 * kDecodeWarps;
// Warps of a CTA in code compiled for a compute capability: as many as its shared memory holds.
PREFIXPACK_BOTH constexpr int decode_warps(int capability) { return shared_memory(capability).tile_bytes / kWarpBytes; }
static_assert(decode_warps(90) == kDecodeWarps && decode_warps(80) == kDecodeWarps && decode_warps(86) == 7);

template <int HeadDim, int KvBytes>
struct WarpTile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kRows = kWarpRows;
  static constexpr int kKeys = 16;
  static constexpr int kRowBytes = HeadDim * KvBytes;  // of K or V
  static constexpr int kQueryRowBytes = HeadDim * 2;
  static constexpr int kQueryBytes = kRows * kQueryRowBytes;
  static constexpr int kStageBytes = kKeys * kRowBytes;
  static constexpr bool kAccumulatorsInStage = kRows * HeadDim * 4 <= kStageBytes;  // accumulators overlay a stage
  static constexpr int kAccumulatorBytes =
      kAccumulatorsInStage ? 0 : kRows * HeadDim * 4;  // or have shared memory of their own
  static constexpr int kStages = min_of(8, (kWarpBytes - kQueryBytes - kAccumulatorBytes) / kStageBytes);

  static_assert(kStages >= 3, "a stage in use and two in flight");
};

// Whether there is a warp kernel. Wider heads leave a warp too few registers and too little shared memory.
template <int HeadDim>
constexpr bool kHasWarpKernel = HeadDim <= 128;

// Wider heads leave no registers for two row blocks per warp.
template <int HeadDim>
constexpr int kMaxTileRows = HeadDim > 128 ? 64 : 128;

}  // namespace prefixpack
