// mla_decode_wide.cu: absorbed MLA decode for tiles of 64 (query token, head) rows.
//
// With 64 rows and more the work is compute-bound: 2 * 64 * 1,088 * 64 FLOP for 72 KiB a block and tile.
// Tiling:  one CTA a part of the plan and tile of 64 rows: two warpgroups that compute and a producer warp. Each holds
//          half of the value columns, [64 x 256] in 128 registers a thread, and both add every block, in order.
//          Warpgroup w scores every other block, S = Q K^T [64 x 64], and between the halves of its scores adds the
//          other's block, so that the tensor cores mostly have one of the two to serve:
//            w:     score b, early | add b-1 | score b, late | exponentials | add b | score b+2, early ...
//            other:   exponentials of b-1    | add b-1       | score b+1, early     | add b | score b+1, late ...
//          The maximum and the factor that rescales go from block to block through shared memory, as do the weights
//          for the other's half; they lie where the block's rope columns were. Shared memory holds Q and two blocks,
//          216 KiB. A slot is given back in two parts: early, the columns that warpgroup w multiplies, and late. If the
//          other's block were added after all scores, each block's load would wait for the whole of the block before.
// Traffic: 73,728 B a block and tile (tiles of a sequence run side by side and share it in L2); 73,728 B of query and
//          65,536 B (bf16) or 131,072 B (a split) of output a segment.
// docs/kernels.md says what else was tried.
// Checked against rorqual/kernels/reference_paged.py::mla_decode_paged.
#include <type_traits>

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
  // The producer is a whole warpgroup, so that it can give up registers.
  static constexpr int kThreads = kComputeThreads + kGroupThreads;
  static constexpr int kComputeRegisters = 232, kProducerRegisters = 40;
  static_assert(kComputeThreads * kComputeRegisters + kGroupThreads * kProducerRegisters <= 65536);
  static constexpr int kHalfChunks = Mla::kLatentChunks / 2, kHalfCols = Mla::kLatent / 2;
  static constexpr int kRopeChunk = Mla::kLatentChunks;
  static constexpr int kScores = Mla::kBlockTokens / 2;  // registers of a 64 x 64 accumulator
  static constexpr int kOut = kHalfCols / 2;             // registers of a 64 x 256 accumulator
  // A block arrives in four pieces of two chunks; the last brings the rope columns too.
  static constexpr int kPieces = 4, kPieceChunks = Mla::kLatentChunks / kPieces;
  static constexpr int kPieceBytes = kPieceChunks * Mla::kChunkBytes;

  static constexpr int kQueryOffset = 2 * Mla::kBlockBytes;
  static constexpr int kStateOffset = kQueryOffset + Mla::kChunks * kRows * Mla::kChunkRowBytes;  // 3 x [2][kRows]
  static constexpr int kBarrierOffset = kStateOffset + 3 * 2 * kRows * 4;
  static constexpr int kSmemBytes = kBarrierOffset + 2 * (kPieces + 2) * 8;
  static_assert(kQueryOffset % 1024 == 0 && kSmemBytes + 1024 <= 232448);

  // kBarrierProbs + s: P of slot s is in shared memory; kBarrierGroup + w: among the threads of warpgroup w.
  static constexpr int kBarrierAll = 1, kBarrierProbs = 2, kBarrierGroup = 4;
};

// Slot s holds blocks s, s + 2, ... of a segment, which warpgroup s scores. It first reads the half of the columns that
// it alone multiplies by weights, so that half is the one that comes, and is given back, first ("early").
struct WideBarriers {
  uint64_t* full;   // [2 slots][kPieces]: early, early, late, late with rope
  uint64_t* empty;  // [2 slots][early, late]
  __device__ __forceinline__ uint64_t* full_of(int slot, int piece) const {
    return full + slot * Wide::kPieces + piece;
  }
  __device__ __forceinline__ uint64_t* empty_of(int slot, int late) const { return empty + slot * 2 + late; }
};

