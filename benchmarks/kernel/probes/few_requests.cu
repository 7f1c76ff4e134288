// Few requests: how fast is one launch without queue and records, with products and a combine by the last arriver?
//
// 1 to 16 requests of 512 to 16,384 tokens, nothing shared, 8/1, 32/8 and 40/8 heads. A CTA of eight warps has a
// request, a KV head and a KV split; each warp streams its share of the keys. Two designs: two CTAs on an SM with rings
// of three stages, or one with rings of six; splits fill these CTAs. Best: of half and double as many splits, too.
// of_floor: (limit + 12 us) / time, where the limit is the bytes by this GPU's copy bandwidth. The first splits of each
// case are checked against the CPU, all others against them, and each twice for the same bits.
//
// Stop: geometric mean of of_floor under 1.0 with the better design, or a case under 0.85. Masks, sinks, soft cap,
// other types and steps that are no plain decode are missing here, and cost something.
#include "few_requests.cuh"
#include "probe.cuh"

using probe::FewStep;

namespace {

constexpr int32_t kMostRequests = 16, kMostTokens = 16384;

template <int Stages, int CtasPerSm>
__global__ void __launch_bounds__(probe::kFewThreads, CtasPerSm) few_requests(FewStep step) {
  extern __shared__ __align__(128) char shared[];
  probe::run_few<Stages>(step, shared);
}

double copy_bandwidth(probe::ColdTimer& timer) {  // bytes read and written in a microsecond
  constexpr size_t kBytes = 512 << 20;
  char* const from = probe::on_device<char>(kBytes);
  char* const to = probe::on_device<char>(kBytes);
  const double us = timer.median_us(
      [&] { probe::check(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice, timer.stream()), "copy"); });
  probe::check(cudaFree(from), "cudaFree");
  probe::check(cudaFree(to), "cudaFree");
  return 2.0 * kBytes / us;
}

// Splits that give each of so many CTAs work, but a warp no less than a stage.
int32_t splits_for(int32_t ctas, int32_t tiles, int32_t tokens) {
  int32_t splits = 1;
  while (splits * 2 * tiles <= ctas && splits * 2 * probe::kFewWarps * 16 <= tokens &&
         splits * 2 <= probe::kMostSplits) {
    splits *= 2;
  }
  return splits;
}

class Case {
 public:
  Case(const probe::Pool& pool, int32_t requests, int32_t tokens, int32_t kv_heads, int32_t group)
      : pool_(pool), requests_(requests), kv_heads_(kv_heads), group_(group), tiles_(requests * kv_heads) {
    for (int32_t i = 0; i < requests; ++i) of_.push_back({requests - 1 - i, tokens - i});
    q_ = probe::random_queries(size_t(tiles_) * group, 5);
    step_.pool = {probe::on_device(q_), pool.k, pool.v, pool.slots, kv_heads, group};
    step_.requests = probe::on_device(of_);
    step_.slot_stride = kMostTokens;
    step_.partials = probe::on_device<float>(q_.size() * probe::kMostSplits);
    step_.lse = probe::on_device<float>(q_.size() / probe::kDims * probe::kMostSplits);
    step_.semaphores = probe::on_device<int32_t>(tiles_);
    step_.output = probe::on_device<uint16_t>(q_.size());
  }
  ~Case() {
    for (const void* memory : {static_cast<const void*>(step_.pool.q), static_cast<const void*>(step_.requests),
                               static_cast<const void*>(step_.partials), static_cast<const void*>(step_.lse),
                               static_cast<const void*>(step_.semaphores), static_cast<const void*>(step_.output)}) {
      probe::check(cudaFree(const_cast<void*>(memory)), "cudaFree");
    }
  }
  Case(const Case&) = delete;
  Case& operator=(const Case&) = delete;

  double bytes() const {
    double tokens = 0;
    for (const probe::Request& request : of_) tokens += request.tokens;
    return tokens * kv_heads_ * 2 * probe::kRowBytes + 2.0 * q_.size() * sizeof(uint16_t);
  }
  std::string name() const {
    return std::to_string(requests_) + " x " + std::to_string(of_[0].tokens) + " tokens, " +
           std::to_string(kv_heads_ * group_) + "/" + std::to_string(kv_heads_) + " heads";
  }
  int32_t splits(int32_t ctas) const { return splits_for(ctas, tiles_, of_[0].tokens); }

