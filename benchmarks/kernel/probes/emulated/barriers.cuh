// Replaces device/barriers.cuh: the same barriers, emulated on the CPU.
#pragma once

#include <map>
#include <utility>

#include "cuda/common/ptx.cuh"
#include "cuda/common/wgmma.cuh"

namespace prefixpack::ptx {

struct EmulatedBarrier {
  int32_t expected = 0, arrived = 0;
  uint64_t phases = 0;  // complete ones
  void arrive() {
    if (++arrived < expected) return;
    arrived = 0;
    ++phases;
  }
};
inline EmulatedBarrier& barrier_at(SharedAddress address) {
  static std::map<std::pair<const emulation::Cta*, SharedAddress>, EmulatedBarrier> barriers;
  return barriers[{emulation::self().cta, address}];
}

inline void barrier_init(SharedAddress barrier, int32_t arrivals) { barrier_at(barrier) = {arrivals}; }
inline void barrier_arrive(SharedAddress barrier) { barrier_at(barrier).arrive(); }
inline void barrier_arrive_copied(SharedAddress barrier) {
  cp_async_commit();
  cp_async_wait<0>();
  fence_proxy_async();
  barrier_arrive(barrier);
}
inline void barrier_wait(SharedAddress barrier, int32_t parity) {
  EmulatedBarrier& here = barrier_at(barrier);
  if (static_cast<int32_t>(here.phases % 2) == parity) emulation::wait_at_least(&here.phases, here.phases + 1);
}

// Numbers of named barriers lie behind all shared memory.
inline EmulatedBarrier& named_at(int32_t number, int32_t threads) {
  EmulatedBarrier& here = barrier_at(static_cast<SharedAddress>(number) + (1u << 30));
  here.expected = threads;
  return here;
}
inline void named_sync(int32_t number, int32_t threads) {
  EmulatedBarrier& here = named_at(number, threads);
  const uint64_t phase = here.phases;
  here.arrive();
  emulation::wait_at_least(&here.phases, phase + 1);
}
inline void named_arrive(int32_t number, int32_t threads) { named_at(number, threads).arrive(); }

template <int Registers>
inline void registers_down() {}
template <int Registers>
inline void registers_up() {}

inline void computed_here(float number) {
  if (number < 0.0f) emulation::fail("a negative sum");
}

}  // namespace prefixpack::ptx
