// What the probes share: a KV pool whose tokens lie in random slots, cold times, checksums and the result's JSON.
//
// A probe is a small program that decides whether a redesign of the kernels is worth building: it has the copies,
// barriers and waits of the redesign, and only those products that the question needs.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "cuda/common/ptx.cuh"
#include "reference.h"

namespace probe {

constexpr int kHeads = 8, kHeadDim = 128;        // KV heads; 32 query heads
constexpr int kRowBytes = kHeadDim * 2;          // K or V of a token and head, 16 bits
constexpr int kTokenBytes = kHeads * kRowBytes;  // K or V of a token
constexpr int kRuns = 31, kWarmUps = 1000, kFlushBytes = 256 << 20;

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

inline void require(bool condition, const std::string& what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

template <class T>
T* on_device(size_t count) {
  void* memory = nullptr;
  check(cudaMalloc(&memory, count * sizeof(T)), "cudaMalloc");
  check(cudaMemset(memory, 0, count * sizeof(T)), "cudaMemset");
  return static_cast<T*>(memory);
}
template <class T>
T* on_device(const std::vector<T>& values) {
  T* const memory = on_device<T>(std::max<size_t>(values.size(), 1));
  check(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return memory;
}
template <class T>
std::vector<T> on_host(const T* memory, size_t count) {
  std::vector<T> values(count);
  check(cudaMemcpy(values.data(), memory, count * sizeof(T), cudaMemcpyDeviceToHost), "cudaMemcpy");
  return values;
}

__global__ void fill(uint16_t* values, size_t count, uint32_t seed) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    values[i] = filled(static_cast<uint32_t>(i), seed);
  }
}

// K and V [tokens, kHeads, kHeadDim] in bf16; slots: tokens in random order.
struct Pool {
  char *k, *v;
  int32_t* slots;
  std::vector<int32_t> slots_on_host;

  explicit Pool(int32_t tokens) : slots_on_host(tokens) {
    const size_t bytes = size_t{kTokenBytes} * tokens;
    k = on_device<char>(bytes);
    v = on_device<char>(bytes);
    fill<<<1024, 256>>>(reinterpret_cast<uint16_t*>(k), bytes / 2, kSeedOfK);
    fill<<<1024, 256>>>(reinterpret_cast<uint16_t*>(v), bytes / 2, kSeedOfV);
    check(cudaDeviceSynchronize(), "fill");
    std::iota(slots_on_host.begin(), slots_on_host.end(), 0);
    std::shuffle(slots_on_host.begin(), slots_on_host.end(), std::mt19937(1));
    slots = on_device(slots_on_host);
  }
};

// 16-byte chunk of a thread's own: what keeps a copy alive, and what checksums are made of.
__device__ __forceinline__ uint32_t sum_of(const char* shared) {
  const uint4 words = *reinterpret_cast<const uint4*>(shared);
  return words.x + words.y + words.z + words.w;
}

// Sum of the words of some tokens, of all heads' K and V, `times[i]` times token i's.
__global__ void expected_sum(const char* k, const char* v, const int32_t* slots, const int32_t* times, int32_t tokens,
                             uint32_t* sum) {
  uint32_t mine = 0;
  for (int32_t i = blockIdx.x; i < tokens; i += gridDim.x) {
    for (const char* half : {k, v}) {
      const auto* words = reinterpret_cast<const uint32_t*>(half + int64_t{slots[i]} * kTokenBytes);
      for (int32_t word = threadIdx.x; word < kTokenBytes / 4; word += blockDim.x) mine += times[i] * words[word];
    }
  }
  atomicAdd(sum, mine);
}

inline uint32_t expected(const Pool& pool, const std::vector<int32_t>& times) {
  uint32_t* const sum = on_device<uint32_t>(1);
  int32_t* const on = on_device(times);
  expected_sum<<<1024, 256>>>(pool.k, pool.v, pool.slots, on, static_cast<int32_t>(times.size()), sum);
  const uint32_t found = on_host(sum, 1)[0];
  check(cudaFree(on), "cudaFree");
  check(cudaFree(sum), "cudaFree");
  return found;
}

__global__ void empty() {}
// Fills the L2 with lines that need no write-back.
__global__ void read_all(const uint4* from, size_t count, uint32_t* sink) {
  uint32_t sum = 0;
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count; i += size_t{gridDim.x} * blockDim.x) {
    sum += from[i].x;
  }
  if (sum == 1) *sink = sum;
}

