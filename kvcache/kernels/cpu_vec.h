// bfloat16 and vector helpers shared by the CPU ops.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace polyloom {

// A bfloat16 as it lies in memory: the upper half of a float.
struct bf16 {
  uint16_t bits;
};

inline float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

inline float to_float(float value) { return value; }

// Rounds to the nearest, ties to even, as torch does; a NaN stays a NaN.
inline bf16 to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{0x7fc0};
  return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <typename T>
inline T from_float(float value);
template <>
inline float from_float<float>(float value) {
  return value;
}
template <>
inline bf16 from_float<bf16>(float value) {
  return to_bf16(value);
}

#if defined(__AVX512F__)

inline __m512 load16(const float* from) { return _mm512_loadu_ps(from); }

inline __m512 load16(const bf16* from) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline void store16(float* to, __m512 value) { _mm512_storeu_ps(to, value); }

inline void store16(bf16* to, __m512 value) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(value));
#else
  alignas(64) float lanes[16];
  _mm512_store_ps(lanes, value);
  for (int i = 0; i < 16; i++) to[i] = to_bf16(lanes[i]);
#endif
}

#endif

}  // namespace polyloom
