// linear_rows.cu: y = x W^T for at most 16 tokens, where the time is that of reading W once.
//
// Tiling:  a tile is 8, 16 or 32 rows of W, whole: the warps of a CTA share its depth and add their sums in order, so no
//          CTA waits for another. One warp keeps stages of 512 of the depth coming, a bulk copy a row of W or x; eight
//          multiply. Both operands of m16n8k16 are read in 16-byte vectors: a lane's 8 values of the depth stand for
//          columns 2 q, 2 q + 1, 2 q + 8, 2 q + 9 of two products, the same in x as in W, and a sum has no order in k.
// Traffic: 2 B a weight, once; x once a tile, from L2 (tokens / rows of a tile of what W moves). HBM-bound; weights are
//          asked for before the previous kernel has ended, so that in a chain of kernels the memory never rests.
// Banks:   rows lie 64 bytes past a multiple of 128 apart: the 8 lanes of a phase read two rows in different halves.
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
constexpr int kChunk = 512;  // depth of a stage
constexpr int kBlock = 32;   // depth of what a warp multiplies at once
constexpr int kMaxStages = 8, kBarrierBytes = 2 * kMaxStages * 8;
constexpr int kBlocksPerWarp = kChunk / kBlock / kComputeWarps;
static_assert(kBlocksPerWarp * kComputeWarps * kBlock == kChunk);

struct RowsShape {
  int pitch, stage_bytes, stages, num_chunks, tiles_per_batch, num_tiles, partial_sets;
};

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                             uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A stage: kRows rows of W, then the tokens' rows of x, `pitch` bytes apart.
template <int kRows>
__device__ __forceinline__ void produce(const LinearParams& p, const RowsShape& shape, char* smem, uint64_t* full,
                                        uint64_t* empty) {
  const int lane = threadIdx.x % kWarpSize;
  const int num_items = (shape.num_tiles - 1 - blockIdx.x) / gridDim.x * shape.num_chunks + shape.num_chunks;
  struct Item {
    char* stage;
    uint64_t* barrier;
    int batch, first_row, num_rows, first_k;
    uint32_t row_bytes;
  };
  const auto item_at = [&](int i) {
    const int turn = i / shape.num_chunks, first_k = (i - turn * shape.num_chunks) * kChunk, stage = i % shape.stages;
    const int tile = blockIdx.x + turn * gridDim.x, batch = tile / shape.tiles_per_batch;
    const int first_row = (tile - batch * shape.tiles_per_batch) * kRows;
    return Item{smem + stage * shape.stage_bytes,
                &full[stage],
                batch,
                first_row,
                min(kRows, p.out_features - first_row),
                first_k,
                2u * min(kChunk, p.in_features - first_k)};
  };
  const auto load_weight = [&](const Item& item) {
    if (lane == 0) mbarrier_arrive_expect_tx(item.barrier, (item.num_rows + p.num_tokens) * item.row_bytes);
    __syncwarp();
    if (lane < item.num_rows) {
      const int64_t row = int64_t{item.batch} * p.out_features + item.first_row + lane;
      bulk_load(item.stage + lane * shape.pitch, p.weight + row * p.in_features + item.first_k, item.barrier,
                item.row_bytes);
    }
  };
  const auto load_x = [&](const Item& item) {
    if (lane < p.num_tokens) {
      bulk_load(item.stage + (kRows + lane) * shape.pitch,
                p.x + item.batch * p.x_batch_stride + lane * p.x_token_stride + item.first_k, item.barrier,
                item.row_bytes);
    }
  };
  const int ahead = min(num_items, shape.stages);
  for (int i = 0; i < ahead; ++i) load_weight(item_at(i));
  wait_for_previous_kernel();
  for (int i = 0; i < ahead; ++i) load_x(item_at(i));
  for (int i = ahead; i < num_items; ++i) {
    const Item item = item_at(i);
    mbarrier_wait(&empty[i % shape.stages], (i / shape.stages + 1) % 2);
    load_weight(item);
    load_x(item);
  }
}

