// As much of CUDA as csrc/cuda uses, on the CPU: `g++ -x c++` then compiles the very same sources for tests.
//
// The threads of a block are coroutines of one host thread. They run one after the other up to a barrier, forwards and
// backwards in turn: what reads shared memory before a barrier made it complete gets an old value in one of the two.
// A barrier that not all threads reach aborts. Blocks run one after the other; `__shared__` is a static variable.
#pragma once
#include <math.h>
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(threads)

enum cudaError_t : int { cudaSuccess = 0 };
using cudaStream_t = void*;

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

namespace emulated {

constexpr size_t kStackBytes = 32 * 1024;

struct Thread {
  ucontext_t context;
  dim3 index;
  int number;
  bool is_done;
};
struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
};

inline std::vector<Thread> threads;
inline std::vector<char> stacks;
inline Thread* current;
inline ucontext_t scheduler;
inline std::function<void()> body;
inline Barrier of_block;
inline std::vector<Barrier> of_warps;
inline std::vector<uint64_t> exchanged;  // one word a thread
inline int64_t progress;
inline dim3 block_index, block_size, grid_size;

inline void wait(Barrier& barrier, int participants) {
  const unsigned generation = barrier.generation;
  progress++;
  if (++barrier.arrived == participants) {
    barrier.arrived = 0;
    barrier.generation++;
  }
  while (barrier.generation == generation) swapcontext(&current->context, &scheduler);
}

inline void wait_block() { wait(of_block, threads.size()); }
inline void wait_warp() { wait(of_warps[current->number / 32], 32); }

inline void enter() {
  body();
  current->is_done = true;
  progress++;
}

inline void run_block() {
  const int count = block_size.x * block_size.y * block_size.z;
  threads.resize(count);
  stacks.resize(count * kStackBytes);
  exchanged.assign(count, 0);
  of_block = Barrier();
  of_warps.assign((count + 31) / 32, Barrier());
  for (int i = 0; i < count; i++) {
    Thread& thread = threads[i];
    thread.index = dim3(i % block_size.x, i / block_size.x % block_size.y, i / (block_size.x * block_size.y));
    thread.number = i;
    thread.is_done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks.data() + i * kStackBytes;
    thread.context.uc_stack.ss_size = kStackBytes;
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, enter, 0);
  }
  for (bool forwards = true, is_running = true; is_running; forwards = !forwards) {
    const int64_t before = progress;
    is_running = false;
    for (int k = 0; k < count; k++) {
      Thread& thread = threads[forwards ? k : count - 1 - k];
      if (thread.is_done) continue;
      current = &thread;
      swapcontext(&scheduler, &thread.context);
      is_running = true;
    }
    if (is_running && progress == before) {
      std::fprintf(stderr, "emulated CUDA: some threads of a block wait at a barrier that the others never reach\n");
      std::abort();
    }
  }
}

template <class... Parameters, size_t... k>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<k...>) {
  kernel(*static_cast<Parameters*>(arguments[k])...);
}

}  // namespace emulated

#define threadIdx (emulated::current->index)
#define blockIdx (emulated::block_index)
#define blockDim (emulated::block_size)
#define gridDim (emulated::grid_size)

template <class... Parameters>
cudaError_t cudaLaunchKernel(void (*kernel)(Parameters...), dim3 grid, dim3 block, void** arguments, size_t,
                             cudaStream_t) {
  emulated::body = [=] { emulated::call(kernel, arguments, std::index_sequence_for<Parameters...>()); };
  emulated::grid_size = grid, emulated::block_size = block;
  for (unsigned b = 0; b < grid.x; b++) {
    emulated::block_index = dim3(b, 0, 0);
    emulated::run_block();
  }
  return cudaSuccess;
}

inline cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
inline const char* cudaGetErrorName(cudaError_t) { return "cudaSuccess"; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }

inline void __syncthreads() { emulated::wait_block(); }

inline int __syncthreads_count(int predicate) {
  emulated::exchanged[emulated::current->number] = predicate != 0;
  emulated::wait_block();
  int count = 0;
  for (const uint64_t word : emulated::exchanged) count += word != 0;
  emulated::wait_block();
  return count;
}

inline int __syncthreads_or(int predicate) { return __syncthreads_count(predicate) > 0; }

inline unsigned __ballot_sync(unsigned, int predicate) {
  const int first = emulated::current->number / 32 * 32;
  emulated::exchanged[emulated::current->number] = predicate != 0;
  emulated::wait_warp();
  unsigned votes = 0;
  for (int lane = 0; lane < 32; lane++) votes |= static_cast<unsigned>(emulated::exchanged[first + lane]) << lane;
  emulated::wait_warp();
  return votes;
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int offset) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "a register or two");
  std::memcpy(&emulated::exchanged[emulated::current->number], &value, sizeof value);
  emulated::wait_warp();
  std::memcpy(&value, &emulated::exchanged[emulated::current->number ^ offset], sizeof value);
  emulated::wait_warp();
  return value;
}
