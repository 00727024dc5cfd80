// linear_rows.cu: y = x W^T for at most 16 tokens, where the time is that of reading W once.
//
// Tiling:  a tile is 8, 16 or 32 rows of W, whole, and there is about one tile an SM: the warps of a CTA share its depth and
//          add their sums in order, so no CTA waits for another. One warp keeps stages of 512 of the depth coming, eight
//          multiply, each 64 of a stage, their part of x in registers. Both operands of m16n8k16 are read in 16-byte
//          vectors: a lane's 8 values of the depth stand for columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of two products, the
//          same in x as in W, and a sum has no order in k.
// Traffic: 2 B a weight, once; x once a CTA, from L2. HBM-bound. Weights are asked for before the previous kernel has
//          ended, and a CTA leaves room for the next kernel's, so that in a chain of kernels the memory seldom rests.
// Loads:   one box of the copy engine a stage. A bulk copy a row was tried: each takes some 35 ns of an SM to issue.
// Order:   in parts (`in_parts`), warp w adds the blocks of 64 w, w + 8, ... of the depth, 16 at a time and ascending, as a
//          tile of linear_tiles.cu with eight parts does: the tensor cores give the same bits by either instruction.
//          W's fragments then come by ldmatrix, 16 rows a product, and x's in words, 8 tokens a product.
// Banks:   a box lies in swizzled lines of 64 of the depth. The 8 lanes of a phase read two rows, of each every other
//          vector, of which the swizzle turns one row's into the other half of the banks.
// Checked against rorqual/kernels/linear.py's float64 product.
#include <algorithm>

#include "rorqual/device.cuh"
#include "rorqual/launch.h"
#include "rorqual/launch_kernel.cuh"
#include "rorqual/linear.cuh"
#include "rorqual/tma.cuh"

namespace rorqual {
namespace {

constexpr int kComputeWarps = 8, kComputeThreads = kComputeWarps * kWarpSize;
constexpr int kThreads = kComputeThreads + kWarpSize;
constexpr int kBlock = kLinearTileDepth;             // depth of a line of 128 bytes, and of a warp's part of a stage
constexpr int kChunk = kLinearRowsBlocks * kBlock;  // depth of a stage
constexpr int kMaxStages = 8, kBarrierBytes = 2 * kMaxStages * 8;
static_assert(kLinearRowsBlocks == kComputeWarps);

struct RowsShape {
  int stage_blocks, stages, num_chunks, tiles_per_batch, num_tiles, partial_sets;
};

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&d)[4], uint32_t addr) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
               : "r"(addr)
               : "memory");
}

