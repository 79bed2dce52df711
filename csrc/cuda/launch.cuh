// How a kernel is launched: arguments are converted to the kernel's parameter types, and a failure is returned.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

// Runs kernel(arguments...) on `blocks` thread blocks. Returns cudaSuccess, or why it could not be launched: without a
// driver cudaErrorInsufficientDriver.
template <class... Parameters>
int launch(void (*kernel)(Parameters...), int64_t blocks, dim3 block, void* stream, Parameters... arguments) {
  void* addresses[] = {static_cast<void*>(&arguments)...};
  return cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(blocks)), block, addresses, 0,
                          static_cast<cudaStream_t>(stream));
}
