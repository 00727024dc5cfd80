// error.h: how launch wrappers report what is wrong with their arguments.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "rorqual/abi.h"

namespace rorqual {

int fail(std::string message);  // keeps the message, returns RORQUAL_EINVAL
int from_cuda(cudaError_t error, const char* function);

inline bool aligned(const void* ptr, int bytes) { return reinterpret_cast<uintptr_t>(ptr) % bytes == 0; }

}  // namespace rorqual

// Leaves the function with a message unless `condition` holds.
#define RORQUAL_REQUIRE(condition, message)            \
  do {                                                 \
    if (!(condition)) return ::rorqual::fail(message); \
  } while (false)
