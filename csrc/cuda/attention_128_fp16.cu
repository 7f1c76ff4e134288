#define PREFIXPACK_INSTANTIATION
#include "cuda/kernels.cuh"

namespace prefixpack {
PREFIXPACK_INSTANTIATE(128, Float16Kv)
}
