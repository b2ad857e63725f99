// Shrink and expand of short segments with 16-lane vectors: a page is read once for all tokens.
#pragma once

#include "lora_layout.h"

namespace polyloom::lora {

constexpr int64_t kPrefetchWords = 512;  // ahead in a stream: 2 KiB

// acc[lane] += the dot product of two words.
POLYLOOM_INLINE f32x16 multiply_add(f32x16 acc, u32x16 a, u32x16 b, float) {
  return acc + (f32x16)a * (f32x16)b;
}

POLYLOOM_INLINE f32x16 multiply_add(f32x16 acc, u32x16 a, u32x16 b, bf16) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  return acc + (f32x16)(a << 16) * (f32x16)(b << 16) +
         (f32x16)(a & 0xffff0000u) * (f32x16)(b & 0xffff0000u);
#endif
}

// Words 2j and 2j + 1 of x, each over 8 lanes.
template <int J>
POLYLOOM_INLINE u32x16 spread(u32x16 x) {
  constexpr uint32_t l = 2 * J, h = 2 * J + 1;
  return __builtin_shuffle(x, u32x16{l, l, l, l, l, l, l, l, h, h, h, h, h, h, h, h});
}

template <typename T, int N, int J = 0>
POLYLOOM_INLINE void shrink_step(f32x16 (&acc)[N][8], const uint32_t* a, const u32x16 (&x)[N]) {
  if constexpr (J < 8) {
    __builtin_prefetch(a + J * kLanes + kPrefetchWords);
    const u32x16 words = load_words(a + J * kLanes);
    for (int n = 0; n < N; n++)
      acc[n][J] = multiply_add(acc[n][J], words, spread<J>(x[n]), T{});
    shrink_step<T, N, J + 1>(acc, a, x);
  }
}

// h[n][0 … 8) = A x[n] for N tokens.
template <typename T, int N>
void shrink_tokens(const Call<T>& call, const uint32_t* a, int64_t token, int64_t slice,
                   int64_t word) {
  f32x16 acc[N][8] = {};
  for (int64_t unit = 0; unit < call.layout.units; unit += kLanes) {
    u32x16 x[N];
    for (int n = 0; n < N; n++)
      x[n] = load_words(reinterpret_cast<const uint32_t*>(call.x + (token + n) * call.x_stride) +
                        unit);
    shrink_step<T, N>(acc, a + unit * kPageRanks, x);
  }
  for (int n = 0; n < N; n++) {
    const f32x16 sum = ((acc[n][0] + acc[n][1]) + (acc[n][2] + acc[n][3])) +
                       ((acc[n][4] + acc[n][5]) + (acc[n][6] + acc[n][7]));
    float h[kPageRanks];
    for (int r = 0; r < kPageRanks; r++) h[r] = sum[r] + sum[r + kPageRanks];
    store_h(call.h_at(token + n, slice) + word, h, T{});
  }
}

template <typename T>
void shrink_vector(const Call<T>& call, const Item& item) {
  const Segment& segment = call.segments[item.segment];
  const PageRef& page = call.pages[segment.first_page + item.first];
  const uint32_t* a = page.words + call.layout.slices[item.slice].a_start;
  const int64_t word = static_cast<int64_t>(item.first) * kRankWords<T>;
  int64_t token = item.begin;
  for (; token + 2 <= item.end; token += 2) shrink_tokens<T, 2>(call, a, token, item.slice, word);
  if (token < item.end) shrink_tokens<T, 1>(call, a, token, item.slice, word);
}

// y[n][64 columns from block on] += Σ_pages B h[n] for N tokens.
template <typename T, int N, int Q>
void expand_blocks(const Call<T>& call, const Segment& segment, int64_t slice, int64_t block,
                   int64_t token) {
  const Slice& part = call.layout.slices[slice];
  constexpr int64_t block_words = kRankWords<T> * kLanes;
  f32x16 acc[N][Q] = {};
  for (int64_t p = 0; p < segment.num_pages; p++) {
    const PageRef& page = call.pages[segment.first_page + p];
    if (!page.touches(slice)) continue;
    const uint32_t* b = page.words + part.b_start + block * block_words;
    for (int k = 0; k < kRankWords<T>; k++) {
      u32x16 h[N];
      for (int n = 0; n < N; n++)
        h[n] = u32x16{} + call.h_at(token + n, slice)[p * kRankWords<T> + k];
      for (int q = 0; q < Q; q++) {
        const uint32_t* from = b + q * block_words + k * kLanes;
        __builtin_prefetch(from + kPrefetchWords);
        const u32x16 words = load_words(from);
        for (int n = 0; n < N; n++) acc[n][q] = multiply_add(acc[n][q], words, h[n], T{});
      }
    }
  }
  const int64_t out = call.layout.slices.back().offset + call.layout.slices.back().out;
  for (int n = 0; n < N; n++) {
    for (int q = 0; q < Q; q++) {
      const int64_t within = (block + q) * kLanes, column = part.offset + within;
      const int64_t lanes = part.out - within < kLanes ? part.out - within : kLanes;
      finish(call, segment, call.y + (token + n) * call.y_stride + column, column, lanes,
             acc[n][q], out);
    }
  }
}

template <typename T, int Q>
void expand_tokens(const Call<T>& call, const Segment& segment, const Item& item, int64_t block) {
  int64_t token = item.begin;
  for (; token + 4 <= item.end; token += 4)
    expand_blocks<T, 4, Q>(call, segment, item.slice, block, token);
  for (; token < item.end; token++)
    expand_blocks<T, 1, Q>(call, segment, item.slice, block, token);
}

template <typename T>
void expand_vector(const Call<T>& call, const Item& item) {
  const Segment& segment = call.segments[item.segment];
  int64_t block = item.first;
  for (; block + 4 <= item.last; block += 4) expand_tokens<T, 4>(call, segment, item, block);
  for (; block < item.last; block++) expand_tokens<T, 1>(call, segment, item, block);
}

}  // namespace polyloom::lora
