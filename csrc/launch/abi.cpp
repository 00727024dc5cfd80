// abi.cpp: the C interface's version, error text and target.
#include "rorqual/abi.h"

#include "error.h"

namespace rorqual {
namespace {
thread_local std::string last_error;
}

int fail(std::string message) {
  last_error = std::move(message);
  return RORQUAL_EINVAL;
}

int from_cuda(cudaError_t error, const char* function) {
  if (error == cudaSuccess) return 0;
  last_error = std::string(function) + ": " + cudaGetErrorName(error) + ": " + cudaGetErrorString(error);
  return static_cast<int>(error);
}
}  // namespace rorqual

extern "C" {
int rorqual_abi_version(void) { return RORQUAL_ABI_VERSION; }
const char* rorqual_last_error(void) { return rorqual::last_error.c_str(); }
const char* rorqual_target(void) { return "sm_90a"; }
}
