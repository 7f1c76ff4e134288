// What the packing knows of the nodes of a forest.
#pragma once

#include <cstdint>

namespace prefixpack {

struct PackingNode {
  int32_t states = 0;       // 1 + how many nodes above it a pack can have taken along when it gets here
  int32_t state_begin = 0;  // in best_
  int32_t queries = 0;      // of its requests
  int32_t num_children = 0;
  int32_t children_begin = 0;   // in children_
  int32_t other_tails = 0;      // tails right below it of more than one token,
  int32_t single_tails = 0;     // and of one
  double single_tail_cost = 0;  // of these, if they begin at its end

  bool is_leaf() const { return single_tails == queries; }
};

// What a node's parent needs to know; siblings stand together, in ascending order.
struct Child {
  double apart_cost;    // of its subtree if the pack above ends with the parent
  int32_t state_begin;  // in best_
  int32_t queries;
  int32_t node;
};

// Something below a node that either joins the node's pack or takes the pack's range along.
struct Choice {
  double gain;      // seconds saved by joining, before the pack's own reading
  int32_t queries;  // of the child or of all these tails
  int32_t child;    // node, or -1: the node's one-token tails, or -2 - request: one longer tail
};

// Which choices join a pack: the first `joining` by rank, and at most `joining_tails` one-token tails.
struct Decision {
  double cost = 0;  // of the subtree
  int32_t joining = 0;
  int32_t joining_tails = 0;
};

}  // namespace prefixpack
