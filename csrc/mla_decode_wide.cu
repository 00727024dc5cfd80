// mla_decode_wide.cu: absorbed MLA decode for tiles of 64 (query token, head) rows.
//
// With 64 rows and more the work is compute-bound: 2 * 64 * 1,088 * 64 FLOP for 72 KiB a block and tile.
// Tiling:  one CTA a part of the plan and tile of 64 rows: two warpgroups that compute and a producer warp. Blocks go
//          in pairs. Warpgroup w scores block w of the pair, S_w = Q K_w^T [64 x 64]; both agree on the rows' maxima, so
//          one rescaling serves the pair; then warpgroup w adds to its half of the value columns, [64 x 256] in
//          128 registers a thread, first its own P_w V_w out of registers, then the other's P from shared memory.
//          Shared memory holds Q and the pair, 216 KiB. P_w lies where block w's rope columns were.
//          A slot is given back in two parts: early, the columns that warpgroup w alone still needed, and late.
// Traffic: 73,728 B a block and tile (tiles of a sequence run side by side and share it in L2); 73,728 B of query and
//          65,536 B (bf16) or 131,072 B (a split) of output a segment.
// An odd block is paired with itself, its second scores masked.
// Tried on an H200 and left out, being slower (128 heads, 128 sequences of 8,192): pairs of tiles as clusters that multicast
// each half of a block to both, 772 us instead of 653; bringing blocks ahead into L2, 672 to 719 us.
// Checked against rorqual/kernels/reference_paged.py::mla_decode_paged.
#include "rorqual/launch_kernel.cuh"
#include "rorqual/mla_decode.cuh"
#include "rorqual/tma.cuh"
#include "rorqual/wgmma.cuh"

namespace rorqual {
namespace {

struct Wide {
  static constexpr int kRows = 64;
  static constexpr int kGroupThreads = 128, kGroupWarps = 4;
  static constexpr int kComputeThreads = 2 * kGroupThreads;
  static constexpr int kThreads = kComputeThreads + kGroupThreads;  // a whole warpgroup, so that it can give up registers
  static constexpr int kComputeRegisters = 232, kProducerRegisters = 40;
  static_assert(kComputeThreads * kComputeRegisters + kGroupThreads * kProducerRegisters <= 65536);
  static constexpr int kHalfChunks = Mla::kLatentChunks / 2, kHalfCols = Mla::kLatent / 2;
  static constexpr int kRopeChunk = Mla::kLatentChunks;
  static constexpr int kScores = Mla::kBlockTokens / 2;  // registers of a 64 x 64 accumulator
  static constexpr int kOut = kHalfCols / 2;             // registers of a 64 x 256 accumulator
  static constexpr int kEarlyBytes = kHalfChunks * Mla::kChunkBytes;
  static constexpr int kLateBytes = Mla::kBlockBytes - kEarlyBytes;

  static constexpr int kQueryOffset = 2 * Mla::kBlockBytes;
  static constexpr int kReduceOffset = kQueryOffset + Mla::kChunks * kRows * Mla::kChunkRowBytes;  // [2][kRows] float
  static constexpr int kBarrierOffset = kReduceOffset + 2 * kRows * 4;
  static constexpr int kSmemBytes = kBarrierOffset + 8 * 8;
  static_assert(kQueryOffset % 1024 == 0 && kSmemBytes + 1024 <= 232448);

