// A float32 chunk of logits, row by row: softmax statistics, then the gradient in place.
//
// The arithmetic of an element is in softmax_terms.h.
// A row of `stride` floats holds `columns` real logits; what lies between is vocabulary padding: never read, and its
// gradient is written as 0. `targets` are local column indices. Rows are independent: the thread count changes nothing.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "abi.h"
#include "clones.h"
#include "softmax_terms.h"

namespace {

// 4096 terms are summed in float32, the partial sums in double: the error does not grow with the vocabulary.
constexpr int64_t kBlock = 4096;

struct Sums {
  float maximum;    // of the raw logits
  double sum;       // of e^d with d = (x - maximum) / tau
  double weighted;  // of d e^d
};

MARSRL_CLONES void row_sums(const float* __restrict__ x, int64_t columns, float inverse_temperature, Sums* out) {
  float maximum = -INFINITY;
#pragma omp simd reduction(max : maximum)
  for (int64_t i = 0; i < columns; i++) maximum = x[i] > maximum ? x[i] : maximum;
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

MARSRL_CLONES void row_gradient(float* __restrict__ x, int64_t columns, float maximum, float inverse_temperature,
                                float log_sum, float entropy, float c, float e) {
#pragma omp simd
  for (int64_t i = 0; i < columns; i++)
    x[i] = softmax_gradient(x[i], maximum, inverse_temperature, log_sum, entropy, c, e);
}

MARSRL_CLONES void row_gradient_of_logprob(float* __restrict__ x, int64_t columns, float maximum,
                                           float inverse_temperature, float log_sum, float c) {
  const float scale = -c * inverse_temperature;
#pragma omp simd
  for (int64_t i = 0; i < columns; i++)
    x[i] = softmax_gradient_of_logprob(x[i], maximum, inverse_temperature, log_sum, scale);
}

// Small vocabularies: a parallel region costs more than it saves below this many elements.
constexpr int64_t kParallelElements = 1 << 15;

int usable_threads(int64_t rows, int64_t columns, int num_threads) {
  return rows * columns < kParallelElements ? 1 : num_threads;
}

}  // namespace

MARSRL_API int marsrl_abi_version() { return MARSRL_ABI_VERSION; }

// Statistics of whole rows (no vocabulary parallelism).
//   tokens [rows]: where a row's inputs and outputs lie in the packed arrays; null: row r is token first_token + r
//   targets, logprobs, entropy, maximum, log_sum [T] are packed arrays; inverse_temperature [T], null: `temperature`
// Returns -1, or the first token whose target is outside [0, columns).
MARSRL_API int64_t marsrl_row_logprobs(const float* x, int64_t stride, int64_t rows, int64_t columns,
                                       const int64_t* tokens, int64_t first_token, const int64_t* targets,
                                       const float* inverse_temperature, float inverse_temperature_of_all,
                                       float* logprobs, float* entropy, float* maximum, float* log_sum,
                                       int num_threads) {
  std::atomic<int64_t> bad{std::numeric_limits<int64_t>::max()};
#pragma omp parallel for schedule(static) num_threads(usable_threads(rows, columns, num_threads))
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = tokens ? tokens[r] : first_token + r;
    const int64_t target = targets[token];
    if (target < 0 || target >= columns) {
      int64_t seen = bad.load();
      while (token < seen && !bad.compare_exchange_weak(seen, token)) {
      }
      continue;
    }
    const float tau_inverse = inverse_temperature ? inverse_temperature[token] : inverse_temperature_of_all;
    const float* row = x + r * stride;
    Sums sums;
    row_sums(row, columns, tau_inverse, &sums);
    const double log_of_sum = std::log(sums.sum);
    const float centred = (row[target] - sums.maximum) * tau_inverse;
    logprobs[token] = static_cast<float>(centred - log_of_sum);
    entropy[token] = static_cast<float>(log_of_sum - sums.weighted / sums.sum);
    maximum[token] = sums.maximum;
    log_sum[token] = static_cast<float>(log_of_sum);
  }
  return bad.load() == std::numeric_limits<int64_t>::max() ? -1 : bad.load();
}

// The part of one vocabulary shard: partials [4, rows] double = maximum, sum, weighted sum, target logit.
// local_targets [rows]: outside [0, columns) = another shard owns it, and its logit is 0 here.
MARSRL_API void marsrl_row_partials(const float* x, int64_t stride, int64_t rows, int64_t columns,
                                    const int64_t* local_targets, const float* inverse_temperature, double* partials,
                                    int num_threads) {
#pragma omp parallel for schedule(static) num_threads(usable_threads(rows, columns, num_threads))
  for (int64_t r = 0; r < rows; r++) {
    const float* row = x + r * stride;
    Sums sums;
    row_sums(row, columns, inverse_temperature[r], &sums);
    const bool is_mine = local_targets[r] >= 0 && local_targets[r] < columns;
    partials[r] = sums.maximum;
    partials[rows + r] = sums.sum;
    partials[2 * rows + r] = sums.weighted;
    partials[3 * rows + r] = is_mine ? row[local_targets[r]] : 0.0;
  }
}

// Turns the logits of the rows with a coefficient into their gradient and moves these rows to the front of x.
//   coefficient (c) and entropy_coefficient (e, null: 0), logprobs, entropy, maximum, log_sum [T]: packed arrays
//   first_column: of this shard; targets are global
//   active [rows]: receives the token of each row kept, in order
// Returns how many rows were kept; rows of x behind them hold rubbish.
MARSRL_API int64_t marsrl_row_gradients(float* x, int64_t stride, int64_t rows, int64_t columns, const int64_t* tokens,
                                        int64_t first_token, const int64_t* targets, int64_t first_column,
                                        const float* inverse_temperature, float inverse_temperature_of_all,
                                        const float* logprobs, const float* entropy, const float* maximum,
                                        const float* log_sum, const float* coefficient,
                                        const float* entropy_coefficient, int64_t* active, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(usable_threads(rows, columns, num_threads))
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = tokens ? tokens[r] : first_token + r;
    const float c = coefficient[token], e = entropy_coefficient ? entropy_coefficient[token] : 0.0f;
    if (c == 0.0f && e == 0.0f) continue;
    const float tau_inverse = inverse_temperature ? inverse_temperature[token] : inverse_temperature_of_all;
    float* row = x + r * stride;
    if (e == 0.0f)
      row_gradient_of_logprob(row, columns, maximum[token], tau_inverse, log_sum[token], c);
    else
      row_gradient(row, columns, maximum[token], tau_inverse, log_sum[token], entropy[token], c, e);
    const int64_t target = targets[token] - first_column;
    if (target >= 0 && target < columns)
      row[target] = softmax_target_gradient(logprobs[token], entropy[token], c, e, tau_inverse);
    std::fill(row + columns, row + stride, 0.0f);
  }
  int64_t kept = 0;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = tokens ? tokens[r] : first_token + r;
    if (coefficient[token] == 0.0f && (!entropy_coefficient || entropy_coefficient[token] == 0.0f)) continue;
    if (kept != r) std::memcpy(x + kept * stride, x + r * stride, stride * sizeof(float));
    active[kept++] = token;
  }
  return kept;
}
