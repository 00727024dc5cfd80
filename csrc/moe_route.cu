// moe_route.cu: choosing each token's experts, and putting the choices in expert order.
//
// Route. Scores are float32; ties go to the lower index, of experts as of groups.
// Tiling:  one warp a token; lane l holds experts l, l + 32, … A choice is a warp-wide argmax, top_k of them in turn.
// Traffic: 4 B a token and expert read, 8 B a choice written. Latency-bound at decode sizes.
//
// Permute. A choice's row is its expert's start plus how many choices of that expert come before it: a counting sort,
// stable, so the order is a function of the choices alone.
// Tiling:  one CTA an expert; every CTA reads all choices twice, once to count (integers, in shared memory) and once to
//          place its own, so one launch does all and no CTA waits for another.
// Traffic: 8 B a choice and expert, from L2 (17 MB for 8,192 tokens of 6 choices over 64 experts); 8 B a choice written.
// Checked against rorqual/kernels/reference.py::router_scores and route, and torch's stable argsort.
#include "rorqual/device.cuh"
#include "rorqual/launch.h"

namespace rorqual {
namespace {

constexpr int kRouteWarps = 4;
constexpr int kMaxExperts = 512, kMaxExpertsPerLane = kMaxExperts / kWarpSize;
constexpr int kNoExpert = 1 << 30;

struct Best {
  float value;
  int index;
};
__device__ __forceinline__ Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}
__device__ __forceinline__ Best warp_best(Best best) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    best = better(best, Best{__shfl_xor_sync(0xffffffffu, best.value, mask),
                             __shfl_xor_sync(0xffffffffu, best.index, mask)});
  }
  return best;
}

template <int kPerLane>
__global__ void __launch_bounds__(kRouteWarps* kWarpSize) moe_route_kernel(const MoeRouteParams p) {
  const int token = blockIdx.x * kRouteWarps + threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  if (token >= p.num_tokens) return;
  const float* logits = p.logits + token * p.logits_stride;

  float score[kPerLane], rank[kPerLane];  // rank: what is compared; -inf once chosen, excluded or beyond the experts
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
    rank[i] = expert < p.num_experts ? score[i] + (p.bias != nullptr ? p.bias[expert] : 0.f) : neg_inf();
    if (isnan(rank[i])) rank[i] = -3.4e38f;  // a fault upstream: still choose valid, distinct experts
  }

  // The best of this lane's candidates; those of one group only, if group >= 0.
  const auto lane_best = [&](int group) {
    Best best{neg_inf(), kNoExpert};
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane + i * kWarpSize;
      if (expert < p.num_experts && rank[i] > neg_inf() && (group < 0 || expert / p.group_size == group)) {
        best = better(best, Best{rank[i], expert});
      }
    }
    return best;
  };

  if (p.topk_group < p.num_groups) {
    Best own_group{neg_inf(), kNoExpert};  // lane g: group g's score
    for (int group = 0; group < p.num_groups; ++group) {
      const Best first = warp_best(lane_best(group));
      float group_score = first.value;
      if (p.group_by_two) {
        Best second{neg_inf(), kNoExpert};
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          const int expert = lane + i * kWarpSize;
          if (expert < p.num_experts && expert / p.group_size == group && expert != first.index) {
            second = better(second, Best{rank[i], expert});
          }
        }
        group_score += warp_best(second).value;
      }
      if (lane == group) own_group = Best{group_score, group};
    }
    uint32_t kept = 0;  // bit g: group g stays
    for (int n = 0; n < p.topk_group; ++n) {
      const Best best = warp_best(own_group);
      if (best.index < p.num_groups) kept |= 1u << best.index;
      if (lane == best.index) own_group = Best{neg_inf(), kNoExpert};
    }
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int expert = lane + i * kWarpSize;
      if (expert < p.num_experts && (kept >> (expert / p.group_size) & 1) == 0) rank[i] = neg_inf();
    }
  }

  int own_id = 0;  // lane n: choice n
  float own_weight = 0.f, weight_sum = 0.f;
  for (int n = 0; n < p.top_k; ++n) {
    const int expert = warp_best(lane_best(-1)).index;
    float weight = 0.f;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (expert == lane + i * kWarpSize) {
        weight = score[i];
        rank[i] = neg_inf();
      }
    }
    weight = __shfl_sync(0xffffffffu, weight, expert % kWarpSize);
    weight_sum += weight;  // in the order of choice, as every lane sees it
    if (lane == n) {
      own_id = expert;
      own_weight = weight;
    }
  }
  if (lane < p.top_k) {
    float weight = own_weight;
    if (p.normalize) weight /= weight_sum + 1e-20f;
    weight *= p.scale;
    p.topk_ids[int64_t{token} * p.top_k + lane] = own_id < p.num_experts ? own_id : -1;
    p.topk_weights[int64_t{token} * p.top_k + lane] = weight;
  }
}

