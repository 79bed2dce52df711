// Softmax statistics of a chunk of float32 logits, row by row, and gradients that overwrite the logits.
//
// softmax_terms.h defines the arithmetic per element. A row of `stride` floats has `columns` real logits; the rest is vocabulary
// padding, which is never read and gets gradient 0. Rows are independent, so results do not depend on the number of threads.
#include <cstdint>

#include "abi.h"
#include "clones.h"
#include "softmax_row.h"
#include "softmax_terms.h"

MARSRL_API int marsrl_abi_version() { return MARSRL_ABI_VERSION; }

// Computes statistics of whole rows (no vocabulary parallelism).
//   tokens [rows]: index of each row in the packed arrays; null: row r is token first_token + r
//   targets, logprobs, entropy, maximum, log_sum [T] are packed arrays
//   inverse_temperature [T]; null: every token has inverse_temperature_of_all
// Returns -1, or the first token whose target is outside [0, columns).
MARSRL_API int64_t marsrl_row_logprobs(const float* x, int64_t stride, int64_t rows, int64_t columns,
                                       const int64_t* tokens, int64_t first_token, const int64_t* targets,
                                       const float* inverse_temperature, float inverse_temperature_of_all,
                                       float* logprobs, float* entropy, float* maximum, float* log_sum,
                                       int num_threads) {
  const Statistics out = {logprobs, entropy, maximum, log_sum};
  BadTarget bad;
#pragma omp parallel for schedule(static) num_threads(usable_threads(rows, columns, num_threads))
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = tokens ? tokens[r] : first_token + r;
    const int64_t target = targets[token];
    if (target < 0 || target >= columns) {
      bad.saw(token);
      continue;
    }
    const float tau_inverse = inverse_temperature ? inverse_temperature[token] : inverse_temperature_of_all;
    const float* row = x + r * stride;
    Sums sums;
    row_sums(row, columns, tau_inverse, &sums);
    out.put(token, sums, row[target], tau_inverse);
  }
  return bad.token_or_minus_1();
}

// Computes partial statistics of a vocabulary shard or tile.
//   partials [4, rows] double: receives maximum, sum, weighted sum (struct Sums) and target logit
//   local_targets [rows]: column of each target in this part. Targets outside [0, columns) are in another part; their logit is 0.
//   inverse_temperature [rows]: one per row, not per packed token
//   exponentials [rows, exponentials_stride] bfloat16: receives e^d, and 0 in padding columns; null: they are not stored
MARSRL_API void marsrl_row_partials(const float* x, int64_t stride, int64_t rows, int64_t columns,
                                    const int64_t* local_targets, const float* inverse_temperature, double* partials,
                                    uint16_t* exponentials, int64_t exponentials_stride, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(usable_threads(rows, columns, num_threads))
  for (int64_t r = 0; r < rows; r++) {
    const float* row = x + r * stride;
    Sums sums;
    if (exponentials) {
      uint16_t* kept = exponentials + r * exponentials_stride;
      row_sums_and_exponentials(row, columns, inverse_temperature[r], &sums, kept);
      std::memset(kept + columns, 0, (stride - columns) * sizeof *kept);
    } else {
      row_sums(row, columns, inverse_temperature[r], &sums);
    }
    const bool is_mine = local_targets[r] >= 0 && local_targets[r] < columns;
    partials[r] = sums.maximum;
    partials[rows + r] = sums.sum;
    partials[2 * rows + r] = sums.weighted;
    partials[3 * rows + r] = is_mine ? row[local_targets[r]] : 0.0;
  }
}

// Computes gradients of a tile's logits from the `exponentials` that marsrl_row_partials wrote, which stay unchanged.
//   kept [rows]: rows of exponentials and maxima to read; tokens [rows]: indices of these rows in the packed arrays
//   maxima: first row of the tile's partials
//   first_column: the tile's offset in the whole vocabulary, to which targets refer
//   out [rows, stride]: columns from `columns` on are padding and become 0. Other arguments are as in marsrl_row_gradients.
MARSRL_API void marsrl_exponential_gradients(const uint16_t* exponentials, int64_t exponentials_stride,
                                             const double* maxima, const int64_t* kept, const int64_t* tokens,
                                             int64_t rows, int64_t columns, const int64_t* targets,
                                             int64_t first_column, const float* inverse_temperature,
                                             float inverse_temperature_of_all, const float* logprobs,
                                             const float* entropy, const float* maximum, const float* log_sum,
                                             const float* coefficient, const float* entropy_coefficient, float* out,
                                             int64_t stride, int num_threads) {
#pragma omp parallel for schedule(static) num_threads(usable_threads(rows, columns, num_threads))
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = tokens[r];
    const float c = coefficient[token], e = entropy_coefficient[token];
    const float tau_inverse = inverse_temperature ? inverse_temperature[token] : inverse_temperature_of_all;
    const double log_scale = (maxima[kept[r]] - maximum[token]) * tau_inverse - log_sum[token];
    float* gradient = out + r * stride;
    gradient_of_exponentials(exponentials + kept[r] * exponentials_stride, gradient, columns, log_scale,
                             tau_inverse, entropy[token], c, e);
    const int64_t target = targets[token] - first_column;
    if (target >= 0 && target < columns)
      gradient[target] = softmax_target_gradient(logprobs[token], entropy[token], c, e, tau_inverse);
    zero_columns(gradient, columns, stride);
  }
}

// Turns the logits of the active rows (those with a nonzero coefficient) into gradients, and moves these rows to the front.
//   coefficient (c) and entropy_coefficient (e, null: 0), logprobs, entropy, maximum, log_sum [T]: packed arrays
//   first_column: this shard's offset in the whole vocabulary, to which targets refer
//   active [rows]: receives the token of each active row, in order
// Returns the number of active rows, n. Rows of x from n on are undefined afterwards.
MARSRL_API int64_t marsrl_row_gradients(float* x, int64_t stride, int64_t rows, int64_t columns, const int64_t* tokens,
                                        int64_t first_token, const int64_t* targets, int64_t first_column,
                                        const float* inverse_temperature, float inverse_temperature_of_all,
                                        const float* logprobs, const float* entropy, const float* maximum,
                                        const float* log_sum, const float* coefficient,
                                        const float* entropy_coefficient, int64_t* active,
                                        int num_threads) {
  const int threads = usable_threads(rows, columns, num_threads);
  int64_t kept = 0;  // active rows at the front so far; used by a single thread (with more, move_active_rows follows the loop)
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = tokens ? tokens[r] : first_token + r;
    const float c = coefficient[token], e = entropy_coefficient ? entropy_coefficient[token] : 0.0f;
    if (c == 0.0f && e == 0.0f) continue;
    const float tau_inverse = inverse_temperature ? inverse_temperature[token] : inverse_temperature_of_all;
    float* row = x + r * stride;
    float* gradient = row;
    if (threads == 1) {
      gradient = x + kept * stride;
      active[kept++] = token;
    }
    if (e == 0.0f)
      row_gradient_of_logprob(row, gradient, columns, maximum[token], tau_inverse, log_sum[token], c);
    else
      row_gradient(row, gradient, columns, maximum[token], tau_inverse, log_sum[token], entropy[token], c, e);
    const int64_t target = targets[token] - first_column;
    if (target >= 0 && target < columns)
      gradient[target] = softmax_target_gradient(logprobs[token], entropy[token], c, e, tau_inverse);
    zero_columns(gradient, columns, stride);
  }
  if (threads == 1) return kept;
  return move_active_rows(x, stride, rows, tokens, first_token, coefficient, entropy_coefficient, active);
}
