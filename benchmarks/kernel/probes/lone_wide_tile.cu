// R2: how fast is a wide tile whose CTA has an SM to itself, with the copies in warps of their own?
//
// 128 rows of one KV head against a shared range with page size 1. One warpgroup gathers the K or V of 64 keys at a
// time with cp.async into a ring of stages; two warpgroups of 64 rows compute. Each issues the scores of the next keys
// together with the values of these, and computes the next softmax while the values are multiplied. Today two CTAs on
// an SM need 2.1 us for 64 keys of each, so 1.05 us is the same rate. Stop: more than 1.25 us on half an SM, that is
// with at most 113 KiB of shared memory and 43,008 registers, which leaves the rest to the tails. The other cases say
// whether these limits cost anything. Outputs of rows of all warps are checked.
//
// ptxas moves about half of a softmax's exponentials behind the wait for the values; only the other warpgroup's MMAs
// hide those. So a figure that is met is safe, and one that is barely missed is not.
#include <cmath>
#include <cstring>

#include "cuda/common/index_math.h"
#include "cuda/common/wgmma.cuh"
#include "probe.cuh"

using namespace prefixpack;

namespace {

constexpr int kKeys = 64, kRows = 128, kHeadDim = probe::kHeadDim;
constexpr int kProducers = 128, kThreads = kProducers + 2 * kRows;
constexpr int kSlabBytes = kKeys * 128, kStageBytes = 2 * kSlabBytes;  // K or V: two slabs of 64 columns
constexpr int kQuerySlabBytes = kRows * 128, kQueryBytes = 2 * kQuerySlabBytes;
constexpr int kAtomBytes = 1024;
constexpr float kScaleLog2 = 0.08838834764f * 1.44269504f;

struct Step {
  const uint16_t* q;  // [rows of all CTAs, kHeadDim]
  const char *k, *v;
  const int32_t* slots;
  int32_t tokens;
  float* output;  // [rows of all CTAs, kHeadDim]
};

__device__ __forceinline__ void barrier_init(ptx::SharedAddress barrier, int32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_arrive(ptx::SharedAddress barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(ptx::SharedAddress barrier, int32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra ready;\nbra "
      "again;\nready:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ bool barrier_passed(ptx::SharedAddress barrier, int32_t parity) {
  int32_t passed;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.s32 %0, 1, 0, p;}"
               : "=r"(passed)
               : "r"(barrier), "r"(parity)
               : "memory");
  return passed != 0;
}

// Stage 2 i has the keys of tile i, stage 2 i + 1 its values; they take the places of the ring in turn.
template <int Places>
struct Ring {
  ptx::SharedAddress stages, full, empty;
  __device__ __forceinline__ ptx::SharedAddress at(int32_t stage) const {
    return stages + stage % Places * kStageBytes;
  }
  __device__ __forceinline__ ptx::SharedAddress full_at(int32_t stage) const { return full + stage % Places * 8; }
  __device__ __forceinline__ ptx::SharedAddress empty_at(int32_t stage) const { return empty + stage % Places * 8; }
  __device__ __forceinline__ static int32_t parity(int32_t stage) { return stage / Places % 2; }
};

template <int Places>
constexpr int kShared = kQueryBytes + Places * kStageBytes + 2 * Places * 8;

// Gathers stages. A stage is full when this thread's copies have arrived. They are waited for while two later stages
// are in flight, or when the ring has no place: consumers may need all of it before they leave any.
template <int Places>
__device__ __forceinline__ void produce(const Step& step, const Ring<Places>& ring, int32_t head) {
  const int32_t thread = threadIdx.x, chunk = thread % 16, first = thread / 16, lane = thread % 32;
  const int32_t tiles = step.tokens / kKeys;
  const int64_t mine = head * probe::kRowBytes + chunk * 16;
  // Lane i of a warp has the slot of the row that the warp's half i / 16 copies in pass i % 8.
  const auto slot_of = [&](int32_t tile) {
    return tile < tiles ? step.slots[tile * kKeys + lane % 8 * 8 + thread / 32 * 2 + lane / 16] : 0;
  };
  int32_t slots = 0, next = slot_of(0), published = 0;
  const auto publish = [&] {
    ptx::fence_proxy_async();
    barrier_arrive(ring.full_at(published++));
  };
  for (int32_t stage = 0; stage < 2 * tiles; ++stage) {
    if (stage >= Places) {
      const int32_t parity = ring.parity(stage - Places);
      while (published < stage && ptx::any(!barrier_passed(ring.empty_at(stage), parity))) {
        if (stage - published == 2) {
          ptx::cp_async_wait<1>();
        } else {
          ptx::cp_async_wait<0>();
        }
        publish();
      }
      barrier_wait(ring.empty_at(stage), parity);
    }
    if (stage % 2 == 0) slots = next, next = slot_of(stage / 2 + 1);
    const char* const from = (stage % 2 == 0 ? step.k : step.v) + mine;
#pragma unroll
    for (int32_t pass = 0; pass < 8; ++pass) {
      const int32_t slot = __shfl_sync(0xffffffffu, slots, lane / 16 * 16 + pass);
      ptx::cp_async(ring.at(stage) + chunk / 8 * kSlabBytes + swizzled_offset(pass * 8 + first, chunk % 8, 128),
                    from + int64_t{slot} * probe::kTokenBytes);
    }
    ptx::cp_async_commit();
    if (stage - published < 2) continue;
    ptx::cp_async_wait<2>();
    publish();
  }
  ptx::cp_async_wait<0>();
  while (published < 2 * tiles) publish();
}

__device__ __forceinline__ void issue_scores(ptx::SharedAddress queries, ptx::SharedAddress keys,
                                             float (&scores)[8][4]) {
  const auto a = ptx::smem_descriptor(queries, 0, kAtomBytes), b = ptx::smem_descriptor(keys, 0, kAtomBytes);
  ptx::wgmma<ptx::BFloat16, false>(scores, a, b);
#pragma unroll
  for (int32_t i = 1; i < kHeadDim / 16; ++i) {
    ptx::wgmma<ptx::BFloat16, true>(scores, ptx::advance(a, i / 4 * kQuerySlabBytes + i % 4 * 32),
                                    ptx::advance(b, i / 4 * kSlabBytes + i % 4 * 32));
  }
  ptx::wgmma_commit();
}

__device__ __forceinline__ void issue_values(ptx::SharedAddress values, uint32_t (&weights)[4][4],
                                             float (&output)[16][4]) {
  const auto b = ptx::smem_descriptor(values, kSlabBytes, kAtomBytes);
#pragma unroll
  for (int32_t i = 0; i < kKeys / 16; ++i) {
    ptx::wgmma<ptx::BFloat16>(output, weights[i], ptx::advance(b, i * 2 * kAtomBytes));
  }
  ptx::wgmma_commit();
}

// Weights of the scores. The maximum is that of the first tile, and sums are not rescaled: inputs are small.
__device__ __forceinline__ void softmax(float (&scores)[8][4], float (&max)[2], float (&sum)[2], bool first) {
  if (first) {
    for (int32_t half = 0; half < 2; ++half) {
      float most = -INFINITY;
#pragma unroll
      for (int32_t i = 0; i < 16; ++i) most = fmaxf(most, scores[i / 2][2 * half + i % 2]);
      most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 1));
      max[half] = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, 2)) * kScaleLog2;
    }
  }
  // The maximum of these scores is computed as the kernels do, although it does not change anything here.
  float seen = -INFINITY;
