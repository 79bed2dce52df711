// Passes over a row of logits, compiled once for each instruction set. softmax_terms.h defines the arithmetic per element.
#include "softmax_row.h"

#include <algorithm>

#include "bfloat16.h"
#include "clones.h"
#include "softmax_terms.h"

namespace {

inline int64_t end_of_block(int64_t begin, int64_t columns) {
  return begin + kBlock < columns ? begin + kBlock : columns;
}

// Prefetches the block at `begin`, because the hardware prefetcher stops at the end of a page. Called before the current block is
// computed, which takes longer than reading the next one from memory.
inline void prefetch_block(const float* x, int64_t begin, int64_t columns) {
  constexpr int64_t kLine = 64 / sizeof(float);
  for (int64_t i = begin; i < end_of_block(begin, columns); i += kLine) __builtin_prefetch(x + i);
}

// Running sums over the blocks of a row. When a block has a larger maximum, they are rescaled to it: every d of earlier blocks
// changes by the same shift, and every e^d by the same factor.
struct RunningSums {
  float maximum = -INFINITY;
  double sum = 0, weighted = 0;

  void see_maximum(float value, float inverse_temperature) {
    if (!(value > maximum)) return;
    if (sum != 0) {
      const double d = (static_cast<double>(maximum) - value) * inverse_temperature, shrink = std::exp(d);
      weighted = shrink == 0 ? 0 : (weighted + d * sum) * shrink;
      sum *= shrink;
    }
    maximum = value;
  }

  // Value that is subtracted from a block's logits: the maximum so far, or 0 while all logits are -inf.
  float origin() const { return maximum > -INFINITY ? maximum : 0.0f; }
};

MARSRL_INLINE float block_maximum(const float* x, int64_t begin, int64_t end) {
  float maximum = -INFINITY;
#pragma omp simd reduction(max : maximum)
  for (int64_t i = begin; i < end; i++) maximum = x[i] > maximum ? x[i] : maximum;
  return maximum;
}

// Computes the sums of a row of logits, block by block. For each block it calls see_origin(block, maximum), with the largest logit
// so far, and then keep(i, e^d) for each element i. d is relative to the origin that follows from this maximum.
template <class SeeOrigin, class Keep>
MARSRL_INLINE void walk_row(const float* x, int64_t columns, float inverse_temperature, Sums* out, SeeOrigin see_origin,
                            Keep keep) {
  RunningSums found;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t end = end_of_block(begin, columns);
    found.see_maximum(block_maximum(x, begin, end), inverse_temperature);
    prefetch_block(x, end, columns);
    const float origin = found.origin();
    see_origin(begin / kBlock, found.maximum);
    float s = 0, w = 0;
#pragma omp simd reduction(+ : s, w)
    for (int64_t i = begin; i < end; i++) keep(i, add_softmax_term(x[i], origin, inverse_temperature, s, w));
    found.sum += s;
    found.weighted += w;
  }
  *out = {found.maximum, found.sum, found.weighted};
}

}  // namespace

MARSRL_CLONES void row_sums(const float* x, int64_t columns, float inverse_temperature, Sums* out) {
  walk_row(x, columns, inverse_temperature, out, [](int64_t, float) {}, [](int64_t, float) {});
}

MARSRL_CLONES void row_sums_in_place(float* x, int64_t columns, float inverse_temperature, Sums* out, float* origins) {
  walk_row(
      x, columns, inverse_temperature, out, [=](int64_t block, float origin) { origins[block] = origin; },
      [=](int64_t i, float e) { x[i] = e; });
}

MARSRL_CLONES void row_sums_and_exponentials(const float* x, int64_t columns, float inverse_temperature, Sums* out,
                                             uint16_t* __restrict__ exponentials) {
  const float maximum = block_maximum(x, 0, columns), origin = maximum > -INFINITY ? maximum : 0.0f;
  double sum = 0, weighted = 0;
  float wide[kBlock];  // float32 results: a loop that also converted them to bfloat16 would be vectorised at half the width
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t size = end_of_block(begin, columns) - begin;
    float s = 0, w = 0;
#pragma omp simd reduction(+ : s, w)
    for (int64_t i = 0; i < size; i++)
      wide[i] = add_softmax_term(x[begin + i], origin, inverse_temperature, s, w);
#pragma omp simd
    for (int64_t i = 0; i < size; i++) exponentials[begin + i] = to_bfloat16(wide[i]);
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

MARSRL_CLONES void row_gradient_of_logprob(const float* x, float* out, int64_t columns, float maximum,
                                           float inverse_temperature, float log_sum, float c) {
  const float scale = -c * inverse_temperature;
#pragma omp simd
  for (int64_t i = 0; i < columns; i++)
    out[i] = softmax_gradient_of_logprob(x[i], maximum, inverse_temperature, log_sum, scale);
}

MARSRL_CLONES void scaled_row(const float* x, const float* origins, float* out, int64_t columns, float maximum,
                              float inverse_temperature, double scale) {
  float origin = maximum, of_block = static_cast<float>(scale);
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t end = end_of_block(begin, columns);
    if (origins[begin / kBlock] != origin) {
      origin = origins[begin / kBlock];
      of_block = static_cast<float>(scale * std::exp((static_cast<double>(origin) - maximum) * inverse_temperature));
    }
#pragma omp simd
    for (int64_t i = begin; i < end; i++) out[i] = of_block * x[i];
  }
}

MARSRL_CLONES void gradient_of_exponentials(const uint16_t* exponentials, float* __restrict__ out, int64_t columns,
                                           double log_scale, float inverse_temperature, float entropy, float c,
                                           float e) {
  const double scale = std::exp(log_scale);
  if (e == 0.0f) {
    const float by = static_cast<float>(-c * inverse_temperature * scale);
#pragma omp simd
    for (int64_t i = 0; i < columns; i++) out[i] = by * from_bfloat16(exponentials[i]);
    return;
  }
  const float by = static_cast<float>(-inverse_temperature * scale);
  const float shift = static_cast<float>(std::max(log_scale, -1e4)) + entropy;
#pragma omp simd
  for (int64_t i = 0; i < columns; i++) {
    const float of_column = from_bfloat16(exponentials[i]);
    out[i] = by * of_column * (c + e * (vector_log(of_column) + shift));
  }
}
