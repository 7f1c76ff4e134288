#include "plan/packing.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "plan/packing_nodes.h"
#include "plan/plan.h"
#include "plan/scratch_buffer.h"

namespace prefixpack {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr int32_t kMaxJoined = 16;  // nodes of a path per pack; bounds the program on very deep trees

}  // namespace

// The packing of one batch. It takes over the memory of the packers before it.
class Packer {
 public:
  explicit Packer(const CostModel& cost) : cost_(cost) {}

  const Packing& pack(const Forest& forest, const BatchLens& lens) {
    forest_ = &forest;
    lens_ = lens;
    lay_out();
    for (int32_t node = forest.num_nodes() - 1; node >= 0; --node) {
      add_tails(node);
      solve(node);
      join_parent(node);
    }
    emit();
    return packing_;
  }

 private:
  void emit() {
    packing_.cost = 0;
    packing_.request_order.resize(forest_->num_requests);
    packing_.packs.resize(forest_->num_requests + forest_->num_nodes());
    next_request_ = packing_.request_order.data();
    next_pack_ = packing_.packs.data();
    next_query_ = 0;
    int32_t position = 0;
    for (int32_t node = 0; node < forest_->num_nodes(); node = subtree_end(node)) {
      for (; position < forest_->node_first[node]; ++position) emit_tail(forest_->order[position], 0);
      packing_.cost += best(node, 0);
      emit_node(node, node, 0);
      position = forest_->node_last[node];
    }
    for (; position < forest_->num_requests; ++position) emit_tail(forest_->order[position], 0);
    for (int32_t request = 0; request < forest_->num_requests; ++request) {
      if (forest_->tail_node[request] < 0) packing_.cost += tail_cost(request, 0);
    }
    packing_.packs.resize(next_pack_ - packing_.packs.data());
  }

  static bool saves_more_per_row(const Choice& a, const Choice& b) {
    const double x = a.gain * b.queries, y = b.gain * a.queries;
    return x != y ? x > y : a.child > b.child;
  }

  Choice* choices() { return choices_.data() + choices_begin_; }

  // Ranks choices() by what they save per row, best first. Most nodes have few children, where an insertion sort wins
  // over std::sort by far. It is at its slowest where they are alike, as in balanced trees: those rank backwards.
  void rank_choices() {
    if (alike_) {
      rank_ = backwards_.data() + (forest_->num_nodes() - num_choices_);
      return;
    }
    const Choice* const choice = choices();
    int32_t* const rank = ranking_.data() + choices_begin_;
    rank_ = rank;
    if (num_choices_ > 32) {
      std::iota(rank, rank + num_choices_, 0);
      std::sort(rank, rank + num_choices_,
                [choice](int32_t a, int32_t b) { return saves_more_per_row(choice[a], choice[b]); });
      return;
    }
    for (int32_t i = 0; i < num_choices_; ++i) {
      int32_t place = i;
      for (; place > 0 && saves_more_per_row(choice[i], choice[rank[place - 1]]); --place)
        rank[place] = rank[place - 1];
      rank[place] = i;
    }
  }

  // `joined`: how many nodes above `node` the pack that reaches it has taken along; 0: it begins at `node`.
  double& best(int32_t node, int32_t joined) { return best_[nodes_[node].state_begin + joined]; }

  int32_t subtree_end(int32_t node) const {
    int32_t next = node + 1;
    while (next < forest_->num_nodes() && forest_->node_first[next] < forest_->node_last[node]) ++next;
    return next;
  }

  double tail_cost(int32_t request, int32_t begin) const {
    return cost_.tail(lens_.query_len(request), begin, lens_.seq_lens[request]);
  }

