// Sum over 8-byte words for the checksum of a tensor; rollout/weights/checksum.py defines the checksum.
#include <cstdint>
#include <cstring>

#include "clones.h"

namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

// MurmurHash3's 64-bit finaliser, a bijection: every bit of the result depends on every bit of the word.
MARSRL_INLINE uint64_t mix(uint64_t word) {
  word ^= word >> 33;
  word *= 0xFF51AFD7ED558CCD;
  word ^= word >> 33;
  word *= 0xC4CEB9FE1A85EC53;
  return word ^ (word >> 33);
}

MARSRL_CLONES uint64_t word_sum(const char* data, int64_t runs, int64_t words, uint64_t first, uint64_t stride) {
  uint64_t sum = 0;
  for (int64_t run = 0; run < runs; run++, data += 8 * words) {
    const uint64_t first_key = (first + static_cast<uint64_t>(run) * stride + 1) * kGolden;
    for (int64_t i = 0; i < words; i++) {
      uint64_t word;
      std::memcpy(&word, data + 8 * i, 8);
      sum += mix(word ^ (first_key + static_cast<uint64_t>(i) * kGolden));
    }
  }
  return sum;
}

}  // namespace

// Returns the sum of mix(word_i xor key_i) mod 2^64, with key_i = (i + 1) * golden, over some words of a tensor. data has `runs`
// runs of `words` words, one after the other, with any alignment. Run r has the tensor's words from first + r * stride on.
MARSRL_API uint64_t marsrl_word_sum(const char* data, int64_t runs, int64_t words, uint64_t first, uint64_t stride) {
  return word_sum(data, runs, words, first, stride);
}
