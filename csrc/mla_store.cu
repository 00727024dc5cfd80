// mla_store.cu: norm of the latent, rope of its key and of the queries, and the write into the paged cache.
// Tiling:  one CTA a token. Warp 0 takes the latent row: a lane holds two 16-byte vectors of c_kv and one
//          pair of k_pe. The other warps take the query heads in turn, a lane one pair of q_pe.
// Traffic: 1,152 B read + 1,152 B written a token, 256 B of cos and sin, and 128 B read and written a head;
//          each once. Latency-bound at decode sizes, HBM-bound in a prefill.
// Checked against rorqual/kernels/reference.py::rms_norm, apply_rope and mla_store. Rope and copy are exact
// bit for bit; the norm's sum runs in another order.
#include "rorqual/device.cuh"
#include "rorqual/launch.h"
#include "rorqual/launch_kernel.cuh"

namespace rorqual {
namespace {

struct MlaRow {
  static constexpr int kLatent = 512, kRope = 64;
  static constexpr int kWidth = kLatent + kRope;
  static constexpr int kPairs = kRope / 2;
  static constexpr int kVecElems = 8;
  static constexpr int kVecsPerLane = kLatent / kVecElems / kWarpSize;
  static constexpr int kWarps = 4;
  static_assert(kPairs == kWarpSize, "a lane turns one pair");
  static_assert(kVecsPerLane == 2);
};

constexpr int kHeadsAtOnce = 6;  // heads whose pairs a warp holds at once

// Products and sums are kept apart (no fused multiply-add), so the bits are the reference's.
__device__ __forceinline__ uint32_t turn_pair(uint32_t pair, float cos, float sin) {
  const float even = bf16_low(pair), odd = bf16_high(pair);
  return pack_bf16(__fsub_rn(__fmul_rn(even, cos), __fmul_rn(odd, sin)),
                   __fadd_rn(__fmul_rn(odd, cos), __fmul_rn(even, sin)));
}

template <bool kNorm>
__global__ void __launch_bounds__(kWarpSize * MlaRow::kWarps) mla_store_kernel(const MlaStoreParams p) {
  // In this order: decode attention reads its plan, its tables and the cache of earlier steps before it waits for the kernel
  // ahead of it, and rests on what came before this one having ended by then.
  wait_for_previous_kernel();
  let_dependents_launch();
  const int64_t token = blockIdx.x;
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const float* cos_sin = p.cos_sin + p.positions[token] * MlaRow::kRope;
  const float cos = cos_sin[lane], sin = cos_sin[MlaRow::kPairs + lane];

  if (warp > 0) {
    constexpr int kStep = MlaRow::kWarps - 1;
    for (int first = warp - 1; first < p.num_heads; first += kStep * kHeadsAtOnce) {
      uint32_t* q[kHeadsAtOnce];
      uint32_t pair[kHeadsAtOnce];
#pragma unroll
      for (int i = 0; i < kHeadsAtOnce; ++i) {  // all loads before the first store
        const int head = first + i * kStep;
        q[i] = reinterpret_cast<uint32_t*>(p.q_pe + token * p.q_pe_token_stride + head * p.q_pe_head_stride) + lane;
        pair[i] = head < p.num_heads ? *q[i] : 0u;
      }
#pragma unroll
      for (int i = 0; i < kHeadsAtOnce; ++i) {
        if (first + i * kStep < p.num_heads) *q[i] = turn_pair(pair[i], cos, sin);
      }
    }
    return;
  }

  const uint4* c_kv = reinterpret_cast<const uint4*>(p.c_kv + token * p.c_kv_stride);
  const uint32_t* k_pe = reinterpret_cast<const uint32_t*>(p.k_pe + token * p.k_pe_stride);
  const uint32_t k_turned = turn_pair(k_pe[lane], cos, sin);
  uint4 vecs[MlaRow::kVecsPerLane];
#pragma unroll
  for (int v = 0; v < MlaRow::kVecsPerLane; ++v) vecs[v] = c_kv[lane + v * kWarpSize];
  if constexpr (kNorm) {
    float squares = 0.f;
#pragma unroll
    for (int v = 0; v < MlaRow::kVecsPerLane; ++v) {
      const uint32_t* pairs = reinterpret_cast<const uint32_t*>(&vecs[v]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        squares += bf16_low(pairs[i]) * bf16_low(pairs[i]) + bf16_high(pairs[i]) * bf16_high(pairs[i]);
      }
    }
    const float inv_rms = rsqrtf(warp_sum(squares) * (1.f / MlaRow::kLatent) + p.eps);
    const uint4* weight = reinterpret_cast<const uint4*>(p.norm_weight);
#pragma unroll
    for (int v = 0; v < MlaRow::kVecsPerLane; ++v) {
      const uint4 w = weight[lane + v * kWarpSize];
      uint32_t* a = reinterpret_cast<uint32_t*>(&vecs[v]);
      const uint32_t* b = reinterpret_cast<const uint32_t*>(&w);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = pack_bf16(round_bf16(bf16_low(a[i]) * inv_rms) * bf16_low(b[i]),
                         round_bf16(bf16_high(a[i]) * inv_rms) * bf16_high(b[i]));
      }
    }
  }

  const auto write_row = [&](__nv_bfloat16* row) {
#pragma unroll
    for (int v = 0; v < MlaRow::kVecsPerLane; ++v) reinterpret_cast<uint4*>(row)[lane + v * kWarpSize] = vecs[v];
    reinterpret_cast<uint32_t*>(row + MlaRow::kLatent)[lane] = k_turned;
  };
  constexpr int kBlockTokens = 64;
  write_row(p.cache + slot / kBlockTokens * p.cache_block_stride + slot % kBlockTokens * MlaRow::kWidth);
  if (p.latent_out != nullptr) write_row(p.latent_out + token * MlaRow::kWidth);
}

}  // namespace

cudaError_t launch_mla_store(const MlaStoreParams& p, cudaStream_t stream) {
  const auto kernel = p.norm_weight != nullptr ? mla_store_kernel<true> : mla_store_kernel<false>;
  return launch_kernel(kernel, dim3(p.num_tokens), kWarpSize * MlaRow::kWarps, stream, {.overlaps = true}, p);
}

}  // namespace rorqual
