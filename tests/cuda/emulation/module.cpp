// The GPU kernels of csrc/cuda on emulated instructions. Built by the tests.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "cuda/kernel/draft_tables.cuh"
#include "cuda/kernel/persistent_scheduler.cuh"
#include "cuda/kernel/prepare.cuh"
#include "cuda/serialize_plan.h"

namespace py = pybind11;
using namespace prefixpack;

namespace {

template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T>
std::vector<T> column(const py::object& plan, const char* name) {
  const auto values = plan.attr(name).cast<Array<T>>();
  return {values.data(), values.data() + values.size()};
}

Plan copy_plan(const py::object& source) {
  Plan plan;
  plan.num_requests = source.attr("num_requests").cast<int32_t>();
  plan.num_queries = source.attr("num_queries").cast<int32_t>();
  plan.num_partials = source.attr("num_partials").cast<int32_t>();
  plan.mostly_narrow = source.attr("mostly_narrow").cast<bool>();
  plan.query_token = column<int32_t>(source, "query_token");
  plan.query_request = column<int32_t>(source, "query_request");
  plan.query_back = column<int32_t>(source, "query_back");
  plan.combine_query = column<int32_t>(source, "combine_query");
  plan.combine_offset = column<int32_t>(source, "combine_offset");
  plan.combine_partial = column<int32_t>(source, "combine_partial");
  const auto items = source.attr("items").cast<Array<int32_t>>();
  const auto* first = reinterpret_cast<const WorkItem*>(items.data());
  plan.items.assign(first, first + items.shape(0));
  return plan;
}

// Execution of a launch.
struct Run {
  int ctas;
  emulation::Copies copies;
  bool warps_first;  // warps of the warp kernel go before CTAs of the CTA kernel
  int layers;        // launches, one after the other: each has to reset the counters
};

template <int HeadDim, class Format>
void run_kernels(const KernelParams& params, const Run& run) {
  emulation::run(run.copies, {{2, 128, 0, [&](char*) { prepare_step(params); }}});
  const int warp_ctas = kHasWarpKernel<HeadDim> ? run.ctas + 1 : 0;
  std::vector<emulation::Launch> launches{
      {run.ctas, kCtaThreads<HeadDim>, kSharedBytes + kCtaStateBytes,
       [&](char* shared) { run_cta_kernel<HeadDim, Format>(params, shared, (run.ctas + 1) / 2); }}};
  if constexpr (kHasWarpKernel<HeadDim>) {
    constexpr int kWarps = decode_warps(kCapability);
    launches.push_back({warp_ctas, 32 * kWarps, kWarps * kWarpBytes,
                        [&](char* shared) { run_warp_kernel<HeadDim, Format>(params, shared); }});
  }
  if (run.warps_first) std::reverse(launches.begin(), launches.end());
  for (int layer = 0; layer < run.layers; ++layer) emulation::run(run.copies, launches);
}

template <class Format>
void run_head_dim(const KernelParams& params, const Run& run) {
  const int head_dim = params.attention.head_dim;
  if (head_dim == 64) return run_kernels<64, Format>(params, run);
  if (head_dim == 128) return run_kernels<128, Format>(params, run);
  if (head_dim == 256) return run_kernels<256, Format>(params, run);
  throw std::invalid_argument("head_dim must be 64, 128 or 256");
}

// q, out: 16-bit patterns. k, v: 16-bit patterns or fp8 bytes. planned_lens: lengths that the plan was made for.
// seq_lens: lengths of the step. visible: see AttentionParams, or None. fan_in, warp_ctas: see serialize_plan.
// prologues_of: items with a prologue.
void attention(const py::object& plan_object, const Array<uint16_t>& q, const py::array& k, const py::array& v,
               Array<uint16_t>& out, Array<float>& lse, const Array<int32_t>& req_to_token,
               const Array<int64_t>& req_pool_indices, const Array<int64_t>& planned_lens,
               const Array<int64_t>& seq_lens, int growth, float scale, float v_scale, float logit_cap, int window_left,
               const py::object& sinks, const py::object& visible, bool bfloat16, int ctas, bool late_copies,
               bool warps_first, int fan_in, int warp_ctas, int layers, int prologues_of) {
  const Plan plan = copy_plan(plan_object);
  const auto q_heads = static_cast<int32_t>(q.shape(1)), kv_heads = static_cast<int32_t>(k.shape(1));
  const auto head_dim = static_cast<int32_t>(q.shape(2));
  SerializedPlan words = serialize_plan(plan, planned_lens.data(), growth, q_heads / kv_heads, kv_heads,
                                        head_dim <= 128 ? warp_ctas : 0, decode_warps(kCapability), fan_in);
  const float nan = __builtin_nanf("");
  std::vector<float> partial_o(size_t(plan.num_partials) * q_heads * head_dim, nan);
  std::vector<float> partial_lse(size_t(plan.num_partials) * q_heads, nan);
  std::vector<ItemRecord> items(std::max<size_t>(plan.items.size(), ctas));
  std::vector<ItemPrologue> prologues(std::min<size_t>(prologues_of, items.size()));
  // As earlier plans leave them: what prepare does not write is not used.
  std::memset(static_cast<void*>(items.data()), 0x7f, items.size() * sizeof(ItemRecord));
  std::memset(static_cast<void*>(prologues.data()), 0x7f, prologues.size() * sizeof(ItemPrologue));
  std::vector<int32_t> positions(plan.num_queries, -1), slots(words.kv_slots, -1), tile_counters(kTileCounters, 0);
  std::vector<int32_t> semaphores(size_t(words.combine_lists) * kv_heads * head_halves(q_heads / kv_heads), 0);
  const auto sink_values = sinks.is_none() ? Array<float>(0) : sinks.cast<Array<float>>();
  const auto visible_words = visible.is_none() ? Array<int64_t>(0) : visible.cast<Array<int64_t>>();
  std::vector<uint64_t> hidden(plan.num_queries, ~uint64_t{0});

  KernelParams params{};
  AttentionParams& attention = params.attention;
  attention.q = q.data();
  attention.k = k.data();
  attention.v = v.data();
  attention.o = out.mutable_data();
  attention.lse = lse.mutable_data();
  attention.q_token_stride = attention.o_token_stride = int64_t{q_heads} * head_dim;
  attention.q_head_stride = attention.o_head_stride = head_dim;
  attention.k_slot_stride = k.strides(0) / k.itemsize();
  attention.k_head_stride = k.strides(1) / k.itemsize();
  attention.v_slot_stride = v.strides(0) / v.itemsize();
  attention.v_head_stride = v.strides(1) / v.itemsize();
  attention.lse_token_stride = q_heads;
  attention.req_to_token = req_to_token.data();
  attention.req_to_token_stride = req_to_token.shape(1);
  attention.req_pool_indices = req_pool_indices.data();
  attention.seq_lens = seq_lens.data();
  attention.sinks = sinks.is_none() ? nullptr : sink_values.data();
  attention.visible = visible.is_none() ? nullptr : reinterpret_cast<const uint64_t*>(visible_words.data());
  attention.partial_o = partial_o.data();
  attention.partial_lse = partial_lse.data();
  attention.q_heads = q_heads;
  attention.kv_heads = kv_heads;
  attention.head_dim = head_dim;
  params.heads = heads_of(q_heads, kv_heads);
  attention.window_left = window_left;
  attention.scale = scale;
  attention.v_scale = v_scale;
  attention.logit_cap = logit_cap;
  params.plan.words = words.words.data();
  params.step = {items.data(),         prologues.data(),  positions.data(), slots.data(),
                 tile_counters.data(), semaphores.data(), hidden.data(),    static_cast<int32_t>(prologues.size())};
  const Run run{ctas, late_copies ? emulation::Copies::kLate : emulation::Copies::kEarly, warps_first, layers};
  const bool float8 = k.itemsize() == 1;
  if (!visible.is_none()) {
    if (!bfloat16) throw std::invalid_argument("trees are emulated with bf16 only");
    float8 ? run_head_dim<WithTrees<Fp8Kv<ptx::BFloat16>>>(params, run)
           : run_head_dim<WithTrees<SameDtypeKv<ptx::BFloat16>>>(params, run);
  } else if (bfloat16) {
    float8 ? run_head_dim<Fp8Kv<ptx::BFloat16>>(params, run) : run_head_dim<SameDtypeKv<ptx::BFloat16>>(params, run);
  } else {
    float8 ? run_head_dim<Fp8Kv<ptx::Float16>>(params, run) : run_head_dim<SameDtypeKv<ptx::Float16>>(params, run);
  }
  for (const auto& counters : {tile_counters, semaphores}) {
    for (int32_t counter : counters) {
      if (counter != 0) throw std::runtime_error("a counter was not reset");
    }
  }
}

// visible: None for chains.
void draft_tables(const Array<int64_t>& committed, const Array<uint8_t>& mask, int requests, int drafts,
                  bool has_committed_columns, Array<int64_t>& seq_lens, const py::object& visible) {
  auto words = visible.is_none() ? Array<int64_t>(0) : visible.cast<Array<int64_t>>();
  const auto rows = static_cast<int32_t>(committed.size());
  DraftParams params{committed.data(), mask.data(), mask.size(), rows, requests, drafts, has_committed_columns};
  params.seq_lens = seq_lens.mutable_data();
  params.visible = visible.is_none() ? nullptr : reinterpret_cast<uint64_t*>(words.mutable_data());
  emulation::run(emulation::Copies::kEarly, {{rows, kDraftTableThreads, 0, [&](char*) { fill_draft_tables(params); }}});
}

}  // namespace

