// Conversions between float32 and bfloat16. A bfloat16 is a uint16_t with the upper 16 bits of a float32.
#pragma once
#include <cstdint>
#include <cstring>

#include "clones.h"

// Returns the nearest bfloat16, with ties to even.
MARSRL_INLINE uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7fc0 : rounded);
}

MARSRL_INLINE float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns a number of either dtype as float32.
MARSRL_INLINE float load(const float* x) { return *x; }
MARSRL_INLINE float load(const uint16_t* x) { return from_bfloat16(*x); }
MARSRL_INLINE void store(float* out, float x) { *out = x; }
MARSRL_INLINE void store(uint16_t* out, float x) { *out = to_bfloat16(x); }
