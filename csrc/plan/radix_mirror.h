// A copy of the part of SGLang's radix tree that running requests use, by node id, without tokens or slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/forest.h"
#include "plan/id_map.h"

namespace prefixpack {

// SGLang never reuses a node id, and splitting a node leaves its id with the suffix, so a node's end never changes.
// The copy can lack a node that a split has inserted above a known one. It never claims sharing that is not there.
// It is empty after a forest() that threw, and where memory ran out.
class RadixMirror {
 public:
  bool known(int64_t id) const { return slot_of_.find(id) >= 0; }
  // One past the last position of a node, or -1 if it is not known.
  int32_t end_of(int64_t id) const;
  size_t size() const { return slot_of_.size(); }
  void clear();

  // Inserts or updates a branch: a chain of nodes below parent_id (-1: a root), each the parent of the next. Node i
  // holds the positions from the end of the node before it, or from `begin`, to ends[i]. leaf: the last node has no
  // children in the tree. Throws std::invalid_argument for an unknown parent or a range that does not continue it.
  void put(int64_t parent_id, int32_t begin, const std::vector<int64_t>& ids, const std::vector<int32_t>& ends,
           bool leaf);

  // The forest of a batch. last_nodes: deepest radix node by batch index, -1 for none. prefix_lens: positions that
  // existed before this step; a node that reaches beyond is private. live (may be null): 0 for requests whose KV
  // may already be released; they share nothing and never stand for others.
  // Visits every node on the batch's paths once, except nodes that reach beyond a prefix: those once per request.
  Forest forest(const int64_t* last_nodes, const int64_t* prefix_lens, const uint8_t* live, int32_t num_requests);

  // Nodes of the last forest whose parent a split may have changed since they were put, each with the batch index of a
  // request on whose path it is. The caller reads them again and calls forest() again.
  std::vector<std::pair<int64_t, int32_t>> take_stale();

 private:
  struct Node {
    int64_t id = -1;
    int32_t parent = -1;  // slot, or -1
    int32_t begin = 0, end = 0;
    uint32_t used = 0;       // generation of the last forest that used the node
    uint32_t splits = 0;     // nodes with children that were inserted right below this one
    uint32_t checked = 0;    // splits of the parent when this node was last put
    int32_t requests = 0;    // scratch of forest(): requests at or below the node
    int32_t candidate = -1;  // scratch of forest(): lowest batch index that passes through the node, or -1
    int32_t shared = -1;     // scratch of forest(): index among the shared nodes, or -1
  };

  struct Split {
    uint32_t number;  // value of the parent's counter
    int32_t end;      // of the new node: only siblings that end later can be below it
  };

  uint32_t& splits_below(int32_t parent) { return parent < 0 ? root_splits_ : nodes_[parent].splits; }
  int64_t id_of(int32_t slot) const { return slot < 0 ? -1 : nodes_[slot].id; }
  void count_split(int32_t parent, int32_t end);
  bool may_have_moved(const Node& node);
  void mark_used(int32_t slot);
  std::vector<int32_t> count_requests(const int64_t* last_nodes, const int64_t* prefix_lens, const uint8_t* live,
                                      std::vector<int32_t>& deepest);
  void sweep();

  std::vector<Node> nodes_;
  IdMap slot_of_;
  std::vector<std::pair<int64_t, int32_t>> stale_;
  // Splits right below a node, by its id (-1: a root), in their order. A later split with the same end or a smaller one
  // replaces those before it, so ends ascend.
  std::unordered_map<int64_t, std::vector<Split>> splits_;
  uint32_t generation_ = 0;
  uint32_t root_splits_ = 0;
};

}  // namespace prefixpack
