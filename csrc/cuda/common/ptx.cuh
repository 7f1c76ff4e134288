// Wrappers of the PTX instructions that the kernels use. Tests replace this header by an emulation on the CPU.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#define PREFIXPACK_DEVICE __device__ __forceinline__
#define PREFIXPACK_DEVICE_CALL inline __device__ __noinline__

namespace prefixpack::ptx {

PREFIXPACK_DEVICE int thread_index() {
  const int index = static_cast<int>(threadIdx.x);
  __builtin_assume(index >= 0 && index < 1024);  // lets the compiler use one instruction for remainders instead of four
  return index;
}
// thread_index(), read again here. Keeps values derived from it out of long-lived registers.
PREFIXPACK_DEVICE int volatile_thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  __builtin_assume(index >= 0 && index < 1024);
  return index;
}
// A copy that the compiler cannot hoist above this point.
PREFIXPACK_DEVICE int32_t opaque(int32_t value) {
  int32_t copy;
  asm volatile("mov.b32 %0, %1;" : "=r"(copy) : "r"(value));
  return copy;
}
PREFIXPACK_DEVICE int cta_index() { return static_cast<int>(blockIdx.x); }
PREFIXPACK_DEVICE int cta_size() { return static_cast<int>(blockDim.x); }
PREFIXPACK_DEVICE int grid_size() { return static_cast<int>(gridDim.x); }
// The warp reconverges first. After a call its lanes may return one by one, and each diverged part would arrive at the
// barrier as a warp of its own.
PREFIXPACK_DEVICE void cta_sync() {
  __syncwarp();
  __syncthreads();
}
// Barrier and logical OR over the CTA.
PREFIXPACK_DEVICE bool cta_any(bool predicate) {
  __syncwarp();
  return __syncthreads_or(predicate) != 0;
}
// Atomic increment; returns the old value. Called by the first lane of a warp. Adding the lane index to the address
// keeps the compiler from aggregating the warp's increments, after which all lanes would wait for the result.
PREFIXPACK_DEVICE int32_t atomic_increment(int32_t* address) {
  int32_t before;
  asm volatile("atom.add.relaxed.gpu.global.s32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(address + volatile_thread_index() % 32));
  return before;
}
// Like atomic_increment(), but a value of `last` becomes 0.
PREFIXPACK_DEVICE int32_t atomic_increment_or_reset(int32_t* address, int32_t last) {
  int32_t before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(address + volatile_thread_index() % 32), "r"(last)
               : "memory");
  return before;
}
// Like atomic_increment_or_reset(), without an answer.
PREFIXPACK_DEVICE void increment_or_reset(int32_t* address, int32_t last) {
  asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(address + volatile_thread_index() % 32), "r"(last)
               : "memory");
}
PREFIXPACK_DEVICE float shuffle_xor(float value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
PREFIXPACK_DEVICE int32_t shuffle_xor(int32_t value, int lane_mask) {
  return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}
template <class T>
PREFIXPACK_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
// A copy that stays in its register: the assembler does not see what it is. What follows from special registers it
// would compute wherever it is used, to save the register, and reading one takes tens of cycles. Called by all lanes.
template <class T>
PREFIXPACK_DEVICE T kept(T value) {
  return shuffle(value, volatile_thread_index() % 32);
}
// Shuffle within each `Lanes` lanes.
template <int Lanes, class T>
PREFIXPACK_DEVICE T shuffle_in(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane, Lanes);
}
PREFIXPACK_DEVICE bool any(bool predicate) { return __any_sync(0xffffffffu, predicate); }
// A warp-uniform condition, and a broadcast, in a form that the compiler recognizes as uniform. Otherwise every shuffle
// behind such a branch gets code for diverged lanes: two fifths of a kernel.
PREFIXPACK_DEVICE bool uniform(bool condition) { return any(condition); }
PREFIXPACK_DEVICE int32_t broadcast(int32_t value, int lane) {
  const bool mine = thread_index() % 32 == lane;
  return static_cast<int32_t>(__reduce_or_sync(0xffffffffu, mine ? static_cast<uint32_t>(value) : 0u));
}
// Maximum of all lanes' values. Integers of this order have an instruction for it.
PREFIXPACK_DEVICE float warp_max(float value) {
  const int bits = __float_as_int(value);
  const int max = __reduce_max_sync(0xffffffffu, bits ^ (bits >> 31 & 0x7fffffff));
  return __int_as_float(max ^ (max >> 31 & 0x7fffffff));
}
PREFIXPACK_DEVICE void warp_sync() { __syncwarp(); }
// Release at GPU scope: orders the writes of this thread, and those of threads that it met at a barrier, before the
// sum.
PREFIXPACK_DEVICE int32_t atomic_add_release(int32_t* address, int32_t value) {
  int32_t before;
  asm volatile("atom.add.release.gpu.global.s32 %0, [%1], %2;" : "=r"(before) : "l"(address), "r"(value) : "memory");
  return before;
}
// Relaxed GPU-scope loads, for results that other CTAs wrote during this launch.
//
// Partials are read behind a relaxed read of their semaphore and a barrier. That is deliberately weaker than the PTX
// memory model asks for: without an acquire the writer's release synchronizes with nothing. An acquire load or fence
// would invalidate the SM's whole L1 for every work tile. The code relies on three properties of the hardware:
// - A load behind a branch or barrier that depends on the semaphore's value is issued after that value has arrived.
// - These loads, and cp.async.cg, read the L2, and no other load of a launch reads partials. So no L1 has an old one.
// - What a release at GPU scope orders is in the L2 before its atomic.
// Tested by results only, on an H100 and an H200: outputs of tests/cuda/test_gpu_kernels.py and of the batches of
// benchmarks/kernel are compared with references. The CPU emulation does not reorder memory. There is no litmus test.
PREFIXPACK_DEVICE int32_t load_relaxed(const int32_t* address) {
  int32_t value;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}
