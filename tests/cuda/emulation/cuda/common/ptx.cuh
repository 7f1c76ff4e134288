// Replaces csrc/cuda/common/ptx.cuh: the same instructions, emulated lane by lane on the CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>

#include "fibers.h"

#define PREFIXPACK_DEVICE inline
#define PREFIXPACK_DEVICE_CALL inline

namespace prefixpack::ptx {

inline int thread_index() { return emulation::self().thread; }
inline int volatile_thread_index() { return thread_index(); }
inline int cta_index() { return emulation::self().cta->index; }
inline int cta_size() { return static_cast<int>(emulation::self().cta->fibers.size()); }
inline int grid_size() { return emulation::self().cta->launch->grid; }
inline void cta_sync() { emulation::sync_cta(); }
inline bool cta_any(bool predicate) {
  bool& vote = emulation::self().cta->vote;
  if (predicate) vote = true;
  emulation::sync_cta();
  const bool result = vote;
  emulation::sync_cta();
  vote = false;
  emulation::sync_cta();
  return result;
}
inline int32_t atomic_increment(int32_t* address) {
  if (thread_index() % 32 != 0) emulation::fail("counted up by another lane than the warp's first");
  return (*address)++;
}
inline int32_t atomic_increment_or_reset(int32_t* address, int32_t last) {
  const int32_t before = atomic_increment(address);
  if (before >= last) *address = 0;
  return before;
}
inline void increment_or_reset(int32_t* address, int32_t last) { atomic_increment_or_reset(address, last); }
inline float exp2(float x) { return std::exp2(x); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float log2(float x) { return std::log2(x); }
inline float sum_of_products(float a, float b, float c, float d) { return a * b + c * d; }
inline void store_pair(float* address, float left, float right) {
  if (reinterpret_cast<uintptr_t>(address) % 8 != 0) emulation::fail("misaligned 8-byte store");
  address[0] = left;
  address[1] = right;
}

inline void prefetch_l2(const void* address) { static_cast<void>(*static_cast<const volatile char*>(address)); }
inline void store_quad(float* address, const float (&quad)[4]) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) emulation::fail("misaligned 16-byte store");
  for (int i = 0; i < 4; ++i) address[i] = quad[i];
}
inline void store_words(uint16_t* address, uint32_t low, uint32_t high) {
  if (reinterpret_cast<uintptr_t>(address) % 8 != 0) emulation::fail("misaligned 8-byte store");
  std::memcpy(address, &low, 4);
  std::memcpy(address + 2, &high, 4);
}
inline void pdl_launch_dependents() {}
inline void pdl_wait() {}

