#include <stdexcept>
#include <string>

#include "cuda/kernels.cuh"
#include "cuda/launch.h"
#include "cuda/step_kernels.h"

namespace prefixpack {

namespace {

constexpr int kPrepareThreads = 128;

__global__ void __launch_bounds__(kPrepareThreads) prepare_kernel(const __grid_constant__ KernelParams params) {
  prepare_step(params);
}

// Calls run.operator()<HeadDim, Element>() for the instantiation that fits.
template <class Run>
auto dispatch(int32_t head_dim, DType dtype, const Run& run) {
  if (dtype == DType::kBFloat16) {
    if (head_dim == 64) return run.template operator()<64, ptx::BFloat16>();
    if (head_dim == 128) return run.template operator()<128, ptx::BFloat16>();
    if (head_dim == 256) return run.template operator()<256, ptx::BFloat16>();
  } else if (dtype == DType::kFloat16) {
    if (head_dim == 64) return run.template operator()<64, ptx::Float16>();
    if (head_dim == 128) return run.template operator()<128, ptx::Float16>();
    if (head_dim == 256) return run.template operator()<256, ptx::Float16>();
  }
  throw std::runtime_error("no kernel for head_dim " + std::to_string(head_dim) + " (64, 128, 256 in bf16 or fp16)");
}

struct Size {
  template <int HeadDim, class Element>
  LaunchSize operator()() const {
    return launch_size_of<HeadDim, Element>();
  }
};

struct Launch {
  const KernelParams& params;
  LaunchSize size;
  cudaStream_t stream;
  template <int HeadDim, class Element>
  void operator()() const {
    launch_attention_of<HeadDim, Element>(params, size, stream);
  }
};

}  // namespace

LaunchSize launch_size(int32_t head_dim, DType dtype) { return dispatch(head_dim, dtype, Size{}); }

void launch_prepare(const KernelParams& params, int32_t blocks, void* stream) {
  prepare_kernel<<<blocks, kPrepareThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  check_cuda(cudaGetLastError(), "preparation of the step");
}

void launch_attention(const KernelParams& params, LaunchSize size, void* stream) {
  for (int64_t stride : {params.attention.k_slot_stride, params.attention.v_slot_stride}) {
    if (stride > INT32_MAX / 2) throw std::runtime_error("KV slots lie further apart than 2^31 - 1 bytes");
  }
  dispatch(params.attention.head_dim, params.attention.dtype, Launch{params, size, static_cast<cudaStream_t>(stream)});
}

}  // namespace prefixpack
