// Moves rows between the padded, packed and kept layouts on the CPU. A row is row_bytes bytes of any type.
//
// The rows of a sequence lie side by side in the padded and in the packed layout: one copy a sequence. All ids and
// boundaries were checked by the caller.
#include <cstdint>
#include <cstring>

#include "clones.h"

namespace {

// out[0 .. bytes) = the element, again and again: doubling what is there.
void fill(char* out, int64_t bytes, const void* element, int64_t element_bytes) {
  if (bytes == 0) return;
  std::memcpy(out, element, element_bytes);
  for (int64_t done = element_bytes; done < bytes; done *= 2)
    std::memcpy(out + done, out, done < bytes - done ? done : bytes - done);
}

// Rows of one word, as token ids and log-probs are, with a copy of constant size.
template <int kBytes>
void gather_words(const char* in, char* out, const int64_t* ids, int64_t count) {
  for (int64_t k = 0; k < count; k++) std::memcpy(out + k * kBytes, in + ids[k] * kBytes, kBytes);
}

template <int kBytes>
void scatter_words(const char* in, char* out, const int64_t* ids, int64_t count) {
  for (int64_t k = 0; k < count; k++) std::memcpy(out + ids[k] * kBytes, in + k * kBytes, kBytes);
}

}  // namespace

// packed [T] rows from padded [S, length] rows; cu_seqlens [S+1] rises from 0 to T.
MARSRL_API void marsrl_pack(const char* padded, char* packed, const int64_t* cu_seqlens, int64_t num_sequences,
                            int64_t length, int64_t row_bytes) {
  for (int64_t s = 0; s < num_sequences; s++)
    std::memcpy(packed + cu_seqlens[s] * row_bytes, padded + s * length * row_bytes,
                (cu_seqlens[s + 1] - cu_seqlens[s]) * row_bytes);
}

// padded [S, length] rows from packed [T] rows; what no token covers gets `element` of element_bytes, repeated.
MARSRL_API void marsrl_unpack(const char* packed, char* padded, const int64_t* cu_seqlens, int64_t num_sequences,
                              int64_t length, int64_t row_bytes, const void* element, int64_t element_bytes) {
  for (int64_t s = 0; s < num_sequences; s++) {
    char* row = padded + s * length * row_bytes;
    const int64_t used = (cu_seqlens[s + 1] - cu_seqlens[s]) * row_bytes;
    std::memcpy(row, packed + cu_seqlens[s] * row_bytes, used);
    fill(row + used, length * row_bytes - used, element, element_bytes);
  }
}

// ids [capacity] = the tokens whose mask is set, ascending. Returns how many are set; at most `capacity` are written.
MARSRL_API int64_t marsrl_kept_ids(const uint8_t* mask, int64_t num_tokens, int64_t* ids, int64_t capacity) {
  int64_t kept = 0;
  for (int64_t t = 0; t < num_tokens; t++)
    if (mask[t]) {
      if (kept < capacity) ids[kept] = t;
      kept++;
    }
  return kept;
}

// out [count] = in[ids]
MARSRL_API void marsrl_gather(const char* in, char* out, const int64_t* ids, int64_t count, int64_t row_bytes) {
  switch (row_bytes) {
    case 1: return gather_words<1>(in, out, ids, count);
    case 2: return gather_words<2>(in, out, ids, count);
    case 4: return gather_words<4>(in, out, ids, count);
    case 8: return gather_words<8>(in, out, ids, count);
    default:
      for (int64_t k = 0; k < count; k++) std::memcpy(out + k * row_bytes, in + ids[k] * row_bytes, row_bytes);
  }
}

// out[ids] = in [count], and `element` of element_bytes in the other rows of out [num_rows].
MARSRL_API void marsrl_scatter(const char* in, char* out, const int64_t* ids, int64_t num_rows, int64_t count,
                               int64_t row_bytes, const void* element, int64_t element_bytes) {
  fill(out, num_rows * row_bytes, element, element_bytes);
  switch (row_bytes) {
    case 1: return scatter_words<1>(in, out, ids, count);
    case 2: return scatter_words<2>(in, out, ids, count);
    case 4: return scatter_words<4>(in, out, ids, count);
    case 8: return scatter_words<8>(in, out, ids, count);
    default:
      for (int64_t k = 0; k < count; k++) std::memcpy(out + ids[k] * row_bytes, in + k * row_bytes, row_bytes);
  }
}