template <class T>
inline T shuffle(T value, int lane, int line = __builtin_LINE()) {
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  const auto* lanes = emulation::exchange(&word, 1, line);
  T result;
  std::memcpy(&result, &lanes[lane % 32][0], sizeof(T));
  return result;
}
template <class T>
inline T shuffle_xor(T value, int lane_mask, int line = __builtin_LINE()) {
  return shuffle(value, thread_index() % 32 ^ lane_mask, line);
}
template <int Lanes, class T>
inline T shuffle_in(T value, int lane, int line = __builtin_LINE()) {
  return shuffle(value, thread_index() % 32 / Lanes * Lanes + lane, line);
}
inline int32_t opaque(int32_t value) { return value; }
template <class T>
T kept(T value, int line = __builtin_LINE()) {
  return shuffle(value, thread_index() % 32, line);
}
inline bool any(bool predicate, int line = __builtin_LINE()) {
  const uint64_t word = predicate;
  const auto* lanes = emulation::exchange(&word, 1, line);
  bool result = false;
  for (int lane = 0; lane < 32; ++lane) result |= lanes[lane][0] != 0;
  return result;
}
inline bool uniform(bool condition, int line = __builtin_LINE()) {
  const uint64_t word = condition;
  const auto* lanes = emulation::exchange(&word, 1, line);
  for (int lane = 0; lane < 32; ++lane) {
    if ((lanes[lane][0] != 0) != condition) emulation::fail("lanes disagree at line " + std::to_string(line));
  }
  return condition;
}
inline int32_t broadcast(int32_t value, int lane, int line = __builtin_LINE()) { return shuffle(value, lane, line); }
inline float warp_max(float value, int line = __builtin_LINE()) {
  for (int mask = 1; mask < 32; mask *= 2) value = max(value, shuffle_xor(value, mask, line));
  return value;
}
inline void warp_sync(int line = __builtin_LINE()) { any(false, line); }
inline int32_t atomic_add_release(int32_t* address, int32_t value) {
  const int32_t before = *address;
  *address += value;
  return before;
}
inline int32_t load_relaxed(const int32_t* address) { return *address; }
inline float load_relaxed(const float* address) { return *address; }
inline void load_relaxed(const float* address, float (&out)[4]) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) emulation::fail("misaligned 16-byte load");
  for (int i = 0; i < 4; ++i) out[i] = address[i];
}
inline void wait_at_least(const int32_t* semaphore, int32_t least) { emulation::wait_at_least(semaphore, least); }
inline void load_quad(const float* address, float (&quad)[4]) { load_relaxed(address, quad); }
inline void load_relaxed_generic(const float* address, float (&out)[4]) { load_relaxed(address, out); }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }

using SharedAddress = uint32_t;
inline SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(static_cast<const char*>(pointer) - emulation::self().cta->shared_begin());
}

inline void store_shared(SharedAddress address, float value) {
  std::memcpy(emulation::shared_at(address, 4), &value, 4);
}
inline void store_shared_pair(SharedAddress address, float low, float high) {
  const float pair[2] = {low, high};
  std::memcpy(emulation::shared_at(address, 8), pair, 8);
}
template <class Word>
inline void store_shared(SharedAddress address, const Word (&words)[4]) {
  char* to = emulation::shared_at(address, 16);
  std::memcpy(to, words, 16);
  emulation::hide(to);
}
template <class Word, int Count>
inline void load_shared(SharedAddress address, Word (&out)[Count]) {
  std::memcpy(out, emulation::shared_at(address, sizeof out), sizeof out);
}

inline void cp_async(SharedAddress address, const void* global, bool valid) {
  char* shared = emulation::shared_at(address, 16);
  if (valid && reinterpret_cast<uintptr_t>(global) % 16 != 0) emulation::fail("misaligned 16-byte copy");
  const emulation::PendingCopy copy{shared, static_cast<const char*>(global), valid};
  if (emulation::machine()->copies == emulation::Copies::kEarly) {
    emulation::land(copy);
  } else {
    emulation::self().open_group.push_back(copy);
  }
}
inline void cp_async(SharedAddress address, const void* global) { cp_async(address, global, true); }
inline void cp_async_commit() {
  auto& fiber = emulation::self();
  fiber.groups.push_back(std::move(fiber.open_group));
  fiber.open_group.clear();
}
template <int Pending>
inline void cp_async_wait() {
  auto& groups = emulation::self().groups;
  while (static_cast<int>(groups.size()) > Pending) {
    for (const auto& copy : groups.front()) emulation::land(copy);
    groups.erase(groups.begin());
  }
}

template <bool Transposed>
inline void load_matrices(uint32_t (&out)[4], SharedAddress address, int line) {
  const auto word = reinterpret_cast<uint64_t>(emulation::shared_at(address, 16));
  const auto* lanes = emulation::exchange(&word, 1, line);
  const int lane = thread_index() % 32;
  const auto element = [&](int matrix, int along, int across) {
    const uint64_t row = lanes[matrix * 8 + (Transposed ? across : along)][0];
    return uint32_t{reinterpret_cast<const uint16_t*>(row)[Transposed ? along : across]};
  };
  for (int matrix = 0; matrix < 4; ++matrix) {
    const int pair = lane % 4 * 2;
    out[matrix] = element(matrix, lane / 4, pair) | element(matrix, lane / 4, pair + 1) << 16;
  }
}
inline void ldmatrix(uint32_t (&out)[4], SharedAddress address, int line = __builtin_LINE()) {
  load_matrices<false>(out, address, line);
}
inline void ldmatrix_transposed(uint32_t (&out)[4], SharedAddress address, int line = __builtin_LINE()) {
  load_matrices<true>(out, address, line);
}

