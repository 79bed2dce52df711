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

// The largest of `columns` logits; -inf for none, a NaN is passed over.
float row_maximum(const float* x, int64_t columns);

void row_sums(const float* x, int64_t columns, float maximum, float inverse_temperature, Sums* out);

// The same, and x becomes e^d: 0 where e^d is smaller than any normal number.
void row_sums_in_place(float* x, int64_t columns, float maximum, float inverse_temperature, Sums* out);

// The gradient of logits; the caller puts that of the target. `out` is x, or memory that x has no part of.
void row_gradient(const float* x, float* out, int64_t columns, float maximum, float inverse_temperature, float log_sum,
                  float entropy, float c, float e);
void row_gradient_of_logprob(float* x, int64_t columns, float maximum, float inverse_temperature, float log_sum,
                             float c);

// out = scale * x, with `out` as above.
void scaled_row(const float* x, float* out, int64_t columns, float scale);

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

// Moves the rows of x [rows, stride] with a coefficient to the front and lists their tokens. Returns how many they are.
inline int64_t move_active_rows(float* x, int64_t stride, int64_t rows, const int64_t* tokens, int64_t first_token,
                                const float* coefficient, const float* entropy_coefficient, int64_t* active) {
  int64_t kept = 0;
  for (int64_t r = 0; r < rows; r++) {
    const int64_t token = tokens ? tokens[r] : first_token + r;
    if (coefficient[token] == 0.0f && (!entropy_coefficient || entropy_coefficient[token] == 0.0f)) continue;
    if (kept != r) std::memcpy(x + kept * stride, x + r * stride, stride * sizeof(float));
    active[kept++] = token;
  }
  return kept;
}

// Small vocabularies: a parallel region costs more than it saves below this many elements.
constexpr int64_t kParallelElements = 1 << 15;

inline int usable_threads(int64_t rows, int64_t columns, int num_threads) {
  return rows * columns < kParallelElements ? 1 : num_threads;
}