  static constexpr int kBarrierAll = 1, kBarrierProbs = 2;  // kBarrierProbs + w: P_w is in shared memory
};

// One barrier for each part of each slot.
struct WideBarriers {
  uint64_t* full;   // [2 slots][early, late]
  uint64_t* empty;  // the same
  __device__ __forceinline__ uint64_t* full_of(int slot, int late) const { return full + slot * 2 + late; }
  __device__ __forceinline__ uint64_t* empty_of(int slot, int late) const { return empty + slot * 2 + late; }
};

__device__ __forceinline__ void produce(const MlaDecodeParams& p, char* smem, const WideBarriers& barriers, int part,
                                        int tile_row) {
  const int lane = threadIdx.x % kWarpSize;
  SegmentWalk walk(p, part, tile_row);
  Segment segment;
  uint32_t phase = 0;
  while (walk.next(segment)) {
    const int* table = p.block_tables + segment.seq * p.block_table_stride;
    int ids = 0;  // lane l: the id of block base + l
    for (int block = segment.begin; block < segment.end; block += 2, phase ^= 1) {
      const int ahead = (block - segment.begin) % kWarpSize;
      if (ahead == 0) ids = block + lane < segment.end ? table[block + lane] : 0;
      const int id0 = __shfl_sync(0xffffffffu, ids, ahead);
      const int id1 = __shfl_sync(0xffffffffu, ids, block + 1 < segment.end ? ahead + 1 : ahead);
#pragma unroll
      for (int turn = 0; turn < 4; ++turn) {  // early parts of both slots, then the late ones
        const int slot = turn % 2, late = turn / 2;
        const int half = late ? 1 - slot : slot;
        mbarrier_wait(barriers.empty_of(slot, late), phase ^ 1);
        if (lane == 0) {
          uint64_t* full = barriers.full_of(slot, late);
          char* dst = smem + slot * Mla::kBlockBytes;
          const int id = slot == 0 ? id0 : id1;
          mbarrier_arrive_expect_tx(full, late ? Wide::kLateBytes : Wide::kEarlyBytes);
          const auto load = [&](int chunk) {
            tma_load_3d(dst + chunk * Mla::kChunkBytes, &p.cache_map, full, chunk * Mla::kChunkCols, 0, id);
          };
#pragma unroll
          for (int i = 0; i < Wide::kHalfChunks; ++i) load(half * Wide::kHalfChunks + i);
          if (late) load(Wide::kRopeChunk);
        }
        __syncwarp();
      }
    }
  }
}

__device__ __forceinline__ void compute(const MlaDecodeParams& p, char* smem, const WideBarriers& barriers, int part,
                                        int tile_row) {
  const int half = threadIdx.x / Wide::kGroupThreads;  // which warpgroup: its block of a pair, its half of the values
  const int thread = threadIdx.x % Wide::kGroupThreads;
  const int warp = thread / kWarpSize, lane = thread % kWarpSize, group = lane / 4, quad = lane % 4;
  char* own_smem = smem + half * Mla::kBlockBytes;
  char* other_smem = smem + (1 - half) * Mla::kBlockBytes;
  char* own_probs = own_smem + Wide::kRopeChunk * Mla::kChunkBytes;
  char* q_smem = smem + Wide::kQueryOffset;
  float* reduce = reinterpret_cast<float*>(smem + Wide::kReduceOffset);
  const uint64_t q_desc = swizzle128_desc(smem_addr(q_smem));
  const uint64_t own_desc = swizzle128_desc(smem_addr(own_smem));
  const uint64_t other_probs_desc = swizzle128_desc(smem_addr(other_smem + Wide::kRopeChunk * Mla::kChunkBytes));
  const int half_bytes = half * Wide::kHalfChunks * Mla::kChunkBytes;
  const uint64_t own_value_desc = swizzle128_desc(smem_addr(own_smem + half_bytes), Mla::kChunkBytes);
  const uint64_t other_value_desc = swizzle128_desc(smem_addr(other_smem + half_bytes), Mla::kChunkBytes);
  const int early_chunk = half * Wide::kHalfChunks, late_chunk = (1 - half) * Wide::kHalfChunks;
  const int own_row[2] = {16 * warp + group, 16 * warp + group + 8};

  SegmentWalk walk(p, part, tile_row);
  Segment segment, next_segment;
  uint32_t phase = 0;
  for (bool more = walk.next(segment); more; segment = next_segment) {
    load_query<Wide::kRows>(q_smem, p, segment, tile_row, threadIdx.x, Wide::kComputeThreads);
    int limit[2];
    float row_max[2], row_sum[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      limit[i] = Row(p, segment, tile_row + own_row[i]).limit;
      row_max[i] = neg_inf();
      row_sum[i] = 0.f;
    }
    const int all_limit = max(segment.kv_len - segment.q_len + 1, 0);
    float out[Wide::kOut];
#pragma unroll
    for (int i = 0; i < Wide::kOut; ++i) out[i] = 0.f;
    fence_proxy_async();
    named_barrier_sync(Wide::kBarrierAll, Wide::kComputeThreads);
    more = walk.next(next_segment);  // here, where the first blocks are still under way

    for (int pair = segment.begin; pair < segment.end; pair += 2, phase ^= 1) {
      const int block = pair + half;
      const bool missing = block >= segment.end;
      const int first_token = (missing ? pair : block) * Mla::kBlockTokens;

      float scores[Wide::kScores];
      mbarrier_wait(barriers.full_of(half, 0), phase);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Wide::kHalfChunks * Mla::kStepsPerChunk; ++k) {
        const int offset = (k / Mla::kStepsPerChunk * Mla::kChunkBytes + k % Mla::kStepsPerChunk * 32) / 16;
        const uint64_t at = early_chunk * (Mla::kChunkBytes / 16) + offset;
        wgmma_m64n64k16_ss<0, 0>(scores, q_desc + at, own_desc + at, k > 0);
      }
      wgmma_commit();
      mbarrier_wait(barriers.full_of(half, 1), phase);
      wgmma_fence();  // without it ptxas serialises the products on both sides of the wait (C7520)
#pragma unroll
      for (int k = 0; k < Wide::kHalfChunks * Mla::kStepsPerChunk; ++k) {
        const int offset = (k / Mla::kStepsPerChunk * Mla::kChunkBytes + k % Mla::kStepsPerChunk * 32) / 16;
        const uint64_t at = late_chunk * (Mla::kChunkBytes / 16) + offset;
        wgmma_m64n64k16_ss<0, 0>(scores, q_desc + at, own_desc + at, 1);
      }
#pragma unroll
      for (int k = 0; k < Mla::kStepsPerChunk; ++k) {
        const uint64_t at = (Wide::kRopeChunk * Mla::kChunkBytes + k * 32) / 16;
        wgmma_m64n64k16_ss<0, 0>(scores, q_desc + at, own_desc + at, 1);
      }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_fence_operand(scores);

      if (first_token + Mla::kBlockTokens > segment.kv_len) {
        clear_tail(own_smem, segment.kv_len - first_token, 0, Mla::kLatentChunks, thread, Wide::kGroupThreads);
        fence_proxy_async();
      }
      // scores[4j + 2h + e]: row own_row[h], token 8 j + 2 quad + e.
      if (missing || first_token + Mla::kBlockTokens > all_limit) {
#pragma unroll
        for (int i = 0; i < Wide::kScores; ++i) {
          const int token = first_token + i / 4 * 8 + 2 * quad + i % 2;
          if (missing || token >= limit[i % 4 / 2]) scores[i] = neg_inf();
        }
      }
      float block_max[2] = {neg_inf(), neg_inf()};
#pragma unroll
      for (int i = 0; i < Wide::kScores; ++i) block_max[i % 4 / 2] = fmaxf(block_max[i % 4 / 2], scores[i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        block_max[i] = fmaxf(block_max[i], __shfl_xor_sync(0xffffffffu, block_max[i], 1));
        block_max[i] = fmaxf(block_max[i], __shfl_xor_sync(0xffffffffu, block_max[i], 2));
        if (quad == 0) reduce[half * Wide::kRows + own_row[i]] = block_max[i];
      }
      // Behind this barrier the maxima are known, all scores are done (so the rope columns may be overwritten)
      // and the tails are clear.
      named_barrier_sync(Wide::kBarrierAll, Wide::kComputeThreads);

      float rescale[2], shift[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float new_max = fmaxf(row_max[i], fmaxf(reduce[own_row[i]], reduce[Wide::kRows + own_row[i]]));
        shift[i] = new_max == neg_inf() ? 0.f : new_max * p.scale_log2;
        rescale[i] = exp2_approx(row_max[i] * p.scale_log2 - shift[i]);
        row_max[i] = new_max;
        row_sum[i] *= rescale[i];
      }
      uint32_t probs[Wide::kScores / 2];
#pragma unroll
      for (int i = 0; i < Wide::kScores; i += 2) {
        const int h = i % 4 / 2;
        probs[i / 2] = pack_bf16(exp2_approx(scores[i] * p.scale_log2 - shift[h]),
                                 exp2_approx(scores[i + 1] * p.scale_log2 - shift[h]));
        row_sum[h] += bf16_low(probs[i / 2]) + bf16_high(probs[i / 2]);
        *reinterpret_cast<uint32_t*>(own_probs + own_row[h] * Mla::kChunkRowBytes + ((i / 4) ^ group) * 16 + quad * 4) =
            probs[i / 2];
      }
      fence_proxy_async();
      named_barrier_arrive(Wide::kBarrierProbs + half, Wide::kComputeThreads);
      // A row's maximum seldom grows once a few blocks are seen, and a product with one changes nothing.
      if (__any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
        for (int i = 0; i < Wide::kOut; ++i) out[i] *= rescale[i % 4 / 2];
      }

      wgmma_fence_operand(out);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Mla::kTokenSteps; ++k) {
        wgmma_m64n256k16_rs<1>(out, probs[4 * k], probs[4 * k + 1], probs[4 * k + 2], probs[4 * k + 3],
                               own_value_desc + k * 16 * Mla::kChunkRowBytes / 16, 1);
      }
      wgmma_commit();
      named_barrier_sync(Wide::kBarrierProbs + 1 - half, Wide::kComputeThreads);
#pragma unroll
      for (int k = 0; k < Mla::kTokenSteps; ++k) {
        wgmma_m64n256k16_ss<0, 1>(out, other_probs_desc + k * 32 / 16,
                                  other_value_desc + k * 16 * Mla::kChunkRowBytes / 16, 1);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (lane == 0) mbarrier_arrive(barriers.empty_of(half, 0));
      wgmma_wait<0>();
      wgmma_fence_operand(out);
      if (lane == 0) mbarrier_arrive(barriers.empty_of(1 - half, 1));
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 2);
      if (quad == 0) reduce[half * Wide::kRows + own_row[i]] = row_sum[i];
    }
    named_barrier_sync(Wide::kBarrierAll, Wide::kComputeThreads);
    const int64_t partial_rows = int64_t{p.num_tiles} * Wide::kRows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = reduce[own_row[i]] + reduce[Wide::kRows + own_row[i]];
      const float inverse = sum > 0.f ? 1.f / sum : sum;  // keeps a NaN
      const float lse_log2 = sum == 0.f ? neg_inf() : row_max[i] * p.scale_log2 + log2f(sum);
      const int local_row = tile_row + own_row[i];
      const Row row(p, segment, local_row);
      if (!row.valid) continue;
      const bool writes_lse = half == 0 && quad == 0;
      // out[4j + 2h + e]: row own_row[h], column 256 half + 8 j + 2 quad + e.
      const int column = half * Wide::kHalfCols + 2 * quad;
      if (segment.num_splits == 1) {
        __nv_bfloat16* dst = p.out + row.token * p.out_token_stride + row.head * p.out_head_stride + column;
#pragma unroll
        for (int j = 0; j < Wide::kHalfCols / 8; ++j) {
          *reinterpret_cast<uint32_t*>(dst + 8 * j) =
              pack_bf16(out[4 * j + 2 * i] * inverse, out[4 * j + 2 * i + 1] * inverse);
        }
        if (p.lse != nullptr && writes_lse) {
          p.lse[int64_t{row.token} * p.num_heads + row.head] = lse_log2 * (1.f / kLog2E);
        }
      } else if (segment.split < p.split_capacity) {
        const int64_t partial_row = segment.split * partial_rows + local_row;
        float* dst = p.partial_out + partial_row * Mla::kLatent + column;
#pragma unroll
        for (int j = 0; j < Wide::kHalfCols / 8; ++j) {
          *reinterpret_cast<float2*>(dst + 8 * j) =
              make_float2(out[4 * j + 2 * i] * inverse, out[4 * j + 2 * i + 1] * inverse);
        }
        if (writes_lse) p.partial_lse[partial_row] = lse_log2;
      }
    }
    // The next write to `reduce` is behind the next segment's first barrier.
  }
}

