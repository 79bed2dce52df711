// The policy objective over a list of tokens: coefficients, and sums per agent. The CUDA side of
// csrc/cpu/policy_rows.cpp; a token's arithmetic is policy_term of policy_objective.h.
#include <cstdint>

#include "clones.h"
#include "launch.cuh"
#include "policy_objective.h"
#include "reduce.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kSums = 6;

// A block evaluates kThreads tokens and writes its part of the sums: partials [blocks, num_agents, 6].
__global__ void __launch_bounds__(kThreads)
    policy_terms(Objective objective, Tokens tokens, const float* inverse_normaliser, const uint8_t* mask,
                 const int64_t* token_ids, int64_t first_token, int64_t count, int64_t num_agents, double* partials) {
  if (inverse_normaliser) objective.inverse_normaliser = *inverse_normaliser;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  double values[kSums] = {};
  int64_t agent = -1;
  const int64_t t = i >= count ? -1 : token_ids ? token_ids[i] : first_token + i;
  if (t >= 0 && (!mask || mask[t])) {
    const Term term = policy_term(objective, token_inputs(objective, tokens, t));
    tokens.coefficient[t] = term.coefficient;
    tokens.entropy_coefficient[t] = term.entropy_coefficient;
    agent = tokens.agent ? tokens.agent[t] : 0;
    values[0] = term.loss, values[1] = term.clipped, values[2] = term.masked;
    values[3] = tokens.entropy[t], values[4] = term.kl, values[5] = 1.0;
  }
  __shared__ double scratch[kMaxWarps];
  for (int64_t a = 0; a < num_agents; a++) {
    double* out = partials + (blockIdx.x * num_agents + a) * kSums;
    if (!__syncthreads_or(agent == a)) {
      if (threadIdx.x < kSums) out[threadIdx.x] = 0.0;
      continue;
    }
    for (int k = 0; k < kSums; k++) {
      const double sum = block_reduce<Sum>(agent == a ? values[k] : 0.0, scratch);
      if (threadIdx.x == 0) out[k] = sum;
    }
  }
}

// sums[j] += partials[0][j] + partials[1][j] + ..., in this order.
__global__ void __launch_bounds__(kThreads)
    add_partials(const double* partials, int64_t blocks, int64_t width, double* sums) {
  const int64_t j = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (j >= width) return;
  double sum = 0;
#pragma unroll 8
  for (int64_t b = 0; b < blocks; b++) sum += partials[b * width + j];
  sums[j] += sum;
}

int64_t num_blocks(int64_t count) { return (count + kThreads - 1) / kThreads; }

}  // namespace

// How many doubles marsrl_cuda_policy_terms needs as scratch.
MARSRL_API int64_t marsrl_cuda_policy_scratch(int64_t count, int64_t num_agents) {
  return num_blocks(count) * num_agents * kSums;
}

// objective and tokens lie in host memory, the arrays that tokens points to on the device.
//   inverse_normaliser [1] on the device, null: the one in objective
//   mask [T]: tokens outside are skipped, null: none is
//   token_ids [count]: which tokens; null: first_token, first_token + 1, ...
// Writes coefficient and entropy_coefficient of these tokens and adds to tokens->sums [num_agents, 6], in a fixed order
// and in double: two runs give the same bits.
MARSRL_API int marsrl_cuda_policy_terms(const Objective* objective, const Tokens* tokens,
                                        const float* inverse_normaliser, const uint8_t* mask,
                                        const int64_t* token_ids, int64_t first_token, int64_t count,
                                        int64_t num_agents, double* scratch, void* stream) {
  if (count == 0) return cudaSuccess;
  const int64_t blocks = num_blocks(count), width = num_agents * kSums;
  const int error = launch(policy_terms, blocks, dim3(kThreads), stream, *objective, *tokens, inverse_normaliser,
                           mask, token_ids, first_token, count, num_agents, scratch);
  if (error != cudaSuccess) return error;
  return launch(add_partials, num_blocks(width), dim3(kThreads), stream, static_cast<const double*>(scratch), blocks,
                width, tokens->sums);
}
