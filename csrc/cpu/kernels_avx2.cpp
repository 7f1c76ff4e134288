#include <cstdint>
#include <utility>

#include "cpu/isa.h"
#include "cpu/task.h"

#if defined(__x86_64__)

PREFIXPACK_TARGET_BEGIN("avx2,fma,bmi,bmi2")

namespace prefixpack {
namespace avx2 {

constexpr int kLanes = 8;
constexpr int kScoreKeys = 6;
constexpr int kValueDims = 4;
constexpr int kRowKernelRows = 4;

#include "cpu/kernels.h"

}  // namespace avx2

const Kernels kAvx2Kernels = {"avx2", avx2::run_item, avx2::combine_query};

}  // namespace prefixpack

PREFIXPACK_TARGET_END

#endif
