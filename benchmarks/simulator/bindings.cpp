// The simulator as an extension module. Plans, shapes and machines come as Python objects and are copied by name.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <type_traits>
#include <vector>

#include "makespan.h"

namespace py = pybind11;
using namespace prefixpack;

namespace {

template <typename T>
void copy(const py::object& source, const char* name, T& target) {
  target = source.attr(name).cast<T>();
}

template <typename T>
void copy(const py::object& source, const char* name, std::vector<T>& target) {
  static_assert(sizeof(T) % sizeof(int32_t) == 0, "a row of int32");
  const auto values = source.attr(name).cast<py::array_t<int32_t, py::array::c_style>>();
  const auto* first = reinterpret_cast<const T*>(values.data());
  target.assign(first, first + values.size() * sizeof(int32_t) / sizeof(T));
}

Plan copy_plan(const py::object& source) {
  Plan plan;
  copy(source, "num_requests", plan.num_requests);
  copy(source, "num_queries", plan.num_queries);
  copy(source, "num_partials", plan.num_partials);
  copy(source, "mostly_narrow", plan.mostly_narrow);
  copy(source, "query_request", plan.query_request);
  copy(source, "query_back", plan.query_back);
  copy(source, "combine_query", plan.combine_query);
  copy(source, "combine_offset", plan.combine_offset);
  copy(source, "items", plan.items);
  return plan;
}

Machine copy_machine(const py::dict& source) {
  Machine machine;
  const auto set = [&source](const char* name, auto& target) {
    target = source[name].cast<std::remove_reference_t<decltype(target)>>();
  };
  set("resident_ctas", machine.resident_ctas), set("few_ctas", machine.few_ctas);
  set("narrow_rows", machine.narrow_rows), set("narrow_parts", machine.narrow_parts);
  set("bandwidth", machine.bandwidth), set("begin", machine.begin), set("warp_begin", machine.warp_begin);
  set("cta_start", machine.cta_start), set("cta_end", machine.cta_end), set("cta_store", machine.cta_store);
  set("warp_start", machine.warp_start), set("warp_rate", machine.warp_rate);
  set("flops32", machine.flops32), set("flops64", machine.flops64), set("flops128", machine.flops128);
  set("key_tile", machine.key_tile), set("lone_speedup", machine.lone_speedup), set("sibling", machine.sibling);
  set("cta_combine", machine.cta_combine), set("cta_combine_step", machine.cta_combine_step);
  set("warp_combine", machine.warp_combine), set("warp_combine_step", machine.warp_combine_step);
  set("deferred_combine", machine.deferred_combine), set("deferred_combine_step", machine.deferred_combine_step);
  return machine;
}

py::tuple simulate(const py::object& plan, const py::array_t<int64_t, py::array::c_style>& seq_lens,
                   const py::object& shape, const py::dict& machine) {
  const Plan copied = copy_plan(plan);
  if (seq_lens.ndim() != 1 || seq_lens.size() != copied.num_requests) {
    throw std::invalid_argument("seq_lens must have an entry for each request");
  }
  ModelShape model;
  copy(shape, "q_heads", model.q_heads);
  copy(shape, "kv_heads", model.kv_heads);
  copy(shape, "head_dim", model.head_dim);
  copy(shape, "kv_bytes", model.kv_bytes);
  const Makespan found = simulate_makespan(copied, seq_lens.data(), model, copy_machine(machine));
  return py::make_tuple(found.seconds, found.streaming, found.longest, found.work);
}

}  // namespace

PYBIND11_MODULE(makespan, m) {
  m.def("simulate", &simulate, py::arg("plan"), py::arg("seq_lens"), py::arg("shape"), py::arg("machine"));
}
