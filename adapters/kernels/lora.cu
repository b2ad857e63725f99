// y[t] <- rows(y[t]) + sum over pages p of B_p (A_p x[t]): the equation of contract.py in two launches.
//
// Tokens that have an adapter come in tiles of up to 16 tokens of one revision, so that a page is
// read once a tile. A tile is (first, count, row, pages): its tokens are order[first .. first + count),
// its pages the first `pages` entries of row `row` of the page table. An empty tile has count 0.
// A layer of a page is A [slices][8][in_padded], then B [out][8], both of T.
#include "vectors.cuh"

constexpr int TILE = 16;       // tokens
constexpr int RANKS = 8;       // of a page
constexpr int SPAN = 512;      // input features that one block of lora_shrink reduces
constexpr int ROWS = 4;        // of A that a warp reduces at once
constexpr int SHRINK_WARPS = 4;
constexpr int EXPAND_THREADS = 256;

// The page table's row of this block's tile, in shared memory: addresses of A, then slice masks.
struct PageRow {
  long long* address;
  int* mask;
};

__device__ __forceinline__ PageRow load_pages(long long* memory, int4 tile,
    const long long* __restrict__ pages, const int* __restrict__ masks, int width, long long skip) {
  PageRow row = {memory, reinterpret_cast<int*>(memory + width)};
  for (int p = threadIdx.x; p < tile.w; p += blockDim.x) {
    row.address[p] = __ldg(pages + (long long)tile.z * width + p) + skip;
    row.mask[p] = __ldg(masks + (long long)tile.z * width + p);
  }
  return row;
}

// Lane l gets the sum over the warp of the l / 8-th value: 6 exchanges instead of 20.
__device__ __forceinline__ float warp_sum_of_four(float a, float b, float c, float d) {
  const int lane = threadIdx.x & 31;
  const bool high = lane & 16, odd = lane & 8;
  float first = high ? c : a, second = high ? d : b;
  first += __shfl_xor_sync(FULL_WARP, high ? a : c, 16);
  second += __shfl_xor_sync(FULL_WARP, high ? b : d, 16);
  float sum = odd ? second : first;
  sum += __shfl_xor_sync(FULL_WARP, odd ? first : second, 8);
#pragma unroll
  for (int step = 4; step > 0; step >>= 1) sum += __shfl_xor_sync(FULL_WARP, sum, step);
  return sum;
}

