// Shrink and expand of long bfloat16 segments on AMX tiles: 16 tokens a tile.
#pragma once

#include <algorithm>

#include "cpu_amx.h"
#include "lora_layout.h"

namespace polyloom::lora {

#if defined(POLYLOOM_AMX)

constexpr int kTileTokens = 16;
constexpr int kTilePages = 4;  // 32 ranks: one tile row of h
constexpr int kTileWords = kLanes * kLanes;

// The tile registers' shapes for one scope; what was there before is restored after it, since
// other code of this thread may keep its own.
class TileShapes {
 public:
  TileShapes() { _tile_storeconfig(&before_); }
  ~TileShapes() {
    if (before_.palette != 0)
      _tile_loadconfig(&before_);
    else
      _tile_release();
  }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

  // Tiles 0-3 accumulate `tokens` rows of `columns` floats, 4 and 5 are left operands of 32
  // values, 6 and 7 right operands.
  void set(int64_t tokens, int columns) {
    if (tokens == tokens_ && columns == columns_) return;
    tokens_ = tokens;
    columns_ = columns;
    Config config{};
    config.palette = 1;
    for (int tile = 0; tile < 8; tile++) {
      config.rows[tile] = static_cast<uint8_t>(tile < 6 ? tokens : kLanes);
      config.bytes[tile] = static_cast<uint16_t>(tile == 4 || tile == 5 ? 64 : columns * 4);
    }
    _tile_loadconfig(&config);
  }