// Microseconds of a captured graph with a cold L2: between two events, so a few of them are no kernel's. As in
// sgl_prefix_attn/calibration/kernels/timing.py, one buffer is written and another is read before.
class ColdTimer {
 public:
  ColdTimer()
      : written_(on_device<uint4>(kFlushBytes / sizeof(uint4))),
        read_(on_device<uint4>(kFlushBytes / sizeof(uint4))),
        sink_(on_device<uint32_t>(1)) {
    check(cudaStreamCreate(&stream_), "cudaStreamCreate");
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
    for (int i = 0; i < kWarmUps; ++i) flush();  // clocks rise before the first time is taken
    empty_us_ = median_us([this] { empty<<<1, 32, 0, stream_>>>(); });
  }
  cudaStream_t stream() const { return stream_; }
  double empty_us() const { return empty_us_; }

  // launches: kernels on stream().
  double median_us(const std::function<void()>& launches) {
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "capture");
    launches();
    check(cudaStreamEndCapture(stream_, &graph), "capture");
    check(cudaGraphInstantiate(&ready, graph, 0), "graph");
    std::vector<float> times;
    for (int run = 0; run < kRuns; ++run) {
      flush();
      check(cudaEventRecord(begin_, stream_), "event");
      check(cudaGraphLaunch(ready, stream_), "launch");
      check(cudaEventRecord(end_, stream_), "event");
      check(cudaStreamSynchronize(stream_), "run");
      float milliseconds = 0;
      check(cudaEventElapsedTime(&milliseconds, begin_, end_), "event");
      times.push_back(milliseconds * 1e3f);
    }
    check(cudaGraphExecDestroy(ready), "graph");
    check(cudaGraphDestroy(graph), "graph");
    std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
    return times[kRuns / 2];
  }

 private:
  void flush() const {
    check(cudaMemsetAsync(written_, 1, kFlushBytes, stream_), "flush");
    read_all<<<1024, 256, 0, stream_>>>(read_, kFlushBytes / sizeof(uint4), sink_);
    check(cudaGetLastError(), "flush");
  }

  uint4 *written_, *read_;
  uint32_t* sink_;
  cudaStream_t stream_{};
  cudaEvent_t begin_{}, end_{};
  double empty_us_ = 0;
};

// Launches a kernel; behind: beside the one before it (programmatic dependent launch); cluster: CTAs of a cluster.
template <class... Parameters, class... Arguments>
void launch(cudaStream_t stream, void (*kernel)(Parameters...), int ctas, int threads, int shared, bool behind,
            int cluster, Arguments... arguments) {
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
  // Otherwise a kernel may leave so little shared memory that another one cannot run beside it.
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared),
        "cudaFuncSetAttribute");
  cudaLaunchAttribute attributes[2]{};
  int count = 0;
  if (behind) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = cluster;
    attributes[count].val.clusterDim.y = attributes[count].val.clusterDim.z = 1;
    ++count;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = ctas;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  check(cudaLaunchKernelEx(&config, kernel, arguments...), "launch");
}

// Rows of a result: {"case": ..., name: number, ...}.
class Report {
 public:
  explicit Report(const char* probe) : probe_(probe) {
    check(cudaGetDeviceProperties(&device_, 0), "no GPU");
    require(device_.major == 9, probe_ + ": needs compute capability 9.0");
  }
  int sms() const { return device_.multiProcessorCount; }
  void add(const std::string& name, const std::vector<std::pair<std::string, double>>& values) {
    std::printf("%-44s", name.c_str());
    rows_ += (rows_.empty() ? "  {" : ",\n  {") + ("\"case\": \"" + name + "\"");
    for (const auto& [key, value] : values) {
      std::printf("  %s %.2f", key.c_str(), value);
      char text[64];
      std::snprintf(text, sizeof(text), ", \"%s\": %.3f", key.c_str(), value);
      rows_ += text;
    }
    std::printf("\n");
    std::fflush(stdout);
    rows_ += "}";
  }
  void write(const char* path) const {
    std::FILE* const file = std::fopen(path, "w");
    require(file != nullptr, probe_ + ": cannot write " + path);
    int runtime = 0;
    check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    std::fprintf(file, "{\n \"probe\": \"%s\", \"gpu\": \"%s\", \"cuda\": %d, \"runs\": %d,\n \"rows\": [\n%s\n ]\n}\n",
                 probe_.c_str(), device_.name, runtime, kRuns, rows_.c_str());
    std::fclose(file);
  }

 private:
  std::string probe_, rows_;
  cudaDeviceProp device_{};
};

}  // namespace probe
