// moe_plan.cu: a step's choices in expert order, cut into groups for the grouped products; and x in that order.
//
// Plan. A stable counting sort, as moe_route.cu's permutation is, for one launch up to 2,048 choices.
// Tiling:  one CTA 2,048 choices, a warp 64 of them in order; equal experts find each other by a vote. Each CTA adds up
//          the earlier chunks' counts itself; with several chunks another kernel counts them first.
// Traffic: 4 B written and 4 B read a choice, 4 B an expert and chunk. Latency-bound.
// Sort.    One CTA a token reads its row once and writes it to each of its choices' rows: 2 B read and 2 * top_k B
//          written a value. HBM-bound.
// Checked against rorqual/kernels/experts.py::plan on CPU tensors.
#include "rorqual/device.cuh"
#include "rorqual/launch.h"
#include "rorqual/launch_kernel.cuh"

namespace rorqual {
namespace {

struct Plan {
  static constexpr int kThreads = 1024, kWarps = kThreads / kWarpSize;
  static constexpr int kTurns = 2;  // of a warp, 32 choices each
  static constexpr int kWarpChoices = kTurns * kWarpSize, kChunk = kWarps * kWarpChoices;
  static constexpr int kMaxExperts = 512;
};

__device__ __forceinline__ int valid_expert(const ExpertsPlanParams& p, int choice) {
  const int expert = choice < p.num_choices ? p.topk_ids[choice] : -1;
  return expert >= 0 && expert < p.num_experts ? expert : -1;
}

__global__ void __launch_bounds__(Plan::kThreads) experts_count_kernel(const ExpertsPlanParams p) {
  __shared__ int counts[Plan::kMaxExperts];
  if (threadIdx.x < Plan::kMaxExperts) counts[threadIdx.x] = 0;
  wait_for_previous_kernel();
  let_dependents_launch();
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < Plan::kTurns; ++turn) {
    const int expert = valid_expert(p, blockIdx.x * Plan::kChunk + turn * Plan::kThreads + threadIdx.x);
    if (expert >= 0) atomicAdd(&counts[expert], 1);
  }
  __syncthreads();
  if (threadIdx.x < p.num_experts) p.chunk_counts[blockIdx.x * p.num_experts + threadIdx.x] = counts[threadIdx.x];
}

// The sum of the threads before this one, over the first kMaxExperts threads of the CTA; all threads call it.
__device__ __forceinline__ int sum_before(int value, int* warp_sums) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  constexpr int kWarps = Plan::kMaxExperts / kWarpSize;
  int inclusive = value;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, inclusive, offset);
    if (lane >= offset) inclusive += below;
  }
  if (lane == kWarpSize - 1 && warp < kWarps) warp_sums[warp] = inclusive;
  __syncthreads();
  const int other = lane < kWarps && lane < warp ? warp_sums[lane] : 0;
  const int before = __reduce_add_sync(0xffffffffu, other);
  __syncthreads();
  return before + inclusive - value;
}

