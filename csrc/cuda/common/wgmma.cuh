// Warpgroup MMA (wgmma, sm_90a only): asynchronous, second operand in shared memory. Tests replace this header by an
// emulation on the CPU.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/common/ptx.cuh"

#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define PREFIXPACK_WARPGROUP_PRODUCTS
#endif

namespace prefixpack::ptx {

// Shared-memory operand: rows of 128 bytes in the 128-byte swizzle (`swizzled_offset` with rows of 128 bytes). Eight
// rows at a multiple of 1024 bytes are an atom.
struct SmemDescriptor {
  uint32_t low, high;
  PREFIXPACK_DEVICE uint64_t word() const { return static_cast<uint64_t>(high) << 32 | low; }
};

// stride: bytes between atoms of consecutive groups of eight rows. leading: bytes between atoms of consecutive groups
// of 64 elements of the same rows; used for the transposed operand only.
PREFIXPACK_DEVICE SmemDescriptor smem_descriptor(SharedAddress address, int32_t leading, int32_t stride) {
  return {static_cast<uint32_t>(leading >> 4) << 16 | (address & 0x3ffff) >> 4,
          uint32_t{1} << 30 | static_cast<uint32_t>(stride >> 4)};
}
// Descriptor of the matrix `bytes` further on, a multiple of 16.
PREFIXPACK_DEVICE SmemDescriptor advance(SmemDescriptor matrix, int32_t bytes) {
  return {matrix.low + static_cast<uint32_t>(bytes >> 4), matrix.high};
}

// Makes this thread's shared-memory writes and completed cp.async visible to wgmma issued behind the next barrier.
PREFIXPACK_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Orders register writes before the wgmma that read or accumulate them.
PREFIXPACK_DEVICE void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
PREFIXPACK_DEVICE void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
PREFIXPACK_DEVICE void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// The compiler does not know that a pending wgmma writes these registers; this keeps their uses behind the wait.
template <int Blocks>
PREFIXPACK_DEVICE void wgmma_fence_operand(float (&fragment)[Blocks][4]) {
#pragma unroll
  for (int32_t i = 0; i < 4 * Blocks; ++i) asm volatile("" : "+f"(fragment[i / 4][i % 4])::"memory");
}

template <int Steps>
PREFIXPACK_DEVICE void wgmma_fence_operand(uint32_t (&fragment)[Steps][4]) {
#pragma unroll
  for (int32_t i = 0; i < 4 * Steps; ++i) asm volatile("" : "+r"(fragment[i / 4][i % 4])::"memory");
}

// Registers of the accumulators, four to a block of eight columns.
#define PREFIXPACK_4(how, c) how(c[0]), how(c[1]), how(c[2]), how(c[3])
#define PREFIXPACK_16(how, c, i) \
  PREFIXPACK_4(how, c[i]), PREFIXPACK_4(how, c[i + 1]), PREFIXPACK_4(how, c[i + 2]), PREFIXPACK_4(how, c[i + 3])
#define PREFIXPACK_32(how, c, i) PREFIXPACK_16(how, c, i), PREFIXPACK_16(how, c, i + 4)
#define PREFIXPACK_64(how, c, i) PREFIXPACK_32(how, c, i), PREFIXPACK_32(how, c, i + 8)
#define PREFIXPACK_128(how, c, i) PREFIXPACK_64(how, c, i), PREFIXPACK_64(how, c, i + 16)
#define PREFIXPACK_D16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define PREFIXPACK_D32 PREFIXPACK_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define PREFIXPACK_D64                                                                                     \
  PREFIXPACK_D32                                                                                           \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define PREFIXPACK_D128                                                                                              \
  PREFIXPACK_D64                                                                                                     \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, " \
  "%86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                                                               \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, "   \
  "%115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define PREFIXPACK_WGMMA_KEYS(type, columns, d, a_at, b_at, add, ...)                                    \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add ", 0;\nwgmma.mma_async.sync.aligned.m64n" columns \
               "k16.f32." type "." type " {" d "}, " a_at ", " b_at ", p, 1, 1, 0, 0;\n}"                \
               : __VA_ARGS__                                                                             \
               : "l"(a.word()), "l"(b.word())                                                            \
               : "memory")
