// What the library says about itself and about the machine. Every other function returns a cudaError_t: 0 = launched.
#include <cuda_runtime.h>

#include <cstdint>

#include "abi.h"
#include "clones.h"

MARSRL_API int marsrl_abi_version() { return MARSRL_ABI_VERSION; }

// Writes how many devices the driver offers. Without a driver: 35 (cudaErrorInsufficientDriver), and 0 devices.
MARSRL_API int marsrl_cuda_device_count(int32_t* count) {
  int found = 0;
  const cudaError_t error = cudaGetDeviceCount(&found);
  *count = found;
  return error;
}

MARSRL_API const char* marsrl_cuda_error_name(int error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }

MARSRL_API const char* marsrl_cuda_error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
