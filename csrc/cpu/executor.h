// Runs a plan on the CPU.
#pragma once

#include <cstdint>

#include "plan/params.h"
#include "plan/plan.h"

namespace prefixpack {

// Sizes of the tensors behind AttentionParams, against which check_inputs holds a plan and its indices.
struct TensorSizes {
  int64_t num_tokens;    // rows of q and o
  int64_t num_requests;  // entries of req_pool_indices and seq_lens
  int64_t max_requests;  // rows of req_to_token
  int64_t max_context;   // columns of req_to_token
  int64_t num_slots;     // slots of the KV cache
};

// Throws std::invalid_argument naming the request, position and value where an index leads outside a tensor. Looks at
// every KV slot that the plan reads, once per item: cheap beside reading the keys of all heads.
void check_inputs(const Plan& plan, const AttentionParams& params, const TensorSizes& sizes);

// o (and lse) of every query of the plan; rows of q that no query names are left alone. lse is the natural logarithm of
// the whole denominator, sinks included. The result does not depend on `threads`: each item is summed by one thread,
// and partials are merged in the plan's order. isa: "" for the best of this machine, or a name from supported_isas.
void run_plan_cpu(const Plan& plan, const AttentionParams& params, int threads, const char* isa = "");

// Instruction sets that the kernels are compiled for and this machine has, best first; ends with nullptr.
const char* const* supported_isas();

}  // namespace prefixpack
