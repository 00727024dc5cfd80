// mla_decode_wide.cu: absorbed MLA decode for tiles of 64 (query token, head) rows.
//
// With 64 rows and more the work is compute-bound: 2 * 64 * 1,088 * 64 FLOP for 72 KiB a block and tile.
// Tiling:  one CTA a part of the plan and tile of 64 rows: two warpgroups that compute and a producer warp. Each holds
//          half of the value columns, [64 x 256] in 128 registers a thread, and both add every block, in order.
//          Warpgroup w scores every other block, S = Q K^T [64 x 64], and starts the product of the other's weights
//          right behind its scores; while that runs it takes its exponentials. It scores in its turn, which the other
//          passes on when its own scores are there, so that one warpgroup's exponentials always lie under the other's
//          scores:
//            w:     score b | add b-1, exponentials of b | add b | (turn)  score b+2 ...
//            other:  (turn)   score b+1                  | add b, exponentials of b+1 | add b+1 | ...
//          The maximum and the factor that rescales go from block to block through shared memory, as do the weights
//          for the other's half.
//          Blocks come in halves of 256 columns through a ring of five: "early", the half that warpgroup w multiplies,
//          then "late"; each is given back when it has been added. The 64 rope columns are given back as soon as they
//          are scored. A third of Q lives in registers, which makes room for the fifth half: with four, the load of a
//          block would wait for the addition just before its scores.
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
  static constexpr int kComputeRegisters = 240, kProducerRegisters = 24;
  // The register file as launched: 168 a thread. What setmaxnreg asks for beyond it would never come.
  static_assert(kComputeThreads * kComputeRegisters + kGroupThreads * kProducerRegisters <= kThreads * 168);
  static constexpr int kHalfChunks = Mla::kLatentChunks / 2, kHalfCols = Mla::kLatent / 2;
  static constexpr int kRopeChunk = Mla::kLatentChunks;
  static constexpr int kScores = Mla::kBlockTokens / 2;  // registers of a 64 x 64 accumulator
  static constexpr int kOut = kHalfCols / 2;             // registers of a 64 x 256 accumulator
  // A half of a block takes a place of the ring and arrives in two pieces of two chunks.
  static constexpr int kRing = 5, kHalfBytes = kHalfChunks * Mla::kChunkBytes;
  static constexpr int kPieces = 4, kPieceChunks = Mla::kLatentChunks / kPieces;
  static constexpr int kPieceBytes = kPieceChunks * Mla::kChunkBytes;
  // Of the query, the fourth chunk of each half and the rope columns live in registers, the others in shared memory.
  static constexpr int kQueryHalfChunks = kHalfChunks - 1, kQuerySmemChunks = 2 * kQueryHalfChunks;

  static constexpr int kRopeOffset = kRing * kHalfBytes;               // [64 tokens][128 bytes]
  static constexpr int kProbsOffset = kRopeOffset + Mla::kChunkBytes;  // [kRows][128 bytes]
  static constexpr int kQueryOffset = kProbsOffset + kRows * Mla::kChunkRowBytes;
  static constexpr int kStateOffset = kQueryOffset + kQuerySmemChunks * kRows * Mla::kChunkRowBytes;  // 3 x [2][kRows]
  static constexpr int kBarrierOffset = kStateOffset + 3 * 2 * kRows * 4;
  static constexpr int kSmemBytes = kBarrierOffset + (3 * kRing + 3) * 8;
  static_assert(kRopeOffset % 1024 == 0 && kProbsOffset % 1024 == 0 && kQueryOffset % 1024 == 0 &&
                kSmemBytes + 1024 <= 232448);

  // kBarrierProbs + w: P of a block of warpgroup w is in shared memory; kBarrierGroup + w: among the threads of
  // warpgroup w; kBarrierTurn + w: warpgroup w may score.
  static constexpr int kBarrierAll = 1, kBarrierProbs = 2, kBarrierGroup = 4, kBarrierTurn = 6;
};

