// The KV positions that requests of one batch share.
#pragma once

#include <cstdint>
#include <vector>

namespace prefixpack {

// Shared-prefix structure of a batch. Nodes stand in depth-first preorder. A node has at least two requests and a
// different set of requests than its parent, so a chain of radix nodes with the same requests is one node here.
struct Forest {
  int32_t num_requests = 0;
  int32_t depth = 0;                  // nodes on the longest path
  std::vector<int32_t> order;         // [num_requests] batch indices, depth first: a node's requests are neighbours
  std::vector<int32_t> node_parent;   // [num_nodes] node, or -1
  std::vector<int32_t> node_begin;    // [num_nodes] first position, equal to the parent's end
  std::vector<int32_t> node_end;      // [num_nodes] one past the last position
  std::vector<int32_t> node_first;    // [num_nodes] requests of the node: order[node_first .. node_last)
  std::vector<int32_t> node_last;     // [num_nodes]
  std::vector<int32_t> node_request;  // [num_nodes] a live request whose KV slots stand for all
  std::vector<int32_t> tail_begin;    // [num_requests] by batch index: first position that is the request's own
  std::vector<int32_t> tail_node;     // [num_requests] by batch index: the node above the tail, or -1

  int32_t num_nodes() const { return static_cast<int32_t>(node_parent.size()); }
};

}  // namespace prefixpack
