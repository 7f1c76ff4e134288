// Independent answers that the tests hold pack_forest against, and the queue model. Built by the tests, with the
// sources of csrc/plan that they call. pybind11 knows the types of the native module across modules.
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
#include "plan/queue_model.h"

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

// Seconds: the packing's own cost, its packs' cost added up, the cheapest of all packings.
py::tuple packing_costs(const Forest& forest, const std::vector<int64_t>& seq_lens,
                        const std::vector<int64_t>& query_lens, const ModelShape& shape, const DeviceModel& device) {
  const BatchLens lens{seq_lens.data(), query_lens.data()};
  const CostModel cost(shape, device, lens.uniform_rows(forest.num_requests));
  const Packing packing = pack_forest(forest, lens, cost);
  int32_t num_queries = 0;
  for (int32_t i = 0; i < forest.num_requests; ++i) num_queries += lens.query_len(i);
  return py::make_tuple(packing.cost, packs_cost(packing.packs, num_queries, lens, cost),
                        Exhaustive(forest, lens, cost).lowest());
}

// works: seconds of each work tile.
WorkTileBins binned(const std::vector<double>& works, double longest) {
  WorkTileBins bins;
  bins.reset(longest);
  for (double work : works) bins.add(work, 1);
  return bins;
}

double finish(int64_t workers, const std::vector<double>& whole, const std::vector<double>& narrow, double longest,
              bool mostly_narrow, double limit) {
  const Workers model{workers, 8, 1.6, 1.9, 1.0 / 3, 4.5e-6, 4e-6};
  return finish_of(model, binned(whole, longest), binned(narrow, longest), mostly_narrow, limit);
}

}  // namespace

PYBIND11_MODULE(plan_checks, m) {
  m.def("packing_costs", &packing_costs, py::arg("forest"), py::arg("seq_lens"), py::arg("query_lens"),
        py::arg("shape"), py::arg("device"));
  m.def("finish", &finish, py::arg("workers"), py::arg("whole"), py::arg("narrow"), py::arg("longest"),
        py::arg("mostly_narrow"), py::arg("limit"));
}
