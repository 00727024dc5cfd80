// mla_decode_narrow.cu: absorbed MLA decode for up to 16 or 32 (query token, head) rows a sequence.
//
// Few rows make the work memory-bound: 72 KiB a block of 64 tokens against 2 * rows * 1,088 * 64 FLOP. What counts
// is to keep loads in flight. Both products are transposed, so that the tensor cores' fixed side of 64 is the
// tokens (scores) or the value columns (output), and the rows, however few, are the free side N:
//   S^T [64 tokens x N] = K [64 x 576] Q^T,   O^T [512 x N] += V^T [512 x 64 tokens] P^T [64 x N].
// Tiling:  one CTA a part of the plan and tile of N rows: a producer warp, and one warpgroup that computes. Two blocks
//          of 72 KiB in shared memory; O^T is 4 N registers a thread.
// Traffic: 73,728 B a block, once a tile; 1,152 B of query a row and segment; 2,048 B written a row and segment.
// Shared memory reads by the tensor cores, (64 + N) * 32 B per 64 x N x 16 product, stay under the HBM time.
// Tried on an H200 and left out: bringing blocks ahead of the two in flight into L2. 128 sequences of 8,192 took 379 us with
// two blocks ahead and 491 with four, instead of 312: what is fetched ahead crosses HBM nearly twice.
// Checked against rorqual/kernels/reference_paged.py::mla_decode_paged.
#include "rorqual/launch_kernel.cuh"
#include "rorqual/mla_decode.cuh"
#include "rorqual/tma.cuh"
#include "rorqual/wgmma.cuh"

namespace rorqual {
namespace {

template <int kRowsArg>
struct Narrow {
  static constexpr int kRows = kRowsArg;
  static constexpr int kComputeWarps = 4, kComputeThreads = kComputeWarps * kWarpSize;
  static constexpr int kThreads = kComputeThreads + kWarpSize;
  static constexpr int kStages = 2;
  static constexpr int kColGroups = kRows / 8;        // accumulator groups of 8 rows of Q
  static constexpr int kScores = kRows / 2;           // accumulator registers of a 64 x kRows product
  static constexpr int kOwnRows = 2 * kColGroups;     // rows of Q whose columns a thread holds
  static constexpr int kQueryChunkBytes = kRows * Mla::kChunkRowBytes;

