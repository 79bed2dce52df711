// Policy objective over a list of tokens: coefficients, and sums per agent. marsrl_policy_terms computes only these;
// marsrl_policy_rows also computes statistics and gradients of rows of logits, in the same pass.
#include <cstdint>
#include <vector>

#include "policy_objective.h"
#include "softmax_row.h"
#include "softmax_terms.h"

namespace {

// Tokens that are evaluated together: inputs and results of policy_term, with one array per field.
struct Block {
  static constexpr int kTokens = 256;
  int64_t ids[kTokens];
  float logprob[kTokens], entropy[kTokens], advantage[kTokens];
  float log_ratio[kTokens], log_drift[kTokens], log_reference[kTokens], log_importance[kTokens];
  float gated[kTokens], dropped[kTokens], weight[kTokens];
  double loss[kTokens];
  float coefficient[kTokens], entropy_coefficient[kTokens], kl[kTokens];
  float clipped[kTokens], masked[kTokens], clamped[kTokens];

  void put(int i, int64_t id, const TokenInputs& of) {
    ids[i] = id;
    logprob[i] = of.logprob, entropy[i] = of.entropy, advantage[i] = of.advantage;
    log_ratio[i] = of.log_ratio, log_drift[i] = of.log_drift, log_reference[i] = of.log_reference;
    log_importance[i] = of.log_importance;
    gated[i] = of.gated, dropped[i] = of.dropped, weight[i] = of.weight;
  }
};

MARSRL_CLONES void evaluate(const Objective& given, Block& block, int count) {
  const Objective objective = given;  // a copy, so that the compiler knows that no write below changes it
#pragma omp simd
  for (int i = 0; i < count; i++) {
    const Term term = policy_term(
        objective, {block.logprob[i], block.entropy[i], block.advantage[i], block.log_ratio[i], block.log_drift[i],
                    block.log_reference[i], block.log_importance[i], block.gated[i], block.dropped[i],
                    block.weight[i]});
    block.loss[i] = term.loss;
    block.coefficient[i] = term.coefficient;
    block.entropy_coefficient[i] = term.entropy_coefficient;
    block.kl[i] = term.kl;
    block.clipped[i] = term.clipped;
    block.masked[i] = term.masked;
    block.clamped[i] = term.clamped;
  }
}

// Sums over consecutive tokens of one agent. They stay in registers until the agent changes, and are then added to tokens.sums.
class AgentSums {
 public:
  explicit AgentSums(const Tokens& tokens) : tokens_(tokens) {}
  ~AgentSums() { flush(); }

  void add(const Block& block, int count) {
    for (int i = 0; i < count; i++) {
      const int64_t agent = tokens_.agent ? tokens_.agent[block.ids[i]] : 0;
      if (agent != agent_) flush();
      agent_ = agent;
      run_[0] += block.loss[i];
      run_[1] += block.clipped[i];
      run_[2] += block.masked[i];
      run_[3] += block.clamped[i];
      run_[4] += block.entropy[i];
      run_[5] += block.kl[i];
      run_[6] += 1.0;
    }
  }

 private:
  void flush() {
    for (int k = 0; k < kNumSums; k++) tokens_.sums[kNumSums * agent_ + k] += run_[k], run_[k] = 0;
  }

  const Tokens& tokens_;
  int64_t agent_ = 0;
  double run_[kNumSums] = {};
};

}  // namespace

// Evaluates the objective: writes coefficient and entropy_coefficient of each token, and adds the token's terms to tokens->sums.
// The sums are double and in the order of the tokens, so that every run gives the same bits.
//   token_ids [count]: the tokens to evaluate; null: `count` tokens from first_token on
//   mask [T]: tokens where it is 0 are skipped; null: none are
MARSRL_API void marsrl_policy_terms(const Objective* objective, const Tokens* tokens, const uint8_t* mask,
                                    const int64_t* token_ids, int64_t first_token, int64_t count) {
  Block block;
  AgentSums sums(*tokens);
  int filled = 0;
  const auto finish = [&] {
    evaluate(*objective, block, filled);
    for (int i = 0; i < filled; i++) {
      tokens->coefficient[block.ids[i]] = block.coefficient[i];
      tokens->entropy_coefficient[block.ids[i]] = block.entropy_coefficient[i];
    }
    sums.add(block, filled);
    filled = 0;
  };
  for (int64_t i = 0; i < count; i++) {
    const int64_t t = token_ids ? token_ids[i] : first_token + i;
    if (mask && !mask[t]) continue;
    block.put(filled++, t, token_inputs(*objective, *tokens, t));
    if (filled == Block::kTokens) finish();
  }
  finish();
}

// Computes statistics, objective and gradient of whole rows in one pass, so that a row is in the L2 cache when it is read again.
// Without an entropy bonus, the row's exponentials are kept and scaled; the gradient of a bonus needs the logits. Arguments are as
// in marsrl_row_logprobs, marsrl_row_gradients and marsrl_policy_terms. tokens->logprobs and tokens->entropy must be the arrays
// `logprobs` and `entropy`, which are written here. The objective must not need whole sequences. Returns the number of active rows,
// or -1 - t, where t is the first token whose target is outside [0, columns).
MARSRL_API int64_t marsrl_policy_rows(float* x, int64_t stride, int64_t rows, int64_t columns, const int64_t* token_ids,
                                      int64_t first_token, const int64_t* targets, const float* inverse_temperature,
                                      float inverse_temperature_of_all, float* logprobs, float* entropy,
                                      float* maximum, float* log_sum, const Objective* objective, const Tokens* tokens,
                                      int64_t* active, int num_threads) {
  const Statistics statistics = {logprobs, entropy, maximum, log_sum};
  const bool has_bonus = objective->entropy_coef != 0.0f;
  const int threads = usable_threads(rows, columns, num_threads);
  int64_t kept = 0;  // active rows at the front so far; used by a single thread (with more, move_active_rows follows the loop)
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
      const Term term = policy_term(*objective, token_inputs(*objective, *tokens, token));
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
  marsrl_policy_terms(objective, tokens, nullptr, token_ids, first_token, rows);  // adds sums in the order of the tokens
  return kept;
}
