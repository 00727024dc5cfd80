// moe_combine.cu: the experts' outputs back into the residual stream, with the RMSNorm that follows.
// Tiling:  one CTA a token; a thread keeps its 16-byte vectors of the row in float32. A token's rows are added in order of
//          choice, the residual last; the sum is rounded once. The norm is rms_norm.cu's, sum for sum.
// Traffic: 2 * top_k B read a value, 4 B read and written for the residual, 2 B written normalised. HBM-bound.
// Checked against rorqual/kernels/experts.py::moe_combine on CPU tensors, and the norm bit for bit against rms_norm.
#include "rorqual/device.cuh"
#include "rorqual/launch.h"
#include "rorqual/launch_kernel.cuh"

namespace rorqual {
namespace {

constexpr int kVecElems = 8;  // bf16 in 16 bytes
constexpr int kMaxThreads = 256;
constexpr int kMaxVecs = 8;  // a thread's vectors at most, so rows of up to 16,384 values

// kVecs: 16-byte vectors a thread; vector v of thread t is t + v * blockDim.x. Rows are read some at a time, so that one
// latency of L2 serves them all: a small step is nothing but that latency.
template <int kVecs>
__global__ void __launch_bounds__(kMaxThreads, kVecs == 1 ? 4 : 1)
    experts_combine_kernel(const ExpertsCombineParams p, int num_vecs) {
  constexpr int kAtOnce = kVecs == 1 ? 6 : kVecs <= 4 ? 2 : 1;  // rows
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % kWarpSize;
  // Everything but y is older than the second product, which lets this kernel start when all before it have ended.
  const int own_row = lane < p.top_k ? p.row_of[token * p.top_k + lane] : -1;
  const float weight_read = lane < p.top_k ? p.topk_weights[token * p.top_k + lane] : 0.f;
  const float own_weight = own_row >= 0 ? weight_read : 0.f;  // an unused choice's may be anything
  uint4* residual = reinterpret_cast<uint4*>(p.residual + token * p.residual_stride);
  uint4 vecs[kVecs], norm_weights[kVecs];
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int idx = threadIdx.x + v * blockDim.x;
    vecs[v] = norm_weights[v] = make_uint4(0, 0, 0, 0);
    if (idx >= num_vecs) continue;
    vecs[v] = residual[idx];
    if (p.normed != nullptr) norm_weights[v] = reinterpret_cast<const uint4*>(p.norm_weight)[idx];
  }
  wait_for_previous_kernel();
  let_dependents_launch();
  float sum[kVecs][kVecElems] = {};
  for (int first = 0; first < p.top_k; first += kAtOnce) {
    uint4 y[kAtOnce][kVecs];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int row = __shfl_sync(0xffffffffu, own_row, (first + i) % kWarpSize);  // -1 beyond top_k, too
      const uint4* from = reinterpret_cast<const uint4*>(p.y + int64_t{row} * p.hidden);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        const int idx = threadIdx.x + v * blockDim.x;
        y[i][v] = row >= 0 && first + i < p.top_k && idx < num_vecs ? from[idx] : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float weight = __shfl_sync(0xffffffffu, own_weight, (first + i) % kWarpSize);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        const uint32_t* pairs = reinterpret_cast<const uint32_t*>(&y[i][v]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          sum[v][2 * k] = fmaf(weight, bf16_low(pairs[k]), sum[v][2 * k]);
          sum[v][2 * k + 1] = fmaf(weight, bf16_high(pairs[k]), sum[v][2 * k + 1]);
        }
      }
    }
  }
  float squares = 0.f;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int idx = threadIdx.x + v * blockDim.x;
    if (idx >= num_vecs) continue;
    const uint32_t* a = reinterpret_cast<const uint32_t*>(&vecs[v]);
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[i] = pack_bf16(bf16_low(a[i]) + sum[v][2 * i], bf16_high(a[i]) + sum[v][2 * i + 1]);
      squares += bf16_low(pairs[i]) * bf16_low(pairs[i]) + bf16_high(pairs[i]) * bf16_high(pairs[i]);
    }
    vecs[v] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    residual[idx] = vecs[v];
  }
  if (p.normed == nullptr) return;

  squares = warp_sum(squares);
  __shared__ float warp_squares[kMaxThreads / kWarpSize];
  const int num_warps = blockDim.x / kWarpSize;
  if (num_warps > 1) {
    if (threadIdx.x % kWarpSize == 0) warp_squares[threadIdx.x / kWarpSize] = squares;
    __syncthreads();
    squares = 0.f;
#pragma unroll
    for (int w = 0; w < kMaxThreads / kWarpSize; ++w) squares += w < num_warps ? warp_squares[w] : 0.f;
  }
  const float inv_rms = rsqrtf(squares * (1.f / static_cast<float>(p.hidden)) + p.eps);
  uint4* normed = reinterpret_cast<uint4*>(p.normed + token * p.normed_stride);
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int idx = threadIdx.x + v * blockDim.x;
    if (idx >= num_vecs) continue;
    const uint32_t* a = reinterpret_cast<const uint32_t*>(&vecs[v]);
    const uint32_t* b = reinterpret_cast<const uint32_t*>(&norm_weights[v]);
    uint32_t y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rounded to bf16 before the product, as the published model does
      y[i] = pack_bf16(round_bf16(bf16_low(a[i]) * inv_rms) * bf16_low(b[i]),
                       round_bf16(bf16_high(a[i]) * inv_rms) * bf16_high(b[i]));
    }
    normed[idx] = make_uint4(y[0], y[1], y[2], y[3]);
  }
}

template <int kVecs>
cudaError_t launch(const ExpertsCombineParams& p, int threads, int num_vecs, cudaStream_t stream) {
  return launch_kernel(experts_combine_kernel<kVecs>, dim3(p.num_tokens), threads, stream, {.overlaps = true}, p,
                       num_vecs);
}

}  // namespace

cudaError_t launch_experts_combine(const ExpertsCombineParams& p, cudaStream_t stream) {
  const int num_vecs = p.hidden / kVecElems;
  const int threads = num_vecs >= kMaxThreads ? kMaxThreads : (num_vecs + kWarpSize - 1) / kWarpSize * kWarpSize;
  const int vecs = (num_vecs + threads - 1) / threads;
  if (vecs <= 1) return launch<1>(p, threads, num_vecs, stream);
  if (vecs <= 4) return launch<4>(p, threads, num_vecs, stream);
  return launch<kMaxVecs>(p, threads, num_vecs, stream);
}

}  // namespace rorqual
