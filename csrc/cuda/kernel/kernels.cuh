// The kernels as CUDA sees them; one small .cu file instantiates each head size.
#pragma once

#include "cuda/common/check.cuh"
#include "cuda/kernel/persistent_scheduler.cuh"
#include "cuda/launch.h"

namespace prefixpack {

// Before compute capability 9.0 shared memory has room for one block of either kernel, which then may have all
// registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kResidentBlocks = 1, kResidentLoneBlocks = 1;
#else
constexpr int kResidentBlocks = kBlocksPerMultiprocessor, kResidentLoneBlocks = kLoneBlocksPerMultiprocessor;
#endif

template <int HeadDim, class Format>
__global__ void __launch_bounds__(kBlockThreads<HeadDim>, kResidentBlocks)
    packed_blocks(const __grid_constant__ KernelParams params, int32_t blocks, int32_t few_blocks) {
  extern __shared__ __align__(1024) char shared[];
  run_blocks<HeadDim, Format>(params, shared, blocks, few_blocks);
}

template <int HeadDim, class Format>
__global__ void __launch_bounds__(kLoneThreads, kResidentLoneBlocks)
    packed_warps(const __grid_constant__ KernelParams params, int32_t blocks) {
  extern __shared__ __align__(1024) char shared[];
  run_warps<HeadDim, Format>(params, shared, blocks);
}

template <class Kernel>
int32_t resident(Kernel kernel, int32_t threads, int32_t shared_bytes) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes),
             "cudaFuncSetAttribute");
  int device = 0, multiprocessors = 0, per_multiprocessor = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, shared_bytes),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return multiprocessors * per_multiprocessor;
}

template <int HeadDim, class Format>
LaunchSize launch_size_of() {
  int device = 0, major = 0, multiprocessors = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  LaunchSize size{};
  size.blocks = size.few_blocks = resident(packed_blocks<HeadDim, Format>, kBlockThreads<HeadDim>, kLaunchSharedBytes);
  size.beside = major >= 9;
  if constexpr (kWarpsWorkAlone<HeadDim>) {
    size.warp_blocks = resident(packed_warps<HeadDim, Format>, kLoneThreads, kLoneWarps * kWarpBytes);
    if (size.beside && size.blocks > multiprocessors) size.few_blocks = multiprocessors;
  }
  return size;
}

template <int HeadDim, class Format>
void launch_attention_of(const KernelParams& params, LaunchSize size, cudaStream_t stream) {
  const int32_t blocks = size.blocks + size.warp_blocks;
  packed_blocks<HeadDim, Format>
      <<<size.blocks, kBlockThreads<HeadDim>, kLaunchSharedBytes, stream>>>(params, blocks, size.few_blocks);
  check_cuda(cudaGetLastError(), "packed attention");
  if constexpr (kWarpsWorkAlone<HeadDim>) {
    // Begins when all blocks of the first have begun, and runs beside them; on older devices, after them.
    cudaLaunchAttribute beside{};
    beside.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    beside.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(size.warp_blocks);
    config.blockDim = kLoneThreads;
    config.dynamicSmemBytes = kLoneWarps * kWarpBytes;
    config.stream = stream;
    config.attrs = &beside;
    config.numAttrs = size.beside ? 1 : 0;
    check_cuda(cudaLaunchKernelEx(&config, packed_warps<HeadDim, Format>, params, blocks), "packed attention of warps");
  }
}

#define PREFIXPACK_DECLARE(HEAD_DIM, FORMAT)                     \
  extern template LaunchSize launch_size_of<HEAD_DIM, FORMAT>(); \
  extern template void launch_attention_of<HEAD_DIM, FORMAT>(const KernelParams&, LaunchSize, cudaStream_t);

#define PREFIXPACK_INSTANTIATE(HEAD_DIM, FORMAT)          \
  template LaunchSize launch_size_of<HEAD_DIM, FORMAT>(); \
  template void launch_attention_of<HEAD_DIM, FORMAT>(const KernelParams&, LaunchSize, cudaStream_t);

using BFloat16Kv = SameFormat<ptx::BFloat16>;
using Float16Kv = SameFormat<ptx::Float16>;
using BFloat16WithFloat8Kv = Float8Format<ptx::BFloat16>;
using Float16WithFloat8Kv = Float8Format<ptx::Float16>;

#ifndef PREFIXPACK_INSTANTIATION
PREFIXPACK_DECLARE(64, BFloat16Kv)
PREFIXPACK_DECLARE(64, Float16Kv)
PREFIXPACK_DECLARE(64, BFloat16WithFloat8Kv)
PREFIXPACK_DECLARE(64, Float16WithFloat8Kv)
PREFIXPACK_DECLARE(128, BFloat16Kv)
PREFIXPACK_DECLARE(128, Float16Kv)
PREFIXPACK_DECLARE(128, BFloat16WithFloat8Kv)
PREFIXPACK_DECLARE(128, Float16WithFloat8Kv)
PREFIXPACK_DECLARE(256, BFloat16Kv)
PREFIXPACK_DECLARE(256, Float16Kv)
PREFIXPACK_DECLARE(256, BFloat16WithFloat8Kv)
PREFIXPACK_DECLARE(256, Float16WithFloat8Kv)
#endif

}  // namespace prefixpack
