// Warpgroup MMAs of shapes that the kernels do not use: scores of 96 and 128 keys, queries from registers. bf16 only.
// The emulation has a header of the same name.
#pragma once

#include "cuda/common/wgmma.cuh"

namespace prefixpack::ptx {

#define PROBE_48(how, c) PREFIXPACK_32(how, c, 0), PREFIXPACK_16(how, c, 8)
#define PROBE_D48 PREFIXPACK_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"

template <class Element, bool Add>
PREFIXPACK_DEVICE void wgmma(float (&c)[12][4], SmemDescriptor a, SmemDescriptor b) {
  if constexpr (Add) {
    PREFIXPACK_WGMMA_KEYS("bf16", "96", PROBE_D48, "%48", "%49", "1", PROBE_48("+f", c));
  } else {
    PREFIXPACK_WGMMA_KEYS("bf16", "96", PROBE_D48, "%48", "%49", "0", PROBE_48("=f", c));
  }
}
template <class Element, bool Add>
PREFIXPACK_DEVICE void wgmma(float (&c)[16][4], SmemDescriptor a, SmemDescriptor b) {
  if constexpr (Add) {
    PREFIXPACK_WGMMA_KEYS("bf16", "128", PREFIXPACK_D64, "%64", "%65", "1", PREFIXPACK_64("+f", c, 0));
  } else {
    PREFIXPACK_WGMMA_KEYS("bf16", "128", PREFIXPACK_D64, "%64", "%65", "0", PREFIXPACK_64("=f", c, 0));
  }
}

template <class Element, bool Add>
PREFIXPACK_DEVICE void wgmma(float (&c)[10][4], SmemDescriptor a, SmemDescriptor b);
#define PROBE_WGMMA_QUERIES(add, how)                                                         \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add                                        \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PREFIXPACK_D64 \
               "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0;\n}"                                 \
               : PREFIXPACK_64(how, c, 0)                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.word())                    \
               : "memory")

// a: 64x16 in registers; b: 16 by 128 keys, K-major.
template <bool Add>
PREFIXPACK_DEVICE void wgmma_queries(float (&c)[16][4], const uint32_t (&a)[4], SmemDescriptor b) {
  if constexpr (Add) {
    PROBE_WGMMA_QUERIES("1", "+f");
  } else {
    PROBE_WGMMA_QUERIES("0", "=f");
  }
}

}  // namespace prefixpack::ptx