#pragma unroll
  for (int32_t i = 0; i < 32; ++i) seen = fmaxf(seen, scores[i / 4][i % 4]);
  if (ptx::any(seen * kScaleLog2 > fmaxf(max[0], max[1]) + 100.0f)) max[0] = NAN;
#pragma unroll
  for (int32_t i = 0; i < 32; ++i) {
    float& score = scores[i / 4][i % 4];
    score = ptx::exp2(ptx::fma(score, kScaleLog2, -max[i % 4 / 2]));
    sum[i % 4 / 2] += score;
  }
}

__device__ __forceinline__ void pack(const float (&scores)[8][4], uint32_t (&weights)[4][4]) {
#pragma unroll
  for (int32_t i = 0; i < 4; ++i) {
    weights[i][0] = ptx::BFloat16::pack(scores[2 * i][0], scores[2 * i][1]);
    weights[i][1] = ptx::BFloat16::pack(scores[2 * i][2], scores[2 * i][3]);
    weights[i][2] = ptx::BFloat16::pack(scores[2 * i + 1][0], scores[2 * i + 1][1]);
    weights[i][3] = ptx::BFloat16::pack(scores[2 * i + 1][2], scores[2 * i + 1][3]);
  }
}

template <int Places>
__device__ __forceinline__ void consume(const Step& step, const Ring<Places>& ring, ptx::SharedAddress shared) {
  const int32_t thread = threadIdx.x - kProducers, warpgroup = ptx::broadcast(thread / 128, 0);
  const int32_t lane = thread % 32, tiles = step.tokens / kKeys;
  const ptx::SharedAddress queries = shared + warpgroup * 64 * 128;
  const auto leave = [&](int32_t stage) {
    if (lane == 0) barrier_arrive(ring.empty_at(stage));
  };
  float output[16][4], scores[8][4], max[2], sum[2] = {};
  uint32_t weights[4][4];
#pragma unroll
  for (int32_t i = 0; i < 64; ++i) output[i / 4][i % 4] = 0;
  barrier_wait(ring.full_at(0), 0);
  ptx::wgmma_fence();
  issue_scores(queries, ring.at(0), scores);
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_operand(scores);
  leave(0);
  softmax(scores, max, sum, true);
  pack(scores, weights);
  for (int32_t tile = 0; tile + 1 < tiles; ++tile) {
    const int32_t values = 2 * tile + 1, keys = 2 * tile + 2;
    barrier_wait(ring.full_at(keys), ring.parity(keys));  // the values were published before
    ptx::wgmma_fence_operand(weights);
    ptx::wgmma_fence_operand(output);
    ptx::wgmma_fence();
    issue_scores(queries, ring.at(keys), scores);
    issue_values(ring.at(values), weights, output);
    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operand(scores);
    leave(keys);
    softmax(scores, max, sum, false);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(output);
    leave(values);
    pack(scores, weights);
  }
  barrier_wait(ring.full_at(2 * tiles - 1), ring.parity(2 * tiles - 1));
  ptx::wgmma_fence_operand(weights);
  ptx::wgmma_fence_operand(output);
  ptx::wgmma_fence();
  issue_values(ring.at(2 * tiles - 1), weights, output);
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_operand(output);
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    float total = sum[half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const float scale = 1.0f / total;
    const int32_t row = blockIdx.x * kRows + thread / 32 * 16 + half * 8 + lane / 4;
    float* const to = step.output + int64_t{row} * kHeadDim + lane % 4 * 2;
#pragma unroll
    for (int32_t i = 0; i < 16; ++i) {
      ptx::store_pair(to + i * 8, output[i][2 * half] * scale, output[i][2 * half + 1] * scale);
    }
  }
}

