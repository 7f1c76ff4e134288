// Runs the threads of CUDA CTAs as fibers on one CPU thread; they synchronize where the hardware does.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulation {

constexpr int kMaxCtaThreads = 256;
constexpr int kWarpThreads = 32;
constexpr size_t kStackBytes = 128 * 1024;

// When asynchronous copies land: at once, or at the wait. Correct code gives the same result for both.
enum class Copies { kEarly, kLate };

struct PendingCopy {
  char* shared;
  const char* global;
  bool valid;
};

// Accumulators of pending warpgroup MMAs.
struct PendingSums {
  std::vector<float> sums;
  int products = 0;
};

// Operands that the lanes of a warp exchange; two sets, so that no lane overwrites them before all have read.
struct Exchange {
  uint64_t arrived[2] = {0, 0};
  uint64_t words[2][kWarpThreads][6];
  int lines[2][kWarpThreads];
};

// What a fiber waits for: a counter of the emulation, or a semaphore of the kernels, that is at least `least`.
struct Wait {
  const uint64_t* counter = nullptr;
  const int32_t* semaphore = nullptr;
  uint64_t least = 0;
  bool done = false;  // the fiber has ended

  bool blocks() const {
    if (counter != nullptr) return *counter < least;
    return semaphore != nullptr && *semaphore < static_cast<int64_t>(least);
  }
};

struct Cta;

struct Fiber {
  ucontext_t context;  // of its begin; later switches go by jumps, which make no system calls
  jmp_buf place;
  bool begun = false;
  Cta* cta = nullptr;
  int thread = 0;
  uint64_t exchanges = 0;
  uint64_t syncs = 0;
  std::vector<PendingCopy> open_group;
  std::vector<std::vector<PendingCopy>> groups;
  std::vector<std::function<void()>> open_products;
  std::vector<std::vector<std::function<void()>>> product_groups;
  std::map<const void*, PendingSums> pending_sums;
  std::vector<size_t> landed;  // 16-byte chunks of shared memory that are not yet fenced for wgmma
};

// A kernel and its grid. `kernel(shared memory)` runs on every thread.
struct Launch {
  int grid, threads, shared_bytes;
  std::function<void(char*)> kernel;
};

struct Cta {
  const Launch* launch = nullptr;
  int index = 0;
  std::vector<char> shared;
  std::vector<bool> hidden;  // 16-byte chunks that were written and not yet fenced for wgmma
  uint64_t arrived = 0;
  bool vote = false;
  Exchange warps[kMaxCtaThreads / kWarpThreads];
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Wait> waits;  // of the fibers; side by side, because the scheduler reads them all the time

  char* shared_begin() {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(shared.data()) + 1023) / 1024 * 1024);
  }
};

struct Machine {
  Copies copies = Copies::kLate;
  std::vector<std::unique_ptr<Cta>> ctas;
  size_t fibers = 0;
  Fiber* current = nullptr;
  jmp_buf scheduler;
  std::string failure;
};

inline Machine*& machine() {
  static Machine* current = nullptr;
  return current;
}

inline Fiber& self() { return *machine()->current; }

inline Wait& own_wait() { return self().cta->waits[self().thread]; }

inline void yield() {
  if (_setjmp(self().place) == 0) _longjmp(machine()->scheduler, 1);
}

// Lets others run until the counter is at least that.
inline void wait_for(const Wait& wait) {
  if (!wait.blocks()) return;
  own_wait() = wait;
  yield();
  own_wait() = {};
}
inline void wait_at_least(const uint64_t* counter, uint64_t least) { wait_for({counter, nullptr, least}); }
inline void wait_at_least(const int32_t* semaphore, int32_t least) {
  wait_for({nullptr, semaphore, static_cast<uint64_t>(least)});
}

