// R3: few requests. KV splits of a head as a cluster that combines through distributed shared memory, against today's
// way: partials in global memory, a semaphore, and the last CTA to arrive combines.
//
// Four query heads for each of eight KV heads. Each warp of a CTA reads its share of the split's keys; what it reads
// is summed, and rows of that sum stand for its accumulators, so both ways combine the same numbers. Stop: less than
// 2 us gained for one request of 2,048 tokens, where today's way may choose its best number of splits.
#include "probe.cuh"

using namespace prefixpack;

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kRows = 4;
constexpr int kStageKeys = 16, kStageBytes = kStageKeys * probe::kRowBytes, kStages = 3;
constexpr int kRowFloats = probe::kHeadDim + 4;  // accumulators, maximum and sum; padded
constexpr int kPartialFloats = kRows * kRowFloats;
constexpr int kRingBytes = kWarps * kStages * kStageBytes, kShared = kRingBytes + kPartialFloats * 4;

struct Step {
  const char *k, *v;
  const int32_t* slots;  // [requests, tokens]
  int32_t tokens, splits;
  float* partials;      // [requests, heads, splits, kPartialFloats]
  int32_t* semaphores;  // [requests, heads]
  float* output;        // [requests, heads, kRows, kHeadDim]
};

// Leaves the sums of this CTA's split in `mine`: row r has (r + 1) times the sum of each dimension's words.
__device__ __forceinline__ void read_split(const Step& step, int32_t request, int32_t head, int32_t split, char* shared,
                                           float* mine) {
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t keys = step.tokens / step.splits / kWarps;
  const int32_t* const slots = step.slots + request * step.tokens + (split * kWarps + warp) * keys;
  char* const ring_bytes = shared + warp * kStages * kStageBytes;
  const ptx::SharedAddress ring = ptx::shared_address(ring_bytes);
  const int32_t stages = (keys + kStageKeys - 1) / kStageKeys * 2;
  int32_t now = lane < keys ? slots[lane] : 0, next = lane + 32 < keys ? slots[lane + 32] : 0;
  const auto load = [&](int32_t stage) {
    if (stage > 0 && stage % 4 == 0) {
      now = next;
      const int32_t key = (stage / 4 + 1) * 32 + lane;
      next = key < keys ? slots[key] : 0;
    }
    if (stage < stages) {
      const char* const from = (stage % 2 == 0 ? step.k : step.v) + head * probe::kRowBytes + lane % 16 * 16;
      for (int32_t row = lane / 16; row < kStageKeys; row += 2) {
        const int32_t slot = __shfl_sync(0xffffffffu, now, stage / 2 % 2 * kStageKeys + row);
        const bool valid = stage / 2 * kStageKeys + row < keys;
        ptx::cp_async(ring + stage % kStages * kStageBytes + row * probe::kRowBytes + lane % 16 * 16,
                      from + int64_t{slot} * probe::kTokenBytes, valid);
      }
    }
    ptx::cp_async_commit();
  };
  float sums[8] = {};
  for (int32_t stage = 0; stage < kStages - 1; ++stage) load(stage);
  for (int32_t stage = 0; stage < stages; ++stage) {
    load(stage + kStages - 1);
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
    for (int32_t row = lane / 16; row < kStageKeys; row += 2) {
      const auto* const words = reinterpret_cast<const __nv_bfloat162*>(ring_bytes + stage % kStages * kStageBytes +
                                                                        row * probe::kRowBytes + lane % 16 * 16);
      for (int32_t i = 0; i < 4; ++i) {
        const float2 pair = __bfloat1622float2(words[i]);
        sums[2 * i] += pair.x;
        sums[2 * i + 1] += pair.y;
      }
    }
    __syncwarp();
  }
  ptx::cp_async_wait<0>();
  for (float& sum : sums) sum += __shfl_xor_sync(0xffffffffu, sum, 16);
  // Warps of a CTA are reduced through shared memory, over the rings, as key warps are in the epilogue.
  __syncthreads();
  auto* const of_warps = reinterpret_cast<float*>(shared);
  if (lane < 16) {
    for (int32_t row = 0; row < kRows; ++row) {
      for (int32_t i = 0; i < 8; ++i) {
        of_warps[warp * kPartialFloats + row * kRowFloats + lane * 8 + i] = (row + 1) * sums[i];
      }
    }
  }
  __syncthreads();
  for (int32_t i = threadIdx.x; i < kPartialFloats; i += kThreads) {
    float sum = 0;
    if (i % kRowFloats < probe::kHeadDim) {
      for (int32_t other = 0; other < kWarps; ++other) sum += of_warps[other * kPartialFloats + i];
    }
    mine[i] = sum;
  }
}

