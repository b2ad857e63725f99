// One row tile of paged attention: rows of queries that share a KV head, over a stretch of one
// sequence's context. See `attention.cpp` for the cache's layout.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu_amx.h"
#include "cpu_vec.h"

namespace polyloom {

constexpr int kLanes = 16;
constexpr int kRowTile = 32;  // rows that share one pass over K and V
constexpr int kChunk = 256;   // tokens between two rescalings of the output
constexpr int kMaxHeadDim = 256;
constexpr int kMinAmxRows = 8;     // below, the vector path reads the cache as fast
constexpr float kUnseen = -1e30f;  // running maximum of a row that has seen no token

template <typename T>
constexpr int kPair = sizeof(float) / sizeof(T);

struct Mask {
  float scale;
  int window;     // 0: none
  float softcap;  // 0: none
};

// One row tile's share of one sequence's context, for one KV head.
struct Item {
  int sequence, head, first_row, rows;
  int first_token, end_token;  // first_token is a multiple of 16
  int split, splits;
  int64_t partial;  // index of the first of `rows` partial results, if splits > 1
};

template <typename T>
struct Layer {
  T* keys;
  T* values;
  int heads, block, dim;
  const int32_t* tables;
  int64_t table_width;

  int64_t group(int sequence, int head, int token) const {
    const int64_t id = tables[sequence * table_width + token / block];
    return ((id * heads + head) * block + token % block) * static_cast<int64_t>(dim);
  }
};

template <typename T>
struct Queries {
  const T* data;
  int64_t token_stride, head_stride;
};

// Scratch of one thread.
template <typename T>
struct Scratch {
  alignas(64) float scores[kRowTile][kChunk];
  alignas(64) T weights[kRowTile][kChunk];
  alignas(64) T query[kRowTile * kMaxHeadDim];
  alignas(64) float output[kRowTile * kMaxHeadDim];
  alignas(64) T tail[kLanes * kMaxHeadDim];
  alignas(64) float tile[kLanes * kLanes];
  float largest[kRowTile], sum[kRowTile];
  const T* key_groups[kChunk / kLanes];
  const T* value_groups[kChunk / kLanes];
};

template <typename T>
POLYLOOM_INLINE f32x16 multiply(f32x16 acc, const T* lanes, const T* factor) {
  if constexpr (kPair<T> == 1) {
    return acc + load16(lanes) * *factor;
  } else {
    uint32_t pair;
    std::memcpy(&pair, factor, sizeof(pair));
    return dot_pairs(acc, lanes, pair);
  }
}

template <typename T>
POLYLOOM_INLINE void prefetch(const T* from, int elements) {
  const char* start = reinterpret_cast<const char*>(from);
  for (size_t i = 0; i < elements * sizeof(T); i += 64) __builtin_prefetch(start + i, 0, 2);
}

// scores[ROWS][16 tokens] = query rows . one group of keys.
template <int ROWS, typename T>
POLYLOOM_INLINE void score_rows(const T* query, const T* keys, int dim, float* scores) {
  f32x16 acc[ROWS] = {};
  for (int d = 0; d < dim; d += kPair<T>)
    for (int r = 0; r < ROWS; r++)
      acc[r] = multiply(acc[r], keys + d * kLanes, query + r * dim + d);
  for (int r = 0; r < ROWS; r++) store16(scores + r * kChunk, acc[r]);
}

template <typename T>
void score_group(const T* query, const T* keys, int dim, int rows, float* scores) {
  int r = 0;
  for (; r + 8 <= rows; r += 8) score_rows<8>(query + r * dim, keys, dim, scores + r * kChunk);
  query += r * dim;
  scores += r * kChunk;
  switch (rows - r) {
    case 7:
      return score_rows<7>(query, keys, dim, scores);
    case 6:
      return score_rows<6>(query, keys, dim, scores);
    case 5:
      return score_rows<5>(query, keys, dim, scores);
    case 4:
      return score_rows<4>(query, keys, dim, scores);
    case 3:
      return score_rows<3>(query, keys, dim, scores);
    case 2:
      return score_rows<2>(query, keys, dim, scores);
    case 1:
      return score_rows<1>(query, keys, dim, scores);
  }
}

// output[ROWS][16 * COLUMNS] += weights . values, over all groups of the chunk.
template <int ROWS, int COLUMNS, typename T>
POLYLOOM_INLINE void gather_tile(const T* weights, const T* const* values, int groups, int dim,
                                 int column, float* output) {
  f32x16 acc[ROWS][COLUMNS];
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLUMNS; c++) acc[r][c] = load16(output + r * dim + column + c * kLanes);
  for (int group = 0; group < groups; group++)
    for (int j = 0; j < kLanes; j += kPair<T>) {
      const T* from = values[group] + j * dim + column * kPair<T>;
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLUMNS; c++)
          acc[r][c] = multiply(acc[r][c], from + c * kLanes * kPair<T>,
                               weights + r * kChunk + group * kLanes + j);
    }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < COLUMNS; c++) store16(output + r * dim + column + c * kLanes, acc[r][c]);
}

