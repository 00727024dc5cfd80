// moe_route.cu: choosing each token's experts, and putting the choices in expert order.
//
// Route. Scores are float32; ties go to the lower index, of experts as of groups.
// Tiling:  one warp a token; lane l holds experts l, l + 32, … A choice is a warp-wide argmax, top_k of them in turn.
// Traffic: 4 B a token and expert read, 8 B a choice written. Latency-bound at decode sizes.
//
// Permute. A choice's row is its expert's start plus how many choices of that expert come before it: a counting sort,
// stable, so the order is a function of the choices alone.
// Tiling:  one CTA an expert reads all choices, four a thread and turn: one launch counts, the next places.
// Traffic: 8 B a choice and expert, from L2 (25 MB for 8,192 tokens of 6 choices over 64 experts); 8 B a choice written.
// Checked against rorqual/kernels/reference.py::router_scores and route, and torch's stable argsort.
#include "rorqual/device.cuh"
#include "rorqual/launch.h"
#include "rorqual/launch_kernel.cuh"

namespace rorqual {
namespace {

constexpr int kRouteWarps = 4;
constexpr int kMaxExperts = 512, kMaxExpertsPerLane = kMaxExperts / kWarpSize;
constexpr int kNoExpert = 1 << 30;

// Unsigned keys in the order of floats (0 is below every number): what the warp's integer reductions compare.
__device__ __forceinline__ uint32_t order_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);  // -0 becomes 0
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
struct Best {
  uint32_t key;
  int index;
};
// The largest key, the lowest index among equals.
__device__ __forceinline__ Best warp_best(Best best) {
  const uint32_t key = __reduce_max_sync(0xffffffffu, best.key);
  return {key, static_cast<int>(__reduce_min_sync(0xffffffffu, best.key == key ? best.index : kNoExpert))};
}
__device__ __forceinline__ float key_value(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

template <int kPerLane>
__global__ void __launch_bounds__(kRouteWarps* kWarpSize) moe_route_kernel(const MoeRouteParams p) {
  const int token = blockIdx.x * kRouteWarps + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (token >= p.num_tokens) return;
  const float* logits = p.logits + token * p.logits_stride;
  wait_for_previous_kernel();
  let_dependents_launch();

  float score[kPerLane];
  uint32_t rank[kPerLane];  // key of what is compared; 0 once chosen, excluded or beyond the experts
  int group_of[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane + i * kWarpSize;
    score[i] = expert < p.num_experts ? logits[expert] : neg_inf();
  }
  if (p.sigmoid) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score[i] = 1.f / (1.f + expf(-score[i]));
  } else {
    float largest = score[0];
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) largest = fmaxf(largest, score[i]);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, mask));
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      score[i] = expf(score[i] - largest);
      sum += score[i];
    }
    sum = warp_sum(sum);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) score[i] /= sum;
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int expert = lane + i * kWarpSize;
    const float value = expert < p.num_experts ? score[i] + (p.bias != nullptr ? p.bias[expert] : 0.f) : 0.f;
    // NaN is a fault upstream: it ranks last, and the choices are still valid and distinct.
    rank[i] = expert >= p.num_experts ? 0u : isnan(value) ? 1u : order_key(value);
    group_of[i] = expert / p.group_size;
  }

  // The best of this lane's candidates; those of one group but for `except`, if group >= 0.
  const auto lane_best = [&](int group, int except) {
    Best best{0u, kNoExpert};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane + i * kWarpSize;  // ascending, so > keeps the lower index
      if (rank[i] > best.key && (group < 0 || group_of[i] == group) && expert != except) best = {rank[i], expert};
    }
    return best;
  };

  if (p.topk_group < p.num_groups) {
    Best own_group{0u, kNoExpert};  // lane g: group g's score
    for (int group = 0; group < p.num_groups; ++group) {
      const Best first = warp_best(lane_best(group, kNoExpert));
      uint32_t key = first.key;
      if (p.group_by_two) {
        const Best second = warp_best(lane_best(group, first.index));
        key = order_key(key_value(first.key) + key_value(second.key));
      }
      if (lane == group) own_group = Best{key, group};
    }
    uint32_t kept = 0;  // bit g: group g stays
    for (int n = 0; n < p.topk_group; ++n) {
      const Best best = warp_best(own_group);
      if (best.index < p.num_groups) kept |= 1u << best.index;
      if (lane == best.index) own_group = Best{0u, kNoExpert};
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lane + i * kWarpSize < p.num_experts && (kept >> group_of[i] & 1) == 0) rank[i] = 0u;
    }
  }

  int own_id = 0;  // lane n: choice n
  float own_weight = 0.f, weight_sum = 0.f;
  for (int n = 0; n < p.top_k; ++n) {
    const int expert = warp_best(lane_best(-1, kNoExpert)).index;
    float weight = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (expert == lane + i * kWarpSize) {
        weight = score[i];
        rank[i] = 0u;
      }
    }
    weight = __shfl_sync(0xffffffffu, weight, expert % kWarpSize);
    weight_sum += weight;  // in the order of choice, as every lane sees it
    if (lane == n) {
      own_id = expert;
      own_weight = weight;
    }
  }
  const int columns = p.top_k + p.num_shared;
  if (lane < columns) {
    float weight = own_weight;
    if (p.normalize) weight /= weight_sum + 1e-20f;
    weight *= p.scale;
    const bool shared = lane >= p.top_k;
    if (shared) own_id = p.num_experts + lane - p.top_k;
    p.topk_ids[int64_t{token} * columns + lane] = shared || own_id < p.num_experts ? own_id : -1;
    p.topk_weights[int64_t{token} * columns + lane] = shared ? 1.f : weight;
  }
}

