// R2: how fast is a wide tile whose CTA has an SM to itself, with the copies in warps of their own?
//
// 128 rows of one KV head against a shared range with page size 1. One warpgroup gathers K and V of 64 keys with
// cp.async into a ring of stages; two warpgroups of 64 rows compute. Each issues the scores of the next keys together
// with the values of these, and computes the next softmax while the values are multiplied. Today two CTAs on an SM
// need 2.1 us for 64 keys of each, so 1.05 us is the same rate with half of the registers. Stop: more than 1.25 us.
// The output of one row block is checked against fp32 on the host.
#include <cmath>
#include <cstring>

#include "cuda/common/index_math.h"
#include "cuda/common/wgmma.cuh"
#include "probe.cuh"

using namespace prefixpack;

namespace {

constexpr int kKeys = 64, kRows = 128, kHeadDim = probe::kHeadDim;
constexpr int kProducers = 128, kThreads = kProducers + 2 * kRows;
constexpr int kSlabBytes = kKeys * 128, kTileBytes = 2 * kSlabBytes;  // K or V: two slabs of 64 columns
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

template <int Stages>
struct Ring {
  ptx::SharedAddress tiles, full, empty;
  __device__ __forceinline__ ptx::SharedAddress keys(int32_t tile) const {
    return tiles + tile % Stages * 2 * kTileBytes;
  }
  __device__ __forceinline__ ptx::SharedAddress values(int32_t tile) const { return keys(tile) + kTileBytes; }
  __device__ __forceinline__ ptx::SharedAddress full_at(int32_t tile) const { return full + tile % Stages * 8; }
  __device__ __forceinline__ ptx::SharedAddress empty_at(int32_t tile) const { return empty + tile % Stages * 8; }
};

template <int Stages>
constexpr int kShared = kQueryBytes + Stages * 2 * kTileBytes + 2 * Stages * 8;

// Gathers tiles. A stage is full when its copies have arrived, which is known a stage later.
template <int Stages>
__device__ __forceinline__ void produce(const Step& step, const Ring<Stages>& ring, int32_t head) {
  const int32_t thread = threadIdx.x, chunk = thread % 16, first = thread / 16, lane = thread % 32;
  const int32_t tiles = step.tokens / kKeys;
  const char* const k = step.k + head * probe::kRowBytes + chunk * 16;
  const char* const v = step.v + head * probe::kRowBytes + chunk * 16;
  // Lane i of a warp has the slot of the row that the warp's half i / 16 copies in pass i % 16, of eight passes.
  const auto slot_of = [&](int32_t tile) {
    return tile < tiles ? step.slots[tile * kKeys + lane % 8 * 8 + thread / 32 * 2 + lane / 16] : 0;
  };
  int32_t slots = slot_of(0);
  for (int32_t tile = 0; tile < tiles; ++tile) {
    if (tile >= Stages) barrier_wait(ring.empty_at(tile), (tile / Stages - 1) % 2);
    const int32_t next = slot_of(tile + 1);
#pragma unroll
    for (int32_t pass = 0; pass < 8; ++pass) {
      const int32_t row = pass * 8 + first, slot = __shfl_sync(0xffffffffu, slots, lane / 16 * 16 + pass);
      const ptx::SharedAddress at = chunk / 8 * kSlabBytes + swizzled_offset(row, chunk % 8, 128);
      ptx::cp_async(ring.keys(tile) + at, k + int64_t{slot} * probe::kTokenBytes);
      ptx::cp_async(ring.values(tile) + at, v + int64_t{slot} * probe::kTokenBytes);
    }
    ptx::cp_async_commit();
    slots = next;
    if (tile == 0) continue;
    ptx::cp_async_wait<1>();
    ptx::fence_proxy_async();
    barrier_arrive(ring.full_at(tile - 1));
  }
  ptx::cp_async_wait<0>();
  ptx::fence_proxy_async();
  barrier_arrive(ring.full_at(tiles - 1));
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

template <int Stages>
__device__ __forceinline__ void consume(const Step& step, const Ring<Stages>& ring, ptx::SharedAddress shared) {
  const int32_t thread = threadIdx.x - kProducers, warpgroup = ptx::broadcast(thread / 128, 0);
  const int32_t lane = thread % 32, tiles = step.tokens / kKeys;
  const ptx::SharedAddress queries = shared + warpgroup * 64 * 128;
  float output[16][4], scores[8][4], max[2], sum[2] = {};
  uint32_t weights[4][4];
#pragma unroll
  for (int32_t i = 0; i < 64; ++i) output[i / 4][i % 4] = 0;
  barrier_wait(ring.full_at(0), 0);
  ptx::wgmma_fence();
  issue_scores(queries, ring.keys(0), scores);
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_operand(scores);
  softmax(scores, max, sum, true);
  pack(scores, weights);
  for (int32_t tile = 0; tile + 1 < tiles; ++tile) {
    barrier_wait(ring.full_at(tile + 1), (tile + 1) / Stages % 2);
    ptx::wgmma_fence_operand(weights);
    ptx::wgmma_fence_operand(output);
    ptx::wgmma_fence();
    issue_scores(queries, ring.keys(tile + 1), scores);
    issue_values(ring.values(tile), weights, output);
    ptx::wgmma_wait<1>();
    ptx::wgmma_fence_operand(scores);
    softmax(scores, max, sum, false);
    ptx::wgmma_wait<0>();
    ptx::wgmma_fence_operand(output);
    if (lane == 0) barrier_arrive(ring.empty_at(tile));
    pack(scores, weights);
  }
  ptx::wgmma_fence_operand(weights);
  ptx::wgmma_fence_operand(output);
  ptx::wgmma_fence();
  issue_values(ring.values(tiles - 1), weights, output);
  ptx::wgmma_wait<0>();
  ptx::wgmma_fence_operand(output);
#pragma unroll
  for (int32_t half = 0; half < 2; ++half) {
    float total = sum[half];
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    const int32_t row = blockIdx.x * kRows + thread / 32 * 16 + half * 8 + lane / 4;
    float* const to = step.output + int64_t{row} * kHeadDim + lane % 4 * 2;
#pragma unroll
    for (int32_t i = 0; i < 16; ++i) {
      ptx::store_pair(to + i * 8, output[i][2 * half] / total, output[i][2 * half + 1] / total);
    }
  }
}

template <int Stages>
__global__ void __launch_bounds__(kThreads, 1) wide_tile(Step step) {
  extern __shared__ __align__(1024) char shared[];
  const ptx::SharedAddress base = ptx::shared_address(shared);
  const Ring<Stages> ring{base + kQueryBytes, base + kQueryBytes + Stages * 2 * kTileBytes,
                          base + kQueryBytes + Stages * 2 * kTileBytes + Stages * 8};
  if (threadIdx.x == 0) {
    for (int32_t stage = 0; stage < Stages; ++stage) {
      barrier_init(ring.full_at(stage), kProducers);
      barrier_init(ring.empty_at(stage), kRows * 2 / 32);
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
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    produce(step, ring, blockIdx.x % probe::kHeads);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 208;");
    consume(step, ring, base);
  }
}

float of_bf16(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

// Largest error of the first CTA's first rows against the dense result in double.
double error_of(const Step& step, const probe::Pool& pool, const std::vector<uint16_t>& q, int32_t rows) {
  const size_t words = size_t(step.tokens) * probe::kHeads * kHeadDim;
  std::vector<uint16_t> k = probe::on_host(reinterpret_cast<uint16_t*>(pool.k), pool.slots_on_host.size() * 1024);
  std::vector<uint16_t> v = probe::on_host(reinterpret_cast<uint16_t*>(pool.v), pool.slots_on_host.size() * 1024);
  probe::require(k.size() >= words, "pool");
  const std::vector<float> found = probe::on_host(step.output, size_t(rows) * kHeadDim);
  double worst = 0;
  for (int32_t row = 0; row < rows; ++row) {
    std::vector<double> weights(step.tokens), sums(kHeadDim, 0.0);
    double total = 0, most = -1e30;
    for (int32_t key = 0; key < step.tokens; ++key) {
      double score = 0;
      for (int32_t d = 0; d < kHeadDim; ++d) {
        score += double(of_bf16(q[row * kHeadDim + d])) * of_bf16(k[size_t(pool.slots_on_host[key]) * 1024 + d]);
      }
      weights[key] = score * 0.08838834764;
      most = std::max(most, weights[key]);
    }
    for (double& weight : weights) total += weight = std::exp(weight - most);
    for (int32_t key = 0; key < step.tokens; ++key) {
      for (int32_t d = 0; d < kHeadDim; ++d) {
        sums[d] += weights[key] / total * of_bf16(v[size_t(pool.slots_on_host[key]) * 1024 + d]);
      }
    }
    for (int32_t d = 0; d < kHeadDim; ++d) {
      worst = std::max(worst, std::abs(sums[d] - found[row * kHeadDim + d]));
    }
  }
  return worst;
}

template <int Stages>
void measure(probe::Report& report, probe::ColdTimer& timer, const probe::Pool& pool) {
  const int ctas = report.sms();
  std::vector<uint16_t> q(size_t(ctas) * kRows * kHeadDim);
  std::mt19937 dice(2);
  for (uint16_t& word : q) word = static_cast<uint16_t>((dice() & 0x807f) | 0x3f00);
  Step step{probe::on_device(q), pool.k, pool.v, pool.slots, 0, probe::on_device<float>(q.size())};
  double short_us = 0;
  constexpr int32_t kShort = 1024, kLong = 9216;
  for (const int32_t tokens : {kShort, kLong}) {
    step.tokens = tokens;
    const auto launches = [&] {
      probe::launch(timer.stream(), wide_tile<Stages>, ctas, kThreads, kShared<Stages>, false, 1, step);
    };
    const double us = timer.median_us(launches);
    if (tokens == kShort) {
      const double error = error_of(step, pool, q, 16);
      probe::require(error < 2e-3, "lone_wide_tile: error " + std::to_string(error));
      short_us = us;
      continue;
    }
    const double tile_us = (us - short_us) * kKeys / (kLong - kShort);
    const double tflops = 4e-6 * kRows * kKeys * kHeadDim * ctas / tile_us;
    report.add(std::to_string(Stages) + " stages", {{"us_of_64_keys", tile_us}, {"tflops", tflops}});
  }
}

}  // namespace

int main(int count, char** arguments) {
  probe::Report report("lone_wide_tile");
  const probe::Pool pool(16384);
  probe::ColdTimer timer;
  measure<2>(report, timer, pool);
  measure<3>(report, timer, pool);
  measure<4>(report, timer, pool);
  if (count > 1) report.write(arguments[1]);
  return 0;
}