inline uint32_t movmatrix_transposed(uint32_t pair, int line = __builtin_LINE()) {
  const uint64_t word = pair;
  const auto* lanes = emulation::exchange(&word, 1, line);
  const int lane = thread_index() % 32;
  const auto element = [&](int row, int column) {
    return static_cast<uint32_t>(lanes[row * 4 + column / 2][0]) >> (column % 2 * 16) & 0xffff;
  };
  return element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
}
inline const char* at(const char* base, int32_t index, int32_t stride) { return base + int64_t{index} * stride; }

struct Float16 {
  static uint32_t to_fp16(uint32_t pair) { return pair; }
  static float widen(uint16_t bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
  }
  static uint16_t narrow(float value) {
    const auto half = static_cast<_Float16>(value);
    uint16_t bits;
    std::memcpy(&bits, &half, 2);
    return bits;
  }
  static uint32_t pack(float low, float high) { return narrow(low) | uint32_t{narrow(high)} << 16; }
};
struct BFloat16 {
  static float widen(uint16_t bits) {
    const uint32_t wide = uint32_t{bits} << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  static uint16_t narrow(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return 0x7fc0;
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  static uint32_t pack(float low, float high) { return narrow(low) | uint32_t{narrow(high)} << 16; }
  static uint32_t to_fp16(uint32_t pair) {
    const auto within = [](float x) { return std::fabs(x) > 65504.0f ? std::copysign(65504.0f, x) : x; };
    return Float16::pack(within(widen(static_cast<uint16_t>(pair))), within(widen(static_cast<uint16_t>(pair >> 16))));
  }
};

inline uint32_t even_bytes_first(uint32_t word) {
  return (word & 0xff0000ff) | (word & 0xff00) << 8 | (word & 0xff0000) >> 8;
}
inline float float8_value(uint32_t byte) {
  const int exponent = static_cast<int>(byte >> 3 & 15), mantissa = static_cast<int>(byte & 7);
  const float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                    : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  const float magnitude = (byte & 0x7f) == 0x7f ? __builtin_nanf("") : value;
  return byte & 0x80 ? -magnitude : magnitude;
}
inline void fp8_to_fp16(uint32_t word, uint32_t& low, uint32_t& high) {
  const auto value = [&](int byte) { return float8_value(word >> 8 * byte & 0xff); };
  low = Float16::pack(value(0), value(1));
  high = Float16::pack(value(2), value(3));
}

// Of the pair of elements in a word, the one with k's parity.
template <class Element>
inline float half(uint64_t word, int k) {
  return Element::widen(static_cast<uint16_t>(k % 2 == 0 ? word : word >> 16));
}
// Fragment layout (PTX ISA, mma.m16n8k16): A(row, k) in lane row % 8 * 4 + k % 8 / 2, register row / 8 + k / 8 * 2;
// B(k, column) in lane column * 4 + k % 8 / 2, register k / 8; halves by k % 2.
template <class Element>
inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int line = __builtin_LINE()) {
  const uint64_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto* lanes = emulation::exchange(words, 6, line);
  const int lane = thread_index() % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    float sum = 0.0f;
    for (int k = 0; k < 16; ++k) {
      const float x = half<Element>(lanes[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k);
      const float y = half<Element>(lanes[column * 4 + k % 8 / 2][4 + k / 8], k);
      sum += x * y;
    }
    c[i] += sum;
  }
}

}  // namespace prefixpack::ptx
