// Vectors of sixteen lanes: one register of AVX-512, or two of AVX2. The compiler's flags choose.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace ostinato {

constexpr int64_t LANES = 16;

using bfloat16 = uint16_t;

inline float from_bfloat16(bfloat16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct float16 {
  uint16_t bits;
};

inline float from_float16(float16 x) { return _cvtsh_ss(x.bits); }

// Rounded to nearest, ties to even; NaN stays NaN.
inline bfloat16 to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return bfloat16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// Four bytes of memory, which may hold anything.
typedef int32_t __attribute__((may_alias, aligned(1))) Word;

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && \
    defined(__AVX512VNNI__)

#define OSTINATO_AVX512 1
#if defined(__AVX512BF16__) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define OSTINATO_AMX 1
#endif

struct Floats {
  __m512 v;
};

inline Floats broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Floats zeros() { return {_mm512_setzero_ps()}; }
inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats x) { _mm512_storeu_ps(p, x.v); }
inline Floats load(const bfloat16* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Floats load(const float16* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
inline void store(bfloat16* p, Floats x) {
  __m512i bits = _mm512_castps_si512(x.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
// Loads 32 neighbours: those with an even index into one vector, those with an odd index into the other.
inline void load_pairs(const bfloat16* p, Floats& even, Floats& odd) {
  __m512i both = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))));
}
inline Floats operator+(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats operator-(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats operator*(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats operator/(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// A NaN in b stays a NaN.
inline Floats maximum(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats minimum(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats magnitude(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline float sum(Floats a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(Floats a) { return _mm512_reduce_max_ps(a.v); }
// a * 2^n. n is whole numbers from -126 to 127, stored as floats.
inline Floats scaled_by_power(Floats a, Floats n) { return {_mm512_scalef_ps(a.v, n.v)}; }
inline Floats rounded(Floats a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// Stores whole numbers, of magnitude at most 127, as bytes.
inline void store_bytes(int8_t* p, Floats a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v))); }

// Products of integer weights and bytes, one register at a time. A register has four numbers for each of its lanes.
constexpr int64_t REGISTER_LANES = 16;
using Register = __m512i;
using FloatRegister = __m512;
inline Register load_register(const void* p) { return _mm512_loadu_si512(p); }
inline Register all_words(int32_t x) { return _mm512_set1_epi32(x); }
inline Register times_power(Register words, int power) { return _mm512_slli_epi32(words, power); }
inline Register add_words(Register x, Register y) { return _mm512_add_epi32(x, y); }
inline Register low_nibbles(Register x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Register high_nibbles(Register x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
// Adds the products of nibbles and four signed bytes to `sums`. `wide` turns these into one 32-bit number for each lane.
// g++ 12 would load the bytes by an instruction of their own, into a register that is missing elsewhere.
inline Register add_dot(Register sums, Register nibbles, const int8_t* bytes) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(nibbles), "m"(*(const Word*)bytes));
  return sums;
}
inline Register wide(Register sums) { return sums; }
// Adds the products of weights and four signed bytes to sums of 32 bits. `weights` come from `unsigned_bytes`, which adds
// BYTE_OFFSET to each of them.
constexpr int32_t BYTE_OFFSET = 128;
inline Register unsigned_bytes(Register x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
inline Register add_byte_dot(Register sums, Register weights, const int8_t* bytes) { return add_dot(sums, weights, bytes); }
inline FloatRegister zero_floats() { return _mm512_setzero_ps(); }
inline void store_floats(float* p, FloatRegister x) { _mm512_storeu_ps(p, x); }
// The lanes of one register.
inline FloatRegister part_of(Floats x, int) { return x.v; }
inline FloatRegister add_scaled(FloatRegister sum, FloatRegister x, float factor) {
  return _mm512_fmadd_ps(x, _mm512_set1_ps(factor), sum);
}
inline FloatRegister add_scaled(FloatRegister sum, Register words, FloatRegister scale, float factor) {
  return _mm512_fmadd_ps(_mm512_cvtepi32_ps(words), _mm512_mul_ps(scale, _mm512_set1_ps(factor)), sum);
}

#else

#if !defined(__AVX2__) || !defined(__FMA__) || !defined(__F16C__)
#error "these kernels need AVX2, FMA and F16C"
#endif

struct Floats {
  __m256 a, b;
};

inline Floats broadcast(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats zeros() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline __m256 widened(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline Floats load(const bfloat16* p) {
  return {widened(_mm_loadu_si128((const __m128i*)p)), widened(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline Floats load(const float16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline __m256i narrowed(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
  return _mm256_srli_epi32(rounded, 16);
}
inline void store(bfloat16* p, Floats x) {
  __m256i both = _mm256_packus_epi32(narrowed(x.a), narrowed(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
}
// Loads 32 neighbours: those with an even index into one vector, those with an odd index into the other.
inline void load_pairs(const bfloat16* p, Floats& even, Floats& odd) {
  __m256i first = _mm256_loadu_si256((const __m256i*)p), second = _mm256_loadu_si256((const __m256i*)(p + 16));
  __m256i mask = _mm256_set1_epi32(int(0xffff0000));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(first, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(second, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(first, mask)), _mm256_castsi256_ps(_mm256_and_si256(second, mask))};
}
inline Floats operator+(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats operator-(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats operator*(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats operator/(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
// A NaN in y stays a NaN.
inline Floats maximum(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats minimum(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Floats magnitude(Floats x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline float sum(Floats x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float largest(Floats x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
// x * 2^n. n is whole numbers from -126 to 127, stored as floats.
inline __m256 scaled_by_power(__m256 x, __m256 n) {
  __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(exponent));
}
inline Floats scaled_by_power(Floats x, Floats n) { return {scaled_by_power(x.a, n.a), scaled_by_power(x.b, n.b)}; }
inline Floats rounded(Floats x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
// Stores whole numbers, of magnitude at most 127, as bytes.
inline void store_bytes(int8_t* p, Floats x) {
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));
  words = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

// Products of integer weights and bytes, one register at a time. A register has four numbers for each of its lanes.
constexpr int64_t REGISTER_LANES = 8;
using Register = __m256i;
using FloatRegister = __m256;
inline Register load_register(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Register all_words(int32_t x) { return _mm256_set1_epi32(x); }
inline Register times_power(Register words, int power) { return _mm256_slli_epi32(words, power); }
inline Register add_words(Register x, Register y) { return _mm256_add_epi32(x, y); }
inline Register low_nibbles(Register x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
inline Register high_nibbles(Register x) { return _mm256_and_si256(_mm256_srli_epi16(x, 4), _mm256_set1_epi8(15)); }
// Adds the products of nibbles and four signed bytes to `sums`. `wide` turns these into one 32-bit number for each lane,
// after at most eight additions: a pair of products is at most 2 * 15 * 127, and eight pairs fit 16 bits.
//
// `add_byte_dot` adds the products of weights and four signed bytes to sums of 32 bits. `weights` come from
// `unsigned_bytes`, which adds BYTE_OFFSET to each of them.
#ifdef __AVXVNNI__
inline Register add_dot(Register sums, Register nibbles, const int8_t* bytes) {
  return _mm256_dpbusd_avx_epi32(sums, nibbles, all_words(*(const Word*)bytes));
}
inline Register wide(Register sums) { return sums; }
constexpr int32_t BYTE_OFFSET = 128;
inline Register unsigned_bytes(Register x) { return _mm256_xor_si256(x, _mm256_set1_epi8(-128)); }
inline Register add_byte_dot(Register sums, Register weights, const int8_t* bytes) { return add_dot(sums, weights, bytes); }
#else
#define OSTINATO_NARROW_SUMS 1
inline Register add_dot(Register sums, Register nibbles, const int8_t* bytes) {
  sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(nibbles, all_words(*(const Word*)bytes)));
  // Without this, g++ 12 makes all products first and adds them up afterwards. It lacks registers for that: half as fast.
  asm("" : "+x"(sums));
  return sums;
}
inline Register wide(Register sums) { return _mm256_madd_epi16(sums, _mm256_set1_epi16(1)); }
// The weights stay signed: their signs go to the bytes. A pair of products is at most 2 * 128 * 127, and fits 16 bits alone.
constexpr int32_t BYTE_OFFSET = 0;
inline Register unsigned_bytes(Register x) { return x; }
inline Register add_byte_dot(Register sums, Register weights, const int8_t* bytes) {
  Register signed_bytes = _mm256_sign_epi8(all_words(*(const Word*)bytes), weights);
  sums = add_words(sums, wide(_mm256_maddubs_epi16(_mm256_abs_epi8(weights), signed_bytes)));
  asm("" : "+x"(sums));
  return sums;
}
#endif
inline FloatRegister zero_floats() { return _mm256_setzero_ps(); }
inline void store_floats(float* p, FloatRegister x) { _mm256_storeu_ps(p, x); }
// The lanes of one register: the first eight, or the others.
inline FloatRegister part_of(Floats x, int part) { return part ? x.b : x.a; }
inline FloatRegister add_scaled(FloatRegister sum, FloatRegister x, float factor) {
  return _mm256_fmadd_ps(x, _mm256_set1_ps(factor), sum);
}
inline FloatRegister add_scaled(FloatRegister sum, Register words, FloatRegister scale, float factor) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(words), _mm256_mul_ps(scale, _mm256_set1_ps(factor)), sum);
}

#endif

// e^x, exact to 2 units in the last place. x beyond +-87 counts as +-87; a NaN stays a NaN.
inline Floats exponential(Floats x) {
  x = minimum(broadcast(87.0f), maximum(broadcast(-87.0f), x));
  Floats n = rounded(x * broadcast(1.44269504088896341f));
  Floats r = fma(n, broadcast(-0.693359375f), x);
  r = fma(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.9875691500e-4f);
  p = fma(p, r, broadcast(1.3981999507e-3f));
  p = fma(p, r, broadcast(8.3334519073e-3f));
  p = fma(p, r, broadcast(4.1665795894e-2f));
  p = fma(p, r, broadcast(1.6666665459e-1f));
  p = fma(p, r, broadcast(5.0000001201e-1f));
  return scaled_by_power(fma(p, r * r, r + broadcast(1.0f)), n);
}

inline Floats sigmoid(Floats x) { return broadcast(1.0f) / (broadcast(1.0f) + exponential(zeros() - x)); }
inline Floats silu(Floats x) { return x / (broadcast(1.0f) + exponential(zeros() - x)); }

}  // namespace ostinato
