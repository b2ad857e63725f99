// Shrink and expand of long bfloat16 segments on AMX tiles: 16 tokens a tile.
#pragma once

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

// B of two blocks of 16 outputs, ranks of four pages to a tile; zero where there is no page.
// to: [chunks, 2, 16, 16] words.
inline void gather_b(const Call<bf16>& call, const Segment& segment, int64_t slice, int64_t block,
                     int64_t blocks, uint32_t* to) {
  constexpr int64_t block_words = kRankWords<bf16> * kLanes;
  const int64_t b_start = call.layout.slices[slice].b_start;
  const int64_t chunks = (segment.num_pages + kTilePages - 1) / kTilePages;
  for (int64_t p = 0; p < chunks * kTilePages; p++) {
    for (int64_t q = 0; q < 2; q++) {
      uint32_t* tile = to + (p / kTilePages * 2 + q) * kTileWords + p % kTilePages * block_words;
      const bool there = q < blocks && p < segment.num_pages &&
                         call.pages[segment.first_page + p].touches(slice);
      if (there)
        std::memcpy(tile,
                    call.pages[segment.first_page + p].words + b_start + (block + q) * block_words,
                    block_words * 4);
      else
        std::memset(tile, 0, block_words * 4);
    }
  }
}

// One tile of tokens times two blocks of outputs.
inline void expand_tile(const Call<bf16>& call, const Segment& segment, const Item& item,
                        int64_t block, int64_t blocks, const uint32_t* b, int64_t token,
                        int64_t tokens) {
  const Slice& part = call.layout.slices[item.slice];
  const int64_t chunks = (segment.num_pages + kTilePages - 1) / kTilePages;
  const int64_t h_stride = static_cast<int64_t>(call.layout.slices.size()) * call.h_words * 4;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t c = 0; c < chunks; c++) {
    _tile_loadd(4, call.h_at(token, item.slice) + c * kLanes, h_stride);
    _tile_loadd(6, b + c * 2 * kTileWords, 64);
    _tile_loadd(7, b + (c * 2 + 1) * kTileWords, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
  }
  alignas(64) float sums[kTileTokens][2 * kLanes];
  _tile_stored(0, sums[0], sizeof(sums[0]));
  _tile_stored(1, sums[0] + kLanes, sizeof(sums[0]));
  const int64_t out = call.layout.slices.back().offset + call.layout.slices.back().out;
  for (int64_t t = 0; t < tokens; t++) {
    for (int64_t q = 0; q < blocks; q++) {
      const int64_t within = (block + q) * kLanes, column = part.offset + within;
      const int64_t lanes = part.out - within < kLanes ? part.out - within : kLanes;
      finish(call, segment, call.y + (token + t) * call.y_stride + column, column, lanes,
             load16(sums[t] + q * kLanes), out);
    }
  }
}

inline void expand_on_tiles(const Call<bf16>& call, const Item& item, TileShapes& shapes,
                            std::vector<uint32_t>& b) {
  const Segment& segment = call.segments[item.segment];
  const int64_t chunks = (segment.num_pages + kTilePages - 1) / kTilePages;
  b.resize(static_cast<size_t>(chunks * 2 * kTileWords));
  for (int64_t block = item.first; block < item.last; block += 2) {
    const int64_t blocks = item.last - block < 2 ? 1 : 2;
    gather_b(call, segment, item.slice, block, blocks, b.data());
    for (int64_t token = item.begin; token < item.end; token += kTileTokens) {
      const int64_t left = item.end - token;
      const int64_t tokens = left < kTileTokens ? left : kTileTokens;
      shapes.set(tokens, kLanes);
      expand_tile(call, segment, item, block, blocks, b.data(), token, tokens);
    }
  }
}

#endif

}  // namespace polyloom::lora
