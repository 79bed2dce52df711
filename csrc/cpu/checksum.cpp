// The sum over 8-byte words that the checksum of a tensor is made of; rollout/weights/checksum.py defines it.
#include <cstdint>
#include <cstring>

#include "clones.h"

namespace {

constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

// MurmurHash3's 64-bit finaliser: a bijection in which every bit of the result depends on every bit of the word.
MARSRL_INLINE uint64_t mix(uint64_t word) {
  word ^= word >> 33;
  word *= 0xFF51AFD7ED558CCD;
  word ^= word >> 33;
  word *= 0xC4CEB9FE1A85EC53;
  return word ^ (word >> 33);
}

MARSRL_CLONES uint64_t word_sum(const char* data, int64_t num_words, uint64_t first_word) {
  uint64_t sum = 0;
  const uint64_t first_key = (first_word + 1) * kGolden;
  for (int64_t i = 0; i < num_words; i++) {
    uint64_t word;
    std::memcpy(&word, data + 8 * i, 8);
    sum += mix(word ^ (first_key + static_cast<uint64_t>(i) * kGolden));
  }
  return sum;
}

}  // namespace

// Sum of mix(word_i xor key_i) mod 2^64 over num_words words at any address; word 0 is the first_word-th of its tensor,
// and key_i = (first_word + i + 1) * golden.
MARSRL_API uint64_t marsrl_word_sum(const char* data, int64_t num_words, uint64_t first_word) {
  return word_sum(data, num_words, first_word);
}
