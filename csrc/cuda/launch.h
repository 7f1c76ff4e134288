// Host side of the GPU kernels. No CUDA headers, so that any C++ file may include it.
#pragma once

#include "cuda/kernel_params.h"

namespace prefixpack {

// All launches go to `stream` (a cudaStream_t), allocate nothing, wait for nothing and may be captured into a graph.
// They throw std::runtime_error with CUDA's words if a launch is refused.

// Blocks of a packed launch: what fits on a device at once.
struct LaunchSize {
  int32_t ctas;  // that take units for blocks
  int32_t
      few_ctas;  // of these, where most of the work is for warps: one on each multiprocessor that has room for both
  int32_t warp_ctas;  // whose warps take units for warps
  bool overlap;          // whether the second kernel may begin beside the first: compute capability 9.0 and later
};

// Of the current device. Asks the driver; call it once.
LaunchSize launch_size(int32_t head_dim, DType dtype, DType kv_dtype);

void launch_prepare(const KernelParams& params, int32_t ctas, void* stream);

// One layer: two kernels side by side. Supported: head_dim 64, 128, 256; bf16 and fp16, KV of the same type or in fp8
// e4m3.
void launch_attention(const KernelParams& params, LaunchSize size, void* stream);

}  // namespace prefixpack
