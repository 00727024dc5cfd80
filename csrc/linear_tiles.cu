// linear_tiles.cu: y = x W^T by tensor-core tiles, for any number of tokens.
//
// Tiling:  a tile is 64 or 128 rows of W by 16 to 256 tokens. W is the side of 64 that the tensor cores fix, the tokens,
//          however few, are the free one. A producer warp keeps boxes of 64 of the depth coming, W's before the
//          previous kernel has ended; each warpgroup multiplies 64 rows. With few tiles, a cluster of `split` CTAs shares
//          one, each a part of the depth; the parts are added through distributed shared memory, in order.
// Order:   part k of the depth is its blocks of 64 k, k + parts, ...: one float32 sum, 16 at a time, ascending; then the
//          parts are added in order. The bits of an output depend on its token's row, its row of W and the number of
//          parts, not on the tile nor on how many CTAs share the parts. linear_rows.cu can add in the same order.
// Traffic: W once for each tile of tokens, x once for each tile of rows, both through L2; the output once.
// Checked against rorqual/kernels/linear.py's float64 product.
#include "rorqual/cluster.cuh"
#include "rorqual/launch_kernel.cuh"
#include "rorqual/linear.cuh"
#include "rorqual/tma.cuh"
#include "rorqual/wgmma.cuh"
#include "rorqual/wgmma_n.cuh"