__device__ __forceinline__ void produce(const MlaDecodeParams& p, char* smem, const WideBarriers& barriers, int part,
                                        int tile_row) {
  const int lane = threadIdx.x % kWarpSize;
  SegmentWalk walk(p, part, tile_row);
  Segment segment, next_segment;
  BlockIds ids, next_ids;
  bool more = walk.next(segment), waited = false;
  if (more) ids.start(p, segment);
  uint32_t phases = 0;  // bit s: parity of slot s's next block
  while (more) {
    const int new_block = first_new_block(segment);
    for (int block = segment.begin; block < segment.end; ++block) {
      const int id = ids.id(block);
      const int slot = (block - segment.begin) % 2;
      const uint32_t phase = phases >> slot & 1;
      phases ^= 1u << slot;
      if (!waited && block >= new_block) {
        wait_for_previous_kernel();
        waited = true;
      }
      char* dst = smem + slot * Mla::kBlockBytes;
#pragma unroll
      for (int piece = 0; piece < Wide::kPieces; ++piece) {
        const int late = piece / (Wide::kPieces / 2);
        if (piece % (Wide::kPieces / 2) == 0) mbarrier_wait(barriers.empty_of(slot, late), phase ^ 1);
        if (lane == 0) {
          uint64_t* full = barriers.full_of(slot, piece);
          const bool last = piece == Wide::kPieces - 1;
          const auto load = [&](int chunk) {
            tma_load_3d(dst + chunk * Mla::kChunkBytes, &p.cache_map, full, chunk * Mla::kChunkCols, 0, id);
          };
          mbarrier_arrive_expect_tx(full, Wide::kPieceBytes + (last ? Mla::kChunkBytes : 0));
          const int first = ((late ^ slot) * (Wide::kPieces / 2) + piece % (Wide::kPieces / 2)) * Wide::kPieceChunks;
#pragma unroll
          for (int i = 0; i < Wide::kPieceChunks; ++i) load(first + i);
          if (last) load(Wide::kRopeChunk);
        }
        __syncwarp();
      }
      if (block == segment.begin) {  // while there is time: what follows this segment
        more = walk.next(next_segment);
        if (more) next_ids.start(p, next_segment);
      }
    }
    segment = next_segment;
    ids = next_ids;
  }
}