#define PREFIXPACK_WGMMA_32_KEYS(type, how, add) \
  PREFIXPACK_WGMMA_KEYS(type, "32", PREFIXPACK_D16, "%16", "%17", add, PREFIXPACK_16(how, c, 0))
#define PREFIXPACK_WGMMA_64_KEYS(type, how, add) \
  PREFIXPACK_WGMMA_KEYS(type, "64", PREFIXPACK_D32, "%32", "%33", add, PREFIXPACK_32(how, c, 0))
#define PREFIXPACK_WGMMA_ANY_KEYS(keys)                  \
  if constexpr (std::is_same_v<Element, BFloat16>) {     \
    if constexpr (Add) {                                 \
      PREFIXPACK_WGMMA_##keys##_KEYS("bf16", "+f", "1"); \
    } else {                                             \
      PREFIXPACK_WGMMA_##keys##_KEYS("bf16", "=f", "0"); \
    }                                                    \
  } else {                                               \
    if constexpr (Add) {                                 \
      PREFIXPACK_WGMMA_##keys##_KEYS("f16", "+f", "1");  \
    } else {                                             \
      PREFIXPACK_WGMMA_##keys##_KEYS("f16", "=f", "0");  \
    }                                                    \
  }

// c = a * b, or c += a * b with Add: a 64x16, b 16 by 32 or 64 keys, both K-major. The fragments of c are those of
// mma.m16n8k16, 16 rows per warp.
template <class Element, bool Add>
PREFIXPACK_DEVICE void wgmma(float (&c)[4][4], SmemDescriptor a, SmemDescriptor b) {
  PREFIXPACK_WGMMA_ANY_KEYS(32)
}
template <class Element, bool Add>
PREFIXPACK_DEVICE void wgmma(float (&c)[8][4], SmemDescriptor a, SmemDescriptor b){PREFIXPACK_WGMMA_ANY_KEYS(64)}
#define PREFIXPACK_WGMMA_VALUES(type, columns, d, a0, a1, a2, a3, b_at, ...)                                       \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type \
               "." type " {" d "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b_at ", p, 1, 1, 1;\n}"                     \
               : __VA_ARGS__                                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.word())                                         \
               : "memory")
#define PREFIXPACK_WGMMA_64_VALUES(type) \
  PREFIXPACK_WGMMA_VALUES(type, "64", PREFIXPACK_D32, "%32", "%33", "%34", "%35", "%36", PREFIXPACK_32("+f", c, 0))
#define PREFIXPACK_WGMMA_128_VALUES(type) \
  PREFIXPACK_WGMMA_VALUES(type, "128", PREFIXPACK_D64, "%64", "%65", "%66", "%67", "%68", PREFIXPACK_64("+f", c, 0))
#define PREFIXPACK_WGMMA_256_VALUES(type)                                                       \
  PREFIXPACK_WGMMA_VALUES(type, "256", PREFIXPACK_D128, "%128", "%129", "%130", "%131", "%132", \
                          PREFIXPACK_128("+f", c, 0))
#define PREFIXPACK_WGMMA_ANY_VALUES(values)          \
  if constexpr (std::is_same_v<Element, BFloat16>) { \
    PREFIXPACK_WGMMA_##values##_VALUES("bf16");      \
  } else {                                           \
    PREFIXPACK_WGMMA_##values##_VALUES("f16");       \
  }

// c += a * b: a 64x16 in registers (fragments of mma.m16n8k16), b 16 by 64, 128 or 256 values, MN-major.
template <class Element>
PREFIXPACK_DEVICE void wgmma(float (&c)[8][4], const uint32_t (&a)[4], SmemDescriptor b) {
  PREFIXPACK_WGMMA_ANY_VALUES(64)
}
template <class Element>
PREFIXPACK_DEVICE void wgmma(float (&c)[16][4], const uint32_t (&a)[4], SmemDescriptor b) {
  PREFIXPACK_WGMMA_ANY_VALUES(128)
}
template <class Element>
PREFIXPACK_DEVICE void wgmma(float (&c)[32][4], const uint32_t (&a)[4], SmemDescriptor b) {
  PREFIXPACK_WGMMA_ANY_VALUES(256)
}

}  // namespace prefixpack::ptx
