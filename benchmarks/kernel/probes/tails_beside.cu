// How much of the tails' time hides behind wide tiles on half of each SM, and what does it cost these?
//
// Wide tiles: 128 rows an SM, 64 keys a step, copies in warps of their own, 39,936 registers and 97 KiB. Beside them,
// as a second launch that starts at once, eight warps an SM with 24,576 registers and 112 KiB stream private tails from
// a queue, with products. When a wide CTA has ended, eight more take its place. The sum to beat: the same wide work
// alone on whole SMs, in the fastest mainloop here, then the tails on sixteen warps an SM.
//
// hidden: the part of the shorter of both times alone that is not seen. wide_slower: a wide CTA's time beside tails,
// over its time alone. tails_begin_us: of the first wide CTA's time; near half_us the tails have not run beside it.
// Outputs of both kernels are checked. Stop: gain under 1.15 where both take about the same time.
#include "probe.cuh"
#include "tails.cuh"
#include "wide_tile.cuh"

using probe::TailStep;
using probe::WideStep;
using probe::WideTile;

namespace {

constexpr int32_t kGroup = 4, kWideTokens = 6144, kTailTokens = 65536;

using HalfSm = WideTile<2, 64, 4, 104, 24, 144, true>;
// Whole SMs, from wide_tiles.cu.
using TwoCtas = WideTile<2, 64, 4, 128, 0, 128, false, false, false, 0>;
using FourGroups = WideTile<4, 64, 10, 128, 0, 128, false, false, false, 0>;
using ThreeInTurn = WideTile<3, 64, 11, 128, 32, 160, true, true>;
using TwoWithQueries = WideTile<2, 128, 6, 168, 40, 232, true, true, true>;

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

// spans: begin and end of each CTA; may be null.
template <class T>
__global__ void __maxnreg__(T::kLaunchRegisters) wide_tiles(WideStep step, uint64_t* spans) {
  extern __shared__ __align__(1024) char shared[];
  probe::ptx::pdl_launch_dependents();
  if (spans != nullptr && threadIdx.x == 0) spans[2 * blockIdx.x] = nanoseconds();
  probe::run_wide_tile<T>(step, shared);
  if (spans == nullptr) return;
  probe::ptx::cta_sync();
  if (threadIdx.x == 0) spans[2 * blockIdx.x + 1] = nanoseconds();
}

// begin: of the first CTA.
__global__ void __maxnreg__(96) tails(TailStep step, uint64_t* begin) {
  extern __shared__ __align__(1024) char shared[];
  if (blockIdx.x == 0 && threadIdx.x == 0) *begin = nanoseconds();
  probe::run_tails(step, shared);
  if (blockIdx.x == 0) probe::ptx::pdl_wait();  // this launch ends behind the one before
}

class Wide {
 public:
  Wide(const probe::Pool& pool, int32_t sms) : sms_(sms), q_(probe::random_queries(size_t(sms) * 256, 2)) {
    step_ = {probe::on_device(q_), pool.k, pool.v, pool.slots, 0, probe::kHeads, probe::on_device<float>(q_.size())};
    spans_ = probe::on_device<uint64_t>(2 * size_t(sms) + 1);
  }
  // tokens: for 128 rows an SM; more rows have fewer, so that the products are the same.
  template <class T>
  void launch(cudaStream_t stream, int32_t tokens, int32_t ctas_per_sm, uint64_t* spans = nullptr) {
    step_.tokens = tokens * 128 / (T::kRows * ctas_per_sm);
    probe::require(step_.tokens % T::kKeys == 0, "tails_beside: whole steps");
    probe::launch(stream, wide_tiles<T>, sms_ * ctas_per_sm, T::kThreads, T::kShared, false, 1, step_, spans);
  }
  uint64_t* spans() const { return spans_; }
  uint64_t* begin_of_tails() const { return spans_ + 2 * sms_; }
  // How long after the first wide CTA the tails have begun.
  double tails_begin_us() const {
    const std::vector<uint64_t> spans = probe::on_host(spans_, 2 * size_t(sms_) + 1);
    uint64_t first = spans[0];
    for (int32_t i = 1; i < sms_; ++i) first = std::min(first, spans[2 * i]);
    return (static_cast<double>(spans.back()) - static_cast<double>(first)) * 1e-3;
  }
  double longest_us() const {
    const std::vector<uint64_t> spans = probe::on_host(spans_, 2 * size_t(sms_));
    uint64_t longest = 0;
    for (int32_t i = 0; i < sms_; ++i) longest = std::max(longest, spans[2 * i + 1] - spans[2 * i]);
    return longest * 1e-3;
  }
  void clear() { probe::check(cudaMemset(step_.output, 0xff, q_.size() * sizeof(float)), "memset"); }
  // Of the half SM's launch.
  void check(const probe::Pool& pool, const std::string& name) const {
    const std::vector<float> found = probe::on_host(step_.output, q_.size());
    for (const int32_t cta : {0, sms_ - 1}) {
      const probe::Range range(pool.slots_on_host.data(), step_.tokens, probe::kHeads, cta % probe::kHeads);
      for (int32_t row = 0; row < HalfSm::kRows; row += 15) {
        const size_t at = (size_t(cta) * HalfSm::kRows + row) * probe::kDims;
        const double error = range.error(&q_[at], &found[at]);
        probe::require(error < 1.5e-3, "tails_beside, " + name + ": error of a wide tile " + std::to_string(error));
      }
    }
  }

