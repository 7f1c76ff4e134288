#include "plan/radix_mirror.h"

#include <algorithm>
#include <iterator>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace prefixpack {

namespace {

// A sweep forgets nodes that no forest of the last kKeepGenerations used, once they are the majority.
constexpr uint32_t kKeepGenerations = 256;
constexpr size_t kSweepSlack = 4096;
// Forests between two counts of such nodes: a count visits every known node.
constexpr uint32_t kSweepInterval = 32;

// Members of each node in ascending order, as compressed sparse rows. Row num_nodes holds the members of the root.
class Members {
 public:
  Members(const std::vector<int32_t>& node_of, size_t num_nodes) : offset_(num_nodes + 2, 0), member_(node_of.size()) {
    const auto row = [&](size_t i) { return node_of[i] < 0 ? num_nodes : static_cast<size_t>(node_of[i]); };
    for (size_t i = 0; i < node_of.size(); ++i) ++offset_[row(i) + 1];
    for (size_t i = 1; i < offset_.size(); ++i) offset_[i] += offset_[i - 1];
    std::vector<int32_t> next(offset_.begin(), offset_.end() - 1);
    for (size_t i = 0; i < node_of.size(); ++i) member_[next[row(i)]++] = static_cast<int32_t>(i);
  }
  const int32_t* begin(size_t node) const { return member_.data() + offset_[node]; }
  const int32_t* end(size_t node) const { return member_.data() + offset_[node + 1]; }

 private:
  std::vector<int32_t> offset_, member_;
};

struct SharedNode {
  int32_t parent;  // index, or -1
  int32_t begin, end;
  int32_t request;
};

// Writes the nodes depth first, children in order of their first request, and the order of the requests.
void write_preorder(const std::vector<SharedNode>& nodes, const std::vector<int32_t>& node_of_request, Forest& forest) {
  std::vector<int32_t> parents(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) parents[i] = nodes[i].parent;
  const Members children(parents, nodes.size());
  const Members tails(node_of_request, nodes.size());
  for (auto* column : {&forest.node_parent, &forest.node_begin, &forest.node_end, &forest.node_first, &forest.node_last,
                       &forest.node_request}) {
    column->reserve(nodes.size());
  }
  forest.order.reserve(forest.num_requests);

  struct Frame {
    size_t node;
    int32_t position;
    const int32_t* next_child;
  };
  std::vector<Frame> stack;
  const auto enter = [&](size_t node, int32_t position) {
    for (const int32_t* request = tails.begin(node); request != tails.end(node); ++request) {
      forest.order.push_back(*request);
      forest.tail_node[*request] = position;
      forest.tail_begin[*request] = position < 0 ? 0 : forest.node_end[position];
    }
    forest.depth = std::max(forest.depth, static_cast<int32_t>(stack.size()));  // without the root
    stack.push_back({node, position, children.begin(node)});
  };
  enter(nodes.size(), -1);
  while (!stack.empty()) {
    Frame& top = stack.back();
    if (top.next_child == children.end(top.node)) {
      if (top.position >= 0) forest.node_last[top.position] = static_cast<int32_t>(forest.order.size());
      stack.pop_back();
      continue;
    }
    const int32_t child = *top.next_child++;
    const int32_t position = forest.num_nodes();
    forest.node_parent.push_back(top.position);
    forest.node_begin.push_back(nodes[child].begin);
    forest.node_end.push_back(nodes[child].end);
    forest.node_first.push_back(static_cast<int32_t>(forest.order.size()));
    forest.node_last.push_back(-1);
    forest.node_request.push_back(nodes[child].request);
    enter(child, position);
  }
}

}  // namespace

void RadixMirror::clear() {
  nodes_.clear();
  slot_of_.clear();
  stale_.clear();
  splits_.clear();
  root_splits_ = 0;
}

int32_t RadixMirror::end_of(int64_t id) const {
  const int32_t slot = slot_of_.find(id);
  return slot < 0 ? -1 : nodes_[slot].end;
}

