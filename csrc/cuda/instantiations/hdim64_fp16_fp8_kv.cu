#define PREFIXPACK_INSTANTIATION
#include "cuda/kernel/kernels.cuh"

namespace prefixpack {
PREFIXPACK_INSTANTIATE(64, Float16WithFloat8Kv)
}  // namespace prefixpack
