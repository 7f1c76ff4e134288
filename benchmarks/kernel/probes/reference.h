// What the probes' KV pools and queries contain, and attention over it on the CPU, in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "cuda/common/host_device.h"

namespace probe {

// K and V differ by their seeds, so that a check notices one read in place of the other.
constexpr uint32_t kSeedOfK = 0, kSeedOfV = 0x9e3779b9u;

// Element i of K or V: bf16, of size 0.125 to 0.25.
PREFIXPACK_BOTH uint16_t filled(uint32_t i, uint32_t seed) {
  uint32_t mixed = (i + seed) * 2654435761u;
  mixed = (mixed ^ mixed >> 15) * 0x2c1b3c6du;
  return static_cast<uint16_t>((mixed >> 16 & 0x807f) | 0x3e00);
}

inline float of_bf16(uint16_t bits) {
  const uint32_t word = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &word, sizeof(value));
  return value;
}

constexpr int32_t kDims = 128;

// Rows of 8 to 16, whose weights differ enough for a wrong score to be seen. Every fourth row has four times these
// sizes: its maxima rise by more than a lazy rescale lets pass.
inline std::vector<uint16_t> random_queries(size_t rows, uint32_t seed) {
  std::vector<uint16_t> q(rows * kDims);
  std::mt19937 dice(seed);
  for (size_t i = 0; i < q.size(); ++i) {
    q[i] = static_cast<uint16_t>((dice() & 0x807f) | (i / kDims % 4 == 3 ? 0x4200 : 0x4100));
  }
  return q;
}

// One KV head of a range of tokens, of a pool [slots, heads, kDims].
class Range {
 public:
  Range(const int32_t* slots, int32_t tokens, int32_t heads, int32_t head) : tokens_(tokens) {
    for (int32_t i = 0; i < tokens; ++i) {
      for (int32_t d = 0; d < kDims; ++d) {
        const auto at = static_cast<uint32_t>((int64_t{slots[i]} * heads + head) * kDims + d);
        k_.push_back(of_bf16(filled(at, kSeedOfK)));
        v_.push_back(of_bf16(filled(at, kSeedOfV)));
      }
    }
  }

  // Largest error of a row's output; NaN if it has one.
  template <class T, class Widen>
  double error(const uint16_t* q, const T* found, const Widen& widen) const {
    std::vector<double> weights(tokens_), sums(kDims, 0.0);
    double total = 0, most = -1e300, worst = 0;
    for (int32_t i = 0; i < tokens_; ++i) {
      for (int32_t d = 0; d < kDims; ++d) weights[i] += double(of_bf16(q[d])) * k_[size_t(i) * kDims + d];
      weights[i] *= 0.08838834764831845;
      most = std::max(most, weights[i]);
    }
    for (double& weight : weights) total += weight = std::exp(weight - most);
    for (int32_t i = 0; i < tokens_; ++i) {
      for (int32_t d = 0; d < kDims; ++d) sums[d] += weights[i] / total * v_[size_t(i) * kDims + d];
    }
    for (int32_t d = 0; d < kDims; ++d) {
      const double error = std::abs(sums[d] - static_cast<double>(widen(found[d])));
      worst = error <= worst ? worst : error;
    }
    return worst;
  }
  double error(const uint16_t* q, const float* found) const {
    return error(q, found, [](float value) { return value; });
  }

 private:
  int32_t tokens_;
  std::vector<float> k_, v_;
};

}  // namespace probe