  template <int Stages, int CtasPerSm>
  double measure(probe::ColdTimer& timer, int32_t splits) {
    step_.splits = splits;
    probe::check(cudaMemset(step_.output, 0xff, q_.size() * sizeof(uint16_t)), "memset");  // NaN
    const auto launches = [&] {
      probe::launch(timer.stream(), few_requests<Stages, CtasPerSm>, tiles_ * splits, probe::kFewThreads,
                    probe::kFewShared<Stages>, false, 1, step_);
    };
    const double us = timer.median_us(launches);
    const std::vector<uint16_t> found = probe::on_host(step_.output, q_.size());
    check(found, splits);
    probe::check(cudaMemset(step_.output, 0xff, q_.size() * sizeof(uint16_t)), "memset");
    launches();
    probe::check(cudaStreamSynchronize(timer.stream()), "few_requests");
    probe::require(probe::on_host(step_.output, q_.size()) == found, "few_requests, " + name() + ": other bits");
    return us;
  }

 private:
  void check(const std::vector<uint16_t>& found, int32_t splits) {
    const std::string what = "few_requests, " + name() + ", " + std::to_string(splits) + " splits: error ";
    if (first_.empty()) {
      first_ = found;
      for (const int32_t request : {0, requests_ - 1}) {
        const int32_t head = request == 0 ? kv_heads_ - 1 : 0;
        const probe::Request& of = of_[request];
        const probe::Range range(&pool_.slots_on_host[of.row * kMostTokens], of.tokens, kv_heads_, head);
        for (int32_t row = 0; row < group_; ++row) {
          const size_t at = ((size_t(request) * kv_heads_ + head) * group_ + row) * probe::kDims;
          const double error = range.error(&q_[at], &found[at], probe::of_bf16);
          probe::require(error < 2e-3, what + std::to_string(error));
        }
      }
    }
    for (size_t i = 0; i < found.size(); ++i) {
      const float error = std::abs(probe::of_bf16(found[i]) - probe::of_bf16(first_[i]));
      probe::require(error < 3e-3f, what + std::to_string(error));
    }
  }

  const probe::Pool& pool_;
  const int32_t requests_, kv_heads_, group_, tiles_;
  std::vector<probe::Request> of_;
  std::vector<uint16_t> q_, first_;
  FewStep step_{};
};

}  // namespace

int main(int count, char** arguments) {
  probe::Report report("few_requests");
  const probe::Pool pool(kMostRequests * kMostTokens);
  probe::ColdTimer timer;
  const double bandwidth = copy_bandwidth(timer);
  report.add("empty graph", {{"us", timer.empty_us()}});
  report.add("copy bandwidth", {{"tb_per_s", bandwidth * 1e-6}});
  for (const auto& [kv_heads, group] : {std::pair{8, 4}, {1, 8}, {8, 5}}) {
    for (const int32_t requests : {1, 2, 4, 8, 16}) {
      for (const int32_t tokens : {512, 2048, 8192, 16384}) {
        Case here(pool, requests, tokens, kv_heads, group);
        const int32_t two = here.splits(2 * report.sms()), one = here.splits(report.sms());
        const double two_us = here.measure<3, 2>(timer, two), one_us = here.measure<6, 1>(timer, one);
        double best_us = std::min(two_us, one_us);
        for (const int32_t other : {two / 2, two * 2}) {
          if (other > 0 && other <= probe::kMostSplits) best_us = std::min(best_us, here.measure<3, 2>(timer, other));
        }
        for (const int32_t other : {one / 2, one * 2}) {
          if (other > 0 && other <= probe::kMostSplits) best_us = std::min(best_us, here.measure<6, 1>(timer, other));
        }
        const double limit_us = here.bytes() / bandwidth;
        report.add(here.name(), {{"two_us", two_us},
                                 {"one_us", one_us},
                                 {"best_us", best_us},
                                 {"splits", double(two)},
                                 {"limit_us", limit_us},
                                 {"two_of_floor", (limit_us + 12) / two_us},
                                 {"one_of_floor", (limit_us + 12) / one_us}});
      }
    }
  }
  if (count > 1) report.write(arguments[1]);
  return 0;
}