PYBIND11_MODULE(cuda_emulation, m) {
  m.def(
      "active_warps",
      [](int64_t work_tiles, int64_t tokens, int64_t cta_tiles, bool mostly_narrow) {
        return active_warps(work_tiles, tokens, {264, cta_tiles, mostly_narrow, kDecodeWarps});
      },
      py::arg("work_tiles"), py::arg("tokens"), py::arg("cta_tiles") = 0, py::arg("mostly_narrow") = false);
  m.def("attention", &attention, py::arg("plan"), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"),
        py::arg("lse"), py::arg("req_to_token"), py::arg("req_pool_indices"), py::arg("planned_lens"),
        py::arg("seq_lens"), py::arg("growth"), py::arg("scale"), py::arg("v_scale"), py::arg("logit_cap"),
        py::arg("window_left"), py::arg("sinks"), py::arg("visible"), py::arg("bfloat16"), py::arg("ctas"),
        py::arg("late_copies"), py::arg("warps_first"), py::arg("fan_in"), py::arg("warp_ctas"), py::arg("layers"),
        py::arg("prologues_of"));
  m.def("draft_tables", &draft_tables, py::kw_only(), py::arg("committed"), py::arg("mask"), py::arg("requests"),
        py::arg("drafts"), py::arg("has_committed_columns"), py::arg("seq_lens"), py::arg("visible"));
  m.def(
      "quotient", [](int32_t dividend, int32_t number) { return divisor(number).quotient(dividend); },
      py::arg("dividend"), py::arg("number"));
}
