#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "cpu/executor.h"

namespace py = pybind11;

namespace prefixpack {
namespace {

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const char* const* name = supported_isas(); *name != nullptr; ++name) names.emplace_back(*name);
  return names;
}

}  // namespace

void bind_cpu(py::module_& m) {
  m.def("cpu_isas", &isa_names, "Instruction sets that run_plan_cpu has kernels for on this machine, best first.");
  // The caller vouches for addresses, strides and dtypes (core/attention.py checks them); indices are checked here.
  m.def(
      "run_plan_cpu",
      [](const Plan& plan, const AttentionParams& params, const TensorSizes& sizes, int64_t threads,
         const std::string& isa) {
        if (threads < 1 || threads > kMostThreads) {
          throw std::invalid_argument("threads is " + std::to_string(threads) + "; expected 1 to " +
                                      std::to_string(kMostThreads));
        }
        const AttentionParams fixed = params;  // another Python thread may change the object
        const py::gil_scoped_release unlocked;
        check_inputs(plan, fixed, sizes);
        run_plan_cpu(plan, fixed, static_cast<int>(threads), isa.c_str());
      },
      py::arg("plan"), py::arg("params"), py::arg("sizes"), py::kw_only(), py::arg("threads"), py::arg("isa"),
      "Runs a plan on one layer. See sgl_prefix_attn.core.attention.packed_attention.");
}

}  // namespace prefixpack
