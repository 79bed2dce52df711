// The policy objective over a list of tokens: coefficients, and sums per agent; alone, or between the statistics of a
// row of logits and its gradient.
#include <cstdint>
#include <vector>

#include "policy_objective.h"
#include "softmax_row.h"
#include "softmax_terms.h"

// token_ids [count]: which tokens; null: first_token, first_token + 1, ...
// Writes coefficient and entropy_coefficient of these tokens and adds to `sums`, in this order and in double: two runs
// give the same bits.
MARSRL_API void marsrl_policy_terms(const Objective* objective, const Tokens* tokens, const int64_t* token_ids,
                                    int64_t first_token, int64_t count) {
  double run[6] = {};  // of neighbouring tokens with one agent: registers, where `sums` would be memory
  int64_t agent = 0;
  const auto flush = [&] {
    for (int k = 0; k < 6; k++) tokens->sums[6 * agent + k] += run[k], run[k] = 0;
  };
  for (int64_t i = 0; i < count; i++) {
    const int64_t t = token_ids ? token_ids[i] : first_token + i;
    const Term term = policy_term(*objective, *tokens, t);
    tokens->coefficient[t] = term.coefficient;
    tokens->entropy_coefficient[t] = term.entropy_coefficient;
    if (tokens->agent && tokens->agent[t] != agent) {
      flush();
      agent = tokens->agent[t];
    }
    run[0] += term.loss;
    run[1] += term.is_clipped;
    run[2] += term.is_masked;
    run[3] += tokens->entropy[t];
    run[4] += term.kl;
    run[5] += 1.0;
  }
  flush();
}

// Statistics of whole rows, marsrl_policy_terms and the gradient in one walk: a row is in the L2 cache when it is read
// again, and where no entropy bonus asks for the logits e^d is computed once. Arguments as in marsrl_row_logprobs and
// marsrl_row_gradients; `objective` may ask for nothing of whole sequences. objective, tokens: as in
// marsrl_policy_terms, with `logprobs` and `entropy` the arrays that are written here.
// Returns how many rows were kept, or -1 - the first token whose target is outside [0, columns).
MARSRL_API int64_t marsrl_policy_rows(float* x, int64_t stride, int64_t rows, int64_t columns, const int64_t* token_ids,
                                      int64_t first_token, const int64_t* targets, const float* inverse_temperature,
                                      float inverse_temperature_of_all, float* logprobs, float* entropy,
                                      float* maximum, float* log_sum, const Objective* objective, const Tokens* tokens,
                                      int64_t* active, int num_threads) {
  const Statistics statistics = {logprobs, entropy, maximum, log_sum};
  const bool has_bonus = objective->entropy_coef != 0.0f;
  const int threads = usable_threads(rows, columns, num_threads);
  int64_t kept = 0;  // of one thread, which writes a gradient to its place at once; several move the rows afterwards
  BadTarget bad;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> origins(has_bonus ? 0 : num_blocks(columns));
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
      const int64_t token = token_ids ? token_ids[r] : first_token + r, target = targets[token];
      if (target < 0 || target >= columns) {
        bad.saw(token);
        continue;
      }
      const float tau_inverse = inverse_temperature ? inverse_temperature[token] : inverse_temperature_of_all;
      float* row = x + r * stride;
      const float target_logit = row[target];
      Sums sums;
      if (has_bonus)
        row_sums(row, columns, tau_inverse, &sums);
      else
        row_sums_in_place(row, columns, tau_inverse, &sums, origins.data());
      statistics.put(token, sums, target_logit, tau_inverse);
      const Term term = policy_term(*objective, *tokens, token);
      const float c = tokens->coefficient[token] = term.coefficient;
      const float e = tokens->entropy_coefficient[token] = term.entropy_coefficient;
      if (c == 0.0f && e == 0.0f) continue;
      float* gradient = row;
      if (threads == 1) {
        gradient = x + kept * stride;
        active[kept++] = token;
      }
      if (has_bonus)
        row_gradient(row, gradient, columns, sums.maximum, tau_inverse, log_sum[token], entropy[token], c, e);
      else
        scaled_row(row, origins.data(), gradient, columns, sums.maximum, tau_inverse, -c * tau_inverse / sums.sum);
      gradient[target] = softmax_target_gradient(logprobs[token], entropy[token], c, e, tau_inverse);
      zero_columns(gradient, columns, stride);
    }
  }
  if (bad.token_or_minus_1() >= 0) return -1 - bad.token_or_minus_1();
  if (threads > 1)
    kept = move_active_rows(x, stride, rows, token_ids, first_token, tokens->coefficient,
                            tokens->entropy_coefficient, active);
  marsrl_policy_terms(objective, tokens, token_ids, first_token, rows);  // the sums, in the order of the tokens
  return kept;
}
