// rms_norm.cu: root-mean-square normalisation, with the residual addition before it.
// Tiling:  one CTA a row; a thread keeps its 16-byte vectors of the row in registers, so that the row is
//          read once. Sums are float32: lanes, then warps, in a fixed order.
// Traffic: 2 B read + 2 B written a value; with the residual 4 B read + 4 B written. HBM-bound.
// Checked against rorqual/kernels/reference.py::rms_norm (the sum's order differs, so one bf16 step may too).
#include "rorqual/device.cuh"
#include "rorqual/launch.h"
#include "rorqual/launch_kernel.cuh"

namespace rorqual {
namespace {

constexpr int kVecElems = 8;  // bf16 in 16 bytes
constexpr int kMaxThreads = 256;
constexpr int kMaxVecs = 8;  // a thread's vectors at most, so rows of up to 16,384 values

// No __restrict__ on what the previous kernel may have written: such reads could be moved before the wait for its end.
// kVecs: 16-byte vectors a thread; vector v of thread t is t + v * blockDim.x.
template <int kVecs, bool kResidual>
__global__ void __launch_bounds__(kMaxThreads)
rms_norm_kernel(__nv_bfloat16* out, int64_t out_stride,            // [num_rows, hidden]
                __nv_bfloat16* residual, int64_t residual_stride,  // in place, with kResidual
                const __nv_bfloat16* x, int64_t x_stride,          // [num_rows, hidden]
                const __nv_bfloat16* __restrict__ weight,          // [hidden]
                int num_vecs, float inv_hidden, float eps) {
  const int64_t row = blockIdx.x;
  let_dependents_launch();
  const uint4* weight_vecs = reinterpret_cast<const uint4*>(weight);
  uint4 weights[kVecs <= 2 ? kVecs : 1];  // of short rows: on their way before the previous kernel has ended
  if constexpr (kVecs <= 2) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int idx = threadIdx.x + v * blockDim.x;
      weights[v] = idx < num_vecs ? weight_vecs[idx] : make_uint4(0, 0, 0, 0);
    }
  }
  wait_for_previous_kernel();
  const uint4* x_row = reinterpret_cast<const uint4*>(x + row * x_stride);
  uint4 vecs[kVecs];
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int idx = threadIdx.x + v * blockDim.x;
    vecs[v] = idx < num_vecs ? x_row[idx] : make_uint4(0, 0, 0, 0);
  }
  if constexpr (kResidual) {
    uint4* residual_row = reinterpret_cast<uint4*>(residual + row * residual_stride);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int idx = threadIdx.x + v * blockDim.x;
      if (idx >= num_vecs) continue;
      const uint4 old = residual_row[idx];
      const uint32_t* a = reinterpret_cast<const uint32_t*>(&vecs[v]);
      const uint32_t* b = reinterpret_cast<const uint32_t*>(&old);
      uint32_t sum[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sum[i] = pack_bf16(bf16_low(a[i]) + bf16_low(b[i]), bf16_high(a[i]) + bf16_high(b[i]));
      }
      vecs[v] = make_uint4(sum[0], sum[1], sum[2], sum[3]);
      residual_row[idx] = vecs[v];
    }
  }

  float squares = 0.f;
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(&vecs[v]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      squares += bf16_low(pairs[i]) * bf16_low(pairs[i]) + bf16_high(pairs[i]) * bf16_high(pairs[i]);
    }
  }
  squares = warp_sum(squares);
  __shared__ float warp_squares[kMaxThreads / kWarpSize];
  const int num_warps = blockDim.x / kWarpSize;
  if (num_warps > 1) {
    if (threadIdx.x % kWarpSize == 0) warp_squares[threadIdx.x / kWarpSize] = squares;
    __syncthreads();
    squares = 0.f;
    for (int w = 0; w < num_warps; ++w) squares += warp_squares[w];
  }
  const float inv_rms = rsqrtf(squares * inv_hidden + eps);

  uint4* out_row = reinterpret_cast<uint4*>(out + row * out_stride);
#pragma unroll
  for (int v = 0; v < kVecs; ++v) {
    const int idx = threadIdx.x + v * blockDim.x;
    if (idx >= num_vecs) continue;
    const uint4 w = kVecs <= 2 ? weights[kVecs <= 2 ? v : 0] : weight_vecs[idx];
    const uint32_t* a = reinterpret_cast<const uint32_t*>(&vecs[v]);
    const uint32_t* b = reinterpret_cast<const uint32_t*>(&w);
    uint32_t y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // rounded to bf16 before the product, as the published model does
      y[i] = pack_bf16(round_bf16(bf16_low(a[i]) * inv_rms) * bf16_low(b[i]),
                       round_bf16(bf16_high(a[i]) * inv_rms) * bf16_high(b[i]));
    }
    out_row[idx] = make_uint4(y[0], y[1], y[2], y[3]);
  }
}

template <int kVecs>
cudaError_t launch(const RmsNormParams& p, int threads, int num_vecs, cudaStream_t stream) {
  const float inv_hidden = 1.f / static_cast<float>(p.hidden);
  const auto kernel = p.residual != nullptr ? rms_norm_kernel<kVecs, true> : rms_norm_kernel<kVecs, false>;
  return launch_kernel(kernel, dim3(p.num_rows), threads, stream, {.overlaps = true}, p.out, p.out_stride, p.residual,
                       p.residual_stride, p.x, p.x_stride, p.weight, num_vecs, inv_hidden, p.eps);
}

}  // namespace

cudaError_t launch_rms_norm(const RmsNormParams& p, cudaStream_t stream) {
  const int num_vecs = p.hidden / kVecElems;
  const int threads = num_vecs >= kMaxThreads ? kMaxThreads : (num_vecs + kWarpSize - 1) / kWarpSize * kWarpSize;
  const int vecs = (num_vecs + threads - 1) / threads;
  if (vecs <= 1) return launch<1>(p, threads, num_vecs, stream);
  if (vecs <= 2) return launch<2>(p, threads, num_vecs, stream);
  if (vecs <= 4) return launch<4>(p, threads, num_vecs, stream);
  return launch<kMaxVecs>(p, threads, num_vecs, stream);
}

}  // namespace rorqual
