#include <cstdint>
#include <utility>

#include "cpu/isa.h"
#include "cpu/task.h"

#if defined(__x86_64__)

PREFIXPACK_TARGET_BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx2,fma,bmi,bmi2")
PREFIXPACK_FULL_WIDTH_LOOPS

namespace prefixpack {
namespace avx512 {

constexpr int kLanes = 16;
constexpr int kScoreKeys = 12;
constexpr int kValueDims = 8;
constexpr int kRowKernelRows = 15;

#include "cpu/kernels.h"

}  // namespace avx512

const Kernels kAvx512Kernels = {"avx512", avx512::run_item, avx512::combine_query};

}  // namespace prefixpack

PREFIXPACK_TARGET_END

#endif
