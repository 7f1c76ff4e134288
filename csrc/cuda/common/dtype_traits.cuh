// Element types of a kernel (queries and outputs, stored KV, MMA operands), and the conversion of what `ldmatrix` loads
// of the stored KV into operands of mma.m16n8k16.
//
// ldmatrix moves 16-bit elements, so of fp8 KV it moves pairs. A lane then holds four dimensions of a key instead of
// two, and two dimensions of a value instead of one. No data moves between lanes; the dimensions are renumbered
// instead. Within each 16 dimensions:
// - In Q*K^T, dimensions 4 c, 4 c + 1, 4 c + 2, 4 c + 3 take the places of elements 2 c, 2 c + 1, 2 c + 8, 2 c + 9.
//   Queries are permuted alike.
// - In P*V, the first eight rows or columns are the even dimensions, the last eight the odd ones.
#pragma once

#include <cstdint>

#include "cuda/common/ptx.cuh"

namespace prefixpack {

// KV in the dtype of queries and outputs.
template <class OutputElement>
struct SameDtypeKv {
  using Output = OutputElement;
  using Product = OutputElement;
  static constexpr int kKvBytes = 2;
  static constexpr bool kTrees = false;
  static constexpr int kStepsPerLoad = 1;  // MMA k-steps (16 dimensions) that one ldmatrix.x4 serves

  // Fragments of k-step `step` from the loaded matrices. A: first MMA operand (rows). B: second operand, two blocks of
  // eight keys or dimensions (columns).
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

// KV in fp8 e4m3, converted to fp16 operands. fp16 represents every e4m3 value exactly.
template <class OutputElement>
struct Fp8Kv {
  using Output = OutputElement;
  using Product = ptx::Float16;
  static constexpr int kKvBytes = 1;
  static constexpr bool kTrees = false;
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

// For verify steps whose drafts are trees: kernels also mask what StepState::hidden says. Kernels of their own, because
// the masks would not fit into the code that is fetched ahead.
template <class Base>
struct WithTrees : Base {
  static constexpr bool kTrees = true;
};

// Whether dimensions are permuted as described at the top of this file.
template <class Format>
constexpr bool kPermutesDims = Format::kKvBytes == 1;

}  // namespace prefixpack
