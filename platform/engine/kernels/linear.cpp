// y = x Wᵀ + bias in bfloat16 with float accumulation, over a weight packed once.
//
// W [O, I] lies as panels of 16 outputs, [O / 16][I / 2][16][2] with O rounded up to 16 and I to
// 32, the rest zeros: a panel is read front to back, 32 inputs of it (1 KB) are an AMX right
// operand, and 2 inputs of it (64 bytes) one operand of a 16-lane dot product of pairs.
//
// Few rows: the weight is read once from memory, which is what such a product costs.
// Many rows: a pair of panels stays in the nearest cache while all rows pass.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>

#include "cpu_amx.h"
#include "cpu_vec.h"

namespace {

using namespace polyloom;

constexpr int64_t kLanes = 16;
constexpr int64_t kStep = 32;  // inputs of one AMX right operand

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

struct Product {
  const bf16* x;  // [rows, inputs] with row stride x_stride; inputs a multiple of 32
  const bf16* weight;
  const bf16* bias;  // or null
  bf16* y;
  int64_t rows, inputs, outputs, x_stride;

  const bf16* panel(int64_t index) const { return weight + index * kLanes * inputs; }

  // Rounds 16 sums of one row, with the bias, into y.
  POLYLOOM_INLINE void put(int64_t row, int64_t panel_index, f32x16 sums) const {
    const int64_t first = panel_index * kLanes, count = std::min(kLanes, outputs - first);
    bf16* to = y + row * outputs + first;
    if (count == kLanes) {
      if (bias != nullptr) sums += load16(bias + first);
      store16(to, sums);
      return;
    }
    for (int64_t i = 0; i < count; i++)
      to[i] = to_bf16(sums[i] + (bias != nullptr ? to_float(bias[first + i]) : 0.0f));
  }
};

#if defined(POLYLOOM_AMX)

void put_tile(const Product& p, int64_t row, int64_t rows, int64_t panel, const float* tile) {
  for (int64_t r = 0; r < rows; r++) p.put(row + r, panel, load16(tile + r * kLanes));
}

// Up to 32 rows against panels `panel` and, if `two`, the next one.
POLYLOOM_INLINE void amx_block(const Product& p, int64_t row, int64_t panel, bool two,
                               float* tile) {
  const int64_t rows0 = std::min(kLanes, p.rows - row);
  const int64_t rows1 = std::min(kLanes, p.rows - row - rows0);
  const int64_t stride = p.x_stride * sizeof(bf16);
  const bf16 *x0 = p.x + row * p.x_stride, *x1 = x0 + kLanes * p.x_stride;
  const bf16 *w0 = p.panel(panel), *w1 = p.panel(panel + (two ? 1 : 0));
  _tile_zero(0);
  _tile_zero(2);
  if (rows1 > 0) {
    _tile_zero(1);
    _tile_zero(3);
    for (int64_t i = 0; i < p.inputs; i += kStep) {
      _tile_loadd(6, w0 + i * kLanes, 64);
      _tile_loadd(7, w1 + i * kLanes, 64);
      _tile_loadd(4, x0 + i, stride);
      _tile_loadd(5, x1 + i, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(1, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  } else {
    for (int64_t i = 0; i < p.inputs; i += kStep) {
      _tile_loadd(6, w0 + i * kLanes, 64);
      _tile_loadd(7, w1 + i * kLanes, 64);
      _tile_loadd(4, x0 + i, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(2, 4, 7);
    }
  }
  _tile_stored(0, tile, 64);
  put_tile(p, row, rows0, panel, tile);
  if (two) {
    _tile_stored(2, tile, 64);
    put_tile(p, row, rows0, panel + 1, tile);
  }
  if (rows1 == 0) return;
  _tile_stored(1, tile, 64);
  put_tile(p, row + kLanes, rows1, panel, tile);
  if (!two) return;
  _tile_stored(3, tile, 64);
  put_tile(p, row + kLanes, rows1, panel + 1, tile);
}

void amx_panels(const Product& p, int64_t begin, int64_t end) {
  alignas(64) float tile[kLanes * kLanes];
  const int64_t whole = p.rows / (2 * kLanes) * (2 * kLanes), rest = p.rows - whole;
  const int rest0 = static_cast<int>(std::min(kLanes, rest));
  AmxTiles tiles(whole > 0 ? kLanes : rest0, whole > 0 ? kLanes : rest - rest0, kLanes);
  for (int64_t panel = begin; panel < end; panel += 2) {
    const bool two = panel + 1 < end;
    if (whole > 0 && rest > 0 && panel > begin) tiles.configure(kLanes, kLanes, kLanes);
    for (int64_t row = 0; row < whole; row += 2 * kLanes) amx_block(p, row, panel, two, tile);
    if (rest == 0) continue;
    if (whole > 0) tiles.configure(rest0, rest - rest0, kLanes);
    amx_block(p, whole, panel, two, tile);
  }
}

#endif

// ROWS rows against `PANELS` panels in registers.
template <int ROWS, int PANELS>
POLYLOOM_INLINE void vector_block(const Product& p, int64_t row, int64_t panel) {
  f32x16 acc[ROWS][PANELS] = {};
  const bf16* x = p.x + row * p.x_stride;
  const bf16* w = p.panel(panel);
  for (int64_t i = 0; i < p.inputs; i += 2)
    for (int r = 0; r < ROWS; r++) {
      uint32_t pair;
      std::memcpy(&pair, x + r * p.x_stride + i, sizeof(pair));
      for (int c = 0; c < PANELS; c++)
        acc[r][c] = dot_pairs(acc[r][c], w + c * kLanes * p.inputs + i * kLanes, pair);
    }
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < PANELS; c++) p.put(row + r, panel + c, acc[r][c]);
}

template <int PANELS>
void vector_rows(const Product& p, int64_t panel) {
  int64_t row = 0;
  for (; row + 6 <= p.rows; row += 6) vector_block<6, PANELS>(p, row, panel);
  switch (p.rows - row) {
    case 5:
      return vector_block<5, PANELS>(p, row, panel);
    case 4:
      return vector_block<4, PANELS>(p, row, panel);
    case 3:
      return vector_block<3, PANELS>(p, row, panel);
    case 2:
      return vector_block<2, PANELS>(p, row, panel);
    case 1:
      return vector_block<1, PANELS>(p, row, panel);
  }
}

void vector_panels(const Product& p, int64_t begin, int64_t end) {
  int64_t panel = begin;
  for (; panel + 4 <= end; panel += 4) vector_rows<4>(p, panel);
  for (; panel < end; panel++) vector_rows<1>(p, panel);
}

void check_packed(const at::Tensor& packed, int64_t outputs, int64_t inputs) {
  TORCH_CHECK(packed.scalar_type() == at::kBFloat16 && packed.is_contiguous() &&
                  packed.numel() == round_up(outputs, kLanes) * round_up(inputs, kStep),
              "packed ", packed.sizes(), " is not a packed [", outputs, ", ", inputs, "] weight");
}

at::Tensor pack(const at::Tensor& weight) {
  TORCH_CHECK(weight.scalar_type() == at::kBFloat16 && weight.dim() == 2 && weight.stride(1) == 1,
              "weight must be bfloat16 [O, I], contiguous in I");
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  const int64_t panels = round_up(outputs, kLanes) / kLanes, width = round_up(inputs, kStep);
  at::Tensor packed = at::empty({panels, width / 2, kLanes, 2}, weight.options());
  const auto* from = static_cast<const bf16*>(weight.const_data_ptr());
  auto* to = static_cast<bf16*>(packed.mutable_data_ptr());
  const int64_t stride = weight.stride(0);
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++) {
      bf16* into = to + panel * kLanes * width;
      std::fill_n(into, kLanes * width, bf16{0});
      for (int64_t o = 0; o < std::min(kLanes, outputs - panel * kLanes); o++) {
        const bf16* row = from + (panel * kLanes + o) * stride;
        for (int64_t i = 0; i < inputs; i++) into[(i / 2 * kLanes + o) * 2 + i % 2] = row[i];
      }
    }
  });
  return packed;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed,
                  const std::optional<at::Tensor>& bias, int64_t outputs, int64_t inputs) {
  check_packed(packed, outputs, inputs);
  TORCH_CHECK(
      x.scalar_type() == at::kBFloat16 && x.dim() == 2 && x.size(1) == inputs && x.stride(1) == 1,
      "x must be bfloat16 [T, ", inputs, "], contiguous in its last dimension");
  TORCH_CHECK(inputs % kStep == 0, "in_features ", inputs, " is not a multiple of ", kStep);
  if (bias) {
    TORCH_CHECK(bias->scalar_type() == at::kBFloat16 && bias->dim() == 1 &&
                    bias->size(0) == outputs && bias->is_contiguous(),
                "bias must be bfloat16 [", outputs, "]");
  }
  at::Tensor y = at::empty({x.size(0), outputs}, x.options());
  const Product product{static_cast<const bf16*>(x.const_data_ptr()),
                        static_cast<const bf16*>(packed.const_data_ptr()),
                        bias ? static_cast<const bf16*>(bias->const_data_ptr()) : nullptr,
                        static_cast<bf16*>(y.mutable_data_ptr()),
                        x.size(0),
                        inputs,
                        outputs,
                        x.stride(0)};
  if (product.rows == 0) return y;
  const int64_t panels = round_up(outputs, kLanes) / kLanes;
  at::parallel_for(0, panels, 1, [&](int64_t begin, int64_t end) {
#if defined(POLYLOOM_AMX)
    if (amx_usable()) return amx_panels(product, begin, end);
#endif
    vector_panels(product, begin, end);
  });
  return y;
}

at::Tensor gather_rows(const at::Tensor& packed, const at::Tensor& ids, int64_t outputs,
                       int64_t inputs) {
  check_packed(packed, outputs, inputs);
  TORCH_CHECK(ids.scalar_type() == at::kLong && ids.dim() == 1 && ids.is_contiguous(),
              "ids must be int64 [T]");
  const int64_t width = round_up(inputs, kStep), count = ids.size(0);
  const auto* from = static_cast<const bf16*>(packed.const_data_ptr());
  const auto* row = ids.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < count; t++)
    TORCH_CHECK(row[t] >= 0 && row[t] < outputs, "ids[", t, "] is ", row[t], ", of ", outputs);
  at::Tensor out = at::empty({count, inputs}, packed.options());
  auto* to = static_cast<bf16*>(out.mutable_data_ptr());
  at::parallel_for(0, count, 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++) {
      const bf16* lane = from + row[t] / kLanes * kLanes * width + row[t] % kLanes * 2;
      for (int64_t i = 0; i < inputs; i++) to[t * inputs + i] = lane[i / 2 * kLanes * 2 + i % 2];
    }
  });
  return out;
}

bool accelerated() {
#if defined(__AVX512BF16__)
  return true;
#else
  return false;
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(polyloom_engine, m) {
  m.def("pack(Tensor weight) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int outputs, int inputs) -> Tensor");
  m.def("gather_rows(Tensor packed, Tensor ids, int outputs, int inputs) -> Tensor");
  m.def("accelerated() -> bool", &accelerated);
}

TORCH_LIBRARY_IMPL(polyloom_engine, CPU, m) {
  m.impl("pack", &pack);
  m.impl("linear", &linear);
  m.impl("gather_rows", &gather_rows);
}
