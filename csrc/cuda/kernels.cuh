// The kernels as CUDA sees them; one small .cu file instantiates each head size.
#pragma once

#include "cuda/check.cuh"
#include "cuda/launch.h"
#include "cuda/queue.h"

namespace prefixpack {

template <int HeadDim, class Element>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    packed_kernel(const __grid_constant__ KernelParams params) {
  extern __shared__ __align__(1024) char shared[];
  run_queue<HeadDim, Element>(params, shared);
}

template <int HeadDim, class Element>
int32_t resident_blocks_of() {
  const auto kernel = packed_kernel<HeadDim, Element>;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kLaunchSharedBytes),
             "cudaFuncSetAttribute");
  int device = 0, multiprocessors = 0, per_multiprocessor = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
             "cudaDeviceGetAttribute");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, kThreads, kLaunchSharedBytes),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return multiprocessors * per_multiprocessor;
}

template <int HeadDim, class Element>
void launch_attention_of(const KernelParams& params, int32_t blocks, cudaStream_t stream) {
  packed_kernel<HeadDim, Element><<<blocks, kThreads, kLaunchSharedBytes, stream>>>(params);
  check_cuda(cudaGetLastError(), "packed attention");
}

#define PREFIXPACK_DECLARE(HEAD_DIM, ELEMENT)                      \
  extern template int32_t resident_blocks_of<HEAD_DIM, ELEMENT>(); \
  extern template void launch_attention_of<HEAD_DIM, ELEMENT>(const KernelParams&, int32_t, cudaStream_t);

#define PREFIXPACK_INSTANTIATE(HEAD_DIM, ELEMENT)           \
  template int32_t resident_blocks_of<HEAD_DIM, ELEMENT>(); \
  template void launch_attention_of<HEAD_DIM, ELEMENT>(const KernelParams&, int32_t, cudaStream_t);

#ifndef PREFIXPACK_INSTANTIATION
PREFIXPACK_DECLARE(64, ptx::BFloat16)
PREFIXPACK_DECLARE(64, ptx::Float16)
PREFIXPACK_DECLARE(128, ptx::BFloat16)
PREFIXPACK_DECLARE(128, ptx::Float16)
PREFIXPACK_DECLARE(256, ptx::BFloat16)
PREFIXPACK_DECLARE(256, ptx::Float16)
#endif

}  // namespace prefixpack
