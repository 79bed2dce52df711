// Sums over the tokens of a packed sequence, one thread block a sequence, in double and in a fixed order.
#include <cstdint>

#include "clones.h"
#include "launch.cuh"
#include "reduce.cuh"

namespace {

constexpr int kThreads = 256;

template <class Float>
__global__ void __launch_bounds__(kThreads)
    sequence_sums(const Float* values, const uint8_t* mask, const int64_t* cu_seqlens, int64_t num_sequences,
                  double* sums) {
  const int64_t s = blockIdx.x;
  double total = 0, count = 0;
  for (int64_t t = cu_seqlens[s] + threadIdx.x; t < cu_seqlens[s + 1]; t += kThreads)
    if (!mask || mask[t]) {
      total += static_cast<double>(values[t]);
      count += 1;
    }
  __shared__ double scratch[kMaxWarps];
  total = block_reduce<Sum>(total, scratch);
  count = block_reduce<Sum>(count, scratch);
  if (threadIdx.x != 0) return;
  sums[s] = total;
  sums[num_sequences + s] = count;
}

}  // namespace

// sums [2, S] = the values of a sequence's tokens added up, and how many these are. values [T] is float32, or float64
// where is_float64; it is not read where mask [T] is 0, null: all are read.
MARSRL_API int marsrl_cuda_sequence_sums(const void* values, int is_float64, const uint8_t* mask,
                                         const int64_t* cu_seqlens, int64_t num_sequences, double* sums,
                                         void* stream) {
  if (num_sequences == 0) return cudaSuccess;
  if (is_float64)
    return launch(sequence_sums<double>, num_sequences, dim3(kThreads), stream, static_cast<const double*>(values),
                  mask, cu_seqlens, num_sequences, sums);
  return launch(sequence_sums<float>, num_sequences, dim3(kThreads), stream, static_cast<const float*>(values), mask,
                cu_seqlens, num_sequences, sums);
}