  static constexpr int kQueryOffset = kStages * Mla::kBlockBytes;
  static constexpr int kProbsOffset = kQueryOffset + Mla::kChunks * kQueryChunkBytes;  // [kRows][64 tokens], swizzled
  static constexpr int kReduceOffset = kProbsOffset + kRows * Mla::kChunkRowBytes;     // [4 warps][kRows] float
  static constexpr int kBarrierOffset = kReduceOffset + kComputeWarps * kRows * 4;
  static constexpr int kSmemBytes = kBarrierOffset + 2 * kStages * 8;
  static_assert(kQueryOffset % 1024 == 0 && kProbsOffset % 1024 == 0, "swizzle atoms are 1,024-byte aligned");
  static_assert(kSmemBytes + 1024 <= 232448);
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
__device__ __forceinline__ void produce(const MlaDecodeParams& p, char* smem, uint64_t* full, uint64_t* empty, int part,
                                        int tile_row) {
  const int lane = threadIdx.x % kWarpSize;
  SegmentWalk walk(p, part, tile_row);
  Segment segment;
  uint32_t step = 0;
  while (walk.next(segment)) {
    const int* table = p.block_tables + segment.seq * p.block_table_stride;
    int ids = 0;  // lane l: the id of block base + l
    for (int block = segment.begin; block < segment.end; ++block, ++step) {
      const int ahead = (block - segment.begin) % kWarpSize;
      if (ahead == 0) ids = block + lane < segment.end ? table[block + lane] : 0;
      const int id = __shfl_sync(0xffffffffu, ids, ahead);
      const uint32_t stage = step % T::kStages, phase = step / T::kStages % 2;
      mbarrier_wait(&empty[stage], phase ^ 1);
      if (lane == 0) {
        mbarrier_arrive_expect_tx(&full[stage], Mla::kBlockBytes);
#pragma unroll
        for (int chunk = 0; chunk < Mla::kChunks; ++chunk) {
          tma_load_3d(smem + stage * Mla::kBlockBytes + chunk * Mla::kChunkBytes, &p.cache_map, &full[stage],
                      chunk * Mla::kChunkCols, 0, id);
        }
      }
      __syncwarp();
    }
  }
}

template <class T>
__device__ __forceinline__ void compute(const MlaDecodeParams& p, char* smem, uint64_t* full, uint64_t* empty, int part,
                                        int tile_row) {
  constexpr int kBarrier = 1;
  const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
  const int group = lane / 4, quad = lane % 4;
  char* q_smem = smem + T::kQueryOffset;
  char* probs_smem = smem + T::kProbsOffset;
  float* reduce = reinterpret_cast<float*>(smem + T::kReduceOffset);
  const uint64_t q_desc = swizzle128_desc(smem_addr(q_smem));
  const uint64_t probs_desc = swizzle128_desc(smem_addr(probs_smem));
  // Row of Q that a thread's value i of kOwnRows belongs to.
  const auto own_row = [&](int i) { return 8 * (i / 2) + 2 * quad + i % 2; };

  SegmentWalk walk(p, part, tile_row);
  Segment segment, next_segment;
  uint32_t step = 0;
  for (bool more = walk.next(segment); more; segment = next_segment) {
    // Every warp has left the last segment's scores behind a barrier, so its query may be overwritten.
    load_query<T::kRows>(q_smem, p, segment, tile_row, thread, T::kComputeThreads);
    int limit[T::kOwnRows];
    float row_max[T::kOwnRows], row_sum[T::kOwnRows];
#pragma unroll
    for (int i = 0; i < T::kOwnRows; ++i) {
      limit[i] = Row(p, segment, tile_row + own_row(i)).limit;
      row_max[i] = neg_inf();
      row_sum[i] = 0.f;
    }
    // Up to here every valid row may attend to everything.
    const int all_limit = max(segment.kv_len - segment.q_len + 1, 0);
    float out[Mla::kLatentChunks][T::kScores];
#pragma unroll
    for (int c = 0; c < Mla::kLatentChunks; ++c) {
#pragma unroll
      for (int i = 0; i < T::kScores; ++i) out[c][i] = 0.f;
    }
    fence_proxy_async();
    named_barrier_sync(kBarrier, T::kComputeThreads);
    more = walk.next(next_segment);  // here, where the first block is still under way

    for (int block = segment.begin; block < segment.end; ++block, ++step) {
      const uint32_t stage = step % T::kStages, phase = step / T::kStages % 2;
      char* kv_smem = smem + stage * Mla::kBlockBytes;
      const uint64_t kv_desc = swizzle128_desc(smem_addr(kv_smem));
      mbarrier_wait(&full[stage], phase);

      float scores[T::kScores];
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Mla::kChunks * Mla::kStepsPerChunk; ++k) {
        const int chunk = k / Mla::kStepsPerChunk, inner = k % Mla::kStepsPerChunk * 32;
        wgmma_n<0>(scores, kv_desc + (chunk * Mla::kChunkBytes + inner) / 16,
                   q_desc + (chunk * T::kQueryChunkBytes + inner) / 16, k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_fence_operand(scores);

      const int first_token = block * Mla::kBlockTokens;
      if (first_token + Mla::kBlockTokens > segment.kv_len) {
        clear_tail(kv_smem, segment.kv_len - first_token, 0, Mla::kLatentChunks, thread, T::kComputeThreads);
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
        shift[i] = new_max == neg_inf() ? 0.f : new_max * p.scale_log2;
        rescale[i] = exp2_approx(row_max[i] * p.scale_log2 - shift[i]);
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
          wgmma_n<1>(out[c], kv_desc + (c * Mla::kChunkBytes + k * 16 * Mla::kChunkRowBytes) / 16,
                     probs_desc + k * 32 / 16, 1);
        }
      }
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int c = 0; c < Mla::kLatentChunks; ++c) wgmma_fence_operand(out[c]);
      if (lane == 0) mbarrier_arrive(&empty[stage]);
    }

#pragma unroll
    for (int mask = 4; mask < kWarpSize; mask *= 2) {
#pragma unroll
      for (int i = 0; i < T::kOwnRows; ++i) row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], mask);
    }
    if (group == 0) {
#pragma unroll
      for (int i = 0; i < T::kOwnRows; ++i) reduce[warp * T::kRows + own_row(i)] = row_sum[i];
    }
    named_barrier_sync(kBarrier, T::kComputeThreads);
    const int64_t partial_rows = int64_t{p.num_tiles} * T::kRows;
#pragma unroll
    for (int i = 0; i < T::kOwnRows; ++i) {
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < T::kComputeWarps; ++w) sum += reduce[w * T::kRows + own_row(i)];
      const float inverse = sum > 0.f ? 1.f / sum : sum;  // keeps a NaN
      const float lse_log2 = sum == 0.f ? neg_inf() : row_max[i] * p.scale_log2 + log2f(sum);
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
      }
    }
    // The next write to `reduce` is behind the next segment's first barrier.
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1) mla_decode_narrow_kernel(const __grid_constant__ MlaDecodeParams p) {
  extern __shared__ char smem_raw[];
  char* smem = smem_raw + (1024 - smem_addr(smem_raw) % 1024) % 1024;
  uint64_t* full = reinterpret_cast<uint64_t*>(smem + T::kBarrierOffset);
  uint64_t* empty = full + T::kStages;
  const int tile_row = blockIdx.x * T::kRows, part = blockIdx.y;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.cache_map);
    for (int stage = 0; stage < T::kStages; ++stage) {
      mbarrier_init(&full[stage], 1);
      mbarrier_init(&empty[stage], T::kComputeWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_dependents_launch();
  if (threadIdx.x < T::kComputeThreads) {
    compute<T>(p, smem, full, empty, part, tile_row);
  } else {
    produce<T>(p, smem, full, empty, part, tile_row);
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
  return launch<Narrow<16>>(p, stream);
}
cudaError_t launch_mla_decode_narrow32(const MlaDecodeParams& p, cudaStream_t stream) {
  return launch<Narrow<32>>(p, stream);
}

}  // namespace rorqual
