// When the GPU kernels would be done with a plan: a simulation of their workers, their queues and their combines.
#pragma once

#include <cstdint>

#include "plan/cost_model.h"
#include "plan/plan.h"

namespace prefixpack {

// The machine that is simulated. Half an SM has one CTA of the CTA kernel or `warps` warps.
// Times in seconds, rates in bytes per second unless said otherwise.
struct Machine {
  int32_t resident_ctas = 1;  // two of each SM
  int32_t few_ctas = 1;       // resident CTAs that the CTA kernel has where most work is narrow
  int32_t warps = 8;
  int32_t narrow_rows = 8;           // most rows of an item for warps
  int32_t narrow_parts = 1;          // work tiles of such an item and KV head
  double bandwidth = 1;              // of all workers
  double begin = 0;                  // from the launch to the first work
  double warp_begin = 0;             // from the begin of a CTA of warps to their first work tile
  double cta_start = 0;              // latency of a work tile before its KV streams
  double cta_end = 0;                // latency of a work tile after its KV has streamed
  double warp_start = 0;             // as cta_start; after its KV a work tile of a warp needs no time
  double cta_store = 1;              // rows that one CTA can write
  double warp_rate = 1;              // KV that one warp can read
  double flops32 = 1;                // operations per second of all CTAs at tiles of up to 32 rows
  double flops64 = 1;                // ... of up to 64 rows
  double flops128 = 1;               // ... of more
  int32_t key_tile = 1;              // positions of a CTA's KV tile, all of which it multiplies
  double lone_speedup = 1;           // factor of a CTA's arithmetic while its SM runs no other
  double sibling = 1;                // share of its bytes that a sibling tile takes of the bandwidth
  double cta_combine = 0;            // latency of a combine by a CTA
  double warp_combine = 0;           // latency of a combine by a warp
  double cta_combine_step = 0;       // each step of a row's partials in series
  double warp_combine_step = 0;      // likewise, by a warp
  double deferred_combine = 0;       // latency of a deferred row
  double deferred_combine_step = 0;  // each eight partials of it
};

struct Makespan {
  double seconds;    // to the end of the last work tile
  double streaming;  // work tile bytes over the bandwidth: a lower bound
  double longest;    // of one work tile by itself: a lower bound
  double work;       // of the workers, if the bandwidth had no end and none were ever idle: a lower bound
};

// seq_lens: [num_requests]. Throws std::invalid_argument on lengths, shapes or too many work tiles.
Makespan simulate_makespan(const Plan& plan, const int64_t* seq_lens, const ModelShape& shape, const Machine& machine);

}  // namespace prefixpack
