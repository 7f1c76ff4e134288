#include <algorithm>
#include <stdexcept>
#include <string>

#include "cuda/kernel/draft_tables.cuh"
#include "cuda/kernel/kernels.cuh"
#include "cuda/kernel/prepare.cuh"
#include "cuda/launch.h"

namespace prefixpack {

namespace {

constexpr int kPrepareThreads = 128;

__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const __grid_constant__ KernelParams params) {
  prepare_step(params);
}

__global__ void __launch_bounds__(kDraftTableThreads) draft_tables_kernel(const __grid_constant__ DraftParams params) {
  fill_draft_tables(params);
}

// Calls run.operator()<HeadDim, Format>() for the matching instantiation.
template <class Format, class Run>
auto dispatch_head_dim(int32_t head_dim, const Run& run) {
  switch (head_dim) {
    case 64:
      return run.template operator()<64, Format>();
    case 128:
      return run.template operator()<128, Format>();
    case 256:
      return run.template operator()<256, Format>();
  }
  throw std::runtime_error("no kernel for head_dim " + std::to_string(head_dim) + ", only for 64, 128 and 256");
}

template <class Format, class Run>
auto dispatch(int32_t head_dim, bool trees, const Run& run) {
  return trees ? dispatch_head_dim<WithTrees<Format>>(head_dim, run) : dispatch_head_dim<Format>(head_dim, run);
}

template <class Run>
auto dispatch(int32_t head_dim, DType dtype, DType kv_dtype, bool trees, const Run& run) {
  const bool float8 = kv_dtype == DType::kFloat8E4M3;
  if (!float8 && kv_dtype != dtype) throw std::runtime_error("no kernel for KV of another type than queries, but fp8");
  if (dtype == DType::kBFloat16) {
    return float8 ? dispatch<BFloat16WithFloat8Kv>(head_dim, trees, run) : dispatch<BFloat16Kv>(head_dim, trees, run);
  }
  if (dtype == DType::kFloat16) {
    return float8 ? dispatch<Float16WithFloat8Kv>(head_dim, trees, run) : dispatch<Float16Kv>(head_dim, trees, run);
  }
  throw std::runtime_error("no kernel for queries that are neither bf16 nor fp16");
}

struct Size {
  template <int HeadDim, class Format>
  LaunchSize operator()() const {
    return launch_size_of<HeadDim, Format>();
  }
};

struct Launch {
  const KernelParams& params;
  LaunchSize size;
  cudaStream_t stream;
  template <int HeadDim, class Format>
  void operator()() const {
    launch_attention_of<HeadDim, Format>(params, size, stream);
  }
};

}  // namespace

int32_t code_capability() { return code_capability(prepare_kernel); }

LaunchSize launch_size(int32_t head_dim, DType dtype, DType kv_dtype) {
  const LaunchSize size = dispatch(head_dim, dtype, kv_dtype, false, Size{});
  const LaunchSize with_trees = dispatch(head_dim, dtype, kv_dtype, true, Size{});
  return {std::min(size.ctas, with_trees.ctas),
          std::min(size.few_ctas, with_trees.few_ctas),
          std::min(size.warp_ctas, with_trees.warp_ctas),
          size.cta_warps,
          size.shared_bytes,
          size.overlap};
}

void launch_draft_tables(const DraftParams& params, void* stream) {
  draft_tables_kernel<<<params.rows, kDraftTableThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  check_cuda(cudaGetLastError(), "tables of a verify step");
}

void launch_prepare(const KernelParams& params, int32_t ctas, void* stream) {
  prepare_kernel<<<ctas, kPrepareThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  check_cuda(cudaGetLastError(), "preparation of the step");
}

void launch_attention(const KernelParams& params, LaunchSize size, void* stream) {
  for (int64_t stride : {params.attention.k_slot_stride, params.attention.v_slot_stride}) {
    if (stride > INT32_MAX / 2) throw std::runtime_error("KV slots lie further apart than 2^31 - 1 bytes");
  }
  const AttentionParams& attention = params.attention;
  dispatch(attention.head_dim, attention.dtype, attention.kv_dtype, params.step.hidden != nullptr,
           Launch{params, size, static_cast<cudaStream_t>(stream)});
}

}  // namespace prefixpack