// Warpgroup w scores blocks w, w + 2, ... of a segment ("its own"). It first reads the half of the columns that it
// alone multiplies by weights, so that half is the first that comes ("early") and is given back.
struct WideBarriers {
  uint64_t* full;        // [kRing][2 pieces]
  uint64_t* empty;       // [kRing]
  uint64_t* rope_full;   // [2], by number of block: one for each warpgroup, as a parity tells only two phases apart
  uint64_t* rope_empty;  // [1]
};

// Four 8 x 8 matrices of 16-bit values; lane l passes the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void store_matrix_x4(uint32_t addr, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

// The place in the ring of the n-th half, and the parity of the round.
struct RingPlace {
  uint32_t at, phase;
  __device__ __forceinline__ explicit RingPlace(uint32_t n) : at(n % Wide::kRing), phase(n / Wide::kRing % 2) {}
};

__device__ __forceinline__ void produce(const MlaDecodeParams& p, char* smem, const WideBarriers& barriers, int part,
                                        int tile_row) {
  const int lane = threadIdx.x % kWarpSize;
  SegmentWalk walk(p, part, tile_row);
  Segment segment;
  BlockIds ids;
  bool waited = false;
  uint32_t count = 0;  // blocks so far
  while (walk.next(segment)) {
    ids.start(p, segment);
    const int new_block = first_new_block(segment);
    for (int block = segment.begin; block < segment.end; ++block) {
      const int id = ids.id(block);
      const int owner = (block - segment.begin) % 2;
      if (!waited && block >= new_block) {
        wait_for_previous_kernel();
        waited = true;
      }
      const auto load = [&](char* dst, uint64_t* full, int chunk) {
        tma_load_3d(dst, &p.cache_map, full, chunk * Mla::kChunkCols, 0, id);
      };
#pragma unroll
      for (int piece = 0; piece < Wide::kPieces; ++piece) {
        const RingPlace place(count * 2 + piece / 2);
        if (piece % 2 == 0) mbarrier_wait(&barriers.empty[place.at], place.phase ^ 1);
        if (lane == 0) {
          uint64_t* full = &barriers.full[place.at * 2 + piece % 2];
          mbarrier_arrive_expect_tx(full, Wide::kPieceBytes);
          const int late = piece / 2, first = ((late ^ owner) * 2 + piece % 2) * Wide::kPieceChunks;
#pragma unroll
          for (int i = 0; i < Wide::kPieceChunks; ++i) {
            load(smem + place.at * Wide::kHalfBytes + (piece % 2 * Wide::kPieceChunks + i) * Mla::kChunkBytes, full,
                 first + i);
          }
        }
        __syncwarp();
      }
      mbarrier_wait(barriers.rope_empty, count % 2 ^ 1);
      if (lane == 0) {
        mbarrier_arrive_expect_tx(&barriers.rope_full[count % 2], Mla::kChunkBytes);
        load(smem + Wide::kRopeOffset, &barriers.rope_full[count % 2], Wide::kRopeChunk);
      }
      __syncwarp();
      ++count;
    }
  }
}

// Starts copying the chunks of the query that live in shared memory, [kQuerySmemChunks][64 rows][128 bytes], swizzled.
__device__ __forceinline__ void load_query_smem(char* q_smem, const MlaDecodeParams& p, const Segment& s,
                                                int tile_row) {
  constexpr int kHalfVecs = Wide::kQueryHalfChunks * 8, kVecs = 2 * kHalfVecs;
  const int lane = threadIdx.x % kWarpSize;
  for (int r = threadIdx.x / kWarpSize; r < Wide::kRows; r += Wide::kComputeThreads / kWarpSize) {
    const Row row(p, s, tile_row + r);
    const __nv_bfloat16* latent = p.q_latent + row.token * p.q_latent_token_stride + row.head * p.q_latent_head_stride;
#pragma unroll
    for (int v = lane; v < kVecs; v += kWarpSize) {
      const __nv_bfloat16* src = latent + v / kHalfVecs * Wide::kHalfCols + v % kHalfVecs * 8;
      copy_async_16(q_smem + v / 8 * (Wide::kRows * Mla::kChunkRowBytes) + r * Mla::kChunkRowBytes +
                        ((v % 8) ^ (r % 8)) * 16,
                    row.valid ? src : p.q_latent, row.valid);
    }
  }
}

