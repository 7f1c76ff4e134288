#include "cpu/executor.h"

#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/step.h"
#include "cpu/task.h"
#include "cpu/thread_pool.h"

namespace prefixpack {
namespace {

// Calls of fewer multiply-adds end before a second thread has woken up.
constexpr double kInlineWork = 1 << 18;

std::vector<const Kernels*> find_kernels() {
  std::vector<const Kernels*> found;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd")) {
    found.push_back(&kAvx512Kernels);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) {
    found.push_back(&kAvx2Kernels);
  }
#endif
  found.push_back(&kBaselineKernels);
  return found;
}

const std::vector<const Kernels*>& all_kernels() {
  static const std::vector<const Kernels*> kernels = find_kernels();
  return kernels;
}

const Kernels& kernels_for(const char* isa) {
  if (*isa == '\0') return *all_kernels().front();
  std::string known;
  for (const Kernels* kernels : all_kernels()) {
    if (std::strcmp(kernels->isa, isa) == 0) return *kernels;
    known += std::string(known.empty() ? "" : ", ") + kernels->isa;
  }
  throw std::invalid_argument("isa '" + std::string(isa) + "' is not available here; expected one of " + known);
}

thread_local Step step_of_caller;
thread_local Scratch scratch_of_thread;

}  // namespace

const char* const* supported_isas() {
  static const std::vector<const char*> names = [] {
    std::vector<const char*> found;
    for (const Kernels* kernels : all_kernels()) found.push_back(kernels->isa);
    found.push_back(nullptr);
    return found;
  }();
  return names.data();
}

void run_plan_cpu(const Plan& plan, const AttentionParams& params, int threads, const char* isa) {
  const Kernels& kernels = kernels_for(isa);
  Step& step = step_of_caller;
  step.lay_out(plan, params, threads);
  if (step.multiply_adds < kInlineWork) threads = 1;
  ThreadPool& pool = ThreadPool::instance();
  const auto count = static_cast<int64_t>(step.chunks.size());
  const auto task_of = [&](const WorkChunk& chunk, int32_t head) {
    const WorkItem& item = plan.items[chunk.item];
    ItemTask task;
    task.plan = &plan;
    task.params = &params;
    task.item = &item;
    task.positions = step.positions.data();
    task.slots = params.req_to_token + params.req_pool_indices[item.request] * params.req_to_token_stride;
    task.kv_head = chunk.first_head + head;
    task.kv_begin = step.ranges[chunk.item].begin;
    task.kv_end = step.ranges[chunk.item].end;
    task.next = nullptr;
    return task;
  };
  const bool mixed = step.compute_bound_chunks > 0 && step.compute_bound_chunks < count;
  const int competing_threads = mixed ? (threads + 1) / 2 : threads;
  pool.run(count, step.compute_bound_chunks, threads, [&](int64_t index) {
    const WorkChunk& chunk = step.chunks[index];
    ItemTask task = task_of(chunk, 0);
    for (int32_t head = 1; head < chunk.head_count; ++head) {
      const ItemTask next = task_of(chunk, head);
      task.next = &next;
      kernels.run_item(task, scratch_of_thread);
      task = next;
    }
    // Threads that share a queue take one chunk each before this thread takes its next, if chunks are alike. If not,
    // the prefetch is wasted.
    const int64_t next_index = index + competing_threads;
    if (next_index < count) {
      const ItemTask next = task_of(step.chunks[next_index], 0);
      task.next = &next;
      return kernels.run_item(task, scratch_of_thread);
    }
    kernels.run_item(task, scratch_of_thread);
  });
  const auto combines = static_cast<int64_t>(plan.combine_query.size());
  pool.run(combines, combines, threads,
           [&](int64_t index) { kernels.combine_query(plan, params, static_cast<int32_t>(index)); });
}

}  // namespace prefixpack
