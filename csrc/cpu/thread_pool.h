// Persistent worker threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace prefixpack {

class ThreadPool {
 public:
  // The process's pool. A forked child gets a new one, because threads do not survive a fork.
  static ThreadPool& instance();

  // Calls body(index) for every index in [0, count) on `threads` threads, the caller included. Every other thread
  // starts with the indices from `split` on, and continues with those before it: compute-bound and memory-bound work
  // then overlap. Runs inline with threads <= 1. The first exception stops the job and is rethrown to the caller.
  // Concurrent callers wait for each other.
  template <typename Body>
  void run(int64_t count, int64_t split, int threads, const Body& body) {
    if (threads <= 1 || count <= 1) {
      for (int64_t i = 0; i < count; ++i) body(i);
      return;
    }
    run_on_workers(
        count, split, threads, [](const void* context, int64_t i) { (*static_cast<const Body*>(context))(i); }, &body);
  }

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

 private:
  using Call = void (*)(const void* context, int64_t index);

  ThreadPool() = default;
  ~ThreadPool() = delete;  // lives as long as the process

  void run_on_workers(int64_t count, int64_t split, int threads, Call call, const void* context);
  void grow(int workers);
  void worker(int index, uint64_t seen);
  uint64_t wait_for_job(uint64_t seen);
  void draw(int first_part);

  std::mutex callers_;
  std::vector<std::thread> workers_;

  // Indices of the running job on each side of `split`.
  struct alignas(64) Part {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  // The running job. Constant, except for the indices, while a worker runs it.
  Call call_ = nullptr;
  const void* context_ = nullptr;
  Part parts_[2];
  std::atomic<int> busy_workers_{0};
  std::exception_ptr error_;

  // Job number in the upper bits, its number of workers in the lower: a worker beyond that number must not touch the
  // job, so both are read at once.
  std::atomic<uint64_t> job_{0};
  std::mutex mutex_;  // guards sleeping, and error_
  std::condition_variable job_posted_;
  std::condition_variable job_done_;
};

}  // namespace prefixpack
