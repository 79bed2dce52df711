// One token of the policy objective: what it adds to the loss, and dL/dlogp, dL/dH. Mirrors kernels/head/objective.py.
#pragma once
#include <cmath>
#include <cstdint>

#include "clones.h"
#include "vector_exp.h"

enum Kind : int32_t { kClip = 0, kCispo = 1 };
enum Correction : int32_t { kNoCorrection = 0, kTis = 1, kIcepop = 2 };  // sequence_mask arrives as `dropped`
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

// Packed arrays, one element a token; null: not given.
struct Tokens {
  const float* advantage;
  const float* log_ratio;  // null: the ratio is 1 (pseudo on-policy); else it is formed by `old_logprobs` below
  const float* old_logprobs;
  const float* rollout_logprobs;
  const float* reference_logprobs;
  const uint8_t* gate;     // of the token's sample
  const uint8_t* dropped;  // the token loses every term
  const float* weight;     // factor on all terms, beside inverse_normaliser
  const int64_t* agent;    // null: all agent 0
  const float* logprobs;
  const float* entropy;
  float* coefficient;
  float* entropy_coefficient;
  double* sums;  // [num_agents, 6]: loss, clipped tokens, masked tokens, entropy, kl, tokens
};

// What the objective reads of one token; 0 where it is not given.
struct TokenInputs {
  float logprob, entropy, advantage;
  float log_ratio;      // of the policy to that before the update, or of their sequences
  float log_drift;      // of the policy before the update to the one that decoded; 0 without a correction
  float log_reference;  // of the policy to the reference; 0 without a KL term
  float gated, dropped;  // 0 or 1
  float weight;          // 1 where it is not given
};

MARSRL_INLINE TokenInputs token_inputs(const Objective& objective, const Tokens& tokens, int64_t t) {
  const float logprob = tokens.logprobs[t];
  TokenInputs inputs = {logprob, tokens.entropy[t], tokens.advantage[t], 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 1.0f};
  if (tokens.log_ratio)
    inputs.log_ratio = tokens.log_ratio[t];
  else if (tokens.old_logprobs)
    inputs.log_ratio = logprob - tokens.old_logprobs[t];
  if (objective.correction != kNoCorrection)
    inputs.log_drift = (tokens.old_logprobs ? tokens.old_logprobs[t] : logprob) - tokens.rollout_logprobs[t];
  if (objective.kl != kNoKl) inputs.log_reference = logprob - tokens.reference_logprobs[t];
  inputs.gated = tokens.gate && tokens.gate[t] ? 1.0f : 0.0f;
  inputs.dropped = tokens.dropped && tokens.dropped[t] ? 1.0f : 0.0f;
  if (tokens.weight) inputs.weight = tokens.weight[t];
  return inputs;
}

struct Term {
  double loss;
  float coefficient, entropy_coefficient, kl;
  float clipped, masked;  // 0 or 1
};

MARSRL_INLINE float objective_exp(float x) {
  const float e = vector_exp(x > kLargestExponent ? kLargestExponent : x);
  return x > kLargestExponent ? INFINITY : e;
}

MARSRL_INLINE float objective_expm1(float x) {
  const float e = vector_expm1(x > kLargestExponent ? kLargestExponent : x);
  return x > kLargestExponent ? INFINITY : e;
}

// yes where the option is on, bit by bit: GCC 12 vectorises no select whose condition is the same for a whole loop.
MARSRL_INLINE float pick(bool option, float yes, float no) {
  uint32_t y, n;
  std::memcpy(&y, &yes, sizeof y);
  std::memcpy(&n, &no, sizeof n);
  const uint32_t mask = -static_cast<uint32_t>(option), bits = (y & mask) | (n & ~mask);
  float picked;
  std::memcpy(&picked, &bits, sizeof picked);
  return picked;
}

// No branch on what differs from token to token, and every condition selects a float: so a loop over tokens vectorises.
MARSRL_INLINE Term policy_term(const Objective& objective, const TokenInputs& token) {
  const bool is_clip = objective.kind == kClip, has_k1 = objective.kl == kK1, has_k2 = objective.kl == kK2;
  const bool has_k3 = objective.kl == kK3;
  // k3 = e^-x + x - 1 through expm1: no cancellation near 0
  const float x = token.log_reference, m = objective_expm1(-x);
  const float kl = pick(has_k1, x, pick(has_k2, 0.5f * x * x, pick(has_k3, m + x, 0.0f)));
  const float kl_slope = pick(has_k1, 1.0f, pick(has_k2, x, pick(has_k3, -m, 0.0f)));

  const float drift = objective_exp(token.log_drift);
  const float truncated = drift < objective.correction_high ? drift : objective.correction_high;
  const float weight = pick(objective.correction == kTis, truncated, 1.0f);
  const float far =
      drift >= objective.correction_low ? (drift <= objective.correction_high ? token.dropped : 1.0f) : 1.0f;
  const float removed = pick(objective.correction == kIcepop, far, token.dropped);
  const float masked = objective_exp(token.logprob) >= objective.mpt_probability ? removed + token.gated : removed;

  // Where the ratio ends to count. CISPO bounds it on both sides, the clipped surrogate on the one that is gained from.
  const float advantage = token.advantage, ratio = objective_exp(token.log_ratio);
  const float low = 1.0f - objective.clip_low, high = 1.0f + objective.clip_high;
  const float dual = pick(objective.dual_clip > 0.0f, objective.dual_clip, INFINITY);
  const float upper = pick(is_clip, advantage > 0.0f ? high : advantage < 0.0f ? dual : INFINITY, high);
  const float lower = pick(is_clip, advantage < 0.0f ? low : -INFINITY, low);
  const float used = ratio > upper ? upper : ratio < lower ? lower : ratio;
  const float clipped = ratio > upper ? 1.0f : ratio < lower ? 1.0f : 0.0f;
  const float kept_used = masked > 0.0f ? 0.0f : used;
  const float of_cispo = kept_used * advantage, of_clip = clipped > 0.0f ? 0.0f : of_cispo;
  const float slope = pick(is_clip, of_clip, of_cispo);  // of the surrogate to logp
  const double surrogate =
      static_cast<double>(pick(is_clip, kept_used, of_cispo)) * pick(is_clip, advantage, token.logprob);

  const float scale = objective.inverse_normaliser * token.weight;
  const float kept_kl = masked > 0.0f ? 0.0f : kl, kept_kl_slope = masked > 0.0f ? 0.0f : kl_slope;
  const float kept_entropy = masked > 0.0f ? 0.0f : token.entropy;
  Term term;
  term.loss = (-weight * surrogate + objective.kl_coef * kept_kl - objective.entropy_coef * kept_entropy) * scale;
  term.coefficient = (-weight * slope + objective.kl_coef * kept_kl_slope) * scale;
  term.entropy_coefficient = masked > 0.0f ? 0.0f : -objective.entropy_coef * scale;
  term.kl = kl;
  term.clipped = masked > 0.0f ? 0.0f : clipped;
  term.masked = masked > 0.0f ? 1.0f : 0.0f;
  return term;
}
