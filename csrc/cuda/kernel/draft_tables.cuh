// Tables of a verify step of speculative decoding: KV lengths with the drafts, and masks of trees of drafts.
#pragma once

#include "cuda/common/ptx.cuh"
#include "cuda/draft_params.h"
#include "plan/params.h"

namespace prefixpack {

// Threads of a CTA: a thread for each draft of a tree, in whole warps.
constexpr int kDraftTableThreads = kMaskedPositions;

// Once per verify step, outside captured graphs. One CTA per request.
PREFIXPACK_DEVICE void fill_draft_tables(const DraftParams& params) {
  const int32_t request = ptx::cta_index(), draft = ptx::thread_index(), drafts = params.drafts;
  const int64_t committed = params.committed[request];
  if (draft == 0) params.seq_lens[request] = committed + drafts;
  if (params.visible == nullptr || request >= params.requests) return;

  // First column of this draft's row that stands for a draft. Rows of different requests differ in width.
  int64_t row = (int64_t{request} * drafts + draft) * drafts;
  if (params.has_committed_columns) {
    int32_t before = 0;  // committed KV of the requests in front, which is less than 2^31 slots
    for (int32_t other = draft % 32; other < request; other += 32) {
      before += static_cast<int32_t>(params.committed[other]);
    }
    for (int32_t lanes = 16; lanes > 0; lanes /= 2) before += ptx::shuffle_xor(before, lanes);
    row += int64_t{before} * drafts + committed * (draft + 1);
  }
  if (draft >= drafts) return;
  // Bit j stands for the position j before the draft's own. Committed KV and what the mask does not cover is visible.
  uint64_t word = draft + 1 < kMaskedPositions ? ~uint64_t{0} << (draft + 1) : 0;
#pragma unroll 8
  for (int32_t back = 0; back <= draft; ++back) {
    const int64_t at = row + draft - back;
    const bool sees = at >= params.mask_size || params.mask[at] != 0;
    word |= uint64_t{sees} << back;
  }
  params.visible[int64_t{request} * drafts + draft] = word;
}

}  // namespace prefixpack
