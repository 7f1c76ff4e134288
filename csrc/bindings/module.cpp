#include "bindings/bindings.h"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Native part of sgl_prefix_attn: planner, CPU executor and, where built with nvcc, the CUDA part.";
  prefixpack::bind_batch(m);
  prefixpack::bind_plan(m);
  prefixpack::bind_attention(m);
  prefixpack::bind_cpu(m);
  prefixpack::bind_cuda(m);
  prefixpack::bind_offline(m);
}
