// Arithmetic per logit, used by all passes over a row: its terms of the softmax statistics, and its gradient dz.
//
//   d = (x - maximum) / tau,   p = e^d / sum,   log p_y = d_y - log sum,   H = log sum - (sum of d e^d) / sum
//   dz_v = [c (1[v = y] - p_v) - e p_v (log p_v + H)] / tau,   c = dL/dlog p_y,  e = dL/dH
#pragma once
#include <cmath>

#include "vector_exp.h"

// Adds e^d to `sum` and d e^d to `weighted`. x = -inf adds nothing; NaN makes both NaN. Returns e^d, or 0 if that is below the
// smallest normal float32.
MARSRL_INLINE float add_softmax_term(float x, float maximum, float inverse_temperature, float& sum, float& weighted) {
  const float d = (x - maximum) * inverse_temperature;  // subtracting first gives exactly 0 at the maximum
  const float e = vector_exp(d);
  sum += e;
  weighted += (d < kSmallestExponent ? 0.0f : d) * e;  // 0 times -inf would be NaN
  return e;
}

// Returns dz of a column that is not the target; log_sum = log of the sum of e^d.
MARSRL_INLINE float softmax_gradient(float x, float maximum, float inverse_temperature, float log_sum, float entropy,
                                     float c, float e) {
  float logp = (x - maximum) * inverse_temperature - log_sum;
  logp = logp < -1e4f ? -1e4f : logp;  // where p = 0, 0 times -inf would be NaN
  return -vector_exp(logp) * (c + e * (logp + entropy)) * inverse_temperature;
}

// Like softmax_gradient, for e = 0 (most objectives have no entropy bonus) and with scale = -c / tau.
MARSRL_INLINE float softmax_gradient_of_logprob(float x, float maximum, float inverse_temperature, float log_sum,
                                                float scale) {
  return scale * vector_exp((x - maximum) * inverse_temperature - log_sum);
}

// Returns dz of the target. 1 - p is computed by expm1: in a trained model p is close to 1, and 1 - p would round to 0.
MARSRL_INLINE float softmax_target_gradient(float logp, float entropy, float c, float e, float inverse_temperature) {
  const float bounded = logp < -1e4f ? -1e4f : logp;  // where p = 0, 0 times -inf would be NaN
  return (-c * std::expm1(logp) - e * std::exp(logp) * (bounded + entropy)) * inverse_temperature;
}