  void lay_out() {
    const int32_t num_nodes = forest_->num_nodes();
    int32_t num_states = 0, num_children = 0;
    nodes_.assign(num_nodes, PackingNode());
    choices_begin_ = 0;
    for (int32_t node = 0; node < num_nodes; ++node) {
      const int32_t parent = forest_->node_parent[node];
      nodes_[node].states = parent < 0 ? 1 : std::min(nodes_[parent].states + 1, kMaxJoined);
      nodes_[node].state_begin = num_states;
      num_states += nodes_[node].states;
      if (parent >= 0) ++nodes_[parent].num_children;
    }
    for (PackingNode& node : nodes_) {
      num_children += node.num_children;
      node.children_begin = num_children;  // one is put before it at a time
    }
    best_.make_room(num_states);
    children_.make_room(num_children);
    choices_.make_room(num_nodes + forest_->num_requests);
    ranking_.make_room(num_nodes + forest_->num_requests);
    backwards_.make_room(num_nodes);
    for (int32_t i = 0; i < num_nodes; ++i) backwards_[i] = num_nodes - 1 - i;
  }

  void join_parent(int32_t node) {
    if (forest_->node_parent[node] < 0) return;
    PackingNode& parent = nodes_[forest_->node_parent[node]];
    const int32_t queries = nodes_[node].queries;
    const double apart_cost = best(node, 0) + cost_.partial() * queries;
    children_[--parent.children_begin] = {apart_cost, nodes_[node].state_begin, queries, node};
    parent.queries += queries;
  }

  void add_tails(int32_t node) {
    // Requests that end at a node stand before those of its first child, which is the next node.
    const bool has_child = nodes_[node].num_children > 0;
    const int32_t tails_end = has_child ? forest_->node_first[node + 1] : forest_->node_last[node];
    int32_t all = 0, single = 0;
    double single_cost = 0;
    for (int32_t i = forest_->node_first[node]; i < tails_end; ++i) {
      const int32_t request = forest_->order[i], queries = lens_.query_len(request);
      all += queries;
      if (queries == 1) {
        ++single;
        single_cost += tail_cost(request, forest_->node_end[node]);
      }
    }
    nodes_[node].queries += all;
    nodes_[node].other_tails = tails_end - forest_->node_first[node] - single;
    nodes_[node].single_tails = single;
    nodes_[node].single_tail_cost = single_cost;
  }

  // Fills choices() for a pack that has read `begin` .. end of node; returns the cost if nothing joins.
  double list_choices(int32_t node, int32_t joined, int32_t begin, bool partial_above) {
    const double partial = cost_.partial();
    const double apart_above = partial_above ? partial : 0.0;
    const int32_t end = forest_->node_end[node];
    Choice* next = choices();
    double apart = 0;
    const int32_t num_single = nodes_[node].single_tails;
    for (int32_t i = forest_->node_first[node], left = nodes_[node].other_tails; left > 0; ++i) {
      const int32_t request = forest_->order[i], queries = lens_.query_len(request);
      if (queries == 1) continue;
      --left;
      const double along = tail_cost(request, begin) + apart_above * queries;
      apart += along;
      *next++ = {along - tail_cost(request, end) - 2 * partial * queries, queries, -2 - request};
    }
    if (num_single > 0) {
      // The cost of a one-token tail is linear in its length, so all gain the same.
      const double longer = cost_.tile(1).first_read * (end - begin) + apart_above;
      apart += nodes_[node].single_tail_cost + longer * num_single;
      *next++ = {(longer - 2 * partial) * num_single, num_single, -1};
    }
    bool alike = next == choices();
    const Child* const children = children_.data() + nodes_[node].children_begin;
    const int32_t num_children = nodes_[node].num_children;
    const bool can_go_along = joined + 1 < kMaxJoined;
    double first_gain = 0;
    for (int32_t i = 0; i < num_children; ++i) {
      const Child& child = children[i];
      const double along = can_go_along ? best_[child.state_begin + joined + 1] : child.apart_cost;
      const double gain = can_go_along ? along - child.apart_cost : kNever;
      apart += along;
      if (i == 0) first_gain = gain;
      alike &= (gain == first_gain) & (child.queries == children[0].queries);
      *next++ = {gain, child.queries, child.node};
    }
    num_choices_ = static_cast<int32_t>(next - choices());
    alike_ = alike;
    return apart;
  }

