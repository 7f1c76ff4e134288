// A copy of the part of SGLang's radix tree that running requests use, by node id, without tokens or slots.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "plan/forest.h"

namespace prefixpack {

// Node ids are never reused by SGLang, and splitting a node leaves its id with the suffix. What is stored can
// therefore become incomplete (a node above was inserted) but never wrong about which KV two requests share.
class RadixMirror {
 public:
  bool known(int64_t id) const { return slot_of_.count(id) != 0; }
  size_t size() const { return slot_of_.size(); }
  void clear();

  // Inserts or updates a node that holds positions [begin, end). parent_id -1: child of a root.
  // Throws std::invalid_argument for an unknown parent or a range that does not continue the parent's.
  void put(int64_t id, int64_t parent_id, int32_t begin, int32_t end);

  // Known children of parent_id that start at `begin` and reach beyond `end`: a split may have put a node
  // [begin, end) above them, so they have to be read again.
  std::vector<int64_t> split_suspects(int64_t parent_id, int32_t begin, int32_t end) const;

  // The forest of a batch. last_nodes: deepest radix node by batch index, -1 for none. prefix_lens: positions that
  // existed before this step; a node that reaches beyond is private. live (may be null): 0 for requests whose KV
  // may already be released; they share nothing and never stand for others.
  Forest forest(const int64_t* last_nodes, const int64_t* prefix_lens, const uint8_t* live, int32_t num_requests);

 private:
  struct Node {
    int64_t id;
    int32_t parent;  // slot, or -1
    int32_t begin, end;
    uint32_t used;      // generation of the last forest that used the node
    int32_t requests;   // scratch of forest(): requests below
    int32_t candidate;  // scratch of forest(): a request that passes through
    int32_t shared;     // scratch of forest(): index among the shared nodes, or -1
  };

  void sweep();

  std::vector<Node> nodes_;
  std::unordered_map<int64_t, int32_t> slot_of_;
  uint32_t generation_ = 0;
};

}  // namespace prefixpack
