// Replaces csrc/cuda/common/wgmma.cuh: the same MMAs, emulated lane by lane on the CPU; executed at once or, with late
// copies, at their wait.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cuda/common/ptx.cuh"

#if !defined(PREFIXPACK_EMULATED_CAPABILITY) || PREFIXPACK_EMULATED_CAPABILITY == 90
#define PREFIXPACK_WARPGROUP_PRODUCTS
#endif

namespace prefixpack::ptx {

struct SmemDescriptor {
  SharedAddress address;
  int32_t leading, stride;
};
inline SmemDescriptor smem_descriptor(SharedAddress address, int32_t leading, int32_t stride) {
  if (address % 16 != 0 || leading % 16 != 0 || stride % 1024 != 0) emulation::fail("misaligned matrix");
  return {address, leading, stride};
}
inline SmemDescriptor advance(SmemDescriptor matrix, int32_t bytes) {
  return smem_descriptor(matrix.address + static_cast<SharedAddress>(bytes), matrix.leading, matrix.stride);
}

inline void fence_proxy_async() {
  emulation::Fiber& fiber = emulation::self();
  for (size_t chunk : fiber.landed) fiber.cta->hidden[chunk] = false;
  fiber.landed.clear();
}
inline void wgmma_fence(int line = __builtin_LINE()) { warp_sync(line); }
inline void wgmma_commit() {
  emulation::Fiber& fiber = emulation::self();
  fiber.product_groups.push_back(std::move(fiber.open_products));
  fiber.open_products.clear();
}
template <int Pending>
inline void wgmma_wait() {
  auto& groups = emulation::self().product_groups;
  while (static_cast<int>(groups.size()) > Pending) {
    const auto group = std::move(groups.front());
    groups.erase(groups.begin());
    for (const auto& product : group) product();
  }
}
template <class Fragment>
inline void wgmma_fence_operand(Fragment&) {}

// The element `offset` bytes behind a matrix's begin. The swizzle applies to address bits, wherever a matrix begins.
template <class Element>
inline float matrix_element(const SmemDescriptor& matrix, int32_t offset) {
  const SharedAddress address = matrix.address + static_cast<SharedAddress>(offset);
  const SharedAddress mixed = address ^ (address >> 7 & 7) << 4;
  const char* at = emulation::shared_at(mixed, 2);
  if (emulation::self().cta->hidden[mixed / 16]) emulation::fail("a product reads data that it was not shown");
  uint16_t bits;
  std::memcpy(&bits, at, 2);
  return Element::widen(bits);
}
// K-major: element k of row (or column of b) `row`.
template <class Element>
inline float along_sum(const SmemDescriptor& matrix, int32_t row, int32_t k) {
  return matrix_element<Element>(matrix, row / 8 * matrix.stride + row % 8 * 128 + k * 2);
}
// MN-major.
template <class Element>
inline float across_sum(const SmemDescriptor& matrix, int32_t column, int32_t k) {
  return matrix_element<Element>(matrix,
                                 column / 64 * matrix.leading + k / 8 * matrix.stride + k % 8 * 128 + column % 64 * 2);
}

// Adds `product` to c, a thread's fragments, now or at the wait. c holds NaN until all issued MMAs are executed.
template <int Blocks, class Product>
inline void carry_out(float (&c)[Blocks][4], bool add, const Product& product) {
  auto& pending = emulation::self().pending_sums[&c];
  if (pending.products++ == 0) {
    pending.sums.assign(&c[0][0], &c[0][0] + 4 * Blocks);
    for (int i = 0; i < 4 * Blocks; ++i) c[i / 4][i % 4] = std::nanf("");
  }
  const auto finish = [&c, add, product] {
    auto& all = emulation::self().pending_sums;
    auto& mine = all[&c];
    if (!add) mine.sums.assign(4 * Blocks, 0.0f);
    product(mine.sums);
    if (--mine.products > 0) return;
    std::memcpy(c, mine.sums.data(), sizeof(c));
    all.erase(&c);
  };
  if (emulation::machine()->copies == emulation::Copies::kEarly) {
    finish();
  } else {
    emulation::self().open_products.push_back(finish);
  }
}

template <class Element, bool Add, int Blocks>
inline void wgmma(float (&c)[Blocks][4], SmemDescriptor a, SmemDescriptor b) {
  carry_out(c, Add, [a, b](std::vector<float>& sums) {
    const int thread = thread_index();
    for (int i = 0; i < 4 * Blocks; ++i) {
      const int row = thread / 32 % 4 * 16 + thread % 32 / 4 + i % 4 / 2 * 8,
                column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) sum += along_sum<Element>(a, row, k) * along_sum<Element>(b, column, k);
      sums[i] += sum;
    }
  });
}

template <class Element, int Blocks>
inline void wgmma(float (&c)[Blocks][4], const uint32_t (&a)[4], SmemDescriptor b) {
  carry_out(c, true, [&a, b](std::vector<float>& sums) {
    const uint64_t words[4] = {a[0], a[1], a[2], a[3]};
    const auto* lanes = emulation::exchange(words, 4, __LINE__);
    const int lane = thread_index() % 32;
    for (int i = 0; i < 4 * Blocks; ++i) {
      const int row = lane / 4 + i % 4 / 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      float sum = 0.0f;
      for (int k = 0; k < 16; ++k) {
        const uint64_t word = lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
        sum += half<Element>(word, k) * across_sum<Element>(b, column, k);
      }
      sums[i] += sum;
    }
  });
}

}  // namespace prefixpack::ptx
