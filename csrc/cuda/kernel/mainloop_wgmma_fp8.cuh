// Mainloop of a CTA tile of more than 32 rows with warpgroup MMA (wgmma), for KV in fp8 e4m3.
//
// wgmma reads both operands in one dtype, and those of fp8 would have to be K-major, which V is not. So each KV tile
// arrives raw, in a ring of two stages, and is converted to one fp16 tile of K and one of V. V is converted while the
// tensor cores compute Q*K^T, and the K of the next tile while they compute P*V. A thread converts what it has copied
// itself, so raw tiles need no barrier. There are two barriers per KV tile: one shows the converted K to all, one the
// converted V; each also says that the other operand is no longer read.
#pragma once

#include "cuda/common/index_math.h"
#include "cuda/common/ptx.cuh"
#include "cuda/common/wgmma.cuh"
#include "cuda/kernel/mainloop_wgmma_base.cuh"
#include "cuda/kernel_params.h"

namespace prefixpack {

template <class TileT, class Format>
class WgmmaFp8Mainloop : WgmmaRows<TileT, Format> {
  using Rows = WgmmaRows<TileT, Format>;

 public:
  PREFIXPACK_DEVICE WgmmaFp8Mainloop(const KernelParams& params, const CtaState& state, char* shared)
      : Rows(params, state, shared), keys_at_(queries_ + TileT::kQueryBytes) {
    converted_at_ = keys_at_ + slab_of_lane(lane_) * TileT::kSlabBytes + thread_ / 32 * TileT::kAtomBytes +
                    swizzled_offset(row_of_lane(lane_), lane_ % 4 * 2, TileT::kSlabRowBytes);
  }

  // Leaves the accumulators in shared memory, see run_epilogue.
  PREFIXPACK_DEVICE EpilogueInputs run(TilePrologue prologue) {
    begin_loads(prologue);
    this->clear_accumulators();
    const int32_t work = this->computed_tiles();
    convert_only(work == 0 ? 2 * num_tiles_ : 0);
    for (int32_t tile = 0; ptx::uniform(tile < work); ++tile) {
      ptx::cta_sync();
      float scores[kKeyBlocks][4];
      this->issue_scores(keys_at_, scores);
      convert(tile, false);
      this->finish_scores(scores);
      this->softmax_step(tile, 0, scores);
      uint32_t weights[Rows::kSteps][4];
      this->pack(scores, weights);
      ptx::cta_sync();
      this->issue_values(keys_at_ + TileT::kTileBytes, weights);
      convert_next_keys(tile);
      this->finish_values();
    }
    ptx::cp_async_wait<0>();
    ptx::cta_sync();  // the accumulators overlay the tiles
    return this->store_accumulators();
  }

 private:
  using Rows::kKeyBlocks;
  using Rows::kThreads;
  static constexpr int kRawBytes = TileT::kTileBytes / 2;  // K or V of a stage
  static constexpr int kSlabs = TileT::kHeadDim / 64;
  static constexpr int kRawChunks = TileT::kHeadDim / 16;  // of 16 bytes in a row
  static constexpr int kRowsPerPass = 32 / kRawChunks;     // of a warp
  static constexpr int kPasses = 8 / kRowsPerPass;
  static_assert(TileT::kKeys == kThreads / 4, "each warp copies and converts eight rows, an atom of each slab");

  // Raw stages hold the chunks in the order of the threads that copy them.
  PREFIXPACK_DEVICE ptx::SharedAddress raw_chunks(int32_t tile, int32_t thread) const {
    return keys_at_ + 2 * TileT::kTileBytes + tile % 2 * 2 * kRawBytes + thread * 16;
  }

  // What a thread copies and converts in pass 0: a row of the warp's eight, and a chunk of a row. Eight consecutive
  // lanes have one slab of two rows, so that their stores of converted chunks fill all banks.
  PREFIXPACK_DEVICE static int32_t row_of_lane(int32_t lane) { return lane / (8 * kSlabs) * 2 + lane / 4 % 2; }
  PREFIXPACK_DEVICE static int32_t slab_of_lane(int32_t lane) { return lane / 8 % kSlabs; }

  // Loads -----------------------------------------------------------------------------------------------------------

  // KV slots of the eight rows of this warp: lane i has that of row i % 8.
  PREFIXPACK_DEVICE int32_t copied_row() const { return thread_ / 32 * 8 + lane_ % 8; }
  PREFIXPACK_DEVICE int32_t slots_of(int32_t tile) const { return this->slot_of(tile * TileT::kKeys + copied_row()); }