__global__ void __launch_bounds__(kThreads, 2) by_semaphore(Step step) {
  extern __shared__ __align__(128) char shared[];
  __shared__ int32_t arrived;
  const int32_t split = blockIdx.x % step.splits, group = blockIdx.x / step.splits;
  const int32_t request = group / probe::kHeads, head = group % probe::kHeads;
  auto* const mine = reinterpret_cast<float*>(shared + kRingBytes);
  read_split(step, request, head, split, shared, mine);
  __syncthreads();
  float* const partials = step.partials + size_t(group) * step.splits * kPartialFloats;
  if (step.splits > 1) {
    for (int32_t i = threadIdx.x; i < kPartialFloats / 4; i += kThreads) {
      reinterpret_cast<float4*>(partials + split * kPartialFloats)[i] = reinterpret_cast<const float4*>(mine)[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) arrived = ptx::atomic_add_release(step.semaphores + group, 1);
    __syncthreads();
    if (arrived != step.splits - 1) return;
    if (threadIdx.x == 0) step.semaphores[group] = 0;
  }
  for (int32_t i = threadIdx.x; i < kRows * probe::kHeadDim / 4; i += kThreads) {
    const int32_t at = i * 4 / probe::kHeadDim * kRowFloats + i * 4 % probe::kHeadDim;
    float total[4] = {};
    if (step.splits == 1) {
      ptx::load_quad(mine + at, total);
    } else {
#pragma unroll 8
      for (int32_t other = 0; other < step.splits; ++other) {
        float part[4];
        ptx::load_relaxed(partials + other * kPartialFloats + at, part);
        for (int32_t j = 0; j < 4; ++j) total[j] += part[j];
      }
    }
    ptx::store_quad(step.output + size_t(group) * kRows * probe::kHeadDim + i * 4, total);
  }
}

__device__ __forceinline__ void cluster_sync() {
  __syncwarp();  // .aligned: all lanes of a warp together
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void load_from_cta(ptx::SharedAddress address, int32_t cta, float (&out)[4]) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(cta));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
               : "r"(there)
               : "memory");
}

__global__ void __launch_bounds__(kThreads, 2) by_cluster(Step step) {
  extern __shared__ __align__(128) char shared[];
  const int32_t split = blockIdx.x % step.splits, group = blockIdx.x / step.splits;
  const int32_t request = group / probe::kHeads, head = group % probe::kHeads;
  auto* const mine = reinterpret_cast<float*>(shared + kRingBytes);
  read_split(step, request, head, split, shared, mine);
  cluster_sync();
  // Each CTA of the cluster has a part of the rows.
  constexpr int32_t kQuads = kRows * probe::kHeadDim / 4;
  const int32_t share = (kQuads + step.splits - 1) / step.splits, i = split * share + threadIdx.x;
  if (threadIdx.x < share && i < kQuads) {
    const int32_t at = i * 4 / probe::kHeadDim * kRowFloats + i * 4 % probe::kHeadDim;
    float total[4] = {};
#pragma unroll 8
    for (int32_t other = 0; other < step.splits; ++other) {
      float part[4];
      load_from_cta(ptx::shared_address(mine + at), other, part);
      for (int32_t j = 0; j < 4; ++j) total[j] += part[j];
    }
    ptx::store_quad(step.output + size_t(group) * kRows * probe::kHeadDim + i * 4, total);
  }
  cluster_sync();  // nobody ends while its shared memory is read
}

