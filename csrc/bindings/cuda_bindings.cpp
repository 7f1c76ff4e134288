#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "bindings/views.h"
#include "cuda/common/index_math.h"
#include "cuda/device.h"
#include "cuda/kernel/kernel_traits.cuh"
#include "cuda/kernel_params.h"
#include "cuda/launch.h"
#include "cuda/serialize_plan.h"
#include "plan/active_warps.h"
#include "plan/checks.h"

namespace py = pybind11;

namespace prefixpack {

namespace {

SerializedPlan serialize(const Plan& plan, const py::array_t<int64_t, py::array::c_style>& seq_lens, int32_t growth,
                         int32_t group, int32_t kv_heads, int32_t warp_ctas, int32_t cta_warps) {
  if (seq_lens.ndim() != 1 || seq_lens.shape(0) != plan.num_requests) {
    throw std::invalid_argument("seq_lens must have one entry for each of the plan's " +
                                std::to_string(plan.num_requests) + " requests");
  }
  for (int32_t request = 0; request < plan.num_requests; ++request) {
    const int64_t length = seq_lens.data()[request];
    if (length < 0 || length > INT32_MAX) {
      throw std::invalid_argument("request " + std::to_string(request) + ": seq_lens is " + std::to_string(length) +
                                  "; it has to be 0 to 2^31 - 1");
    }
  }
  if (growth < 0 || warp_ctas < 0) {
    throw std::invalid_argument("growth is " + std::to_string(growth) + " and warp_ctas " + std::to_string(warp_ctas) +
                                "; they have to be at least 0");
  }
  if (kv_heads < 1 || group < 1 || int64_t{kv_heads} * group > kMostHeads) {
    throw std::invalid_argument("kv_heads is " + std::to_string(kv_heads) + " and group " + std::to_string(group) +
                                "; they have to be at least 1, and their product at most 2^16");
  }
  if (cta_warps < kMinActiveWarps || cta_warps > kDecodeWarps) {
    throw std::invalid_argument("cta_warps is " + std::to_string(cta_warps) + "; it has to be " +
                                std::to_string(kMinActiveWarps) + " to " + std::to_string(kDecodeWarps));
  }
  return serialize_plan(plan, seq_lens.data(), growth, group, kv_heads, warp_ctas, cta_warps);
}

// Word of each field of PlanHeader.
py::dict plan_header() {
  py::dict fields;
#define PREFIXPACK_FIELD(NAME) fields[#NAME] = offsetof(PlanHeader, NAME) / sizeof(int32_t)
  PREFIXPACK_FIELD(num_items);
  PREFIXPACK_FIELD(num_queries);
  PREFIXPACK_FIELD(num_combines);
  PREFIXPACK_FIELD(items_at);
  PREFIXPACK_FIELD(item_kv_slots_at);
  PREFIXPACK_FIELD(query_token_at);
  PREFIXPACK_FIELD(query_request_at);
  PREFIXPACK_FIELD(query_back_at);
  PREFIXPACK_FIELD(combine_query_at);
  PREFIXPACK_FIELD(combine_offset_at);
  PREFIXPACK_FIELD(combine_partial_at);
  PREFIXPACK_FIELD(num_cta_items);
  PREFIXPACK_FIELD(active_warps);
  PREFIXPACK_FIELD(mostly_narrow);
  PREFIXPACK_FIELD(list_offset_at);
  PREFIXPACK_FIELD(list_partial_at);
#undef PREFIXPACK_FIELD
  return fields;
}

#ifdef PREFIXPACK_WITH_CUDA

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// Device addresses of a plan and of what the preparation kernel makes of it.
struct StepAddresses {
  uintptr_t words, items, prologues, query_position, kv_slots, tile_counters, semaphores, hidden;
  int32_t num_prologues;

