// Policy objective of one token: its term of the loss, dL/dlogp and dL/dH. kernels/head/objective.py defines the objective.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "clones.h"
#include "vector_exp.h"

enum Kind : int32_t { kClip = 0, kCispo = 1 };
enum Correction : int32_t { kNoCorrection = 0, kTis = 1, kIcepop = 2 };  // sequence_mask is kIcepop with a mean log_drift
enum Kl : int32_t { kNoKl = 0, kK1 = 1, kK2 = 2, kK3 = 3 };

struct Objective {
  float clip_low, clip_high;
  float dual_clip;  // 0: none
  float correction_low, correction_high;
  float kl_coef, entropy_coef;
  float mpt_probability;  // above 1: off
  float inverse_normaliser;
  int32_t kind, correction, kl;
};

// Packed arrays with one element per token; null: not given.
struct Tokens {
  const float* advantage;
  const float* log_ratio;  // mean over the token's sequence; null: logprobs - old_logprobs, or 0 if old_logprobs is null too
  const float* log_drift;  // mean over the token's sequence; null: computed from the token's rollout_logprobs
  const float* old_logprobs;
  const float* rollout_logprobs;  // null: the KL term's importance uses old_logprobs, or is 1 if they are null too
  const float* reference_logprobs;
  const uint8_t* gate;     // gate of the token's sample
  const uint8_t* dropped;  // 1: the token adds nothing to the loss
  const float* weight;     // factor on the token's loss, in addition to inverse_normaliser; null: 1
  const int64_t* agent;    // null: all tokens belong to agent 0
  const float* logprobs;
  const float* entropy;
  float* coefficient;
  float* entropy_coefficient;
  double* sums;  // [num_agents, kNumSums]: loss, clipped, masked and clamped tokens, entropy, kl, tokens
};

constexpr int kNumSums = 7;

// Inputs of the objective for one token; 0 if not given.
struct TokenInputs {
  float logprob, entropy, advantage;
  float log_ratio;       // log-ratio of policy to old policy, of the token or its sequence
  float log_drift;       // log-ratio of old policy to rollout policy; 0 without a correction
  float log_reference;   // log-ratio of policy to reference policy; 0 without a KL term
  float log_importance;  // log-ratio of policy to rollout policy; 0 without a KL term
  float gated, dropped;  // 0 or 1
  float weight;          // 1 if not given
};

MARSRL_INLINE TokenInputs token_inputs(const Objective& objective, const Tokens& tokens, int64_t t) {
  const float logprob = tokens.logprobs[t];
  TokenInputs inputs = {logprob, tokens.entropy[t], tokens.advantage[t], 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 1.0f};
  if (tokens.log_ratio)
    inputs.log_ratio = tokens.log_ratio[t];
  else if (tokens.old_logprobs)
    inputs.log_ratio = logprob - tokens.old_logprobs[t];
  if (tokens.log_drift)
    inputs.log_drift = tokens.log_drift[t];
  else if (objective.correction != kNoCorrection)
    inputs.log_drift = (tokens.old_logprobs ? tokens.old_logprobs[t] : logprob) - tokens.rollout_logprobs[t];
  if (objective.kl != kNoKl) {
    inputs.log_reference = logprob - tokens.reference_logprobs[t];
    const float* decoder = tokens.rollout_logprobs ? tokens.rollout_logprobs : tokens.old_logprobs;
    if (decoder) inputs.log_importance = logprob - decoder[t];
  }
  inputs.gated = tokens.gate && tokens.gate[t] ? 1.0f : 0.0f;
  inputs.dropped = tokens.dropped && tokens.dropped[t] ? 1.0f : 0.0f;
  if (tokens.weight) inputs.weight = tokens.weight[t];
  return inputs;
}

struct Term {
  double loss;
  float coefficient, entropy_coefficient, kl;
  float clipped, masked, clamped;  // 0 or 1
};

constexpr float kLogRatioBound = 20.0f;  // LOG_RATIO_BOUND of kernels/head/objective.py

MARSRL_INLINE float clamped_log_ratio(float x) {
  return x > kLogRatioBound ? kLogRatioBound : x < -kLogRatioBound ? -kLogRatioBound : x;
}

// Returns `yes` if `option` is true, else `no`. Uses bit operations, because GCC 12 does not vectorise a select with a
// loop-invariant condition.
MARSRL_INLINE float pick(bool option, float yes, float no) {
  uint32_t y, n;
  std::memcpy(&y, &yes, sizeof y);
  std::memcpy(&n, &no, sizeof n);
  const uint32_t mask = -static_cast<uint32_t>(option), bits = (y & mask) | (n & ~mask);
  float picked;
  std::memcpy(&picked, &bits, sizeof picked);
  return picked;
}

