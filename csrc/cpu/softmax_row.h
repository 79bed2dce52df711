// What csrc/cpu does to one row of float32 logits, and what its loops over rows share.
#pragma once
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

struct Sums {
  float maximum;    // of the raw logits
  double sum;       // of e^d with d = (x - maximum) / tau
  double weighted;  // of d e^d
};

// Elements whose terms are summed in float32, the partial sums in double: the error does not grow with the vocabulary.
// Each block takes its terms relative to the largest logit so far, and stays in the L1 cache between its two walks: the
// row itself is read once.
constexpr int64_t kBlock = 512;

inline int64_t num_blocks(int64_t columns) { return (columns + kBlock - 1) / kBlock; }

void row_sums(const float* x, int64_t columns, float inverse_temperature, Sums* out);

// The same, and x becomes e^((x - origin) / tau), 0 where that is smaller than any normal number.
// origins [num_blocks(columns)]: receives the origin of each block, the largest logit up to its end.
void row_sums_in_place(float* x, int64_t columns, float inverse_temperature, Sums* out, float* origins);

// The same sums of at most a few blocks, and e^((x - maximum) / tau) in bfloat16; relative to 0 where all of x is -inf.
void row_sums_and_exponentials(const float* x, int64_t columns, float inverse_temperature, Sums* out,
                               uint16_t* exponentials);

// The gradient from those: p = exponentials * e^log_scale. The caller puts that of the target.
void gradient_of_exponentials(const uint16_t* exponentials, float* out, int64_t columns, double log_scale,
                              float inverse_temperature, float entropy, float c, float e);

// The gradient of logits, which may lie where they are; the caller puts that of the target.
void row_gradient(const float* x, float* out, int64_t columns, float maximum, float inverse_temperature, float log_sum,
                  float entropy, float c, float e);
void row_gradient_of_logprob(const float* x, float* out, int64_t columns, float maximum, float inverse_temperature,
                             float log_sum, float c);

// out = scale * e^((x - maximum) / tau) from what row_sums_in_place left in x and origins.
void scaled_row(const float* x, const float* origins, float* out, int64_t columns, float maximum,
                float inverse_temperature, double scale);

// Where the statistics of whole rows go, packed arrays [T].
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

// The first token with a target that is no column, whichever thread sees it.
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

// Padding has no gradient.
inline void zero_columns(float* row, int64_t begin, int64_t end) {
  if (end > begin) std::memset(row + begin, 0, (end - begin) * sizeof *row);
}

// Moves the rows of x [rows, stride] with a coefficient to the front and lists their tokens. Returns how many they are.
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

// Small vocabularies: a parallel region costs more than it saves below this many elements.
constexpr int64_t kParallelElements = 1 << 15;

inline int usable_threads(int64_t rows, int64_t columns, int num_threads) {
  return rows * columns < kParallelElements ? 1 : num_threads;
}
