#include <cuda_runtime.h>

#include <stdexcept>

#include "cuda/device.h"

namespace prefixpack {

namespace {

void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
}

}  // namespace

std::vector<CudaDevice> cuda_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    return {};
  }
  check(status, "cudaGetDeviceCount");
  std::vector<CudaDevice> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
    devices.push_back({properties.name, properties.major * 10 + properties.minor, properties.multiProcessorCount,
                       static_cast<int64_t>(properties.sharedMemPerBlockOptin), properties.l2CacheSize});
  }
  return devices;
}

}  // namespace prefixpack
