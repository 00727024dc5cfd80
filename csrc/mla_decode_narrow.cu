// mla_decode_narrow.cu: absorbed MLA decode for up to 16 or 32 (query token, head) rows a sequence.
//
// Few rows make the work memory-bound: 72 KiB a block of 64 tokens against 2 * rows * 1,088 * 64 FLOP. What counts
// is to keep loads in flight. Both products are transposed, so that the tensor cores' fixed side of 64 is the
// tokens (scores) or the value columns (output), and the rows, however few, are the free side N:
//   S^T [64 tokens x N] = K [64 x 576] Q^T,   O^T [512 x N] += V^T [512 x 64 tokens] P^T [64 x N].
// Tiling:  one CTA a part of the plan and tile of N rows: a warp that loads blocks, two that load queries, and one
//          warpgroup that computes. Two blocks of 72 KiB and two segments' queries in shared memory; O^T is 4 N
//          registers a thread. What is older than the step (plan, block tables, earlier blocks) is read before the
//          previous kernel has ended.
// Traffic: 73,728 B a block, once a tile; 1,152 B of query a row and segment; 2,048 B written a row and segment.
// Shared memory reads by the tensor cores, (64 + N) * 32 B per 64 x N x 16 product, stay under the HBM time.
// Checked against rorqual/kernels/reference_paged.py::mla_decode_paged.
#include "rorqual/launch_kernel.cuh"
#include "rorqual/mla_decode.cuh"
#include "rorqual/tma.cuh"
#include "rorqual/wgmma.cuh"

namespace rorqual {
namespace {

// kJoins: splits are joined within their group as they end (group_splits > 1); the group's sums take as many registers
// again.
template <int kRowsArg, bool kJoinsArg>
struct Narrow {
  static constexpr int kRows = kRowsArg;
  static constexpr bool kJoins = kJoinsArg;
  static constexpr int kComputeWarps = 4, kComputeThreads = kComputeWarps * kWarpSize;
  static constexpr int kQueryWarps = 2;
  static constexpr int kThreads = kComputeThreads + (1 + kQueryWarps) * kWarpSize;  // one warp loads blocks
  static constexpr int kStages = 2;                   // of blocks, and of queries
  static constexpr int kColGroups = kRows / 8;        // accumulator groups of 8 rows of Q
  static constexpr int kScores = kRows / 2;           // accumulator registers of a 64 x kRows product
  static constexpr int kOwnRows = 2 * kColGroups;     // rows of Q whose columns a thread holds
  static constexpr int kQueryChunkBytes = kRows * Mla::kChunkRowBytes;
  static constexpr int kQueryBytes = Mla::kChunks * kQueryChunkBytes;

