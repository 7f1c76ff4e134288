// When the GPU kernels would be done with a plan: a simulation of their workers, their queues and their combines.
#pragma once

#include <cstdint>

#include "plan/cost_model.h"
#include "plan/packing.h"
#include "plan/plan.h"

namespace prefixpack {

// The machine that is simulated. Half an SM has one CTA of the CTA kernel or `warps` warps.
// Times in seconds, rates in bytes per second unless said otherwise.
struct Machine {
  int32_t resident_ctas = 264;  // two of each SM
  int32_t few_ctas = 132;       // of these, those that the CTA kernel has where most work is narrow
  int32_t warps = 8;
  int32_t narrow_rows = 8;   // items of so many rows or fewer are for warps
  int32_t narrow_parts = 1;  // work tiles of such an item and KV head
  double bandwidth = 4.3e12;
  double begin = 0;                                    // from the launch to the first work
  double warp_begin = 0;                               // from when a CTA of warps begins to their first work tile
  double cta_start = 0, cta_end = 0;                   // latency of a work tile before and after its KV streams
  double warp_start = 0;                               // likewise; after it a warp tile needs no time
  double cta_store = 1e11;                             // bytes of its rows that one CTA can write
  double warp_rate = 1e12;                             // KV that one warp can read
  double flops32 = 1, flops64 = 1, flops128 = 1;       // operations per second of all CTAs, by rows of the tile
  int32_t key_tile = 1;                                // positions of a CTA's KV tile: it multiplies all of the last
  double lone_speedup = 1;                             // of a CTA whose SM runs no other, by multiplying
  double sibling = 1;                                  // share of the bytes that a sibling tile takes of the bandwidth
  double cta_combine = 0, warp_combine = 0;            // latency of a combine
  double cta_combine_step = 0, warp_combine_step = 0;  // of each step of a row's partials in series
  double deferred_combine = 0;                         // latency of a deferred row
  double deferred_combine_step = 0;                    // of eight partials of it
};

struct Makespan {
  double seconds;    // to the end of the last work tile
  double streaming;  // work tile bytes over the bandwidth: a lower bound
  double longest;    // of one work tile by itself: a lower bound
  double work;       // of the workers, if the bandwidth had no end and none were ever idle: a lower bound
};

// seq_lens: [num_requests]. Throws std::invalid_argument on lengths, shapes or figures out of range.
Makespan simulate_makespan(const Plan& plan, const int64_t* seq_lens, const ModelShape& shape, const Machine& machine);

}  // namespace prefixpack
