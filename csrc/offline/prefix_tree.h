// The prefix tree of a whole batch of prompts, built before the batch runs.
#pragma once

#include <cstdint>
#include <vector>

namespace prefixpack {

// A batch of prompts: prompt r is tokens[offsets[r] .. offsets[r + 1]). Nothing is copied.
struct Prompts {
  const int32_t* tokens;
  const int64_t* offsets;  // num_prompts + 1, from 0, not decreasing
  int32_t num_prompts;

  const int32_t* begin(int32_t prompt) const { return tokens + offsets[prompt]; }
  int64_t length(int32_t prompt) const { return offsets[prompt + 1] - offsets[prompt]; }
};

// Compact and multi-level: a node is a range of token positions that at least two prompts share. Nodes stand in
// depth-first preorder; a node's prompts are order[first .. last), of which those below no child end in the node.
struct PrefixTree {
  std::vector<int32_t> order;      // prompts in the tree, sorted by their tokens; equal prompts by number
  std::vector<int32_t> shared;     // by place in `order`: tokens in common with the prompt before (first: 0)
  std::vector<int32_t> parent;     // by node: node above, or -1
  std::vector<int32_t> begin;      // by node: first token position
  std::vector<int32_t> end;        // by node: one past the last token position
  std::vector<int32_t> first;      // by node: start of its prompts in `order`
  std::vector<int32_t> last;       // by node: end of its prompts in `order`
  std::vector<int32_t> tail_node;  // by prompt: deepest node, or -1; also -1 for a prompt that is not in the tree

  int32_t num_nodes() const { return static_cast<int32_t>(parent.size()); }
};

// Number of leading tokens that two prompts have in common.
int64_t common_prefix(const Prompts& prompts, int32_t a, int32_t b);

// Time O(R log R) comparisons, each as long as the prefix in common; memory 8 bytes a prompt besides the result.
PrefixTree build_prefix_tree(const Prompts& prompts);

// The tree of a part of the prompts, in the time of one pass over them. in_tree: by prompt, 0 to leave it out.
PrefixTree restricted(const PrefixTree& tree, const uint8_t* in_tree);

// One shared prefix for each prompt instead of several levels: the node that ends it, by prompt, or -1. Prompts with
// the same node form a group. BatchLLM's bottom-up enlargement of the first level (algorithm 1); a node's last child
// merges free of charge, because nobody is left who needs the node by itself.
std::vector<int32_t> enlarged_first_level(const PrefixTree& tree);

}  // namespace prefixpack