  static constexpr int kQueryOffset = kStages * Mla::kBlockBytes;
  static constexpr int kProbsOffset = kQueryOffset + kStages * kQueryBytes;          // [kRows][64 tokens], swizzled
  static constexpr int kReduceOffset = kProbsOffset + kRows * Mla::kChunkRowBytes;   // maxima: [4 warps][kRows] float
  static constexpr int kSumsOffset = kReduceOffset + kComputeWarps * kRows * 4;      // and sums
  static constexpr int kBarrierOffset = kSumsOffset + kComputeWarps * kRows * 4;
  static constexpr int kSmemBytes = kBarrierOffset + 4 * kStages * 8;
  static_assert(kQueryOffset % 1024 == 0 && kQueryBytes % 1024 == 0 && kProbsOffset % 1024 == 0,
                "swizzle atoms are 1,024-byte aligned");
  static_assert(kSmemBytes + 1024 <= 232448);
};

// What the warps of a CTA tell each other; [kStages] each.
struct NarrowBarriers {
  uint64_t *block_full, *block_empty, *query_full, *query_empty;
};

template <int kTransA, int kN>
__device__ __forceinline__ void wgmma_n(float (&d)[kN], uint64_t a, uint64_t b, int accumulate) {
  if constexpr (kN == 8) {
    wgmma_m64n16k16_ss<kTransA, 0>(d, a, b, accumulate);
  } else {
    wgmma_m64n32k16_ss<kTransA, 0>(d, a, b, accumulate);
  }
}

template <class T>
__device__ __forceinline__ void load_blocks(const MlaDecodeParams& p, char* smem, const NarrowBarriers& barriers,
                                            int part, int tile_row) {
  const int lane = threadIdx.x % kWarpSize;
  SegmentWalk walk(p, part, tile_row);
  Segment segment, next_segment;
  BlockIds ids, next_ids;
  bool more = walk.next(segment), waited = false;
  if (more) ids.start(p, segment);
  uint32_t step = 0;
  const uint64_t l2_policy = p.num_tiles == 1 ? kEvictFirst : kEvictNormal;  // other tiles read the same blocks
  while (more) {
    const int new_block = first_new_block(segment);
    for (int block = segment.begin; block < segment.end; ++block, ++step) {
      const int id = ids.id(block);
      const uint32_t stage = step % T::kStages, phase = step / T::kStages % 2;
      if (!waited && block >= new_block) {
        wait_for_previous_kernel();
        waited = true;
      }
      mbarrier_wait(&barriers.block_empty[stage], phase ^ 1);
      if (lane == 0) {
        mbarrier_arrive_expect_tx(&barriers.block_full[stage], Mla::kBlockBytes);
        tma_load_5d(smem + stage * Mla::kBlockBytes, &p.cache_map, &barriers.block_full[stage], 0, 0, 0, 0, id,
                    l2_policy);
      }
      __syncwarp();
      if (block == segment.begin) {  // while there is time: what follows this segment
        more = walk.next(next_segment);
        if (more) next_ids.start(p, next_segment);
      }
    }
    segment = next_segment;
    ids = next_ids;
  }
}

template <class T>
__device__ __forceinline__ void load_queries(const MlaDecodeParams& p, char* smem, const NarrowBarriers& barriers,
                                             int part, int tile_row, int warp) {
  SegmentWalk walk(p, part, tile_row);
  Segment segment;
  bool more = walk.next(segment);
  wait_for_previous_kernel();
  for (uint32_t step = 0; more; ++step) {
    const uint32_t stage = step % T::kStages, phase = step / T::kStages % 2;
    mbarrier_wait(&barriers.query_empty[stage], phase ^ 1);
    start_query<T::kRows>(smem + T::kQueryOffset + stage * T::kQueryBytes, p, segment, tile_row, warp,
                          T::kQueryWarps);
    more = walk.next(segment);
    finish_query();
    mbarrier_arrive(&barriers.query_full[stage]);
  }
}

template <class T>
__device__ __forceinline__ void compute(const MlaDecodeParams& p, char* smem, const NarrowBarriers& barriers, int part,
                                        int tile_row) {
  constexpr int kBarrier = 1;
  const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
  const int group = lane / 4, quad = lane % 4;
  char* probs_smem = smem + T::kProbsOffset;
  float* reduce = reinterpret_cast<float*>(smem + T::kReduceOffset);
  float* sums = reinterpret_cast<float*>(smem + T::kSumsOffset);
  const uint64_t probs_desc = swizzle128_desc(warp_uniform(smem_addr(probs_smem)));
  // Row of Q that a thread's value i of kOwnRows belongs to.
  const auto own_row = [&](int i) { return 8 * (i / 2) + 2 * quad + i % 2; };

  SegmentWalk walk(p, part, tile_row);
  Segment segment, next_segment;
  float row_max[T::kOwnRows], row_sum[T::kOwnRows];  // of a thread's part of the rows, until sum_rows
  // The next write to `sums` is behind the barriers of the next block.
  const auto sum_rows = [&] {
#pragma unroll
    for (int mask = 4; mask < kWarpSize; mask *= 2) {
#pragma unroll
      for (int i = 0; i < T::kOwnRows; ++i) row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], mask);
    }
    if (group == 0) {
#pragma unroll
      for (int i = 0; i < T::kOwnRows; ++i) sums[warp * T::kRows + own_row(i)] = row_sum[i];
    }
    named_barrier_sync(kBarrier, T::kComputeThreads);
#pragma unroll
    for (int i = 0; i < T::kOwnRows; ++i) {
      row_sum[i] = 0.f;
#pragma unroll
      for (int w = 0; w < T::kComputeWarps; ++w) row_sum[i] += sums[w * T::kRows + own_row(i)];
    }
  };
  uint32_t step = 0, query_step = 0;
  bool more = walk.next(segment);
  wait_for_previous_kernel();  // also who has nothing to do: this kernel must not end before that one
  let_dependents_launch();
  for (; more; segment = next_segment, ++query_step) {
    const uint32_t query_stage = query_step % T::kStages, query_phase = query_step / T::kStages % 2;
    const uint64_t q_desc =
        swizzle128_desc(warp_uniform(smem_addr(smem + T::kQueryOffset + query_stage * T::kQueryBytes)));
    int limit[T::kOwnRows];
#pragma unroll
    for (int i = 0; i < T::kOwnRows; ++i) {
      limit[i] = Row(p, segment, tile_row + own_row(i)).limit;
      row_max[i] = neg_inf();
      row_sum[i] = 0.f;
    }
    float group_max[T::kOwnRows], group_sum[T::kOwnRows], group_out[T::kJoins ? Mla::kLatentChunks : 1][T::kScores];
    if constexpr (T::kJoins) {
#pragma unroll
      for (int i = 0; i < T::kOwnRows; ++i) {
        group_max[i] = neg_inf();
        group_sum[i] = 0.f;
      }
#pragma unroll
      for (int c = 0; c < Mla::kLatentChunks; ++c) {
#pragma unroll
        for (int i = 0; i < T::kScores; ++i) group_out[c][i] = 0.f;
      }
    }
    // A split of a sequence of several, and not a whole group: to be joined by the combination.
    const bool single = T::kJoins && walk.split_blocks() == p.split_blocks && segment.num_splits > 1;
    // Up to here every valid row may attend to everything.
    const int all_limit = max(segment.kv_len - segment.q_len + 1, 0);
    float out[Mla::kLatentChunks][T::kScores];
#pragma unroll
    for (int c = 0; c < Mla::kLatentChunks; ++c) {
#pragma unroll
      for (int i = 0; i < T::kScores; ++i) out[c][i] = 0.f;
    }
    int join_at = min(segment.begin + p.split_blocks, segment.end);  // the end of the split at work, if joined here
    more = walk.next(next_segment);  // here, where the query and the first block are still under way
    mbarrier_wait(&barriers.query_full[query_stage], query_phase);

    for (int block = segment.begin; block < segment.end; ++block, ++step) {
      const uint32_t stage = step % T::kStages, phase = step / T::kStages % 2;
      char* kv_smem = smem + stage * Mla::kBlockBytes;
      const uint64_t kv_desc = swizzle128_desc(warp_uniform(smem_addr(kv_smem)), 16, Mla::kGroupBytes);
      mbarrier_wait(&barriers.block_full[stage], phase);

      float scores[T::kScores];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Mla::kChunks * Mla::kStepsPerChunk; ++k) {
        const int chunk = k / Mla::kStepsPerChunk, inner = k % Mla::kStepsPerChunk * 32;
        wgmma_n<0>(scores, advance_desc(kv_desc, chunk * Mla::kAtomBytes + inner),
                   advance_desc(q_desc, chunk * T::kQueryChunkBytes + inner), k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_fence_operand(scores);
      if (lane == 0 && block + 1 == segment.end) mbarrier_arrive(&barriers.query_empty[query_stage]);

      const int first_token = block * Mla::kBlockTokens;
      if (first_token + Mla::kBlockTokens > segment.kv_len) {
        clear_tail<Mla::kGroupBytes, Mla::kAtomBytes>(kv_smem, segment.kv_len - first_token, thread,
                                                      T::kComputeThreads);
      }
      // scores[4j + 2h + e]: token 16 warp + group + 8 h, row 8 j + 2 quad + e = own_row(2j + e).
      if (first_token + Mla::kBlockTokens > all_limit) {
        const int token = first_token + 16 * warp + group;
#pragma unroll
        for (int i = 0; i < T::kScores; ++i) {
          const int own = i / 4 * 2 + i % 2;
          if (token + (i % 4 >= 2 ? 8 : 0) >= limit[own]) scores[i] = neg_inf();
        }
      }
      float block_max[T::kOwnRows];
#pragma unroll
      for (int i = 0; i < T::kOwnRows; ++i) {
        const int at = i / 2 * 4 + i % 2;
        block_max[i] = fmaxf(scores[at], scores[at + 2]);
      }
#pragma unroll
      for (int mask = 4; mask < kWarpSize; mask *= 2) {
#pragma unroll
        for (int i = 0; i < T::kOwnRows; ++i) {
          block_max[i] = fmaxf(block_max[i], __shfl_xor_sync(0xffffffffu, block_max[i], mask));
        }
      }
      if (group == 0) {
#pragma unroll
        for (int i = 0; i < T::kOwnRows; ++i) reduce[warp * T::kRows + own_row(i)] = block_max[i];
      }
      named_barrier_sync(kBarrier, T::kComputeThreads);  // and every warp has finished the last block's products

      float rescale[T::kOwnRows], shift[T::kOwnRows];
#pragma unroll
      for (int i = 0; i < T::kOwnRows; ++i) {
        float new_max = row_max[i];
#pragma unroll
        for (int w = 0; w < T::kComputeWarps; ++w) new_max = fmaxf(new_max, reduce[w * T::kRows + own_row(i)]);
        // A row that has seen nothing yet keeps a finite base, so that no -inf is subtracted from itself.
        const float base = new_max == neg_inf() ? 0.f : new_max;
        shift[i] = base * p.scale_log2;
        // Not from the shift, which has been rounded: exactly one where the maximum stays.
        rescale[i] = exp2_approx((row_max[i] - base) * p.scale_log2);
        row_max[i] = new_max;
        row_sum[i] *= rescale[i];
      }
#pragma unroll
      for (int i = 0; i < T::kScores; ++i) {
        const int own = i / 4 * 2 + i % 2;
        // Rounded before it is summed, so that the weights that meet the values sum to one.
        const float weight = round_bf16(exp2_approx(scores[i] * p.scale_log2 - shift[own]));
        row_sum[own] += weight;
        const int token = 16 * warp + group + (i % 4 >= 2 ? 8 : 0), row = own_row(own);
        char* at = probs_smem + row * Mla::kChunkRowBytes + ((token / 8) ^ (row % 8)) * 16 + token % 8 * 2;
        *reinterpret_cast<__nv_bfloat16*>(at) = __float2bfloat16_rn(weight);
      }
#pragma unroll
      for (int c = 0; c < Mla::kLatentChunks; ++c) {
#pragma unroll
        for (int i = 0; i < T::kScores; ++i) out[c][i] *= rescale[i / 4 * 2 + i % 2];
      }
      fence_proxy_async();
      named_barrier_sync(kBarrier, T::kComputeThreads);

#pragma unroll
      for (int c = 0; c < Mla::kLatentChunks; ++c) wgmma_fence_operand(out[c]);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Mla::kTokenSteps; ++k) {
#pragma unroll
        for (int c = 0; c < Mla::kLatentChunks; ++c) {
          wgmma_n<1>(out[c], advance_desc(kv_desc, c * Mla::kAtomBytes + k * 2 * Mla::kGroupBytes),
                     advance_desc(probs_desc, k * 32), 1);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int c = 0; c < Mla::kLatentChunks; ++c) wgmma_fence_operand(out[c]);
      if (lane == 0) mbarrier_arrive(&barriers.block_empty[stage]);
      if constexpr (T::kJoins) {
        if (!single && block + 1 == join_at) {
          join_at = min(join_at + p.split_blocks, segment.end);
          sum_rows();
          float old_weight[T::kOwnRows], new_weight[T::kOwnRows];
#pragma unroll
          for (int i = 0; i < T::kOwnRows; ++i) {
            const SplitJoin join(group_max[i], row_max[i], p.scale_log2);
            group_max[i] = join.max;
            group_sum[i] = join(group_sum[i], row_sum[i]);
            old_weight[i] = join.old_weight;
            new_weight[i] = join.new_weight;
            row_max[i] = neg_inf();
            row_sum[i] = 0.f;
          }
#pragma unroll
          for (int c = 0; c < Mla::kLatentChunks; ++c) {
#pragma unroll
            for (int i = 0; i < T::kScores; ++i) {
              const int own = i / 4 * 2 + i % 2;
              group_out[c][i] = __fmaf_rn(out[c][i], new_weight[own], __fmul_rn(group_out[c][i], old_weight[own]));
              out[c][i] = 0.f;
            }
          }
        }
      }
    }

    if constexpr (T::kJoins) {
      if (!single) {
#pragma unroll
        for (int i = 0; i < T::kOwnRows; ++i) {
          row_max[i] = group_max[i];
          row_sum[i] = group_sum[i];
        }
#pragma unroll
        for (int c = 0; c < Mla::kLatentChunks; ++c) {
#pragma unroll
          for (int i = 0; i < T::kScores; ++i) out[c][i] = group_out[c][i];
        }
      } else {
        sum_rows();
      }
    } else {
      sum_rows();
    }
    const int64_t partial_rows = int64_t{p.num_tiles} * T::kRows;
#pragma unroll
    for (int i = 0; i < T::kOwnRows; ++i) {
      const float inverse = single ? 1.f : inverse_of(row_sum[i]);
      const float lse_log2 = single ? row_max[i] : lse_of(row_max[i], row_sum[i], p.scale_log2);
      const int local_row = tile_row + own_row(i);
      const Row row(p, segment, local_row);
      if (!row.valid) continue;
      // out[c][4j + 2h + e]: column 64 c + 16 warp + group + 8 h of row own_row(2j + e).
      const int column = 16 * warp + group, at = i / 2 * 4 + i % 2;
      if (segment.num_splits == 1) {
        __nv_bfloat16* dst = p.out + row.token * p.out_token_stride + row.head * p.out_head_stride + column;
#pragma unroll
        for (int c = 0; c < Mla::kLatentChunks; ++c) {
          dst[c * Mla::kChunkCols] = __float2bfloat16_rn(out[c][at] * inverse);
          dst[c * Mla::kChunkCols + 8] = __float2bfloat16_rn(out[c][at + 2] * inverse);
        }
        if (p.lse != nullptr && warp == 0 && group == 0) {
          p.lse[int64_t{row.token} * p.num_heads + row.head] = lse_log2 * (1.f / kLog2E);
        }
      } else if (segment.split < p.split_capacity) {
        const int64_t partial_row = segment.split * partial_rows + local_row;
        float* dst = p.partial_out + partial_row * Mla::kLatent + column;
#pragma unroll
        for (int c = 0; c < Mla::kLatentChunks; ++c) {
          dst[c * Mla::kChunkCols] = out[c][at] * inverse;
          dst[c * Mla::kChunkCols + 8] = out[c][at + 2] * inverse;
        }
        if (warp == 0 && group == 0) p.partial_lse[partial_row] = lse_log2;
        if (single && warp == 0 && group == 0) p.partial_sum[partial_row] = row_sum[i];
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) mla_decode_narrow_kernel(const __grid_constant__ MlaDecodeParams p) {
  extern __shared__ char smem_raw[];
  char* smem = smem_raw + (1024 - smem_addr(smem_raw) % 1024) % 1024;
  uint64_t* bars = reinterpret_cast<uint64_t*>(smem + T::kBarrierOffset);
  const NarrowBarriers barriers{bars, bars + T::kStages, bars + 2 * T::kStages, bars + 3 * T::kStages};
  const int tile_row = blockIdx.x * T::kRows, part = blockIdx.y, warp = threadIdx.x / kWarpSize;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.cache_map);
    for (int stage = 0; stage < T::kStages; ++stage) {
      mbarrier_init(&barriers.block_full[stage], 1);
      mbarrier_init(&barriers.block_empty[stage], T::kComputeWarps);
      mbarrier_init(&barriers.query_full[stage], T::kQueryWarps * kWarpSize);
      mbarrier_init(&barriers.query_empty[stage], T::kComputeWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (warp < T::kComputeWarps) {
    compute<T>(p, smem, barriers, part, tile_row);
  } else if (warp == T::kComputeWarps) {
    load_blocks<T>(p, smem, barriers, part, tile_row);
  } else {
    load_queries<T>(p, smem, barriers, part, tile_row, warp - T::kComputeWarps - 1);
  }
}

template <class T>
cudaError_t launch(const MlaDecodeParams& p, cudaStream_t stream) {
  const dim3 grid(p.num_tiles, p.num_parts);
  return launch_kernel(mla_decode_narrow_kernel<T>, grid, T::kThreads, stream,
                       {.smem_bytes = T::kSmemBytes + 1024, .overlaps = true}, p);  // room to align the first atom
}

}  // namespace

cudaError_t launch_mla_decode_narrow16(const MlaDecodeParams& p, cudaStream_t stream) {
  return p.group_splits > 1 ? launch<Narrow<16, true>>(p, stream) : launch<Narrow<16, false>>(p, stream);
}
cudaError_t launch_mla_decode_narrow32(const MlaDecodeParams& p, cudaStream_t stream) {
  return launch<Narrow<32, false>>(p, stream);
}

}  // namespace rorqual
