// A unit of the widest tile with products of a warpgroup (wgmma).
//
// The tile's two halves of 64 rows alternate. While the softmax of one runs, the tensor cores add the values of the
// other. One barrier per KV tile: behind it everybody sees the tile that has arrived, and nobody reads the keys of the
// tile before it, nor the values of the one before that.
#pragma once

#include "cuda/block_rows.h"
#include "cuda/index_math.h"
#include "cuda/kernel_params.h"
#include "cuda/next_unit.h"
#include "cuda/ptx.h"
#include "cuda/softmax.h"
#include "cuda/tiles.h"
#include "cuda/wgmma.h"

namespace prefixpack {

// 128 rows. Matrices lie in shared memory as slabs of 64 columns, each row of a slab 128 bytes, swizzled.
template <int HeadDim, int SharedBytes>
struct WideTile {
  static constexpr int kHeadDim = HeadDim;
  static constexpr int kRows = 128;
  static constexpr int kRowWarps = kWarps;
  static constexpr int kKeyWarps = 1;
  static constexpr int kRowBlocks = 2;
  static constexpr int kKeys = 64;
  static constexpr int kKeysPerWarp = kKeys;
  static constexpr int kRowBytes = HeadDim * 2;
  static constexpr int kQueryRowBytes = kRowBytes;
  static constexpr int kSlabRowBytes = 128;
  static constexpr int kAtomBytes = 8 * kSlabRowBytes;
  static constexpr int kQueryBytes = kRows * kRowBytes;
  static constexpr int kQuerySlabBytes = kRows * kSlabRowBytes;
  static constexpr int kPieceBytes = kKeys * kRowBytes;  // K or V of a tile
  static constexpr int kSlabBytes = kKeys * kSlabRowBytes;
  static constexpr int kPieces = 5;
  static constexpr int kSumWidth = HeadDim + 8;  // as in Tile

  PREFIXPACK_BOTH static int32_t query_place(int32_t row, int32_t chunk) {
    return chunk / 8 * kQuerySlabBytes + swizzled(row, chunk % 8, kSlabRowBytes);
  }
  PREFIXPACK_BOTH static int32_t first_row(int32_t row_warp, int32_t block) { return block * 64 + row_warp * 16; }

  static_assert(HeadDim == 128, "products of 64 by 128 values");
  static_assert(kQueryBytes + kPieces * kPieceBytes <= SharedBytes, "room for the ring");
  static_assert(kRows * kSumWidth * 4 <= kPieces * kPieceBytes, "the sums lie where the ring was");
};

// KV of the format of products.
template <class TileT, class Format>
class WideUnit : BlockRows<TileT, Format> {
  using Rows = BlockRows<TileT, Format>;
  using Element = typename Format::Product;

 public:
  // item: of the unit, near.
  PREFIXPACK_DEVICE WideUnit(const KernelParams& params, const ItemRecord& item, int32_t kv_head, char* shared)
      : Rows(params, item, kv_head, shared), ring_(queries_ + TileT::kQueryBytes) {
    slots_ = params.step.kv_slots + item_.slots_at + (begin_ - item_.kv_begin);
    const int32_t chunk = thread_ % kChunks;
    copy_to_ = chunk / 8 * TileT::kSlabBytes + swizzled(thread_ / kChunks, chunk % 8, TileT::kSlabRowBytes);
  }

  // next: as for BlockUnit.
  PREFIXPACK_DEVICE void run(NextUnit* next) {
    begin_loads();
    this->start_sums();
    const int32_t ask_at = num_tiles_ - 2;
    int32_t ticket = ask_at < 0 ? next->ask(params_) : 0;
    ptx::copy_wait<1>();
    ptx::show_to_products();
    ptx::block_sync();
    // Ahead of the first tile its values with no weights: a branch round a product would make all of them wait for each
    // other.
    uint32_t weights[kSteps][4] = {};
    ptx::SharedAddress values = piece(1);
    for (int32_t tile = 0; ptx::uniform(tile < num_tiles_); ++tile) {
      if (ptx::uniform(tile > 0)) {
        ptx::copy_wait<0>();
        ptx::show_to_products();
        ptx::block_sync();
      }
      float scores[kKeyBlocks][4];
      multiply(tile, 0, scores, values, weights);
      if (ptx::uniform(tile > 0)) load_tile(tile + 1);
      if (ptx::uniform(tile == ask_at)) ticket = next->ask(params_);
      weigh(tile, 0, scores, weights);
      values = piece(2 * tile + 1);
      multiply(tile, 1, scores, values, weights);
      weigh(tile, 1, scores, weights);
    }
    add_values(1, values, weights);
    ptx::products_wait<0>();
    ptx::settle(output_[1]);
    ptx::copy_wait<0>();
    ptx::block_sync();  // the ring becomes the place of the sums, or the next unit's
    const int32_t word = next->ask_for_record(params_, ticket);
    this->store_rows();
    next->keep(ticket, word);
    ptx::block_sync();
  }

 private:
  using Rows::kChunks;
  using Rows::kKeyBlocks;
  using Rows::kRowsPerPass;
  static constexpr int kSteps = TileT::kKeys / 16;
  static constexpr int kPasses = TileT::kKeys / kRowsPerPass;
  static_assert(kRowsPerPass == 8, "a pass of copies fills whole atoms");
  static_assert(2 * kPasses <= 32, "a lane for each row that a warp copies");

  // Keys of tile t are piece 2 t, its values the next one.
  PREFIXPACK_DEVICE ptx::SharedAddress piece(int32_t index) const {
    return ring_ + index % TileT::kPieces * TileT::kPieceBytes;
  }

  // Loads ----------------------------------------------------------------------------------------------------------

