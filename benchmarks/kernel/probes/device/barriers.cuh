// Barriers and register counts of CTAs whose warps have different tasks. The emulation has a header of the same name.
#pragma once

#include "cuda/common/ptx.cuh"

namespace prefixpack::ptx {

PREFIXPACK_DEVICE void barrier_init(SharedAddress barrier, int32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
PREFIXPACK_DEVICE void barrier_arrive(SharedAddress barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(barrier) : "memory");
}
// Arrives once all cp.async that this thread has issued are complete. The thread does not wait for them.
PREFIXPACK_DEVICE void barrier_arrive_copied(SharedAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits for the end of the phase of that parity.
PREFIXPACK_DEVICE void barrier_wait(SharedAddress barrier, int32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n@done bra ready;\nbra "
      "again;\nready:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Barrier `number` of the CTA (0 is that of cta_sync) for `threads` threads. Some arrive without waiting for the
// others.
PREFIXPACK_DEVICE void named_sync(int32_t number, int32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
PREFIXPACK_DEVICE void named_arrive(int32_t number, int32_t threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Registers of a thread from here on, for all warps of a warpgroup. What some give away others take.
template <int Registers>
PREFIXPACK_DEVICE void registers_down() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
PREFIXPACK_DEVICE void registers_up() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Keeps what a number, never negative, depends on ahead of the waits that follow. ptxas moves arithmetic behind a wait
// for MMAs, but not behind a branch.
PREFIXPACK_DEVICE void computed_here(float number) {
  if (number < 0.0f) asm volatile("trap;");
}

}  // namespace prefixpack::ptx