template <int kRows>
__device__ __forceinline__ void compute(const LinearParams& p, const RowsShape& shape, const char* smem,
                                        float* all_partials, uint64_t* full, uint64_t* empty) {
  constexpr int kGroups = kRows / 8;
  const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
  const int group = lane / 4, quad = lane % 4;
  const bool has_token = group < p.num_tokens, has_other = group + 8 < p.num_tokens;
  const int partial_floats = p.num_tokens * kRows;  // of a warp
  const char* w_row = smem + group * shape.pitch + quad * 16;
  const char* x_row = w_row + kRows * shape.pitch;
  int stage = 0, turn = 0;
  uint32_t phase = 0;
  wait_for_previous_kernel();
  for (int tile = blockIdx.x; tile < shape.num_tiles; tile += gridDim.x) {
    // Two sums each, so that half as many products wait for one another.
    float acc[kGroups][2][4];
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 8; ++i) acc[n][i / 4][i % 4] = 0.f;
    }
    for (int chunk = 0; chunk < shape.num_chunks; ++chunk) {
      mbarrier_wait(&full[stage], phase);
#pragma unroll
      for (int i = 0; i < kBlocksPerWarp; ++i) {
        const int k = (warp + i * kComputeWarps) * kBlock, left = p.in_features - chunk * kChunk - k;
        if (left <= 0) break;
        const int at = stage * shape.stage_bytes + 2 * k;
        const bool inside = quad * 8 < left;  // else whatever lies there, NaN too, is not taken
        uint4 a = make_uint4(0, 0, 0, 0), b = make_uint4(0, 0, 0, 0);
        if (inside && has_token) a = *reinterpret_cast<const uint4*>(x_row + at);
        if (inside && has_other) b = *reinterpret_cast<const uint4*>(x_row + at + 8 * shape.pitch);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
          const uint4 w = inside ? *reinterpret_cast<const uint4*>(w_row + at + n * 8 * shape.pitch)
                                 : make_uint4(0, 0, 0, 0);
          mma_m16n8k16(acc[n][0], a.x, b.x, a.y, b.y, w.x, w.y);
          mma_m16n8k16(acc[n][1], a.z, b.z, a.w, b.w, w.z, w.w);
        }
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&empty[stage]);
      if (++stage == shape.stages) {
        stage = 0;
        phase ^= 1;
      }
    }

    // The next tile's sums go to the other half; those of the one after it, behind the next tile's barrier.
    float* partials = all_partials + turn * kComputeWarps * partial_floats;
    turn ^= 1;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 sum = {acc[n][0][2 * h] + acc[n][1][2 * h], acc[n][0][2 * h + 1] + acc[n][1][2 * h + 1]};
        if (h == 0 ? has_token : has_other) {
          *reinterpret_cast<float2*>(partials + warp * partial_floats + (group + 8 * h) * kRows + n * 8 + 2 * quad) =
              sum;
        }
      }
    }
    named_barrier_sync(1, kComputeThreads);
    const int batch = tile / shape.tiles_per_batch, first_row = (tile - batch * shape.tiles_per_batch) * kRows;
    const auto total = [&](int token, int row) {
      const float* at = partials + token * kRows + row;
      float2 sum = *reinterpret_cast<const float2*>(at);
#pragma unroll
      for (int w = 1; w < kComputeWarps; ++w) {
        const float2 part = *reinterpret_cast<const float2*>(at + w * partial_floats);
        sum.x += part.x;
        sum.y += part.y;
      }
      return sum;
    };
    if (p.silu_mul) {
      constexpr int kPairs = kRows / 4;
      for (int i = thread; i < p.num_tokens * kPairs; i += kComputeThreads) {
        const int token = i / kPairs, column = i % kPairs * 2, row = column / 8 * 16 + column % 8;
        if (first_row + row >= p.out_features) continue;
        const float2 gate = total(token, row), other = total(token, row + 8);
        const float v[2] = {silu(gate.x) * other.x, silu(gate.y) * other.y};
        store_linear(p, batch, token, first_row / 2 + column, v);
      }
    } else {
      constexpr int kPairs = kRows / 2;
      for (int i = thread; i < p.num_tokens * kPairs; i += kComputeThreads) {
        const int token = i / kPairs, row = i % kPairs * 2;
        if (first_row + row >= p.out_features) continue;
        const float2 sum = total(token, row);
        float v[2] = {sum.x, sum.y};
        add_linear_terms(p, token, first_row + row, v);
        store_linear(p, batch, token, first_row + row, v);
      }
    }
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads, 3) linear_rows_kernel(const LinearParams p, const RowsShape shape) {
  extern __shared__ __align__(128) char smem[];
  float* partials = reinterpret_cast<float*>(smem + shape.stages * shape.stage_bytes);
  uint64_t* full = reinterpret_cast<uint64_t*>(partials + shape.partial_sets * kComputeWarps * p.num_tokens * kRows);
  uint64_t* empty = full + kMaxStages;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < shape.stages; ++stage) {
      mbarrier_init(&full[stage], 1);
      mbarrier_init(&empty[stage], kComputeWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  let_dependents_launch();
  if (threadIdx.x >= kComputeThreads) {
    produce<kRows>(p, shape, smem, full, empty);
  } else {
    compute<kRows>(p, shape, smem, partials, full, empty);
  }
}

template <int kRows>
cudaError_t launch(const LinearParams& p, int num_sms, cudaStream_t stream) {
  // Three CTAs an SM, of this kernel and the next, or with more tokens, whose x takes room too, two.
  constexpr int kSmBytes = 228 << 10, kReservedBytes = 1 << 10;  // of an SM; that each CTA loses
  const int ctas_per_sm = p.num_tokens <= 4 ? 3 : 2;
  RowsShape shape;
  shape.pitch = (2 * (p.in_features < kChunk ? p.in_features : kChunk) + 127) / 128 * 128 + 64;
  shape.stage_bytes = (kRows + p.num_tokens) * shape.pitch;
  shape.num_chunks = (p.in_features + kChunk - 1) / kChunk;
  shape.tiles_per_batch = (p.out_features + kRows - 1) / kRows;
  shape.num_tiles = shape.tiles_per_batch * p.batch;
  const int grid = shape.num_tiles < num_sms * ctas_per_sm ? shape.num_tiles : num_sms * ctas_per_sm;
  const int turns = (shape.num_tiles + grid - 1) / grid;
  shape.partial_sets = turns < 2 ? 1 : 2;
  const int other_bytes = shape.partial_sets * kComputeWarps * p.num_tokens * kRows * 4 + kBarrierBytes;
  const int fitting = (kSmBytes / ctas_per_sm - kReservedBytes - other_bytes) / shape.stage_bytes;
  shape.stages = std::min({fitting, kMaxStages, turns * shape.num_chunks});
  const int smem_bytes = shape.stages * shape.stage_bytes + other_bytes;
  return launch_kernel(linear_rows_kernel<kRows>, dim3(grid), kThreads, stream,
                       {.smem_bytes = smem_bytes, .overlaps = true}, p, shape);
}

}  // namespace

cudaError_t launch_linear_rows(const LinearParams& p, int tile_rows, cudaStream_t stream) {
  int device, num_sms;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  if (tile_rows == 0) {
    // The fewest rows whose tiles are all at work at once, two CTAs an SM; of a large W, 16.
    const int64_t rows = int64_t{p.batch} * p.out_features, at_once = 2 * num_sms;
    tile_rows = rows <= 8 * at_once && !p.silu_mul ? 8 : rows > 16 * at_once && rows <= 32 * at_once ? 32 : 16;
  }
  switch (tile_rows) {
    case 8: return launch<8>(p, num_sms, stream);
    case 16: return launch<16>(p, num_sms, stream);
    default: return launch<32>(p, num_sms, stream);
  }
}

}  // namespace rorqual
