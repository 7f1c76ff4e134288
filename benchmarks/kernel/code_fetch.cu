// How long a GPU takes for code that its caches do not hold, as a layer's kernels find it: straight code in steps of
// 4 KiB, with the time that each takes.
//
//     nvcc -O3 -std=c++17 -arch=sm_90a -o code_fetch benchmarks/kernel/code_fetch.cu && ./code_fetch code_fetch.json
//
// Before each run 192 KiB of other code are run and the L2 is written and read over. Cases: a kernel by itself, and one
// that is launched behind another (programmatic dependent launch), which lets it begin at once or so many microseconds
// later. Medians of one SM; needs compute capability 9.0.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

namespace {

constexpr int kStepBytes = 4096, kMostSteps = 64, kRuns = 15, kProbed = 60;  // the block that is looked at
constexpr int kFlushWords = 64 << 20;
constexpr int kSharedForTwo = 60 << 10, kSharedForOne = 200 << 10;  // of a block: what fits on an SM

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "code_fetch: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

__device__ __forceinline__ long long nanoseconds() {
  long long time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

template <int Times>
__device__ __forceinline__ void four_instructions(float (&x)[4]) {
  if constexpr (Times > 0) {
    asm volatile(
        "fma.rn.f32 %0, %0, %0, %1;\n fma.rn.f32 %1, %1, %1, %2;\n"
        "fma.rn.f32 %2, %2, %2, %3;\n fma.rn.f32 %3, %3, %3, %0;"
        : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]));
    four_instructions<Times - 1>(x);
  }
}

__device__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Steps * 4 KiB of code. next_after: microseconds until the next launch may begin. stays: until this one ends.
// Id: so that no two kernels of a case are the same.
template <int Steps, int Id>
__global__ void __launch_bounds__(32) straight(float* sink, long long* times, int next_after, int stays) {
  extern __shared__ long long begin[];
  const long long start = nanoseconds();
  if (next_after == 0) let_next_begin();
  float x[4] = {static_cast<float>(threadIdx.x), Id, 2, 3};
#pragma unroll
  for (int step = 0; step < Steps; ++step) {
    if (threadIdx.x == 0) begin[step] = nanoseconds();
    four_instructions<61>(x);
  }
  if (threadIdx.x == 0) {
    begin[Steps] = nanoseconds();
    for (int step = 0; step <= Steps; ++step) times[blockIdx.x * (kMostSteps + 1) + step] = begin[step];
  }
  while (nanoseconds() - start < next_after * 1000ll) {
  }
  let_next_begin();
  while (nanoseconds() - start < stays * 1000ll) {
  }
  sink[blockIdx.x * 32 + threadIdx.x] = x[0] + x[1] + x[2] + x[3];
}

__global__ void write_all(int* to, int value) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kFlushWords; i += gridDim.x * blockDim.x) to[i] = value;
}
__global__ void read_all(const int* from, int* sink) {
  int sum = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < kFlushWords; i += gridDim.x * blockDim.x) sum += from[i];
  if (sum == 1) *sink = sum;
}

struct Probe {
  int blocks;
  float* sink;
  long long *times, *other_times;
  int *written, *read;
  std::string rows;