// partial[z][first + t][(p * slices + s) * 8 + r] = A_p[s][r] . x[order[first + t]] over the z-th SPAN
// of input features. grid (tiles, ceil(in_padded / SPAN)), block SHRINK_WARPS * 32.
// Dynamic shared memory: width * 12 bytes, rounded up to 16.
template <typename T>
__global__ void __launch_bounds__(SHRINK_WARPS * 32) lora_shrink(
    float* __restrict__ partial, const T* __restrict__ x, const int4* __restrict__ tiles,
    const int* __restrict__ order, const long long* __restrict__ pages,
    const int* __restrict__ masks, int tokens, int width, int slices, int in_features,
    int in_padded, long long x_stride, long long layer_bytes) {
  constexpr int N = Element<T>::LANES;
  extern __shared__ __align__(16) long long table[];
  __shared__ __align__(16) float xs[TILE][SPAN];
  __shared__ int4 shared_tile;
  __shared__ int token_of[TILE];
  if (threadIdx.x == 0) shared_tile = __ldg(tiles + blockIdx.x);
  __syncthreads();
  const int4 tile = shared_tile;
  if (tile.y == 0) return;
  const PageRow page = load_pages(table, tile, pages, masks, width, layer_bytes);
  if (threadIdx.x < tile.y) token_of[threadIdx.x] = __ldg(order + tile.x + threadIdx.x);
  __syncthreads();
  const int k0 = blockIdx.y * SPAN, span = min(SPAN, in_padded - k0);
  for (int t = 0; t < tile.y; t++) {
    const T* row = x + token_of[t] * x_stride + k0;
    for (int k = threadIdx.x; k < span; k += blockDim.x)
      xs[t][k] = k0 + k < in_features ? load_one(row + k) : 0.f;
  }
  __syncthreads();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int units = tile.w * slices * (RANKS / ROWS), ranks = width * slices * RANKS;
  for (int unit = warp; unit < units; unit += SHRINK_WARPS) {
    const int row = unit * ROWS, p = row / (slices * RANKS), in_page = row % (slices * RANKS);
    if (!(page.mask[p] >> (in_page / RANKS) & 1)) continue;
    const T* a = reinterpret_cast<const T*>(page.address[p]) + (long long)in_page * in_padded + k0;
    float sum[ROWS][TILE] = {};
    for (int k = lane * N; k < span; k += 32 * N) {
      float av[ROWS][N];
#pragma unroll
      for (int j = 0; j < ROWS; j++) load_vector<T>(av[j], a + (long long)j * in_padded + k);
#pragma unroll
      for (int t = 0; t < TILE; t++) {
        if (t < tile.y) {
#pragma unroll
          for (int i = 0; i < N; i += 4) {
            const float4 w = *reinterpret_cast<const float4*>(&xs[t][k + i]);
#pragma unroll
            for (int j = 0; j < ROWS; j++)
              sum[j][t] += w.x * av[j][i] + w.y * av[j][i + 1] + w.z * av[j][i + 2] + w.w * av[j][i + 3];
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < TILE; t++) {
      if (t < tile.y) {
        const float total = warp_sum_of_four(sum[0][t], sum[1][t], sum[2][t], sum[3][t]);
        const long long at = ((long long)blockIdx.y * tokens + tile.x + t) * ranks + row;
        if (lane % 8 == 0) __stcg(partial + at + lane / 8, total);
      }
    }
  }
}

// gain * (v - bias) + bias + shift, from the fp32 vectors [2][out] of a layer at `rows`.
__device__ __forceinline__ float apply_rows(float v, const float* rows, int outs, int o, float bias) {
  return __ldg(rows + o) * (v - bias) + bias + __ldg(rows + outs + o);
}

// y[t][o] <- rows(y[t][o]) + sum over pages and ranks of B_p[o][r] * A_p x, the latter the sum of
// `splits` partials. grid (tiles, ceil(outs / outs_a_block)), block EXPAND_THREADS.
// Slice s covers outputs from edge_s on; unused edges are `outs`. bias may be null.
// Dynamic shared memory: width * 12 bytes, rounded up to 16, and TILE * width * slices * 8 floats.
template <typename T>
__global__ void __launch_bounds__(EXPAND_THREADS) lora_expand(
    T* __restrict__ y, const float* __restrict__ partial, const int4* __restrict__ tiles,
    const int* __restrict__ order, const long long* __restrict__ pages,
    const int* __restrict__ masks, const long long* __restrict__ rows, const T* __restrict__ bias,
    int tokens, int width, int slices, int edge1, int edge2, int outs, int outs_a_block, int splits,
    long long y_stride, long long b_bytes, long long row_bytes) {
  constexpr int N = Element<T>::LANES;
  extern __shared__ __align__(16) long long table[];
  __shared__ int4 shared_tile;
  __shared__ long long shared_rows;
  __shared__ int token_of[TILE];
  if (threadIdx.x == 0) {
    shared_tile = __ldg(tiles + blockIdx.x);
    shared_rows = __ldg(rows + shared_tile.z);
  }
  __syncthreads();
  const int4 tile = shared_tile;
  if (tile.y == 0) return;
  const PageRow page = load_pages(table, tile, pages, masks, width, b_bytes);
  if (threadIdx.x < tile.y) token_of[threadIdx.x] = __ldg(order + tile.x + threadIdx.x);
  __syncthreads();
  const int o0 = blockIdx.y * outs_a_block, o1 = min(outs, o0 + outs_a_block);
  const int ranks = width * slices * RANKS;
  const int first_slice = (o0 >= edge1) + (o0 >= edge2);
  const int last_slice = (o1 - 1 >= edge1) + (o1 - 1 >= edge2);
  float* shrunk = reinterpret_cast<float*>(table + (width * 12 + 15) / 16 * 2);
  const int used = tile.w * slices * RANKS;
  for (int i = threadIdx.x; i < tile.y * used; i += EXPAND_THREADS) {
    const int t = i / used, rank = i % used, slice = rank / RANKS % slices;
    float sum = 0.f;
    if (slice >= first_slice && slice <= last_slice && page.mask[rank / (slices * RANKS)] >> slice & 1)
      for (int z = 0; z < splits; z++)
        sum += __ldg(partial + ((long long)z * tokens + tile.x + t) * ranks + rank);
    shrunk[t * ranks + rank] = sum;
  }
  __syncthreads();
  const float* vectors = reinterpret_cast<const float*>(shared_rows ? shared_rows + row_bytes : 0);
  for (int o = o0 + threadIdx.x; o < o1; o += EXPAND_THREADS) {
    const int slice = (o >= edge1) + (o >= edge2);
    float sum[TILE] = {};
    for (int p = 0; p < tile.w; p++) {
      if (!(page.mask[p] >> slice & 1)) continue;
      const T* b = reinterpret_cast<const T*>(page.address[p]) + (long long)o * RANKS;
      const float* s = shrunk + (p * slices + slice) * RANKS;
#pragma unroll
      for (int r = 0; r < RANKS; r += N) {
        float bv[N];
        load_vector<T>(bv, b + r);
#pragma unroll
        for (int t = 0; t < TILE; t++) {
          if (t < tile.y) {
#pragma unroll
            for (int i = 0; i < N; i += 4) {
              const float4 w = *reinterpret_cast<const float4*>(s + t * ranks + r + i);
              sum[t] += bv[i] * w.x + bv[i + 1] * w.y + bv[i + 2] * w.z + bv[i + 3] * w.w;
            }
          }
        }
      }
    }
    const float base_bias = vectors != nullptr && bias != nullptr ? load_one(bias + o) : 0.f;
#pragma unroll
    for (int t = 0; t < TILE; t++) {
      if (t < tile.y) {
        T* out = y + token_of[t] * y_stride + o;
        float v = Element<T>::wide(__ldcg(out));
        if (vectors != nullptr) v = apply_rows(v, vectors, outs, o, base_bias);
        __stcg(out, Element<T>::narrow(v + sum[t]));
      }
    }
  }
}
