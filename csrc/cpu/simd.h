// Fixed-width vectors in the compilers' vector extension. No instruction set is named here; a vector is lowered to the
// target of the translation unit. Part of kernels.h; see isa.h.

template <int W>
struct VectorTypes;

// Written per width, because GCC 12 does not accept a template argument as width. The Mem types are vectors in memory:
// aligned as their element, and allowed to alias.
#define PREFIXPACK_VECTOR_TYPES(W)                                                   \
  template <>                                                                        \
  struct VectorTypes<W> {                                                            \
    typedef float F __attribute__((vector_size(W * 4)));                             \
    typedef int32_t I __attribute__((vector_size(W * 4)));                           \
    typedef uint32_t U __attribute__((vector_size(W * 4)));                          \
    typedef float MemF __attribute__((vector_size(W * 4), aligned(4), may_alias));   \
    typedef int32_t MemI __attribute__((vector_size(W * 4), aligned(4), may_alias)); \
  };
PREFIXPACK_VECTOR_TYPES(4)
PREFIXPACK_VECTOR_TYPES(8)
PREFIXPACK_VECTOR_TYPES(16)
#undef PREFIXPACK_VECTOR_TYPES

#if defined(__clang__)
#define PREFIXPACK_SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PREFIXPACK_SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, type{__VA_ARGS__})
#endif

template <int W>
struct Simd {
  using F = typename VectorTypes<W>::F;
  using I = typename VectorTypes<W>::I;
  using U = typename VectorTypes<W>::U;
  using MemF = typename VectorTypes<W>::MemF;
  using MemI = typename VectorTypes<W>::MemI;
  using Lanes = std::make_integer_sequence<int, W>;

  static PREFIXPACK_INLINE F load(const float* p) { return *reinterpret_cast<const MemF*>(p); }
  static PREFIXPACK_INLINE I load(const int32_t* p) { return *reinterpret_cast<const MemI*>(p); }
  static PREFIXPACK_INLINE void store(float* p, F v) { *reinterpret_cast<MemF*>(p) = v; }
  static PREFIXPACK_INLINE F splat(float x) { return x - F{}; }  // 0 + x would lose the sign of -0
  // NaN in `b` stays NaN: a NaN in the KV cache must reach the output.
  static PREFIXPACK_INLINE F max(F a, F b) { return a > b ? a : b; }

  // --- Lane permutations. Of every block of 2*H lanes, `even_halves` returns the lower half of a, then that of b;
  // `odd_halves` the upper halves.

  template <int H>
  static PREFIXPACK_INLINE F even_halves(F a, F b) {
    return even_halves<H>(a, b, Lanes{});
  }
  template <int H>
  static PREFIXPACK_INLINE F odd_halves(F a, F b) {
    return odd_halves<H>(a, b, Lanes{});
  }
  // Transposes a W x W block.
  static PREFIXPACK_INLINE void transpose(F* rows) {
    if constexpr (W >= 16) exchange<8>(rows);
    if constexpr (W >= 8) exchange<4>(rows);
    exchange<2>(rows);
    exchange<1>(rows);
  }
  // Lanes 0 to 3 of the result: the sums over the lanes of a, b, c and d.
  static PREFIXPACK_INLINE F sum_each(F a, F b, F c, F d) {
    const F ab = even_halves<1>(a, b) + odd_halves<1>(a, b);
    const F cd = even_halves<1>(c, d) + odd_halves<1>(c, d);
    F sums = even_halves<2>(ab, cd) + odd_halves<2>(ab, cd);
    if constexpr (W >= 8) sums += odd_halves<4>(sums, sums);
    if constexpr (W >= 16) sums += odd_halves<8>(sums, sums);
    return sums;
  }

  static PREFIXPACK_INLINE float largest(F v) {
    if constexpr (W >= 16) v = max(v, odd_halves<8>(v, v));
    if constexpr (W >= 8) v = max(v, odd_halves<4>(v, v));
    v = max(v, odd_halves<2>(v, v));
    v = max(v, odd_halves<1>(v, v));
    return v[0];
  }
  static PREFIXPACK_INLINE float sum(F v) {
    if constexpr (W >= 16) v += odd_halves<8>(v, v);
    if constexpr (W >= 8) v += odd_halves<4>(v, v);
    v += odd_halves<2>(v, v);
    v += odd_halves<1>(v, v);
    return v[0];
  }

  // --- 16-bit formats