  template <class Kernel>
  void launch(Kernel kernel, long long* to, int next_after, int stays, int shared) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
    cudaLaunchAttribute behind{};
    behind.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    behind.val.programmaticStreamSerializationAllowed = to == times;
    cudaLaunchConfig_t config{};
    config.gridDim = blocks;
    config.blockDim = 32;
    config.dynamicSmemBytes = shared;
    config.attrs = &behind;
    config.numAttrs = 1;
    check(cudaLaunchKernelEx(&config, kernel, sink, to, next_after, stays), "launch");
  }

  // run: launches, the last of which writes `times`, with `steps` steps.
  void measure(const char* name, int steps, const std::function<void()>& run) {
    std::vector<std::vector<double>> all(steps);
    std::vector<long long> begin(kMostSteps + 1);
    for (int i = 0; i < kRuns; ++i) {
      launch(straight<48, 9>, other_times, 0, 0, kSharedForTwo);
      check(cudaDeviceSynchronize(), "other code");
      write_all<<<1024, 256>>>(written, i);
      read_all<<<1024, 256>>>(read, written);
      check(cudaDeviceSynchronize(), "flush");
      run();
      check(cudaDeviceSynchronize(), name);
      check(cudaMemcpy(begin.data(), times + kProbed * (kMostSteps + 1), begin.size() * sizeof(long long),
                       cudaMemcpyDeviceToHost),
            "cudaMemcpy");
      for (int step = 0; step < steps; ++step) all[step].push_back((begin[step + 1] - begin[step]) / 1e3);
    }
    std::printf("%-44s", name);
    rows += (rows.empty() ? "" : ",\n  ") + ("{\"case\": \"" + std::string(name) + "\", \"us\": [");
    for (int step = 0; step < steps; ++step) {
      std::nth_element(all[step].begin(), all[step].begin() + kRuns / 2, all[step].end());
      std::printf(" %.2f", all[step][kRuns / 2]);
      char number[32];
      std::snprintf(number, sizeof(number), "%s%.3f", step == 0 ? "" : ", ", all[step][kRuns / 2]);
      rows += number;
    }
    std::printf("\n");
    rows += "]}";
  }

  template <int First, int Second>
  void pair(const char* name, int next_after, int shared) {
    measure(name, Second, [this, next_after, shared] {
      launch(straight<First, 1>, other_times, next_after, 40, shared);
      launch(straight<Second, 2>, times, 0, 0, shared);
    });
  }
};

}  // namespace

int main(int count, char** arguments) {
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0), "no GPU");
  if (device.major < 9 || device.multiProcessorCount <= kProbed) {
    std::fprintf(stderr, "code_fetch: needs compute capability 9.0 and more than %d SMs\n", kProbed);
    return 1;
  }
  Probe probe{device.multiProcessorCount};
  const size_t time_bytes = sizeof(long long) * (kMostSteps + 1) * probe.blocks;
  check(cudaMalloc(&probe.sink, 32 * sizeof(float) * probe.blocks), "cudaMalloc");
  check(cudaMalloc(&probe.times, time_bytes), "cudaMalloc");
  check(cudaMalloc(&probe.other_times, time_bytes), "cudaMalloc");
  check(cudaMalloc(&probe.written, sizeof(int) * kFlushWords), "cudaMalloc");
  check(cudaMalloc(&probe.read, sizeof(int) * kFlushWords), "cudaMalloc");
  check(cudaMemset(probe.read, 0, sizeof(int) * kFlushWords), "cudaMemset");
  std::printf("%s: microseconds for each 4 KiB of code\n", device.name);

  probe.measure("128 KiB by itself", 32, [&] { probe.launch(straight<32, 3>, probe.times, 0, 0, kSharedForTwo); });
  probe.pair<5, 10>("40 KiB at once beside 20", 0, kSharedForTwo);
  probe.pair<10, 10>("40 KiB at once beside 40", 0, kSharedForTwo);
  probe.pair<15, 10>("40 KiB at once beside 60", 0, kSharedForTwo);
  probe.pair<15, 10>("40 KiB at once, but behind 60", 0, kSharedForOne);
  for (int late : {1, 2, 3, 5, 10}) {
    const std::string name = "40 KiB beside 60, " + std::to_string(late) + " us later";
    probe.pair<15, 10>(name.c_str(), late, kSharedForTwo);
  }
  if (count > 1) {
    std::FILE* file = std::fopen(arguments[1], "w");
    if (file == nullptr) {
      std::fprintf(stderr, "code_fetch: cannot write %s\n", arguments[1]);
      return 1;
    }
    int runtime = 0;
    check(cudaRuntimeGetVersion(&runtime), "cudaRuntimeGetVersion");
    std::fprintf(file,
                 "{\n \"gpu\": \"%s\", \"cuda\": %d, \"step_bytes\": %d, \"runs\": %d,\n \"rows\": [\n  %s\n ]\n}\n",
                 device.name, runtime, kStepBytes, kRuns, probe.rows.c_str());
    std::fclose(file);
  }
  return 0;
}
