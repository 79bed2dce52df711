// exp(x), exp(x) - 1 and log(x) by polynomials that the compiler can vectorise.
#pragma once
#include <cstdint>
#include <cstring>

#include "clones.h"

constexpr float kSmallestExponent = -87.0f;  // e^-87 = 1.6e-38, the smallest normal float32 is 1.2e-38
constexpr float kLargestExponent = 88.0f;    // e^88 = 1.7e38, the largest float32 is 3.4e38

// Parts of exp(x) = (1 + slope * r) * scale, with scale = 2^n.
struct ExpParts {
  float r, slope, scale;
};

// Splits x into n ln 2 + r with |r| <= ln(2) / 2. exp(r) is approximated by a minimax polynomial of degree 6, which is exactly 1
// at 0 and has a relative error of 2e-9. A higher degree would slow down passes over a row of logits, which are compute-bound.
MARSRL_INLINE ExpParts exp_parts(float x) {
  const float kShift = 12582912.0f;  // 1.5 x 2^23: adding it rounds x / ln 2 to an integer, in the lowest bits
  const float shifted = x * 1.44269504088896341f + kShift;
  const float n = shifted - kShift;
  float r = x - n * 0.693359375f;  // ln 2 in two parts: the first has trailing zeros, so that n times it is exact
  r = r + n * 2.12194440e-4f;
  float p = 1.384365372e-3f;
  p = p * r + 8.374155499e-3f;
  p = p * r + 4.166800156e-2f;
  p = p * r + 1.666643023e-1f;
  p = p * r + 4.999999404e-1f;
  p = p * r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return {r, p, scale};
}

// Returns exp(x) in float32 for x <= 88, with an error below 1 ulp with fused multiply-adds; 0 below kSmallestExponent; NaN for
// NaN.
MARSRL_INLINE float vector_exp(float x) {
  const ExpParts e = exp_parts(x);
  return x < kSmallestExponent ? 0.0f : (e.slope * e.r + 1.0f) * e.scale;
}

// Returns exp(x) - 1 for x <= 88, without cancellation near 0 and with an error below 2 ulp; -1 below kSmallestExponent; NaN for
// NaN.
MARSRL_INLINE float vector_expm1(float x) {
  const ExpParts e = exp_parts(x);
  return x < kSmallestExponent ? -1.0f : e.slope * e.r * e.scale + (e.scale - 1.0f);
}

// Returns log(x) for positive normal x, with an absolute error below 2e-6 near 1 and below 1e-5 elsewhere. This suffices for inputs
// that were rounded to bfloat16, which changes their log by up to 4e-3. For 0 the result is finite and below -87; for NaN it is
// NaN.
// Method: x = 2^n (1 + r) with 1 + r in [sqrt(1/2), sqrt(2)), and log(1 + r) is r times a polynomial in r.
MARSRL_INLINE float vector_log(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const int32_t n = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;  // 0x3f3504f3: sqrt(1/2)
  bits -= static_cast<uint32_t>(n) << 23;
  float m;
  std::memcpy(&m, &bits, sizeof m);
  const float r = m - 1.0f;
  float p = -1.4319805e-1f;
  p = p * r + 2.2330058e-1f;
  p = p * r - 2.5472471e-1f;
  p = p * r + 3.3225874e-1f;
  p = p * r - 4.9985051e-1f;
  p = p * r + 1.00001278f;
  const float log_of_x = n * 0.693147181f + p * r;
  return x != x ? x : log_of_x;
}
