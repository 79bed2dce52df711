// The policy objective over a list of tokens: coefficients, and sums per agent.
#include <cstdint>

#include "policy_objective.h"

// token_ids [count]: which tokens; null: first_token, first_token + 1, ...
// Writes coefficient and entropy_coefficient of these tokens and adds to `sums`, in this order and in double: two runs
// give the same bits.
MARSRL_API void marsrl_policy_terms(const Objective* objective, const Tokens* tokens, const int64_t* token_ids,
                                    int64_t first_token, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    const int64_t t = token_ids ? token_ids[i] : first_token + i;
    const Term term = policy_term(*objective, *tokens, t);
    tokens->coefficient[t] = term.coefficient;
    tokens->entropy_coefficient[t] = term.entropy_coefficient;
    double* sums = tokens->sums + 6 * (tokens->agent ? tokens->agent[t] : 0);
    sums[0] += term.loss;
    sums[1] += term.is_clipped;
    sums[2] += term.is_masked;
    sums[3] += tokens->entropy[t];
    sums[4] += term.kl;
    sums[5] += 1.0;
  }
}
