// The paged cache on CUDA devices: append, attend, gather, copy.
//
// A layer's keys and values are [blocks][kv_heads][block_size][head_dim] of S. Either S is T, or S
// is signed char and each (block, kv head, place) has an fp32 scale in [blocks][kv_heads][block_size]:
// value = stored * scale. KV heads are never expanded: all query heads of one share a block's reads.
#include "vectors.cuh"

constexpr int MAX_DIM = 256;
constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int KEYS = 32;       // tokens of context that a block takes at once: one a lane
constexpr int KEY_LANES = 4;   // threads that share a token's key
constexpr float LOG2E = 1.4426950408889634f;

// How a stored element reads: a vector of 16 bytes, or one.
template <typename S> struct Stored {
  static constexpr int LANES = Element<S>::LANES;
  static constexpr bool SCALED = false;
  __device__ static float wide(S v) { return Element<S>::wide(v); }
  __device__ static void vector(float (&out)[LANES], const S* p) { load_vector<S>(out, p); }
};
template <> struct Stored<signed char> {
  static constexpr int LANES = 16;
  static constexpr bool SCALED = true;
  __device__ static float wide(signed char v) { return (float)v; }
  __device__ static void vector(float (&out)[LANES], const signed char* p) {
    const uint4 raw = __ldg(reinterpret_cast<const uint4*>(p));
    const signed char* values = reinterpret_cast<const signed char*>(&raw);
#pragma unroll
    for (int i = 0; i < LANES; i++) out[i] = (float)values[i];
  }
};

template <typename T, typename S> __device__ __forceinline__ S store_as(float v, float inverse_scale);
template <> __device__ __forceinline__ float store_as<float, float>(float v, float) { return v; }
template <> __device__ __forceinline__ __half store_as<__half, __half>(float v, float) {
  return __float2half_rn(v);
}
template <> __device__ __forceinline__ __nv_bfloat16 store_as<__nv_bfloat16, __nv_bfloat16>(float v, float) {
  return __float2bfloat16_rn(v);
}
#define STORE_AS_CHAR(T)                                                                          \
  template <> __device__ __forceinline__ signed char store_as<T, signed char>(float v, float inverse) { \
    return (signed char)__float2int_rn(fminf(fmaxf(v * inverse, -127.f), 127.f));                 \
  }
STORE_AS_CHAR(float)
STORE_AS_CHAR(__half)
STORE_AS_CHAR(__nv_bfloat16)

// Rotates the first `rotary` dimensions of every query and key head (i with i + rotary / 2) and
// writes k and v to the cache; q is changed in place, k and v are not. One warp a head:
// grid (tokens, ceil((heads + 2 * kv_heads) / WARPS)), block THREADS. A token whose slot is -1 is
// padding. cos, sin: [tokens][rotary], unused if rotary is 0.
template <typename T, typename S>
__global__ void __launch_bounds__(THREADS, 1) kv_append(
    T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v, S* __restrict__ keys,
    S* __restrict__ values, float* __restrict__ key_scales, float* __restrict__ value_scales,
    const T* __restrict__ cos, const T* __restrict__ sin, const long long* __restrict__ slots,
    int heads, int kv_heads, int dim, int rotary, int block_size, long long q_stride,
    long long k_stride, long long v_stride) {
  __shared__ float rows[WARPS][MAX_DIM];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const long long t = blockIdx.x;
  const int head = blockIdx.y * WARPS + warp;
  const long long slot = __ldg(slots + t);
  if (slot < 0 || head >= heads + 2 * kv_heads) return;
  const bool is_query = head < heads, is_key = !is_query && head < heads + kv_heads;
  const int kv_head = head - heads - (is_key ? 0 : kv_heads);
  if (is_query && rotary == 0) return;
  const T* source = is_query ? q + t * q_stride + head * dim
                  : is_key ? k + t * k_stride + kv_head * dim : v + t * v_stride + kv_head * dim;
  float* row = rows[warp];
  for (int d = lane; d < dim; d += 32) row[d] = Element<T>::wide(__ldcg(source + d));
  __syncwarp();
  float result[MAX_DIM / 32];
  float largest = 0.f;
#pragma unroll
  for (int i = 0; i < MAX_DIM / 32; i++) {
    const int d = lane + i * 32;
    if (d < dim) {
      float value = row[d];
      if ((is_query || is_key) && d < rotary) {
        const int half = rotary / 2;
        const float other = d < half ? -row[d + half] : row[d - half];
        value = value * load_one(cos + t * rotary + d) + other * load_one(sin + t * rotary + d);
      }
      result[i] = value;
      largest = fmaxf(largest, fabsf(value));
    }
  }
  if (is_query) {
#pragma unroll
    for (int i = 0; i < MAX_DIM / 32; i++) {
      const int d = lane + i * 32;
      if (d < dim) __stcg(q + t * q_stride + head * dim + d, Element<T>::narrow(result[i]));
    }
    return;
  }
  const long long place = (slot / block_size * kv_heads + kv_head) * block_size + slot % block_size;
  float inverse = 1.f;
  if (Stored<S>::SCALED) {
    largest = warp_max(largest);
    inverse = largest > 0.f ? 127.f / largest : 0.f;
    if (lane == 0) __stcg((is_key ? key_scales : value_scales) + place, largest / 127.f);
  }
  S* target = (is_key ? keys : values) + place * dim;
#pragma unroll
  for (int i = 0; i < MAX_DIM / 32; i++) {
    const int d = lane + i * 32;
    if (d < dim) __stcg(target + d, store_as<T, S>(result[i], inverse));
  }
}

