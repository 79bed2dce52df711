// A float32 chunk of logits, one thread block a row: softmax statistics, then the gradient. The CUDA side of
// csrc/cpu/softmax_rows.cpp, with the same conventions; the arithmetic of an element is in softmax_terms.h.
//
// Both kernels are bound by memory. The statistics read a row once: a thread keeps the largest logit it has seen and
// the sums relative to it, and rebases them when a larger one comes. Sixteen terms are added in float32, all further
// sums are double: the error does not grow with the vocabulary. A row's result depends on its width only.
#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "clones.h"
#include "launch.cuh"
#include "rank.cuh"
#include "reduce.cuh"
#include "softmax_terms.h"

namespace {

constexpr int kMaxThreads = 512;
constexpr int kVectors = 4;  // 16-byte loads a thread has in flight: 512 threads keep 32 KiB under way
constexpr int kTerms = 4 * kVectors;

// A row whose threads have a few terms each gains nothing from more threads.
int threads_for(int64_t columns) {
  const int64_t wanted = (columns + kTerms - 1) / kTerms;
  const int64_t warps = (wanted + kWarp - 1) / kWarp;
  return static_cast<int>(warps < 1 ? kWarp : warps * kWarp < kMaxThreads ? warps * kWarp : kMaxThreads);
}

// How a row splits into single elements up to a 16-byte boundary, vectors of four, and the rest.
struct Split {
  int64_t head, vectors;
  __device__ Split(const float* x, int64_t columns) {
    const int64_t to_boundary = -static_cast<int64_t>(reinterpret_cast<uintptr_t>(x) / sizeof(float)) & 3;
    head = to_boundary < columns ? to_boundary : columns;
    vectors = (columns - head) / 4;
  }
  __device__ int64_t tail() const { return head + 4 * vectors; }
};

struct Sums {
  float maximum = -INFINITY;
  double sum = 0, weighted = 0;  // of e^d and d e^d with d = (x - maximum) / tau

  // Move to a larger maximum; what was added so far shrinks by e^shift.
  __device__ void rebase(float larger, float inverse_temperature) {
    if (maximum > -INFINITY) {
      const float shift = (maximum - larger) * inverse_temperature;
      const float scale = expf(shift);
      // Beyond -87 the scale is 0 in effect, and -inf * 0 would be NaN.
      weighted = shift < -87.0f ? 0.0 : (weighted + static_cast<double>(shift) * sum) * scale;
      sum *= scale;
    }
    maximum = larger;
  }

  template <int kCount>
  __device__ void add(const float (&x)[kCount], float inverse_temperature) {
    float largest = maximum;
#pragma unroll
    for (int k = 0; k < kCount; k++) largest = fmaxf(largest, x[k]);
    if (largest > maximum) rebase(largest, inverse_temperature);
    const float origin = maximum > -INFINITY ? maximum : 0.0f;  // nothing but -inf so far: e^-inf = 0 is added
    float s = 0, w = 0;
#pragma unroll
    for (int k = 0; k < kCount; k++) add_softmax_term(x[k], origin, inverse_temperature, s, w);
    sum += s;
    weighted += w;
  }
};

// The statistics of a row, in every thread of the block.
__device__ Sums row_sums(const float* __restrict__ x, int64_t columns, float inverse_temperature) {
  Sums sums;
  const Split split(x, columns);
  const float4* vectors = reinterpret_cast<const float4*>(x + split.head);
  for (int64_t first = threadIdx.x; first < split.vectors; first += kVectors * blockDim.x) {
    float values[kTerms];
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
      const int64_t i = first + k * static_cast<int64_t>(blockDim.x);
      const float4 v = i < split.vectors ? vectors[i] : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
      values[4 * k] = v.x, values[4 * k + 1] = v.y, values[4 * k + 2] = v.z, values[4 * k + 3] = v.w;
    }
    sums.add(values, inverse_temperature);
  }
  // Up to three elements before and three behind the vectors.
  float rest[2] = {-INFINITY, -INFINITY};
  if (threadIdx.x < split.head) rest[0] = x[threadIdx.x];
  if (split.tail() + threadIdx.x < columns) rest[1] = x[split.tail() + threadIdx.x];
  sums.add(rest, inverse_temperature);

