#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace prefixpack {

inline void check_cuda(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

}  // namespace prefixpack
