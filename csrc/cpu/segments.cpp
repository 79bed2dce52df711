// Sums over sets of samples and over sequences of tokens, in double and in order of index. They equal the sums of PyTorch's
// index_add, which the references use, to the bit. For this the file is compiled without FMA contraction.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "clones.h"

namespace {

struct Set {
  // count and total are of the compared values; squares: weighted sum of the rewards' squared distances from mean().
  double count = 0, total = 0, squares = 0;
  double lowest = std::numeric_limits<double>::infinity(), highest = -std::numeric_limits<double>::infinity();

  double mean() const { return total / std::max(count, 1.0); }
  double std(bool is_unbiased) const { return std::sqrt(squares / std::max(is_unbiased ? count - 1 : count, 1.0)); }
  bool is_single() const { return count < 2; }
  // True if all values are equal. Compares the extremes, because std need not be 0: the mean of eight times 0.1 is not exactly 0.1.
  bool is_flat() const { return !is_single() && lowest == highest; }
};

template <class Float>
std::vector<Set> sets_of(const Float* rewards, const Float* compared, const double* weights, const int64_t* set_of,
                         int64_t num_samples) {
  std::vector<Set> sets(num_samples);
  for (int64_t i = 0; i < num_samples; i++) {
    if (std::isnan(compared[i])) continue;
    sets[set_of[i]].count += 1;
    sets[set_of[i]].total += compared[i];
  }
  for (int64_t i = 0; i < num_samples; i++) {
    if (std::isnan(rewards[i])) continue;
    Set& set = sets[set_of[i]];
    const double reward = rewards[i], distance = reward - set.mean();
    set.squares += weights[i] * (distance * distance);
    set.lowest = std::min(set.lowest, reward);
    set.highest = std::max(set.highest, reward);
  }
  return sets;
}

template <class Float, class Integer>
void add_masked(const Float* values, const uint8_t* mask, const Integer* cu_seqlens, int64_t num_sequences,
                double* sums) {
  for (int64_t s = 0; s < num_sequences; s++) {
    double total = 0, count = 0;
    for (int64_t t = cu_seqlens[s]; t < cu_seqlens[s + 1]; t++)
      if (!mask || mask[t]) {
        total += static_cast<double>(values[t]);
        count += 1;
      }
    sums[s] = total;
    sums[num_sequences + s] = count;
  }
}

template <class Float>
void add_masked(const Float* values, const uint8_t* mask, const void* cu_seqlens, bool is_int64, int64_t num_sequences,
                double* sums) {
  if (is_int64)
    add_masked(values, mask, static_cast<const int64_t*>(cu_seqlens), num_sequences, sums);
  else
    add_masked(values, mask, static_cast<const int32_t*>(cu_seqlens), num_sequences, sums);
}

template <class Float>
void advantages(const Float* rewards, const Float* compared, const double* weights, const int64_t* mean_set_of,
                const int64_t* std_set_of, int64_t num_samples, bool is_unbiased, bool keeps_single, double eps,
                Float* advantage) {
  const std::vector<Set> mean_sets = sets_of(rewards, compared, weights, mean_set_of, num_samples);
  const std::vector<Set> other_sets = std_set_of == mean_set_of
                                          ? std::vector<Set>()
                                          : sets_of(rewards, compared, weights, std_set_of, num_samples);
  const std::vector<Set>& std_sets = std_set_of == mean_set_of ? mean_sets : other_sets;
  for (int64_t i = 0; i < num_samples; i++) {
    const Set &of_mean = mean_sets[mean_set_of[i]], &of_std = std_sets[std_set_of[i]];
    const bool is_single = of_mean.is_single() || of_std.is_single();
    if (std::isnan(rewards[i]) || of_mean.is_flat() || of_std.is_flat() || (is_single && !keeps_single)) {
      advantage[i] = 0.0;
      continue;
    }
    const double mean = of_mean.is_single() ? 0.0 : of_mean.mean();
    const double std = of_std.is_single() ? 1.0 : of_std.std(is_unbiased);
    advantage[i] = static_cast<Float>((static_cast<double>(rewards[i]) - mean) / (std + eps));
  }
}

template <class Integer>
void number_tokens(const Integer* cu_seqlens, int64_t num_sequences, int64_t* sequence_of) {
  for (int64_t s = 0; s < num_sequences; s++) std::fill(sequence_of + cu_seqlens[s], sequence_of + cu_seqlens[s + 1], s);
}

}  // namespace

// Computes advantage [S] = (reward - mean) / (std + eps) over each sample's mean set and std set, whose ids lie in [0, S). A mean
// is taken over the set's values in `compared` [S] that are not NaN, and a variance over the set's rewards, weighted by weights
// [S]. The advantage is 0 for a missing (NaN) reward, in a set whose rewards are all equal, and in a set with fewer than two
// compared values. With keeps_single, a set with fewer than two compared values has mean 0 and std 1 instead. Rewards, compared
// and advantage are float32, or float64 if is_float64.
MARSRL_API void marsrl_group_advantage(const void* rewards, const void* compared, const double* weights, int is_float64,
                                       const int64_t* mean_set_of, const int64_t* std_set_of, int64_t num_samples,
                                       int is_unbiased, int keeps_single, double eps, void* advantage) {
  if (is_float64)
    advantages(static_cast<const double*>(rewards), static_cast<const double*>(compared), weights, mean_set_of,
               std_set_of, num_samples, is_unbiased, keeps_single, eps, static_cast<double*>(advantage));
  else
    advantages(static_cast<const float*>(rewards), static_cast<const float*>(compared), weights, mean_set_of,
               std_set_of, num_samples, is_unbiased, keeps_single, eps, static_cast<float*>(advantage));
}

// Fills sequence_of [T] with the sequence of each token; cu_seqlens rises from 0 to T.
MARSRL_API void marsrl_sequence_of(const void* cu_seqlens, int is_int64, int64_t num_sequences, int64_t* sequence_of) {
  if (is_int64)
    number_tokens(static_cast<const int64_t*>(cu_seqlens), num_sequences, sequence_of);
  else
    number_tokens(static_cast<const int32_t*>(cu_seqlens), num_sequences, sequence_of);
}

// Fills sums [2, S] with the sum of each sequence's values and the number of its tokens. values [T] is float32, or float64 if
// is_float64, and is not read where mask [T] is 0. mask null: all tokens count. cu_seqlens [S + 1] is int32, or int64 if is_int64.
MARSRL_API void marsrl_sequence_sums(const void* values, int is_float64, const uint8_t* mask, const void* cu_seqlens,
                                     int is_int64, int64_t num_sequences, double* sums) {
  if (is_float64)
    add_masked(static_cast<const double*>(values), mask, cu_seqlens, is_int64, num_sequences, sums);
  else
    add_masked(static_cast<const float*>(values), mask, cu_seqlens, is_int64, num_sequences, sums);
}