  __shared__ float maxima[kMaxWarps];
  __shared__ double partial[kMaxWarps];
  const float maximum = block_reduce<Maximum>(sums.maximum, maxima);
  // -1e4 stands for a thread that saw no finite logit: its sums are 0, and 0 * -inf would be NaN.
  const double shift = fmax((static_cast<double>(sums.maximum) - maximum) * inverse_temperature, -1e4);
  const double scale = exp(shift);
  const double sum = block_reduce<Sum>(sums.sum * scale, partial);
  const double weighted = block_reduce<Sum>((sums.weighted + shift * sums.sum) * scale, partial);
  Sums result;
  result.maximum = maximum, result.sum = sum, result.weighted = weighted;
  return result;
}

__global__ void __launch_bounds__(kMaxThreads)
    row_logprobs(const float* x, int64_t stride, int64_t columns, const int64_t* tokens, int64_t first_token,
                 const int64_t* targets, const float* inverse_temperature, float inverse_temperature_of_all,
                 float* logprobs, float* entropy, float* maximum, float* log_sum) {
  const int64_t r = blockIdx.x;
  const int64_t token = tokens ? tokens[r] : first_token + r;
  const float tau_inverse = inverse_temperature ? inverse_temperature[token] : inverse_temperature_of_all;
  const float* row = x + r * stride;
  const Sums sums = row_sums(row, columns, tau_inverse);
  if (threadIdx.x != 0) return;
  const double log_of_sum = log(sums.sum);
  const int64_t target = targets[token];
  const bool is_bad = target < 0 || target >= columns;
  const float centred = is_bad ? NAN : (row[target] - sums.maximum) * tau_inverse;
  logprobs[token] = static_cast<float>(centred - log_of_sum);
  entropy[token] = static_cast<float>(log_of_sum - sums.weighted / sums.sum);
  maximum[token] = sums.maximum;
  log_sum[token] = static_cast<float>(log_of_sum);
}

__global__ void __launch_bounds__(kMaxThreads)
    row_partials(const float* x, int64_t stride, int64_t rows, int64_t columns, const int64_t* local_targets,
                 const float* inverse_temperature, double* partials) {
  const int64_t r = blockIdx.x;
  const float* row = x + r * stride;
  const Sums sums = row_sums(row, columns, inverse_temperature[r]);
  if (threadIdx.x != 0) return;
  const int64_t target = local_targets[r];
  partials[r] = sums.maximum;
  partials[rows + r] = sums.sum;
  partials[2 * rows + r] = sums.weighted;
  partials[3 * rows + r] = target >= 0 && target < columns ? row[target] : 0.0;
}

__device__ __forceinline__ void store(float* out, float4 v) { *reinterpret_cast<float4*>(out) = v; }

__device__ __forceinline__ void store(__nv_bfloat16* out, float4 v) {
  const __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
  *reinterpret_cast<uint2*>(out) = *reinterpret_cast<const uint2*>(pair);
}

__device__ __forceinline__ void store(float* out, float v) { *out = v; }

__device__ __forceinline__ void store(__nv_bfloat16* out, float v) { *out = __float2bfloat16_rn(v); }

