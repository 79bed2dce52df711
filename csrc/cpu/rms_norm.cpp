// RMSNorm of rows, forward and backward; each row is read from memory once.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "bfloat16.h"
#include "clones.h"

namespace {

// Length of the pieces of a row that are summed in float32. Their sums are added in double, so the error does not grow with the
// width.
constexpr int64_t kBlock = 512;

// Number of rows over which the weight's gradient is summed in float32; the sums are then added in double. Sums over so few rows
// are as exact as PyTorch's, and the order of additions does not depend on the number of threads.
constexpr int64_t kRowsOfSum = 32;

template <class T>
MARSRL_INLINE void forward_rows(const T* x, int64_t stride, const float* weight, int64_t rows, int64_t width, double eps,
                                T* out, float* scales) {
  for (int64_t r = 0; r < rows; r++, x += stride, out += width) {
    double squares = 0;
    for (int64_t begin = 0; begin < width; begin += kBlock) {
      const int64_t end = begin + kBlock < width ? begin + kBlock : width;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = begin; i < end; i++) sum += load(x + i) * load(x + i);
      squares += sum;
    }
    const float scale = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(width) + eps));
    scales[r] = scale;
    for (int64_t i = 0; i < width; i++) store(out + i, load(x + i) * scale * weight[i]);
  }
}

// Writes the gradient of x to out, and adds grad * x * scale of each row, the gradient of the weight, to sums [width] float32.
template <class T>
MARSRL_INLINE void backward_rows(const T* x, int64_t stride, const float* weight, const float* scales, const T* grad,
                                 int64_t rows, int64_t width, T* out, float* sums) {
  for (int64_t r = 0; r < rows; r++, x += stride, grad += width, out += width) {
    const float scale = scales[r];
    double products = 0;
    for (int64_t begin = 0; begin < width; begin += kBlock) {
      const int64_t end = begin + kBlock < width ? begin + kBlock : width;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = begin; i < end; i++) {
        const float product = load(grad + i) * (load(x + i) * scale);
        sums[i] += product;
        sum += product * weight[i];
      }
      products += sum;
    }
    const float mean = static_cast<float>(products / static_cast<double>(width));
    for (int64_t i = 0; i < width; i++)
      store(out + i, scale * (load(grad + i) * weight[i] - load(x + i) * scale * mean));
  }
}

MARSRL_CLONES void forward_float(const float* x, int64_t stride, const float* weight, int64_t rows, int64_t width,
                                 double eps, float* out, float* scales) {
  forward_rows(x, stride, weight, rows, width, eps, out, scales);
}
MARSRL_CLONES void forward_bfloat16(const uint16_t* x, int64_t stride, const float* weight, int64_t rows, int64_t width,
                                    double eps, uint16_t* out, float* scales) {
  forward_rows(x, stride, weight, rows, width, eps, out, scales);
}
MARSRL_CLONES void backward_float(const float* x, int64_t stride, const float* weight, const float* scales,
                                  const float* grad, int64_t rows, int64_t width, float* out, float* sums) {
  backward_rows(x, stride, weight, scales, grad, rows, width, out, sums);
}
MARSRL_CLONES void backward_bfloat16(const uint16_t* x, int64_t stride, const float* weight, const float* scales,
                                     const uint16_t* grad, int64_t rows, int64_t width, uint16_t* out, float* sums) {
  backward_rows(x, stride, weight, scales, grad, rows, width, out, sums);
}
MARSRL_CLONES void add(const float* sums, int64_t width, double* totals) {
  for (int64_t i = 0; i < width; i++) totals[i] += sums[i];
}

}  // namespace

// Computes out [rows, width] = x * scale * weight and scales [rows] = 1 / sqrt(mean of the row's squares + eps). Rows of x are
// `stride` elements apart. x and out are float32, or bfloat16 if is_bfloat16; weight [width] is float32.
MARSRL_API void marsrl_rms_norm(const void* x, int is_bfloat16, int64_t stride, const float* weight, int64_t rows,
                                int64_t width, double eps, void* out, float* scales, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t begin = 0; begin < rows; begin += kRowsOfSum) {
    const int64_t count = std::min(kRowsOfSum, rows - begin);
    if (is_bfloat16)
      forward_bfloat16(static_cast<const uint16_t*>(x) + begin * stride, stride, weight, count, width, eps,
                       static_cast<uint16_t*>(out) + begin * width, scales + begin);
    else
      forward_float(static_cast<const float*>(x) + begin * stride, stride, weight, count, width, eps,
                    static_cast<float*>(out) + begin * width, scales + begin);
  }
}

// Computes, from grad [rows, width], the gradient of x, out [rows, width], and that of the weight, of_weight [width] float32. grad
// and out have the dtype of x.
MARSRL_API void marsrl_rms_norm_gradients(const void* x, int is_bfloat16, int64_t stride, const float* weight,
                                          const float* scales, const void* grad, int64_t rows, int64_t width, void* out,
                                          float* of_weight, int num_threads) {
  const int64_t num_sums = (rows + kRowsOfSum - 1) / kRowsOfSum;
  std::vector<float> sums(num_sums * width);
#pragma omp parallel for schedule(static) num_threads(num_threads)
  for (int64_t s = 0; s < num_sums; s++) {
    const int64_t begin = s * kRowsOfSum, count = std::min(kRowsOfSum, rows - begin);
    if (is_bfloat16)
      backward_bfloat16(static_cast<const uint16_t*>(x) + begin * stride, stride, weight, scales + begin,
                        static_cast<const uint16_t*>(grad) + begin * width, count, width,
                        static_cast<uint16_t*>(out) + begin * width, sums.data() + s * width);
    else
      backward_float(static_cast<const float*>(x) + begin * stride, stride, weight, scales + begin,
                     static_cast<const float*>(grad) + begin * width, count, width,
                     static_cast<float*>(out) + begin * width, sums.data() + s * width);
  }
  std::vector<double> totals(width);
  for (int64_t s = 0; s < num_sums; s++) add(sums.data() + s * width, width, totals.data());
  std::copy(totals.begin(), totals.end(), of_weight);
}
