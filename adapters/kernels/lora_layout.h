// How a layer of a page lies in memory, and the work of one call.
//
// Everything is 32-bit words: one float, or two bfloat16 that meet in one dot-product lane. With
// P values a word, U = in / P words of x rounded up to 16, and 8 ranks a page:
//   A, per slice: [U][8] words, word (u, r) = A[r, u·P … u·P + P)
//   B, per slice: [out / 16, rounded up][8 / P][16] words, word (b, k, o) = B[16·b + o, k·P … + P)
// so shrink and expand both stream through a page in order, 64 bytes at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu_vec.h"

namespace polyloom::lora {

constexpr int kPageRanks = 8;
constexpr int kLanes = 16;

template <typename T>
constexpr int kPerWord = sizeof(uint32_t) / sizeof(T);

// Words of h, and rows of B, that one page has.
template <typename T>
constexpr int kRankWords = kPageRanks / kPerWord<T>;

struct Slice {
  int64_t offset, out;  // rows of the fused linear
  int64_t blocks;       // of 16 outputs
  int64_t a_start, b_start;  // words from the start of the layer
};

struct Layout {
  int64_t in = 0, units = 0, layer_words = 0;
  std::vector<Slice> slices;
};

template <typename T>
Layout make_layout(int64_t in, const int32_t* offsets, int64_t num_slices) {
  Layout layout;
  constexpr int64_t step = kLanes * kPerWord<T>;
  layout.in = in;
  layout.units = (in + step - 1) / step * kLanes;
  int64_t words = num_slices * layout.units * kPageRanks;
  for (int64_t s = 0; s < num_slices; s++) {
    const int64_t out = offsets[s + 1] - offsets[s];
    const int64_t blocks = (out + kLanes - 1) / kLanes;
    layout.slices.push_back({offsets[s], out, blocks, s * layout.units * kPageRanks, words});
    words += blocks * kLanes * kRankWords<T>;
  }
  layout.layer_words = words;
  return layout;
}

struct PageRef {
  const uint32_t* words;  // this layer's
  int32_t mask;           // slices it touches
  bool touches(int64_t slice) const { return mask >> slice & 1; }
};

struct Segment {
  int64_t begin, end;  // tokens
  int64_t first_page, num_pages;
  const float* rows;  // gain, then shift, of this layer; null for none
  bool tiles;
};

// Shrink: one slice of one page for tokens [begin, end).
// Expand: blocks [first, last) of one slice for tokens [begin, end), over all pages.
struct Item {
  int32_t segment, slice, first, last;
  int64_t begin, end;
};

template <typename T>
struct Call {
  Layout layout;
  const T* x;
  T* y;
  int64_t x_stride, y_stride;
  const T* bias;
  std::vector<PageRef> pages;
  std::vector<Segment> segments;
  std::vector<Item> shrinks, expands;
  // Shrunk values [T, slices, h_words], ready to be broadcast; zero where no page touches a slice.
  uint32_t* h;
  int64_t h_words;

  uint32_t* h_at(int64_t token, int64_t slice) const {
    return h + (token * static_cast<int64_t>(layout.slices.size()) + slice) * h_words;
  }
};

POLYLOOM_INLINE u32x16 load_words(const uint32_t* from) {
  u32x16 words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}

// Rounds 8 ranks of h to words.
POLYLOOM_INLINE void store_h(uint32_t* to, const float* h, float) {
  std::memcpy(to, h, kPageRanks * sizeof(float));
}

POLYLOOM_INLINE void store_h(uint32_t* to, const float* h, bf16) {
  for (int k = 0; k < kPageRanks / 2; k++)
    to[k] = to_bf16(h[2 * k]).bits | static_cast<uint32_t>(to_bf16(h[2 * k + 1]).bits) << 16;
}

// y[column … column + lanes) = rows(y) + add, rounded once.
template <typename T>
POLYLOOM_INLINE void finish(const Call<T>& call, const Segment& segment, T* y, int64_t column,
                            int64_t lanes, f32x16 add, int64_t out) {
  alignas(64) float value[kLanes], sum[kLanes];
  if (lanes == kLanes && segment.rows == nullptr) {
    store16(y, load16(y) + add);
    return;
  }
  std::memcpy(sum, &add, sizeof(sum));
  for (int64_t i = 0; i < lanes; i++) {
    value[i] = to_float(y[i]);
    if (segment.rows != nullptr) {
      const float bias = call.bias == nullptr ? 0.0f : to_float(call.bias[column + i]);
      const float gain = segment.rows[column + i], shift = segment.rows[out + column + i];
      value[i] = gain * (value[i] - bias) + bias + shift;
    }
    y[i] = from_float<T>(value[i] + sum[i]);
  }
}

}  // namespace polyloom::lora