// A sequence's queries of one step: tokens [first, first + count) of the batch, its last ones;
// `context` tokens are in the cache, theirs included. table: its row of the block tables.
struct Queries {
  int first, count, context, table;
};

__device__ __forceinline__ float exp2_of_difference(float a, float b) {
  return a == NEG_INF ? 0.f : exp2f(a - b);
}

// softmax(cap(scale * q k)) v over a paged context, for up to ROWS rows of one sequence and one kv
// head. Row r is query token r / group and query head kv_head * group + r % group.
// Each block keeps ROWS running maxima and sums; four lanes share a key; a thread owns COLS columns
// of the output, and where head_dim < 128 groups of threads take different tokens.
// grid (sequences, kv_heads * row_chunks, splits), block THREADS.
// One split: out is written. More: partial [splits][rows of the step][heads][dim + 2] has the sums,
// their maximum (base 2) and their weight; attend_merge joins them.
// Dynamic shared memory: floats, see attention_shared_floats in cuda_attention.py.
template <typename T, typename S, int ROWS, int COLS>
__global__ void __launch_bounds__(THREADS, 1) attend(
    T* __restrict__ out, float* __restrict__ partial, const T* __restrict__ q,
    const S* __restrict__ keys, const S* __restrict__ values, const float* __restrict__ key_scales,
    const float* __restrict__ value_scales, const int4* __restrict__ sequences,
    const int* __restrict__ compact, const int* __restrict__ tables, int max_blocks, int block_size,
    int heads, int kv_heads, int dim, int window, float scale, float softcap, int rows_in_all,
    long long q_stride) {
  constexpr int N = Stored<S>::LANES, WIDTH = 128 * COLS;
  extern __shared__ __align__(16) float memory[];
  __shared__ int4 shared_sequence;
  __shared__ int shared_compact;
  __shared__ long long place_of[KEYS];
  float* queries = memory;                          // [ROWS][WIDTH], scaled; 0 where there is none
  float* weights = queries + ROWS * WIDTH;          // [KEYS][ROWS]
  float* scores = weights + KEYS * ROWS;            // [ROWS][KEYS + 1]
  float* maxima = scores + ROWS * (KEYS + 1);       // [ROWS]
  float* sums = maxima + ROWS;
  float* fixes = sums + ROWS;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int group = heads / kv_heads;
  const int kv_head = blockIdx.y % kv_heads, first_row = blockIdx.y / kv_heads * ROWS;
  if (tid == 0) {
    shared_sequence = __ldg(sequences + blockIdx.x);
    shared_compact = __ldg(compact + blockIdx.x);
  }
  __syncthreads();
  const Queries own = {shared_sequence.x, shared_sequence.y, shared_sequence.z, shared_sequence.w};
  const int rows = min(ROWS, own.count * group - first_row);
  if (rows <= 0) return;
  for (int i = tid; i < ROWS * WIDTH; i += THREADS) {
    const int r = i / WIDTH, d = i % WIDTH, row = first_row + r;
    const T* source = q + (own.first + row / group) * q_stride + (kv_head * group + row % group) * dim;
    queries[i] = r < rows && d < dim ? load_one(source + d) * scale : 0.f;
  }
  for (int r = tid; r < ROWS; r += THREADS) { maxima[r] = NEG_INF; sums[r] = 0.f; }

  const int first_position = own.context - own.count;
  const int low = window > 0 ? max(0, first_position + first_row / group - window + 1) : 0;
  const int chunks = (own.context - low + KEYS - 1) / KEYS;
  const int per_split = (chunks + gridDim.z - 1) / gridDim.z * KEYS;
  const int begin = low + blockIdx.z * per_split, end = min(own.context, begin + per_split);
  const int key = tid / KEY_LANES, part = tid % KEY_LANES;
  int columns = 128;
  while (columns / 2 >= dim) columns /= 2;
  const int column = tid % columns, share = tid / columns, shares = THREADS / columns;
  float acc[COLS][ROWS] = {};
  __syncthreads();

  for (int base = begin; base < end; base += KEYS) {
    const int position = base + key;
    float dot[ROWS] = {};
    if (position < end) {
      const int block = __ldg(tables + (long long)own.table * max_blocks + position / block_size);
      const long long place = ((long long)block * kv_heads + kv_head) * block_size + position % block_size;
      if (part == 0) place_of[key] = place;
#pragma unroll 1
      for (int d = part * N; d < dim; d += KEY_LANES * N) {
        float k[N];
        Stored<S>::vector(k, keys + place * dim + d);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
#pragma unroll
          for (int i = 0; i < N; i += 4) {
            const float4 w = *reinterpret_cast<const float4*>(queries + r * WIDTH + d + i);
            dot[r] += k[i] * w.x + k[i + 1] * w.y + k[i + 2] * w.z + k[i + 3] * w.w;
          }
        }
      }
      if (Stored<S>::SCALED) {
        const float key_scale = __ldg(key_scales + place);
#pragma unroll
        for (int r = 0; r < ROWS; r++) dot[r] *= key_scale;
      }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float score = dot[r];
      score += __shfl_xor_sync(FULL_WARP, score, 1);
      score += __shfl_xor_sync(FULL_WARP, score, 2);
      if (r % KEY_LANES == part) {
        const int query = first_position + (first_row + r) / group;
        const bool seen = position < end && position <= query && (window <= 0 || position > query - window);
        if (softcap > 0.f) score = softcap * tanhf(score / softcap);
        scores[r * (KEYS + 1) + key] = seen ? score * LOG2E : NEG_INF;
      }
    }
    __syncthreads();
    const float value_scale =
        Stored<S>::SCALED && base + lane < end ? __ldg(value_scales + place_of[lane]) : 1.f;
    for (int r = warp; r < ROWS; r += WARPS) {
      const float score = scores[r * (KEYS + 1) + lane], before = maxima[r];
      const float top = fmaxf(before, warp_max(score));
      const float weight = exp2_of_difference(score, top);
      const float sum = warp_sum(weight);
      weights[lane * ROWS + r] = weight * value_scale;
      __syncwarp();
      if (lane == 0) {
        fixes[r] = exp2_of_difference(before, top);
        sums[r] = sums[r] * fixes[r] + sum;
        maxima[r] = top;
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
#pragma unroll
      for (int c = 0; c < COLS; c++) acc[c][r] *= fixes[r];
    }
    const int present = min(KEYS, end - base);
#pragma unroll 2
    for (int j = share; j < present; j += shares) {
      const S* source = values + place_of[j] * dim;
      float v[COLS];
#pragma unroll
      for (int c = 0; c < COLS; c++) {
        const int d = column + c * 128;
        v[c] = d < dim ? Stored<S>::wide(__ldg(source + d)) : 0.f;
      }
#pragma unroll
      for (int r = 0; r < ROWS; r += 4) {
        const float4 w = *reinterpret_cast<const float4*>(weights + j * ROWS + r);
#pragma unroll
        for (int c = 0; c < COLS; c++) {
          acc[c][r] += w.x * v[c];
          acc[c][r + 1] += w.y * v[c];
          acc[c][r + 2] += w.z * v[c];
          acc[c][r + 3] += w.w * v[c];
        }
      }
    }
    __syncthreads();
  }

  for (int other = 1; other < shares; other++) {  // `queries` is not read any more
    if (share == other && column < dim) {
#pragma unroll
      for (int r = 0; r < ROWS; r++) queries[r * WIDTH + column] = acc[0][r];
    }
    __syncthreads();
    if (share == 0 && column < dim) {
#pragma unroll
      for (int r = 0; r < ROWS; r++) acc[0][r] += queries[r * WIDTH + column];
    }
    __syncthreads();
  }
  if (share != 0) return;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    if (r < rows) {
      const int row = first_row + r, head = kv_head * group + row % group;
#pragma unroll
      for (int c = 0; c < COLS; c++) {
        const int d = column + c * 128;
        if (d < dim) {
          if (gridDim.z == 1) {
            const long long at = ((long long)(own.first + row / group) * heads + head) * dim + d;
            __stcg(out + at, Element<T>::narrow(sums[r] > 0.f ? acc[c][r] / sums[r] : 0.f));
          } else {
            const long long at = (long long)blockIdx.z * rows_in_all + shared_compact + row / group;
            float* target = partial + (at * heads + head) * (dim + 2);
            __stcg(target + d, acc[c][r]);
            if (d == 0) { __stcg(target + dim, maxima[r]); __stcg(target + dim + 1, sums[r]); }
          }
        }
      }
    }
  }
}

