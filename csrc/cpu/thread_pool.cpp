#include "cpu/thread_pool.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace prefixpack {
namespace {

constexpr int kWorkerBits = 16;
constexpr int kMaxWorkers = 1 << 10;
// Time that workers spin: layers follow each other within microseconds, and spinning that long is cheaper than a
// wake-up.
constexpr int kSpins = 1000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Reset in a forked child. The old pool is leaked: its threads are gone and may have held its locks.
std::atomic<ThreadPool*> current_pool{nullptr};

int workers_of(uint64_t job) { return static_cast<int>(job & ((uint64_t{1} << kWorkerBits) - 1)); }

}  // namespace

ThreadPool& ThreadPool::instance() {
  ThreadPool* pool = current_pool.load(std::memory_order_acquire);
  if (pool != nullptr) return *pool;
  static const int registered = pthread_atfork(nullptr, nullptr, [] { current_pool.store(nullptr); });
  if (registered != 0) throw std::system_error(registered, std::generic_category(), "pthread_atfork");
  // If two threads race here, the slower one's pool is leaked; it has no threads yet.
  ThreadPool* fresh = new ThreadPool;
  return current_pool.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel) ? *fresh : *pool;
}

void ThreadPool::run_on_workers(int64_t count, int64_t split, int threads, Call call, const void* context) {
  std::lock_guard<std::mutex> turn(callers_);
  const int workers = static_cast<int>(std::min<int64_t>({threads - 1, count - 1, kMaxWorkers}));
  grow(workers);
  call_ = call;
  context_ = context;
  error_ = nullptr;
  parts_[0].next.store(0, std::memory_order_relaxed);
  parts_[0].end = split;
  parts_[1].next.store(split, std::memory_order_relaxed);
  parts_[1].end = count;
  busy_workers_.store(workers, std::memory_order_relaxed);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t number = (job_.load(std::memory_order_relaxed) >> kWorkerBits) + 1;
    job_.store(number << kWorkerBits | static_cast<uint64_t>(workers), std::memory_order_release);
  }
  job_posted_.notify_all();
  draw(0);
  for (int i = 0; i < kSpins && busy_workers_.load(std::memory_order_acquire) > 0; ++i) pause();
  if (busy_workers_.load(std::memory_order_acquire) > 0) {
    std::unique_lock<std::mutex> lock(mutex_);
    job_done_.wait(lock, [this] { return busy_workers_.load(std::memory_order_acquire) == 0; });
  }
  if (error_ != nullptr) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::grow(int workers) {
  if (static_cast<int>(workers_.size()) >= workers) return;
  // Signals are handled by the threads of the embedding program.
  sigset_t all, previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  struct Restore {
    const sigset_t& mask;
    ~Restore() { pthread_sigmask(SIG_SETMASK, &mask, nullptr); }
  } restore{previous};
  const uint64_t seen = job_.load(std::memory_order_relaxed);
  while (static_cast<int>(workers_.size()) < workers) {
    workers_.emplace_back(&ThreadPool::worker, this, static_cast<int>(workers_.size()), seen);
  }
}

void ThreadPool::worker(int index, uint64_t seen) {
  for (;;) {
    seen = wait_for_job(seen);
    if (index >= workers_of(seen)) continue;
    draw((index + 1) % 2);
    if (busy_workers_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      std::lock_guard<std::mutex> lock(mutex_);  // the caller either waits or has not checked yet
      job_done_.notify_one();
    }
  }
}

uint64_t ThreadPool::wait_for_job(uint64_t seen) {
  uint64_t job = seen;
  for (int i = 0; i < kSpins; ++i) {
    job = job_.load(std::memory_order_acquire);
    if (job != seen) return job;
    pause();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  job_posted_.wait(lock, [&] { return (job = job_.load(std::memory_order_acquire)) != seen; });
  return job;
}

void ThreadPool::draw(int first_part) {
  try {
    for (int turn = 0; turn < 2; ++turn) {
      Part& part = parts_[(first_part + turn) % 2];
      for (;;) {
        const int64_t index = part.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= part.end) break;
        call_(context_, index);
      }
    }
  } catch (...) {
    for (Part& part : parts_) part.next.store(part.end, std::memory_order_relaxed);
    std::lock_guard<std::mutex> lock(mutex_);
    if (error_ == nullptr) error_ = std::current_exception();
  }
}

}  // namespace prefixpack
