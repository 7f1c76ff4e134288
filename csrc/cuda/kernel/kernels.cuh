// The __global__ kernels and their launches; one small .cu file instantiates each head size and dtype.
#pragma once

#include "cuda/common/check.cuh"
#include "cuda/kernel/persistent_scheduler.cuh"
#include "cuda/launch.h"

namespace prefixpack {

// CTAs on an SM, of either kernel. Where shared memory holds one CTA, it may use all registers.
constexpr int kResidentCtas = shared_memory(kCapability).ctas_per_sm;

template <int HeadDim, class Format>
__global__ void __launch_bounds__(kCtaThreads<HeadDim>, kResidentCtas)
    attention_ctas(const __grid_constant__ KernelParams params, int32_t few_ctas) {
  extern __shared__ __align__(1024) char shared[];
  run_cta_kernel<HeadDim, Format>(params, shared, few_ctas);
}

template <int HeadDim, class Format>
__global__ void __launch_bounds__(kDecodeThreads, kResidentCtas)
    attention_warps(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) char shared[];
  run_warp_kernel<HeadDim, Format>(params, shared);
}

template <class Kernel>
int32_t resident_ctas(Kernel kernel, int32_t threads, int32_t shared_bytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             "cudaFuncSetAttribute");
  int device = 0, sms = 0, ctas_per_sm = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&ctas_per_sm, kernel, threads, shared_bytes),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return sms * ctas_per_sm;
}

// Compute capability that the device's code of a kernel was compiled for: that of its binary, or of the PTX which the
// driver has compiled. This code, and not the device, decides what a launch needs.
template <class Kernel>
int32_t code_capability(Kernel kernel) {
  cudaFuncAttributes code{};
  check_cuda(cudaFuncGetAttributes(&code, kernel), "cudaFuncGetAttributes");
  return code.ptxVersion > 0 ? code.ptxVersion : code.binaryVersion;
}

template <int HeadDim, class Format>
LaunchSize launch_size_of() {
  int device = 0, major = 0, sms = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  LaunchSize size{};
  const int capability = code_capability(attention_ctas<HeadDim, Format>);
  const SharedMemory memory = shared_memory(capability);
  size.shared_bytes = memory.tile_bytes + kCtaStateBytes;
  size.ctas = size.few_ctas = resident_ctas(attention_ctas<HeadDim, Format>, kCtaThreads<HeadDim>, size.shared_bytes);
  // Code compiled for an older architecture lacks the instructions of a dependent launch. Where an SM holds one CTA,
  // none was tried.
  size.overlap = major >= 9 && capability >= 90 && memory.ctas_per_sm > 1;
  if constexpr (kHasWarpKernel<HeadDim>) {
    size.cta_warps = decode_warps(capability);
    size.warp_ctas = resident_ctas(attention_warps<HeadDim, Format>, 32 * size.cta_warps, size.cta_warps * kWarpBytes);
    if (size.overlap && size.ctas > sms) size.few_ctas = sms;
  }
  return size;
}

template <int HeadDim, class Format>
void launch_attention_of(const KernelParams& params, LaunchSize size, cudaStream_t stream) {
  attention_ctas<HeadDim, Format>
      <<<size.ctas, kCtaThreads<HeadDim>, static_cast<size_t>(size.shared_bytes), stream>>>(params, size.few_ctas);
  check_cuda(cudaGetLastError(), "packed attention");
  if constexpr (kHasWarpKernel<HeadDim>) {
    // Starts when all CTAs of the first kernel have started, and runs beside them. On older devices it runs after them.
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(size.warp_ctas);
    config.blockDim = static_cast<unsigned>(32 * size.cta_warps);
    config.dynamicSmemBytes = static_cast<size_t>(size.cta_warps * kWarpBytes);
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = size.overlap ? 1 : 0;
    check_cuda(cudaLaunchKernelEx(&config, attention_warps<HeadDim, Format>, params), "packed attention of warps");
  }
}

using BFloat16Kv = SameDtypeKv<ptx::BFloat16>;
using Float16Kv = SameDtypeKv<ptx::Float16>;
using BFloat16WithFloat8Kv = Fp8Kv<ptx::BFloat16>;
using Float16WithFloat8Kv = Fp8Kv<ptx::Float16>;

// Template declarations of one head size and format, with and without draft trees. LINKAGE: `extern` or nothing.
#define PREFIXPACK_KERNELS(LINKAGE, HEAD_DIM, FORMAT)                                                         \
  LINKAGE template LaunchSize launch_size_of<HEAD_DIM, FORMAT>();                                             \
  LINKAGE template LaunchSize launch_size_of<HEAD_DIM, WithTrees<FORMAT>>();                                  \
  LINKAGE template void launch_attention_of<HEAD_DIM, FORMAT>(const KernelParams&, LaunchSize, cudaStream_t); \
  LINKAGE template void launch_attention_of<HEAD_DIM, WithTrees<FORMAT>>(const KernelParams&, LaunchSize, cudaStream_t);

#define PREFIXPACK_INSTANTIATE(HEAD_DIM, FORMAT) PREFIXPACK_KERNELS(, HEAD_DIM, FORMAT)

#ifndef PREFIXPACK_INSTANTIATION
#define PREFIXPACK_DECLARE(HEAD_DIM)                         \
  PREFIXPACK_KERNELS(extern, HEAD_DIM, BFloat16Kv)           \
  PREFIXPACK_KERNELS(extern, HEAD_DIM, Float16Kv)            \
  PREFIXPACK_KERNELS(extern, HEAD_DIM, BFloat16WithFloat8Kv) \
  PREFIXPACK_KERNELS(extern, HEAD_DIM, Float16WithFloat8Kv)
PREFIXPACK_DECLARE(64)
PREFIXPACK_DECLARE(128)
PREFIXPACK_DECLARE(256)
#endif

}  // namespace prefixpack