__device__ __forceinline__ void compute(const MlaDecodeParams& p, char* smem, const WideBarriers& barriers, int part,
                                        int tile_row) {
  const int own = warp_uniform(threadIdx.x / Wide::kGroupThreads);  // which warpgroup: its slot, its half of the values
  const int other = 1 - own;
  const int thread = threadIdx.x % Wide::kGroupThreads;
  const int warp = thread / kWarpSize, lane = thread % kWarpSize, group = lane / 4, quad = lane % 4;
  char* own_smem = smem + own * Mla::kBlockBytes;
  char* other_smem = smem + other * Mla::kBlockBytes;
  char* own_probs = own_smem + Wide::kRopeChunk * Mla::kChunkBytes;
  char* q_smem = smem + Wide::kQueryOffset;
  float* maxima = reinterpret_cast<float*>(smem + Wide::kStateOffset);  // [2 slots][kRows]: after the slot's block
  float* scales = maxima + 2 * Wide::kRows;                             // [2 slots][kRows]: what it multiplied sums by
  float* sums = scales + 2 * Wide::kRows;                               // [2 warpgroups][kRows]
  const uint64_t q_desc = swizzle128_desc(warp_uniform(smem_addr(q_smem)));
  const uint64_t own_desc = swizzle128_desc(warp_uniform(smem_addr(own_smem)));
  const uint64_t other_probs_desc =
      swizzle128_desc(warp_uniform(smem_addr(other_smem + Wide::kRopeChunk * Mla::kChunkBytes)));
  const int half_bytes = own * Wide::kHalfChunks * Mla::kChunkBytes;
  const uint64_t own_value_desc = swizzle128_desc(warp_uniform(smem_addr(own_smem + half_bytes)), Mla::kChunkBytes);
  const uint64_t other_value_desc = swizzle128_desc(warp_uniform(smem_addr(other_smem + half_bytes)), Mla::kChunkBytes);
  const int own_row[2] = {16 * warp + group, 16 * warp + group + 8};

  SegmentWalk walk(p, part, tile_row);
  Segment segment, next_segment;
  uint32_t phase = 0;
  bool more = walk.next(segment);
  wait_for_previous_kernel();  // also who has nothing to do: this kernel must not end before that one
  let_dependents_launch();
  for (; more; segment = next_segment) {
    start_query<Wide::kRows>(q_smem, p, segment, tile_row, threadIdx.x / kWarpSize, Wide::kComputeThreads / kWarpSize);
    more = walk.next(next_segment);
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
    finish_query();
    named_barrier_sync(Wide::kBarrierAll, Wide::kComputeThreads);

    // A row's maximum seldom grows once a few blocks are seen, and a product with one changes nothing.
    const auto rescale_out = [&](const float (&scale)[2]) {
      if (__any_sync(0xffffffffu, scale[0] != 1.f || scale[1] != 1.f)) {
#pragma unroll
        for (int i = 0; i < Wide::kOut; ++i) out[i] *= scale[i % 4 / 2];
      }
    };
    // Starts adding the other warpgroup's block, once its weights are there.
    const auto start_other = [&] {
      named_barrier_sync(Wide::kBarrierProbs + other, Wide::kComputeThreads);
      float scale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row_max[i] = maxima[other * Wide::kRows + own_row[i]];
        scale[i] = scales[other * Wide::kRows + own_row[i]];
        row_sum[i] *= scale[i];
      }
      rescale_out(scale);
      wgmma_fence_operand(out);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Mla::kTokenSteps; ++k) {
        wgmma_m64n256k16_ss<0, 1>(out, advance_desc(other_probs_desc, k * 32),
                                  advance_desc(other_value_desc, k * 16 * Mla::kChunkRowBytes), 1);
      }
      wgmma_commit();
    };
    const auto finish = [&](int slot) {
      wgmma_wait<0>();
      wgmma_fence_operand(out);
      if (lane == 0) mbarrier_arrive(barriers.empty_of(slot, slot != own));
    };

    // Scores one of the warpgroup's own blocks and adds it; kFollows: after the other's block before it.
    const auto take = [&]<bool kFollows>(int block, std::bool_constant<kFollows>) {
      float scores[Wide::kScores];
      const auto score_half = [&](int late) {
#pragma unroll
        for (int i = 0; i < Wide::kPieces / 2; ++i) {
          const int piece = late * (Wide::kPieces / 2) + i;
          mbarrier_wait(barriers.full_of(own, piece), phase);
          wgmma_fence();  // without it ptxas serialises the products on both sides of the wait (C7520)
          const int first = ((late ^ own) * (Wide::kPieces / 2) + i) * Wide::kPieceChunks;
          const uint64_t piece_q_desc = advance_desc(q_desc, first * Mla::kChunkBytes);
          const uint64_t piece_desc = advance_desc(own_desc, first * Mla::kChunkBytes);
#pragma unroll
          for (int k = 0; k < Wide::kPieceChunks * Mla::kStepsPerChunk; ++k) {
            const int at = k / Mla::kStepsPerChunk * Mla::kChunkBytes + k % Mla::kStepsPerChunk * 32;
            wgmma_m64n64k16_ss<0, 0>(scores, advance_desc(piece_q_desc, at), advance_desc(piece_desc, at),
                                     piece > 0 || k > 0);
          }
          if (piece == Wide::kPieces - 1) {
#pragma unroll
            for (int k = 0; k < Mla::kStepsPerChunk; ++k) {
              const int at = Wide::kRopeChunk * Mla::kChunkBytes + k * 32;
              wgmma_m64n64k16_ss<0, 0>(scores, advance_desc(q_desc, at), advance_desc(own_desc, at), 1);
            }
          }
          wgmma_commit();
        }
      };
      score_half(0);
      // Here, so that the other's slot is given back before this block's late half must be there: else each block's
      // load would wait for the whole of the one before it.
      if constexpr (kFollows) {
        start_other();
        finish(other);
      }
      score_half(1);
      wgmma_wait<0>();
      wgmma_fence_operand(scores);

      const int first_token = block * Mla::kBlockTokens;
      if (first_token + Mla::kBlockTokens > segment.kv_len) {
        clear_tail<Mla::kAtomBytes, Mla::kChunkBytes>(own_smem, segment.kv_len - first_token, thread,
                                                      Wide::kGroupThreads);
        fence_proxy_async();
      }
      // scores[4j + 2h + e]: row own_row[h], token 8 j + 2 quad + e.
      if (first_token + Mla::kBlockTokens > all_limit) {
#pragma unroll
        for (int i = 0; i < Wide::kScores; ++i) {
          if (first_token + i / 4 * 8 + 2 * quad + i % 2 >= limit[i % 4 / 2]) scores[i] = neg_inf();
        }
      }
      float new_max[2] = {row_max[0], row_max[1]}, rescale[2], shift[2];
#pragma unroll
      for (int i = 0; i < Wide::kScores; ++i) new_max[i % 4 / 2] = fmaxf(new_max[i % 4 / 2], scores[i]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(0xffffffffu, new_max[i], 1));
        new_max[i] = fmaxf(new_max[i], __shfl_xor_sync(0xffffffffu, new_max[i], 2));
        // A row that has seen nothing yet keeps a finite base, so that no -inf is subtracted from itself.
        shift[i] = new_max[i] == neg_inf() ? 0.f : new_max[i] * p.scale_log2;
        rescale[i] = exp2_approx(row_max[i] * p.scale_log2 - shift[i]);
        row_max[i] = new_max[i];
        row_sum[i] *= rescale[i];
        if (quad == 0) {
          maxima[own * Wide::kRows + own_row[i]] = new_max[i];
          scales[own * Wide::kRows + own_row[i]] = rescale[i];
        }
      }
      // Behind this barrier the whole warpgroup has its scores, so the rope columns may be overwritten, and the tail
      // is clear.
      named_barrier_sync(Wide::kBarrierGroup + own, Wide::kGroupThreads);
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
      named_barrier_arrive(Wide::kBarrierProbs + own, Wide::kComputeThreads);
      rescale_out(rescale);

      wgmma_fence_operand(out);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Mla::kTokenSteps; ++k) {
        wgmma_m64n256k16_rs<1>(out, probs[4 * k], probs[4 * k + 1], probs[4 * k + 2], probs[4 * k + 3],
                               advance_desc(own_value_desc, k * 16 * Mla::kChunkRowBytes), 1);
      }
      wgmma_commit();
      finish(own);
      phase ^= 1;
    };

    int block = segment.begin + own;
    if (own == 0) {
      take(block, std::false_type{});
      block += 2;
    }
    for (; block < segment.end; block += 2) take(block, std::true_type{});
    if ((segment.end - segment.begin - 1) % 2 == other) {  // the last block is the other's
      start_other();
      finish(other);
    }