void RadixMirror::put(int64_t parent_id, int32_t begin, const std::vector<int64_t>& ids,
                      const std::vector<int32_t>& ends, bool leaf) try {
  if (ids.empty() || ids.size() != ends.size()) {
    throw std::invalid_argument("a branch of " + std::to_string(ids.size()) + " nodes with " +
                                std::to_string(ends.size()) + " ends");
  }
  int32_t parent = -1;
  if (parent_id != -1) {
    parent = slot_of_.find(parent_id);
    if (parent < 0) {
      throw std::invalid_argument("radix node " + std::to_string(ids[0]) + ": unknown parent " +
                                  std::to_string(parent_id));
    }
  }
  const int32_t expected = parent < 0 ? 0 : nodes_[parent].end;
  if (begin != expected) {
    throw std::invalid_argument("radix node " + std::to_string(ids[0]) + ": begins at " + std::to_string(begin) +
                                ", but its parent ends at " + std::to_string(expected));
  }
  mark_used(parent);
  const bool inner = ids.size() > 1 || !leaf;
  for (size_t i = 0; i < ids.size(); ++i) {
    const std::string what = "radix node ";
    if (ids[i] < 0) throw std::invalid_argument(what + std::to_string(ids[i]) + ": ids are not negative");
    if (begin < 0 || ends[i] <= begin) {
      throw std::invalid_argument(what + std::to_string(ids[i]) + ": [" + std::to_string(begin) + ", " +
                                  std::to_string(ends[i]) + ") is no range of positions");
    }
    const auto [slot, inserted] = slot_of_.insert(ids[i], static_cast<int32_t>(nodes_.size()));
    if (inserted) {
      nodes_.emplace_back();
    } else if (nodes_[slot].end != ends[i]) {  // also keeps cycles out: ends ascend along every path
      throw std::invalid_argument(what + std::to_string(ids[i]) + ": ends at " + std::to_string(ends[i]) +
                                  ", but was known to end at " + std::to_string(nodes_[slot].end));
    }
    // A new node with children may have been inserted by a split: its siblings may now be below it. The other nodes of
    // the branch have no known siblings.
    if (i == 0 && inserted && inner) count_split(parent, ends[i]);
    Node& node = nodes_[slot];
    node.id = ids[i];
    node.parent = parent;
    node.begin = begin;
    node.end = ends[i];
    node.used = generation_;
    node.checked = splits_below(parent);
    parent = slot;
    begin = ends[i];
  }
} catch (const std::bad_alloc&) {
  clear();
  throw;
}

void RadixMirror::count_split(int32_t parent, int32_t end) {
  std::vector<Split>& splits = splits_[id_of(parent)];
  while (!splits.empty() && splits.back().end >= end) splits.pop_back();
  splits.push_back({++splits_below(parent), end});
}

// Whether a split since the node was put may have inserted a node above it.
bool RadixMirror::may_have_moved(const Node& node) {
  if (node.checked == splits_below(node.parent)) return false;
  const std::vector<Split>& splits = splits_.at(id_of(node.parent));
  const auto smallest_end =
      std::upper_bound(splits.begin(), splits.end(), node.checked,
                       [](uint32_t checked, const Split& split) { return checked < split.number; });
  return smallest_end->end < node.end;
}

void RadixMirror::mark_used(int32_t slot) {
  // The ancestors of a node are used at least as late as the node.
  for (; slot >= 0 && nodes_[slot].used != generation_; slot = nodes_[slot].parent) nodes_[slot].used = generation_;
}

std::vector<std::pair<int64_t, int32_t>> RadixMirror::take_stale() {
  for (const auto& stale : stale_) {
    Node& node = nodes_[slot_of_.find(stale.first)];
    node.checked = splits_below(node.parent);
  }
  return std::exchange(stale_, {});
}

// Counts the requests of every node on the batch's paths and returns these nodes. Each node is visited once.
std::vector<int32_t> RadixMirror::count_requests(const int64_t* last_nodes, const int64_t* prefix_lens,
                                                 const uint8_t* live, std::vector<int32_t>& deepest) {
  std::vector<int32_t> touched;
  std::vector<size_t> segment_begin;  // in touched; a segment is a chain of nodes from the bottom up
  const auto num_requests = static_cast<int32_t>(deepest.size());
  for (int32_t request = 0; request < num_requests; ++request) {
    if (prefix_lens[request] < 0) {
      throw std::invalid_argument("request " + std::to_string(request) + ": prefix length " +
                                  std::to_string(prefix_lens[request]) + " is negative");
    }
    if (last_nodes[request] == -1 || (live != nullptr && live[request] == 0)) continue;
    int32_t slot = slot_of_.find(last_nodes[request]);
    if (slot < 0) {
      throw std::invalid_argument("request " + std::to_string(request) + ": unknown radix node " +
                                  std::to_string(last_nodes[request]));
    }
    mark_used(slot);
    while (slot >= 0 && nodes_[slot].end > prefix_lens[request]) slot = nodes_[slot].parent;
    deepest[request] = slot;
    if (slot < 0) continue;
    ++nodes_[slot].requests;
    segment_begin.push_back(touched.size());
    for (; slot >= 0 && nodes_[slot].candidate < 0; slot = nodes_[slot].parent) {
      nodes_[slot].candidate = request;
      touched.push_back(slot);
    }
  }
  // A segment ends below a node of an earlier one, so all children of a node precede it here.
  size_t end = touched.size();
  for (auto begin = segment_begin.rbegin(); begin != segment_begin.rend(); end = *begin++) {
    for (size_t i = *begin; i < end; ++i) {
      const Node& node = nodes_[touched[i]];
      if (node.parent >= 0) nodes_[node.parent].requests += node.requests;
    }
  }
  return touched;
}