constexpr int kPermuteThreads = 1024, kPermuteWarps = kPermuteThreads / kWarpSize;
constexpr int kChoicesPerThread = 4;

// Choices 4 t, 4 t + 1 … of thread t's turn, as bits of which are `expert`.
__device__ __forceinline__ uint32_t own_choices(const MoePermuteParams& p, int first, int expert) {
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < kChoicesPerThread; ++j) {
    if (first + j < p.num_choices && p.topk_ids[first + j] == expert) bits |= 1u << j;
  }
  return bits;
}

__global__ void __launch_bounds__(kPermuteThreads) moe_count_kernel(const MoePermuteParams p) {
  __shared__ int warp_counts[kPermuteWarps];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  int count = 0;
  for (int first = threadIdx.x * kChoicesPerThread; first < p.num_choices;
       first += kPermuteThreads * kChoicesPerThread) {
    count += __popc(own_choices(p, first, blockIdx.x));
  }
  count = __reduce_add_sync(0xffffffffu, count);
  if (lane == 0) warp_counts[warp] = count;
  __syncthreads();
  if (warp == 0) {
    const int total = __reduce_add_sync(0xffffffffu, warp_counts[lane]);
    if (lane == 0) p.counts[blockIdx.x] = total;
  }
}

__global__ void __launch_bounds__(kPermuteThreads) moe_place_kernel(const MoePermuteParams p) {
  __shared__ int warp_counts[kPermuteWarps];
  const int own = blockIdx.x, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const auto padded = [&](int count) { return (count + p.row_alignment - 1) / p.row_alignment * p.row_alignment; };
  wait_for_previous_kernel();
  int start = 0;  // every warp sums the experts before this one
  for (int i = lane; i < own; i += kWarpSize) start += padded(p.counts[i]);
  start = __reduce_add_sync(0xffffffffu, start);
  const int count = p.counts[own], end = start + padded(count);
  if (threadIdx.x == 0) {
    p.expert_starts[own] = start;
    if (own == p.num_experts - 1) p.expert_starts[p.num_experts] = end;
  }
  for (int row = start + count + threadIdx.x; row < end; row += kPermuteThreads) p.choice_of[row] = -1;
  if (own == 0) {
    for (int i = threadIdx.x; i < p.num_choices; i += kPermuteThreads) {
      if (p.topk_ids[i] < 0 || p.topk_ids[i] >= p.num_experts) p.row_of[i] = -1;
    }
  }

  int next = start;
  for (int base = 0; base < p.num_choices; base += kPermuteThreads * kChoicesPerThread) {
    const int first = base + threadIdx.x * kChoicesPerThread;
    const uint32_t bits = own_choices(p, first, own);
    int inclusive = __popc(bits);  // this warp's, up to this lane
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, inclusive, offset);
      if (lane >= offset) inclusive += below;
    }
    if (lane == kWarpSize - 1) warp_counts[warp] = inclusive;
    __syncthreads();
    const int other = warp_counts[lane];
    const int before = __reduce_add_sync(0xffffffffu, lane < warp ? other : 0);
    const int all = __reduce_add_sync(0xffffffffu, other);
    int row = next + before + inclusive - __popc(bits);
#pragma unroll
    for (int j = 0; j < kChoicesPerThread; ++j) {
      if ((bits >> j & 1) == 0) continue;
      p.choice_of[row] = first + j;
      p.row_of[first + j] = row++;
    }
    next += all;
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_moe_route(const MoeRouteParams& p, cudaStream_t stream) {
  const int grid = (p.num_tokens + kRouteWarps - 1) / kRouteWarps, threads = kRouteWarps * kWarpSize;
  const int per_lane = (p.num_experts + kWarpSize - 1) / kWarpSize;
  const auto kernel = per_lane <= 2   ? moe_route_kernel<2>
                      : per_lane <= 8 ? moe_route_kernel<8>
                                      : moe_route_kernel<kMaxExpertsPerLane>;
  return launch_kernel(kernel, dim3(grid), threads, stream, {.overlaps = true}, p);
}

cudaError_t launch_moe_permute(const MoePermuteParams& p, cudaStream_t stream) {
  const cudaError_t error = launch_kernel(moe_count_kernel, dim3(p.num_experts), kPermuteThreads, stream, {}, p);
  if (error != cudaSuccess) return error;
  return launch_kernel(moe_place_kernel, dim3(p.num_experts), kPermuteThreads, stream, {.overlaps = true}, p);
}

}  // namespace rorqual