// Joins the splits of attend. token_of: [rows of the step], the batch's token of each, -1 for
// padding. grid (rows of the step, heads), block THREADS.
template <typename T>
__global__ void __launch_bounds__(THREADS) attend_merge(
    T* __restrict__ out, const float* __restrict__ partial, const int* __restrict__ token_of,
    int splits, int heads, int dim) {
  const int token = __ldg(token_of + blockIdx.x), head = blockIdx.y;
  if (token < 0) return;
  const float* mine = partial + ((long long)blockIdx.x * heads + head) * (dim + 2);
  const long long stride = (long long)gridDim.x * heads * (dim + 2);
  float top = NEG_INF;
  for (int z = 0; z < splits; z++) top = fmaxf(top, __ldg(mine + z * stride + dim));
  for (int d = threadIdx.x; d < dim; d += THREADS) {
    float sum = 0.f, value = 0.f;
    for (int z = 0; z < splits; z++) {
      const float* split = mine + z * stride;
      const float fix = exp2_of_difference(__ldg(split + dim), top);
      sum += __ldg(split + dim + 1) * fix;
      value += __ldg(split + d) * fix;
    }
    __stcg(out + ((long long)token * heads + head) * dim + d, Element<T>::narrow(sum > 0.f ? value / sum : 0.f));
  }
}

