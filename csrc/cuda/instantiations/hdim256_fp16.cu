#define PREFIXPACK_INSTANTIATION
#include "cuda/kernel/kernels.cuh"

namespace prefixpack {
PREFIXPACK_INSTANTIATE(256, Float16Kv)
}  // namespace prefixpack
