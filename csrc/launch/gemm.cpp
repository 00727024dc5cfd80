// gemm.cpp: C wrapper of a product that cuBLAS computes.
#include <library_types.h>

#include "error.h"

using rorqual::aligned;

namespace {

// cublasGemmEx and what it takes, as cublas_api.h has them; the library is built without cuBLAS's headers.
using GemmEx = int (*)(void* handle, int op_a, int op_b, int m, int n, int k, const void* alpha, const void* a,
                       cudaDataType a_type, int lda, const void* b, cudaDataType b_type, int ldb, const void* beta,
                       void* c, cudaDataType c_type, int ldc, int compute_type, int algorithm);
constexpr int kPlain = 0, kTransposed = 1, kComputeFloat32 = 68, kDefaultAlgorithm = -1;

}  // namespace

extern "C" int rorqual_gemm(const RorqualGemm* a, void*) {
  RORQUAL_REQUIRE(a->num_tokens >= 0 && a->in_features >= 8 && a->in_features % 8 == 0 && a->out_features >= 8 &&
                      a->out_features % 8 == 0,
                  "gemm: num_tokens must be >= 0, in_features and out_features multiples of 8, >= 8, got " +
                      std::to_string(a->num_tokens) + ", " + std::to_string(a->in_features) + " and " +
                      std::to_string(a->out_features));
  if (a->num_tokens == 0) return 0;
  RORQUAL_REQUIRE(a->gemm_ex && a->handle && a->out && a->x && a->weight, "gemm: no pointer may be NULL");
  RORQUAL_REQUIRE(aligned(a->out, 16) && aligned(a->x, 16) && aligned(a->weight, 16),
                  "gemm: out, x and weight must be 16-byte aligned");
  RORQUAL_REQUIRE(a->x_stride >= a->in_features && a->x_stride < (int64_t{1} << 31) &&
                      a->out_stride >= a->out_features && a->out_stride < (int64_t{1} << 31),
                  "gemm: strides must be at least a row and below 2^31");
  const auto gemm_ex = reinterpret_cast<GemmEx>(a->gemm_ex);
  const float alpha = 1.f;
  // Column by column, as cuBLAS counts: out^T [out_features, num_tokens] = weight x^T.
  const int status =
      gemm_ex(a->handle, kTransposed, kPlain, a->out_features, a->num_tokens, a->in_features, &alpha, a->weight,
              CUDA_R_16BF, a->in_features, a->x, CUDA_R_16BF, static_cast<int>(a->x_stride), &a->beta, a->out,
              a->out_float32 ? CUDA_R_32F : CUDA_R_16BF, static_cast<int>(a->out_stride), kComputeFloat32,
              kDefaultAlgorithm);
  if (status == 0) return 0;
  return rorqual::fail("gemm: cublasGemmEx returned " + std::to_string(status));
}
