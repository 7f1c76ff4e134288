// R1: query-stationary chains, copies and barriers only. A CTA owns the rows of some neighbouring requests and one KV
// head. It reads their whole path as KV tiles of 64 keys, leaves sums in shared memory, and its warps then read the
// tails of its own requests, add them to these sums and write the output. No partials, no semaphores, no second launch.
//
// Trees 2, 12 and 14 of PAT's Figure 9 with 32/8 heads; CTAs of 8, 16 or 32 requests; with and without a prefetch of
// the tails into the L2 at the begin. Stop: tree 12 above 62 us, or tree 2 above 21 us.
#include "probe.cuh"

using namespace prefixpack;

namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kGroup = 4, kSharedBytes = 112 * 1024;
constexpr int kTileKeys = 64, kTileBytes = kTileKeys * probe::kRowBytes;
constexpr int kStageKeys = 8, kStageBytes = kStageKeys * probe::kRowBytes;
constexpr int kRowFloats = probe::kHeadDim + 4;

struct Step {
  const char *k, *v;
  const uint16_t* q;           // [requests, 32 heads, kHeadDim]
  const int32_t* chain_slots;  // [groups, chain_tokens]
  const int32_t* tail_slots;   // [requests, tail_tokens]
  int32_t chain_tokens, tail_tokens;
  uint16_t* output;  // as q
  uint32_t* sum;     // null: not wanted, as in timed launches, whose last atomics would be waited for
};

__device__ __forceinline__ void prefetch_l2(const char* address) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(probe::kRowBytes) : "memory");
}

