// Interface between the executor and the kernels of one instruction set.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

#include "plan/params.h"
#include "plan/plan.h"

namespace prefixpack {

// A thread's scratch buffer. It grows to the largest item's need and is reused by later calls.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // `count` floats aligned to a cache line; contents are undefined.
  float* floats(size_t count) {
    if (count > capacity_) {
      std::free(data_);
      data_ = nullptr;
      capacity_ = 0;
      const size_t bytes = (count * sizeof(float) + kAlignment - 1) / kAlignment * kAlignment;
      void* fresh = std::aligned_alloc(kAlignment, bytes);
      if (fresh == nullptr) throw std::bad_alloc();
      data_ = static_cast<float*>(fresh);
      capacity_ = count;
    }
    return data_;
  }

 private:
  static constexpr size_t kAlignment = 64;
  float* data_ = nullptr;
  size_t capacity_ = 0;
};

// One work item for one KV head.
struct ItemTask {
  const Plan* plan;
  const AttentionParams* params;
  const WorkItem* item;
  const int32_t* positions;  // [plan->num_queries]
  const int32_t* slots;      // req_to_token row: KV slot by position
  int32_t kv_head;
  int32_t kv_begin;  // visible part of the item's range; empty if there is none
  int32_t kv_end;
  const ItemTask* next;  // likely next task of this thread, for prefetching; or nullptr
};

struct Kernels {
  const char* isa;
  void (*run_item)(const ItemTask& task, Scratch& scratch);
  // Combines entry `combine` of Plan::combine_query, all query heads.
  void (*combine_query)(const Plan& plan, const AttentionParams& params, int32_t combine);
};

// Constant-initialized: no code of these translation units runs on a machine without the instructions.
#if defined(__x86_64__)
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx2Kernels;
#endif
extern const Kernels kBaselineKernels;

}  // namespace prefixpack
