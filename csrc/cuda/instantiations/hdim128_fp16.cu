#define PREFIXPACK_INSTANTIATION
#include "cuda/kernel/kernels.cuh"

namespace prefixpack {
PREFIXPACK_INSTANTIATE(128, Float16Kv)
}  // namespace prefixpack