PREFIXPACK_DEVICE float load_relaxed(const float* address) {
  float value;
  asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(value) : "l"(address) : "memory");
  return value;
}
PREFIXPACK_DEVICE void load_relaxed(const float* address, float (&out)[4]) {
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
               : "l"(address)
               : "memory");
}
// Generic address: global memory, as above, or shared memory.
PREFIXPACK_DEVICE void load_relaxed_generic(const float* address, float (&out)[4]) {
  asm volatile("ld.relaxed.gpu.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
               : "l"(address)
               : "memory");
}
// Waits until other CTAs or warps of this launch have counted the semaphore up to `least`. Called by all lanes.
PREFIXPACK_DEVICE void wait_at_least(const int32_t* semaphore, int32_t least) {
#pragma unroll 1
  while (any(load_relaxed(semaphore) < least)) __nanosleep(20);
}
// Brings a line to the L2.
PREFIXPACK_DEVICE void prefetch_l2(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
PREFIXPACK_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
// a * b + c * d without fma, so that exchanging the pairs gives the same bits.
PREFIXPACK_DEVICE float sum_of_products(float a, float b, float c, float d) {
  return __fadd_rn(__fmul_rn(a, b), __fmul_rn(c, d));
}
PREFIXPACK_DEVICE void store_pair(float* address, float left, float right) {
  *reinterpret_cast<float2*>(address) = make_float2(left, right);
}
PREFIXPACK_DEVICE void store_quad(float* address, const float (&quad)[4]) {
  *reinterpret_cast<float4*>(address) = make_float4(quad[0], quad[1], quad[2], quad[3]);
}
PREFIXPACK_DEVICE void load_quad(const float* address, float (&quad)[4]) {
  const float4 value = *reinterpret_cast<const float4*>(address);
  quad[0] = value.x, quad[1] = value.y, quad[2] = value.z, quad[3] = value.w;
}
PREFIXPACK_DEVICE void store_words(uint16_t* address, uint32_t low, uint32_t high) {
  *reinterpret_cast<uint2*>(address) = make_uint2(low, high);
}
// Programmatic dependent launch: lets the next kernel of the stream start; waits for the previous kernel's end.
PREFIXPACK_DEVICE void pdl_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
PREFIXPACK_DEVICE void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
PREFIXPACK_DEVICE float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PREFIXPACK_DEVICE float max(float a, float b) { return fmaxf(a, b); }
PREFIXPACK_DEVICE float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PREFIXPACK_DEVICE float log2(float x) { return __log2f(x); }

// 32-bit shared-memory address.
using SharedAddress = uint32_t;
PREFIXPACK_DEVICE SharedAddress shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

PREFIXPACK_DEVICE void store_shared(SharedAddress address, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(value) : "memory");
}
PREFIXPACK_DEVICE void store_shared_pair(SharedAddress address, float low, float high) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(low), "f"(high) : "memory");
}
PREFIXPACK_DEVICE void load_shared(SharedAddress address, uint32_t (&out)[2]) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(out[0]), "=r"(out[1]) : "r"(address) : "memory");
}
PREFIXPACK_DEVICE void load_shared(SharedAddress address, uint32_t (&out)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}
PREFIXPACK_DEVICE void store_shared(SharedAddress address, const uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(words[0]), "r"(words[1]), "r"(words[2]),
               "r"(words[3])
               : "memory");
}
PREFIXPACK_DEVICE void store_shared(SharedAddress address, const float (&quad)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(quad[0]), "f"(quad[1]), "f"(quad[2]),
               "f"(quad[3])
               : "memory");
}
PREFIXPACK_DEVICE void load_shared(SharedAddress address, float (&out)[4]) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(out[0]), "=f"(out[1]), "=f"(out[2]), "=f"(out[3])
               : "r"(address)
               : "memory");
}