template <int Places, int ProducerRegisters, int ConsumerRegisters>
__device__ __forceinline__ void run(const Step& step) {
  extern __shared__ __align__(1024) char shared[];
  const ptx::SharedAddress base = ptx::shared_address(shared), barriers = base + kQueryBytes + Places * kStageBytes;
  const Ring<Places> ring{base + kQueryBytes, barriers, barriers + Places * 8};
  if (threadIdx.x == 0) {
    for (int32_t place = 0; place < Places; ++place) {
      barrier_init(ring.full_at(place), kProducers);
      barrier_init(ring.empty_at(place), kRows * 2 / 32);
    }
  }
  for (int32_t i = threadIdx.x; i < kRows * 16; i += kThreads) {
    const int32_t row = i / 16, chunk = i % 16;
    ptx::cp_async(base + chunk / 8 * kQuerySlabBytes + swizzled_offset(row, chunk % 8, 128),
                  step.q + (int64_t{blockIdx.x} * kRows + row) * kHeadDim + chunk * 8);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x < kProducers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(ProducerRegisters));
    produce(step, ring, blockIdx.x % probe::kHeads);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(ConsumerRegisters));
    consume(step, ring, base);
  }
}

template <int Places>
__global__ void __launch_bounds__(kThreads, 1) on_whole_sm(Step step) {
  run<Places, 40, 208>(step);
}
// 384 threads of 112 registers, later 128 of 40 and 256 of 144.
template <int Places>
__global__ void __maxnreg__(112) on_half_sm(Step step) {
  run<Places, 40, 144>(step);
}