Forest RadixMirror::forest(const int64_t* last_nodes, const int64_t* prefix_lens, const uint8_t* live,
                           int32_t num_requests) try {
  ++generation_;
  stale_.clear();
  Forest forest;
  forest.num_requests = num_requests;
  forest.tail_begin.assign(num_requests, 0);
  forest.tail_node.assign(num_requests, -1);

  std::vector<int32_t> deepest(num_requests, -1);
  const std::vector<int32_t> touched = count_requests(last_nodes, prefix_lens, live, deepest);

  // A shared node continues its parent's node where no request leaves in between.
  std::vector<int32_t> shared;
  for (int32_t slot : touched) {
    Node& node = nodes_[slot];
    if (node.requests >= 2) shared.push_back(slot);
    if (may_have_moved(node)) {
      stale_.emplace_back(node.id, node.candidate);
    } else {
      node.checked = splits_below(node.parent);
    }
  }
  std::sort(shared.begin(), shared.end(), [this](int32_t a, int32_t b) {
    const Node &x = nodes_[a], &y = nodes_[b];
    return x.candidate != y.candidate ? x.candidate < y.candidate : x.begin < y.begin;
  });
  std::vector<SharedNode> nodes;
  nodes.reserve(shared.size());
  for (int32_t slot : shared) {
    Node& node = nodes_[slot];
    const int32_t above = node.parent;
    if (above >= 0 && nodes_[above].requests == node.requests) {
      node.shared = nodes_[above].shared;
      nodes[node.shared].end = node.end;
      continue;
    }
    node.shared = static_cast<int32_t>(nodes.size());
    nodes.push_back({above < 0 ? -1 : nodes_[above].shared, node.begin, node.end, node.candidate});
  }
  for (int32_t& slot : deepest) {
    while (slot >= 0 && nodes_[slot].requests < 2) slot = nodes_[slot].parent;
    if (slot >= 0) slot = nodes_[slot].shared;
  }
  for (int32_t slot : touched) {
    nodes_[slot].requests = 0;
    nodes_[slot].candidate = nodes_[slot].shared = -1;
  }
  write_preorder(nodes, deepest, forest);
  if (generation_ % kSweepInterval == 0) sweep();
  return forest;
} catch (...) {  // nodes keep counts of a forest that was not finished
  clear();
  throw;
}

void RadixMirror::sweep() {
  const auto stale = [this](const Node& node) { return generation_ - node.used > kKeepGenerations; };
  const size_t dead = std::count_if(nodes_.begin(), nodes_.end(), stale);
  if (dead <= nodes_.size() / 2 + kSweepSlack / 2) return;
  // A used node's ancestors are used at least as late, so no kept node loses its parent.
  std::vector<int32_t> moved(nodes_.size(), -1);
  std::vector<Node> kept;
  for (size_t slot = 0; slot < nodes_.size(); ++slot) {
    if (stale(nodes_[slot])) continue;
    moved[slot] = static_cast<int32_t>(kept.size());
    kept.push_back(nodes_[slot]);
  }
  slot_of_.clear();
  for (size_t slot = 0; slot < kept.size(); ++slot) {
    if (kept[slot].parent >= 0) kept[slot].parent = moved[kept[slot].parent];
    slot_of_.insert(kept[slot].id, static_cast<int32_t>(slot));
  }
  nodes_ = std::move(kept);
  for (auto splits = splits_.begin(); splits != splits_.end();) {
    const bool gone = splits->first != -1 && !known(splits->first);
    splits = gone ? splits_.erase(splits) : std::next(splits);
  }
}

}  // namespace prefixpack
