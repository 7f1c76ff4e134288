// AttentionParams with named fields: both executors take it, Python reuses one object over the layers of a step.
#include <cstdint>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "cpu/executor.h"
#include "plan/checks.h"
#include "plan/params.h"

namespace py = pybind11;

namespace prefixpack {

namespace {

using Params = py::class_<AttentionParams>;

// An address as a Python integer.
template <class T>
void address(Params& params, const char* name, T* AttentionParams::* field) {
  params.def_property(
      name, [field](const AttentionParams& self) { return reinterpret_cast<uintptr_t>(self.*field); },
      [field](AttentionParams& self, uintptr_t value) { self.*field = reinterpret_cast<T*>(value); });
}

}  // namespace

void bind_attention(py::module_& m) {
  Params params(m, "AttentionParams");
  params.def(py::init([](int32_t q_heads, int32_t kv_heads, int32_t head_dim, int32_t dtype, int32_t kv_dtype) {
               // The CPU kernels keep a row of 256 elements on their stack.
               if (kv_heads < 1 || q_heads < kv_heads || q_heads % kv_heads != 0 || q_heads > kMostHeads) {
                 throw std::invalid_argument("q_heads is " + std::to_string(q_heads) + " and kv_heads " +
                                             std::to_string(kv_heads) +
                                             "; expected a multiple of kv_heads, up to 65536");
               }
               if (head_dim < 16 || head_dim > 256 || head_dim % 16 != 0) {
                 throw std::invalid_argument("head_dim is " + std::to_string(head_dim) +
                                             "; expected a multiple of 16 up to 256");
               }
               if (dtype < 0 || dtype > 2 || kv_dtype < 0 || kv_dtype > 3) {
                 throw std::invalid_argument("dtype is " + std::to_string(dtype) + " and kv_dtype " +
                                             std::to_string(kv_dtype) + "; expected 0 to 2, and 0 to 3");
               }
               AttentionParams made{};
               made.q_heads = q_heads;
               made.kv_heads = kv_heads;
               made.head_dim = head_dim;
               made.dtype = static_cast<DType>(dtype);
               made.kv_dtype = static_cast<DType>(kv_dtype);
               made.window_left = -1;
               made.scale = made.v_scale = 1.0f;
               return made;
             }),
             py::kw_only(), py::arg("q_heads"), py::arg("kv_heads"), py::arg("head_dim"), py::arg("dtype"),
             py::arg("kv_dtype"));
  params.def_readonly("q_heads", &AttentionParams::q_heads)
      .def_readonly("kv_heads", &AttentionParams::kv_heads)
      .def_readonly("head_dim", &AttentionParams::head_dim)
      .def_property_readonly("dtype", [](const AttentionParams& self) { return static_cast<int32_t>(self.dtype); })
      .def_property_readonly("kv_dtype",
                             [](const AttentionParams& self) { return static_cast<int32_t>(self.kv_dtype); })
      .def_readwrite("q_token_stride", &AttentionParams::q_token_stride)
      .def_readwrite("q_head_stride", &AttentionParams::q_head_stride)
      .def_readwrite("k_slot_stride", &AttentionParams::k_slot_stride)
      .def_readwrite("k_head_stride", &AttentionParams::k_head_stride)
      .def_readwrite("v_slot_stride", &AttentionParams::v_slot_stride)
      .def_readwrite("v_head_stride", &AttentionParams::v_head_stride)
      .def_readwrite("o_token_stride", &AttentionParams::o_token_stride)
      .def_readwrite("o_head_stride", &AttentionParams::o_head_stride)
      .def_readwrite("lse_token_stride", &AttentionParams::lse_token_stride)
      .def_readwrite("req_to_token_stride", &AttentionParams::req_to_token_stride)
      .def_readwrite("window_left", &AttentionParams::window_left)
      .def_readwrite("scale", &AttentionParams::scale)
      .def_readwrite("v_scale", &AttentionParams::v_scale)
      .def_readwrite("logit_cap", &AttentionParams::logit_cap);
  address(params, "q", &AttentionParams::q);
  address(params, "k", &AttentionParams::k);
  address(params, "v", &AttentionParams::v);
  address(params, "o", &AttentionParams::o);
  address(params, "lse", &AttentionParams::lse);
  address(params, "req_to_token", &AttentionParams::req_to_token);
  address(params, "req_pool_indices", &AttentionParams::req_pool_indices);
  address(params, "seq_lens", &AttentionParams::seq_lens);
  address(params, "visible", &AttentionParams::visible);
  address(params, "sinks", &AttentionParams::sinks);
  address(params, "partial_o", &AttentionParams::partial_o);
  address(params, "partial_lse", &AttentionParams::partial_lse);

  py::class_<TensorSizes>(m, "TensorSizes")
      .def(py::init([](int64_t num_tokens, int64_t num_requests, int64_t max_requests, int64_t max_context,
                       int64_t kv_slots) {
             return TensorSizes{num_tokens, num_requests, max_requests, max_context, kv_slots};
           }),
           py::kw_only(), py::arg("num_tokens"), py::arg("num_requests"), py::arg("max_requests"),
           py::arg("max_context"), py::arg("kv_slots"));
}

}  // namespace prefixpack
