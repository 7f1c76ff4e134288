// Runs the probes' mainloops lane by lane on the CPU: results, indices, and threads that wait for each other. It says
// nothing of the order of memory operations, or of time.
#include <cstdio>
#include <numeric>
#include <string>

#include "reference.h"
#include "wide_tile.cuh"

namespace {

constexpr int32_t kHeads = 2, kSlots = 512, kCtas = 3;

struct Pool {
  std::vector<uint16_t> k, v;
  std::vector<int32_t> slots;
  Pool() : k(size_t(kSlots) * kHeads * probe::kDims), v(k.size()), slots(kSlots) {
    for (uint32_t i = 0; i < k.size(); ++i) {
      k[i] = probe::filled(i, probe::kSeedOfK);
      v[i] = probe::filled(i, probe::kSeedOfV);
    }
    std::iota(slots.begin(), slots.end(), 0);
    std::shuffle(slots.begin(), slots.end(), std::mt19937(1));
  }
};

int failures = 0;

void report(const std::string& name, double error) {
  std::printf("%-60s largest error %.1e\n", name.c_str(), error);
  if (!(error < 1e-3)) ++failures;
}

template <class T>
void wide_tile(const Pool& pool, const std::string& name) {
  const int32_t tokens = 384;
  const std::vector<uint16_t> q = probe::random_queries(size_t(kCtas) * T::kRows, 2);
  std::vector<float> output(q.size(), NAN);
  const probe::WideStep step{q.data(),          reinterpret_cast<const char*>(pool.k.data()),
                             reinterpret_cast<const char*>(pool.v.data()),
                             pool.slots.data(), tokens,
                             kHeads,            output.data(),
                             probe::WideWork::kAll};
  for (const emulation::Copies copies : {emulation::Copies::kEarly, emulation::Copies::kLate}) {
    std::fill(output.begin(), output.end(), NAN);
    emulation::run(copies, {{kCtas, T::kThreads, T::kShared, [&](char* shared) { probe::run_wide_tile<T>(step, shared); }}});
    double worst = 0;
    for (size_t row = 0; row < size_t(kCtas) * T::kRows; ++row) {
      static const probe::Range ranges[] = {{pool.slots.data(), tokens, kHeads, 0}, {pool.slots.data(), tokens, kHeads, 1}};
      const auto head = row / T::kRows % kHeads;
      const double error = ranges[head].error(&q[row * probe::kDims], &output[row * probe::kDims]);
      worst = error <= worst ? worst : error;
    }
    report(name, worst);
  }
}

}  // namespace

int main() {
  const Pool pool;
  wide_tile<probe::WideTile<2, 64, 4, 128, 0, 128, false, false, false, 0>>(pool, "128 rows");
  wide_tile<probe::WideTile<4, 64, 10, 128, 0, 128, false, false, false, 0>>(pool, "256 rows");
  wide_tile<probe::WideTile<3, 64, 11, 128, 32, 160, true, false>>(pool, "192 rows, producers");
  wide_tile<probe::WideTile<3, 64, 4, 128, 32, 160, true, true>>(pool, "192 rows, producers, in turn, least ring");
  wide_tile<probe::WideTile<2, 128, 6, 168, 40, 232, true, true>>(pool, "128 rows, 128 keys, in turn");
  wide_tile<probe::WideTile<2, 128, 6, 168, 40, 232, true, true, true>>(pool, "128 rows, 128 keys, queries in registers");
  return failures;
}
