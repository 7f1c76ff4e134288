// Number formats of a kernel: of queries and outputs, of stored KV, and of products; and how what `ldmatrix` brings of
// stored KV becomes operands of mma.m16n8k16.
//
// ldmatrix moves elements of 16 bits. Of fp8 KV it moves pairs: a lane then has four dimensions of a key where it would
// have two, and of a value two dimensions where it would have one. No data change places for that; instead dimensions
// are numbered otherwise. Within each 16 of them
// - a step of the keys' products has dimensions 4 c, 4 c + 1, 4 c + 2, 4 c + 3 in the places of elements 2 c, 2 c + 1,
//   2 c + 8, 2 c + 9, and so must the queries,
// - of the values' products the first eight rows or columns are the even dimensions and the last eight the odd ones.
#pragma once

#include <cstdint>

#include "cuda/common/ptx.cuh"

namespace prefixpack {

// KV as queries and outputs are.
template <class OutputElement>
struct SameDtypeKv {
  using Output = OutputElement;
  using Product = OutputElement;
  static constexpr int kKvBytes = 2;
  static constexpr int kStepsPerLoad = 1;  // steps of 16 dimensions that a load of four matrices serves

  // Operands of step `step` of what was loaded. Columns: second operand, two blocks of eight keys or dimensions; rows:
  // first operand.
  static PREFIXPACK_DEVICE void key_b_fragments(const uint32_t (&loaded)[4], int, uint32_t (&out)[4]) {
    copy(loaded, out);
  }
  static PREFIXPACK_DEVICE void value_b_fragments(const uint32_t (&loaded)[4], int, uint32_t (&out)[4]) {
    copy(loaded, out);
  }
  static PREFIXPACK_DEVICE void key_a_fragments(const uint32_t (&loaded)[4], int, uint32_t (&out)[4]) {
    copy(loaded, out);
  }
  static PREFIXPACK_DEVICE void value_a_fragments(const uint32_t (&loaded)[4], int, uint32_t (&out)[4]) {
    copy(loaded, out);
  }

 private:
  static PREFIXPACK_DEVICE void copy(const uint32_t (&from)[4], uint32_t (&to)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = from[i];
  }
};

// KV in fp8 e4m3. Products are of fp16, which holds all of its values.
template <class OutputElement>
struct Fp8Kv {
  using Output = OutputElement;
  using Product = ptx::Float16;
  static constexpr int kKvBytes = 1;
  static constexpr int kStepsPerLoad = 2;

  static PREFIXPACK_DEVICE void key_b_fragments(const uint32_t (&loaded)[4], int step, uint32_t (&out)[4]) {
    ptx::fp8_to_fp16(loaded[step], out[0], out[1]);
    ptx::fp8_to_fp16(loaded[2 + step], out[2], out[3]);
  }
  static PREFIXPACK_DEVICE void value_b_fragments(const uint32_t (&loaded)[4], int step, uint32_t (&out)[4]) {
    ptx::fp8_to_fp16(ptx::even_bytes_first(loaded[2 * step]), out[0], out[2]);
    ptx::fp8_to_fp16(ptx::even_bytes_first(loaded[2 * step + 1]), out[1], out[3]);
  }
  static PREFIXPACK_DEVICE void key_a_fragments(const uint32_t (&loaded)[4], int step, uint32_t (&out)[4]) {
    ptx::fp8_to_fp16(loaded[2 * step], out[0], out[2]);
    ptx::fp8_to_fp16(loaded[2 * step + 1], out[1], out[3]);
  }
  static PREFIXPACK_DEVICE void value_a_fragments(const uint32_t (&loaded)[4], int step, uint32_t (&out)[4]) {
    ptx::fp8_to_fp16(ptx::even_bytes_first(loaded[step]), out[0], out[1]);
    ptx::fp8_to_fp16(ptx::even_bytes_first(loaded[2 + step]), out[2], out[3]);
  }
};

// Whether dimensions are numbered as said above.
template <class Format>
constexpr bool kPermutesDims = Format::kKvBytes == 1;

}  // namespace prefixpack