// out[i] = gradient(x[i]) for a row; out may be x itself, since an element is read and written by one thread.
template <class Out, class Gradient>
__device__ void map_row(const float* x, Out* out, int64_t columns, Gradient gradient) {
  const Split split(x, columns);
  const bool is_aligned = reinterpret_cast<uintptr_t>(out + split.head) % (4 * sizeof(Out)) == 0;
  if (!is_aligned) {  // an odd vocabulary written to rows of another width: no vector store fits
    for (int64_t i = threadIdx.x; i < columns; i += blockDim.x) store(out + i, gradient(x[i]));
    return;
  }
  const float4* vectors = reinterpret_cast<const float4*>(x + split.head);
  for (int64_t first = threadIdx.x; first < split.vectors; first += kVectors * blockDim.x) {
    float4 v[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
      const int64_t i = first + k * static_cast<int64_t>(blockDim.x);
      if (i < split.vectors) v[k] = vectors[i];
    }
#pragma unroll
    for (int k = 0; k < kVectors; k++) {
      const int64_t i = first + k * static_cast<int64_t>(blockDim.x);
      if (i < split.vectors)
        store(out + split.head + 4 * i,
              make_float4(gradient(v[k].x), gradient(v[k].y), gradient(v[k].z), gradient(v[k].w)));
    }
  }
  if (threadIdx.x < split.head) store(out + threadIdx.x, gradient(x[threadIdx.x]));
  const int64_t last = split.tail() + threadIdx.x;
  if (last < columns) store(out + last, gradient(x[last]));
}

template <class Out>
__global__ void __launch_bounds__(kMaxThreads)
    row_gradients(const float* x, int64_t stride, int64_t columns, const int64_t* tokens, int64_t first_token,
                  const int64_t* targets, int64_t first_column, const float* inverse_temperature,
                  float inverse_temperature_of_all, const float* logprobs, const float* entropy, const float* maximum,
                  const float* log_sum, const float* coefficient, const float* entropy_coefficient,
                  const int64_t* slots, Out* out, int64_t out_stride, int64_t out_width) {
  const int64_t r = blockIdx.x;
  const int64_t slot = slots ? slots[r] : r;
  if (slot < 0) return;
  Out* row_out = out + slot * out_stride;
  const int64_t token = tokens ? tokens[r] : first_token + r;
  const float c = coefficient[token], e = entropy_coefficient[token];
  int64_t written = 0;  // a row without coefficient is all 0, whatever its logits are
  if (c != 0.0f || e != 0.0f) {
    const float tau_inverse = inverse_temperature ? inverse_temperature[token] : inverse_temperature_of_all;
    const float* row = x + r * stride;
    const float top = maximum[token], log_of_sum = log_sum[token], h = entropy[token];
    if (e == 0.0f) {
      const float scale = -c * tau_inverse;
      map_row(row, row_out, columns,
              [=](float v) { return softmax_gradient_of_logprob(v, top, tau_inverse, log_of_sum, scale); });
    } else {
      map_row(row, row_out, columns,
              [=](float v) { return softmax_gradient(v, top, tau_inverse, log_of_sum, h, c, e); });
    }
    __syncthreads();  // the target's column is written once more
    const int64_t target = targets[token] - first_column;
    if (threadIdx.x == 0 && target >= 0 && target < columns)
      store(row_out + target, softmax_target_gradient(logprobs[token], h, c, e, tau_inverse));
    written = columns;
  }
  for (int64_t i = written + threadIdx.x; i < out_width; i += blockDim.x) store(row_out + i, 0.0f);
}

// The rows of a chunk that have a gradient, for rank_items.
struct ActiveRows {
  const int64_t* tokens;
  int64_t first_token;
  const float* coefficient;
  const float* entropy_coefficient;
  int64_t* slots;
  int64_t* active;
  int64_t* num_active;
  __device__ int64_t token(int64_t r) const { return tokens ? tokens[r] : first_token + r; }
  __device__ bool is_kept(int64_t r) const {
    return coefficient[token(r)] != 0.0f || entropy_coefficient[token(r)] != 0.0f;
  }
  __device__ void put(int64_t r, int64_t place) const {
    slots[r] = place;
    if (place >= 0) active[place] = token(r);
  }
  __device__ void finish(int64_t kept) const {
    if (threadIdx.x == 0) *num_active = kept;
  }
};

}  // namespace

