// SwiGLU of rows that have a gate and an up projection side by side; forward and backward take one pass each.
#include <cstdint>
#include <cstring>

#include "bfloat16.h"
#include "clones.h"
#include "vector_exp.h"

namespace {

// Returns 1 / (1 + e^-x), and NaN for NaN. Below -88, where e^-x would overflow float32, the result is 6e-39.
MARSRL_INLINE float sigmoid(float x) { return 1.0f / (1.0f + vector_exp(x < -kLargestExponent ? kLargestExponent : -x)); }

template <class T>
MARSRL_INLINE void forward_row(const T* gate, int64_t width, float weight, T* out) {
  const T* up = gate + width;
  for (int64_t i = 0; i < width; i++) {
    const float g = load(gate + i);
    store(out + i, g * sigmoid(g) * load(up + i) * weight);
  }
}

// Writes the gradients of gate and up to out, and returns sum_i grad_i silu(gate_i) up_i, the gradient of the weight.
template <class T>
MARSRL_INLINE float backward_row(const T* gate, int64_t width, float weight, const T* grad, T* out) {
  const T* up = gate + width;
  // Length of the pieces of a row that are summed in float32. Their sums are added in double, so the error does not grow with the
  // width.
  constexpr int64_t kBlock = 512;
  double of_weight = 0;
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t end = begin + kBlock < width ? begin + kBlock : width;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; i++) {
      const float g = load(gate + i), u = load(up + i), d = load(grad + i);
      const float s = sigmoid(g), silu = g * s, scaled = d * weight;
      sum += d * silu * u;
      // The derivative of silu is s + silu (1 - s).
      store(out + i, scaled * u * (s + silu * (1.0f - s)));
      store(out + width + i, scaled * silu);
    }
    of_weight += sum;
  }
  return static_cast<float>(of_weight);
}

MARSRL_CLONES void forward_float(const float* gate, int64_t width, float weight, float* out) {
  forward_row(gate, width, weight, out);
}
MARSRL_CLONES void forward_bfloat16(const uint16_t* gate, int64_t width, float weight, uint16_t* out) {
  forward_row(gate, width, weight, out);
}
MARSRL_CLONES float backward_float(const float* gate, int64_t width, float weight, const float* grad, float* out) {
  return backward_row(gate, width, weight, grad, out);
}
MARSRL_CLONES float backward_bfloat16(const uint16_t* gate, int64_t width, float weight, const uint16_t* grad,
                                      uint16_t* out) {
  return backward_row(gate, width, weight, grad, out);
}

}  // namespace

// Computes out [rows, width] = silu(gate) * up * weight from products [rows, 2 width], in which the gate comes first. Both are
// float32, or bfloat16 if is_bfloat16. weights [rows] float32; null: 1.
MARSRL_API void marsrl_swiglu(const void* products, int is_bfloat16, const float* weights, int64_t rows, int64_t width,
                              void* out, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t r = 0; r < rows; r++) {
    const float weight = weights ? weights[r] : 1.0f;
    if (is_bfloat16)
      forward_bfloat16(static_cast<const uint16_t*>(products) + 2 * r * width, width, weight,
                       static_cast<uint16_t*>(out) + r * width);
    else
      forward_float(static_cast<const float*>(products) + 2 * r * width, width, weight,
                    static_cast<float*>(out) + r * width);
  }
}

// Computes, from grad [rows, width], the gradient of products, out [rows, 2 width], and that of weights, grad_weights [rows]
// float32. grad and out have the dtype of products. grad_weights null: it is not computed.
MARSRL_API void marsrl_swiglu_gradients(const void* products, int is_bfloat16, const float* weights, const void* grad,
                                        int64_t rows, int64_t width, void* out, float* grad_weights, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t r = 0; r < rows; r++) {
    const float weight = weights ? weights[r] : 1.0f;
    const float found =
        is_bfloat16
            ? backward_bfloat16(static_cast<const uint16_t*>(products) + 2 * r * width, width, weight,
                                static_cast<const uint16_t*>(grad) + r * width, static_cast<uint16_t*>(out) + 2 * r * width)
            : backward_float(static_cast<const float*>(products) + 2 * r * width, width, weight,
                             static_cast<const float*>(grad) + r * width, static_cast<float*>(out) + 2 * r * width);
    if (grad_weights) grad_weights[r] = found;
  }
}
