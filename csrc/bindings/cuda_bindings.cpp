#include <pybind11/stl.h>

#include <string>

#include "bindings/bindings.h"
#include "cuda/device.h"

namespace py = pybind11;

namespace prefixpack {

void bind_cuda(py::module_& m) {
#ifdef PREFIXPACK_WITH_CUDA
  m.attr("built_with_cuda") = true;
  m.def("cuda_devices", &cuda_devices,
        "Devices the CUDA runtime finds; RuntimeError with CUDA's words where it fails.");
  py::class_<CudaDevice>(m, "CudaDevice")
      .def_readonly("name", &CudaDevice::name)
      .def_readonly("compute_capability", &CudaDevice::compute_capability)
      .def_readonly("multiprocessors", &CudaDevice::multiprocessors)
      .def_readonly("shared_memory_per_block", &CudaDevice::shared_memory_per_block)
      .def_readonly("l2_bytes", &CudaDevice::l2_bytes)
      .def("__repr__", [](const CudaDevice& device) {
        return "<CudaDevice " + device.name + ", sm_" + std::to_string(device.compute_capability) + ", " +
               std::to_string(device.multiprocessors) + " multiprocessors>";
      });
#else
  m.attr("built_with_cuda") = false;
#endif
}

}  // namespace prefixpack
