// Host side of the GPU kernels. Without CUDA headers, so that any C++ file may include it.
#pragma once

#include "cuda/draft_params.h"
#include "cuda/kernel_params.h"

namespace prefixpack {

// All launches go to `stream` (a cudaStream_t). They allocate nothing, do not synchronize, and may be captured into a
// CUDA graph. They throw std::runtime_error with CUDA's message if a launch fails.

// Grid of a packed launch: the CTAs that are resident on the device at once.
struct LaunchSize {
  int32_t ctas;          // CTAs of the CTA kernel
  int32_t few_ctas;      // of these, those that take tiles where the warp kernel has most of the work
  int32_t warp_ctas;     // CTAs of the warp kernel
  int32_t cta_warps;     // warps of each
  int32_t shared_bytes;  // dynamic shared memory of a CTA of the CTA kernel
  bool overlap;          // the warp kernel starts beside the CTA kernel (programmatic dependent launch, sm_90)
};

// Compute capability, 10 * major + minor, that the kernels' code for the current device was compiled for. Queries the
// driver, and throws if there is no such code.
int32_t code_capability();

// For the current device; of all kernels of these types. Queries the driver; call it once.
LaunchSize launch_size(int32_t head_dim, DType dtype, DType kv_dtype);

// Lengths and masks of a verify step.
void launch_draft_tables(const DraftParams& params, void* stream);

void launch_prepare(const KernelParams& params, int32_t ctas, void* stream);

// One layer: two kernels that run concurrently; those for trees of drafts if params.step.hidden is not nullptr.
// head_dim 64, 128 or 256; bf16 and fp16; KV in the same dtype or fp8 e4m3.
void launch_attention(const KernelParams& params, LaunchSize size, void* stream);

}  // namespace prefixpack
