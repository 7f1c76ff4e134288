// Independent answers that the tests hold pack_forest against. Built by the tests, with csrc/plan/packing.cpp.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan/packing.h"
#include "plan/plan.h"

namespace py = pybind11;
using namespace prefixpack;

namespace {

// What packs cost, added up from the packs alone.
double packs_cost(const std::vector<Pack>& packs, int32_t num_queries, const BatchLens& lens, const CostModel& cost) {
  std::vector<int32_t> partials(num_queries, 0);
  double total = 0;
  for (const Pack& pack : packs) {
    const int64_t seq_len = lens.seq_lens[pack.request];
    total += pack.kv_end == kOpenEnd ? cost.tail(pack.query_count, pack.kv_begin, seq_len)
                                     : cost.pack(pack.query_count, pack.kv_end - pack.kv_begin);
    for (int32_t i = 0; i < pack.query_count; ++i) ++partials[pack.query_begin + i];
  }
  for (int32_t count : partials) total += count >= 2 ? count * cost.partial() : 0.0;
  return total;
}

// The cheapest packing by trying every choice.
class Exhaustive {
 public:
  Exhaustive(const Forest& forest, const BatchLens& lens, const CostModel& cost)
      : forest_(forest), lens_(lens), cost_(cost), queries_(forest.num_nodes(), 0) {
    for (int32_t request = 0; request < forest.num_requests; ++request) {
      for (int32_t node = forest.tail_node[request]; node >= 0; node = forest.node_parent[node]) {
        queries_[node] += lens.query_len(request);
      }
    }
  }

  double lowest() {
    // One bit per node that has a parent and per request under a node: 1 = it joins the pack above.
    int32_t bits = 0;
    node_bit_.assign(forest_.num_nodes(), -1);
    request_bit_.assign(forest_.num_requests, -1);
    for (int32_t node = 0; node < forest_.num_nodes(); ++node) {
      if (forest_.node_parent[node] >= 0) node_bit_[node] = bits++;
    }
    for (int32_t request = 0; request < forest_.num_requests; ++request) {
      if (forest_.tail_node[request] >= 0) request_bit_[request] = bits++;
    }
    if (bits > 22)
      throw std::invalid_argument("exhaustive search of " + std::to_string(bits) + " choices (at most 22)");
    double lowest = std::numeric_limits<double>::infinity();
    for (choice_ = 0; choice_ < (1u << bits); ++choice_) {
      double total = 0;
      for (int32_t node = 0; node < forest_.num_nodes(); ++node) {
        if (forest_.node_parent[node] < 0) total += subtree(node, forest_.node_begin[node], false);
      }
      for (int32_t request = 0; request < forest_.num_requests; ++request) {
        if (forest_.tail_node[request] < 0) {
          total += cost_.tail(lens_.query_len(request), 0, lens_.seq_lens[request]);
        }
      }
      lowest = std::min(lowest, total);
    }
    return lowest;
  }

 private:
  bool joins(int32_t bit) const { return choice_ >> bit & 1; }

  double subtree(int32_t node, int32_t begin, bool partial_above) const {
    const int32_t end = forest_.node_end[node];
    double total = 0;
    int32_t joining = 0;
    for (int32_t child = node + 1; child < forest_.num_nodes(); ++child) {
      if (forest_.node_parent[child] != node) continue;
      const bool join = joins(node_bit_[child]);
      joining += join ? queries_[child] : 0;
      total += join ? subtree(child, end, true) : subtree(child, begin, partial_above);
    }
    for (int32_t request = 0; request < forest_.num_requests; ++request) {
      if (forest_.tail_node[request] != node) continue;
      const bool join = joins(request_bit_[request]);
      const int32_t queries = lens_.query_len(request);
      joining += join ? queries : 0;
      total += cost_.tail(queries, join ? end : begin, lens_.seq_lens[request]);
      total += join || partial_above ? queries * cost_.partial() : 0.0;
    }
    if (joining > 0) total += cost_.pack(joining, end - begin) + joining * cost_.partial();
    return total;
  }

