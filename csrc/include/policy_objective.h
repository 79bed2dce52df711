// One token of the policy objective: what it adds to the loss, and dL/dlogp, dL/dH. Mirrors kernels/objective.py.
#pragma once
#include <cmath>
#include <cstdint>

#include "clones.h"

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
  const uint8_t* dropped;  // the token loses every term (sequence_mask)
  const int64_t* agent;    // null: all agent 0
  const float* logprobs;
  const float* entropy;
  float* coefficient;
  float* entropy_coefficient;
  double* sums;  // [num_agents, 6]: loss, clipped tokens, masked tokens, entropy, kl, tokens
};

struct Term {
  double loss;
  float coefficient, entropy_coefficient, kl;
  bool is_clipped, is_masked;
};

MARSRL_INLINE Term policy_term(const Objective& objective, const Tokens& tokens, int64_t t) {
  Term term = {0.0, 0.0f, 0.0f, 0.0f, false, false};
  const float logp = tokens.logprobs[t], entropy = tokens.entropy[t];

  float kl_slope = 0.0f;
  if (objective.kl != kNoKl) {
    const float x = logp - tokens.reference_logprobs[t];
    if (objective.kl == kK1) {
      term.kl = x;
      kl_slope = 1.0f;
    } else if (objective.kl == kK2) {
      term.kl = 0.5f * x * x;
      kl_slope = x;
    } else {  // e^-x + x - 1 through expm1: no cancellation near 0
      const float m = std::expm1(-x);
      term.kl = m + x;
      kl_slope = -m;
    }
  }

  float weight = 1.0f;
  bool is_masked = tokens.dropped && tokens.dropped[t];
  is_masked |= tokens.gate && tokens.gate[t] && std::exp(logp) >= objective.mpt_probability;
  if (objective.correction != kNoCorrection) {
    const float trainer = tokens.old_logprobs ? tokens.old_logprobs[t] : logp;
    const float drift = std::exp(trainer - tokens.rollout_logprobs[t]);
    if (objective.correction == kTis)
      weight = drift < objective.correction_high ? drift : objective.correction_high;
    else
      is_masked |= !(drift >= objective.correction_low && drift <= objective.correction_high);
  }
  term.is_masked = is_masked;
  if (is_masked) return term;

  const float advantage = tokens.advantage[t];
  float ratio = 1.0f;
  if (tokens.log_ratio)
    ratio = std::exp(tokens.log_ratio[t]);
  else if (tokens.old_logprobs)
    ratio = std::exp(logp - tokens.old_logprobs[t]);
  const float low = 1.0f - objective.clip_low, high = 1.0f + objective.clip_high;
  const float clipped_ratio = ratio < low ? low : (ratio > high ? high : ratio);
  double surrogate;
  float slope;  // of the surrogate to logp
  if (objective.kind == kCispo) {
    term.is_clipped = ratio < low || ratio > high;
    slope = clipped_ratio * advantage;
    surrogate = static_cast<double>(slope) * logp;
  } else {
    term.is_clipped = (advantage > 0.0f && ratio > high) || (advantage < 0.0f && ratio < low);
    surrogate = static_cast<double>(term.is_clipped ? clipped_ratio : ratio) * advantage;
    if (objective.dual_clip > 0.0f && advantage < 0.0f && ratio > objective.dual_clip) {
      term.is_clipped = true;
      surrogate = static_cast<double>(objective.dual_clip) * advantage;
    }
    slope = term.is_clipped ? 0.0f : ratio * advantage;
  }
  const float scale = objective.inverse_normaliser;
  term.loss = (-weight * surrogate + objective.kl_coef * term.kl - objective.entropy_coef * entropy) * scale;
  term.coefficient = (-weight * slope + objective.kl_coef * kl_slope) * scale;
  term.entropy_coefficient = -objective.entropy_coef * scale;
  return term;
}
