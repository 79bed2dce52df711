// The walks over a row of logits, compiled once for each instruction set. The arithmetic of an element is in
// softmax_terms.h.
#include "softmax_row.h"

#include "clones.h"
#include "softmax_terms.h"

namespace {

// 4096 terms are summed in float32, the partial sums in double: the error does not grow with the vocabulary. A block of
// them stays in the L1 cache between its two walks.
constexpr int64_t kBlock = 4096;

}  // namespace

MARSRL_CLONES float row_maximum(const float* __restrict__ x, int64_t columns) {
  float maximum = -INFINITY;
#pragma omp simd reduction(max : maximum)
  for (int64_t i = 0; i < columns; i++) maximum = x[i] > maximum ? x[i] : maximum;
  return maximum;
}

MARSRL_CLONES void row_sums(const float* __restrict__ x, int64_t columns, float maximum, float inverse_temperature,
                            Sums* out) {
  double sum = 0, weighted = 0;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t end = begin + kBlock < columns ? begin + kBlock : columns;
    float s = 0, w = 0;
#pragma omp simd reduction(+ : s, w)
    for (int64_t i = begin; i < end; i++) add_softmax_term(x[i], maximum, inverse_temperature, s, w);
    sum += s;
    weighted += w;
  }
  *out = {maximum, sum, weighted};
}

MARSRL_CLONES void row_sums_in_place(float* __restrict__ x, int64_t columns, float maximum, float inverse_temperature,
                                     Sums* out) {
  double sum = 0, weighted = 0;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t end = begin + kBlock < columns ? begin + kBlock : columns;
    float s = 0, w = 0;
#pragma omp simd reduction(+ : s, w)
    for (int64_t i = begin; i < end; i++) x[i] = add_softmax_term(x[i], maximum, inverse_temperature, s, w);
    sum += s;
    weighted += w;
  }
  *out = {maximum, sum, weighted};
}

MARSRL_CLONES void row_gradient(const float* x, float* out, int64_t columns, float maximum, float inverse_temperature,
                                float log_sum, float entropy, float c, float e) {
#pragma omp simd
  for (int64_t i = 0; i < columns; i++)
    out[i] = softmax_gradient(x[i], maximum, inverse_temperature, log_sum, entropy, c, e);
}

MARSRL_CLONES void row_gradient_of_logprob(float* __restrict__ x, int64_t columns, float maximum,
                                           float inverse_temperature, float log_sum, float c) {
  const float scale = -c * inverse_temperature;
#pragma omp simd
  for (int64_t i = 0; i < columns; i++)
    x[i] = softmax_gradient_of_logprob(x[i], maximum, inverse_temperature, log_sum, scale);
}

MARSRL_CLONES void scaled_row(const float* x, float* out, int64_t columns, float scale) {
#pragma omp simd
  for (int64_t i = 0; i < columns; i++) out[i] = scale * x[i];
}
