// Replaces device/wide_mma.cuh. The emulation's scores have any number of keys.
#pragma once

#include "cuda/common/wgmma.cuh"

namespace prefixpack::ptx {

template <bool Add, int Blocks>
inline void wgmma_queries(float (&c)[Blocks][4], const uint32_t (&a)[4], SmemDescriptor b) {
  carry_out(c, Add, [&a, b](std::vector<float>& sums) {
    const uint64_t words[4] = {a[0], a[1], a[2], a[3]};
    const auto* lanes = emulation::exchange(words, 4, __LINE__);
    const int lane = thread_index() % 32;
    for (int i = 0; i < 4 * Blocks; ++i) {
      const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) {
        const uint64_t word = lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
        const auto bits = static_cast<uint16_t>(k % 2 == 0 ? word & 0xffff : word >> 16 & 0xffff);
        sums[i] += BFloat16::widen(bits) * along_sum<BFloat16>(b, column, k);
      }
    }
  });
}

}  // namespace prefixpack::ptx