template <int kRows>
__device__ __forceinline__ void produce(const RowsShape& shape, const CUtensorMap* weight, char* smem, uint64_t* full,
                                        uint64_t* empty) {
  const uint32_t stage_bytes = shape.stage_blocks * kRows * 2 * kBlock;
  int stage = 0;
  uint32_t phase = 1;
  for (int tile = blockIdx.x; tile < shape.num_tiles; tile += gridDim.x) {
    const int batch = tile / shape.tiles_per_batch, first_row = (tile - batch * shape.tiles_per_batch) * kRows;
    for (int chunk = 0; chunk < shape.num_chunks; ++chunk) {
      mbarrier_wait(&empty[stage], phase);
      mbarrier_arrive_expect_tx(&full[stage], stage_bytes);
      tma_load_4d(smem + stage * stage_bytes, weight, &full[stage], 0, first_row, chunk * kLinearRowsBlocks, batch);
      if (++stage == shape.stages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
}

// Adds a warp's block of 64 of the depth. acc: [16 rows of W][8 tokens], 4 registers; at: the block's rows in shared memory.
template <int kGroups, int kHalves, int kOuter>
__device__ __forceinline__ void multiply_in_parts(float (&acc)[kOuter][kHalves][4], const uint4 (&x)[2][kHalves],
                                                  uint32_t at) {
  const int lane = threadIdx.x % kWarpSize, row = lane % 8, matrix = lane / 8;  // what the lane gives the address of
  uint32_t w[4];
#pragma unroll
  for (int step = 0; step < kBlock / 16; ++step) {
    const auto multiply = [&](int n, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const uint4& v = x[step / 2][h];
        mma_m16n8k16(acc[n][h], a0, a1, a2, a3, step % 2 == 0 ? v.x : v.z, step % 2 == 0 ? v.y : v.w);
      }
    };
    if constexpr (kGroups == 1) {  // the tile has half of the rows: one load is two steps'
      if (step % 2 == 0) ldmatrix_x4(w, at + row * 2 * kBlock + ((2 * step + matrix) ^ row) * 16);
      if (step % 2 == 0) {
        multiply(0, w[0], 0, w[1], 0);
      } else {
        multiply(0, w[2], 0, w[3], 0);
      }
    } else {
#pragma unroll
      for (int n = 0; n < kOuter; ++n) {
        ldmatrix_x4(w, at + (16 * n + matrix % 2 * 8 + row) * 2 * kBlock + ((2 * step + matrix / 2) ^ row) * 16);
        multiply(n, w[0], w[1], w[2], w[3]);
      }
    }
  }
}

// kGroups: of 8 rows of W. kHalves: of 8 tokens. What lies between the end of the previous kernel and the last store is
// the time that a chain of kernels cannot hide: addresses are found before, loads asked for long before their use.
template <int kGroups, int kHalves, bool kInParts>
__device__ __forceinline__ void compute(const LinearParams& p, const RowsShape& shape, const char* smem,
                                        float* all_partials, uint64_t* full, uint64_t* empty) {
  constexpr int kRows = 8 * kGroups;
  constexpr int kSpanChunks = 4 / kHalves;  // x is held for so many chunks, in 32 registers
  // Sums side by side, so that fewer products wait for one another; in parts those of 8 tokens each.
  constexpr int kSets = kInParts ? kHalves : kGroups <= 2 ? 2 : 1;
  constexpr int kOuter = kInParts ? (kGroups + 1) / 2 : kGroups;  // times 8 rows of W, or 16
  const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
  const int group = lane / 4, quad = lane % 4;
  const int partial_floats = p.num_tokens * kRows;  // of a warp
  const int stage_bytes = shape.stage_blocks * kRows * 2 * kBlock;
  const char* w_row = smem + (warp * kRows + group) * 2 * kBlock;
  const uint32_t part_offset = warp * kRows * 2 * kBlock;
  // Vectors 2 quad and 2 quad + 1 of this warp's line; in parts words quad and quad + 4 of each 16.
  const int own_k = warp * kBlock + quad * (kInParts ? 2 : 16);
  const __nv_bfloat16* x_row = p.x + group * p.x_token_stride + own_k;
  const int64_t other_half = 8 * p.x_token_stride;

  int tile = blockIdx.x, batch = tile / shape.tiles_per_batch;
  int first_row = (tile - batch * shape.tiles_per_batch) * kRows;
  int stage = 0, turn = 0;
  uint32_t phase = 0;
  uint4 x[kSpanChunks][2][kHalves];
  const auto load_x = [&](int first_chunk) {
    const __nv_bfloat16* src = x_row + batch * p.x_batch_stride + first_chunk * kChunk;
#pragma unroll
    for (int i = 0; i < 2 * kSpanChunks; ++i) {
      const bool inside = (first_chunk + i / 2) * kChunk + own_k < p.in_features;
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        const bool valid = group + 8 * h < p.num_tokens && inside;
        if constexpr (kInParts) {  // x and y of product 2 i, z and w of product 2 i + 1
          const uint32_t* at = reinterpret_cast<const uint32_t*>(src + h * other_half + i / 2 * kChunk + i % 2 * 32);
          x[i / 2][i % 2][h] =
              make_uint4(valid ? at[0] : 0, valid ? at[4] : 0, valid ? at[8] : 0, valid ? at[12] : 0);
        } else {
          x[i / 2][i % 2][h] =
              valid ? *reinterpret_cast<const uint4*>(src + h * other_half + i / 2 * kChunk + i % 2 * 8)
                    : make_uint4(0, 0, 0, 0);
        }
      }
    }
  };
  asm volatile("" : "+l"(x_row), "+r"(batch), "+r"(first_row));  // found before the wait
  wait_for_previous_kernel();
  for (bool fresh = true;;) {
    float acc[kOuter][kSets][4];
#pragma unroll
    for (int n = 0; n < kOuter; ++n) {
#pragma unroll
      for (int i = 0; i < 4 * kSets; ++i) acc[n][i / 4][i % 4] = 0.f;
    }
    for (int first_chunk = 0; first_chunk < shape.num_chunks; first_chunk += kSpanChunks) {
      if (fresh) load_x(first_chunk);
#pragma unroll
      for (int chunk = 0; chunk < kSpanChunks; ++chunk) {
        if (first_chunk + chunk >= shape.num_chunks) break;
        mbarrier_wait(&full[stage], phase);
        if constexpr (kInParts) {
          if (warp < shape.stage_blocks) {
            multiply_in_parts<kGroups, kHalves>(acc, x[chunk], smem_addr(smem + stage * stage_bytes) + part_offset);
          }
        } else if (warp < shape.stage_blocks) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const char* at = w_row + stage * stage_bytes + ((2 * quad + i) ^ group) * 16;
            const uint4 a = x[chunk][i][0], b = kHalves == 2 ? x[chunk][i][kHalves - 1] : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int n = 0; n < kGroups; ++n) {
              const uint4 w = *reinterpret_cast<const uint4*>(at + n * 8 * 2 * kBlock);
              mma_m16n8k16(acc[n][0], a.x, b.x, a.y, b.y, w.x, w.y);
              mma_m16n8k16(acc[n][kSets - 1], a.z, b.z, a.w, b.w, w.z, w.w);
            }
          }
        }
        __syncwarp();
        if (lane == 0) mbarrier_arrive(&empty[stage]);
        if (++stage == shape.stages) {
          stage = 0;
          phase ^= 1;
        }
      }
    }

    // The next tile's sums go to the other half; those of the one after it, behind the next tile's barrier.
    float* partials = all_partials + turn * kComputeWarps * partial_floats;
    turn ^= 1;
    if constexpr (kInParts) {
#pragma unroll
      for (int n = 0; n < kOuter; ++n) {
#pragma unroll
        for (int i = 0; i < 4 * kHalves; ++i) {  // acc[n][h][2 r + e]: row 16 n + group + 8 r, token 8 h + 2 quad + e
          const int row = 16 * n + group + i % 4 / 2 * 8, token = i / 4 * 8 + 2 * quad + i % 2;
          if (row < kRows && token < p.num_tokens) {
            partials[warp * partial_floats + token * kRows + row] = acc[n][i / 4][i % 4];
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < (kInParts ? 0 : kGroups); ++n) {
#pragma unroll
      for (int h = 0; h < kHalves; ++h) {
        float2 sum = {acc[n][0][2 * h], acc[n][0][2 * h + 1]};
        if constexpr (kSets == 2) sum = {sum.x + acc[n][1][2 * h], sum.y + acc[n][1][2 * h + 1]};
        const int token = group + 8 * h;
        if (token < p.num_tokens) {
          *reinterpret_cast<float2*>(partials + warp * partial_floats + token * kRows + 8 * n + 2 * quad) = sum;
        }
      }
    }
    // A thread's pair of the output's columns: of rows own_row, own_row + 1 of the tile, with silu_mul also 8 rows on.
    const int own_token = p.silu_mul ? thread / (kRows / 4) : thread / (kRows / 2);
    const int own_column = 2 * (p.silu_mul ? thread % (kRows / 4) : thread % (kRows / 2));
    const int own_row = p.silu_mul ? own_column / 8 * 16 + own_column % 8 : own_column;
    const bool writes = own_token < p.num_tokens && first_row + own_row < p.out_features;
    const int out_batch = batch, out_column = (p.silu_mul ? first_row / 2 : first_row) + own_column;
    const bool more = (tile += gridDim.x) < shape.num_tiles;
    if (more) {
      const int next_batch = tile / shape.tiles_per_batch;
      first_row = (tile - next_batch * shape.tiles_per_batch) * kRows;
      fresh = next_batch != batch || shape.num_chunks > kSpanChunks;
      batch = next_batch;
    }
    named_barrier_sync(1, kComputeThreads);
    if (writes) {
      const float* at = partials + own_token * kRows + own_row;
      const auto total = [&](const float* at) {
        float2 parts[kComputeWarps];
#pragma unroll
        for (int i = 0; i < kComputeWarps; ++i) parts[i] = *reinterpret_cast<const float2*>(at + i * partial_floats);
#pragma unroll
        for (int i = 1; i < kComputeWarps; ++i) parts[0] = {parts[0].x + parts[i].x, parts[0].y + parts[i].y};
        return parts[0];
      };
      const float2 sum = total(at);
      float v[2] = {sum.x, sum.y};
      if (p.silu_mul) {
        const float2 other = total(at + 8);
        v[0] = silu(sum.x) * other.x;
        v[1] = silu(sum.y) * other.y;
      } else {
        add_linear_terms(p, own_token, out_column, v);
      }
      store_linear(p, out_batch, own_token, out_column, v);
    }
    if (!more) break;
  }
}

template <int kGroups, int kHalves, bool kInParts>
__global__ void __launch_bounds__(kThreads, 2)
linear_rows_kernel(const __grid_constant__ LinearParams p, const __grid_constant__ CUtensorMap weight,
                   const RowsShape shape) {
  constexpr int kRows = 8 * kGroups;
  extern __shared__ char smem_raw[];
  char* smem = smem_raw + (1024 - smem_addr(smem_raw) % 1024) % 1024;
  float* partials = reinterpret_cast<float*>(smem + shape.stages * shape.stage_blocks * kRows * 2 * kBlock);
  uint64_t* full = reinterpret_cast<uint64_t*>(partials + shape.partial_sets * kComputeWarps * p.num_tokens * kRows);
  uint64_t* empty = full + kMaxStages;
  if (threadIdx.x == kComputeThreads) {
    tma_prefetch_map(&weight);
#pragma unroll 1
    for (int stage = 0; stage < shape.stages; ++stage) {
      mbarrier_init(&full[stage], 1);
      mbarrier_init(&empty[stage], kComputeWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  let_dependents_launch();
  if (threadIdx.x < kComputeThreads) {
    compute<kGroups, kHalves, kInParts>(p, shape, smem, partials, full, empty);
  } else if (threadIdx.x == kComputeThreads) {
    produce<kRows>(shape, &weight, smem, full, empty);
  }
}

template <int kGroups, int kHalves>
cudaError_t launch(const LinearParams& p, const CUtensorMap& weight, int num_sms, bool in_parts, cudaStream_t stream) {
  constexpr int kRows = 8 * kGroups;
  constexpr int kStageRoom = 128 << 10;      // of a single tile: what the neighbours in a chain leave
  constexpr int kManyStageRoom = 104 << 10;  // of one tile after the other
  RowsShape shape;
  shape.stage_blocks = std::min(p.in_features / kBlock, kLinearRowsBlocks);
  shape.num_chunks = (p.in_features + kChunk - 1) / kChunk;
  shape.tiles_per_batch = (p.out_features + kRows - 1) / kRows;
  shape.num_tiles = shape.tiles_per_batch * p.batch;
  // Small tiles: as many CTAs as fit beside one another anyway.
  const int ctas_per_sm = std::clamp((96 << 10) / (kRows * p.in_features * 2), 1, 2);
  const int grid = std::min(shape.num_tiles, num_sms * ctas_per_sm);
  const int turns = (shape.num_tiles + grid - 1) / grid;
  shape.partial_sets = turns < 2 ? 1 : 2;
  const int stage_bytes = shape.stage_blocks * kRows * 2 * kBlock;
  const int room = turns < 2 ? kStageRoom : kManyStageRoom / ctas_per_sm;
  shape.stages = std::min({room / stage_bytes, kMaxStages, turns * shape.num_chunks});
  const int partial_bytes = shape.partial_sets * kComputeWarps * p.num_tokens * kRows * 4;
  const int smem_bytes = 1024 + shape.stages * stage_bytes + partial_bytes + kBarrierBytes;  // room to align the first
  return launch_kernel(in_parts ? linear_rows_kernel<kGroups, kHalves, true> : linear_rows_kernel<kGroups, kHalves, false>,
                       dim3(grid), kThreads, stream,
                       {.smem_bytes = smem_bytes, .overlaps = true}, p, weight, shape);
}

template <int kHalves>
cudaError_t launch(const LinearParams& p, const CUtensorMap& weight, int tile_rows, int num_sms, bool in_parts,
                   cudaStream_t stream) {
  switch (tile_rows) {
    case 8: return launch<1, kHalves>(p, weight, num_sms, in_parts, stream);
    case 16: return launch<2, kHalves>(p, weight, num_sms, in_parts, stream);
    default: return launch<4, kHalves>(p, weight, num_sms, in_parts, stream);
  }
}

}  // namespace

int choose_linear_rows(const LinearParams& p, int num_sms) {
  if (p.silu_mul) return 16;
  // With the fewest CTAs more of a chain is at work at once; more than 128 KiB of W a CTA would not all be on its way.
  if (2 * 32 * p.in_features <= 128 << 10 && p.out_features >= 32 * num_sms / 3 && p.batch == 1 &&
      p.out_features <= 32 * num_sms) {
    return 32;
  }
  for (int rows : {8, 16, 32}) {
    if ((p.out_features + rows - 1) / rows * p.batch <= num_sms) return rows;
  }
  return 16;  // several tiles in turn
}

cudaError_t launch_linear_rows(const LinearParams& p, const CUtensorMap& weight, int tile_rows, int num_sms,
                               bool in_parts, cudaStream_t stream) {
  return p.num_tokens <= 8 ? launch<1>(p, weight, tile_rows, num_sms, in_parts, stream)
                           : launch<2>(p, weight, tile_rows, num_sms, in_parts, stream);
}

}  // namespace rorqual
