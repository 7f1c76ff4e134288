// Runs the probes' mainloops lane by lane on the CPU: results, indices, and threads that wait for each other. It says
// nothing of the order of memory operations, or of time.
#include <cstdio>
#include <numeric>
#include <string>

#include "few_requests.cuh"
#include "reference.h"
#include "tails.cuh"
#include "wide_tile.cuh"

namespace {

constexpr int32_t kHeads = 2, kSlots = 4608, kCtas = 3;
constexpr emulation::Copies kBoth[] = {emulation::Copies::kEarly, emulation::Copies::kLate};

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
  const probe::WideStep step{q.data(),
                             reinterpret_cast<const char*>(pool.k.data()),
                             reinterpret_cast<const char*>(pool.v.data()),
                             pool.slots.data(),
                             tokens,
                             kHeads,
                             output.data(),
                             probe::WideWork::kAll};
  for (const emulation::Copies copies : kBoth) {
    std::fill(output.begin(), output.end(), NAN);
    emulation::run(copies,
                   {{kCtas, T::kThreads, T::kShared, [&](char* shared) { probe::run_wide_tile<T>(step, shared); }}});
    double worst = 0;
    for (size_t row = 0; row < size_t(kCtas) * T::kRows; ++row) {
      static const probe::Range ranges[] = {{pool.slots.data(), tokens, kHeads, 0},
                                            {pool.slots.data(), tokens, kHeads, 1}};
      const auto head = row / T::kRows % kHeads;
      const double error = ranges[head].error(&q[row * probe::kDims], &output[row * probe::kDims]);
      worst = error <= worst ? worst : error;
    }
    report(name, worst);
  }
}

probe::WarpPool warp_pool(const Pool& pool, const std::vector<uint16_t>& q, int32_t rows) {
  return {q.data(),
          reinterpret_cast<const char*>(pool.k.data()),
          reinterpret_cast<const char*>(pool.v.data()),
          pool.slots.data(),
          kHeads,
          rows};
}

void tails(const Pool& pool, int32_t number, int32_t tokens, int32_t rows) {
  const std::vector<uint16_t> q = probe::random_queries(size_t(number) * kHeads * rows, 3);
  std::vector<float> output(q.size(), NAN), lse(q.size() / probe::kDims, NAN);
  int32_t claims[32] = {};
  const probe::TailStep step{warp_pool(pool, q, rows), 7, number, tokens, claims, output.data(), lse.data()};
  for (const emulation::Copies copies : kBoth) {
    std::fill(output.begin(), output.end(), NAN);
    emulation::run(copies, {{2, 64, probe::kTailShared, [&](char* shared) { probe::run_tails(step, shared); }}});
    double worst = claims[0];  // zero again
    for (int32_t row = 0; row < number * kHeads * rows; ++row) {
      const probe::Range range(&pool.slots[7 + row / rows / kHeads * tokens], tokens, kHeads, row / rows % kHeads);
      const double error = range.error(&q[size_t(row) * probe::kDims], &output[size_t(row) * probe::kDims]);
      worst = error <= worst ? worst : error;
    }
    report(std::to_string(number) + " tails of " + std::to_string(tokens) + ", " + std::to_string(rows) + " rows",
           worst);
  }
}

template <int Stages>
void few_requests(const Pool& pool, const std::vector<probe::Request>& requests, int32_t splits, int32_t rows) {
  constexpr int32_t kStride = 200;
  const auto number = static_cast<int32_t>(requests.size());
  const std::vector<uint16_t> q = probe::random_queries(size_t(number) * kHeads * rows, 4);
  const size_t all_rows = q.size() / probe::kDims;
  std::vector<float> partials(q.size() * splits, NAN), lse(all_rows * splits, NAN);
  std::vector<int32_t> semaphores(size_t(number) * kHeads, 0);
  std::vector<uint16_t> output(q.size());
  const probe::FewStep step{warp_pool(pool, q, rows), requests.data(), kStride,           splits,
                            partials.data(),          lse.data(),      semaphores.data(), output.data()};
  for (const emulation::Copies copies : kBoth) {
    std::fill(output.begin(), output.end(), uint16_t{0x7fc0});
    emulation::run(copies, {{number * splits * kHeads, probe::kFewThreads, probe::kFewShared<Stages>,
                             [&](char* shared) { probe::run_few<Stages>(step, shared); }}});
    double worst = 0;
    for (const int32_t count : semaphores) worst += count;  // zero again
    for (size_t row = 0; row < all_rows; ++row) {
      const probe::Request& of = requests[row / rows / kHeads];
      const probe::Range range(&pool.slots[of.row * kStride], of.tokens, kHeads,
                               static_cast<int32_t>(row / rows % kHeads));
      const double error = range.error(&q[row * probe::kDims], &output[row * probe::kDims], probe::of_bf16);
      worst = error <= worst ? worst : error;
    }
    report(std::to_string(number) + " requests, " + std::to_string(splits) + " splits, " + std::to_string(rows) +
               " rows, ring of " + std::to_string(Stages),
           worst);
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
  wide_tile<probe::WideTile<2, 128, 6, 168, 40, 232, true, true, true>>(pool,
                                                                        "128 rows, 128 keys, queries in registers");
  wide_tile<probe::WideTile<2, 64, 4, 104, 24, 144, true>>(pool, "128 rows on half an SM");
  tails(pool, 7, 64, 4);
  tails(pool, 3, 49, 8);
  few_requests<3>(pool, {{1, 200}, {0, 77}}, 4, 5);
  few_requests<6>(pool, {{1, 200}, {0, 77}}, 1, 8);
  few_requests<3>(pool, {{0, 150}}, 40, 4);   // some splits have no keys
  few_requests<3>(pool, {{0, 4500}}, 36, 4);  // more than the 32 that the lanes of a warp hold
  return failures;
}
