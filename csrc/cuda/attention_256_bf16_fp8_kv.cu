#define PREFIXPACK_INSTANTIATION
#include "cuda/kernels.cuh"

namespace prefixpack {
PREFIXPACK_INSTANTIATE(256, BFloat16WithFloat8Kv)
}
