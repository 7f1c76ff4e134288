#pragma once

#include <pybind11/pybind11.h>

namespace prefixpack {

void bind_batch(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_attention(pybind11::module_& m);
void bind_cpu(pybind11::module_& m);
void bind_cuda(pybind11::module_& m);
void bind_offline(pybind11::module_& m);

}  // namespace prefixpack
