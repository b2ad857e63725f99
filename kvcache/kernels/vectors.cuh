// Vectors of 16 bytes of float, __half or __nv_bfloat16 as floats, and sums over a warp.
#include <cuda_fp16.h>
#include <cuda_bf16.h>

#define NEG_INF __int_as_float(0xff800000)  // NVRTC knows no INFINITY
#define FULL_WARP 0xffffffffu

template <typename T> struct Element;
template <> struct Element<float> {
  static constexpr int LANES = 4;  // of a vector of 16 bytes
  __device__ static float wide(float v) { return v; }
  __device__ static float narrow(float v) { return v; }
};
template <> struct Element<__half> {
  static constexpr int LANES = 8;
  __device__ static float wide(__half v) { return __half2float(v); }
  __device__ static __half narrow(float v) { return __float2half_rn(v); }
};
template <> struct Element<__nv_bfloat16> {
  static constexpr int LANES = 8;
  __device__ static float wide(__nv_bfloat16 v) { return __bfloat162float(v); }
  __device__ static __nv_bfloat16 narrow(float v) { return __float2bfloat16_rn(v); }
};

// p is aligned to 16 bytes and read by nobody's writes during the kernel.
template <typename T>
__device__ __forceinline__ void load_vector(float (&out)[Element<T>::LANES], const T* p) {
  const uint4 raw = __ldg(reinterpret_cast<const uint4*>(p));
  const T* values = reinterpret_cast<const T*>(&raw);
#pragma unroll
  for (int i = 0; i < Element<T>::LANES; i++) out[i] = Element<T>::wide(values[i]);
}

template <typename T> __device__ __forceinline__ float load_one(const T* p) {
  return Element<T>::wide(__ldg(p));
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v += __shfl_xor_sync(FULL_WARP, v, d);
  return v;
}

__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int d = 16; d > 0; d >>= 1) v = fmaxf(v, __shfl_xor_sync(FULL_WARP, v, d));
  return v;
}
