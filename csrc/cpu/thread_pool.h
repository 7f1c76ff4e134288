// Threads that outlive the calls they serve.
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
  // The process's pool. A forked child gets a fresh one, because threads do not survive a fork.
  static ThreadPool& instance();

  // Calls body(index) for every index in [0, count), indices being drawn by `threads` threads, the caller among them.
  // Every other thread begins with the indices from `split` on, and turns to those before it when there are no more:
  // for work of two kinds that is better done at the same time than one after the other. Runs inline with threads <= 1.
  // The first exception ends the drawing and is thrown to the caller. Callers queue up.
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

  // Indices of the running job on either side of `split`.
  struct alignas(64) Part {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };

  // The running job; constant, but for what is drawn, while any of its workers is at it.
  Call call_ = nullptr;
  const void* context_ = nullptr;
  Part parts_[2];
  std::atomic<int> busy_workers_{0};
  std::exception_ptr error_;

  // Job number in the upper bits, number of workers it is for in the lower: a worker that is not meant must not touch
  // the job, so both have to be seen together.
  std::atomic<uint64_t> job_{0};
  std::mutex mutex_;  // guards sleeping, and error_
  std::condition_variable job_posted_;
  std::condition_variable job_done_;
};

}  // namespace prefixpack
