#include "cuda/common/check.cuh"
#include "cuda/device.h"

namespace prefixpack {

std::vector<CudaDevice> cuda_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver) {
    cudaGetLastError();
    return {};
  }
  check_cuda(status, "cudaGetDeviceCount");
  std::vector<CudaDevice> devices;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, i), "cudaGetDeviceProperties");
    devices.push_back({properties.name, properties.major * 10 + properties.minor, properties.multiProcessorCount,
                       static_cast<int64_t>(properties.sharedMemPerBlockOptin), properties.l2CacheSize});
  }
  return devices;
}

}  // namespace prefixpack