// keys_out, values_out [kv_heads][length][dim] <- one sequence's context of `length` tokens.
// grid (length, kv_heads), block 64.
template <typename T, typename S>
__global__ void kv_gather(
    T* __restrict__ keys_out, T* __restrict__ values_out, const S* __restrict__ keys,
    const S* __restrict__ values, const float* __restrict__ key_scales,
    const float* __restrict__ value_scales, const int* __restrict__ table, int block_size, int dim) {
  const int j = blockIdx.x, kv_head = blockIdx.y, kv_heads = gridDim.y;
  const long long block = __ldg(table + j / block_size);
  const long long place = (block * kv_heads + kv_head) * block_size + j % block_size;
  const long long at = ((long long)kv_head * gridDim.x + j) * dim;
  const float key_scale = Stored<S>::SCALED ? __ldg(key_scales + place) : 1.f;
  const float value_scale = Stored<S>::SCALED ? __ldg(value_scales + place) : 1.f;
  for (int d = threadIdx.x; d < dim; d += blockDim.x) {
    __stcg(keys_out + at + d, Element<T>::narrow(Stored<S>::wide(__ldg(keys + place * dim + d)) * key_scale));
    __stcg(values_out + at + d, Element<T>::narrow(Stored<S>::wide(__ldg(values + place * dim + d)) * value_scale));
  }
}

// Copies whole blocks, K and V of every layer: pairs (from, to). No `to` is another's `from`.
// grid (pairs, layers, 2), block THREADS. A block of one layer has `words` words of 4 bytes.
__global__ void __launch_bounds__(THREADS) kv_copy(
    unsigned* __restrict__ keys, unsigned* __restrict__ values, const int2* __restrict__ pairs,
    int blocks, int words) {
  const int2 pair = __ldg(pairs + blockIdx.x);
  unsigned* cache = (blockIdx.z ? values : keys) + (long long)blockIdx.y * blocks * words;
  const unsigned* from = cache + (long long)pair.x * words;
  unsigned* to = cache + (long long)pair.y * words;
  for (int i = threadIdx.x; i < words; i += THREADS) __stcg(to + i, __ldcg(from + i));
}
