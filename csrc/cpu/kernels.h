// All kernels of one instruction set; see isa.h. The including file sets, in its namespace:
//   kLanes      floats of a vector
//   kScoreKeys  keys whose scores with two vectors of rows fill the registers (tile_kernel.h)
//   kValueDims  likewise dimensions of the values; divides 16

// clang-format off: each needs the ones before
#include "cpu/simd.h"
#include "cpu/rows.h"
#include "cpu/row_kernel.h"
#include "cpu/tile_kernel.h"
#include "cpu/merge_kernel.h"
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
