#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "cpu/executor.h"

namespace py = pybind11;

namespace prefixpack {
namespace {

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const char* const* name = supported_isas(); *name != nullptr; ++name) names.emplace_back(*name);
  return names;
}

}  // namespace

void bind_cpu(py::module_& m) {
  m.def("cpu_isas", &isa_names, "Instruction sets that run_plan_cpu has kernels for on this machine, best first.");
  // The caller vouches for addresses, strides and dtypes (core/attention.py does); indices are checked here.
  m.def(
      "run_plan_cpu",
      [](const Plan& plan, uintptr_t q, int64_t q_token_stride, int64_t q_head_stride, uintptr_t k,
         int64_t k_slot_stride, int64_t k_head_stride, uintptr_t v, int64_t v_slot_stride, int64_t v_head_stride,
         uintptr_t o, int64_t o_token_stride, int64_t o_head_stride, uintptr_t lse, int64_t lse_token_stride,
         uintptr_t req_to_token, int64_t req_to_token_stride, uintptr_t req_pool_indices, uintptr_t seq_lens,
         uintptr_t sinks, uintptr_t partial_o, uintptr_t partial_lse, int32_t dtype, int32_t kv_dtype, int32_t q_heads,
         int32_t kv_heads, int32_t head_dim, int32_t window_left, float scale, float v_scale, float logit_cap,
         int64_t num_tokens, int64_t num_requests, int64_t max_requests, int64_t max_context, int64_t num_slots,
         int threads, const std::string& isa) {
        AttentionParams params;
        params.q = pointer<const void>(q);
        params.q_token_stride = q_token_stride;
        params.q_head_stride = q_head_stride;
        params.k = pointer<const void>(k);
        params.k_slot_stride = k_slot_stride;
        params.k_head_stride = k_head_stride;
        params.v = pointer<const void>(v);
        params.v_slot_stride = v_slot_stride;
        params.v_head_stride = v_head_stride;
        params.o = pointer<void>(o);
        params.o_token_stride = o_token_stride;
        params.o_head_stride = o_head_stride;
        params.lse = pointer<float>(lse);
        params.lse_token_stride = lse_token_stride;
        params.req_to_token = pointer<const int32_t>(req_to_token);
        params.req_to_token_stride = req_to_token_stride;
        params.req_pool_indices = pointer<const int64_t>(req_pool_indices);
        params.seq_lens = pointer<const int64_t>(seq_lens);
        params.sinks = pointer<const float>(sinks);
        params.partial_o = pointer<float>(partial_o);
        params.partial_lse = pointer<float>(partial_lse);
        params.dtype = static_cast<DType>(dtype);
        params.kv_dtype = static_cast<DType>(kv_dtype);
        params.q_heads = q_heads;
        params.kv_heads = kv_heads;
        params.head_dim = head_dim;
        params.window_left = window_left;
        params.scale = scale;
        params.v_scale = v_scale;
        params.logit_cap = logit_cap;
        const TensorSizes sizes{num_tokens, num_requests, max_requests, max_context, num_slots};
        const py::gil_scoped_release unlocked;
        check_inputs(plan, params, sizes);
        run_plan_cpu(plan, params, threads, isa.c_str());
      },
      "Runs a plan: raw addresses and strides in elements. See sgl_prefix_attn.core.attention.packed_attention.");
}

}  // namespace prefixpack
