// The plan: what one attention step executes. Plain data; made by the planner, run by csrc/cpu and csrc/cuda.
#pragma once

#include <cstdint>
#include <vector>

namespace prefixpack {

// WorkItem::kv_end of a range that ends with the item's own last query: it grows by one token per decode step.
constexpr int32_t kOpenEnd = -1;
// WorkItem::partial_begin of an item whose queries have no other partial: it writes the output itself.
constexpr int32_t kWriteThrough = -1;

// A row tile of the work queue, run once per KV head: some queries against one range of KV positions.
struct WorkItem {
  int32_t query_begin;    // first entry in Plan::query_token and its siblings
  int32_t query_count;    // consecutive entries; times the GQA group size = rows of the tile
  int32_t request;        // batch index of the request whose req_to_token row names the KV slots
  int32_t kv_begin;       // first KV position
  int32_t kv_end;         // one past the last KV position, or kOpenEnd: position of the item's last query + 1
  int32_t partial_begin;  // partial of the first query (those of the others follow it), or kWriteThrough
  int32_t tile_rows;      // smallest tile of the device's tile table that holds the rows
};

// Queries are query tokens in packed order: depth-first over the forest, so that the queries of a node are
// neighbours and a request's own tokens follow each other. `position` of entry i is
// seq_lens[query_request[i]] - 1 - query_back[i]; it sees KV positions 0 .. position.
struct Plan {
  int32_t num_requests = 0;
  int32_t num_queries = 0;
  int32_t num_partials = 0;              // partials; each holds every query head of one query
  std::vector<int32_t> query_token;      // [num_queries] row of q and o
  std::vector<int32_t> query_request;    // [num_queries] batch index
  std::vector<int32_t> query_back;       // [num_queries] tokens of the request after this one
  std::vector<WorkItem> items;           // queue order: longest first
  std::vector<int32_t> combine_query;    // [num_combines] entries with more than one partial
  std::vector<int32_t> combine_offset;   // [num_combines + 1] into combine_partial
  std::vector<int32_t> combine_partial;  // partials of an entry in ascending KV position: the order of summation
  int64_t kv_tokens_packed = 0;          // KV positions that the items read, once per item
  int64_t kv_tokens_per_request = 0;     // KV positions that request-wise attention reads
  int64_t kv_tokens_unique = 0;          // KV positions of the forest, each once: the limit
  bool mostly_narrow = false;            // most of the work is in items that take only a part of a worker
};

}  // namespace prefixpack