// Reads the other chunks as fragments of A: rows own_row[0] and own_row[1], columns 16 k + 2 quad and eight on.
__device__ __forceinline__ void load_query_fragments(uint32_t (&query)[3][Mla::kStepsPerChunk][4],
                                                     const MlaDecodeParams& p, const Segment& s, int tile_row, int own,
                                                     const int (&own_row)[2], int quad) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Row row(p, s, tile_row + own_row[h]);
    const __nv_bfloat16* latent = p.q_latent + row.token * p.q_latent_token_stride + row.head * p.q_latent_head_stride;
    const __nv_bfloat16* pe = p.q_pe + row.token * p.q_pe_token_stride + row.head * p.q_pe_head_stride;
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      const __nv_bfloat16* src =
          part == 2 ? pe : latent + (part ^ own) * Wide::kHalfCols + Wide::kQueryHalfChunks * Mla::kChunkCols;
#pragma unroll
      for (int k = 0; k < Mla::kStepsPerChunk; ++k) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t* from = reinterpret_cast<const uint32_t*>(src + 16 * k + 8 * e + 2 * quad);
          query[part][k][2 * e + h] = row.valid ? *from : 0;
        }
      }
    }
  }
}

// As clear_tail, of the halves in the ring of the block number `count`.
__device__ __forceinline__ void clear_values(char* smem, uint32_t count, int first_token, int thread) {
  const int num_vecs = (Mla::kBlockTokens - first_token) * 8;
#pragma unroll 1
  for (int chunk = 0; chunk < Mla::kLatentChunks; ++chunk) {
    const RingPlace place(count * 2 + chunk / Wide::kHalfChunks);
    char* to = smem + place.at * Wide::kHalfBytes + chunk % Wide::kHalfChunks * Mla::kChunkBytes;
    for (int v = thread; v < num_vecs; v += Wide::kGroupThreads) {
      reinterpret_cast<uint4*>(to + first_token * Mla::kChunkRowBytes)[v] = make_uint4(0, 0, 0, 0);
    }
  }
}

