// Parameters of the kernel that prepares verify steps of speculative decoding.
#pragma once

#include <cstdint>

namespace prefixpack {

struct DraftParams {
  const int64_t* committed;    // [rows] KV lengths without drafts; a graph pads behind the requests
  const uint8_t* mask;         // [mask_size] row by row, by draft of each request; nullptr: mask_size is 0
  int64_t mask_size;           // columns behind it are visible
  int32_t rows;                // entries of seq_lens
  int32_t requests;            // of these, those with masks
  int32_t drafts;              // new tokens of each request; with masks at most kMaskedPositions
  bool has_committed_columns;  // a row has a column for each committed position before those of the drafts
  int64_t* seq_lens;           // [rows] KV lengths with the drafts
  uint64_t* visible;           // [requests * drafts] see AttentionParams; nullptr: chains
};

}  // namespace prefixpack
