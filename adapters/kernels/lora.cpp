// The LoRA gather op for CPUs: y[segment] = rows(y) + Σ_pages B (A x), for all segments at once.
//
// One parallel region a call: all shrinks, a barrier, all expands. Both are cut into items of about
// equal bytes that threads take in turn, so one rank-64 adapter among rank-8 ones, or one adapter
// alone, still keeps all threads reading.
#include <ATen/Parallel.h>
#include <ATen/ops/constant_pad_nd.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <optional>

#include "lora_tiles.h"
#include "lora_vector.h"

namespace polyloom::lora {
namespace {

constexpr int64_t kItemBytes = 16 * 1024;
constexpr int64_t kSerialBytes = 32 * 1024;
constexpr int64_t kTileMinTokens = 8;
constexpr int64_t kItemTokens = 64;  // of a segment on tiles

struct Tables {
  const int32_t *starts, *slots, *pages, *masks;
  const int64_t *addresses, *row_addresses;
  int64_t num_segments, width, layers, layer, num_slices;
};

template <typename T>
bool on_tiles(int64_t tokens) {
  return sizeof(T) == 2 && tokens >= kTileMinTokens && amx_usable();
}

template <typename T>
void add_segment(Call<T>& call, const Tables& tables, int64_t index) {
  const int32_t slot = tables.slots[index];
  Segment segment{tables.starts[index], tables.starts[index + 1], 0, 0, nullptr, false};
  const int64_t tokens = segment.end - segment.begin;
  if (slot < 0 || tokens == 0) return;
  segment.first_page = static_cast<int64_t>(call.pages.size());
  for (int64_t m = 0; m < tables.width && tables.pages[index * tables.width + m] >= 0; m++) {
    const int64_t page = tables.pages[index * tables.width + m];
    const auto* words = reinterpret_cast<const uint32_t*>(tables.addresses[page]);
    call.pages.push_back({words + tables.layer * call.layout.layer_words,
                          tables.masks[page * tables.layers + tables.layer]});
  }
  segment.num_pages = static_cast<int64_t>(call.pages.size()) - segment.first_page;
  if (const int64_t rows = tables.row_addresses[slot]; rows != 0) {
    const int64_t out = call.layout.slices.back().offset + call.layout.slices.back().out;
    segment.rows = reinterpret_cast<const float*>(rows) + tables.layer * 2 * out;
  }
  segment.tiles = segment.num_pages > 0 && on_tiles<T>(tokens);
  call.segments.push_back(segment);
}

// Cuts `segment` into items; returns the bytes of pages that it reads.
template <typename T>
int64_t add_items(Call<T>& call, int32_t index) {
  const Segment& segment = call.segments[index];
  int64_t bytes = 0;
  const int64_t step = segment.tiles ? kItemTokens : segment.end - segment.begin;
  for (int32_t s = 0; s < static_cast<int32_t>(call.layout.slices.size()); s++) {
    const Slice& part = call.layout.slices[s];
    const int64_t block_bytes = kRankWords<T> * kLanes * 4;
    int64_t touching = 0;
    for (int64_t p = 0; p < segment.num_pages; p++) {
      if (!call.pages[segment.first_page + p].touches(s)) continue;
      touching++;
      const auto page = static_cast<int32_t>(p);
      for (int64_t t = segment.begin; t < segment.end; t += step)
        call.shrinks.push_back({index, s, page, page, t, std::min(t + step, segment.end)});
    }
    if (touching == 0 && segment.rows == nullptr) continue;
    const int64_t expand_bytes = std::max<int64_t>(touching, 1) * part.blocks * block_bytes;
    const int64_t parts = (expand_bytes + kItemBytes - 1) / kItemBytes;
    const int64_t blocks = ((part.blocks + parts - 1) / parts + 3) / 4 * 4;
    for (int64_t b = 0; b < part.blocks; b += blocks)
      for (int64_t t = segment.begin; t < segment.end; t += step)
        call.expands.push_back({index, s, static_cast<int32_t>(b),
                                static_cast<int32_t>(std::min(b + blocks, part.blocks)), t,
                                std::min(t + step, segment.end)});
    bytes += expand_bytes + touching * call.layout.units * kPageRanks * 4;
  }
  return bytes;
}

// Runs fn on items in turn with the other threads; `ahead` is called on the item after.
template <typename Fn, typename Ahead>
void take(const std::vector<Item>& items, std::atomic<size_t>& next, Fn&& fn, Ahead&& ahead) {
  size_t index = next.fetch_add(1, std::memory_order_relaxed);
  while (index < items.size()) {
    const size_t following = next.fetch_add(1, std::memory_order_relaxed);
    if (following < items.size()) ahead(items[following]);
    fn(items[index]);
    index = following;
  }
}

void prefetch(const uint32_t* words, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) __builtin_prefetch(words + i);
}

template <typename T>
void run(const Call<T>& call, bool parallel) {
  std::atomic<size_t> next_shrink{0}, next_expand{0};
#pragma omp parallel num_threads(at::get_num_threads()) if (parallel)
  {
#if defined(POLYLOOM_AMX)
    std::optional<TileShapes> shapes;
    std::vector<uint32_t> gathered;
    const auto tiles = [&]() -> TileShapes& {
      if (!shapes) shapes.emplace();
      return *shapes;
    };
#endif
    take(
        call.shrinks, next_shrink,
        [&](const Item& item) {
#if defined(POLYLOOM_AMX)
          if constexpr (sizeof(T) == 2)
            if (call.segments[item.segment].tiles) return shrink_on_tiles(call, item, tiles());
#endif
          shrink_vector(call, item);
        },
        [&](const Item& item) {
          const PageRef& page = call.pages[call.segments[item.segment].first_page + item.first];
          prefetch(page.words + call.layout.slices[item.slice].a_start, kPrefetchWords);
        });
#pragma omp barrier
    take(
        call.expands, next_expand,
        [&](const Item& item) {
#if defined(POLYLOOM_AMX)
          if constexpr (sizeof(T) == 2)
            if (call.segments[item.segment].tiles)
              return expand_on_tiles(call, item, tiles(), gathered);
#endif
          expand_vector(call, item);
        },
        [&](const Item& item) {
          const Segment& segment = call.segments[item.segment];
          const int64_t start = call.layout.slices[item.slice].b_start +
                                item.first * kRankWords<T> * kLanes;
          for (int64_t p = 0; p < segment.num_pages; p++)
            prefetch(call.pages[segment.first_page + p].words + start, kPrefetchWords / 4);
        });
  }
}

template <typename T>
int64_t apply_typed(const at::Tensor& x, const at::Tensor& y, const Tables& tables,
                    const int32_t* offsets, const T* bias) {
  thread_local std::vector<uint32_t> h;
  Call<T> call;
  call.layout = make_layout<T>(x.size(1), offsets, tables.num_slices);
  const int64_t padded_in = call.layout.units * kPerWord<T>;
  const at::Tensor wide =
      padded_in == x.size(1) ? x : at::constant_pad_nd(x, {0, padded_in - x.size(1)});
  call.x = static_cast<const T*>(wide.const_data_ptr());
  call.y = static_cast<T*>(y.mutable_data_ptr());
  call.x_stride = wide.stride(0);
  call.y_stride = y.stride(0);
  call.bias = bias;
  for (int64_t g = 0; g < tables.num_segments; g++) add_segment(call, tables, g);
  int64_t bytes = 0, tiled = 0;
  for (size_t i = 0; i < call.segments.size(); i++) {
    bytes += add_items(call, static_cast<int32_t>(i));
    tiled += call.segments[i].tiles;
  }
  // Whole tiles of four pages, so that a tile row of h never runs into the next slice.
  call.h_words = (tables.width + 3) / 4 * 4 * kRankWords<T>;
  h.assign(static_cast<size_t>(x.size(0) * tables.num_slices * call.h_words), 0);
  call.h = h.data();
  run(call, bytes > kSerialBytes || tiled > 0);
  return tiled;
}

void check_table(const at::Tensor& table, const char* name, at::ScalarType dtype, int64_t dims) {
  TORCH_CHECK(table.scalar_type() == dtype && table.dim() == dims && table.is_contiguous(), name,
              " must be contiguous ", dtype, " with ", dims, " dimensions");
}

int64_t apply(const at::Tensor& x, const at::Tensor& y, const at::Tensor& starts,
              const at::Tensor& slots, const std::optional<at::Tensor>& pages,
              const at::Tensor& addresses, const at::Tensor& masks,
              const at::Tensor& row_addresses, const std::optional<at::Tensor>& bias,
              const at::Tensor& offsets, int64_t layer) {
  check_table(starts, "starts", at::kInt, 1);
  check_table(slots, "slots", at::kInt, 1);
  check_table(addresses, "addresses", at::kLong, 1);
  check_table(masks, "masks", at::kInt, 2);
  check_table(row_addresses, "row_addresses", at::kLong, 1);
  check_table(offsets, "offsets", at::kInt, 1);
  if (pages) check_table(*pages, "pages", at::kInt, 2);
  const auto* edges = offsets.const_data_ptr<int32_t>();
  TORCH_CHECK(x.dim() == 2 && x.stride(1) == 1, "x must be [T, in] with contiguous rows");
  TORCH_CHECK(y.dim() == 2 && y.stride(1) == 1 && y.size(0) == x.size(0) &&
                  y.size(1) == edges[offsets.size(0) - 1],
              "y must be [T, out] with contiguous rows");
  TORCH_CHECK(y.scalar_type() == x.scalar_type(), "x and y must have one dtype");
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->scalar_type() == x.scalar_type() &&
                        bias->numel() == y.size(1)),
              "bias must be [out] in the dtype of x");
  TORCH_CHECK(layer >= 0 && layer < masks.size(1), "layer ", layer, " is not in the group");
  const Tables tables{starts.const_data_ptr<int32_t>(),
                      slots.const_data_ptr<int32_t>(),
                      pages ? pages->const_data_ptr<int32_t>() : nullptr,
                      masks.const_data_ptr<int32_t>(),
                      addresses.const_data_ptr<int64_t>(),
                      row_addresses.const_data_ptr<int64_t>(),
                      slots.size(0),
                      pages ? pages->size(1) : 0,
                      masks.size(1),
                      layer,
                      offsets.size(0) - 1};
  TORCH_CHECK(tables.starts[tables.num_segments] <= x.size(0), "starts end after x");
  if (x.scalar_type() == at::kBFloat16)
    return apply_typed<bf16>(x, y, tables, edges,
                             bias ? static_cast<const bf16*>(bias->const_data_ptr()) : nullptr);
  TORCH_CHECK(x.scalar_type() == at::kFloat, "x must be bfloat16 or float32");
  return apply_typed<float>(x, y, tables, edges, bias ? bias->const_data_ptr<float>() : nullptr);
}

}  // namespace
}  // namespace polyloom::lora

TORCH_LIBRARY(polyloom_lora, m) {
  m.def(
      "apply(Tensor x, Tensor(a!) y, Tensor starts, Tensor slots, Tensor? pages, "
      "Tensor addresses, Tensor masks, Tensor row_addresses, Tensor? bias, Tensor offsets, "
      "int layer) -> int");
}

TORCH_LIBRARY_IMPL(polyloom_lora, CPU, m) { m.impl("apply", &polyloom::lora::apply); }