  // Chooses how many of the ranked choices() join the pack.
  Decision choose(int32_t node, int32_t root, int32_t joined) {
    const int32_t begin = forest_->node_begin[root];
    const double apart = list_choices(node, joined, begin, forest_->node_parent[root] >= 0);
    rank_choices();
    const PackCost pack(cost_, forest_->node_end[node] - begin);
    const Choice* const choices = this->choices();
    const int32_t* const rank = rank_;
    const int32_t num_choices = num_choices_;
    double lowest = 0, gain = 0;
    int32_t queries = 0, tails = 0, joining = 0, joining_tails = 0, i = 0;
    if (joined + 1 == kMaxJoined) {  // children must join
      for (; i < num_choices && choices[rank[i]].gain == kNever; ++i) queries += choices[rank[i]].queries;
      if (i > 0) lowest = pack(queries);
      joining = i;
    }
    for (; i < num_choices && choices[rank[i]].gain > 0; ++i) {
      const Choice& choice = choices[rank[i]];
      if (choice.child == -1) {
        tails = choice.queries;
        const int32_t in_whole_tiles = cost_.whole_tiles(queries + tails) - queries;
        const double total = pack(queries + in_whole_tiles) - gain - choice.gain / tails * in_whole_tiles;
        if (in_whole_tiles > 0 && total < lowest) {
          lowest = total;
          joining = i + 1;
          joining_tails = in_whole_tiles;
        }
      }
      queries += choice.queries;
      const double total = pack(queries) - gain - choice.gain;
      gain += choice.gain;
      if (total < lowest) {
        lowest = total;
        joining = i + 1;
        joining_tails = tails;
      }
    }
    return {apart + lowest, joining, joining_tails};
  }

  // What choose() does for a node that has nothing but one-token tails below: most nodes, most of the time.
  Decision choose_in_leaf(const PackingNode& leaf, int32_t begin, int32_t end, bool partial_above) const {
    const double tokens = end - begin, partial = cost_.partial();
    const double longer = cost_.tile(1).first_read * tokens + (partial_above ? partial : 0.0);
    const double gain = longer - 2 * partial;
    const int32_t tails = leaf.single_tails;
    Decision decision{0};
    if (gain > 0) {
      if (tails >= cost_.queries_per_tile()) {
        const int32_t whole_tiles = cost_.whole_tiles(tails);
        const double total = cost_.pack(whole_tiles, tokens) - gain * whole_tiles;
        if (total < 0) decision = {total, 1, whole_tiles};
      }
      const double total = cost_.pack(tails, tokens) - gain * tails;
      if (total < decision.cost) decision = {total, 1, tails};
    }
    decision.cost += leaf.single_tail_cost + longer * tails;
    return decision;
  }

  void solve(int32_t node) {
    const PackingNode& solved = nodes_[node];
    double* const costs = best_.data() + solved.state_begin;
    if (solved.is_leaf()) {
      solve_leaf(solved, node, costs);
      return;
    }
    const int32_t states = solved.states;
    for (int32_t joined = 0, root = node; joined < states; ++joined, root = forest_->node_parent[root]) {
      solved_last_ = choose(node, root, joined);
      costs[joined] = solved_last_.cost;
    }
  }

  void solve_leaf(const PackingNode& leaf, int32_t node, double* costs) const {
    const int32_t states = leaf.states, end = forest_->node_end[node];
    const int32_t* const parent = forest_->node_parent.data();
    const int32_t* const begin = forest_->node_begin.data();
    for (int32_t joined = 0, root = node; joined < states; ++joined) {
      const int32_t above = parent[root];
      costs[joined] = choose_in_leaf(leaf, begin[root], end, above >= 0).cost;
      root = above;
    }
  }

  void emit_pack(int32_t queries, int32_t request, int32_t begin, int32_t end) {
    *next_pack_++ = {next_query_, queries, request, begin, end};
  }

  void emit_tail(int32_t request, int32_t begin) {
    const int32_t queries = lens_.query_len(request);
    emit_pack(queries, request, begin, kOpenEnd);
    *next_request_++ = request;
    next_query_ += queries;
  }

