// Devices as the CUDA runtime describes them. Without CUDA headers, so that any C++ file may include it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace prefixpack {

struct CudaDevice {
  std::string name;
  int32_t compute_capability;  // 90 for sm_90
  int32_t num_sms;
  int64_t shared_memory_per_block;  // bytes a CTA can opt in to
  int64_t l2_bytes;
};

// Returns an empty list if there is no device. Throws std::runtime_error on other failures of the runtime.
std::vector<CudaDevice> cuda_devices();

}  // namespace prefixpack