// Statistics of whole rows (no vocabulary parallelism).
//   tokens [rows]: where a row's inputs and outputs lie in the packed arrays; null: row r is token first_token + r
//   targets, logprobs, entropy, maximum, log_sum [T] are packed arrays; inverse_temperature [T], null: `..._of_all`
// A target outside [0, columns) gives a log-prob of NaN: the host checks the targets and says which.
MARSRL_API int marsrl_cuda_row_logprobs(const float* x, int64_t stride, int64_t rows, int64_t columns,
                                        const int64_t* tokens, int64_t first_token, const int64_t* targets,
                                        const float* inverse_temperature, float inverse_temperature_of_all,
                                        float* logprobs, float* entropy, float* maximum, float* log_sum,
                                        void* stream) {
  if (rows == 0) return cudaSuccess;
  return launch(row_logprobs, rows, dim3(threads_for(columns)), stream, x, stride, columns, tokens, first_token,
                targets, inverse_temperature, inverse_temperature_of_all, logprobs, entropy, maximum, log_sum);
}

// The part of one vocabulary shard: partials [4, rows] double = maximum, sum, weighted sum, target logit.
// local_targets [rows]: outside [0, columns) = another shard owns it, and its logit is 0 here.
MARSRL_API int marsrl_cuda_row_partials(const float* x, int64_t stride, int64_t rows, int64_t columns,
                                        const int64_t* local_targets, const float* inverse_temperature,
                                        double* partials, void* stream) {
  if (rows == 0) return cudaSuccess;
  return launch(row_partials, rows, dim3(threads_for(columns)), stream, x, stride, rows, columns, local_targets,
                inverse_temperature, partials);
}

// How many int64 marsrl_cuda_active_rows needs as scratch.
MARSRL_API int64_t marsrl_cuda_active_scratch(int64_t rows) { return rank_blocks(rows); }

// Which rows of a chunk have a coefficient: slots [rows] = the place among these, -1 where both coefficients [T] are 0;
// active: their tokens in order; num_active [1]: how many.
MARSRL_API int marsrl_cuda_active_rows(int64_t rows, const int64_t* tokens, int64_t first_token,
                                       const float* coefficient, const float* entropy_coefficient, int64_t* slots,
                                       int64_t* active, int64_t* num_active, int64_t* scratch, void* stream) {
  return rank_items(
      ActiveRows{tokens, first_token, coefficient, entropy_coefficient, slots, active, num_active}, rows, scratch,
      stream);
}

// The gradient of the rows of x, as float32 or bfloat16.
//   coefficient (c) and entropy_coefficient (e), logprobs, entropy, maximum, log_sum [T]: packed arrays
//   first_column: of this shard; targets are global
//   slots [rows]: the row of `out` that receives row r, -1: none; null: row r, and rows without coefficient become 0
//   out: rows of out_stride elements, of which columns .. out_width become 0 (vocabulary padding). It may be x itself
//        where it is float32 and slots is null; else they must not overlap
MARSRL_API int marsrl_cuda_row_gradients(const float* x, int64_t stride, int64_t rows, int64_t columns,
                                         const int64_t* tokens, int64_t first_token, const int64_t* targets,
                                         int64_t first_column, const float* inverse_temperature,
                                         float inverse_temperature_of_all, const float* logprobs, const float* entropy,
                                         const float* maximum, const float* log_sum, const float* coefficient,
                                         const float* entropy_coefficient, const int64_t* slots, void* out,
                                         int64_t out_stride, int64_t out_width, int out_is_bf16, void* stream) {
  if (rows == 0) return cudaSuccess;
  const auto launch_with = [&](auto* typed_out) {
    using Out = std::remove_pointer_t<decltype(typed_out)>;
    return launch(row_gradients<Out>, rows, dim3(threads_for(columns)), stream, x, stride, columns, tokens, first_token,
                  targets, first_column, inverse_temperature, inverse_temperature_of_all, logprobs, entropy, maximum,
                  log_sum, coefficient, entropy_coefficient, slots, typed_out, out_stride, out_width);
  };
  return out_is_bf16 ? launch_with(static_cast<__nv_bfloat16*>(out)) : launch_with(static_cast<float*>(out));
}