  void fill(KernelParams& params, bool trees) const {
    params.plan.words = pointer<const int32_t>(words);
    params.step = {pointer<ItemRecord>(items),
                   pointer<ItemPrologue>(prologues),
                   pointer<int32_t>(query_position),
                   pointer<int32_t>(kv_slots),
                   pointer<int32_t>(tile_counters),
                   pointer<int32_t>(semaphores),
                   trees ? pointer<uint64_t>(hidden) : nullptr,
                   num_prologues};
  }
};

void bind_launches(py::module_& m) {
  py::class_<StepAddresses>(m, "StepAddresses")
      .def(py::init([](uintptr_t words, uintptr_t items, uintptr_t prologues, uintptr_t query_position,
                       uintptr_t kv_slots, uintptr_t tile_counters, uintptr_t semaphores, uintptr_t hidden,
                       int32_t num_prologues) {
             return StepAddresses{words,         items,      prologues, query_position, kv_slots,
                                  tile_counters, semaphores, hidden,    num_prologues};
           }),
           py::kw_only(), py::arg("words"), py::arg("items"), py::arg("prologues"), py::arg("query_position"),
           py::arg("kv_slots"), py::arg("tile_counters"), py::arg("semaphores"), py::arg("hidden"),
           py::arg("num_prologues"));
  py::class_<LaunchSize>(m, "LaunchSize")
      .def_readonly("ctas", &LaunchSize::ctas)
      .def_readonly("few_ctas", &LaunchSize::few_ctas)
      .def_readonly("warp_ctas", &LaunchSize::warp_ctas)
      .def_readonly("cta_warps", &LaunchSize::cta_warps)
      .def_readonly("shared_bytes", &LaunchSize::shared_bytes)
      .def_readonly("overlap", &LaunchSize::overlap);
  m.def(
      "cuda_launch_size",
      [](int32_t head_dim, int32_t dtype, int32_t kv_dtype) {
        return launch_size(head_dim, static_cast<DType>(dtype), static_cast<DType>(kv_dtype));
      },
      py::kw_only(), py::arg("head_dim"), py::arg("dtype"), py::arg("kv_dtype"),
      "CTAs of a packed launch on the current device. Asks the driver.");
  m.def("cuda_code_capability", &code_capability,
        "Compute capability that the code for the current device was compiled for. Asks the driver.");
  m.def(
      "cuda_draft_tables",
      [](uintptr_t committed, uintptr_t mask, int64_t mask_size, int32_t rows, int32_t requests, int32_t drafts,
         bool has_committed_columns, uintptr_t seq_lens, uintptr_t visible, uintptr_t stream) {
        const DraftParams params{pointer<const int64_t>(committed),
                                 pointer<const uint8_t>(mask),
                                 mask_size,
                                 rows,
                                 requests,
                                 drafts,
                                 has_committed_columns,
                                 pointer<int64_t>(seq_lens),
                                 pointer<uint64_t>(visible)};
        launch_draft_tables(params, pointer<void>(stream));
      },
      py::kw_only(), py::arg("committed"), py::arg("mask"), py::arg("mask_size"), py::arg("rows"), py::arg("requests"),
      py::arg("drafts"), py::arg("has_committed_columns"), py::arg("seq_lens"), py::arg("visible"), py::arg("stream"),
      "Launches the tables of a verify step. See sgl_prefix_attn.core.draft_tables.");
  m.def(
      "cuda_prepare",
      [](const StepAddresses& step, uintptr_t req_to_token, int64_t req_to_token_stride, uintptr_t req_pool_indices,
         uintptr_t seq_lens, uintptr_t visible, int32_t ctas, uintptr_t stream) {
        KernelParams params{};
        step.fill(params, visible != 0);
        params.attention.visible = pointer<const uint64_t>(visible);
        params.attention.req_to_token = pointer<const int32_t>(req_to_token);
        params.attention.req_to_token_stride = req_to_token_stride;
        params.attention.req_pool_indices = pointer<const int64_t>(req_pool_indices);
        params.attention.seq_lens = pointer<const int64_t>(seq_lens);
        launch_prepare(params, ctas, pointer<void>(stream));
      },
      py::arg("step"), py::kw_only(), py::arg("req_to_token"), py::arg("req_to_token_stride"),
      py::arg("req_pool_indices"), py::arg("seq_lens"), py::arg("visible"), py::arg("ctas"), py::arg("stream"),
      "Launches the preparation of a step. See sgl_prefix_attn.core.cuda_step.CudaStep.prepare.");
  m.def(
      "cuda_attend",
      [](const StepAddresses& step, const AttentionParams& attention, const LaunchSize& size, bool trees,
         uintptr_t stream) {
        KernelParams params{};
        step.fill(params, trees);
        params.attention = attention;
        params.heads = heads_of(attention.q_heads, attention.kv_heads);
        launch_attention(params, size, pointer<void>(stream));
      },
      py::arg("step"), py::arg("params"), py::arg("size"), py::kw_only(), py::arg("trees"), py::arg("stream"),
      "Launches packed attention of one layer. See sgl_prefix_attn.core.cuda_step.CudaStep.attend.");
}

void bind_devices(py::module_& m) {
  py::class_<CudaDevice>(m, "CudaDevice")
      .def_readonly("name", &CudaDevice::name)
      .def_readonly("compute_capability", &CudaDevice::compute_capability)
      .def_readonly("num_sms", &CudaDevice::num_sms)
      .def_readonly("shared_memory_per_block", &CudaDevice::shared_memory_per_block)
      .def_readonly("l2_bytes", &CudaDevice::l2_bytes)
      .def("__repr__", [](const CudaDevice& device) {
        return "<CudaDevice " + device.name + ", sm_" + std::to_string(device.compute_capability) + ", " +
               std::to_string(device.num_sms) + " SMs>";
      });
  m.def("cuda_devices", &cuda_devices,
        "Devices the CUDA runtime finds; RuntimeError with CUDA's words where it fails.");
}

#endif

}  // namespace

void bind_cuda(py::module_& m) {
  py::class_<SerializedPlan>(m, "SerializedPlan")
      .def_property_readonly("words", column(&SerializedPlan::words))
      .def_readonly("combine_lists", &SerializedPlan::combine_lists)
      .def_readonly("kv_slots", &SerializedPlan::kv_slots);
  m.def("serialize_plan", &serialize, py::arg("plan"), py::arg("seq_lens"), py::kw_only(), py::arg("growth"),
        py::arg("group"), py::arg("kv_heads") = 1, py::arg("warp_ctas") = 0, py::arg("cta_warps") = kDecodeWarps,
        "The plan as the device reads it, and the room that it needs. See csrc/cuda/serialize_plan.h.");
  m.def("most_plan_words", &most_plan_words, py::kw_only(), py::arg("queries"), py::arg("items"), py::arg("partials"),
        "See csrc/cuda/serialize_plan.h.");
  m.def("most_combine_lists", &most_combine_lists, py::kw_only(), py::arg("queries"), py::arg("partials"),
        "See csrc/cuda/serialize_plan.h.");
  m.def("head_halves", &head_halves, py::arg("group"), "See csrc/cuda/common/index_math.h.");
  m.attr("plan_header") = plan_header();
  m.attr("plan_item_words") = sizeof(WorkItem) / sizeof(int32_t);
  m.attr("plan_header_words") = kPlanHeaderWords;
  m.attr("tile_counters") = kTileCounters;
  m.def(
      "cta_shared_bytes", [](int32_t capability) { return shared_memory(capability).tile_bytes + kCtaStateBytes; },
      py::arg("capability"), "Shared memory of a CTA, in code compiled for a compute capability.");
  m.def(
      "ctas_per_sm", [](int32_t capability) { return shared_memory(capability).ctas_per_sm; }, py::arg("capability"),
      "CTAs of a kernel that share an SM, in code compiled for a compute capability.");
  m.def("cta_warps", &decode_warps, py::arg("capability"),
        "Warps of a CTA of the warp kernel, in code compiled for a compute capability.");
  m.attr("plan_deferred_words") = kDeferredStride;
  m.attr("item_record_words") = kRecordWords;
  m.attr("item_prologue_words") = kItemPrologueWords;
  m.attr("combine_room") = kCombineScratchWords;
#ifdef PREFIXPACK_WITH_CUDA
  m.attr("built_with_cuda") = true;
  bind_devices(m);
  bind_launches(m);
#else
  m.attr("built_with_cuda") = false;
#endif
}

}  // namespace prefixpack
