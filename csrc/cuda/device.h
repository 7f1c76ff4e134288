// What the CUDA runtime says of its devices. No CUDA headers, so that any C++ file may include it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace prefixpack {

struct CudaDevice {
  std::string name;
  int32_t compute_capability;  // 90 for sm_90
  int32_t multiprocessors;
  int64_t shared_memory_per_block;  // bytes a block can opt in to
  int64_t l2_bytes;
};

// An empty list where there is no device; throws std::runtime_error where the runtime fails otherwise.
std::vector<CudaDevice> cuda_devices();

}  // namespace prefixpack