#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 1);
      row_sum[i] += __shfl_xor_sync(0xffffffffu, row_sum[i], 2);
      if (quad == 0) sums[own * Wide::kRows + own_row[i]] = row_sum[i];
    }
    named_barrier_sync(Wide::kBarrierAll, Wide::kComputeThreads);
    const int64_t partial_rows = int64_t{p.num_tiles} * Wide::kRows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = sums[own_row[i]] + sums[Wide::kRows + own_row[i]];
      const float inverse = sum > 0.f ? 1.f / sum : sum;  // keeps a NaN
      const float lse_log2 = sum == 0.f ? neg_inf() : row_max[i] * p.scale_log2 + log2f(sum);
      const int local_row = tile_row + own_row[i];
      const Row row(p, segment, local_row);
      if (!row.valid) continue;
      const bool writes_lse = own == 0 && quad == 0;
      // out[4j + 2h + e]: row own_row[h], column 256 own + 8 j + 2 quad + e.
      const int column = own * Wide::kHalfCols + 2 * quad;
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
    // The next write to `sums` is behind the next segment's first barrier.
  }
}

__global__ void __launch_bounds__(Wide::kThreads, 1) mla_decode_wide_kernel(const __grid_constant__ MlaDecodeParams p) {
  extern __shared__ char smem_raw[];
  char* smem = smem_raw + (1024 - smem_addr(smem_raw) % 1024) % 1024;
  uint64_t* bars = reinterpret_cast<uint64_t*>(smem + Wide::kBarrierOffset);
  const WideBarriers barriers{bars, bars + 2 * Wide::kPieces};
  const int tile_row = blockIdx.x * Wide::kRows, part = blockIdx.y;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.cache_map);
    for (int i = 0; i < 2 * Wide::kPieces; ++i) mbarrier_init(&barriers.full[i], 1);
    for (int i = 0; i < 2 * 2; ++i) mbarrier_init(&barriers.empty[i], Wide::kGroupWarps);
    mbarrier_init_fence();
  }
  __syncthreads();
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
