// The decoder's row-wise ops, float and bfloat16, computed in float.
//
// Rounding follows transformers: a norm is rounded to the tensor's type before Llama's weight and
// after Gemma's; an activation is rounded before it multiplies.

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "cpu_vec.h"

namespace {

using namespace polyloom;

constexpr int64_t kLanes = 16;
constexpr int64_t kElementsPerThread = 16384;  // less is not worth waking a thread for

int64_t rows_per_thread(int64_t width) {
  return std::max<int64_t>(1, kElementsPerThread / std::max<int64_t>(1, width));
}

// What a value becomes when it is kept in T.
template <typename T>
POLYLOOM_INLINE f32x16 rounded(f32x16 value) {
  if constexpr (sizeof(T) == sizeof(float)) return value;
  bf16 kept[kLanes];
  store16(kept, value);
  return load16(kept);
}

template <typename T>
T* data(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

// Calls run(T*) with the null pointer of the tensor's element type.
template <typename F>
void for_dtype(const at::Tensor& tensor, F run) {
  if (tensor.scalar_type() == at::kFloat) return run(static_cast<float*>(nullptr));
  TORCH_CHECK(tensor.scalar_type() == at::kBFloat16, "dtype ", tensor.scalar_type(),
              " is not covered");
  run(static_cast<bf16*>(nullptr));
}

void check_rows(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.dim() == 2 || tensor.dim() == 3, name, " has ", tensor.dim(),
              " dimensions, not 2 or 3");
  TORCH_CHECK(tensor.stride(-1) == 1 || tensor.size(-1) <= 1, name,
              " is not contiguous in its last dimension");
}

template <typename T>
POLYLOOM_INLINE void norm_row(const T* x, const T* weight, T* out, int64_t width, float eps,
                              bool plus_one) {
  f32x16 squares = {};
  for (int64_t i = 0; i < width; i += kLanes) {
    const f32x16 value = load16(x + i);
    squares += value * value;
  }
  const float inverse = 1.0f / std::sqrt(reduce_add(squares) / static_cast<float>(width) + eps);
  for (int64_t i = 0; i < width; i += kLanes) {
    const f32x16 normed = load16(x + i) * inverse, w = load16(weight + i);
    store16(out + i, plus_one ? normed * (w + 1.0f) : rounded<T>(normed) * w);
  }
}

void check_norm(const at::Tensor& x, const at::Tensor& weight) {
  check_rows(x, "x");
  TORCH_CHECK(x.size(-1) % kLanes == 0, "last dimension ", x.size(-1), " is not a multiple of ",
              kLanes);
  TORCH_CHECK(weight.scalar_type() == x.scalar_type() && weight.dim() == 1 &&
                  weight.is_contiguous() && weight.size(0) == x.size(-1),
              "weight ", weight.sizes(), " ", weight.scalar_type(), " does not fit x ", x.sizes(),
              " ", x.scalar_type());
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, bool plus_one) {
  check_norm(x, weight);
  at::Tensor out = at::empty(x.sizes(), x.options());
  const int64_t heads = x.dim() == 3 ? x.size(1) : 1, width = x.size(-1);
  const int64_t row_stride = x.stride(0), head_stride = x.dim() == 3 ? x.stride(1) : 0;
  for_dtype(x, [&]<typename T>(T*) {
    at::parallel_for(0, x.size(0), rows_per_thread(heads * width), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++)
        for (int64_t h = 0; h < heads; h++)
          norm_row(data<T>(x) + t * row_stride + h * head_stride, data<T>(weight),
                   data<T>(out) + (t * heads + h) * width, width, static_cast<float>(eps),
                   plus_one);
    });
  });
  return out;
}

at::Tensor add_rms_norm(const at::Tensor& x, at::Tensor residual, const at::Tensor& weight,
                        double eps, bool plus_one) {
  check_norm(x, weight);
  check_rows(residual, "residual");
  TORCH_CHECK(
      x.dim() == 2 && residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type(),
      "residual ", residual.sizes(), " does not fit x ", x.sizes());
  at::Tensor out = at::empty(x.sizes(), x.options());
  const int64_t width = x.size(1), x_stride = x.stride(0), residual_stride = residual.stride(0);
  for_dtype(x, [&]<typename T>(T*) {
    at::parallel_for(0, x.size(0), rows_per_thread(width), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const T* from = data<T>(x) + t * x_stride;
        T* sum = data<T>(residual) + t * residual_stride;
        for (int64_t i = 0; i < width; i += kLanes)
          store16(sum + i, load16(sum + i) + load16(from + i));
        norm_row<T>(sum, data<T>(weight), data<T>(out) + t * width, width, static_cast<float>(eps),
                    plus_one);
      }
    });
  });
  return out;
}