namespace rorqual {
namespace {

// kStages: of a CTA that shares its SM with others of the same kernel. kManyStages: of one that does not, but for those
// of the next kernel.
// kJoins: one CTA can take several parts, in twice the registers. (Not with 16 tokens: ptxas then serialises the products.)
template <int kRowsArg, int kTokensArg, int kStagesArg, int kManyStagesArg, bool kJoinsArg>
struct Tiles {
  static constexpr bool kJoins = kJoinsArg;
  static constexpr int kRows = kRowsArg, kTokens = kTokensArg, kStages = kStagesArg, kManyStages = kManyStagesArg;
  static constexpr int kWarpgroups = kRows / 64, kComputeThreads = 128 * kWarpgroups;
  // Where sums take most of the registers the producer is a whole warpgroup, so that it can give up its own.
  static constexpr bool kMovesRegisters = kJoins && kTokens > 128;
  static constexpr int kThreads = kComputeThreads + (kMovesRegisters ? 128 : kWarpSize);
  static constexpr int kComputeRegisters = 240, kProducerRegisters = 24;
  static_assert(!kMovesRegisters || kComputeThreads * kComputeRegisters + 128 * kProducerRegisters <= 65536);
  static constexpr int kDepth = kLinearTileDepth, kRowBytes = 2 * kDepth;
  static constexpr int kWeightBytes = kRows * kRowBytes, kTokenBytes = kTokens * kRowBytes;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;
  // The sums, [kTokens][kSumPitch] floats, lie where the stages were. Pitch: lanes of different tokens, other banks.
  static constexpr int kSumPitch = kRows + 4;
  static constexpr int kSumBytes = kTokens * kSumPitch * 4;
  static_assert(kRowBytes == 128 && kTokens % 8 == 0, "boxes are whole swizzle atoms");
  static constexpr int smem_bytes(int stages) { return 1024 + stages * (kStageBytes + 16); }  // room to align the first
  static_assert(kSumBytes <= kStages * kStageBytes && smem_bytes(kManyStages) <= 232448);
};

struct TilesShape {
  int row_tiles, token_tiles, num_blocks, parts, parts_per_cta, stages;
  int sums_offset, barrier_offset;  // in shared memory: the sums of a CTA's parts, one after the other
  __device__ __forceinline__ int blocks_of(int part) const { return (num_blocks - part + parts - 1) / parts; }
};

// The blocks of a CTA's parts, a part after the other.
struct DepthWalk {
  int block, part;
  __device__ __forceinline__ explicit DepthWalk(int first_part) : block(first_part), part(first_part) {}
  __device__ __forceinline__ void next(const TilesShape& shape) {
    block += shape.parts;
    if (block >= shape.num_blocks) block = ++part;
  }
};

// Tiles in the order of CTAs: bands of row tiles, within one the tokens advance slowest, so that those at work at the
// same time share both operands in L2.
struct Place {
  int row_tile, token_tile;
  __device__ __forceinline__ Place(const TilesShape& shape, int tile) {
    constexpr int kBand = 8;
    const int band = tile / (kBand * shape.token_tiles), within = tile - band * kBand * shape.token_tiles;
    const int width = min(kBand, shape.row_tiles - band * kBand);
    token_tile = within / width;
    row_tile = band * kBand + within - token_tile * width;
  }
};

// A place in the ring of stages, and the parity of its turn.
struct Slot {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++stage == stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

template <class T>
__device__ __forceinline__ void produce(const LinearTileMaps& maps, char* smem, uint64_t* full, uint64_t* empty,
                                        const TilesShape& shape, int first_row, int first_token, int first_part) {
  const int batch = blockIdx.y, stages = shape.stages;
  int num_blocks = 0;
  for (int i = 0; i < shape.parts_per_cta; ++i) num_blocks += shape.blocks_of(first_part + i);
  const int ahead = min(num_blocks, stages);
  const auto load_weight = [&](int stage, int block) {
    mbarrier_arrive_expect_tx(&full[stage], T::kStageBytes);
    tma_load_3d(smem + stage * T::kStageBytes, &maps.weight, &full[stage], block * T::kDepth, first_row, batch);
  };
  const auto load_x = [&](int stage, int block) {
    tma_load_3d(smem + stage * T::kStageBytes + T::kWeightBytes, &maps.x, &full[stage], block * T::kDepth, first_token,
                batch);
  };
  DepthWalk weight_walk(first_part), walk(first_part);
  for (int i = 0; i < ahead; ++i, weight_walk.next(shape)) load_weight(i, weight_walk.block);
  wait_for_previous_kernel();
  for (int i = 0; i < ahead; ++i, walk.next(shape)) load_x(i, walk.block);
  Slot slot;
  for (int i = ahead; i < num_blocks; ++i, walk.next(shape), slot.next(stages)) {
    mbarrier_wait(&empty[slot.stage], slot.phase);
    load_weight(slot.stage, walk.block);
    load_x(slot.stage, walk.block);
  }
}

template <class T>
__device__ __forceinline__ void multiply(float* sums, char* smem, uint64_t* full, uint64_t* empty,
                                         const TilesShape& shape, int first_part, int split) {
  const int thread = threadIdx.x, warpgroup = thread / 128, warp = thread / kWarpSize, lane = thread % kWarpSize;
  // acc[4j + 2h + e]: row 16 warp + lane / 4 + 8h of W, token 8j + 2 (lane % 4) + e.
  float* own = sums + 2 * (lane % 4) * T::kSumPitch + 16 * warp + lane / 4;
  const auto leave = [&](float* at, const float (&v)[T::kTokens / 2]) {
#pragma unroll
    for (int i = 0; i < T::kTokens / 2; ++i) at[(i / 4 * 8 + i % 2) * T::kSumPitch + i % 4 / 2 * 8] = v[i];
  };
  float acc[T::kTokens / 2];
  float total[T::kTokens / 2];
#pragma unroll
  for (int i = 0; i < T::kTokens / 2; ++i) acc[i] = total[i] = 0.f;
  const uint64_t weight_desc = swizzle128_desc(smem_addr(smem) + warpgroup * 64 * T::kRowBytes);
  const uint64_t x_desc = swizzle128_desc(smem_addr(smem) + T::kWeightBytes);
  Slot slot;
#pragma unroll 1
  for (int part = 0; part < (T::kJoins ? shape.parts_per_cta : 1); ++part) {
    const int num_blocks = shape.blocks_of(first_part + part);
    int last_stage = 0;
    for (int i = 0; i < num_blocks; ++i, slot.next(shape.stages)) {
      mbarrier_wait(&full[slot.stage], slot.phase);
      wgmma_fence_operand(acc);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < T::kDepth / 16; ++k) {
        const int at = (slot.stage * T::kStageBytes + k * 32) / 16;
        wgmma_m64_ss<T::kTokens>(acc, weight_desc + at, x_desc + at, i > 0 || k > 0);
      }
      wgmma_commit();
      wgmma_fence_operand(acc);
      wgmma_wait<1>();
      if (i > 0 && lane == 0) mbarrier_arrive(&empty[last_stage]);
      last_stage = slot.stage;
    }
    wgmma_wait<0>();
    wgmma_fence_operand(acc);
    if (lane == 0) mbarrier_arrive(&empty[last_stage]);
    if constexpr (T::kJoins) {
#pragma unroll
      for (int i = 0; i < T::kTokens / 2; ++i) {
        total[i] = T::kMovesRegisters || split == 1 ? total[i] + acc[i] : acc[i];
      }
      if (split > 1 && shape.parts_per_cta > 1) leave(own + part * (T::kSumBytes / 4), total);
    }
  }
  if (split > 1 && shape.parts_per_cta > 1) return;
  named_barrier_sync(1, T::kComputeThreads);  // all have read the stages that the sums overwrite
  leave(own, T::kJoins ? total : acc);
}

// Eight of a token's sums, those of all parts added in order.
template <class T>
__device__ __forceinline__ void load_sums(float (&v)[8], const float* sums, int token, int row, int split,
                                          int parts_per_cta) {
  const float* at = sums + token * T::kSumPitch + row;
  if (split == 1) {
    const float4 a = *reinterpret_cast<const float4*>(at), b = *reinterpret_cast<const float4*>(at + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    return;
  }
  constexpr int kMaxParts = 8;
  const int parts = split * parts_per_cta;
  const uint32_t own = smem_addr(at);
  float4 a[kMaxParts], b[kMaxParts];
#pragma unroll
  for (int part = 0; part < kMaxParts; ++part) {  // all on their way before the first is needed
    if (part >= parts) break;
    const int cta = part / parts_per_cta;
    const uint32_t addr = cluster_addr(own + (part - cta * parts_per_cta) * T::kSumBytes, cta);
    a[part] = cluster_load(addr), b[part] = cluster_load(addr + 16);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = 0.f;
#pragma unroll
  for (int part = 0; part < kMaxParts; ++part) {
    if (part >= parts) break;
    v[0] += a[part].x, v[1] += a[part].y, v[2] += a[part].z, v[3] += a[part].w;
    v[4] += b[part].x, v[5] += b[part].y, v[6] += b[part].z, v[7] += b[part].w;
  }
}

template <class T>
__device__ __forceinline__ void write_out(const LinearParams& p, const float* sums, int first_row, int first_token,
                                          int split, int parts_per_cta, int rank) {
  const int num_tokens = min(T::kTokens, p.num_tokens - first_token);
  const int rows_per_item = p.silu_mul ? 16 : 8, per_token = T::kRows / rows_per_item;
  for (int i = rank * T::kComputeThreads + threadIdx.x; i < num_tokens * per_token; i += split * T::kComputeThreads) {
    const int local_token = i / per_token, local_row = (i - local_token * per_token) * rows_per_item;
    const int token = first_token + local_token, row = first_row + local_row;
    if (row >= p.out_features) continue;
    float v[8];
    load_sums<T>(v, sums, local_token, local_row, split, parts_per_cta);
    if (p.silu_mul) {
      float up[8];
      load_sums<T>(up, sums, local_token, local_row + 8, split, parts_per_cta);
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = silu(v[j]) * up[j];
      store_linear(p, blockIdx.y, token, row / 2, v);
    } else {
      add_linear_terms(p, token, row, v);
      store_linear(p, blockIdx.y, token, row, v);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(T::kThreads, 1)
linear_tiles_kernel(const __grid_constant__ LinearParams p, const __grid_constant__ LinearTileMaps maps,
                    const TilesShape shape, int split) {
  extern __shared__ char smem_raw[];
  char* smem = smem_raw + (1024 - smem_addr(smem_raw) % 1024) % 1024;
  uint64_t* full = reinterpret_cast<uint64_t*>(smem + shape.barrier_offset);
  uint64_t* empty = full + shape.stages;
  const int rank = split > 1 ? static_cast<int>(cluster_rank()) : 0, first_part = rank * shape.parts_per_cta;
  const Place place(shape, blockIdx.x / split);
  const int first_row = place.row_tile * T::kRows, first_token = place.token_tile * T::kTokens;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&maps.weight);
    tma_prefetch_map(&maps.x);
#pragma unroll 1
    for (int stage = 0; stage < shape.stages; ++stage) {
      mbarrier_init(&full[stage], 1);
      mbarrier_init(&empty[stage], T::kComputeThreads / kWarpSize);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  let_dependents_launch();
  float* sums = reinterpret_cast<float*>(smem + shape.sums_offset);
  const auto write = [&] {
    write_out<T>(p, sums, first_row, first_token, T::kMovesRegisters ? 1 : split, shape.parts_per_cta, rank);
  };
  if (threadIdx.x < T::kComputeThreads) {
    if constexpr (T::kMovesRegisters) take_registers<T::kComputeRegisters>();
    wait_for_previous_kernel();
    multiply<T>(sums, smem, full, empty, shape, first_part, split);
    if (split == 1) {
      named_barrier_sync(1, T::kComputeThreads);
      write();
    }
  } else {
    if constexpr (T::kMovesRegisters) release_registers<T::kProducerRegisters>();
    if (threadIdx.x == T::kComputeThreads) {
      produce<T>(maps, smem, full, empty, shape, first_row, first_token, first_part);
    }
    __syncwarp();
  }
  if constexpr (!T::kMovesRegisters) {  // whose roles must not meet again: their registers differ
    if (split > 1) {
      cluster_sync();
      if (threadIdx.x < T::kComputeThreads) write();
      cluster_sync();  // no CTA leaves while another reads its sums
    }
  }
}

template <class T>
cudaError_t launch(const LinearParams& p, const LinearTileMaps& maps, int split, int parts, cudaStream_t stream) {
  TilesShape shape;
  shape.row_tiles = (p.out_features + T::kRows - 1) / T::kRows;
  shape.token_tiles = (p.num_tokens + T::kTokens - 1) / T::kTokens;
  shape.num_blocks = (p.in_features + T::kDepth - 1) / T::kDepth;
  shape.parts = parts;
  shape.parts_per_cta = parts / split;
  if ((shape.parts_per_cta > 1 && !T::kJoins) || (split > 1 && T::kMovesRegisters)) return cudaErrorInvalidValue;
  const dim3 grid(shape.row_tiles * shape.token_tiles * split, p.batch);
  int device, num_sms;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  shape.stages = static_cast<int>(grid.x * grid.y) <= num_sms ? T::kManyStages : T::kStages;
  // Sums that leave one part after the other need room of their own.
  const bool apart = split > 1 && shape.parts_per_cta > 1;
  const int sum_bytes = apart ? shape.parts_per_cta * T::kSumBytes : 0;
  shape.sums_offset = apart ? shape.stages * T::kStageBytes : 0;
  shape.barrier_offset = shape.stages * T::kStageBytes + sum_bytes;
  return launch_kernel(linear_tiles_kernel<T>, grid, T::kThreads, stream,
                       {.smem_bytes = T::smem_bytes(shape.stages) + sum_bytes, .overlaps = true, .cluster = split}, p, maps,
                       shape, split);
}

}  // namespace

bool linear_tile_exists(int tile_rows, int tile_tokens) {
  if (tile_rows == 64) return tile_tokens == 16 || tile_tokens == 32 || tile_tokens == 64;
  return tile_rows == 128 && (tile_tokens == 64 || tile_tokens == 128 || tile_tokens == 192 || tile_tokens == 256);
}
bool linear_tile_joins(int tile_rows, int tile_tokens) {
  return tile_rows == 64 ? tile_tokens != 16 : tile_tokens == 192;
}

cudaError_t launch_linear_tiles(const LinearParams& p, const LinearTileMaps& maps, int tile_rows, int tile_tokens,
                                int split, int parts, cudaStream_t stream) {
  if (tile_rows == 64) {
    switch (tile_tokens) {
      case 16: return launch<Tiles<64, 16, 7, 10, false>>(p, maps, split, parts, stream);
      case 32: return launch<Tiles<64, 32, 6, 8, true>>(p, maps, split, parts, stream);
      default: return launch<Tiles<64, 64, 4, 6, true>>(p, maps, split, parts, stream);
    }
  }
  switch (tile_tokens) {
    case 64: return launch<Tiles<128, 64, 4, 4, false>>(p, maps, split, parts, stream);
    case 128: return launch<Tiles<128, 128, 3, 6, false>>(p, maps, split, parts, stream);
    case 192: return launch<Tiles<128, 192, 5, 5, true>>(p, maps, split, parts, stream);
    default: return launch<Tiles<128, 256, 4, 4, false>>(p, maps, split, parts, stream);
  }
}

}  // namespace rorqual
