// Attention with one query per sequence over a padded cache: softmax(scale q k^T) v over the first lengths[s] keys.
//
// Each key head is read once, block by block, for all query heads that share it, with a running maximum and sum. Entries after a
// sequence's end are never read. Sequences and key heads are independent, so results do not depend on the number of threads.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "abi.h"
#include "bfloat16.h"
#include "clones.h"
#include "vector_exp.h"

namespace {

constexpr int64_t kBlock = 64;  // number of keys after which the running maximum is updated

enum Element : int32_t { kFloat32 = 0, kBfloat16 = 1 };

MARSRL_CLONES void widen_rows(const uint16_t* __restrict__ rows, int64_t stride, int64_t count, int64_t size,
                              float* __restrict__ out) {
  for (int64_t j = 0; j < count; j++) {
    const uint16_t* row = rows + j * stride;
#pragma omp simd
    for (int64_t d = 0; d < size; d++) out[j * size + d] = from_bfloat16(row[d]);
  }
}

// Adds one block of keys to the running sums of every query head: q, output [group, size], maximum and total [group].
MARSRL_CLONES void add_block(const float* __restrict__ q, const float* __restrict__ k, int64_t stride_k,
                             const float* __restrict__ v, int64_t stride_v, int64_t count, int64_t group, int64_t size,
                             float scale, float* __restrict__ maximum, float* __restrict__ total,
                             float* __restrict__ output) {
  for (int64_t g = 0; g < group; g++) {
    const float* query = q + g * size;
    float scores[kBlock];
    float risen = maximum[g];
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
      const float *a = k + j * stride_k, *b = a + stride_k, *c = b + stride_k, *e = c + stride_k;
      float sa = 0, sb = 0, sc = 0, se = 0;
#pragma omp simd reduction(+ : sa, sb, sc, se)
      for (int64_t d = 0; d < size; d++) {
        sa += query[d] * a[d];
        sb += query[d] * b[d];
        sc += query[d] * c[d];
        se += query[d] * e[d];
      }
      scores[j] = sa, scores[j + 1] = sb, scores[j + 2] = sc, scores[j + 3] = se;
    }
    for (; j < count; j++) {
      const float* key = k + j * stride_k;
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t d = 0; d < size; d++) sum += query[d] * key[d];
      scores[j] = sum;
    }
#pragma omp simd reduction(max : risen)
    for (j = 0; j < count; j++) {
      scores[j] *= scale;
      risen = scores[j] > risen ? scores[j] : risen;
    }
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (j = 0; j < count; j++) {
      scores[j] = vector_exp(scores[j] - risen);
      sum += scores[j];
    }
    const float shrink = vector_exp(maximum[g] - risen);
    float* sums = output + g * size;
#pragma omp simd
    for (int64_t d = 0; d < size; d++) sums[d] *= shrink;
    for (j = 0; j + 4 <= count; j += 4) {
      const float *a = v + j * stride_v, *b = a + stride_v, *c = b + stride_v, *e = c + stride_v;
      const float pa = scores[j], pb = scores[j + 1], pc = scores[j + 2], pe = scores[j + 3];
#pragma omp simd
      for (int64_t d = 0; d < size; d++) sums[d] += (pa * a[d] + pb * b[d]) + (pc * c[d] + pe * e[d]);
    }
    for (; j < count; j++) {
      const float* row = v + j * stride_v;
#pragma omp simd
      for (int64_t d = 0; d < size; d++) sums[d] += scores[j] * row[d];
    }
    total[g] = total[g] * shrink + sum;
    maximum[g] = risen;
  }
}

}  // namespace

// Computes the attention output, out [S, N, size], contiguous.
//   q [S, N, size]; k, v [S, L, N_kv, size]; lengths [S]: number of keys of each sequence
//   strides_q, strides_k, strides_v: strides of all dimensions but the last, in elements; the last dimension is dense
//   element: dtype of q, k, v and out (enum Element)
MARSRL_API void marsrl_attention_decode(const void* q, const void* k, const void* v, void* out, const int64_t* lengths,
                                        int64_t num_sequences, int64_t num_heads, int64_t num_key_heads, int64_t size,
                                        const int64_t* strides_q, const int64_t* strides_k, const int64_t* strides_v,
                                        float scale, int32_t element, int num_threads) {
  const int64_t group = num_heads / num_key_heads;
  const bool is_wide = element == kFloat32;
#pragma omp parallel for num_threads(num_threads) schedule(dynamic)
  for (int64_t task = 0; task < num_sequences * num_key_heads; task++) {
    const int64_t s = task / num_key_heads, h = task % num_key_heads;
    std::vector<float> memory(2 * group * size + 2 * group + (is_wide ? 0 : 2 * kBlock * size));
    float* queries = memory.data();
    float* output = queries + group * size;
    float* maximum = output + group * size;
    float* total = maximum + group;
    float* wide_k = total + group;
    float* wide_v = wide_k + kBlock * size;
    const int64_t at_q = s * strides_q[0] + h * group * strides_q[1];
    if (is_wide) {
      for (int64_t g = 0; g < group; g++)
        std::memcpy(queries + g * size, static_cast<const float*>(q) + at_q + g * strides_q[1], size * sizeof(float));
    } else {
      widen_rows(static_cast<const uint16_t*>(q) + at_q, strides_q[1], group, size, queries);
    }
    for (int64_t g = 0; g < group; g++) maximum[g] = -INFINITY;
    for (int64_t begin = 0; begin < lengths[s]; begin += kBlock) {
      const int64_t count = lengths[s] - begin < kBlock ? lengths[s] - begin : kBlock;
      const int64_t at_k = s * strides_k[0] + begin * strides_k[1] + h * strides_k[2];
      const int64_t at_v = s * strides_v[0] + begin * strides_v[1] + h * strides_v[2];
      if (is_wide) {
        add_block(queries, static_cast<const float*>(k) + at_k, strides_k[1], static_cast<const float*>(v) + at_v,
                  strides_v[1], count, group, size, scale, maximum, total, output);
      } else {
        widen_rows(static_cast<const uint16_t*>(k) + at_k, strides_k[1], count, size, wide_k);
        widen_rows(static_cast<const uint16_t*>(v) + at_v, strides_v[1], count, size, wide_v);
        add_block(queries, wide_k, size, wide_v, size, count, group, size, scale, maximum, total, output);
      }
    }
    for (int64_t g = 0; g < group; g++) {
      const int64_t at = ((s * num_key_heads + h) * group + g) * size;
      for (int64_t d = 0; d < size; d++) {
        const float value = output[g * size + d] / total[g];
        if (is_wide)
          static_cast<float*>(out)[at + d] = value;
        else
          static_cast<uint16_t*>(out)[at + d] = to_bfloat16(value);
      }
    }
  }
}
