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

#include "attention_tile.h"

namespace {

using namespace polyloom;

constexpr int kMinSplit = 128;  // least tokens of a split of one long context

template <typename T>
void append(const Layer<T>& layer, const at::Tensor& k, const at::Tensor& v, const int64_t* slots,
            int64_t token, int head) {
  constexpr int P = kPair<T>;
  const int64_t id = slots[token] / layer.block, at = slots[token] % layer.block;
  const int64_t base = (id * layer.heads + head) * layer.block * static_cast<int64_t>(layer.dim);
  T* key = layer.keys + base + (at - at % kLanes) * layer.dim + at % kLanes * P;
  T* value = layer.values + base + at / P * layer.dim * P + at % P;
  const T* from_k =
      static_cast<const T*>(k.const_data_ptr()) + token * k.stride(0) + head * k.stride(1);
  const T* from_v =
      static_cast<const T*>(v.const_data_ptr()) + token * v.stride(0) + head * v.stride(1);
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
  const int wanted =
      tiles >= 4 * threads ? 1 : static_cast<int>(4 * threads / std::max<int64_t>(tiles, 1)) + 1;
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
      for (int i = 0; i < item.splits; i++)
        largest = std::max(largest, partial_row(item, i * item.rows + r)[dim]);
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
  Output<T> output{static_cast<T*>(out.mutable_data_ptr()),
                   static_cast<int>(q.size(1)),
                   layer.dim,
                   rows_per_token,
                   {}};
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
  TORCH_CHECK(tensor.scalar_type() == dtype, name, " has dtype ", tensor.scalar_type(), ", not ",
              dtype);
  TORCH_CHECK(tensor.dim() == dims, name, " has ", tensor.dim(), " dimensions, not ", dims);
  TORCH_CHECK(tensor.stride(-1) == 1 || tensor.size(-1) <= 1, name,
              " is not contiguous in its last dimension");
}

// Nothing that a batch says is used as an address before it has been found within the cache.
void check_batch(const int32_t* starts, const int32_t* lens, const int32_t* tables,
                 int64_t table_width, const int64_t* slots, int64_t tokens, int64_t sequences,
                 int64_t blocks, int64_t block) {
  TORCH_CHECK(starts[0] == 0 && starts[sequences] == tokens, "query_starts does not cover the ",
              tokens, " tokens");
  for (int64_t i = 0; i < sequences; i++) {
    TORCH_CHECK(starts[i] <= starts[i + 1], "query_starts decreases at sequence ", i);
    TORCH_CHECK(lens[i] >= starts[i + 1] - starts[i], "context_lens[", i,
                "] is less than its tokens");
    const int64_t used = (lens[i] + block - 1) / block;
    TORCH_CHECK(used <= table_width, "context_lens[", i, "] exceeds its block table");
    for (int64_t j = 0; j < used; j++) {
      const int64_t id = tables[i * table_width + j];
      TORCH_CHECK(id >= 0 && id < blocks, "block_tables[", i, ", ", j, "] is ", id, ", of ", blocks,
                  " blocks");
    }
  }
  for (int64_t i = 0; i < tokens; i++)
    TORCH_CHECK(slots[i] >= 0 && slots[i] < blocks * block, "slot_mapping[", i, "] is ", slots[i],
                ", of ", blocks * block, " slots");
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
  TORCH_CHECK(keys.dim() == 4 && keys.is_contiguous() && values.sizes() == keys.sizes() &&
                  values.is_contiguous(),
              "keys and values must be contiguous [blocks, heads, block_size, head_dim]");
  TORCH_CHECK(block_tables.is_contiguous(), "block_tables is not contiguous");
  const int64_t tokens = q.size(0), heads = keys.size(1), block = keys.size(2), dim = keys.size(3);
  TORCH_CHECK(block % kLanes == 0 && dim % kLanes == 0 && dim <= kMaxHeadDim,
              "block_size or head_dim not covered");
  TORCH_CHECK(q.size(1) % heads == 0 && q.size(2) == dim, "q is ", q.sizes(), ", cache ",
              keys.sizes());
  TORCH_CHECK(
      k.size(0) == tokens && k.size(1) == heads && k.size(2) == dim && v.sizes() == k.sizes(),
      "k is ", k.sizes(), ", v ", v.sizes(), ", q ", q.sizes(), ", cache ", keys.sizes());
  const int64_t sequences = context_lens.size(0);
  TORCH_CHECK(query_starts.size(0) == sequences + 1 && block_tables.size(0) == sequences &&
                  slot_mapping.size(0) == tokens,
              "the batch's tensors disagree about its ", sequences, " sequences or ", tokens,
              " tokens");
  const auto* starts = query_starts.const_data_ptr<int32_t>();
  const auto* lens = context_lens.const_data_ptr<int32_t>();
  const auto* tables = block_tables.const_data_ptr<int32_t>();
  const auto* slots = slot_mapping.const_data_ptr<int64_t>();
  check_batch(starts, lens, tables, block_tables.size(1), slots, tokens, sequences, keys.size(0),
              block);

  at::Tensor out = at::empty({tokens, q.size(1) * dim}, q.options());
  const Mask mask{static_cast<float>(scale), static_cast<int>(window), static_cast<float>(softcap)};
  const auto start = [&]<typename T>(T* key_data, T* value_data) {
    const Layer<T> layer{key_data,
                         value_data,
                         static_cast<int>(heads),
                         static_cast<int>(block),
                         static_cast<int>(dim),
                         tables,
                         block_tables.size(1)};
    run(q, k, v, layer, starts, lens, sequences, slots, mask, out);
  };
  if (dtype == at::kFloat) {
    start(keys.mutable_data_ptr<float>(), values.mutable_data_ptr<float>());
  } else {
    TORCH_CHECK(dtype == at::kBFloat16, "caches of ", dtype, " are not covered");
    start(static_cast<bf16*>(keys.mutable_data_ptr()),
          static_cast<bf16*>(values.mutable_data_ptr()));
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