__device__ __forceinline__ void compute(const MlaDecodeParams& p, char* smem, const WideBarriers& barriers, int part,
                                        int tile_row) {
  const int own = warp_uniform(threadIdx.x / Wide::kGroupThreads);  // which warpgroup: its blocks, its half of values
  const int other = 1 - own;
  const int thread = threadIdx.x % Wide::kGroupThreads;
  const int warp = thread / kWarpSize, lane = thread % kWarpSize, group = lane / 4, quad = lane % 4;
  char* q_smem = smem + Wide::kQueryOffset;
  float* maxima = reinterpret_cast<float*>(smem + Wide::kStateOffset);  // [2 warpgroups][kRows]: after its last block
  float* scales = maxima + 2 * Wide::kRows;                             // [2 warpgroups][kRows]: what it rescaled by
  float* sums = scales + 2 * Wide::kRows;                               // [2 warpgroups][kRows]
  const uint64_t q_desc = swizzle128_desc(warp_uniform(smem_addr(q_smem)));
  const uint64_t ring_desc = swizzle128_desc(warp_uniform(smem_addr(smem)));                     // K
  const uint64_t value_desc = swizzle128_desc(warp_uniform(smem_addr(smem)), Mla::kChunkBytes);  // V
  const uint64_t rope_desc = swizzle128_desc(warp_uniform(smem_addr(smem + Wide::kRopeOffset)));
  const uint64_t probs_desc = swizzle128_desc(warp_uniform(smem_addr(smem + Wide::kProbsOffset)));
  // Where this lane puts a row of the first 16 tokens' weights (store_matrix_x4); those of 16 k tokens on: ^ 32 k.
  const uint32_t probs_to = smem_addr(smem + Wide::kProbsOffset) + (16 * warp + lane % 16) * Mla::kChunkRowBytes +
                            ((lane / 16) ^ (lane % 8)) * 16;
  const int own_row[2] = {16 * warp + group, 16 * warp + group + 8};

  SegmentWalk walk(p, part, tile_row);
  Segment segment, next_segment;
  uint32_t first_count = 0;  // blocks before the segment
  bool more = walk.next(segment);
  wait_for_previous_kernel();  // also who has nothing to do: this kernel must not end before that one
  let_dependents_launch();
  for (; more; segment = next_segment) {
    load_query_smem(q_smem, p, segment, tile_row);
    uint32_t query[3][Mla::kStepsPerChunk][4];  // of the early half, the late half, and rope: fragments of A
    load_query_fragments(query, p, segment, tile_row, own, own_row, quad);
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
    const auto release = [&](uint64_t* barrier) {
      if (lane == 0) mbarrier_arrive(barrier);
    };
    // Waits for all products, and gives back the half of block number `count` that was added.
    const auto finish = [&](uint32_t count, bool of_other) {
      wgmma_wait<0>();
      wgmma_fence_operand(out);
      release(&barriers.empty[RingPlace(count * 2 + of_other).at]);
    };
    // Starts adding the other warpgroup's block, once its weights are there.
    const auto start_other = [&](uint32_t count) {
      named_barrier_sync(Wide::kBarrierProbs + other, Wide::kComputeThreads);
      float scale[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        row_max[i] = maxima[other * Wide::kRows + own_row[i]];
        scale[i] = scales[other * Wide::kRows + own_row[i]];
        row_sum[i] *= scale[i];
      }
      rescale_out(scale);
      const uint32_t at = warp_uniform(RingPlace(count * 2 + 1).at * Wide::kHalfBytes);
      wgmma_fence_operand(out);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Mla::kTokenSteps; ++k) {
        wgmma_m64n256k16_ss<0, 1>(out, advance_desc(probs_desc, k * 32),
                                  advance_desc(value_desc, at + k * 16 * Mla::kChunkRowBytes), 1);
      }
      wgmma_commit();
    };

    // Scores one of the warpgroup's own blocks and adds it; kFollows: after the other's block before it.
    const auto take = [&]<bool kFollows>(int block, std::bool_constant<kFollows>) {
      float scores[Wide::kScores];
      const uint32_t count = first_count + (block - segment.begin);
      const auto score_half = [&](int late) {
        const uint64_t half_q_desc =
            advance_desc(q_desc, (late ^ own) * (Wide::kQueryHalfChunks * Wide::kRows * Mla::kChunkRowBytes));
        const RingPlace place(count * 2 + late);
        const uint64_t half_desc = advance_desc(ring_desc, warp_uniform(place.at * Wide::kHalfBytes));
#pragma unroll
        for (int chunk = 0; chunk < Wide::kHalfChunks; ++chunk) {
          const uint64_t chunk_desc = advance_desc(half_desc, chunk * Mla::kChunkBytes);
          if (chunk % Wide::kPieceChunks == 0) {
            mbarrier_wait(&barriers.full[place.at * 2 + chunk / Wide::kPieceChunks], place.phase);
            wgmma_fence();  // without it ptxas serialises the products on both sides of the wait (C7520)
          }
#pragma unroll
          for (int k = 0; k < Mla::kStepsPerChunk; ++k) {
            if (chunk < Wide::kQueryHalfChunks) {
              wgmma_m64n64k16_ss<0, 0>(scores, advance_desc(half_q_desc, chunk * Mla::kChunkBytes + k * 32),
                                       advance_desc(chunk_desc, k * 32), late > 0 || chunk > 0 || k > 0);
            } else {
              wgmma_m64n64k16_rs<0>(scores, query[late][k], advance_desc(chunk_desc, k * 32), 1);
            }
          }
        }
        if (late > 0) {
          mbarrier_wait(&barriers.rope_full[count % 2], count / 2 % 2);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < Mla::kStepsPerChunk; ++k) {
            wgmma_m64n64k16_rs<0>(scores, query[2][k], advance_desc(rope_desc, k * 32), 1);
          }
        }
      };
      if constexpr (kFollows) named_barrier_sync(Wide::kBarrierTurn + own, Wide::kComputeThreads);
      score_half(0);
      score_half(1);
      wgmma_commit();
      if constexpr (kFollows) {
        start_other(count - 1);
        wgmma_wait<1>();
      } else {
        wgmma_wait<0>();
      }
      wgmma_fence_operand(scores);
      release(barriers.rope_empty);
      if (block + 1 < segment.end) named_barrier_arrive(Wide::kBarrierTurn + other, Wide::kComputeThreads);

      const int first_token = block * Mla::kBlockTokens;
      if (first_token + Mla::kBlockTokens > segment.kv_len) {
        clear_values(smem, count, segment.kv_len - first_token, thread);
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
      uint32_t probs[Wide::kScores / 2];
#pragma unroll
      for (int i = 0; i < Wide::kScores; i += 2) {
        const int h = i % 4 / 2;
        probs[i / 2] = pack_bf16(exp2_approx(scores[i] * p.scale_log2 - shift[h]),
                                 exp2_approx(scores[i + 1] * p.scale_log2 - shift[h]));
        row_sum[h] += bf16_low(probs[i / 2]) + bf16_high(probs[i / 2]);
      }
      if constexpr (kFollows) finish(count - 1, true);
      // Behind this barrier the whole warpgroup has read the weights of the block before, and the tail is clear.
      named_barrier_sync(Wide::kBarrierGroup + own, Wide::kGroupThreads);
#pragma unroll
      for (int k = 0; k < Mla::kTokenSteps; ++k) {
        store_matrix_x4(probs_to ^ (k * 32), probs[4 * k], probs[4 * k + 1], probs[4 * k + 2], probs[4 * k + 3]);
      }
      fence_proxy_async();
      named_barrier_arrive(Wide::kBarrierProbs + own, Wide::kComputeThreads);
      rescale_out(rescale);

      const uint32_t at = warp_uniform(RingPlace(count * 2).at * Wide::kHalfBytes);
      wgmma_fence_operand(out);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Mla::kTokenSteps; ++k) {
        wgmma_m64n256k16_rs<1>(out, probs[4 * k], probs[4 * k + 1], probs[4 * k + 2], probs[4 * k + 3],
                               advance_desc(value_desc, at + k * 16 * Mla::kChunkRowBytes), 1);
      }
      wgmma_commit();
      finish(count, false);
    };

    int block = segment.begin + own;
    if (own == 0) {
      take(block, std::false_type{});
      block += 2;
    }
    for (; block < segment.end; block += 2) take(block, std::true_type{});
    if ((segment.end - segment.begin - 1) % 2 == other) {  // the last block is the other's
      const uint32_t count = first_count + (segment.end - segment.begin - 1);
      start_other(count);
      finish(count, true);
    }
    first_count += segment.end - segment.begin;

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
  const WideBarriers barriers{bars, bars + 2 * Wide::kRing, bars + 3 * Wide::kRing, bars + 3 * Wide::kRing + 2};
  const int tile_row = blockIdx.x * Wide::kRows, part = blockIdx.y;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.cache_map);
    for (int i = 0; i < 2 * Wide::kRing; ++i) mbarrier_init(&barriers.full[i], 1);
    for (int i = 0; i < Wide::kRing; ++i) mbarrier_init(&barriers.empty[i], Wide::kGroupWarps);
    for (int i = 0; i < 2; ++i) mbarrier_init(&barriers.rope_full[i], 1);
    mbarrier_init(barriers.rope_empty, Wide::kGroupWarps);
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