  const Forest& forest_;
  const BatchLens lens_;
  const CostModel& cost_;
  std::vector<int32_t> queries_, node_bit_, request_bit_;
  uint32_t choice_ = 0;
};

// The native module's types are not of this module: what they hold is copied by name.
template <class T>
void copy(const py::object& source, const char* name, T& value) {
  value = source.attr(name).cast<T>();
}

Forest copy_forest(const py::object& source) {
  Forest forest;
  copy(source, "num_requests", forest.num_requests);
  copy(source, "order", forest.order);
  copy(source, "node_parent", forest.node_parent);
  copy(source, "node_begin", forest.node_begin);
  copy(source, "node_end", forest.node_end);
  copy(source, "node_first", forest.node_first);
  copy(source, "node_last", forest.node_last);
  copy(source, "node_request", forest.node_request);
  copy(source, "tail_begin", forest.tail_begin);
  copy(source, "tail_node", forest.tail_node);
  std::vector<int32_t> depth(forest.num_nodes(), 1);
  for (int32_t node = 0; node < forest.num_nodes(); ++node) {
    if (forest.node_parent[node] >= 0) depth[node] += depth[forest.node_parent[node]];
    forest.depth = std::max(forest.depth, depth[node]);
  }
  return forest;
}

ModelShape copy_shape(const py::object& source) {
  ModelShape shape;
  copy(source, "q_heads", shape.q_heads);
  copy(source, "kv_heads", shape.kv_heads);
  copy(source, "head_dim", shape.head_dim);
  copy(source, "kv_bytes", shape.kv_bytes);
  copy(source, "partial_bytes", shape.partial_bytes);
  return shape;
}

DeviceModel copy_device(const py::object& source) {
  DeviceModel device;
  copy(source, "workers", device.workers);
  copy(source, "bandwidth", device.bandwidth);
  copy(source, "flops", device.flops);
  copy(source, "item_overhead", device.item_overhead);
  copy(source, "reread", device.reread);
  copy(source, "tile_rows", device.tile_rows);
  copy(source, "narrow_rows", device.narrow_rows);
  copy(source, "narrow_per_worker", device.narrow_per_worker);
  copy(source, "narrow_to_fill", device.narrow_to_fill);
  copy(source, "narrow_overhead", device.narrow_overhead);
  copy(source, "narrow_parts", device.narrow_parts);
  copy(source, "narrow_reread", device.narrow_reread);
  copy(source, "overlap", device.overlap);
  copy(source, "wide_rows", device.wide_rows);
  copy(source, "wide_flops", device.wide_flops);
  copy(source, "lone_speedup", device.lone_speedup);
  copy(source, "combine_step", device.combine_step);
  copy(source, "combine_rows", device.combine_rows);
  copy(source, "combine_width", device.combine_width);
  copy(source, "combine_latency", device.combine_latency);
  copy(source, "combine_fan_in", device.combine_fan_in);
  copy(source, "widest_flops", device.widest_flops);
  copy(source, "medium_flops", device.medium_flops);
  copy(source, "deferred_combine", device.deferred_combine);
  copy(source, "deferred_combine_step", device.deferred_combine_step);
  return device;
}

// Seconds: the packing's own cost, its packs' cost added up, the cheapest of all packings.
py::tuple packing_costs(const py::object& native_forest, const std::vector<int64_t>& seq_lens,
                        const std::vector<int64_t>& query_lens, const py::object& shape, const py::object& device) {
  const Forest forest = copy_forest(native_forest);
  const BatchLens lens{seq_lens.data(), query_lens.data()};
  const CostModel cost(copy_shape(shape), copy_device(device), lens.uniform_rows(forest.num_requests));
  const Packing packing = pack_forest(forest, lens, cost);
  int32_t num_queries = 0;
  for (int32_t i = 0; i < forest.num_requests; ++i) num_queries += lens.query_len(i);
  return py::make_tuple(packing.cost, packs_cost(packing.packs, num_queries, lens, cost),
                        Exhaustive(forest, lens, cost).lowest());
}

}  // namespace

PYBIND11_MODULE(packing_check, m) {
  m.def("packing_costs", &packing_costs, py::arg("forest"), py::arg("seq_lens"), py::arg("query_lens"),
        py::arg("shape"), py::arg("device"));
}