__global__ void __launch_bounds__(Plan::kThreads) experts_place_kernel(const ExpertsPlanParams p, int num_chunks) {
  __shared__ uint16_t counts[Plan::kWarps][Plan::kMaxExperts];  // of a warp; then how many are in the warps before it
  __shared__ int first_row[Plan::kMaxExperts];                  // of this chunk's choices of an expert
  __shared__ int warp_sums[Plan::kMaxExperts / kWarpSize];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int chunk_choices = min(p.num_choices - static_cast<int>(blockIdx.x) * Plan::kChunk, Plan::kChunk);
  const int warps = (chunk_choices + Plan::kWarpChoices - 1) / Plan::kWarpChoices;  // with choices
  if (warp < warps) {
    for (int i = lane; i < p.num_experts; i += kWarpSize) counts[warp][i] = 0;
  }
  __syncwarp();
  wait_for_previous_kernel();
  let_dependents_launch();

  int expert[Plan::kTurns], rank[Plan::kTurns];  // of this thread's choices; how many equal ones the warp has before
  const int first_choice = blockIdx.x * Plan::kChunk + warp * Plan::kWarpChoices + lane;
#pragma unroll
  for (int turn = 0; turn < Plan::kTurns; ++turn) expert[turn] = valid_expert(p, first_choice + turn * kWarpSize);
#pragma unroll
  for (int turn = 0; turn < Plan::kTurns; ++turn) {
    const uint32_t equal = __match_any_sync(0xffffffffu, expert[turn]);
    const int before = __popc(equal & ((1u << lane) - 1));
    const int earlier = expert[turn] >= 0 ? counts[warp][expert[turn]] : 0;
    __syncwarp();
    if (expert[turn] >= 0 && before == 0) counts[warp][expert[turn]] = static_cast<uint16_t>(earlier + __popc(equal));
    __syncwarp();
    rank[turn] = earlier + before;
  }
  __syncthreads();

  const int own = threadIdx.x;  // this thread's expert
  int total = 0, in_earlier_chunks = 0;
  if (own < p.num_experts) {
    for (int w = 0; w < warps; ++w) {
      const int count = counts[w][own];
      counts[w][own] = static_cast<uint16_t>(total);
      total += count;
    }
    if (num_chunks > 1) {
      total = 0;
      for (int chunk = 0; chunk < num_chunks; ++chunk) {
        if (chunk == static_cast<int>(blockIdx.x)) in_earlier_chunks = total;
        total += p.chunk_counts[chunk * p.num_experts + own];
      }
    }
  }
  const int start = sum_before(total, warp_sums);
  if (own < p.num_experts) first_row[own] = start + in_earlier_chunks;
  if (blockIdx.x == 0) {
    const int num_groups = (total + p.group_tokens - 1) / p.group_tokens;
    const int first_group = sum_before(num_groups, warp_sums);
    if (own < p.num_experts) {
      p.expert_starts[own] = start;
      // As even as multiples of eight are: the tensor cores pay for whole eights.
      const int rows = num_groups > 0 ? ((total + num_groups - 1) / num_groups + 7) / 8 * 8 : 0;
      for (int i = 0; i < num_groups; ++i) {
        p.groups[1 + first_group + i] = make_int4(own, start + i * rows, min(rows, total - i * rows), 0);
      }
      if (own == p.num_experts - 1) {
        p.expert_starts[p.num_experts] = start + total;
        p.groups[0] = make_int4(first_group + num_groups, 0, 0, 0);
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int turn = 0; turn < Plan::kTurns; ++turn) {
    const int choice = first_choice + turn * kWarpSize;
    if (choice >= p.num_choices) continue;
    int row = -1;
    if (expert[turn] >= 0) row = first_row[expert[turn]] + counts[warp][expert[turn]] + rank[turn];
    p.row_of[choice] = row;
  }
}

constexpr int kSortThreads = 128;

__global__ void __launch_bounds__(kSortThreads) experts_sort_kernel(const ExpertsSortParams p) {
  const int64_t token = blockIdx.x;
  const int lane = threadIdx.x % kWarpSize;
  wait_for_previous_kernel();
  let_dependents_launch();
  const uint4* x = reinterpret_cast<const uint4*>(p.x + token * p.x_stride);
  const int num_vecs = p.hidden / 8;
  const int own_row = lane < p.top_k ? p.row_of[token * p.top_k + lane] : -1;
  constexpr int kVecs = 2;
  for (int base = 0; base < num_vecs; base += kVecs * kSortThreads) {
    uint4 vecs[kVecs];
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      const int idx = base + v * kSortThreads + threadIdx.x;
      if (idx < num_vecs) vecs[v] = x[idx];
    }
    for (int choice = 0; choice < p.top_k; ++choice) {
      const int row = __shfl_sync(0xffffffffu, own_row, choice);
      if (row < 0) continue;
      uint4* sorted = reinterpret_cast<uint4*>(p.sorted + int64_t{row} * p.hidden);
#pragma unroll
      for (int v = 0; v < kVecs; ++v) {
        const int idx = base + v * kSortThreads + threadIdx.x;
        if (idx < num_vecs) sorted[idx] = vecs[v];
      }
    }
  }
}

}  // namespace

int experts_plan_chunks(int num_choices) { return (num_choices + Plan::kChunk - 1) / Plan::kChunk; }

cudaError_t launch_experts_plan(const ExpertsPlanParams& p, cudaStream_t stream) {
  const int num_chunks = experts_plan_chunks(p.num_choices);
  if (num_chunks > 1) {
    const cudaError_t error =
        launch_kernel(experts_count_kernel, dim3(num_chunks), Plan::kThreads, stream, {.overlaps = true}, p);
    if (error != cudaSuccess) return error;
  }
  return launch_kernel(experts_place_kernel, dim3(num_chunks), Plan::kThreads, stream, {.overlaps = true}, p,
                       num_chunks);
}

cudaError_t launch_experts_sort(const ExpertsSortParams& p, cudaStream_t stream) {
  return launch_kernel(experts_sort_kernel, dim3(p.num_tokens), kSortThreads, stream, {.overlaps = true}, p);
}

}  // namespace rorqual
