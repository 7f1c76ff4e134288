// Which mainloop keeps a whole SM's tensor cores busy with wide tiles and page size 1?
//
// Each SM holds 128, 192 or 256 rows of one KV head at a time. Reported: microseconds in which an SM does 64 keys of
// 128 rows, and Tflop/s of the GPU. `L2`: a range of 1,536 tokens, read again and again; `cold`: each token once. `no
// copies` and `copies only` say what bounds a mainloop. Outputs of rows of all warps are checked.
//
// Stop: less than 650 Tflop/s with the best mainloop, cold. docs/design-notes.md has the arithmetic that chose these.
#include "probe.cuh"
#include "wide_tile.cuh"

using probe::WideStep;
using probe::WideTile;
using probe::WideWork;

namespace {

constexpr int32_t kShort = 1536, kLong = 9216;

// Today's way: two CTAs on an SM, all warps copy.
using TwoCtas = WideTile<2, 64, 4, 128, 0, 128, false, false, false, 0>;
// The same warps on one KV range: half of the copies.
using FourGroups = WideTile<4, 64, 10, 128, 0, 128, false, false, false, 0>;
// Copies in warps of their own need registers, so there are three warpgroups left, or two with more keys.
using ThreeGroups = WideTile<3, 64, 11, 128, 32, 160, true, false>;
using ThreeInTurn = WideTile<3, 64, 11, 128, 32, 160, true, true>;
using TwoInTurn = WideTile<2, 128, 6, 168, 40, 232, true, true>;
using TwoWithQueries = WideTile<2, 128, 6, 168, 40, 232, true, true, true>;

template <class T>
__global__ void __maxnreg__(T::kLaunchRegisters) wide_tiles(WideStep step) {
  extern __shared__ __align__(1024) char shared[];
  probe::run_wide_tile<T>(step, shared);
}

void check(const WideStep& step, const std::vector<uint16_t>& q, const std::vector<int32_t>& slots, int32_t rows,
           int32_t ctas, const std::string& name) {
  const std::vector<float> found = probe::on_host(step.output, q.size());
  for (const int32_t cta : {0, ctas - 1}) {
    const probe::Range range(slots.data(), step.tokens, step.heads, cta % step.heads);
    for (int32_t row = 0; row < rows; row += 15) {
      const size_t at = (size_t(cta) * rows + row) * probe::kHeadDim;
      const double error = range.error(&q[at], &found[at]);
      probe::require(error < 1.5e-3, "wide_tiles, " + name + ": error " + std::to_string(error));
    }
  }
}

template <class T>
void measure(probe::Report& report, probe::ColdTimer& timer, const probe::Pool& pool, const std::string& name,
             int32_t ctas_per_sm) {
  const int32_t ctas = ctas_per_sm * report.sms();
  const std::vector<uint16_t> q = probe::random_queries(size_t(ctas) * T::kRows, 2);
  std::vector<int32_t> repeated(pool.slots_on_host.begin(), pool.slots_on_host.begin() + kLong);
  for (int32_t i = kShort; i < kLong; ++i) repeated[i] = repeated[i % kShort];
  int32_t* const repeated_slots = probe::on_device(repeated);
  WideStep step{probe::on_device(q), pool.k, pool.v, nullptr, 0, probe::kHeads, probe::on_device<float>(q.size())};
  int32_t fit = 0;
  probe::check(cudaFuncSetAttribute(wide_tiles<T>, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kShared), "shared");
  probe::check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, wide_tiles<T>, T::kThreads, T::kShared), "fit");
  probe::require(fit == ctas_per_sm, "wide_tiles, " + name + ": CTAs on an SM: " + std::to_string(fit));
  const auto rate = [&](const std::string& of, bool cold, WideWork work) {
    step.work = work;
    step.slots = cold ? pool.slots : repeated_slots;
    double us[2];
    for (const bool is_long : {false, true}) {
      step.tokens = is_long ? kLong : kShort;
      probe::check(cudaMemset(step.output, 0xff, q.size() * sizeof(float)), "memset");  // NaN
      us[is_long] = timer.median_us(
          [&] { probe::launch(timer.stream(), wide_tiles<T>, ctas, T::kThreads, T::kShared, false, 1, step); });
    }
    if (work == WideWork::kAll) check(step, q, cold ? pool.slots_on_host : repeated, T::kRows, ctas, name + ", " + of);
    const double tile_us = (us[1] - us[0]) * 64 * 128 / (double(kLong - kShort) * T::kRows * ctas_per_sm);
    const double flops = 4.0 * 128 * 64 * probe::kHeadDim, bytes = 2.0 * 64 * probe::kRowBytes * 128 / T::kRows;
    report.add(name + ", " + of, {{"us_of_64_keys", tile_us},
                                  {"tflops", flops * report.sms() / tile_us * 1e-6},
                                  {"copied_tb_per_s", bytes * report.sms() / tile_us * 1e-6}});
  };
  rate("cold", true, WideWork::kAll);
  rate("L2", false, WideWork::kAll);
  rate("no copies", false, WideWork::kNoCopies);
  rate("copies only", false, WideWork::kCopiesOnly);
  probe::check(cudaFree(repeated_slots), "cudaFree");
  probe::check(cudaFree(const_cast<uint16_t*>(step.q)), "cudaFree");
  probe::check(cudaFree(step.output), "cudaFree");
}

}  // namespace

int main(int count, char** arguments) {
  probe::Report report("wide_tiles");
  const probe::Pool pool(16384);
  probe::ColdTimer timer;
  measure<TwoCtas>(report, timer, pool, "two CTAs of 128 rows", 2);
  measure<FourGroups>(report, timer, pool, "256 rows", 1);
  measure<ThreeGroups>(report, timer, pool, "192 rows, producers", 1);
  measure<ThreeInTurn>(report, timer, pool, "192 rows, producers, in turn", 1);
  measure<TwoInTurn>(report, timer, pool, "128 rows, 128 keys, in turn", 1);
  measure<TwoWithQueries>(report, timer, pool, "128 rows, 128 keys, queries in registers", 1);
  if (count > 1) report.write(arguments[1]);
  return 0;
}
