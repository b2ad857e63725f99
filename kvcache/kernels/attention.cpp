// Paged attention on the CPU, float and bfloat16 caches.
//
//   o[t, h] = softmax_j(mask(cap(scale * q[t, h] . k[j, h / R]))) v[j, h / R],   R = H / G
//
// A layer's cache is [blocks, G, S, D] elements, S a multiple of 16. Within a (block, head), with
// P = values per 32-bit lane (1 for float, 2 for bfloat16):
//   keys   [S / 16][D / P][16][P]   16 tokens side by side: a score needs no sum across lanes
//   values [S / P][D][P]            P tokens side by side
// which is at once what a 16-lane dot product of pairs and what an AMX right operand reads.
//
// Rows of work are (token, query head of one KV head), so each K and V is read once per row tile.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "cpu_amx.h"
#include "cpu_vec.h"

namespace {

using namespace polyloom;

constexpr int kLanes = 16;
constexpr int kRowTile = 32;      // rows that share one pass over K and V
constexpr int kChunk = 256;       // tokens between two rescalings of the output
constexpr int kMinSplit = 128;    // least tokens of a split of one long context
constexpr int kMaxHeadDim = 256;
constexpr int kMinAmxRows = 8;    // below, the vector path reads the cache as fast
constexpr float kUnseen = -1e30f; // running maximum of a row that has seen no token

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
    for (int r = 0; r < ROWS; r++) acc[r] = multiply(acc[r], keys + d * kLanes, query + r * dim + d);
  for (int r = 0; r < ROWS; r++) store16(scores + r * kChunk, acc[r]);
}

