#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "bindings/bindings.h"
#include "bindings/views.h"
#include "plan/combine_shape.h"
#include "plan/planner.h"
#include "plan/radix_mirror.h"
#include "plan/schedule.h"

namespace py = pybind11;

namespace prefixpack {

namespace {

using Lengths = py::array_t<int64_t, py::array::c_style>;

const int64_t* lengths_data(const Lengths& lengths, const char* name, int32_t num_requests) {
  if (lengths.ndim() != 1 || lengths.shape(0) != num_requests) {
    throw std::invalid_argument(std::string(name) + " must have one entry for each of the " +
                                std::to_string(num_requests) + " requests");
  }
  return lengths.data();
}

struct Lens {
  Lens(const Forest& forest, const Lengths& seq_lens, const std::optional<Lengths>& query_lens)
      : batch{lengths_data(seq_lens, "seq_lens", forest.num_requests),
              query_lens ? lengths_data(*query_lens, "query_lens", forest.num_requests) : nullptr} {}
  BatchLens batch;
};

void bind_forest(py::module_& m) {
  py::class_<Forest, std::shared_ptr<Forest>>(m, "Forest")
      .def_readonly("num_requests", &Forest::num_requests)
      .def_property_readonly("num_nodes", &Forest::num_nodes)
      .def_property_readonly("order", column(&Forest::order))
      .def_property_readonly("node_parent", column(&Forest::node_parent))
      .def_property_readonly("node_begin", column(&Forest::node_begin))
      .def_property_readonly("node_end", column(&Forest::node_end))
      .def_property_readonly("node_first", column(&Forest::node_first))
      .def_property_readonly("node_last", column(&Forest::node_last))
      .def_property_readonly("node_request", column(&Forest::node_request))
      .def_property_readonly("tail_begin", column(&Forest::tail_begin))
      .def_property_readonly("tail_node", column(&Forest::tail_node));

  py::class_<RadixMirror>(m, "RadixMirror")
      .def(py::init<>())
      .def("__len__", &RadixMirror::size)
      .def("known", &RadixMirror::known, py::arg("node_id"))
      .def("end_of", &RadixMirror::end_of, py::arg("node_id"))
      .def("put", &RadixMirror::put, py::kw_only(), py::arg("parent_id"), py::arg("begin"), py::arg("ids"),
           py::arg("ends"), py::arg("leaf"))
      .def("take_stale", &RadixMirror::take_stale)
      .def("clear", &RadixMirror::clear)
      .def(
          "forest",
          [](RadixMirror& mirror, const Lengths& last_nodes, const Lengths& prefix_lens,
             const std::optional<py::array_t<bool, py::array::c_style>>& live) {
            if (last_nodes.ndim() != 1) throw std::invalid_argument("last_nodes must be one-dimensional");
            if (last_nodes.shape(0) > kMostNewTokens) {
              throw std::invalid_argument("a batch of " + std::to_string(last_nodes.shape(0)) +
                                          " requests; expected at most 2^24");
            }
            const auto num_requests = static_cast<int32_t>(last_nodes.shape(0));
            const int64_t* prefix = lengths_data(prefix_lens, "prefix_lens", num_requests);
            if (live && (live->ndim() != 1 || live->shape(0) != num_requests)) {
              throw std::invalid_argument("live must have one entry for each request");
            }
            const auto* alive = live ? reinterpret_cast<const uint8_t*>(live->data()) : nullptr;
            return std::make_shared<Forest>(mirror.forest(last_nodes.data(), prefix, alive, num_requests));
          },
          py::arg("last_nodes"), py::arg("prefix_lens"), py::arg("live") = py::none());
}

void bind_planner(py::module_& m) {
  m.attr("combine_fan_in") = kCombineFanIn;
  m.attr("combine_rows") = kCombineRows;
  m.attr("combine_width") = kCombineWidth;
  py::class_<ModelShape>(m, "ModelShape")
      .def(py::init([](int32_t q_heads, int32_t kv_heads, int32_t head_dim, int32_t kv_bytes, int32_t partial_bytes) {
             return ModelShape{q_heads, kv_heads, head_dim, kv_bytes, partial_bytes};
           }),
           py::kw_only(), py::arg("q_heads"), py::arg("kv_heads"), py::arg("head_dim"), py::arg("kv_bytes"),
           py::arg("partial_bytes"));

  // Set by name. Python's DeviceModel takes its defaults from the struct, through a new object.
  py::class_<DeviceModel>(m, "DeviceModel")
      .def(py::init<>())
      .def_readwrite("workers", &DeviceModel::workers)
      .def_readwrite("bandwidth", &DeviceModel::bandwidth)
      .def_readwrite("flops", &DeviceModel::flops)
      .def_readwrite("item_overhead", &DeviceModel::item_overhead)
      .def_readwrite("reread", &DeviceModel::reread)
      .def_readwrite("tile_rows", &DeviceModel::tile_rows)
      .def_readwrite("narrow_rows", &DeviceModel::narrow_rows)
      .def_readwrite("narrow_per_worker", &DeviceModel::narrow_per_worker)
      .def_readwrite("narrow_to_fill", &DeviceModel::narrow_to_fill)
      .def_readwrite("narrow_overhead", &DeviceModel::narrow_overhead)
      .def_readwrite("narrow_parts", &DeviceModel::narrow_parts)
      .def_readwrite("narrow_reread", &DeviceModel::narrow_reread)
      .def_readwrite("overlap", &DeviceModel::overlap)
      .def_readwrite("wide_rows", &DeviceModel::wide_rows)
      .def_readwrite("wide_flops", &DeviceModel::wide_flops)
      .def_readwrite("lone_speedup", &DeviceModel::lone_speedup)
      .def_readwrite("combine_step", &DeviceModel::combine_step)
      .def_readwrite("combine_rows", &DeviceModel::combine_rows)
      .def_readwrite("combine_width", &DeviceModel::combine_width)
      .def_readwrite("combine_latency", &DeviceModel::combine_latency)
      .def_readwrite("combine_fan_in", &DeviceModel::combine_fan_in)
      .def_readwrite("widest_flops", &DeviceModel::widest_flops)
      .def_readwrite("medium_flops", &DeviceModel::medium_flops)
      .def_readwrite("deferred_combine", &DeviceModel::deferred_combine)
      .def_readwrite("deferred_combine_step", &DeviceModel::deferred_combine_step);

  static_assert(sizeof(WorkItem) == 7 * sizeof(int32_t), "the items view shows a WorkItem as a row of seven int32");
  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan")
      .def_readonly("num_requests", &Plan::num_requests)
      .def_readonly("num_queries", &Plan::num_queries)
      .def_readonly("num_partials", &Plan::num_partials)
      .def_readonly("kv_tokens_packed", &Plan::kv_tokens_packed)
      .def_readonly("kv_tokens_per_request", &Plan::kv_tokens_per_request)
      .def_readonly("kv_tokens_unique", &Plan::kv_tokens_unique)
      .def_readonly("mostly_narrow", &Plan::mostly_narrow)
      .def_property_readonly("query_token", column(&Plan::query_token))
      .def_property_readonly("query_request", column(&Plan::query_request))
      .def_property_readonly("query_back", column(&Plan::query_back))
      .def_property_readonly("combine_query", column(&Plan::combine_query))
      .def_property_readonly("combine_offset", column(&Plan::combine_offset))
      .def_property_readonly("combine_partial", column(&Plan::combine_partial))
      .def_property_readonly("items", [](py::object self) {
        const auto& items = self.cast<const Plan&>().items;
        return view(self, reinterpret_cast<const int32_t*>(items.data()), {static_cast<py::ssize_t>(items.size()), 7});
      });

  py::class_<Planner>(m, "Planner")
      .def(py::init<const ModelShape&, const DeviceModel&, int32_t>(), py::arg("shape"), py::arg("device"),
           py::arg("max_growth"))
      .def(
          "plan",
          [](Planner& planner, const std::shared_ptr<Forest>& forest, const Lengths& seq_lens,
             const std::optional<Lengths>& query_lens) {
            const Lens lens(*forest, seq_lens, query_lens);
            // pybind11 holds no pointers to const; the views it hands out are read-only.
            return std::const_pointer_cast<Plan>(planner.plan(forest, lens.batch.seq_lens, lens.batch.query_lens));
          },
          py::arg("forest").none(false), py::arg("seq_lens"), py::arg("query_lens") = py::none())
      .def_property_readonly("plans_made", &Planner::plans_made)
      .def_property_readonly("plans_reused", &Planner::plans_reused)
      .def_property_readonly("plan_seconds", &Planner::plan_seconds)
      .def_property_readonly("kv_tokens", [](const Planner& planner) {
        const KvTokens tokens = planner.kv_tokens();
        return py::make_tuple(tokens.packed, tokens.per_request, tokens.unique);
      });

  m.def(
      "grown_by",
      [](const Lengths& seq_lens, const Lengths& before, int64_t growth) {
        if (seq_lens.ndim() != 1 || before.ndim() != 1 || seq_lens.size() != before.size()) return false;
        const int64_t* now = seq_lens.data();
        return std::all_of(before.data(), before.data() + before.size(), [&](int64_t length) {
          int64_t grown;
          return !__builtin_add_overflow(length, growth, &grown) & (*now++ == grown);
        });
      },
      py::arg("seq_lens"), py::arg("before"), py::arg("growth"),
      "Whether each length is the one before plus `growth`; False if they are not as many.");
}

}  // namespace

void bind_plan(py::module_& m) {
  bind_forest(m);
  bind_planner(m);
}

}  // namespace prefixpack
