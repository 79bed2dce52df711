// Moves rows between the padded, packed and kept layouts. A row is row_bytes bytes of any type: bits are copied, so
// that a NaN keeps its payload. Every output row is written by one line of threads, in words as wide as it allows.
#include <cstdint>
#include <type_traits>

#include "clones.h"
#include "launch.cuh"
#include "rank.cuh"
#include "row_layout.h"

namespace {

constexpr int kThreads = 256;

struct alignas(16) Fill {  // one element, repeated
  unsigned char bytes[16];
};

// Which input row becomes output row r; -1: none, the output row is filled.
struct FromPadded {
  const int64_t* cu_seqlens;
  int64_t num_sequences, length;
  __device__ int64_t operator()(int64_t r) const {
    return padded_row_of_token(cu_seqlens, num_sequences, length, r);
  }
};
struct FromPacked {
  const int64_t* cu_seqlens;
  int64_t num_tokens, length;
  __device__ int64_t operator()(int64_t r) const { return token_of_padded_row(cu_seqlens, num_tokens, length, r); }
};
struct FromIds {
  const int64_t* ids;
  int64_t num_rows;
  __device__ int64_t operator()(int64_t r) const { return ids[r] < num_rows ? ids[r] : -1; }
};

// blockDim = (words of a row side by side, rows)
template <class Word, class Source>
__global__ void __launch_bounds__(kThreads)
    gather_rows(const Word* in, Word* out, int64_t rows, int64_t words, Source source_of,
                Fill fill) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (r >= rows) return;
  const int64_t source = source_of(r);
  const Word nothing = *reinterpret_cast<const Word*>(fill.bytes);
  for (int64_t w = threadIdx.x; w < words; w += blockDim.x)
    out[r * words + w] = source < 0 ? nothing : in[source * words + w];
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    scatter_rows(const Word* in, Word* out, int64_t rows, int64_t num_out, int64_t words,
                 const int64_t* ids) {
  const int64_t r = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (r >= rows) return;
  const int64_t target = ids[r];
  if (target < 0 || target >= num_out) return;
  for (int64_t w = threadIdx.x; w < words; w += blockDim.x) out[target * words + w] = in[r * words + w];
}

// run(in, out, words of a row) with the widest word that divides a row and to which both arrays are aligned.
template <class Run>
int with_words(const void* in, void* out, int64_t row_bytes, Run run) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(in) | reinterpret_cast<uintptr_t>(out) | row_bytes;
  const auto as = [&](auto word) {
    using Word = decltype(word);
    return run(static_cast<const Word*>(in), static_cast<Word*>(out), static_cast<int64_t>(row_bytes / sizeof(Word)));
  };
  if (bits % 16 == 0) return as(uint4());
  if (bits % 8 == 0) return as(uint2());
  if (bits % 4 == 0) return as(uint32_t());
  if (bits % 2 == 0) return as(uint16_t());
  return as(uint8_t());
}

dim3 block_for(int64_t words) {
  unsigned side = 1;
  while (side < kThreads && side < words) side *= 2;
  return dim3(side, kThreads / side);
}

template <class Source>
int launch_gather(const void* in, void* out, int64_t rows, int64_t row_bytes, Source source_of, const void* element,
                  int64_t element_bytes, void* stream) {
  if (rows == 0 || row_bytes == 0) return cudaSuccess;
  Fill fill;
  for (int64_t k = 0; k < 16; k++) fill.bytes[k] = static_cast<const unsigned char*>(element)[k % element_bytes];
  return with_words(in, out, row_bytes, [&](auto* in_words, auto* out_words, int64_t words) {
    using Word = std::remove_pointer_t<decltype(out_words)>;
    const dim3 block = block_for(words);
    return launch(gather_rows<Word, Source>, (rows + block.y - 1) / block.y, block, stream, in_words, out_words, rows,
                  words, source_of, fill);
  });
}

// The tokens of a mask, for rank_items.
struct MaskedTokens {
  const uint8_t* mask;
  int64_t* ids;
  int64_t capacity;
  __device__ bool is_kept(int64_t t) const { return mask[t]; }
  __device__ void put(int64_t t, int64_t place) const {
    if (place >= 0 && place < capacity) ids[place] = t;
  }
  __device__ void finish(int64_t kept) const {
    for (int64_t k = kept + threadIdx.x; k < capacity; k += kRankedItems) ids[k] = -1;
  }
};

}  // namespace

// packed [T] rows from padded [S, length] rows; cu_seqlens [S+1] int64. A token that no sequence covers is filled with
// `element` of element_bytes, which lies in host memory.
MARSRL_API int marsrl_cuda_pack(const void* padded, void* packed, const int64_t* cu_seqlens, int64_t num_sequences,
                                int64_t length, int64_t num_tokens, int64_t row_bytes, const void* element,
                                int64_t element_bytes, void* stream) {
  return launch_gather(padded, packed, num_tokens, row_bytes, FromPadded{cu_seqlens, num_sequences, length}, element,
                       element_bytes, stream);
}

// padded [S, length] rows from packed [T] rows; what no token covers is filled.
MARSRL_API int marsrl_cuda_unpack(const void* packed, void* padded, const int64_t* cu_seqlens, int64_t num_sequences,
                                  int64_t length, int64_t num_tokens, int64_t row_bytes, const void* element,
                                  int64_t element_bytes, void* stream) {
  return launch_gather(packed, padded, num_sequences * length, row_bytes, FromPacked{cu_seqlens, num_tokens, length},
                       element, element_bytes, stream);
}

// out [count] = in[ids] for rows in [num_rows]; an id outside [0, num_rows) gives a filled row.
MARSRL_API int marsrl_cuda_gather(const void* in, void* out, const int64_t* ids, int64_t num_rows, int64_t count,
                                  int64_t row_bytes, const void* element, int64_t element_bytes, void* stream) {
  return launch_gather(in, out, count, row_bytes, FromIds{ids, num_rows}, element, element_bytes, stream);
}

// out[ids] = in [count] for rows of out [num_rows]; an id outside is skipped. No id may come twice.
MARSRL_API int marsrl_cuda_scatter(const void* in, void* out, const int64_t* ids, int64_t num_rows, int64_t count,
                                   int64_t row_bytes, void* stream) {
  if (count == 0 || row_bytes == 0) return cudaSuccess;
  return with_words(in, out, row_bytes, [&](auto* in_words, auto* out_words, int64_t words) {
    using Word = std::remove_pointer_t<decltype(out_words)>;
    const dim3 block = block_for(words);
    return launch(scatter_rows<Word>, (count + block.y - 1) / block.y, block, stream, in_words, out_words, count,
                  num_rows, words, ids);
  });
}

// How many int64 marsrl_cuda_kept_ids needs as scratch.
MARSRL_API int64_t marsrl_cuda_kept_scratch(int64_t num_tokens) { return rank_blocks(num_tokens); }

// ids [capacity] = the tokens whose mask is set, ascending, then -1; those beyond the capacity are left out.
MARSRL_API int marsrl_cuda_kept_ids(const uint8_t* mask, int64_t num_tokens, int64_t* ids, int64_t capacity,
                                    int64_t* scratch, void* stream) {
  if (capacity == 0) return cudaSuccess;
  return rank_items(MaskedTokens{mask, ids, capacity}, num_tokens, scratch, stream);
}
