// Where a row of one layout lies in another: padded [S, L], packed [T] and kept rows.
#pragma once
#include <cstdint>

#include "clones.h"

// The sequence that packed token t belongs to: the last s with cu_seqlens[s] <= t, 0 <= t < cu_seqlens[S]. Empty
// sequences own no token.
MARSRL_INLINE int64_t sequence_of_token(const int64_t* cu_seqlens, int64_t num_sequences, int64_t t) {
  int64_t low = 0, high = num_sequences;  // cu_seqlens[low] <= t < cu_seqlens[high]
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (cu_seqlens[middle] <= t)
      low = middle;
    else
      high = middle;
  }
  return low;
}

// The padded row [s, l] as s * length + l that packed token t comes from; -1: none, t lies behind the last sequence.
MARSRL_INLINE int64_t padded_row_of_token(const int64_t* cu_seqlens, int64_t num_sequences, int64_t length, int64_t t) {
  if (num_sequences == 0 || t >= cu_seqlens[num_sequences]) return -1;
  const int64_t s = sequence_of_token(cu_seqlens, num_sequences, t);
  const int64_t l = t - cu_seqlens[s];
  return l < length ? s * length + l : -1;
}

// The packed token that padded row s * length + l holds; -1: none, the row is padding.
MARSRL_INLINE int64_t token_of_padded_row(const int64_t* cu_seqlens, int64_t num_tokens, int64_t length, int64_t row) {
  const int64_t s = row / length, token = cu_seqlens[s] + row % length;
  return token < cu_seqlens[s + 1] && token < num_tokens ? token : -1;
}