template <int COLUMNS, typename T>
void gather_columns(const T* weights, const T* const* values, int groups, int dim, int column,
                    int rows, float* output) {
  int r = 0;
  for (; r + 4 <= rows; r += 4)
    gather_tile<4, COLUMNS>(weights + r * kChunk, values, groups, dim, column, output + r * dim);
  weights += r * kChunk;
  output += r * dim;
  switch (rows - r) {
    case 3:
      return gather_tile<3, COLUMNS>(weights, values, groups, dim, column, output);
    case 2:
      return gather_tile<2, COLUMNS>(weights, values, groups, dim, column, output);
    case 1:
      return gather_tile<1, COLUMNS>(weights, values, groups, dim, column, output);
  }
}

template <typename T>
void score_vector(Scratch<T>& s, int rows, int groups, int dim) {
  for (int i = 0; i < groups; i++) {
    if (i + 1 < groups) prefetch(s.key_groups[i + 1], kLanes * dim);
    prefetch(s.value_groups[i], kLanes * dim);
    score_group(s.query, s.key_groups[i], dim, rows, &s.scores[0][i * kLanes]);
  }
}

template <typename T>
void gather_vector(Scratch<T>& s, int rows, int groups, int dim) {
  int column = 0;
  for (; column + 4 * kLanes <= dim; column += 4 * kLanes)
    gather_columns<4>(&s.weights[0][0], s.value_groups, groups, dim, column, rows, s.output);
  for (; column < dim; column += kLanes)
    gather_columns<1>(&s.weights[0][0], s.value_groups, groups, dim, column, rows, s.output);
}

#if defined(POLYLOOM_AMX)

void score_amx(Scratch<bf16>& s, int rows, int groups, int dim) {
  const int rows1 = std::max(0, rows - kLanes);
  const int query_bytes = dim * sizeof(bf16), score_bytes = kChunk * sizeof(float);
  AmxTiles tiles(std::min(rows, kLanes), rows1, kLanes);
  for (int i = 0; i < groups; i++) {
    _tile_zero(0);
    if (rows1 > 0) _tile_zero(1);
    for (int d = 0; d < dim; d += 2 * kLanes) {
      _tile_loadd(6, s.key_groups[i] + d * kLanes, 64);
      _tile_loadd(4, s.query + d, query_bytes);
      _tile_dpbf16ps(0, 4, 6);
      if (rows1 > 0) {
        _tile_loadd(5, s.query + kLanes * dim + d, query_bytes);
        _tile_dpbf16ps(1, 5, 6);
      }
    }
    _tile_stored(0, &s.scores[0][i * kLanes], score_bytes);
    if (rows1 > 0) _tile_stored(1, &s.scores[kLanes][i * kLanes], score_bytes);
  }
}

