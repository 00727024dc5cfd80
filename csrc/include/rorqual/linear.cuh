// linear.cuh: what becomes of the float32 sums of y = x W^T, in both of its kernels.
#pragma once
#include "rorqual/device.cuh"
#include "rorqual/launch.h"

namespace rorqual {

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

// kN neighbouring bf16, 4 or 16 bytes aligned, as floats.
template <int kN>
__device__ __forceinline__ void load_bf16(float (&v)[kN], const __nv_bfloat16* src) {
  static_assert(kN == 2 || kN == 8);
  uint32_t pairs[kN / 2];
  if constexpr (kN == 8) {
    const uint4 vec = *reinterpret_cast<const uint4*>(src);
    pairs[0] = vec.x, pairs[1] = vec.y, pairs[2] = vec.z, pairs[3] = vec.w;
  } else {
    pairs[0] = *reinterpret_cast<const uint32_t*>(src);
  }
#pragma unroll
  for (int i = 0; i < kN; ++i) v[i] = i % 2 == 0 ? bf16_low(pairs[i / 2]) : bf16_high(pairs[i / 2]);
}

// Adds bias, then residual, to the sums of rows [row, row + kN) of W.
template <int kN>
__device__ __forceinline__ void add_linear_terms(const LinearParams& p, int token, int row, float (&v)[kN]) {
  float term[kN];
  if (p.bias != nullptr) {
    load_bf16(term, p.bias + row);
#pragma unroll
    for (int i = 0; i < kN; ++i) v[i] += term[i];
  }
  if (p.residual != nullptr) {
    load_bf16(term, p.residual + token * p.residual_stride + row);
#pragma unroll
    for (int i = 0; i < kN; ++i) v[i] += term[i];
  }
}

// Writes columns [column, column + kN) of a token's output.
template <int kN>
__device__ __forceinline__ void store_linear(const LinearParams& p, int batch, int token, int column,
                                             const float (&v)[kN]) {
  const int64_t at = batch * p.out_batch_stride + token * p.out_token_stride + column;
  if (p.out_float32) {
    float* dst = static_cast<float*>(p.out) + at;
    if constexpr (kN == 8) {
      *reinterpret_cast<float4*>(dst) = make_float4(v[0], v[1], v[2], v[3]);
      *reinterpret_cast<float4*>(dst + 4) = make_float4(v[4], v[5], v[6], v[7]);
    } else {
      *reinterpret_cast<float2*>(dst) = make_float2(v[0], v[1]);
    }
  } else {
    __nv_bfloat16* dst = static_cast<__nv_bfloat16*>(p.out) + at;
    if constexpr (kN == 8) {
      *reinterpret_cast<uint4*>(dst) =
          make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]), pack_bf16(v[6], v[7]));
    } else {
      *reinterpret_cast<uint32_t*>(dst) = pack_bf16(v[0], v[1]);
    }
  }
}

}  // namespace rorqual
