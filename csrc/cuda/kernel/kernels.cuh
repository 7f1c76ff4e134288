// The __global__ kernels and their launches; one small .cu file instantiates each head size and dtype.
#pragma once

#include "cuda/common/check.cuh"
#include "cuda/kernel/persistent_scheduler.cuh"
#include "cuda/launch.h"

namespace prefixpack {

// Before compute capability 9.0, shared memory holds one CTA of either kernel, which may use all registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kResidentCtas = 1, kResidentDecodeCtas = 1;
#else
constexpr int kResidentCtas = kCtasPerSm, kResidentDecodeCtas = kDecodeCtasPerSm;
#endif

template <int HeadDim, class Format>
__global__ void __launch_bounds__(kCtaThreads<HeadDim>, kResidentCtas)
    attention_ctas(const __grid_constant__ KernelParams params, int32_t ctas, int32_t few_ctas) {
  extern __shared__ __align__(1024) char shared[];
  run_cta_kernel<HeadDim, Format>(params, shared, ctas, few_ctas);
}

template <int HeadDim, class Format>
__global__ void __launch_bounds__(kDecodeThreads, kResidentDecodeCtas)
    attention_warps(const __grid_constant__ KernelParams params, int32_t ctas) {
  extern __shared__ __align__(1024) char shared[];
  run_warp_kernel<HeadDim, Format>(params, shared, ctas);
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

template <int HeadDim, class Format>
LaunchSize launch_size_of() {
  int device = 0, major = 0, sms = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  LaunchSize size{};
  size.ctas = size.few_ctas = resident_ctas(attention_ctas<HeadDim, Format>, kCtaThreads<HeadDim>, kLaunchSharedBytes);
  // Code compiled from PTX of an older architecture lacks the instructions of a dependent launch.
  cudaFuncAttributes code{};
  check_cuda(cudaFuncGetAttributes(&code, attention_ctas<HeadDim, Format>), "cudaFuncGetAttributes");
  const bool lacks_dependent_launch = code.ptxVersion > 0 && code.ptxVersion < 90;
  size.overlap = major >= 9 && !lacks_dependent_launch;
  if constexpr (kHasWarpKernel<HeadDim>) {
    size.warp_ctas = resident_ctas(attention_warps<HeadDim, Format>, kDecodeThreads, kDecodeWarps * kWarpBytes);
    if (size.overlap && size.ctas > sms) size.few_ctas = sms;
  }
  return size;
}

template <int HeadDim, class Format>
void launch_attention_of(const KernelParams& params, LaunchSize size, cudaStream_t stream) {
  const int32_t ctas = size.ctas + size.warp_ctas;
  attention_ctas<HeadDim, Format>
      <<<size.ctas, kCtaThreads<HeadDim>, kLaunchSharedBytes, stream>>>(params, ctas, size.few_ctas);
  check_cuda(cudaGetLastError(), "packed attention");
  if constexpr (kHasWarpKernel<HeadDim>) {
    // Starts when all CTAs of the first kernel have started, and runs beside them. On older devices it runs after them.
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(size.warp_ctas);
    config.blockDim = kDecodeThreads;
    config.dynamicSmemBytes = kDecodeWarps * kWarpBytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = size.overlap ? 1 : 0;
    check_cuda(cudaLaunchKernelEx(&config, attention_warps<HeadDim, Format>, params, ctas),
               "packed attention of warps");
  }
}

#define PREFIXPACK_DECLARE(HEAD_DIM, FORMAT)                     \
  extern template LaunchSize launch_size_of<HEAD_DIM, FORMAT>(); \
  extern template void launch_attention_of<HEAD_DIM, FORMAT>(const KernelParams&, LaunchSize, cudaStream_t);

#define PREFIXPACK_INSTANTIATE(HEAD_DIM, FORMAT)          \
  template LaunchSize launch_size_of<HEAD_DIM, FORMAT>(); \
  template void launch_attention_of<HEAD_DIM, FORMAT>(const KernelParams&, LaunchSize, cudaStream_t);

using BFloat16Kv = SameDtypeKv<ptx::BFloat16>;
using Float16Kv = SameDtypeKv<ptx::Float16>;
using BFloat16WithFloat8Kv = Fp8Kv<ptx::BFloat16>;
using Float16WithFloat8Kv = Fp8Kv<ptx::Float16>;

#ifndef PREFIXPACK_INSTANTIATION
PREFIXPACK_DECLARE(64, BFloat16Kv)
PREFIXPACK_DECLARE(64, WithTrees<BFloat16Kv>)
PREFIXPACK_DECLARE(64, Float16Kv)
PREFIXPACK_DECLARE(64, WithTrees<Float16Kv>)
PREFIXPACK_DECLARE(64, BFloat16WithFloat8Kv)
PREFIXPACK_DECLARE(64, WithTrees<BFloat16WithFloat8Kv>)
PREFIXPACK_DECLARE(64, Float16WithFloat8Kv)
PREFIXPACK_DECLARE(64, WithTrees<Float16WithFloat8Kv>)
PREFIXPACK_DECLARE(128, BFloat16Kv)
PREFIXPACK_DECLARE(128, WithTrees<BFloat16Kv>)
PREFIXPACK_DECLARE(128, Float16Kv)
PREFIXPACK_DECLARE(128, WithTrees<Float16Kv>)
PREFIXPACK_DECLARE(128, BFloat16WithFloat8Kv)
PREFIXPACK_DECLARE(128, WithTrees<BFloat16WithFloat8Kv>)
PREFIXPACK_DECLARE(128, Float16WithFloat8Kv)
PREFIXPACK_DECLARE(128, WithTrees<Float16WithFloat8Kv>)
PREFIXPACK_DECLARE(256, BFloat16Kv)
PREFIXPACK_DECLARE(256, WithTrees<BFloat16Kv>)
PREFIXPACK_DECLARE(256, Float16Kv)
PREFIXPACK_DECLARE(256, WithTrees<Float16Kv>)
PREFIXPACK_DECLARE(256, BFloat16WithFloat8Kv)
PREFIXPACK_DECLARE(256, WithTrees<BFloat16WithFloat8Kv>)
PREFIXPACK_DECLARE(256, Float16WithFloat8Kv)
PREFIXPACK_DECLARE(256, WithTrees<Float16WithFloat8Kv>)
#endif

}  // namespace prefixpack