template <typename T>
void score_group(const T* query, const T* keys, int dim, int rows, float* scores) {
  int r = 0;
  for (; r + 8 <= rows; r += 8) score_rows<8>(query + r * dim, keys, dim, scores + r * kChunk);
  query += r * dim;
  scores += r * kChunk;
  switch (rows - r) {
    case 7: return score_rows<7>(query, keys, dim, scores);
    case 6: return score_rows<6>(query, keys, dim, scores);
    case 5: return score_rows<5>(query, keys, dim, scores);
    case 4: return score_rows<4>(query, keys, dim, scores);
    case 3: return score_rows<3>(query, keys, dim, scores);
    case 2: return score_rows<2>(query, keys, dim, scores);
    case 1: return score_rows<1>(query, keys, dim, scores);
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
    case 3: return gather_tile<3, COLUMNS>(weights, values, groups, dim, column, output);
    case 2: return gather_tile<2, COLUMNS>(weights, values, groups, dim, column, output);
    case 1: return gather_tile<1, COLUMNS>(weights, values, groups, dim, column, output);
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

template <typename T>
void append(const Layer<T>& layer, const at::Tensor& k, const at::Tensor& v, const int64_t* slots,
            int64_t token, int head) {
  constexpr int P = kPair<T>;
  const int64_t id = slots[token] / layer.block, at = slots[token] % layer.block;
  const int64_t base = (id * layer.heads + head) * layer.block * static_cast<int64_t>(layer.dim);
  T* key = layer.keys + base + (at - at % kLanes) * layer.dim + at % kLanes * P;
  T* value = layer.values + base + at / P * layer.dim * P + at % P;
  const T* from_k = static_cast<const T*>(k.const_data_ptr()) + token * k.stride(0) + head * k.stride(1);
  const T* from_v = static_cast<const T*>(v.const_data_ptr()) + token * v.stride(0) + head * v.stride(1);
  for (int d = 0; d < layer.dim; d += P) std::memcpy(key + d * kLanes, from_k + d, sizeof(float));
  for (int d = 0; d < layer.dim; d++) value[d * P] = from_v[d];
}

// Cuts the batch into items: row tiles, and splits of long contexts while threads would idle.
std::vector<Item> plan(const int32_t* starts, const int32_t* lens, int64_t sequences, int heads,
                       int rows_per_token, int window, int threads) {
  std::vector<Item> items;
  int64_t tiles = 0, partials = 0;
  for (int64_t i = 0; i < sequences; i++) {
    const int rows = (starts[i + 1] - starts[i]) * rows_per_token;
    tiles += static_cast<int64_t>(heads) * ((rows + kRowTile - 1) / kRowTile);
  }
  const int wanted = tiles >= 4 * threads ? 1 : static_cast<int>(4 * threads / std::max<int64_t>(tiles, 1)) + 1;
  for (int64_t i = 0; i < sequences; i++) {
    const int tokens = starts[i + 1] - starts[i], before = lens[i] - tokens;
    const int rows = tokens * rows_per_token;
    for (int head = 0; head < heads; head++)
      for (int first = 0; first < rows; first += kRowTile) {
        const int count = std::min(kRowTile, rows - first);
        const int end = before + (first + count - 1) / rows_per_token + 1;
        const int oldest = before + first / rows_per_token - window + 1;
        const int begin = window > 0 ? std::max(0, oldest) / kLanes * kLanes : 0;
        const int splits = std::max(1, std::min(wanted, (end - begin) / kMinSplit));
        const int width = ((end - begin + splits - 1) / splits + kLanes - 1) / kLanes * kLanes;
        for (int split = 0; split < splits; split++)
          items.push_back({static_cast<int>(i), head, first, count,
                           std::min(end, begin + split * width),
                           std::min(end, begin + (split + 1) * width), split, splits,
                           partials + split * count});
        if (splits > 1) partials += splits * count;
      }
  }
  return items;
}

template <typename T>
struct Output {
  T* data;
  int heads, dim, rows_per_token;
  std::vector<float> partial;  // per partial row: dim outputs, running maximum, sum

  T* row(const Item& item, int first_query, int r) {
    const int row = item.first_row + r;
    const int64_t token = first_query + row / rows_per_token;
    return data + (token * heads + item.head * rows_per_token + row % rows_per_token) * dim;
  }
  float* partial_row(const Item& item, int r) {
    return partial.data() + (item.partial + r) * (dim + 2);
  }

  void put(const Scratch<T>& s, const Item& item, int first_query) {
    for (int r = 0; r < item.rows; r++) {
      const float* from = s.output + r * dim;
      if (item.splits == 1) {
        T* to = row(item, first_query, r);
        for (int d = 0; d < dim; d++) to[d] = from_float<T>(from[d] / s.sum[r]);
      } else {
        float* to = partial_row(item, r);
        std::copy_n(from, dim, to);
        to[dim] = s.largest[r];
        to[dim + 1] = s.sum[r];
      }
    }
  }

  // Joins the splits of a row tile; `item` is its first split.
  void merge(const Item& item, int first_query) {
    for (int r = 0; r < item.rows; r++) {
      float largest = kUnseen, sum = 0.0f;
      float joined[kMaxHeadDim] = {};
      for (int i = 0; i < item.splits; i++) largest = std::max(largest, partial_row(item, i * item.rows + r)[dim]);
      for (int i = 0; i < item.splits; i++) {
        const float* from = partial_row(item, i * item.rows + r);
        const float share = std::exp(from[dim] - largest);
        sum += share * from[dim + 1];
        for (int d = 0; d < dim; d++) joined[d] += share * from[d];
      }
      T* to = row(item, first_query, r);
      for (int d = 0; d < dim; d++) to[d] = from_float<T>(joined[d] / sum);
    }
  }
};

template <typename T>
void run(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Layer<T>& layer,
         const int32_t* starts, const int32_t* lens, int64_t sequences, const int64_t* slots,
         Mask mask, at::Tensor& out) {
  const int threads = at::get_num_threads();
  const int rows_per_token = static_cast<int>(q.size(1)) / layer.heads;
  const Queries<T> queries{static_cast<const T*>(q.const_data_ptr()), q.stride(0), q.stride(1)};
  const std::vector<Item> items =
      plan(starts, lens, sequences, layer.heads, rows_per_token, mask.window, threads);
  Output<T> output{static_cast<T*>(out.mutable_data_ptr()), static_cast<int>(q.size(1)), layer.dim,
                   rows_per_token, {}};
  int64_t partials = 0;
  for (const Item& item : items)
    if (item.splits > 1) partials = std::max(partials, item.partial + item.rows);
  output.partial.resize(partials * (layer.dim + 2));
  const int64_t tokens = q.size(0), count = static_cast<int64_t>(items.size());

#pragma omp parallel num_threads(threads)
  {
    static thread_local Scratch<T> scratch;
#pragma omp for schedule(static)
    for (int64_t i = 0; i < tokens * layer.heads; i++)
      append(layer, k, v, slots, i / layer.heads, static_cast<int>(i % layer.heads));
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; i++) {
      const Item& item = items[i];
      const int first_query = starts[item.sequence];
      const int first_position = lens[item.sequence] - (starts[item.sequence + 1] - first_query);
      attend(scratch, layer, queries, item, first_query, first_position, rows_per_token, mask);
      output.put(scratch, item, first_query);
    }
    if (partials > 0) {
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count; i++)
        if (items[i].splits > 1 && items[i].split == 0)
          output.merge(items[i], starts[items[i].sequence]);
    }
  }
}

void check_tensor(const at::Tensor& tensor, const char* name, at::ScalarType dtype, int64_t dims) {
  TORCH_CHECK(tensor.scalar_type() == dtype, name, " has dtype ", tensor.scalar_type(), ", not ", dtype);
  TORCH_CHECK(tensor.dim() == dims, name, " has ", tensor.dim(), " dimensions, not ", dims);
  TORCH_CHECK(tensor.stride(-1) == 1 || tensor.size(-1) <= 1, name, " is not contiguous in its last dimension");
}