constexpr int kPermuteThreads = 256;

__global__ void __launch_bounds__(kPermuteThreads) moe_permute_kernel(const MoePermuteParams p) {
  __shared__ int counts[kMaxExperts];
  __shared__ int warp_counts[kPermuteThreads / kWarpSize];
  const int own = blockIdx.x, lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  for (int i = threadIdx.x; i < p.num_experts; i += kPermuteThreads) counts[i] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_choices; i += kPermuteThreads) {
    const int expert = p.topk_ids[i];
    if (expert >= 0 && expert < p.num_experts) {
      atomicAdd(&counts[expert], 1);
    } else if (own == 0) {
      p.row_of[i] = -1;
    }
  }
  __syncthreads();
  const auto padded = [&](int count) { return (count + p.row_alignment - 1) / p.row_alignment * p.row_alignment; };
  // Every thread sums the counts before its expert; expert `own` is the same for all, so they agree.
  int start = 0;
  for (int i = lane; i < own; i += kWarpSize) start += padded(counts[i]);
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) start += __shfl_xor_sync(0xffffffffu, start, mask);
  const int count = counts[own], end = start + padded(count);
  if (threadIdx.x == 0) {
    p.expert_starts[own] = start;
    if (own == p.num_experts - 1) p.expert_starts[p.num_experts] = end;
  }
  for (int row = start + count + threadIdx.x; row < end; row += kPermuteThreads) p.choice_of[row] = -1;

  int next = start;
  for (int first = 0; first < p.num_choices; first += kPermuteThreads) {
    const int i = first + threadIdx.x;
    const bool mine = i < p.num_choices && p.topk_ids[i] == own;
    const uint32_t mask = __ballot_sync(0xffffffffu, mine);
    if (lane == 0) warp_counts[warp] = __popc(mask);
    __syncthreads();
    int before = 0, all = 0;
#pragma unroll
    for (int w = 0; w < kPermuteThreads / kWarpSize; ++w) {
      before += w < warp ? warp_counts[w] : 0;
      all += warp_counts[w];
    }
    if (mine) {
      const int row = next + before + __popc(mask & ((1u << lane) - 1));
      p.choice_of[row] = i;
      p.row_of[i] = row;
    }
    next += all;
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_moe_route(const MoeRouteParams& p, cudaStream_t stream) {
  const int grid = (p.num_tokens + kRouteWarps - 1) / kRouteWarps, threads = kRouteWarps * kWarpSize;
  const int per_lane = (p.num_experts + kWarpSize - 1) / kWarpSize;
  if (per_lane <= 2) {
    moe_route_kernel<2><<<grid, threads, 0, stream>>>(p);
  } else if (per_lane <= 8) {
    moe_route_kernel<8><<<grid, threads, 0, stream>>>(p);
  } else {
    moe_route_kernel<kMaxExpertsPerLane><<<grid, threads, 0, stream>>>(p);
  }
  return cudaGetLastError();
}

cudaError_t launch_moe_permute(const MoePermuteParams& p, cudaStream_t stream) {
  moe_permute_kernel<<<p.num_experts, kPermuteThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace rorqual
