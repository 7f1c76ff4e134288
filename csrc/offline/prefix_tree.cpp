#include "offline/prefix_tree.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>

namespace prefixpack {

namespace {

// Tokens compared at a time: long enough for memcmp to run at memory speed, short enough to find the difference fast.
constexpr int64_t kBlock = 256;

int64_t mismatch(const int32_t* a, const int32_t* b, int64_t length) {
  int64_t i = 0;
  while (i + kBlock <= length && std::memcmp(a + i, b + i, kBlock * sizeof(int32_t)) == 0) i += kBlock;
  while (i < length && a[i] == b[i]) ++i;
  return i;
}

struct ByTokens {
  const Prompts& prompts;
  bool operator()(int32_t a, int32_t b) const {
    const int64_t length_a = prompts.length(a), length_b = prompts.length(b);
    const int64_t shorter = std::min(length_a, length_b);
    const int64_t i = mismatch(prompts.begin(a), prompts.begin(b), shorter);
    if (i < shorter) return prompts.begin(a)[i] < prompts.begin(b)[i];
    return length_a != length_b ? length_a < length_b : a < b;
  }
};

// A node whose last prompt has not been seen yet.
struct OpenNode {
  int32_t end;
  int32_t first;
};

struct ClosedNode {
  int32_t first, last, end;
};

// All maximal runs of prompts with a common prefix, from the shared lengths of neighbours, innermost first.
std::vector<ClosedNode> shared_runs(const std::vector<int32_t>& shared) {
  std::vector<ClosedNode> closed;
  std::vector<OpenNode> open;
  const auto count = static_cast<int32_t>(shared.size());
  for (int32_t place = 1; place <= count; ++place) {
    const int32_t in_common = place < count ? shared[place] : 0;
    int32_t first = place - 1;
    while (!open.empty() && open.back().end > in_common) {
      first = open.back().first;
      closed.push_back({first, place, open.back().end});
      open.pop_back();
    }
    if (in_common > 0 && (open.empty() || open.back().end < in_common)) open.push_back({in_common, first});
  }
  return closed;
}

void link_nodes(PrefixTree& tree) {
  std::vector<ClosedNode> nodes = shared_runs(tree.shared);
  std::sort(nodes.begin(), nodes.end(), [](const ClosedNode& a, const ClosedNode& b) {
    return a.first != b.first ? a.first < b.first : a.end < b.end;
  });
  std::vector<int32_t> path;
  int32_t place = 0;
  const auto assign_until = [&](int32_t limit) {  // prompts before `limit` belong to the deepest node that holds them
    while (place < limit) {
      while (!path.empty() && nodes[path.back()].last <= place) path.pop_back();
      const int32_t run_end = path.empty() ? limit : std::min(limit, nodes[path.back()].last);
      const int32_t node = path.empty() ? -1 : path.back();
      for (; place < run_end; ++place) tree.tail_node[tree.order[place]] = node;
    }
  };
  for (const ClosedNode& node : nodes) {
    assign_until(node.first);
    while (!path.empty() && nodes[path.back()].last <= node.first) path.pop_back();
    const int32_t above = path.empty() ? -1 : path.back();
    path.push_back(tree.num_nodes());
    tree.parent.push_back(above);
    tree.begin.push_back(above < 0 ? 0 : nodes[above].end);
    tree.end.push_back(node.end);
    tree.first.push_back(node.first);
    tree.last.push_back(node.last);
  }
  assign_until(static_cast<int32_t>(tree.order.size()));
}

}  // namespace

int64_t common_prefix(const Prompts& prompts, int32_t a, int32_t b) {
  return mismatch(prompts.begin(a), prompts.begin(b), std::min(prompts.length(a), prompts.length(b)));
}

PrefixTree build_prefix_tree(const Prompts& prompts) {
  PrefixTree tree;
  tree.order.resize(prompts.num_prompts);
  tree.shared.assign(prompts.num_prompts, 0);
  tree.tail_node.assign(prompts.num_prompts, -1);
  std::iota(tree.order.begin(), tree.order.end(), 0);
  std::sort(tree.order.begin(), tree.order.end(), ByTokens{prompts});
  for (int32_t place = 1; place < prompts.num_prompts; ++place) {
    tree.shared[place] = static_cast<int32_t>(common_prefix(prompts, tree.order[place - 1], tree.order[place]));
  }
  link_nodes(tree);
  return tree;
}

PrefixTree restricted(const PrefixTree& tree, const uint8_t* in_tree) {
  PrefixTree part;
  part.tail_node.assign(tree.tail_node.size(), -1);
  int32_t in_common = 0;  // with the last prompt that was taken
  for (size_t place = 0; place < tree.order.size(); ++place) {
    in_common = std::min(in_common, tree.shared[place]);
    if (!in_tree[tree.order[place]]) continue;
    part.order.push_back(tree.order[place]);
    part.shared.push_back(in_common);
    in_common = std::numeric_limits<int32_t>::max();
  }
  link_nodes(part);
  return part;
}

std::vector<int32_t> enlarged_first_level(const PrefixTree& tree) {
  const int32_t count = tree.num_nodes();
  std::vector<std::vector<int32_t>> children(count);
  std::vector<int32_t> top;  // children of the root
  std::vector<int64_t> leaves(count), tokens(count);
  std::vector<int32_t> above = tree.parent;
  for (int32_t node = 0; node < count; ++node) {
    (above[node] < 0 ? top : children[above[node]]).push_back(node);
    leaves[node] = tree.last[node] - tree.first[node];
    tokens[node] = tree.end[node] - tree.begin[node];
  }
  // Makes those grandchildren of `siblings` siblings themselves for which reuse gains more than it loses.
  const auto enlarge = [&](std::vector<int32_t>& siblings, int32_t parent) {
    std::vector<int32_t> forked;
    for (const int32_t child : siblings) {
      std::vector<int32_t> kept;
      for (const int32_t grandchild : children[child]) {
        const int64_t gain = (leaves[grandchild] - 1) * tokens[grandchild];
        const int64_t penalty = leaves[grandchild] == leaves[child] ? 0 : tokens[child];
        if (gain <= penalty) {
          kept.push_back(grandchild);
          continue;
        }
        leaves[child] -= leaves[grandchild];
        tokens[grandchild] += tokens[child];
        above[grandchild] = parent;
        forked.push_back(grandchild);
      }
      children[child] = std::move(kept);
    }
    siblings.insert(siblings.end(), forked.begin(), forked.end());
  };
  for (int32_t node = count - 1; node >= 0; --node) enlarge(children[node], node);
  enlarge(top, -1);

  // The node of a prompt is the topmost one above it. Nodes above were numbered lower, forks included.
  std::vector<int32_t> first_level(count);
  for (int32_t node = 0; node < count; ++node) first_level[node] = above[node] < 0 ? node : first_level[above[node]];
  std::vector<int32_t> by_prompt(tree.tail_node.size());
  for (size_t prompt = 0; prompt < by_prompt.size(); ++prompt) {
    const int32_t tail = tree.tail_node[prompt];
    const int32_t node = tail < 0 ? -1 : first_level[tail];
    by_prompt[prompt] = node < 0 || leaves[node] < 2 ? -1 : node;
  }
  return by_prompt;
}

}  // namespace prefixpack
