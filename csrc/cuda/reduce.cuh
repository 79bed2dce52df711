// Reductions over a thread block in a fixed order: the same values give the same bits, in every thread and every run.
#pragma once
#include <cuda_runtime.h>

constexpr int kWarp = 32;
constexpr int kMaxWarps = 1024 / kWarp;

struct Sum {
  template <class T>
  __device__ static T identity() {
    return T(0);
  }
  template <class T>
  __device__ static T combine(T a, T b) {
    return a + b;
  }
};

struct Maximum {  // of floats; NaN is left out
  template <class T>
  __device__ static T identity() {
    return -INFINITY;
  }
  template <class T>
  __device__ static T combine(T a, T b) {
    return fmaxf(a, b);
  }
};

template <class Op, class T>
__device__ __forceinline__ T warp_reduce(T value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value = Op::template combine<T>(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// The result in every thread. blockDim.x is a multiple of 32 and the block has one dimension; `scratch` [kMaxWarps] is
// shared memory that consecutive calls may share.
template <class Op, class T>
__device__ __forceinline__ T block_reduce(T value, T* scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, num_warps = blockDim.x / kWarp;
  value = warp_reduce<Op>(value);
  __syncthreads();  // an earlier call may still be reading
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  value = lane < num_warps ? scratch[lane] : Op::template identity<T>();
  return warp_reduce<Op>(value);
}