 private:
  const int32_t sms_;
  const std::vector<uint16_t> q_;
  WideStep step_{};
  uint64_t* spans_;
};

class Tails {
 public:
  Tails(const probe::Pool& pool, int32_t sms, int32_t number, int32_t tokens)
      : sms_(sms), q_(probe::random_queries(size_t(number) * probe::kHeads * kGroup, 3)) {
    step_.pool = {probe::on_device(q_), pool.k, pool.v, pool.slots, probe::kHeads, kGroup};
    step_.slots_at = kWideTokens, step_.tails = number, step_.tokens = tokens;
    step_.claims = probe::on_device<int32_t>(32);
    step_.output = probe::on_device<float>(q_.size());
    step_.lse = probe::on_device<float>(q_.size() / probe::kDims);
  }
  void launch(cudaStream_t stream, bool behind, uint64_t* begin) {
    probe::launch(stream, tails, 2 * sms_, probe::kTailWarps * 32, probe::kTailShared, behind, 1, step_, begin);
  }
  void clear() { probe::check(cudaMemset(step_.output, 0xff, q_.size() * sizeof(float)), "memset"); }
  void check(const probe::Pool& pool, const std::string& name) const {
    const std::vector<float> found = probe::on_host(step_.output, q_.size());
    const auto missing = std::count_if(found.begin(), found.end(), [](float value) { return value != value; });
    probe::require(missing == 0, "tails_beside, " + name + ": rows are missing");
    const int32_t rows = step_.tails * probe::kHeads * kGroup;
    for (int32_t row = 0; row < rows; row += rows / 61) {
      const int32_t tail = row / kGroup / probe::kHeads, head = row / kGroup % probe::kHeads;
      const probe::Range range(&pool.slots_on_host[step_.slots_at + tail * step_.tokens], step_.tokens, probe::kHeads,
                               head);
      const double error = range.error(&q_[size_t(row) * probe::kDims], &found[size_t(row) * probe::kDims]);
      probe::require(error < 1.5e-3, "tails_beside, " + name + ": error of a tail " + std::to_string(error));
    }
  }
  ~Tails() {
    for (const void* memory : {static_cast<const void*>(step_.pool.q), static_cast<const void*>(step_.claims),
                               static_cast<const void*>(step_.output), static_cast<const void*>(step_.lse)}) {
      probe::check(cudaFree(const_cast<void*>(memory)), "cudaFree");
    }
  }
  Tails(const Tails&) = delete;
  Tails& operator=(const Tails&) = delete;

 private:
  const int32_t sms_;
  const std::vector<uint16_t> q_;
  TailStep step_{};
};

}  // namespace

int main(int count, char** arguments) {
  probe::Report report("tails_beside");
  const probe::Pool pool(kWideTokens + kTailTokens);
  probe::ColdTimer timer;
  const double empty_us = timer.empty_us();
  report.add("empty graph", {{"us", empty_us}});
  Wide wide(pool, report.sms());
  const auto stream = timer.stream();
  for (const auto& [number, tokens] : {std::pair{1024, 32}, {512, 128}, {128, 512}}) {
    Tails of_tails(pool, report.sms(), number, tokens);
    const double tails_us = timer.median_us([&] { of_tails.launch(stream, false, wide.begin_of_tails()); });
    for (const int32_t wide_tokens : {1536, 3072, 6144}) {
      const std::string name = std::to_string(number) + " tails of " + std::to_string(tokens) + ", wide tiles of " +
                               std::to_string(wide_tokens);
      const double half_us = timer.median_us([&] { wide.launch<HalfSm>(stream, wide_tokens, 1, wide.spans()); });
      const double half_span_us = wide.longest_us();
      const double two_us = timer.median_us([&] { wide.launch<TwoCtas>(stream, wide_tokens, 2); });
      const double four_us = timer.median_us([&] { wide.launch<FourGroups>(stream, wide_tokens, 1); });
      const double three_us = timer.median_us([&] { wide.launch<ThreeInTurn>(stream, wide_tokens, 1); });
      const double queries_us = timer.median_us([&] { wide.launch<TwoWithQueries>(stream, wide_tokens, 1); });
      const double whole_us = std::min({half_us, two_us, four_us, three_us, queries_us});
      wide.clear();
      of_tails.clear();
      const double together_us = timer.median_us([&] {
        wide.launch<HalfSm>(stream, wide_tokens, 1, wide.spans());
        of_tails.launch(stream, true, wide.begin_of_tails());
      });
      wide.check(pool, name);
      of_tails.check(pool, name);
      // One empty graph is in each time, and the sum needs only one.
      const double after_us = whole_us + tails_us - empty_us;
      report.add(name,
                 {{"half_us", half_us},
                  {"whole_us", whole_us},
                  {"tails_us", tails_us},
                  {"together_us", together_us},
                  {"gain", after_us / together_us},
                  {"hidden", (half_us + tails_us - empty_us - together_us) / (std::min(half_us, tails_us) - empty_us)},
                  {"tails_begin_us", wide.tails_begin_us()},
                  {"wide_slower", wide.longest_us() / half_span_us}});
    }
  }
  if (count > 1) report.write(arguments[1]);
  return 0;
}