// Copies 16 bytes from global to shared memory; writes zeros where `valid` is false.
PREFIXPACK_DEVICE void cp_async(SharedAddress shared, const void* global, bool valid) {
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
PREFIXPACK_DEVICE void cp_async(SharedAddress shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
PREFIXPACK_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
PREFIXPACK_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements; lane i addresses row i % 8 of matrix i / 8.
PREFIXPACK_DEVICE void ldmatrix(uint32_t (&out)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row)
               : "memory");
}
PREFIXPACK_DEVICE void ldmatrix_transposed(uint32_t (&out)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row)
               : "memory");
}

// Transposes an 8x8 matrix of 16-bit elements; a lane holds two neighbours of a row.
PREFIXPACK_DEVICE uint32_t movmatrix_transposed(uint32_t pair) {
  uint32_t out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
  return out;
}

// base + index * stride (bytes), as one 64-bit multiply-add.
PREFIXPACK_DEVICE const char* at(const char* base, int32_t index, int32_t stride) {
  const char* result;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(result) : "r"(index), "r"(stride), "l"(base));
  return result;
}

struct BFloat16 {
  static PREFIXPACK_DEVICE uint32_t pack(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  // Values beyond fp16's range become its largest finite value.
  static PREFIXPACK_DEVICE uint32_t to_fp16(uint32_t pair) {
    uint32_t result;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;"
        : "=r"(result)
        : "f"(__uint_as_float(pair & 0xffff0000u)), "f"(__uint_as_float(pair << 16)));
    return result;
  }
};
struct Float16 {
  static PREFIXPACK_DEVICE uint32_t pack(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  static PREFIXPACK_DEVICE uint32_t to_fp16(uint32_t pair) { return pair; }
};

// Reorders the bytes of a word to 0, 2, 1, 3.
PREFIXPACK_DEVICE uint32_t even_bytes_first(uint32_t word) { return __byte_perm(word, 0, 0x3120); }

// Converts four e4m3 values to two fp16 pairs. Before compute capability 8.9, which has an instruction for it, NaN
// becomes 480.
PREFIXPACK_DEVICE void fp8_to_fp16(uint32_t word, uint32_t& low, uint32_t& high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high;}"
      : "=r"(low), "=r"(high)
      : "r"(word));
#else
  // Exponent and mantissa in fp16's fields are too small by 2^8, subnormals included.
  const auto convert = [](uint32_t bytes) {
    const uint32_t bits = (bytes & 0x80008000u) | (bytes >> 1 & 0x3f803f80u);
    const __half2 result = __hmul2(*reinterpret_cast<const __half2*>(&bits), __half2half2(__ushort_as_half(0x5c00)));
    return *reinterpret_cast<const uint32_t*>(&result);
  };
  low = convert(__byte_perm(word, 0, 0x1404));
  high = convert(__byte_perm(word, 0, 0x3424));
#endif
}

// c += a * b with a 16x16 (row major), b 16x8 (column major), c 16x8 in fp32.
template <class Element>
PREFIXPACK_DEVICE void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
PREFIXPACK_DEVICE void mma<BFloat16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
PREFIXPACK_DEVICE void mma<Float16>(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace prefixpack::ptx
