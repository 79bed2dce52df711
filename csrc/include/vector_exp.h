// exp(x) as a polynomial that the compiler can vectorise.
#pragma once
#include <cstdint>
#include <cstring>

#include "clones.h"

// exp(x) in float32 for x <= 88, error below 2 ulp. Below -87 it returns exp(-87) = 1.6e-38, not 0: the smallest
// normal float32 is 1.2e-38, and a sum of 2^18 such terms is still below 1e-32.
// x = n ln 2 + r with |r| <= ln(2) / 2; exp(r) by the degree-6 minimax polynomial of the Cephes library (expf.c).
MARSRL_INLINE float vector_exp(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float n = __builtin_rintf(x * 1.44269504088896341f);
  float r = x - n * 0.693359375f;  // ln 2 in two parts: the first has trailing zeros, so that n times it is exact
  r = r + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;  // 2^n
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return p * scale;
}
