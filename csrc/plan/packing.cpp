#include "plan/packing.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "plan/plan.h"

namespace prefixpack {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// A pack joins at most this many nodes of a path: bounds the program on degenerate, very deep trees.
constexpr int32_t kMaxJoined = 16;

class Packer {
 public:
  Packer(const Forest& forest, const BatchLens& lens, const CostModel& cost)
      : forest_(forest), lens_(lens), cost_(cost) {
    const int32_t num_nodes = forest.num_nodes();
    depth_.resize(num_nodes);
    queries_.assign(num_nodes, 0);
    next_sibling_.assign(num_nodes, -1);
    first_child_.assign(num_nodes, -1);
    state_begin_.resize(num_nodes + 1, 0);
    for (int32_t node = 0; node < num_nodes; ++node) {
      const int32_t parent = forest.node_parent[node];
      depth_[node] = parent < 0 ? 0 : depth_[parent] + 1;
      state_begin_[node + 1] = state_begin_[node] + std::min(depth_[node] + 1, kMaxJoined);
    }
    best_.resize(state_begin_[num_nodes]);
    for (int32_t node = num_nodes - 1; node >= 0; --node) {
      const int32_t tails_end = first_tail_end(node);
      for (int32_t i = forest.node_first[node]; i < tails_end; ++i) queries_[node] += lens.query_len(forest.order[i]);
      solve(node);
      const int32_t parent = forest.node_parent[node];
      if (parent >= 0) {
        queries_[parent] += queries_[node];
        next_sibling_[node] = first_child_[parent];
        first_child_[parent] = node;
      }
    }
  }

  Packing emit() {
    Packing packing;
    packing.request_order.reserve(forest_.num_requests);
    packing.packs.reserve(forest_.num_requests + forest_.num_nodes());
    int32_t position = 0;
    for (int32_t node = 0; node < forest_.num_nodes(); node = subtree_end(node)) {
      for (; position < forest_.node_first[node]; ++position) emit_tail(forest_.order[position], 0, packing);
      packing.cost += best(node, 0);
      emit_node(node, 0, packing);
      position = forest_.node_last[node];
    }
    for (; position < forest_.num_requests; ++position) emit_tail(forest_.order[position], 0, packing);
    for (int32_t request = 0; request < forest_.num_requests; ++request) {
      if (forest_.tail_node[request] < 0) packing.cost += tail_cost(request, 0);
    }
    return packing;
  }

 private:
  // Something below a node that either joins the node's pack or takes the pack's range along.
  struct Choice {
    double gain;      // seconds saved by joining, before the pack's own reading
    int32_t queries;  // of the child or of all these tails
    int32_t child;    // node, or -1: the node's one-token tails, or -2 - request: one longer tail
  };

  // `joined`: how many nodes above `node` the pack that reaches it has taken along; 0: it begins at `node`.
  double& best(int32_t node, int32_t joined) { return best_[state_begin_[node] + joined]; }

  int32_t ancestor(int32_t node, int32_t steps) const {
    for (; steps > 0; --steps) node = forest_.node_parent[node];
    return node;
  }

  int32_t first_tail_end(int32_t node) const {
    // Requests that end at a node stand before those of its first child.
    const int32_t child = node + 1;
    const bool has_child = child < forest_.num_nodes() && forest_.node_parent[child] == node;
    return has_child ? forest_.node_first[child] : forest_.node_last[node];
  }

  int32_t subtree_end(int32_t node) const {
    int32_t next = node + 1;
    while (next < forest_.num_nodes() && forest_.node_first[next] < forest_.node_last[node]) ++next;
    return next;
  }

  double tail_cost(int32_t request, int32_t begin) const {
    return cost_.tail(lens_.query_len(request), begin, lens_.seq_lens[request]);
  }

  // Fills choices_ for a pack that has read `begin` .. end of node; returns the cost if nothing joins.
  double list_choices(int32_t node, int32_t joined, int32_t begin, bool partial_above) {
    const double partial = cost_.partial();
    const double apart_above = partial_above ? partial : 0.0;
    const int32_t end = forest_.node_end[node];
    choices_.clear();
    double apart = 0;
    int32_t single_tails = 0;
    for (int32_t i = forest_.node_first[node]; i < first_tail_end(node); ++i) {
      const int32_t request = forest_.order[i], queries = lens_.query_len(request);
      const double along = tail_cost(request, begin) + apart_above * queries;
      apart += along;
      if (queries == 1) {
        ++single_tails;
      } else {
        const double gain = along - tail_cost(request, end) - 2 * partial * queries;
        choices_.push_back({gain, queries, -2 - request});
      }
    }
    if (single_tails > 0) {
      // The price of a one-token tail is linear in its length, so all gain the same.
      const double gain = cost_.item(1, end - begin) - cost_.overhead() + apart_above - 2 * partial;
      choices_.push_back({gain * single_tails, single_tails, -1});
    }
    for (int32_t child = first_child_[node]; child >= 0; child = next_sibling_[child]) {
      const double along = joined + 1 < kMaxJoined ? best(child, joined + 1) : kNever;
      const double apart_cost = best(child, 0) + partial * queries_[child];
      if (along == kNever) {
        apart += apart_cost;
        choices_.push_back({kNever, queries_[child], child});
      } else {
        apart += along;
        choices_.push_back({along - apart_cost, queries_[child], child});
      }
    }
    return apart;
  }

