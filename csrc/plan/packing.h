// Cuts a forest into packs: which nodes are read on their own, which are read together with the nodes below.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "plan/cost_model.h"
#include "plan/forest.h"
#include "plan/params.h"

namespace prefixpack {

// Queries that read one KV range together.
struct Pack {
  int32_t query_begin;  // in packed order
  int32_t query_count;
  int32_t request;   // batch index of the request whose slots are read
  int32_t kv_begin;  // first position
  int32_t kv_end;    // one past the last position, or kOpenEnd: the request's own tail, causal
};

struct Packing {
  std::vector<Pack> packs;             // a query's packs stand in ascending KV order
  std::vector<int32_t> request_order;  // batch indices in packed order
  double cost = 0;                     // seconds, see CostModel
};

constexpr int64_t kMostNewTokens = int64_t{1} << 24;  // of a step, and so its requests

// Lengths of a batch by batch index.
struct BatchLens {
  const int64_t* seq_lens;
  const int64_t* query_lens;  // nullptr: all 1
  int32_t query_len(int32_t request) const {
    return query_lens == nullptr ? 1 : static_cast<int32_t>(query_lens[request]);
  }
  // Whether all requests have the same number of query tokens, as in a decode or a verify step.
  bool uniform_rows(int32_t requests) const {
    if (query_lens == nullptr) return true;
    return requests > 0 && query_lens[0] <= kMaskedPositions &&
           std::all_of(query_lens, query_lens + requests, [this](int64_t n) { return n == query_lens[0]; });
  }
};

// Dynamic program over (node, first node of the pack that reaches it), children chosen by saving per row.
// PAT's algorithm 1 decides the same question greedily with a constant cost of a partial.
Packing pack_forest(const Forest& forest, const BatchLens& lens, const CostModel& cost);

class Packer;

// pack_forest() with memory that is kept from one packing to the next.
class ForestPacker {
 public:
  explicit ForestPacker(const CostModel& cost);
  ~ForestPacker();

  const Packing& pack(const Forest& forest, const BatchLens& lens);  // until the next one

 private:
  std::unique_ptr<Packer> packer_;
};

}  // namespace prefixpack
