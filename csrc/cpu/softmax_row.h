// Operations on one row of float32 logits, and code that the loops over rows in csrc/cpu share.
#pragma once
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

struct Sums {
  float maximum;    // largest logit, before the temperature
  double sum;       // sum of e^d, with d = (x - maximum) / tau
  double weighted;  // sum of d e^d
};

// Elements per block. Terms of a block are summed in float32, and the sums of blocks are added in double, so the error does not
// grow with the vocabulary. Terms are relative to the largest logit so far, so a block takes two passes: one for its maximum, one
// for its terms. The block stays in the L1 cache between the passes, so each logit is read from memory once.
constexpr int64_t kBlock = 512;

inline int64_t num_blocks(int64_t columns) { return (columns + kBlock - 1) / kBlock; }

// Computes the sums over one row of logits.
void row_sums(const float* x, int64_t columns, float inverse_temperature, Sums* out);

// Like row_sums, but also replaces x by e^((x - origin) / tau), or by 0 where that is below the smallest normal float32. origins
// [num_blocks(columns)]: receives the origin of each block, the largest logit up to the block's end.
void row_sums_in_place(float* x, int64_t columns, float inverse_temperature, Sums* out, float* origins);

// Like row_sums, but also writes e^((x - maximum) / tau) in bfloat16. The maximum is that of the whole row, so the row is read
// twice: use this function only for rows of a few blocks. If all of x is -inf, exponentials are relative to 0.
void row_sums_and_exponentials(const float* x, int64_t columns, float inverse_temperature, Sums* out,
                               uint16_t* exponentials);

// Computes the gradient dz of a row from its exponentials, with p = exponentials * e^log_scale. The target's dz is left to the
// caller.
void gradient_of_exponentials(const uint16_t* exponentials, float* out, int64_t columns, double log_scale,
                              float inverse_temperature, float entropy, float c, float e);

// Computes the gradient dz of a row of logits; `out` may be `x`. The target's dz is left to the caller. row_gradient_of_logprob is
// the faster case e = 0.
void row_gradient(const float* x, float* out, int64_t columns, float maximum, float inverse_temperature, float log_sum,
                  float entropy, float c, float e);
void row_gradient_of_logprob(const float* x, float* out, int64_t columns, float maximum, float inverse_temperature,
                             float log_sum, float c);

// Computes out = scale * e^((logit - maximum) / tau). x and origins are outputs of row_sums_in_place: x no longer holds
// logits.
void scaled_row(const float* x, const float* origins, float* out, int64_t columns, float maximum,
                float inverse_temperature, double scale);

// Packed arrays [T] that receive the statistics of whole rows.
struct Statistics {
  float *logprobs, *entropy, *maximum, *log_sum;

  void put(int64_t token, const Sums& sums, float target_logit, float inverse_temperature) const {
    const double log_of_sum = std::log(sums.sum);
    const float centred = (target_logit - sums.maximum) * inverse_temperature;
    logprobs[token] = static_cast<float>(centred - log_of_sum);
    entropy[token] = static_cast<float>(log_of_sum - sums.weighted / sums.sum);
    maximum[token] = sums.maximum;
    log_sum[token] = static_cast<float>(log_of_sum);
  }
};

// Smallest index, over all threads, of a token whose target is outside [0, columns).
class BadTarget {
 public:
  void saw(int64_t token) {
    int64_t seen = first_.load();
    while (token < seen && !first_.compare_exchange_weak(seen, token)) {
    }
  }
  int64_t token_or_minus_1() const { return first_.load() == kNone ? -1 : first_.load(); }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> first_{kNone};
};

// Sets the padding columns [begin, end) of a row to 0.
inline void zero_columns(float* row, int64_t begin, int64_t end) {
  if (end > begin) std::memset(row + begin, 0, (end - begin) * sizeof *row);
}

// Moves the active rows of x [rows, stride], those with a nonzero coefficient, to the front, and lists their tokens in `active`.
// Returns the number of active rows.
inline int64_t move_active_rows(float* x, int64_t stride, int64_t rows, const int64_t* tokens, int64_t first_token,
                                const float* coefficient, const float* entropy_coefficient, int64_t* active) {
  int64_t kept = 0;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = tokens ? tokens[r] : first_token + r;
    if (coefficient[token] == 0.0f && (!entropy_coefficient || entropy_coefficient[token] == 0.0f)) continue;
    if (kept != r) std::memcpy(x + kept * stride, x + r * stride, stride * sizeof *x);
    active[kept++] = token;
  }
  return kept;
}

// Below this many elements a parallel region costs more than it saves.
constexpr int64_t kParallelElements = 1 << 15;

inline int usable_threads(int64_t rows, int64_t columns, int num_threads) {
  return rows * columns < kParallelElements ? 1 : num_threads;
}
