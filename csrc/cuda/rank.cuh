// Which items of a long list are kept, and the place of each among these, in order: integers only, so any grid of blocks
// gives the same. Two kernels: every block counts its part, then adds up the counts before its own and ranks.
#pragma once
#include <cstdint>

#include "launch.cuh"
#include "reduce.cuh"

constexpr int kRankedItems = 1024;  // of a block

// How many int64 rank_items needs as scratch.
inline int64_t rank_blocks(int64_t items) { return items == 0 ? 1 : (items + kRankedItems - 1) / kRankedItems; }

template <class Items>
__global__ void __launch_bounds__(kRankedItems) count_kept(Items items, int64_t count, int64_t* counts) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRankedItems + threadIdx.x;
  const int kept = __syncthreads_count(i < count && items.is_kept(i));
  if (threadIdx.x == 0) counts[blockIdx.x] = kept;
}

template <class Items>
__global__ void __launch_bounds__(kRankedItems) place_kept(Items items, int64_t count, const int64_t* counts) {
  __shared__ int64_t scratch[kMaxWarps];
  __shared__ int warp_counts[kMaxWarps];
  int64_t before = 0;
  for (int64_t b = threadIdx.x; b < blockIdx.x; b += kRankedItems) before += counts[b];
  before = block_reduce<Sum>(before, scratch);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRankedItems + threadIdx.x;
  const bool is_kept = i < count && items.is_kept(i);
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const unsigned votes = __ballot_sync(0xffffffffu, is_kept);
  if (lane == 0) warp_counts[warp] = __popc(votes);
  __syncthreads();
  int64_t place = before + __popc(votes & ((1u << lane) - 1));
  for (int w = 0; w < warp; w++) place += warp_counts[w];
  if (i < count) items.put(i, is_kept ? place : -1);
  if (blockIdx.x + 1 == gridDim.x) items.finish(before + counts[blockIdx.x]);
}

// Items: is_kept(i); put(i, place), -1 where it is not kept; finish(number kept), called by the kRankedItems threads of
// one block.
template <class Items>
int rank_items(Items items, int64_t count, int64_t* scratch, void* stream) {
  const int64_t blocks = rank_blocks(count);
  const int error = launch(count_kept<Items>, blocks, dim3(kRankedItems), stream, items, count, scratch);
  if (error != cudaSuccess) return error;
  return launch(place_kept<Items>, blocks, dim3(kRankedItems), stream, items, count,
                static_cast<const int64_t*>(scratch));
}