// Returns the term of one token. Loops over tokens must vectorise, so every condition on a token's values selects a float instead
// of branching. Values of masked tokens are replaced before any arithmetic, because NaN times 0 is NaN.
MARSRL_INLINE Term policy_term(const Objective& objective, const TokenInputs& token) {
  const bool is_clip = objective.kind == kClip, has_k1 = objective.kl == kK1, has_k2 = objective.kl == kK2;
  const bool has_k3 = objective.kl == kK3, has_bonus = objective.entropy_coef != 0.0f;
  const bool is_tis = objective.correction == kTis;
  const float ratio_size = std::fabs(token.log_ratio), drift_size = std::fabs(token.log_drift);
  const float importance_size = std::fabs(token.log_importance);
  const float x = token.log_reference, k3_size = pick(has_k3, std::fabs(x), 0.0f);

  // A drift or log-prob that is not finite masks nothing, and makes the loss NaN below.
  const float drift = vector_exp(clamped_log_ratio(token.log_drift));
  const float out_of_band = drift < objective.correction_low ? 1.0f : drift > objective.correction_high ? 1.0f : 0.0f;
  const float far = drift_size < INFINITY ? pick(objective.correction == kIcepop, out_of_band, 0.0f) : 0.0f;
  const float probability = vector_exp(token.logprob > 0.0f ? 0.0f : token.logprob);
  const float sure = probability >= objective.mpt_probability ? token.gated : 0.0f;
  const float mastered = std::fabs(token.logprob) < INFINITY ? sure : 0.0f;
  const float masked = token.dropped + far + mastered > 0.0f ? 1.0f : 0.0f;
  const auto kept = [masked](float value) { return masked > 0.0f ? 0.0f : value; };

  const float logprob = kept(token.logprob), advantage = kept(token.advantage);
  const float entropy = pick(has_bonus, kept(token.entropy), 0.0f);
  const float truncated = drift > objective.correction_high ? objective.correction_high : drift;
  const float weight = kept(pick(is_tis, truncated, 1.0f));

  // k3 = e^-x + x - 1 is computed by expm1: no cancellation near 0. k1, k2 and k3 have the same slope, importance * x: the
  // score-function gradient of the divergence.
  const float of_k3 = clamped_log_ratio(x), m = vector_expm1(-of_k3);
  const float raw = vector_exp(clamped_log_ratio(token.log_importance));
  const float importance = pick(is_tis, raw > objective.correction_high ? objective.correction_high : raw, raw);
  const float kl = importance * pick(has_k1, x, pick(has_k2, 0.5f * x * x, pick(has_k3, m + of_k3, 0.0f)));

  // CISPO clips the ratio at both bounds. PPO's clipped surrogate (kClip) clips it only at `high` if the advantage is positive, and
  // only at `low` if it is negative; dual_clip adds an upper bound in the second case. A clipped surrogate has gradient 0.
  const float ratio = vector_exp(clamped_log_ratio(kept(token.log_ratio)));
  const float low = 1.0f - objective.clip_low, high = 1.0f + objective.clip_high;
  const float dual = pick(objective.dual_clip > 0.0f, objective.dual_clip, INFINITY);
  const float upper = pick(is_clip, advantage > 0.0f ? high : advantage < 0.0f ? dual : INFINITY, high);
  const float lower = pick(is_clip, advantage < 0.0f ? low : -INFINITY, low);
  const float used = ratio > upper ? upper : ratio < lower ? lower : ratio;
  const float clipped = ratio > upper ? 1.0f : ratio < lower ? 1.0f : 0.0f;
  const float of_cispo = used * advantage;
  const float of_clip = clipped > 0.0f ? 0.0f : ratio_size > kLogRatioBound ? 0.0f : of_cispo;
  const float slope = pick(is_clip, of_clip, of_cispo);  // d surrogate / d logp
  const double surrogate =
      static_cast<double>(pick(is_clip, used, of_cispo)) * pick(is_clip, advantage, logprob);

  const float read = token.logprob + token.log_ratio + token.log_drift + x + token.log_importance + token.advantage +
                     token.weight + entropy;
  const float scale = kept(std::fabs(read) < INFINITY ? objective.inverse_normaliser * token.weight : NAN);
  const float of_policy = ratio_size > drift_size ? ratio_size : drift_size;
  const float of_kl = importance_size > k3_size ? importance_size : k3_size;
  Term term;
  term.loss = (-weight * surrogate + objective.kl_coef * kept(kl) - objective.entropy_coef * entropy) * scale;
  term.coefficient = (-weight * slope + objective.kl_coef * kept(importance * x)) * scale;
  term.entropy_coefficient = pick(has_bonus, -objective.entropy_coef * scale, 0.0f);
  term.kl = kl;
  term.clipped = clipped;
  term.masked = masked;
  term.clamped = kept((of_policy > of_kl ? of_policy : of_kl) > kLogRatioBound ? 1.0f : 0.0f);
  return term;
}