float of_bf16(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

// Largest error of a CTA's output against the dense result in double: rows of all warps.
double error_of(const Step& step, const probe::Pool& pool, const std::vector<uint16_t>& q, int32_t cta) {
  const size_t words = pool.slots_on_host.size() * probe::kHeads * kHeadDim;
  const std::vector<uint16_t> k = probe::on_host(reinterpret_cast<uint16_t*>(pool.k), words);
  const std::vector<uint16_t> v = probe::on_host(reinterpret_cast<uint16_t*>(pool.v), words);
  const std::vector<float> found = probe::on_host(step.output, q.size());
  const auto at = [&](int32_t key) {
    return (size_t(pool.slots_on_host[key]) * probe::kHeads + cta % probe::kHeads) * kHeadDim;
  };
  double worst = 0;
  for (int32_t row = 0; row < kRows; row += 7) {
    const size_t of_row = (size_t(cta) * kRows + row) * kHeadDim;
    std::vector<double> weights(step.tokens), sums(kHeadDim, 0.0);
    double total = 0, most = -1e30;
    for (int32_t key = 0; key < step.tokens; ++key) {
      double score = 0;
      for (int32_t d = 0; d < kHeadDim; ++d) score += double(of_bf16(q[of_row + d])) * of_bf16(k[at(key) + d]);
      weights[key] = score * 0.08838834764;
      most = std::max(most, weights[key]);
    }
    for (double& weight : weights) total += weight = std::exp(weight - most);
    for (int32_t key = 0; key < step.tokens; ++key) {
      for (int32_t d = 0; d < kHeadDim; ++d) sums[d] += weights[key] / total * of_bf16(v[at(key) + d]);
    }
    for (int32_t d = 0; d < kHeadDim; ++d) {
      const double error = std::abs(sums[d] - found[of_row + d]);
      worst = error <= worst ? worst : error;  // NaN, too
    }
  }
  return worst;
}

void measure(probe::Report& report, probe::ColdTimer& timer, const probe::Pool& pool, const std::string& name,
             void (*kernel)(Step), int32_t shared) {
  const int ctas = report.sms();
  std::vector<uint16_t> q(size_t(ctas) * kRows * kHeadDim);
  std::mt19937 dice(2);
  // Sizes of 8 to 16: weights that differ enough for a wrong score to be seen.
  for (uint16_t& word : q) word = static_cast<uint16_t>((dice() & 0x807f) | 0x4100);
  Step step{probe::on_device(q), pool.k, pool.v, pool.slots, 0, probe::on_device<float>(q.size())};
  constexpr int32_t kShort = 1024, kLong = 9216, kAlone = 120 * 1024;  // more than half an SM: no second CTA
  double us[2];
  for (const bool is_long : {false, true}) {
    step.tokens = is_long ? kLong : kShort;
    const auto launches = [&] {
      probe::launch(timer.stream(), kernel, ctas, kThreads, std::max(shared, kAlone), false, 1, step);
    };
    probe::check(cudaMemset(step.output, 0xff, q.size() * sizeof(float)), "memset");  // NaN
    us[is_long] = timer.median_us(launches);
    for (const int32_t cta : {0, ctas - 1}) {
      const double error = error_of(step, pool, q, cta);
      probe::require(error < 1e-3, "lone_wide_tile, " + name + ": error " + std::to_string(error));
    }
  }
  const double tile_us = (us[1] - us[0]) * kKeys / (kLong - kShort);
  const double tflops = 4e-6 * kRows * kKeys * kHeadDim * ctas / tile_us;
  report.add(name, {{"us_of_64_keys", tile_us}, {"tflops", tflops}});
}

}  // namespace

int main(int count, char** arguments) {
  probe::Report report("lone_wide_tile");
  const probe::Pool pool(16384);
  probe::ColdTimer timer;
  static_assert(kShared<5> <= 113 * 1024, "two CTAs of this size on an SM");
  measure(report, timer, pool, "half an SM, 4 stages", on_half_sm<4>, kShared<4>);
  measure(report, timer, pool, "half an SM, 5 stages", on_half_sm<5>, kShared<5>);
  measure(report, timer, pool, "half the registers, 8 stages", on_half_sm<8>, kShared<8>);
  measure(report, timer, pool, "whole SM, 8 stages", on_whole_sm<8>, kShared<8>);
  if (count > 1) report.write(arguments[1]);
  return 0;
}
