// tensor_map.h: descriptors of the bulk tensor copy engine, made on the host at each launch.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "error.h"

namespace rorqual {

// cuTensorMapEncodeTiled belongs to the driver; asked for at run time, so that the library loads without one.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result);
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(
        error == cudaSuccess && result == cudaDriverEntryPointSuccess ? function : nullptr);
  }();
  return encoder;
}

// A map of a bf16 tensor in rows of 128-byte swizzled boxes; reads outside the tensor are zeros. dims and box: innermost
// first, in elements; strides: of dimensions 1 and up, in elements. Returns 0, or RORQUAL_EINVAL with a message.
template <int kRank>
int encode_bf16_map(CUtensorMap* map, const void* base, const cuuint64_t (&dims)[kRank],
                    const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank], const char* function) {
  const auto encode = tensor_map_encoder();
  if (encode == nullptr) {
    return fail(std::string(function) + ": the driver has no cuTensorMapEncodeTiled (CUDA 12 or newer is needed)");
  }
  cuuint64_t stride_bytes[kRank - 1];
  cuuint32_t element_strides[kRank];
  for (int i = 0; i + 1 < kRank; ++i) stride_bytes[i] = strides[i] * 2;
  for (int i = 0; i < kRank; ++i) element_strides[i] = 1;
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, const_cast<void*>(base), dims, stride_bytes, box,
             element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return 0;
  return fail(std::string(function) + ": cuTensorMapEncodeTiled returned " + std::to_string(result));
}

}  // namespace rorqual
