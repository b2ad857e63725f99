// bfloat16 and 16-lane float vectors shared by the CPU ops: the compiler's own vector types, which
// become AVX-512 registers, pairs of AVX2 ones or NEON, plus the instructions that have no portable
// spelling.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace polyloom {

#define POLYLOOM_INLINE inline __attribute__((always_inline))

// A bfloat16 as it lies in memory: the upper half of a float.
struct bf16 {
  uint16_t bits;
};

using f32x16 = float __attribute__((vector_size(64)));
using u32x16 = uint32_t __attribute__((vector_size(64)));
using i32x16 = int32_t __attribute__((vector_size(64)));
using u16x16 = uint16_t __attribute__((vector_size(32)));

POLYLOOM_INLINE float to_float(bf16 value) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(value.bits) << 16);
}

POLYLOOM_INLINE float to_float(float value) { return value; }

// Rounds to the nearest, ties to even, as torch does; a NaN stays a NaN.
POLYLOOM_INLINE bf16 to_bf16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{0x7fc0};
  return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <typename T>
POLYLOOM_INLINE T from_float(float value) {
  if constexpr (sizeof(T) == sizeof(float)) {
    return value;
  } else {
    return to_bf16(value);
  }
}

POLYLOOM_INLINE f32x16 splat(float value) { return f32x16{} + value; }

POLYLOOM_INLINE f32x16 load16(const float* from) {
  f32x16 value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

POLYLOOM_INLINE f32x16 load16(const bf16* from) {
  u16x16 half;
  std::memcpy(&half, from, sizeof(half));
  return (f32x16)(__builtin_convertvector(half, u32x16) << 16);
}

POLYLOOM_INLINE void store16(float* to, f32x16 value) { std::memcpy(to, &value, sizeof(value)); }

POLYLOOM_INLINE void store16(bf16* to, f32x16 value) {
#if defined(__AVX512BF16__)
  const __m256bh half = _mm512_cvtneps_pbh((__m512)value);
#else
  const u32x16 bits = (u32x16)value;
  const u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const i32x16 is_nan = value != value;
  const u16x16 half =
      __builtin_convertvector(((u32x16)is_nan & 0x7fc0u) | (~(u32x16)is_nan & rounded), u16x16);
#endif
  std::memcpy(to, &half, sizeof(half));
}

POLYLOOM_INLINE f32x16 max16(f32x16 a, f32x16 b) { return a > b ? a : b; }

POLYLOOM_INLINE float reduce_add(f32x16 value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  float sum = 0.0f;
  for (int i = 0; i < 16; i++) sum += value[i];
  return sum;
#endif
}

POLYLOOM_INLINE float reduce_max(f32x16 value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  float largest = value[0];
  for (int i = 1; i < 16; i++) largest = value[i] > largest ? value[i] : largest;
  return largest;
#endif
}

// acc[lane] += even[lane] * low half of pair + odd[lane] * high half, of 16 interleaved pairs.
POLYLOOM_INLINE f32x16 dot_pairs(f32x16 acc, const bf16* pairs, uint32_t pair) {
#if defined(__AVX512BF16__)
  const __m512i both = _mm512_loadu_si512(pairs);
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)both, (__m512bh)_mm512_set1_epi32(pair));
#else
  u32x16 both;
  std::memcpy(&both, pairs, sizeof(both));
  const float even = __builtin_bit_cast(float, pair << 16);
  const float odd = __builtin_bit_cast(float, pair & 0xffff0000u);
  return acc + (f32x16)(both << 16) * even + (f32x16)(both & 0xffff0000u) * odd;
#endif
}

// e^x to about 2e-7 relative for x <= 88; 0 below -87 (so also for -infinity); NaN for NaN.
POLYLOOM_INLINE f32x16 exp16(f32x16 x) {
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const f32x16 shifted = x * 1.44269504f + magic;
  const f32x16 n = shifted - magic;
  const f32x16 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  f32x16 p = r * 1.9875692e-4f + 1.3981999e-3f;
  p = p * r + 8.3334520e-3f;
  p = p * r + 4.1665796e-2f;
  p = p * r + 1.6666665e-1f;
  p = p * r + 5.0000000e-1f;
  p = p * r * r + r + 1.0f;
  const f32x16 power = (f32x16)(((u32x16)shifted - 0x4b400000u + 127u) << 23);
  return x < -87.0f ? f32x16{} : p * power;
}

// tanh to about 1e-7 absolute, and relative to x near 0.
POLYLOOM_INLINE f32x16 tanh16(f32x16 x) {
  const f32x16 bounded = x > 10.0f ? splat(10.0f) : (x < -10.0f ? splat(-10.0f) : x);
  const f32x16 s = x * x;
  const f32x16 near = x * (1.0f + s * (-0.33333333f + s * (0.13333333f + s * -0.053968254f)));
  const f32x16 far = 1.0f - 2.0f / (exp16(bounded * 2.0f) + 1.0f);
  return s < 0.01f ? near : far;
}

}  // namespace polyloom