// 1 / (1 + e^-x), without cancellation on either side.
POLYLOOM_INLINE f32x16 sigmoid(f32x16 x) {
  return 1.0f / (1.0f + exp16(x < -88.0f ? splat(88.0f) : -x));
}

POLYLOOM_INLINE f32x16 silu(f32x16 x) { return x * sigmoid(x); }

// 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), as 0.5 (1 + tanh(a)) = sigmoid(2 a).
POLYLOOM_INLINE f32x16 gelu_tanh(f32x16 x) {
  return x * sigmoid(1.5957691f * (x + 0.044715f * x * x * x));
}

template <f32x16 (*ACTIVATION)(f32x16)>
at::Tensor gated(const at::Tensor& gate_up) {
  check_rows(gate_up, "gate_up");
  TORCH_CHECK(gate_up.dim() == 2 && gate_up.size(1) % (2 * kLanes) == 0, "gate_up ",
              gate_up.sizes(), " is not [T, 2F] with F a multiple of ", kLanes);
  const int64_t width = gate_up.size(1) / 2, stride = gate_up.stride(0);
  at::Tensor out = at::empty({gate_up.size(0), width}, gate_up.options());
  for_dtype(gate_up, [&]<typename T>(T*) {
    at::parallel_for(0, gate_up.size(0), rows_per_thread(width), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; t++) {
        const T* gate = data<T>(gate_up) + t * stride;
        T* to = data<T>(out) + t * width;
        for (int64_t i = 0; i < width; i += kLanes)
          store16(to + i, rounded<T>(ACTIVATION(load16(gate + i))) * load16(gate + width + i));
      }
    });
  });
  return out;
}

// One head: dimension i of the first half turns with dimension i of the second.
template <typename T, typename C>
POLYLOOM_INLINE void turn(T* x, const C* cos, const C* sin, int64_t half) {
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const f32x16 first = load16(x + i), second = load16(x + half + i);
    store16(x + i, first * load16(cos + i) - second * load16(sin + i));
    store16(x + half + i, second * load16(cos + half + i) + first * load16(sin + half + i));
  }
  for (; i < half; i++) {
    const float first = to_float(x[i]), second = to_float(x[half + i]);
    x[i] = from_float<T>(first * to_float(cos[i]) - second * to_float(sin[i]));
    x[half + i] = from_float<T>(second * to_float(cos[half + i]) + first * to_float(sin[half + i]));
  }
}

void check_rope(const at::Tensor& x, const char* name, const at::Tensor& cos,
                const at::Tensor& sin) {
  TORCH_CHECK(x.dim() == 3, name, " has ", x.dim(), " dimensions, not 3");
  check_rows(x, name);
  TORCH_CHECK(cos.dim() == 2 && cos.sizes() == sin.sizes() &&
                  cos.scalar_type() == sin.scalar_type() && cos.is_contiguous() &&
                  sin.is_contiguous() && cos.size(0) == x.size(0) && cos.size(1) % 2 == 0 &&
                  cos.size(1) <= x.size(2),
              "cos ", cos.sizes(), ", sin ", sin.sizes(), " do not fit ", name, " ", x.sizes());
}

void rope_(at::Tensor q, at::Tensor k, const at::Tensor& cos, const at::Tensor& sin) {
  check_rope(q, "q", cos, sin);
  check_rope(k, "k", cos, sin);
  TORCH_CHECK(q.scalar_type() == k.scalar_type(), "q and k differ in dtype");
  const int64_t rotary = cos.size(1);
  const int64_t grain = rows_per_thread((q.size(1) + k.size(1)) * rotary);
  for_dtype(q, [&]<typename T>(T*) {
    for_dtype(cos, [&]<typename C>(C*) {
      at::parallel_for(0, q.size(0), grain, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++)
          for (const at::Tensor* x : {&q, &k})
            for (int64_t h = 0; h < x->size(1); h++)
              turn(data<T>(*x) + t * x->stride(0) + h * x->stride(1), data<C>(cos) + t * rotary,
                   data<C>(sin) + t * rotary, rotary / 2);
      });
    });
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(polyloom_engine, m) {
  m.def("rms_norm(Tensor x, Tensor weight, float eps, bool plus_one) -> Tensor");
  m.def(
      "add_rms_norm(Tensor x, Tensor(a!) residual, Tensor weight, float eps, bool plus_one) -> "
      "Tensor");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def("gelu_tanh_mul(Tensor gate_up) -> Tensor");
  m.def("rope_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin) -> ()");
}

TORCH_LIBRARY_IMPL(polyloom_engine, CPU, m) {
  m.impl("rms_norm", &rms_norm);
  m.impl("add_rms_norm", &add_rms_norm);
  m.impl("silu_mul", &gated<silu>);
  m.impl("gelu_tanh_mul", &gated<gelu_tanh>);
  m.impl("rope_", &rope_);
}
