// R2, the cheap part: do private tails arrive sooner if the CTA phase prefetches their first tokens into the L2?
//
// Two launches as in a layer. CTAs of wide tiles hold both halves of each SM and compute: here they copy a shared range
// and wait for as long as products would take. Warps stream the tails; they start where CTAs have ended. With a
// prefetch, each thread asks for some of the tails' first tokens while its first tile arrives (one bulk prefetch a
// token for K, one for V, all heads): of all tails, or all tokens of those that are read first. Long tails are split,
// so that all warps have work. Stop: less than 3 us gained behind CTA phases of 20 us and more.
#include "probe.cuh"

using namespace prefixpack;

namespace {

constexpr int kCtaShared = 112 * 1024, kThreads = 256, kWarps = kThreads / 32;
constexpr int kTileKeys = 64, kTileBytes = kTileKeys * probe::kRowBytes;  // K or V of a wide tile
constexpr int kBlockKeys = 32;                                            // whose slots a warp loads at once
constexpr int kStageKeys = 16, kStageBytes = kStageKeys * probe::kRowBytes, kStages = 3, kWarpBytes = 14 * 1024;

struct Batch {
  const char *k, *v;
  const int32_t* slots;   // shared range first, then tail after tail
  int32_t shared_tokens;  // read by every CTA
  int32_t tails, tail_tokens;
  int32_t prefetched_tails, prefetched;  // the first tails, and the first tokens of each
  int64_t tile_cycles;                   // of a wide tile
  uint32_t* sum;  // null: not wanted, as in timed launches, whose last atomics would be waited for
};

__device__ __forceinline__ void prefetch_l2(const char* address, int32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_rows(ptx::SharedAddress to, const char* from, const int32_t* slots, int32_t keys,
                                          int32_t head, int32_t thread, int32_t threads) {
  const int32_t chunk = thread % 16;
  for (int32_t row = thread / 16; row < keys; row += threads / 16) {
    ptx::cp_async(to + row * probe::kRowBytes + chunk * 16,
                  from + int64_t{slots[row]} * probe::kTokenBytes + head * probe::kRowBytes + chunk * 16);
  }
}

__global__ void __launch_bounds__(kThreads, 2) wide_tiles(Batch batch) {
  extern __shared__ __align__(1024) char shared[];
  const int32_t thread = threadIdx.x, head = blockIdx.x % probe::kHeads;
  ptx::pdl_launch_dependents();
  const ptx::SharedAddress ring = ptx::shared_address(shared);
  uint32_t sum = 0;
  const int32_t tiles = batch.shared_tokens / kTileKeys;
  const auto load = [&](int32_t tile) {
    if (tile < tiles) {
      const int32_t* const slots = batch.slots + tile * kTileKeys;
      const ptx::SharedAddress to = ring + tile % 2 * 2 * kTileBytes;
      copy_rows(to, batch.k, slots, kTileKeys, head, thread, kThreads);
      copy_rows(to + kTileBytes, batch.v, slots, kTileKeys, head, thread, kThreads);
    }
    ptx::cp_async_commit();
  };
  load(0);
  // The lanes of a warp issue bulk prefetches one after the other, so neighbouring tokens go to different warps.
  const int32_t warps = gridDim.x * kWarps, warp = blockIdx.x * kWarps + thread / 32;
  for (int32_t i = thread % 32 * warps + warp; i < batch.prefetched_tails * batch.prefetched; i += 32 * warps) {
    const int32_t token = i / batch.prefetched * batch.tail_tokens + i % batch.prefetched;
    const int64_t at = int64_t{batch.slots[batch.shared_tokens + token]} * probe::kTokenBytes;
    prefetch_l2(batch.k + at, probe::kTokenBytes);
    prefetch_l2(batch.v + at, probe::kTokenBytes);
  }
  for (int32_t tile = 0; tile < tiles; ++tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    const int64_t begin = clock64();
    load(tile + 1);
    for (int32_t at = thread * 16; at < 2 * kTileBytes; at += kThreads * 16) {
      sum += probe::sum_of(shared + tile % 2 * 2 * kTileBytes + at);
    }
    while (clock64() - begin < batch.tile_cycles) {
    }
  }
  if (batch.sum != nullptr) atomicAdd(batch.sum, sum);
}

// Each warp has one stream of stages over all its tails, so that loads run ahead into the next tail.
__global__ void __launch_bounds__(kThreads, 2) tails(Batch batch) {
  extern __shared__ __align__(1024) char shared[];
  const int32_t lane = threadIdx.x % 32, warp = blockIdx.x * kWarps + threadIdx.x / 32, warps = gridDim.x * kWarps;
  char* const mine = shared + threadIdx.x / 32 * kWarpBytes;
  const ptx::SharedAddress ring = ptx::shared_address(mine);
  const int32_t blocks = batch.tail_tokens / kBlockKeys, tiles = batch.tails * probe::kHeads;
  const int32_t all_blocks = warp < tiles ? ((tiles - 1 - warp) / warps + 1) * blocks : 0;
  const auto tile_of = [&](int32_t block) { return warp + block / blocks * warps; };
  const auto slot_of = [&](int32_t block) {
    if (block >= all_blocks) return 0;
    const int32_t first = tile_of(block) / probe::kHeads * batch.tail_tokens + block % blocks * kBlockKeys;
    return batch.slots[batch.shared_tokens + first + lane];
  };
  int32_t slots = slot_of(0), next_slots = slot_of(1);
  uint32_t sum = 0;
  const auto load = [&](int32_t stage) {
    const int32_t block = stage / 4;
    if (stage > 0 && stage % 4 == 0) slots = next_slots, next_slots = slot_of(block + 1);
    if (block < all_blocks) {
      const char* const from = (stage % 2 == 0 ? batch.k : batch.v) + tile_of(block) % probe::kHeads * probe::kRowBytes;
      for (int32_t row = lane / 16; row < kStageKeys; row += 2) {
        const int32_t slot = __shfl_sync(0xffffffffu, slots, stage / 2 % 2 * kStageKeys + row);
        ptx::cp_async(ring + stage % kStages * kStageBytes + row * probe::kRowBytes + lane % 16 * 16,
                      from + int64_t{slot} * probe::kTokenBytes + lane % 16 * 16);
      }
    }
    ptx::cp_async_commit();
  };
  for (int32_t stage = 0; stage < kStages - 1; ++stage) load(stage);
  for (int32_t stage = 0; stage < all_blocks * 4; ++stage) {
    load(stage + kStages - 1);
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
    for (int32_t at = lane * 16; at < kStageBytes; at += 512) {
      sum += probe::sum_of(mine + stage % kStages * kStageBytes + at);
    }
    __syncwarp();
  }
  ptx::cp_async_wait<0>();
  if (batch.sum != nullptr) atomicAdd(batch.sum, sum);
  if (blockIdx.x == 0) ptx::pdl_wait();
}

}  // namespace

int main(int count, char** arguments) {
  probe::Report report("tail_prefetch");
  constexpr int32_t kShared = 1024, kTailBytes = 300 << 20;
  const probe::Pool pool(kShared + kTailBytes / (2 * probe::kTokenBytes) + 4096);
  probe::ColdTimer timer;
  int clock_khz = 0;
  probe::check(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0), "clock");
  const int ctas = 2 * report.sms();
  probe::require(ctas % probe::kHeads == 0, "tail_prefetch: CTAs for all heads alike");
  Batch batch{pool.k, pool.v, pool.slots, kShared};
  uint32_t* const sum = probe::on_device<uint32_t>(1);
  const auto launches = [&] {
    probe::launch(timer.stream(), wide_tiles, ctas, kThreads, kCtaShared, false, 1, batch);
    probe::launch(timer.stream(), tails, ctas, kThreads, kWarps * kWarpBytes, true, 1, batch);
  };
  for (const auto& [number, tokens] : {std::pair{1024, 32}, {512, 128}, {256, 256}}) {
    batch.tails = number, batch.tail_tokens = tokens;
    std::vector<int32_t> times(kShared + number * tokens, 1);
    std::fill_n(times.begin(), kShared, ctas / probe::kHeads);
    const uint32_t expected = probe::expected(pool, times);
    for (const double phase_us : {10.0, 20.0, 40.0, 80.0}) {
      batch.tile_cycles = static_cast<int64_t>(phase_us * 1e-3 * clock_khz / (kShared / kTileKeys));
      const std::string name = std::to_string(number) + " tails of " + std::to_string(tokens) + ", CTAs " +
                               std::to_string(static_cast<int>(phase_us)) + " us, ";
      batch.prefetched_tails = batch.prefetched = 0;
      const double without = timer.median_us(launches);
      report.add(name + "no prefetch", {{"us", without}, {"gained_us", 0.0}});
      for (const bool of_all : {true, false}) {
        for (const int32_t megabytes : {8, 16, 32, 40}) {
          const int32_t most = (megabytes << 20) / (2 * probe::kTokenBytes);
          batch.prefetched_tails = of_all ? number : most / tokens;
          batch.prefetched = of_all ? most / number : tokens;
          const double us = timer.median_us(launches);
          report.add(name + std::to_string(megabytes) + (of_all ? " MB of all" : " MB of the first"),
                     {{"us", us}, {"gained_us", without - us}});
        }
      }
      batch.sum = sum;
      probe::check(cudaMemset(sum, 0, 4), "memset");
      launches();
      probe::check(cudaStreamSynchronize(timer.stream()), "tails");
      probe::require(probe::on_host(sum, 1)[0] == expected, "tail_prefetch: other words were read");
      batch.sum = nullptr;
    }
  }
  if (count > 1) report.write(arguments[1]);
  return 0;
}