  // Addresses are recomputed for each tile to save registers.
  PREFIXPACK_DEVICE void copy_tile(int32_t tile, int32_t slots) const {
    const int32_t thread = ptx::volatile_thread_index(), lane = thread % 32;
    const int32_t head = ptx::opaque(kv_head_), chunk = slab_of_lane(lane) * 4 + lane % 4;
    const char* k = static_cast<const char*>(attention_.k) + head * attention_.k_head_stride + chunk * 16;
    const char* v = static_cast<const char*>(attention_.v) + head * attention_.v_head_stride + chunk * 16;
    const auto k_stride = static_cast<int32_t>(attention_.k_slot_stride);
    const auto v_stride = static_cast<int32_t>(attention_.v_slot_stride);
    const ptx::SharedAddress to = raw_chunks(tile, thread);
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t slot = ptx::shuffle(slots, pass * kRowsPerPass + row_of_lane(lane));
      ptx::cp_async(to + pass * kThreads * 16, ptx::at(k, slot, k_stride));
      ptx::cp_async(to + pass * kThreads * 16 + kRawBytes, ptx::at(v, slot, v_stride));
    }
  }

  // Loads the queries and the first KV tile.
  PREFIXPACK_DEVICE void begin_loads(TilePrologue prologue) {
    this->store_prologue(prologue);
    ptx::cta_sync();
    this->load_queries(this->offsets());
    copy_if_any(0, this->first_slots()[copied_row()]);
    next_slots_ = this->first_slots()[TileT::kKeys + copied_row()];
  }

  PREFIXPACK_DEVICE void copy_if_any(int32_t tile, int32_t slots) const {
    if (ptx::uniform(tile < num_tiles_)) copy_tile(tile, slots);
    ptx::cp_async_commit();
  }
  PREFIXPACK_DEVICE void load_tile(int32_t tile) {
    copy_if_any(tile, next_slots_);
    next_slots_ = slots_of(tile + 1);
  }

  // Conversion ------------------------------------------------------------------------------------------------------

  // Converts the K or V that this thread has copied. A raw chunk becomes two, with the dimensions of Fp8Kv.
  PREFIXPACK_DEVICE void convert(int32_t tile, bool keys) const {
    const ptx::SharedAddress from = raw_chunks(tile, ptx::volatile_thread_index()) + (keys ? 0 : kRawBytes);
    const ptx::SharedAddress to = converted_at_ + (keys ? 0 : TileT::kTileBytes);
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      uint32_t raw[4], left[4], right[4];
      ptx::load_shared(from + pass * kThreads * 16, raw);
#pragma unroll
      for (int32_t word = 0; word < 4; ++word) {
        ptx::fp8_to_fp16(keys ? raw[word] : ptx::even_bytes_first(raw[word]), left[word], right[word]);
      }
      const int32_t first = pass * kRowsPerPass;
      const ptx::SharedAddress place =
          (to ^ static_cast<ptx::SharedAddress>(first << 4)) + first * TileT::kSlabRowBytes;
      ptx::store_shared(place, left);
      ptx::store_shared(place ^ 16, right);
    }
    ptx::fence_proxy_async();
  }

  // Beyond the last tile, too, what is converted is not read: a branch here would serialize the wgmma in flight.
  PREFIXPACK_DEVICE void convert_next_keys(int32_t tile) {
    load_tile(tile + 2);
    ptx::cp_async_wait<1>();
    convert(tile + 1, true);
  }

  // Step -1 converts the queries and the first K. The steps [0, steps) are those of a warpgroup without rows: V in even
  // ones, the K of the next tile in odd ones. They are in a loop of their own because a branch around wgmma would
  // serialize them.
  PREFIXPACK_DEVICE void convert_only(int32_t steps) {
#pragma unroll 1
    for (int32_t step = -1; ptx::uniform(step < steps); ++step) {
      const bool keys = step & 1;
      const int32_t tile = (step + 1) / 2;  // of the K or V that is converted
      ptx::cta_sync();
      if (ptx::uniform(keys)) {
        load_tile(tile + 1);
        ptx::cp_async_wait<1>();
      }
      if (ptx::uniform(step < 0)) {
        ptx::cta_sync();  // the queries have arrived
        this->convert_queries();
      }
      convert(tile, keys);
    }
  }

  using Rows::attention_;
  using Rows::kv_head_;
  using Rows::lane_;
  using Rows::num_tiles_;
  using Rows::queries_;
  using Rows::thread_;
  const ptx::SharedAddress keys_at_;  // converted K, then V, then the raw ring
  ptx::SharedAddress converted_at_;   // of the first K chunk that this thread converts
  int32_t next_slots_;
};

}  // namespace prefixpack
