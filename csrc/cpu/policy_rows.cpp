// The policy objective over a list of tokens: coefficients, and sums per agent.
#include <cstdint>

#include "policy_objective.h"

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
