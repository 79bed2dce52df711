// Draws one token per row of logits; rollout/engines/sampler.py defines the result.
//
// One pass finds the row's maximum, and a second adds up e^(x - maximum) block by block in double. The drawn token is in the first
// block whose cumulative sum exceeds noise times the total; only this block is read again. Rows are independent, so results do not
// depend on the number of threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "clones.h"
#include "softmax_row.h"
#include "vector_exp.h"

namespace {

// Returns the largest logit, ignoring NaN; NaN makes the sum of exponentials NaN later.
MARSRL_CLONES float row_maximum(const float* x, int64_t columns) {
  float maximum = -INFINITY;
#pragma omp simd reduction(max : maximum)
  for (int64_t i = 0; i < columns; i++) maximum = x[i] > maximum ? x[i] : maximum;
  return maximum;
}

MARSRL_CLONES double sum_of_exponentials(const float* x, int64_t columns, float maximum) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < columns; i++) sum += vector_exp(x[i] - maximum);
  return sum;
}

MARSRL_CLONES void exponentials(const float* x, int64_t columns, float maximum, float* out) {
#pragma omp simd
  for (int64_t i = 0; i < columns; i++) out[i] = vector_exp(x[i] - maximum);
}

int64_t end_of_block(int64_t block, int64_t columns) { return std::min((block + 1) * kBlock, columns); }

// Fills sums[b] with the sum of all blocks up to and including b.
void cumulative_sums(const float* x, int64_t columns, float maximum, double* sums) {
  double total = 0;
  for (int64_t block = 0; block < num_blocks(columns); block++) {
    const int64_t begin = block * kBlock;
    sums[block] = total += sum_of_exponentials(x + begin, end_of_block(block, columns) - begin, maximum);
  }
}

// Returns the first token at which the cumulative sum passes noise times the total; never a token of probability 0.
int64_t token_at(const float* x, int64_t columns, float maximum, const double* sums, double noise) {
  const int64_t last = num_blocks(columns) - 1;
  const double point = std::min(noise * sums[last], std::nextafter(sums[last], 0.0));  // the product may round to the sum
  const int64_t block = std::min<int64_t>(std::upper_bound(sums, sums + last + 1, point) - sums, last);
  const int64_t begin = block * kBlock, size = end_of_block(block, columns) - begin;
  float e[kBlock];
  exponentials(x + begin, size, maximum, e);
  double total = block ? sums[block - 1] : 0;
  int64_t token = begin;  // set to each token of positive probability until `total` passes `point`
  for (int64_t i = 0; i < size && !(total > point); i++) {
    total += e[i];
    if (e[i] > 0) token = begin + i;
  }
  return token;
}

}  // namespace

// Draws one token per row of logits x [rows, columns], which the caller has already divided by the temperature.
//   temperature [rows]: rows with 0 or less take the most likely token; null: every row draws at random
//   noise [rows]: random numbers in [0, 1)
//   tokens, logprobs [rows]: receive the drawn token and its log-prob in nats
MARSRL_API void marsrl_draw_tokens(const float* x, const float* temperature, const double* noise, int64_t rows,
                                   int64_t columns, int64_t* tokens, float* logprobs, int num_threads) {
#pragma omp parallel num_threads(usable_threads(rows, columns, num_threads))
  {
    std::vector<double> sums(num_blocks(columns));
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      const float* row = x + r * columns;
      const float maximum = row_maximum(row, columns);
      cumulative_sums(row, columns, maximum, sums.data());
      const bool is_greedy = temperature && temperature[r] <= 0;
      tokens[r] = is_greedy ? std::find(row, row + columns - 1, maximum) - row
                            : token_at(row, columns, maximum, sums.data(), noise[r]);
      logprobs[r] = static_cast<float>((row[tokens[r]] - maximum) - std::log(sums.back()));
    }
  }
}
