// Runs a plan on the CPU.
#pragma once

#include <cstdint>

#include "plan/params.h"
#include "plan/plan.h"

namespace prefixpack {

// Sizes of the tensors of AttentionParams, for check_inputs.
struct TensorSizes {
  int64_t num_tokens;    // rows of q and o
  int64_t num_requests;  // entries of req_pool_indices and seq_lens
  int64_t max_requests;  // rows of req_to_token
  int64_t max_context;   // columns of req_to_token
  int64_t kv_slots;      // slots of the KV cache
};

// Throws std::invalid_argument with request, position and value if an index exceeds its tensor. Checks every KV slot
// that the plan reads, once per item, which is cheap beside reading the keys.
void check_inputs(const Plan& plan, const AttentionParams& params, const TensorSizes& sizes);

constexpr int kMostThreads = 1 << 16;

// Computes o (and lse) of every query of the plan; rows of q without a query are left unchanged. lse: natural logarithm
// of the whole denominator, sinks included. The result does not depend on `threads`: one thread sums each item, and
// partials are combined in the plan's order. isa: "" for the best of this machine, or a name from supported_isas.
void run_plan_cpu(const Plan& plan, const AttentionParams& params, int threads, const char* isa = "");

// Instruction sets of the build that this machine supports, best first; ends with nullptr.
const char* const* supported_isas();

}  // namespace prefixpack