 private:
  struct alignas(64) Config {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  Config before_;
  int64_t tokens_ = 0;
  int columns_ = 0;
};

// Up to four tiles of tokens share each tile of A; `tokens` rows in each.
template <int Q>
void shrink_tiles(const Call<bf16>& call, const uint32_t* a, int64_t token, int64_t tokens,
                  int64_t slice, int64_t word) {
  const int64_t stride = call.x_stride * 2;
  const bf16* x = call.x + token * call.x_stride;
  const int64_t next = kTileTokens * call.x_stride;
  _tile_zero(0);
  if constexpr (Q > 1) _tile_zero(1);
  if constexpr (Q > 2) _tile_zero(2);
  if constexpr (Q > 3) _tile_zero(3);
  for (int64_t unit = 0; unit < call.layout.units; unit += kLanes) {
    const bf16* from = x + unit * 2;
    _tile_loadd(6, a + unit * kPageRanks, kPageRanks * 4);
    _tile_loadd(4, from, stride);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Q > 1) {
      _tile_loadd(5, from + next, stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (Q > 2) {
      _tile_loadd(4, from + 2 * next, stride);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (Q > 3) {
      _tile_loadd(5, from + 3 * next, stride);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  alignas(64) float h[4][kTileTokens][kPageRanks];
  _tile_stored(0, h[0], kPageRanks * 4);
  if constexpr (Q > 1) _tile_stored(1, h[1], kPageRanks * 4);
  if constexpr (Q > 2) _tile_stored(2, h[2], kPageRanks * 4);
  if constexpr (Q > 3) _tile_stored(3, h[3], kPageRanks * 4);
  for (int64_t q = 0; q < Q; q++)
    for (int64_t t = 0; t < tokens; t++)
      store_h(call.h_at(token + q * kTileTokens + t, slice) + word, h[q][t], bf16{});
}

inline void shrink_on_tiles(const Call<bf16>& call, const Item& item, TileShapes& shapes) {
  const PageRef& page = call.pages[call.segments[item.segment].first_page + item.first];
  const uint32_t* a = page.words + call.layout.slices[item.slice].a_start;
  const int64_t word = static_cast<int64_t>(item.first) * kRankWords<bf16>;
  int64_t token = item.begin;
  shapes.set(kTileTokens, kPageRanks);
  for (; token + 4 * kTileTokens <= item.end; token += 4 * kTileTokens)
    shrink_tiles<4>(call, a, token, kTileTokens, item.slice, word);
  for (; token + kTileTokens <= item.end; token += kTileTokens)
    shrink_tiles<1>(call, a, token, kTileTokens, item.slice, word);
  if (token == item.end) return;
  shapes.set(item.end - token, kPageRanks);
  shrink_tiles<1>(call, a, token, item.end - token, item.slice, word);
}

// Words that a pair of blocks takes once its ranks are gathered: [chunks, 2, 16, 16].
inline int64_t pair_words(int64_t num_pages) {
  return (num_pages + kTilePages - 1) / kTilePages * 2 * kTileWords;
}

// B of two blocks of 16 outputs, ranks of four pages to a tile; zero where there is no page.
inline void gather_pair(const Call<bf16>& call, const Segment& segment, int64_t slice,
                        int64_t block, int64_t blocks, uint32_t* to) {
  constexpr int64_t block_words = kRankWords<bf16> * kLanes;
  const int64_t b_start = call.layout.slices[slice].b_start;
  std::memset(to, 0, static_cast<size_t>(pair_words(segment.num_pages)) * 4);
  for (int64_t p = 0; p < segment.num_pages; p++) {
    const PageRef& page = call.pages[segment.first_page + p];
    if (!page.touches(slice)) continue;
    uint32_t* tile = to + p / kTilePages * 2 * kTileWords + p % kTilePages * block_words;
    for (int64_t q = 0; q < blocks; q++)
      std::memcpy(tile + q * kTileWords, page.words + b_start + (block + q) * block_words,
                  block_words * 4);
  }
}

// sums[t] = B h of 32 outputs for one tile of tokens.
inline void multiply_pair(const Call<bf16>& call, const uint32_t* b, int64_t chunks,
                          int64_t token, int64_t slice, float (*sums)[2 * kLanes]) {
  const int64_t h_stride = static_cast<int64_t>(call.layout.slices.size()) * call.h_words * 4;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t c = 0; c < chunks; c++) {
    _tile_loadd(4, call.h_at(token, slice) + c * kLanes, h_stride);
    _tile_loadd(6, b + c * 2 * kTileWords, 64);
    _tile_loadd(7, b + (c * 2 + 1) * kTileWords, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums[0], sizeof(sums[0]));
  _tile_stored(1, sums[0] + kLanes, sizeof(sums[0]));
}

// y[token + t][column … column + columns) += sums[t], for at most 32 columns.
inline void add_pair(const Call<bf16>& call, const Segment& segment, int64_t token, int64_t tokens,
                     int64_t column, int64_t columns, const float (*sums)[2 * kLanes]) {
  bf16* y = call.y + token * call.y_stride + column;
  if (columns == 2 * kLanes && segment.rows == nullptr) {
    for (int64_t t = 0; t < tokens; t++, y += call.y_stride) {
      const f32x16 low = load16(y) + load16(sums[t]);
      const f32x16 high = load16(y + kLanes) + load16(sums[t] + kLanes);
      const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
      std::memcpy(y, &both, sizeof(both));
    }
    return;
  }
  const int64_t out = call.layout.slices.back().offset + call.layout.slices.back().out;
  for (int64_t t = 0; t < tokens; t++, y += call.y_stride)
    for (int64_t c = 0; c < columns; c += kLanes)
      finish(call, segment, y + c, column + c, std::min<int64_t>(columns - c, kLanes),
             load16(sums[t] + c), out);
}

inline void expand_on_tiles(const Call<bf16>& call, const Item& item, TileShapes& shapes,
                            std::vector<uint32_t>& gathered) {
  const Segment& segment = call.segments[item.segment];
  const Slice& part = call.layout.slices[item.slice];
  const int64_t words = pair_words(segment.num_pages), pairs = (item.last - item.first + 1) / 2;
  gathered.resize(static_cast<size_t>(pairs * words));
  for (int64_t i = 0; i < pairs; i++) {
    const int64_t block = item.first + 2 * i;
    gather_pair(call, segment, item.slice, block, std::min<int64_t>(item.last - block, 2),
                gathered.data() + i * words);
  }
  alignas(64) float sums[kTileTokens][2 * kLanes];
  for (int64_t token = item.begin; token < item.end; token += kTileTokens) {
    const int64_t tokens = std::min<int64_t>(item.end - token, kTileTokens);
    shapes.set(tokens, kLanes);
    for (int64_t i = 0; i < pairs; i++) {
      const int64_t within = (item.first + 2 * i) * kLanes;
      const int64_t end = std::min<int64_t>(item.last * kLanes, part.out);
      multiply_pair(call, gathered.data() + i * words, words / (2 * kTileWords), token, item.slice,
                    sums);
      add_pair(call, segment, token, tokens, part.offset + within,
               std::min<int64_t>(end - within, 2 * kLanes), sums);
    }
  }
}

#endif

}  // namespace polyloom::lora