__global__ void __launch_bounds__(Wide::kThreads, 1) mla_decode_wide_kernel(const __grid_constant__ MlaDecodeParams p) {
  extern __shared__ char smem_raw[];
  char* smem = smem_raw + (1024 - smem_addr(smem_raw) % 1024) % 1024;
  uint64_t* bars = reinterpret_cast<uint64_t*>(smem + Wide::kBarrierOffset);
  const WideBarriers barriers{bars, bars + 4};
  const int tile_row = blockIdx.x * Wide::kRows, part = blockIdx.y;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.cache_map);
    for (int i = 0; i < 4; ++i) {
      mbarrier_init(&barriers.full[i], 1);
      mbarrier_init(&barriers.empty[i], Wide::kGroupWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_dependents_launch();
  if (threadIdx.x < Wide::kComputeThreads) {
    take_registers<Wide::kComputeRegisters>();
    compute(p, smem, barriers, part, tile_row);
  } else {
    release_registers<Wide::kProducerRegisters>();
    if (threadIdx.x < Wide::kComputeThreads + kWarpSize) produce(p, smem, barriers, part, tile_row);
  }
}

}  // namespace

cudaError_t launch_mla_decode_wide(const MlaDecodeParams& p, cudaStream_t stream) {
  return launch_kernel(mla_decode_wide_kernel, dim3(p.num_tiles, p.num_parts), Wide::kThreads, stream,
                       {.smem_bytes = Wide::kSmemBytes + 1024, .overlaps = true}, p);  // room to align the first atom
}

}  // namespace rorqual