// The path of the CTA's requests, as the wide tile's mainloop copies it. meanwhile(): called while its begin arrives.
template <int Requests, class Meanwhile>
__device__ __forceinline__ uint32_t read_chain(const Step& step, int32_t group, int32_t head, char* shared,
                                               const Meanwhile& meanwhile) {
  constexpr int32_t kQueryBytes = Requests * kGroup * probe::kRowBytes;
  const int32_t thread = threadIdx.x, chunk = thread % 16, lane = thread % 32;
  const int32_t tiles = (step.chain_tokens + kTileKeys - 1) / kTileKeys;
  const ptx::SharedAddress base = ptx::shared_address(shared), ring = base + kQueryBytes;
  for (int32_t i = thread; i < kQueryBytes / 16; i += kThreads) {
    const int32_t row = i / 16, request = group * Requests + row / kGroup;
    ptx::cp_async(
        base + i * 16,
        step.q + ((int64_t{request} * probe::kHeads + head) * kGroup + row % kGroup) * probe::kHeadDim + chunk * 8);
  }
  // Lane i of a warp has the slot of the row that its half i / 16 copies in pass i % 4.
  const int32_t* const slots_of_group = step.chain_slots + int64_t{group} * step.chain_tokens;
  const auto slot_of = [&](int32_t tile) {
    const int32_t key = tile * kTileKeys + lane % 4 * 16 + thread / 32 * 2 + lane / 16;
    return key < step.chain_tokens ? slots_of_group[key] : -1;
  };
  int32_t slots = slot_of(0);
  const auto load = [&](int32_t tile) {
    if (tile < tiles) {
#pragma unroll
      for (int32_t pass = 0; pass < 4; ++pass) {
        const int32_t slot = __shfl_sync(0xffffffffu, slots, lane / 16 * 16 + pass);
        const int64_t at = int64_t{slot < 0 ? 0 : slot} * probe::kTokenBytes + head * probe::kRowBytes + chunk * 16;
        const ptx::SharedAddress to =
            ring + tile % 2 * 2 * kTileBytes + (pass * 16 + thread / 16) * probe::kRowBytes + chunk * 16;
        ptx::cp_async(to, step.k + at, slot >= 0);
        ptx::cp_async(to + kTileBytes, step.v + at, slot >= 0);
      }
    }
    ptx::cp_async_commit();
    slots = slot_of(tile + 1);
  };
  load(0);
  meanwhile();
  uint32_t sum = 0;
  for (int32_t tile = 0; tile < tiles; ++tile) {
    ptx::cp_async_wait<0>();
    __syncthreads();
    load(tile + 1);
    const char* const arrived = shared + kQueryBytes + tile % 2 * 2 * kTileBytes;
    for (int32_t at = thread * 16; at < 2 * kTileBytes; at += kThreads * 16) sum += probe::sum_of(arrived + at);
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
  return sum;
}

// Slot of this lane in a block of 32 tokens; blocks count through the tails of this warp.
template <int Requests>
__device__ __forceinline__ int32_t tail_slot(const Step& step, int32_t group, int32_t block) {
  const int32_t warp = threadIdx.x / 32, blocks = step.tail_tokens / 32, place = warp + block / blocks * kWarps;
  if (place >= Requests) return 0;
  return step.tail_slots[(group * Requests + place) * step.tail_tokens + block % blocks * 32 + threadIdx.x % 32];
}

// The tails of the CTA's requests: each warp has one stream of stages over its own, K and V in turn. slots, next: of
// the warp's first two blocks, loaded before the path was read.
template <int Requests>
__device__ __forceinline__ uint32_t read_tails(const Step& step, int32_t group, int32_t head, char* shared,
                                               int32_t slots, int32_t next) {
  constexpr int32_t kSumBytes = Requests * kGroup * kRowFloats * 4;
  constexpr int32_t kFit = (kSharedBytes - kSumBytes) / kWarps / kStageBytes, kStages = kFit < 6 ? kFit : 6;
  static_assert(kStages >= 2);
  const int32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int32_t mine = (Requests - warp + kWarps - 1) / kWarps, blocks = step.tail_tokens / 32, all = mine * blocks;
  char* const ring_bytes = shared + kSumBytes + warp * kStages * kStageBytes;
  const ptx::SharedAddress ring = ptx::shared_address(ring_bytes);
  const auto load = [&](int32_t stage) {
    if (stage > 0 && stage % 8 == 0) slots = next, next = tail_slot<Requests>(step, group, stage / 8 + 1);
    if (stage / 8 < all) {
      const char* const from = (stage % 2 == 0 ? step.k : step.v) + head * probe::kRowBytes + lane % 16 * 16;
#pragma unroll
      for (int32_t row = 0; row < kStageKeys; row += 2) {
        const int32_t slot = __shfl_sync(0xffffffffu, slots, stage / 2 % 4 * kStageKeys + row + lane / 16);
        ptx::cp_async(ring + stage % kStages * kStageBytes + (row + lane / 16) * probe::kRowBytes + lane % 16 * 16,
                      from + int64_t{slot} * probe::kTokenBytes);
      }
    }
    ptx::cp_async_commit();
  };
  uint32_t sum = 0;
  for (int32_t stage = 0; stage < kStages - 1; ++stage) load(stage);
  for (int32_t stage = 0; stage < all * 8; ++stage) {
    load(stage + kStages - 1);
    ptx::cp_async_wait<kStages - 1>();
    __syncwarp();
    for (int32_t at = lane * 16; at < kStageBytes; at += 512) {
      sum += probe::sum_of(ring_bytes + stage % kStages * kStageBytes + at);
    }
    __syncwarp();
    if ((stage + 1) % (blocks * 8) != 0) continue;
    // The end of a tail: combined with the sums of its path, and written.
    const int32_t place = warp + stage / (blocks * 8) * kWarps, request = group * Requests + place;
    for (int32_t row = 0; row < kGroup; ++row) {
      float of_path[4];
      ptx::load_quad(reinterpret_cast<const float*>(shared) + (place * kGroup + row) * kRowFloats + lane * 4, of_path);
      ptx::store_words(
          step.output + ((int64_t{request} * probe::kHeads + head) * kGroup + row) * probe::kHeadDim + lane * 4,
          ptx::BFloat16::pack(of_path[0], of_path[1]), ptx::BFloat16::pack(of_path[2], of_path[3]));
    }
  }
  ptx::cp_async_wait<0>();
  return sum;
}

template <int Requests, bool Prefetches>
__global__ void __launch_bounds__(kThreads, 2) chains(Step step) {
  extern __shared__ __align__(1024) char shared[];
  const int32_t group = blockIdx.x / probe::kHeads, head = blockIdx.x % probe::kHeads;
  const int32_t slots = tail_slot<Requests>(step, group, 0), next = tail_slot<Requests>(step, group, 1);
  uint32_t sum = read_chain<Requests>(step, group, head, shared, [&] {
    if constexpr (Prefetches) {
      for (int32_t i = threadIdx.x; i < Requests * step.tail_tokens; i += kThreads) {
        const int32_t slot = step.tail_slots[group * Requests * step.tail_tokens + i];
        const int64_t at = int64_t{slot} * probe::kTokenBytes + head * probe::kRowBytes;
        prefetch_l2(step.k + at);
        prefetch_l2(step.v + at);
      }
    }
  });
  auto* const sums = reinterpret_cast<float*>(shared);
  for (int32_t i = threadIdx.x; i < Requests * kGroup * probe::kHeadDim / 4; i += kThreads) {
    const auto value = static_cast<float>(sum % 1024);
    ptx::store_quad(sums + i / 32 * kRowFloats + i % 32 * 4, {value, value, value, value});
  }
  __syncthreads();
  sum += read_tails<Requests>(step, group, head, shared, slots, next);
  if (step.sum != nullptr) atomicAdd(step.sum, sum);
}

struct Tree {
  const char* name;
  std::vector<int32_t> nodes, tokens;  // by level; the last one is the tails'
};

template <int Requests>
void measure(const Tree& tree, probe::Report& report, probe::ColdTimer& timer) {
  const int32_t requests = tree.nodes.back(), levels = static_cast<int32_t>(tree.nodes.size()) - 1;
  const int32_t groups = requests / Requests, tail_tokens = tree.tokens.back();
  int32_t total = requests * tail_tokens;
  for (int32_t level = 0; level < levels; ++level) total += tree.nodes[level] * tree.tokens[level];
  const probe::Pool pool(total);
  std::vector<int32_t> chain_slots, times(total, 0);
  for (int32_t group = 0; group < groups; ++group) {
    int32_t level_begin = 0;
    for (int32_t level = 0; level < levels; ++level) {
      const int32_t share = requests / tree.nodes[level];
      const int32_t first = group * Requests / share, last = (group * Requests + Requests - 1) / share;
      for (int32_t at = first * tree.tokens[level]; at < (last + 1) * tree.tokens[level]; ++at) {
        chain_slots.push_back(pool.slots_on_host[level_begin + at]);
        ++times[level_begin + at];
      }
      level_begin += tree.nodes[level] * tree.tokens[level];
    }
  }
  std::fill(times.end() - requests * tail_tokens, times.end(), 1);
  const size_t elements = size_t(requests) * probe::kHeads * kGroup * probe::kHeadDim;
  Step step{pool.k,
            pool.v,
            probe::on_device<uint16_t>(elements),
            probe::on_device(chain_slots),
            pool.slots + (total - requests * tail_tokens),
            static_cast<int32_t>(chain_slots.size()) / groups,
            tail_tokens,
            probe::on_device<uint16_t>(elements),
            nullptr};
  uint32_t* const sum = probe::on_device<uint32_t>(1);
  double us[2];
  for (const bool prefetches : {false, true}) {
    const auto kernel = prefetches ? chains<Requests, true> : chains<Requests, false>;
    const auto launches = [&] {
      probe::launch(timer.stream(), kernel, groups * probe::kHeads, kThreads, kSharedBytes, false, 1, step);
    };
    us[prefetches] = timer.median_us(launches);
    step.sum = sum;
    probe::check(cudaMemset(sum, 0, 4), "memset");
    launches();
    probe::check(cudaStreamSynchronize(timer.stream()), "chains");
    step.sum = nullptr;
    probe::require(probe::on_host(sum, 1)[0] == probe::expected(pool, times), "query_chains: other words were read");
  }
  report.add(std::string(tree.name) + ", CTAs of " + std::to_string(Requests) + " requests",
             {{"us", us[0]}, {"prefetched_us", us[1]}});
}

}  // namespace

int main(int count, char** arguments) {
  probe::Report report("query_chains");
  probe::ColdTimer timer;
  report.add("empty graph", {{"us", timer.empty_us()}});
  const Tree trees[] = {{"tree 2", {1, 256}, {256, 32}},
                        {"tree 12", {1, 16, 32, 64, 128, 1024}, {256, 128, 64, 32, 32, 32}},
                        {"tree 14", {1, 8, 16, 32, 64, 128, 1024}, {256, 128, 64, 32, 32, 32, 32}}};
  for (const Tree& tree : trees) {
    measure<8>(tree, report, timer);
    measure<16>(tree, report, timer);
    measure<32>(tree, report, timer);
  }
  if (count > 1) report.write(arguments[1]);
  return 0;
}
