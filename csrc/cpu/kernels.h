// All kernels of one instruction set; see isa.h. The including file defines in its namespace:
//   kLanes      floats per vector
//   kScoreKeys  keys whose scores, with two vectors of rows, fill the registers (tile_kernel.h)
//   kValueDims  value dimensions that do so; divides 16

// clang-format off: the order matters
#include "cpu/simd.h"
#include "cpu/rows.h"
#include "cpu/row_kernel.h"
#include "cpu/tile_kernel.h"
#include "cpu/combine_kernel.h"
// clang-format on

template <DType kType>
inline void run_item_of(const ItemTask& task, Scratch& scratch) {
  const AttentionParams& p = *task.params;
  if (task.item->query_count * (p.q_heads / p.kv_heads) <= kRowKernelRows) {
    run_rows<kType>(task, scratch);
  } else {
    run_tile<kType>(task, scratch);
  }
}

inline void run_item(const ItemTask& task, Scratch& scratch) {
  switch (task.params->kv_dtype) {
    case DType::kFloat32:
      return run_item_of<DType::kFloat32>(task, scratch);
    case DType::kBFloat16:
      return run_item_of<DType::kBFloat16>(task, scratch);
    case DType::kFloat16:
      return run_item_of<DType::kFloat16>(task, scratch);
    case DType::kFloat8E4M3:
      return run_item_of<DType::kFloat8E4M3>(task, scratch);
  }
}