// Nothing that a batch says is used as an address before it has been found within the cache.
void check_batch(const int32_t* starts, const int32_t* lens, const int32_t* tables,
                 int64_t table_width, const int64_t* slots, int64_t tokens, int64_t sequences,
                 int64_t blocks, int64_t block) {
  TORCH_CHECK(starts[0] == 0 && starts[sequences] == tokens, "query_starts does not cover the ", tokens, " tokens");
  for (int64_t i = 0; i < sequences; i++) {
    TORCH_CHECK(starts[i] <= starts[i + 1], "query_starts decreases at sequence ", i);
    TORCH_CHECK(lens[i] >= starts[i + 1] - starts[i], "context_lens[", i, "] is less than its tokens");
    const int64_t used = (lens[i] + block - 1) / block;
    TORCH_CHECK(used <= table_width, "context_lens[", i, "] exceeds its block table");
    for (int64_t j = 0; j < used; j++) {
      const int64_t id = tables[i * table_width + j];
      TORCH_CHECK(id >= 0 && id < blocks, "block_tables[", i, ", ", j, "] is ", id, ", of ", blocks, " blocks");
    }
  }
  for (int64_t i = 0; i < tokens; i++)
    TORCH_CHECK(slots[i] >= 0 && slots[i] < blocks * block, "slot_mapping[", i, "] is ", slots[i], ", of ", blocks * block, " slots");
}

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                           at::Tensor keys, at::Tensor values, const at::Tensor& query_starts,
                           const at::Tensor& context_lens, const at::Tensor& block_tables,
                           const at::Tensor& slot_mapping, double scale, int64_t window,
                           double softcap) {
  const auto dtype = keys.scalar_type();
  check_tensor(q, "q", dtype, 3);
  check_tensor(k, "k", dtype, 3);
  check_tensor(v, "v", dtype, 3);
  check_tensor(query_starts, "query_starts", at::kInt, 1);
  check_tensor(context_lens, "context_lens", at::kInt, 1);
  check_tensor(block_tables, "block_tables", at::kInt, 2);
  check_tensor(slot_mapping, "slot_mapping", at::kLong, 1);
  TORCH_CHECK(keys.dim() == 4 && keys.is_contiguous() && values.sizes() == keys.sizes() && values.is_contiguous(),
              "keys and values must be contiguous [blocks, heads, block_size, head_dim]");
  TORCH_CHECK(block_tables.is_contiguous(), "block_tables is not contiguous");
  const int64_t tokens = q.size(0), heads = keys.size(1), block = keys.size(2), dim = keys.size(3);
  TORCH_CHECK(block % kLanes == 0 && dim % kLanes == 0 && dim <= kMaxHeadDim, "block_size or head_dim not covered");
  TORCH_CHECK(q.size(1) % heads == 0 && q.size(2) == dim, "q is ", q.sizes(), ", cache ", keys.sizes());
  TORCH_CHECK(k.size(0) == tokens && k.size(1) == heads && k.size(2) == dim && v.sizes() == k.sizes(),
              "k is ", k.sizes(), ", v ", v.sizes(), ", q ", q.sizes(), ", cache ", keys.sizes());
  const int64_t sequences = context_lens.size(0);
  TORCH_CHECK(query_starts.size(0) == sequences + 1 && block_tables.size(0) == sequences && slot_mapping.size(0) == tokens,
              "the batch's tensors disagree about its ", sequences, " sequences or ", tokens, " tokens");
  const auto* starts = query_starts.const_data_ptr<int32_t>();
  const auto* lens = context_lens.const_data_ptr<int32_t>();
  const auto* tables = block_tables.const_data_ptr<int32_t>();
  const auto* slots = slot_mapping.const_data_ptr<int64_t>();
  check_batch(starts, lens, tables, block_tables.size(1), slots, tokens, sequences, keys.size(0), block);

  at::Tensor out = at::empty({tokens, q.size(1) * dim}, q.options());
  const Mask mask{static_cast<float>(scale), static_cast<int>(window), static_cast<float>(softcap)};
  const auto start = [&]<typename T>(T* key_data, T* value_data) {
    const Layer<T> layer{key_data, value_data, static_cast<int>(heads), static_cast<int>(block),
                         static_cast<int>(dim), tables, block_tables.size(1)};
    run(q, k, v, layer, starts, lens, sequences, slots, mask, out);
  };
  if (dtype == at::kFloat) {
    start(keys.mutable_data_ptr<float>(), values.mutable_data_ptr<float>());
  } else {
    TORCH_CHECK(dtype == at::kBFloat16, "caches of ", dtype, " are not covered");
    start(static_cast<bf16*>(keys.mutable_data_ptr()), static_cast<bf16*>(values.mutable_data_ptr()));
  }
  return out;
}

}  // namespace

TORCH_LIBRARY(polyloom_kvcache, m) {
  m.def(
      "paged_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor query_starts, Tensor context_lens, Tensor block_tables, Tensor slot_mapping, "
      "float scale, int window, float softcap) -> Tensor");
}

TORCH_LIBRARY_IMPL(polyloom_kvcache, CPU, m) { m.impl("paged_attention", &paged_attention); }
