#include <cstdint>
#include <utility>

#include "cpu/isa.h"
#include "cpu/task.h"

namespace prefixpack {
namespace baseline {

constexpr int kLanes = 4;
constexpr int kScoreKeys = 6;
constexpr int kValueDims = 4;
constexpr int kRowKernelRows = 4;

#include "cpu/kernels.h"

}  // namespace baseline

const Kernels kBaselineKernels = {"baseline", baseline::run_item, baseline::combine_query};

}  // namespace prefixpack
