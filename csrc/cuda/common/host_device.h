// Function qualifiers for code that is compiled for the GPU and, in tests, for the CPU.
#pragma once

#ifdef __CUDACC__
#define PREFIXPACK_BOTH __host__ __device__ __forceinline__
#else
#define PREFIXPACK_BOTH inline
#endif