void gather_amx(Scratch<bf16>& s, int rows, int groups, int dim) {
  const int rows1 = std::max(0, rows - kLanes);
  const int weight_bytes = kChunk * sizeof(bf16), output_bytes = dim * sizeof(float);
  AmxTiles tiles(std::min(rows, kLanes), rows1, kLanes / 2);
  for (int column = 0; column < dim; column += 2 * kLanes) {
    float* output0 = s.output + column;
    float* output1 = s.output + kLanes * dim + column;
    _tile_loadd(0, output0, output_bytes);
    _tile_loadd(2, output0 + kLanes, output_bytes);
    if (rows1 > 0) {
      _tile_loadd(1, output1, output_bytes);
      _tile_loadd(3, output1 + kLanes, output_bytes);
    }
    for (int i = 0; i < groups; i++) {
      _tile_loadd(6, s.value_groups[i] + column * 2, dim * 4);
      _tile_loadd(7, s.value_groups[i] + (column + kLanes) * 2, dim * 4);
      _tile_loadd(4, &s.weights[0][i * kLanes], weight_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 4, 7);
      if (rows1 > 0) {
        _tile_loadd(5, &s.weights[kLanes][i * kLanes], weight_bytes);
        _tile_dpbf16ps(1, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, output0, output_bytes);
    _tile_stored(2, output0 + kLanes, output_bytes);
    if (rows1 > 0) {
      _tile_stored(1, output1, output_bytes);
      _tile_stored(3, output1 + kLanes, output_bytes);
    }
  }
}

#endif

// One row's scores become weights relative to its running maximum; its output so far is rescaled.
template <typename T>
void soften_row(Scratch<T>& s, int row, int position, int token, int groups, int dim, Mask mask) {
  const int seen_end = position + 1 - token;
  const int seen_begin = mask.window > 0 ? position - mask.window + 1 - token : INT32_MIN;
  const bool whole = seen_end >= groups * kLanes && seen_begin <= 0;
  i32x16 lane;
  for (int i = 0; i < kLanes; i++) lane[i] = i;
  float* scores = s.scores[row];
  f32x16 largest = splat(s.largest[row]);
  for (int i = 0; i < groups * kLanes; i += kLanes) {
    f32x16 score = load16(scores + i) * mask.scale;
    if (mask.softcap > 0.0f) score = tanh16(score / mask.softcap) * mask.softcap;
    if (!whole) {
      const i32x16 seen = (lane + i < seen_end) & (lane + i >= seen_begin);
      score = seen ? score : splat(-INFINITY);
    }
    store16(scores + i, score);
    largest = max16(score, largest);
  }
  const float maximum = reduce_max(largest);
  f32x16 sum = {};
  for (int i = 0; i < groups * kLanes; i += kLanes) {
    const f32x16 weight = exp16(load16(scores + i) - maximum);
    sum += weight;
    store16(s.weights[row] + i, weight);
  }
  const f32x16 rescale = exp16(splat(s.largest[row] - maximum));
  s.sum[row] = s.sum[row] * rescale[0] + reduce_add(sum);
  s.largest[row] = maximum;
  if (rescale[0] != 1.0f)
    for (int d = 0; d < dim; d += kLanes)
      store16(s.output + row * dim + d, load16(s.output + row * dim + d) * rescale);
}

// Where the chunk's groups lie; of a group that the context fills in part, the unwritten values
// are replaced by zeros, since whatever lies there would be multiplied by a weight of 0.
template <typename T>
void locate_groups(Scratch<T>& s, const Layer<T>& layer, const Item& item, int token, int end) {
  for (int i = 0; token + i * kLanes < end; i++) {
    const int first = token + i * kLanes;
    const int64_t offset = layer.group(item.sequence, item.head, first);
    s.key_groups[i] = layer.keys + offset;
    s.value_groups[i] = layer.values + offset;
    if (end - first >= kLanes) continue;
    constexpr int P = kPair<T>;
    std::fill_n(s.tail, kLanes * layer.dim, T{});
    for (int j = 0; j < end - first; j++)
      for (int d = 0; d < layer.dim; d++) {
        const int at = (j / P * layer.dim + d) * P + j % P;
        s.tail[at] = layer.values[offset + at];
      }
    s.value_groups[i] = s.tail;
  }
}

template <typename T>
void attend(Scratch<T>& s, const Layer<T>& layer, const Queries<T>& queries, const Item& item,
            int first_query, int first_position, int rows_per_token, Mask mask) {
  const int dim = layer.dim;
  for (int r = 0; r < item.rows; r++) {
    const int row = item.first_row + r;
    const T* from = queries.data + (first_query + row / rows_per_token) * queries.token_stride +
                    (item.head * rows_per_token + row % rows_per_token) * queries.head_stride;
    std::copy_n(from, dim, s.query + r * dim);
    s.largest[r] = kUnseen;
    s.sum[r] = 0.0f;
  }
  std::fill_n(s.output, item.rows * dim, 0.0f);
  for (int token = item.first_token; token < item.end_token; token += kChunk) {
    const int end = std::min(token + kChunk, item.end_token);
    const int groups = (end - token + kLanes - 1) / kLanes;
    locate_groups(s, layer, item, token, end);
    const auto soften = [&] {
      for (int r = 0; r < item.rows; r++)
        soften_row(s, r, first_position + (item.first_row + r) / rows_per_token, token, groups, dim,
                   mask);
    };
#if defined(POLYLOOM_AMX)
    if constexpr (kPair<T> == 2) {
      if (item.rows >= kMinAmxRows && dim % (2 * kLanes) == 0 && amx_usable()) {
        score_amx(s, item.rows, groups, dim);
        soften();
        gather_amx(s, item.rows, groups, dim);
        continue;
      }
    }
#endif
    score_vector(s, item.rows, groups, dim);
    soften();
    gather_vector(s, item.rows, groups, dim);
  }
}

}  // namespace polyloom