  static PREFIXPACK_INLINE F from_bf16(const uint16_t* p) { return (F)(widen(p) << 16); }
  static PREFIXPACK_INLINE void to_bf16(uint16_t* p, F v) {
    const U bits = (U)v;
    const U rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    const U quiet = (bits >> 16) | 0x40u;
    narrow(p, (bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
  }
  static PREFIXPACK_INLINE F from_fp16(const uint16_t* p) {
    const U bits = (U)((I)(widen(p) << 16) >> 3) & 0x8fffe000u;  // sign, exponent and mantissa in a float's places
    // These bits make a float that is too small by 2^112, subnormals included; infinity and NaN need their exponent.
    const U value = (U)((F)bits * 0x1p112f);
    return (F)((bits & 0x0f800000u) == 0x0f800000u ? value | 0x7f800000u : value);
  }
  static PREFIXPACK_INLINE void to_fp16(uint16_t* p, F v) {
    const U bits = (U)v;
    const U magnitude = bits & 0x7fffffffu;
    const U normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    // Below 2^-14: adding 1/2 rounds and leaves the subnormal's bits at the end of the mantissa.
    const U subnormal = (U)((F)magnitude + 0.5f) - 0x3f000000u;
    U half = magnitude < 0x38800000u ? subnormal : normal;
    half = magnitude >= 0x477ff000u ? U{} + 0x7c00u : half;  // rounds to 65536 or more
    half = magnitude > 0x7f800000u ? U{} + 0x7e00u : half;
    narrow(p, half | ((bits >> 16) & 0x8000u));
  }

  // --- fp8 e4m3: no infinity, NaN where exponent and mantissa are all ones

  static PREFIXPACK_INLINE F from_e4m3(const uint8_t* p) {
    const U bits = (U)sign_extend(p) << 20;  // sign, exponent and mantissa in a float's places
    const U magnitude = bits & 0x07f00000u;
    const F normal = (F)(magnitude + (120u << 23));
    // A subnormal has no implicit one; this value is the smaller one exactly then. Subnormal floats are avoided,
    // because they take processors a hundred cycles.
    const F subnormal = normal * 2.0f - 0x1p-6f;
    const U value = (U)(normal < subnormal ? normal : subnormal) | (bits & 0x80000000u);
    return (F)(magnitude == 0x07f00000u ? value | 0x7f800000u : value);
  }

  // --- Elementary functions, about 1e-7 relative. NaN in, NaN out.

  // 2^x for x <= 0, flushed to zero below 2^-126.
  static PREFIXPACK_INLINE F exp2(F x) {
    const F clamped = x < -126.0f ? splat(-126.0f) : x;
    F power;
    const F fraction = split_exponent(clamped, &power);
    const F value = power + power * exp2m1(fraction);
    return x < -126.0f ? F{} : value;
  }
  // tanh(x / (2 log2 e)), accurate near zero, because e^2x - 1 is not computed by a subtraction from e^2x.
  static PREFIXPACK_INLINE F tanh_of_log2(F x) {
    F clamped = x > 30.0f ? splat(30.0f) : x;  // beyond, tanh rounds to one
    clamped = clamped < -30.0f ? splat(-30.0f) : clamped;
    F power;
    const F fraction = split_exponent(clamped, &power);
    const F expm1 = power * exp2m1(fraction) + (power - 1.0f);
    return expm1 / (expm1 + 2.0f);
  }

 private:
  template <int H, int... Lane>
  static PREFIXPACK_INLINE F even_halves(F a, F b, std::integer_sequence<int, Lane...>) {
    return PREFIXPACK_SHUFFLE(I, a, b, (Lane & H ? W + Lane - H : Lane)...);
  }
  template <int H, int... Lane>
  static PREFIXPACK_INLINE F odd_halves(F a, F b, std::integer_sequence<int, Lane...>) {
    return PREFIXPACK_SHUFFLE(I, a, b, (Lane & H ? W + Lane : Lane + H)...);
  }
  template <int H>
  static PREFIXPACK_INLINE void exchange(F* rows) {
    PREFIXPACK_UNROLL
    for (int i = 0; i < W; ++i) {
      if (i & H) continue;
      const F a = rows[i], b = rows[i + H];
      rows[i] = even_halves<H>(a, b);
      rows[i + H] = odd_halves<H>(a, b);
    }
  }
  // Loops: compilers turn them into one widening load or narrowing store, but not __builtin_convertvector.
  static PREFIXPACK_INLINE U widen(const uint16_t* p) {
    if constexpr (W == 4) {
      // Interleaving with zeros: the form that becomes a single instruction with SSE2 and NEON.
      static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the lower half of a 32-bit lane comes first");
      typedef uint16_t Halves __attribute__((vector_size(16)));
      typedef uint64_t Quads __attribute__((vector_size(16)));
      uint64_t four;
      __builtin_memcpy(&four, p, sizeof four);
      return (U)PREFIXPACK_SHUFFLE(Halves, (Halves)Quads{four}, Halves{}, 0, 8, 1, 9, 2, 10, 3, 11);
    } else {
      uint32_t wide[W];
      for (int i = 0; i < W; ++i) wide[i] = p[i];
      U v;
      __builtin_memcpy(&v, wide, sizeof v);
      return v;
    }
  }
  static PREFIXPACK_INLINE I sign_extend(const uint8_t* p) {
    if constexpr (W == 4) {
      // widen() twice, zeros in the low half.
      typedef uint8_t Bytes __attribute__((vector_size(16)));
      typedef uint16_t Halves __attribute__((vector_size(16)));
      uint32_t four;
      __builtin_memcpy(&four, p, sizeof four);
      const Bytes bytes = (Bytes)U{four};
      const auto halves =
          (Halves)PREFIXPACK_SHUFFLE(Bytes, Bytes{}, bytes, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
      return (I)PREFIXPACK_SHUFFLE(Halves, Halves{}, halves, 0, 8, 1, 9, 2, 10, 3, 11) >> 24;
    } else {
      int32_t wide[W];
      for (int i = 0; i < W; ++i) wide[i] = static_cast<int8_t>(p[i]);
      I v;
      __builtin_memcpy(&v, wide, sizeof v);
      return v;
    }
  }
  static PREFIXPACK_INLINE void narrow(uint16_t* p, U v) {
    uint32_t wide[W];
    __builtin_memcpy(wide, &v, sizeof v);
    for (int i = 0; i < W; ++i) p[i] = static_cast<uint16_t>(wide[i]);
  }
  // x = integer + rest with |rest| <= 1/2; returns the rest and 2^integer. x within [-126, 127].
  static PREFIXPACK_INLINE F split_exponent(F x, F* power) {
    constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer in the lowest bits
    const F shifted = x + kRound;
    *power = (F)(((U)shifted << 23) + 0x3f800000u);
    return x - (shifted - kRound);
  }
  // 2^f - 1 for |f| <= 1/2, as f times a polynomial: Chebyshev fit of (2^f - 1) / f, relative error 1.1e-8.
  static PREFIXPACK_INLINE F exp2m1(F f) {
    F p = f * 0x1.441390p-13f + 0x1.5f0890p-10f;
    p = p * f + 0x1.3b2a54p-7f;
    p = p * f + 0x1.c6af6cp-5f;
    p = p * f + 0x1.ebfbe0p-3f;
    p = p * f + 0x1.62e430p-1f;
    return p * f;
  }
};

constexpr int bytes_of(DType type) { return type == DType::kFloat32 ? 4 : type == DType::kFloat8E4M3 ? 1 : 2; }

template <DType kType, int W>
PREFIXPACK_INLINE typename Simd<W>::F load_as_float(const void* base, int64_t element) {
  if constexpr (kType == DType::kFloat32) {
    return Simd<W>::load(static_cast<const float*>(base) + element);
  } else if constexpr (kType == DType::kBFloat16) {
    return Simd<W>::from_bf16(static_cast<const uint16_t*>(base) + element);
  } else if constexpr (kType == DType::kFloat16) {
    return Simd<W>::from_fp16(static_cast<const uint16_t*>(base) + element);
  } else {
    return Simd<W>::from_e4m3(static_cast<const uint8_t*>(base) + element);
  }
}

template <int W>
PREFIXPACK_INLINE void store_as(DType type, void* base, int64_t element, typename Simd<W>::F v) {
  if (type == DType::kFloat32) {
    Simd<W>::store(static_cast<float*>(base) + element, v);
  } else if (type == DType::kBFloat16) {
    Simd<W>::to_bf16(static_cast<uint16_t*>(base) + element, v);
  } else {
    Simd<W>::to_fp16(static_cast<uint16_t*>(base) + element, v);
  }
}