  // `root`: the node that the pack which reaches `node` begins at, `joined` nodes above.
  void emit_node(int32_t node, int32_t root, int32_t joined) {
    if (nodes_[node].is_leaf()) {
      emit_leaf(node, root);
      return;
    }
    // PackingNode 0, which is a root, was solved last: its choices() still stand there.
    const Decision decision = node == 0 ? solved_last_ : choose(node, root, joined);
    const Choice* const choices = this->choices();
    const int32_t* const rank = rank_;
    const int32_t num_choices = num_choices_;
    choices_begin_ += num_choices;
    const int32_t begin = forest_->node_begin[root], end = forest_->node_end[node];
    int32_t single_tail = forest_->node_first[node];
    const auto emit_single_tails = [&](int32_t count, int32_t tail_begin) {
      for (; count > 0; ++single_tail) {
        const int32_t request = forest_->order[single_tail];
        if (lens_.query_len(request) != 1) continue;
        emit_tail(request, tail_begin);
        --count;
      }
    };
    int32_t joining_queries = 0;
    for (int32_t i = 0; i < decision.joining; ++i) {
      joining_queries += choices[rank[i]].child == -1 ? decision.joining_tails : choices[rank[i]].queries;
    }
    if (joining_queries > 0) emit_pack(joining_queries, forest_->node_request[node], begin, end);
    int32_t tails_along = 0;
    for (int32_t i = 0; i < num_choices; ++i) {
      const bool joins = i < decision.joining;
      const int32_t child = choices[rank[i]].child;
      if (child >= 0) {
        emit_node(child, joins ? child : root, joins ? 0 : joined + 1);
      } else if (child == -1) {
        emit_single_tails(joins ? decision.joining_tails : 0, end);
        tails_along = choices[rank[i]].queries - (joins ? decision.joining_tails : 0);
      } else {
        emit_tail(-2 - child, joins ? end : begin);
      }
    }
    emit_single_tails(tails_along, begin);
    choices_begin_ -= num_choices;
  }

  void emit_leaf(int32_t node, int32_t root) {
    const int32_t begin = forest_->node_begin[root], end = forest_->node_end[node];
    const bool partial_above = forest_->node_parent[root] >= 0;
    const int32_t joining_tails = choose_in_leaf(nodes_[node], begin, end, partial_above).joining_tails;
    if (joining_tails > 0) emit_pack(joining_tails, forest_->node_request[node], begin, end);
    const int32_t* const requests = forest_->order.data() + forest_->node_first[node];
    const int32_t tails = nodes_[node].single_tails;
    for (int32_t i = 0; i < tails; ++i) {
      next_pack_[i] = {next_query_ + i, 1, requests[i], i < joining_tails ? end : begin, kOpenEnd};
      next_request_[i] = requests[i];
    }
    next_pack_ += tails;
    next_request_ += tails;
    next_query_ += tails;
  }

  const CostModel& cost_;
  const Forest* forest_ = nullptr;
  BatchLens lens_{};
  std::vector<PackingNode> nodes_;
  ScratchBuffer<Child> children_;
  ScratchBuffer<double> best_;        // cost of every node in every state
  ScratchBuffer<Choice> choices_;     // a stack: those of the node at hand begin at choices_begin_
  ScratchBuffer<int32_t> ranking_;    // of choices_, in a stack of the same shape
  ScratchBuffer<int32_t> backwards_;  // num_nodes - 1 .. 0: its ends are the rankings of alike choices
  const int32_t* rank_ = nullptr;     // ranking of choices()
  int32_t choices_begin_ = 0, num_choices_ = 0;
  bool alike_ = false;  // choices() are children with the same gain and number of queries
  Pack* next_pack_ = nullptr;
  int32_t* next_request_ = nullptr;
  int32_t next_query_ = 0;
  Decision solved_last_;
  Packing packing_;
};

ForestPacker::ForestPacker(const CostModel& cost) : packer_(std::make_unique<Packer>(cost)) {}
ForestPacker::~ForestPacker() = default;
const Packing& ForestPacker::pack(const Forest& forest, const BatchLens& lens) { return packer_->pack(forest, lens); }

Packing pack_forest(const Forest& forest, const BatchLens& lens, const CostModel& cost) {
  return ForestPacker(cost).pack(forest, lens);
}

}  // namespace prefixpack