inline void resume(Machine& machine, Fiber& fiber) {
  machine.current = &fiber;
  if (_setjmp(machine.scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

[[noreturn]] inline void fail(const std::string& message) { throw std::runtime_error(message); }

// Publishes `count` words and returns those of all lanes once all have arrived. `line` is the caller's: lanes that meet
// at different instructions would hang or compute garbage on a GPU.
inline const uint64_t (*exchange(const uint64_t* words, int count, int line))[6] {
  Fiber& fiber = self();
  Exchange& warp = fiber.cta->warps[fiber.thread / kWarpThreads];
  const uint64_t number = fiber.exchanges++;
  const int set = number % 2;
  for (int i = 0; i < count; ++i) warp.words[set][fiber.thread % kWarpThreads][i] = words[i];
  warp.lines[set][fiber.thread % kWarpThreads] = line;
  ++warp.arrived[set];
  wait_at_least(&warp.arrived[set], kWarpThreads * (number / 2 + 1));
  if (fiber.thread % kWarpThreads != 0) return warp.words[set];  // the first lane compares for all
  for (int other : warp.lines[set]) {
    if (other != line) fail("lanes of a warp meet at lines " + std::to_string(line) + " and " + std::to_string(other));
  }
  return warp.words[set];
}

inline void sync_cta() {
  Fiber& fiber = self();
  ++fiber.cta->arrived;
  const uint64_t target = ++fiber.syncs * fiber.cta->fibers.size();
  wait_at_least(&fiber.cta->arrived, target);
}

// Hides 16 bytes that this thread has written from wgmma, until its fence.
inline void hide(const char* written) {
  const auto chunk = static_cast<size_t>(written - self().cta->shared_begin()) / 16;
  self().cta->hidden[chunk] = true;
  self().landed.push_back(chunk);
}

inline void land(const PendingCopy& copy) {
  for (int i = 0; i < 16; ++i) copy.shared[i] = copy.valid ? copy.global[i] : 0;
  hide(copy.shared);
}

// Where `bytes` bytes of shared memory lie.
inline char* shared_at(uint32_t address, int bytes) {
  if (int64_t{address} + bytes > self().cta->launch->shared_bytes) fail("access outside shared memory");
  char* at = self().cta->shared_begin() + address;
  if (reinterpret_cast<uintptr_t>(at) % bytes != 0) fail("misaligned access to shared memory");
  return at;
}

inline void fiber_main() {
  Fiber& fiber = self();
  try {
    fiber.cta->launch->kernel(fiber.cta->shared_begin());
  } catch (const std::exception& error) {
    machine()->failure = error.what();
  }
  own_wait().done = true;
  yield();
}

// Stacks are kept for the next launch: fresh memory costs a page fault per page.
inline char* stack_of(size_t fiber) {
  static std::vector<std::unique_ptr<char[]>> stacks;
  while (stacks.size() <= fiber) stacks.emplace_back(new char[kStackBytes]);
  return stacks[fiber].get();
}

inline void add_cta(Machine& machine, const Launch& launch, int index) {
  auto cta = std::make_unique<Cta>();
  cta->launch = &launch;
  cta->index = index;
  // NaN in every 16-bit and 32-bit format, so that reads of uninitialized memory show.
  cta->shared.assign(launch.shared_bytes + 1024, static_cast<char>(0xff));
  cta->hidden.assign(cta->shared.size() / 16, false);
  cta->waits.resize(launch.threads);
  for (int thread = 0; thread < launch.threads; ++thread) {
    auto fiber = std::make_unique<Fiber>();
    fiber->cta = cta.get();
    fiber->thread = thread;
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stack_of(machine.fibers++);
    fiber->context.uc_stack.ss_size = kStackBytes;
    fiber->context.uc_link = nullptr;
    makecontext(&fiber->context, fiber_main, 0);
    cta->fibers.push_back(std::move(fiber));
  }
  machine.ctas.push_back(std::move(cta));
}

// Runs kernels beside each other; those of earlier launches go first each time. Throws if a thread fails or on
// deadlock.
inline void run(Copies copies, const std::vector<Launch>& launches) {
  Machine here;
  here.copies = copies;
  machine() = &here;
  for (const Launch& launch : launches) {
    for (int index = 0; index < launch.grid; ++index) add_cta(here, launch, index);
  }
  for (bool alive = true; alive && here.failure.empty();) {
    alive = false;
    bool resumed = false;
    for (auto& cta : here.ctas) {
      for (size_t thread = 0; thread < cta->waits.size(); ++thread) {
        const Wait& wait = cta->waits[thread];
        if (wait.done) continue;
        alive = true;
        if (wait.blocks()) continue;
        resumed = true;
        resume(here, *cta->fibers[thread]);
        if (!here.failure.empty()) break;
      }
    }
    if (alive && !resumed) here.failure = "threads wait for each other";
  }
  machine() = nullptr;
  if (!here.failure.empty()) throw std::runtime_error(here.failure);
}

}  // namespace emulation
