// Host side of the GPU kernels. No CUDA headers, so that any C++ file may include it.
#pragma once

#include "cuda/kernel_params.h"

namespace prefixpack {

// All launches go to `stream` (a cudaStream_t), allocate nothing, wait for nothing and may be captured into a graph.
// They throw std::runtime_error with CUDA's words if a launch is refused.

// Blocks of a packed launch: what fits on the current device at once. Asks the driver; call it once.
int32_t resident_blocks(int32_t head_dim, DType dtype);

void launch_prepare(const KernelParams& params, int32_t blocks, void* stream);

// One layer: a single kernel. Supported: head_dim 64, 128, 256; bf16 and fp16, KV of the same type.
void launch_attention(const KernelParams& params, int32_t blocks, void* stream);

}  // namespace prefixpack