  // Chooses how many of the sorted choices_ join the pack; returns the cost of the subtree.
  double choose(int32_t node, int32_t joined, size_t* num_joining, int32_t* joining_tails) {
    const int32_t root = ancestor(node, joined);
    const bool partial_above = forest_.node_parent[root] >= 0;
    const int32_t begin = forest_.node_begin[root];
    const double tokens = forest_.node_end[node] - begin;
    const double apart = list_choices(node, joined, begin, partial_above);
    std::sort(choices_.begin(), choices_.end(), [](const Choice& a, const Choice& b) {
      const double x = a.gain / a.queries, y = b.gain / b.queries;
      return x != y ? x > y : a.child > b.child;
    });
    double lowest = 0, gain = 0;
    int32_t queries = 0, tails_before = 0;
    *num_joining = 0;
    *joining_tails = 0;
    for (size_t i = 0; i < choices_.size() && choices_[i].gain > 0; ++i) {
      const Choice& choice = choices_[i];
      if (choice.gain == kNever) {
        queries += choice.queries;
        lowest = cost_.pack(queries, tokens) - gain;
        *num_joining = i + 1;
        continue;
      }
      const auto consider = [&](int32_t count, double saved) {
        const double total = cost_.pack(queries + count, tokens) - gain - saved;
        if (total < lowest) {
          lowest = total;
          *num_joining = i + 1;
          *joining_tails = choice.child == -1 ? count : tails_before;
        }
      };
      if (choice.child == -1) {
        const int32_t tile = cost_.queries_per_tile();
        const int32_t whole_tiles = (queries + choice.queries) / tile * tile - queries;
        if (whole_tiles > 0) consider(whole_tiles, choice.gain / choice.queries * whole_tiles);
      }
      consider(choice.queries, choice.gain);
      gain += choice.gain;
      queries += choice.queries;
      if (choice.child == -1) tails_before = choice.queries;
    }
    return apart + lowest;
  }

  void solve(int32_t node) {
    size_t num_joining;
    int32_t joining_tails;
    const int32_t states = state_begin_[node + 1] - state_begin_[node];
    for (int32_t joined = 0; joined < states; ++joined) {
      best(node, joined) = choose(node, joined, &num_joining, &joining_tails);
    }
  }

  void emit_tail(int32_t request, int32_t begin, Packing& packing) {
    const int32_t queries = lens_.query_len(request);
    packing.packs.push_back({next_query_, queries, request, begin, kOpenEnd});
    packing.request_order.push_back(request);
    next_query_ += queries;
  }

  void emit_node(int32_t node, int32_t joined, Packing& packing) {
    size_t num_joining;
    int32_t joining_tails;
    choose(node, joined, &num_joining, &joining_tails);
    const std::vector<Choice> choices = choices_;
    const int32_t begin = forest_.node_begin[ancestor(node, joined)], end = forest_.node_end[node];
    int32_t single_tail = forest_.node_first[node];
    const auto emit_single_tails = [&](int32_t count, int32_t tail_begin) {
      for (; count > 0; ++single_tail) {
        const int32_t request = forest_.order[single_tail];
        if (lens_.query_len(request) != 1) continue;
        emit_tail(request, tail_begin, packing);
        --count;
      }
    };
    int32_t joining_queries = 0;
    for (size_t i = 0; i < num_joining; ++i) {
      joining_queries += choices[i].child == -1 ? joining_tails : choices[i].queries;
    }
    if (joining_queries > 0) {
      packing.packs.push_back({next_query_, joining_queries, forest_.node_request[node], begin, end});
    }
    int32_t tails_along = 0;
    for (size_t i = 0; i < choices.size(); ++i) {
      const bool joins = i < num_joining;
      const int32_t child = choices[i].child;
      if (child >= 0) {
        emit_node(child, joins ? 0 : joined + 1, packing);
      } else if (child == -1) {
        emit_single_tails(joins ? joining_tails : 0, end);
        tails_along = choices[i].queries - (joins ? joining_tails : 0);
      } else {
        emit_tail(-2 - child, joins ? end : begin, packing);
      }
    }
    emit_single_tails(tails_along, begin);
  }

  const Forest& forest_;
  const BatchLens lens_;
  const CostModel& cost_;
  std::vector<int32_t> depth_, queries_, first_child_, next_sibling_;
  std::vector<int32_t> state_begin_;
  std::vector<double> best_;
  std::vector<Choice> choices_;
  int32_t next_query_ = 0;
};

}  // namespace

Packing pack_forest(const Forest& forest, const BatchLens& lens, const CostModel& cost) {
  return Packer(forest, lens, cost).emit();
}

}  // namespace prefixpack
