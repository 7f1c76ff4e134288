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
    single_tails_.assign(num_nodes, 0);
    single_tail_cost_.assign(num_nodes, 0);
    next_sibling_.assign(num_nodes, -1);
    first_child_.assign(num_nodes, -1);
    state_begin_.resize(num_nodes + 1, 0);
    for (int32_t node = 0; node < num_nodes; ++node) {
      const int32_t parent = forest.node_parent[node];
      depth_[node] = parent < 0 ? 0 : depth_[parent] + 1;
      state_begin_[node + 1] = state_begin_[node] + std::min(depth_[node] + 1, kMaxJoined);
    }
    best_.resize(state_begin_[num_nodes]);
    choices_.resize(num_nodes + forest.num_requests + 1);
    for (int32_t node = num_nodes - 1; node >= 0; --node) {
      const int32_t tails_end = first_tail_end(node);
      for (int32_t i = forest.node_first[node]; i < tails_end; ++i) {
        const int32_t request = forest.order[i], queries = lens.query_len(request);
        queries_[node] += queries;
        if (queries == 1) {
          ++single_tails_[node];
          single_tail_cost_[node] += tail_cost(request, forest.node_end[node]);
        }
      }
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

  static bool saves_more_per_row(const Choice& a, const Choice& b) {
    const double x = a.gain * b.queries, y = b.gain * a.queries;
    return x != y ? x > y : a.child > b.child;
  }

  Choice* choices() { return choices_.data() + choices_begin_; }

  void add_choice(double gain, int32_t queries, int32_t child) { choices()[num_choices_++] = {gain, queries, child}; }

  // Most nodes have few children, where an insertion sort wins over std::sort by far.
  void sort_choices() {
    Choice* const choice = choices();
    if (num_choices_ > 32) {
      std::sort(choice, choice + num_choices_, saves_more_per_row);
      return;
    }
    for (size_t i = 1; i < num_choices_; ++i) {
      const Choice moving = choice[i];
      size_t place = i;
      for (; place > 0 && saves_more_per_row(moving, choice[place - 1]); --place) choice[place] = choice[place - 1];
      choice[place] = moving;
    }
  }

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

  // Fills choices() for a pack that has read `begin` .. end of node; returns the cost if nothing joins.
  double list_choices(int32_t node, int32_t joined, int32_t begin, bool partial_above) {
    const double partial = cost_.partial();
    const double apart_above = partial_above ? partial : 0.0;
    const int32_t end = forest_.node_end[node];
    num_choices_ = 0;
    double apart = 0;
    const int32_t tails_end = first_tail_end(node), num_single = single_tails_[node];
    for (int32_t i = forest_.node_first[node]; num_single < tails_end - forest_.node_first[node] && i < tails_end;
         ++i) {
      const int32_t request = forest_.order[i], queries = lens_.query_len(request);
      if (queries == 1) continue;
      const double along = tail_cost(request, begin) + apart_above * queries;
      apart += along;
      add_choice(along - tail_cost(request, end) - 2 * partial * queries, queries, -2 - request);
    }
    if (num_single > 0) {
      // The price of a one-token tail is linear in its length, so all gain the same.
      const double longer = cost_.item(1, end - begin) - cost_.overhead() + apart_above;
      apart += single_tail_cost_[node] + longer * num_single;
      add_choice((longer - 2 * partial) * num_single, num_single, -1);
    }
    for (int32_t child = first_child_[node]; child >= 0; child = next_sibling_[child]) {
      const double along = joined + 1 < kMaxJoined ? best(child, joined + 1) : kNever;
      const double apart_cost = best(child, 0) + partial * queries_[child];
      if (along == kNever) {
        apart += apart_cost;
        add_choice(kNever, queries_[child], child);
      } else {
        apart += along;
        add_choice(along - apart_cost, queries_[child], child);
      }
    }
    return apart;
  }

  // Chooses how many of the sorted choices() join the pack; returns the cost of the subtree.
  double choose(int32_t node, int32_t joined, size_t* num_joining, int32_t* joining_tails) {
    const int32_t root = ancestor(node, joined);
    const bool partial_above = forest_.node_parent[root] >= 0;
    const int32_t begin = forest_.node_begin[root];
    const double tokens = forest_.node_end[node] - begin;
    const double apart = list_choices(node, joined, begin, partial_above);
    sort_choices();
    double lowest = 0, gain = 0;
    int32_t queries = 0, tails_before = 0;
    *num_joining = 0;
    *joining_tails = 0;
    for (size_t i = 0; i < num_choices_ && choices()[i].gain > 0; ++i) {
      const Choice choice = choices()[i];
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
    const bool only_single_tails = single_tails_[node] == queries_[node];
    for (int32_t joined = 0, root = node; joined < states; ++joined, root = forest_.node_parent[root]) {
      best(node, joined) = only_single_tails ? leaf(node, root) : choose(node, joined, &num_joining, &joining_tails);
    }
  }

  // What choose() returns for a node that has nothing but one-token tails below: most nodes, most of the time.
  double leaf(int32_t node, int32_t root) const {
    const int32_t tails = single_tails_[node], tile = cost_.queries_per_tile(), whole_tiles = tails / tile * tile;
    const double tokens = forest_.node_end[node] - forest_.node_begin[root];
    const double above = forest_.node_parent[root] >= 0 ? cost_.partial() : 0.0;
    const double longer = cost_.item(1, tokens) - cost_.overhead() + above;
    const double gain = longer - 2 * cost_.partial();
    const double apart = single_tail_cost_[node] + longer * tails;
    if (gain <= 0) return apart;
    double lowest = std::min(0.0, cost_.pack(tails, tokens) - gain * tails);
    if (whole_tiles > 0) lowest = std::min(lowest, cost_.pack(whole_tiles, tokens) - gain * whole_tiles);
    return apart + lowest;
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
    const Choice* const choices = this->choices();
    const size_t num_choices = num_choices_;
    choices_begin_ += num_choices;
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
    for (size_t i = 0; i < num_choices; ++i) {
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
    choices_begin_ -= num_choices;
  }

  const Forest& forest_;
  const BatchLens lens_;
  const CostModel& cost_;
  std::vector<int32_t> depth_, queries_, first_child_, next_sibling_, single_tails_;
  std::vector<double> single_tail_cost_;  // of a node's one-token tails if they begin at its end
  std::vector<int32_t> state_begin_;
  std::vector<double> best_;
  std::vector<Choice> choices_;  // a stack: those of the node at hand begin at choices_begin_
  size_t choices_begin_ = 0, num_choices_ = 0;
  int32_t next_query_ = 0;
};

}  // namespace

Packing pack_forest(const Forest& forest, const BatchLens& lens, const CostModel& cost) {
  return Packer(forest, lens, cost).emit();
}

}  // namespace prefixpack