// What any split has to compute, one thread for each dimension of a row.
__global__ void plainly(Step step, float* output) {
  const int32_t row = blockIdx.x % kRows, head = blockIdx.x / kRows % probe::kHeads;
  const int32_t request = blockIdx.x / kRows / probe::kHeads;
  float sum = 0;
  for (int32_t key = 0; key < step.tokens; ++key) {
    const int64_t at = int64_t{step.slots[request * step.tokens + key]} * probe::kTokenBytes + head * probe::kRowBytes;
    for (const char* half : {step.k, step.v}) {
      sum += __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(half + at)[threadIdx.x]);
    }
  }
  output[size_t(blockIdx.x) * probe::kHeadDim + threadIdx.x] = (row + 1) * sum;
}

// Whether the GPU can hold a cluster of so many CTAs; more than eight are not portable.
bool holds_cluster(int32_t ctas) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = ctas;
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = ctas, config.blockDim = kThreads, config.dynamicSmemBytes = kShared;
  config.attrs = &attribute, config.numAttrs = 1;
  int clusters = 0;
  const cudaError_t error = cudaOccupancyMaxActiveClusters(&clusters, by_cluster, &config);
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  return error == cudaSuccess && clusters > 0;
}

}  // namespace

int main(int count, char** arguments) {
  probe::Report report("cluster_splits");
  constexpr int32_t kMostTokens = 32768, kMostSplits = 32;
  const probe::Pool pool(kMostTokens * 2);
  probe::ColdTimer timer;
  report.add("empty graph", {{"us", timer.empty_us()}});
  probe::check(cudaFuncSetAttribute(by_cluster, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "clusters of 16");
  probe::check(cudaFuncSetAttribute(by_cluster, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared), "clusters");
  Step step{pool.k, pool.v, pool.slots};
  for (const int32_t requests : {1, 2, 4, 8}) {
    const int32_t groups = requests * probe::kHeads, floats = groups * kRows * probe::kHeadDim;
    step.partials = probe::on_device<float>(size_t(groups) * kMostSplits * kPartialFloats);
    step.semaphores = probe::on_device<int32_t>(groups);
    step.output = probe::on_device<float>(floats);
    for (const int32_t tokens : {512, 2048, 8192}) {
      step.tokens = tokens;
      plainly<<<groups * kRows, probe::kHeadDim>>>(step, step.output);
      const std::vector<float> reference = probe::on_host(step.output, floats);
      double best[2] = {1e9, 1e9};
      for (const bool cluster : {false, true}) {
        for (step.splits = cluster ? 2 : 1; step.splits <= (cluster ? 16 : kMostSplits); step.splits *= 2) {
          if (tokens / step.splits < 16 * kWarps) break;
          if (cluster && !holds_cluster(step.splits)) break;
          probe::check(cudaMemset(step.output, 0xff, floats * sizeof(float)), "memset");  // NaN
          const auto launches = [&] {
            probe::launch(timer.stream(), cluster ? by_cluster : by_semaphore, groups * step.splits, kThreads, kShared,
                          false, cluster ? step.splits : 1, step);
          };
          const double us = timer.median_us(launches);
          best[cluster] = std::min(best[cluster], us);
          const std::string name = std::to_string(requests) + " x " + std::to_string(tokens) + " tokens, " +
                                   std::to_string(step.splits) + (cluster ? " splits, cluster" : " splits, semaphore");
          report.add(name, {{"us", us}});
          const std::vector<float> found = probe::on_host(step.output, floats);
          for (int32_t i = 0; i < floats; ++i) {  // another order of summation
            probe::require(std::abs(found[i] - reference[i]) <= 1e-3f * (1 + std::abs(reference[i])),
                           name + ": wrong output");
          }
        }
      }
      report.add(std::to_string(requests) + " x " + std::to_string(tokens) + " tokens, best of each",
                 {{"semaphore_us", best[0]}, {"cluster_us", best[1]}, {"gained_us", best[0] - best[1]}});
    }
  }
  if (count > 1) report.write(arguments[1]);
  return 0;
}
