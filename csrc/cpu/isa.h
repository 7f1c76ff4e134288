// One copy of the kernels per instruction set: kernels_<isa>.cpp selects its target with PREFIXPACK_TARGET_BEGIN and
// includes kernels.h inside a namespace of its own. Code below the switch must not call inline functions of the
// standard library: the linker keeps one copy of such a function, possibly the one compiled for the widest instruction
// set.
//
// PREFIXPACK_FULL_WIDTH_LOOPS: without it GCC vectorizes AVX-512 loops with 256-bit vectors.
#pragma once

#define PREFIXPACK_INLINE inline __attribute__((always_inline))
#define PREFIXPACK_PRAGMA(text) _Pragma(#text)

#if defined(__clang__)
#define PREFIXPACK_TARGET_BEGIN(features) \
  PREFIXPACK_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define PREFIXPACK_TARGET_END PREFIXPACK_PRAGMA(clang attribute pop)
#define PREFIXPACK_FULL_WIDTH_LOOPS
#define PREFIXPACK_UNROLL PREFIXPACK_PRAGMA(clang loop unroll(full))
#else
#define PREFIXPACK_TARGET_BEGIN(features) PREFIXPACK_PRAGMA(GCC target(features))
#define PREFIXPACK_TARGET_END
#define PREFIXPACK_FULL_WIDTH_LOOPS PREFIXPACK_PRAGMA(GCC target("prefer-vector-width=512"))
#define PREFIXPACK_UNROLL PREFIXPACK_PRAGMA(GCC unroll 64)
#endif