  // Slots of the rows that this warp copies: in lane i of row i / 2 * 8 + i % 2 of the warp's.
  PREFIXPACK_DEVICE int32_t slots_of(int32_t tile) const {
    const int32_t key = tile * TileT::kKeys + lane_ / 2 * kRowsPerPass + thread_ / 32 * 2 + lane_ % 2;
    return lane_ < 2 * kPasses && key < keys_ ? slots_[key] : -1;
  }

  // from: of the tensor, strides in elements. What is near is read again for each piece, for want of registers.
  PREFIXPACK_DEVICE void copy_piece(int32_t index, const void* from, int64_t head_stride, int64_t slot_stride,
                                    int32_t slots) const {
    const ptx::SharedAddress to = piece(index) + copy_to_;
    const char* chunk = static_cast<const char*>(from) + kv_head_ * head_stride * 2 + thread_ % kChunks * 16;
    const auto stride = static_cast<int32_t>(slot_stride) * 2;
#pragma unroll
    for (int32_t pass = 0; pass < kPasses; ++pass) {
      const int32_t slot = ptx::shuffle(slots, pass * 2 + lane_ / 16);
      ptx::copy_async(to + pass * TileT::kAtomBytes, ptx::at(chunk, slot < 0 ? 0 : slot, stride), slot >= 0);
    }
  }
  PREFIXPACK_DEVICE void copy_tile(int32_t tile, int32_t slots) const {
    copy_piece(2 * tile, attention_.k, attention_.k_head_stride, attention_.k_slot_stride, slots);
    copy_piece(2 * tile + 1, attention_.v, attention_.v_head_stride, attention_.v_slot_stride, slots);
  }

  // Queries and two tiles, the first one even if it is empty. What is read to find them is read all at once.
  PREFIXPACK_DEVICE void begin_loads() {
    const int32_t first_slots = slots_of(0), second_slots = slots_of(1);
    const int64_t offset = this->query_offset();
    auto* offsets = reinterpret_cast<int64_t*>(shared_ + TileT::kQueryBytes + 4 * TileT::kPieceBytes);
    offsets[thread_] = offset;
    ptx::block_sync();
    this->copy_queries(offsets);
    copy_tile(0, first_slots);
    ptx::copy_commit();
    if (ptx::uniform(num_tiles_ > 1)) copy_tile(1, second_slots);
    ptx::copy_commit();
    next_slots_ = slots_of(2);
  }

  PREFIXPACK_DEVICE void load_tile(int32_t tile) {
    if (ptx::uniform(tile < num_tiles_)) copy_tile(tile, next_slots_);
    ptx::copy_commit();
    next_slots_ = slots_of(tile + 1);
  }

  // Products -------------------------------------------------------------------------------------------------------

  // Begins the products of a half's queries with the keys of a tile, then those of the other half's weights with its
  // values; waits for the first.
  PREFIXPACK_DEVICE void multiply(int32_t tile, int32_t half, float (&scores)[kKeyBlocks][4], ptx::SharedAddress values,
                                  uint32_t (&weights)[kSteps][4]) {
    const ptx::SharedAddress keys = piece(2 * tile), queries = queries_ + half * 64 * TileT::kSlabRowBytes;
    ptx::products_begin();
#pragma unroll
    for (int32_t step = 0; step < TileT::kHeadDim / 16; ++step) {
      const int32_t slab = step / 4, in_row = step % 4 * 32;
      const auto a = ptx::matrix_descriptor(queries + slab * TileT::kQuerySlabBytes + in_row, 0, TileT::kAtomBytes);
      const auto b = ptx::matrix_descriptor(keys + slab * TileT::kSlabBytes + in_row, 0, TileT::kAtomBytes);
      if (step == 0) {
        ptx::multiply_group<Element, false>(scores, a, b);
      } else {
        ptx::multiply_group<Element, true>(scores, a, b);
      }
    }
    ptx::products_commit();
    add_values(1 - half, values, weights);
    ptx::products_wait<1>();
    ptx::settle(scores);
  }

  PREFIXPACK_DEVICE void add_values(int32_t half, ptx::SharedAddress values, uint32_t (&weights)[kSteps][4]) {
    ptx::settle(weights);
    ptx::settle(output_[half]);
    ptx::products_begin();
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) {
      const auto b =
          ptx::matrix_descriptor(values + step * 2 * TileT::kAtomBytes, TileT::kSlabBytes, TileT::kAtomBytes);
      ptx::multiply_group<Element>(output_[half], weights[step], b);
    }
    ptx::products_commit();
  }

  // Scores become weights, when the products with the weights before them are done. Operands are written only while no
  // products are under way, or the compiler would make all of them wait for each other.
  PREFIXPACK_DEVICE void weigh(int32_t tile, int32_t half, float (&scores)[kKeyBlocks][4],
                               uint32_t (&weights)[kSteps][4]) {
    Rows::weigh(tile, half, scores);
    ptx::settle(scores);
    ptx::products_wait<0>();
    ptx::settle(output_[1 - half]);
    ptx::settle(scores);
#pragma unroll
    for (int32_t step = 0; step < kSteps; ++step) pack_weights<Element>(scores, step, weights[step]);
  }

  using Rows::attention_;
  using Rows::begin_;
  using Rows::item_;
  using Rows::keys_;
  using Rows::kv_head_;
  using Rows::lane_;
  using Rows::num_tiles_;
  using Rows::output_;
  using Rows::params_;
  using Rows::queries_;
  using Rows::shared_;
  using Rows::thread_;
  const ptx::SharedAddress ring_;
  const int32_t* slots_;
  ptx::SharedAddress copy_to_;
  int32_t next_slots_;
};

}  // namespace prefixpack
