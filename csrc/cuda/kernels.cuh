// The kernels as CUDA sees them; one small .cu file instantiates each head size.
#pragma once

#include "cuda/check.cuh"
#include "cuda/launch.h"
#include "cuda/queue.h"

namespace prefixpack {

template <int HeadDim, class Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    packed_blocks(const __grid_constant__ KernelParams params, int32_t blocks) {
  extern __shared__ __align__(1024) char shared[];
  run_blocks<HeadDim, Element>(params, shared, blocks);
}

template <int HeadDim, class Element>
__global__ void __launch_bounds__(kLoneThreads, kLoneBlocksPerMultiprocessor)
    packed_warps(const __grid_constant__ KernelParams params, int32_t blocks) {
  extern __shared__ __align__(1024) char shared[];
  run_warps<HeadDim, Element>(params, shared, blocks);
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

template <int HeadDim, class Element>
LaunchSize launch_size_of() {
  int device = 0, major = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  LaunchSize size{resident(packed_blocks<HeadDim, Element>, kThreads, kLaunchSharedBytes), 0, major >= 9};
  if constexpr (kWarpsWorkAlone<HeadDim>) {
    size.warp_blocks = resident(packed_warps<HeadDim, Element>, kLoneThreads, kLoneWarps * kWarpBytes);
  }
  return size;
}

template <int HeadDim, class Element>
void launch_attention_of(const KernelParams& params, LaunchSize size, cudaStream_t stream) {
  const int32_t blocks = size.blocks + size.warp_blocks;
  packed_blocks<HeadDim, Element><<<size.blocks, kThreads, kLaunchSharedBytes, stream>>>(params, blocks);
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
    check_cuda(cudaLaunchKernelEx(&config, packed_warps<HeadDim, Element>, params, blocks),
               "packed attention of warps");
  }
}

#define PREFIXPACK_DECLARE(HEAD_DIM, ELEMENT)                     \
  extern template LaunchSize launch_size_of<HEAD_DIM, ELEMENT>(); \
  extern template void launch_attention_of<HEAD_DIM, ELEMENT>(const KernelParams&, LaunchSize, cudaStream_t);

#define PREFIXPACK_INSTANTIATE(HEAD_DIM, ELEMENT)          \
  template LaunchSize launch_size_of<HEAD_DIM, ELEMENT>(); \
  template void launch_attention_of<HEAD_DIM, ELEMENT>(const KernelParams&, LaunchSize, cudaStream_t);

#ifndef PREFIXPACK_INSTANTIATION
PREFIXPACK_DECLARE(64, ptx::BFloat16)
PREFIXPACK_DECLARE(64, ptx::Float16)
PREFIXPACK_DECLARE(128, ptx::BFloat16)
PREFIXPACK_DECLARE(128, ptx::Float16)
PREFIXPACK_DECLARE(256, ptx::BFloat16)
PREFIXPACK_DECLARE(256, ptx::Float16)
#endif

}  // namespace prefixpack
