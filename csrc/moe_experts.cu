// moe_experts.cu: the two grouped products of a mixture of experts: gate/up with SiLU and product, and down.
//
// Tokens in expert order are cut into groups of one expert's rows (moe_plan.cu); a tile is 128 rows of that expert's
// weight times one group. The weights are the side of 64 that the tensor cores fix and the tokens are the free side, so a
// tile costs what its tokens need (8, 16, 32, 64, 96 … 256 columns): one kernel serves 1 token and 16,384.
// Tiling:  one CTA an SM takes tiles blockIdx.x, + gridDim.x …, a group's tiles side by side, so that groups of one
//          expert share its weights in L2. Two warpgroups take 64 weight rows each, over up to twelve stages of 64 k. One
//          thread streams the weights, 16 KiB a stage, one run of memory; another brings the group's tokens, in
//          boxes of 8 to 128 rows of a copy in expert order (few choices: rows of x, one by one). For many tokens CTAs work
//          in pairs on neighbouring weight tiles: each brings half of the tokens and multicasts them to both.
//          Gate and up rows alternate by eight in the packed weight, so both values of a column meet in one thread.
//          An accumulator is turned through shared memory and leaves in 16-byte pieces of rows.
// Sums:    each output is one sum over k in order, by the same instructions whatever the group's size: its bits do not
//          depend on the other tokens. Checked by the tests.
// Traffic: the chosen experts' weights once from HBM (again from L2 for each further group of an expert), tokens from L2.
//          2,048 x 1,408: 11.5 MB an expert for gate/up, 5.8 MB for down. HBM-bound up to about 180 tokens an expert.
// Both products start their weights before the kernel in front has ended (dependent launch).
// Halves:  a single token needs few registers and some 100 KiB of weights in flight an SM. So its products take half of an
//          SM, 125 and 90 KiB, and CTAs of the other, or of a product of linear_rows.cu, stand in the other half: while one
//          kernel ends, the next one's weights are on their way. Of more tokens it took longer.
// Checked against rorqual/kernels/experts.py::moe_experts on CPU tensors.
#include <type_traits>

#include "rorqual/device.cuh"
#include "rorqual/launch.h"
#include "rorqual/launch_kernel.cuh"
#include "rorqual/tma.cuh"
#include "rorqual/wgmma.cuh"
#include "rorqual/wgmma_n.cuh"

namespace rorqual {
namespace {

struct Tile {
  static constexpr int kWeightRows = kExpertsTileRows, kGroupRows = 64;  // of a tile; of a warpgroup
  static constexpr int kDepth = 64, kStepsPerStage = kDepth / 16;
  static constexpr int kUnitRows = 16, kUnits = kWeightRows / kUnitRows;  // the rows that one warp holds
  static constexpr int kRowBytes = kDepth * 2;
  static constexpr int kWeightBytes = kWeightRows * kRowBytes;
  static constexpr int kMaxStages = 12;
  static constexpr int kWarpgroup = 128, kWarps = 4;
  static constexpr int kComputeThreads = 2 * kWarpgroup, kThreads = kComputeThreads + kWarpgroup;
  static constexpr int kComputeRegisters = 224, kProducerRegisters = 56;  // where a CTA has the SM to itself
  static_assert(kComputeThreads * kComputeRegisters + kWarpgroup * kProducerRegisters <= 65536);
  static constexpr int kSmemLimit = 232448 - 1536;  // but for the plan of few choices
  static constexpr int kGateUpHalf = 126000, kDownHalf = 91000;  // where it takes half of an SM
  static constexpr int kAlign = 1024;
  static constexpr int kBarrierBytes = 2 * kMaxStages * 8;
  static constexpr int kTurnTokens = 128;  // tokens that a warpgroup turns at once
  static constexpr int kTurned = 1;        // + warpgroup: the named barrier around its turning
};

// Whether the CTA is alone or one of a pair that takes neighbouring weight tiles of one group and shares its tokens.
enum class Cta { kAlone = 1, kPaired = 2 };

// The columns that a tile of so many tokens computes. Pairs are for many tokens, and finer there.
template <Cta kCta>
__host__ __device__ constexpr int tile_columns(int tokens) {
  if (kCta == Cta::kPaired) return tokens <= 32 ? 32 : tokens <= 64 ? 64 : (tokens + 15) / 16 * 16;
  return tokens <= 8 ? 8 : tokens <= 16 ? 16 : tokens <= 32 ? 32 : tokens <= 64 ? 64 : tokens <= 128 ? 128 : 256;
}

constexpr int kMaxFewChoices = kExpertsFewChoices, kMaxExperts = 512;

struct Layout {  // of shared memory: stages, what the warpgroups turn, barriers
  int stage_bytes, turn_bytes, stages, total;
  __host__ __device__ Layout(int group_tokens, Cta cta, int limit) {
    const int columns =
        cta == Cta::kAlone ? tile_columns<Cta::kAlone>(group_tokens) : tile_columns<Cta::kPaired>(group_tokens);
    stage_bytes = Tile::kWeightBytes + columns * Tile::kRowBytes;
    turn_bytes = (columns < Tile::kTurnTokens ? columns : Tile::kTurnTokens) * Tile::kRowBytes;
    const int room = limit - Tile::kAlign - Tile::kBarrierBytes - 2 * turn_bytes;
    stages = room / stage_bytes < Tile::kMaxStages ? room / stage_bytes : Tile::kMaxStages;
    total = Tile::kAlign + stages * stage_bytes + 2 * turn_bytes + Tile::kBarrierBytes;
  }
};

struct Stage {  // the next stage of the ring, and the parity of its turn
  int index = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next(int stages) {
    if (++index == stages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// The plan of at most kMaxFewChoices choices, made in the products themselves: a launch less.
struct FewChoices {
  int4 groups[1 + kMaxFewChoices];
  int token_of[kMaxFewChoices];
};

struct Smem {
  char* stages;
  char* turn;
  uint64_t* full;
  uint64_t* empty;
  FewChoices* few;
  int stage_bytes, turn_bytes, num_stages;
};
// The plan, from here or from global memory; chosen anew at each use, which costs less than a register.
__device__ __forceinline__ int4 plan_group(const ExpertsProductParams& p, const Smem& smem, int index) {
  return p.topk_ids != nullptr ? smem.few->groups[index] : p.groups[index];
}

// The copy of tma_load_3d into the same place of both CTAs of a pair; completes each one's barrier.
__device__ __forceinline__ void tma_load_3d_pair(void* dst, const CUtensorMap* map, uint64_t* barrier, int x, int y,
                                                 int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(smem_addr(dst)),
      "l"(map), "r"(smem_addr(barrier)), "r"(x), "r"(y), "r"(z), "h"(static_cast<uint16_t>(3))
      : "memory");
}
// Arrives at this barrier's like in CTA `rank` of the pair. What it gives back was read by wgmma, which has ended: without
// .release.cluster, that is without a fence for the whole GPU at every step (it halved the speed).
__device__ __forceinline__ void mbarrier_arrive_at(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(smem_addr(barrier)),
      "r"(rank)
      : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores 8x8 matrices of bf16 transposed: lane 8 i + r gives the address of matrix i's row r after turning.
__device__ __forceinline__ void store_turned(uint32_t addr, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}
__device__ __forceinline__ void store_turned(uint32_t addr, const uint32_t (&m)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(addr), "r"(m[0]), "r"(m[1])
               : "memory");
}
__device__ __forceinline__ void store_turned(uint32_t addr, const uint32_t (&m)[1]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(addr), "r"(m[0]) : "memory");
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// One warp makes the plan of few choices. A choice's row is how many come before it, by expert and then in order; a group
// begins with every group_tokens-th choice of an expert.
__device__ __forceinline__ void plan_few(const ExpertsProductParams& p, FewChoices& plan, bool writes_rows) {
  constexpr int kOwn = kMaxFewChoices / kWarpSize;
  static_assert(kOwn == 2);
  const int lane = threadIdx.x % kWarpSize;
  int expert[kOwn], row[kOwn], rank[kOwn], equal[kOwn];  // rank: of equal ones, how many come before
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int choice = lane + i * kWarpSize;
    expert[i] = choice < p.num_choices ? p.topk_ids[choice] : -1;
    if (expert[i] < 0 || expert[i] >= p.num_experts) expert[i] = kMaxExperts;
    row[i] = rank[i] = equal[i] = 0;
  }
#pragma unroll 8
  for (int other = 0; other < p.num_choices; ++other) {
    const int id = __shfl_sync(0xffffffffu, other < kWarpSize ? expert[0] : expert[1], other % kWarpSize);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const bool earlier = other < lane + i * kWarpSize;
      row[i] += id < expert[i] || (id == expert[i] && earlier);
      rank[i] += id == expert[i] && earlier;
      equal[i] += id == expert[i];
    }
  }
  uint64_t leader_rows = 0;  // bit r: row r begins a group
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const bool leads = expert[i] < kMaxExperts && rank[i] % p.group_tokens == 0;
    const uint32_t low = __reduce_or_sync(0xffffffffu, leads && row[i] < 32 ? 1u << row[i] : 0u);
    const uint32_t high = __reduce_or_sync(0xffffffffu, leads && row[i] >= 32 ? 1u << (row[i] - 32) : 0u);
    leader_rows |= low | uint64_t{high} << 32;
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int choice = lane + i * kWarpSize;
    const bool is_one = expert[i] < kMaxExperts;
    if (is_one) plan.token_of[row[i]] = choice / p.top_k;
    if (is_one && rank[i] % p.group_tokens == 0) {
      const int group = __popcll(leader_rows & ((uint64_t{1} << row[i]) - 1));
      plan.groups[1 + group] = make_int4(expert[i], row[i], min(p.group_tokens, equal[i] - rank[i]), 0);
    }
    if (writes_rows && choice < p.num_choices) p.row_of[choice] = is_one ? row[i] : -1;
  }
  if (lane == 0) plan.groups[0] = make_int4(__popcll(leader_rows), 0, 0, 0);
}

struct Work {
  int4 group;      // expert, first row, rows
  int weight_row;  // the first of the tile
  int units;       // its weight rows / kUnitRows
};

// The tiles of one CTA, in order. Either whole tiles in turn; or, where memory is the limit and some CTAs would have a tile
// more than others, an even share of all groups' weight rows, cut into tiles of about one size.
template <Cta kCta>
struct Walk {
  const ExpertsProductParams& p;
  const Smem& smem;
  const int group_units, stride;  // a group's units; from one tile to the CTA's next, 0: an even share
  int next_unit, end_unit;
  __device__ __forceinline__ Walk(const ExpertsProductParams& params, const Smem& shared)
      : p(params),
        smem(shared),
        group_units(p.weight_rows / Tile::kUnitRows),
        stride(kCta == Cta::kAlone && p.even ? 0 : gridDim.x * Tile::kUnits) {
    const int64_t all_units = int64_t{plan_group(p, smem, 0).x} * group_units;
    next_unit = stride > 0 ? blockIdx.x * Tile::kUnits : static_cast<int>(all_units * blockIdx.x / gridDim.x);
    end_unit = static_cast<int>(stride > 0 ? all_units : all_units * (blockIdx.x + 1) / gridDim.x);
  }
  __device__ __forceinline__ bool next(Work& work) {
    if (next_unit >= end_unit) return false;
    const int group = next_unit / group_units, first = next_unit % group_units;
    work.group = plan_group(p, smem, 1 + group);
    work.weight_row = first * Tile::kUnitRows;
    if (stride > 0) {
      work.units = Tile::kUnits;
      next_unit += stride;
    } else {
      const int left = min(end_unit - next_unit, group_units - first);
      const int tiles = (left + Tile::kUnits - 1) / Tile::kUnits;
      work.units = (left + tiles - 1) / tiles;
      next_unit += work.units;
    }
    return true;
  }
};

// One thread: the weights of all tiles, stage by stage. It waits for no kernel: weights depend on none, and the groups are
// older than the previous kernel (where they are not, the caller has waited).
template <Cta kCta>
__device__ __forceinline__ void produce_weights(const ExpertsProductParams& p, const Smem& smem) {
  Walk<kCta> walk(p, smem);
  Work work;
  Stage stage;
  while (walk.next(work)) {
    // The tile's rows of one step lie in order in one box of the weight, or in two neighbouring ones.
    const int box_row = work.weight_row % Tile::kWeightRows;
    const int64_t first_row = int64_t{work.group.x} * p.weight_rows + work.weight_row - box_row;
    const char* src =
        reinterpret_cast<const char*>(p.weight) + (first_row * p.steps + box_row) * Tile::kRowBytes;
    const int num_bytes = work.units * Tile::kUnitRows * Tile::kRowBytes;
    const int first_bytes = min(num_bytes, (Tile::kWeightRows - box_row) * Tile::kRowBytes);
    for (int step = 0; step < p.steps; ++step, stage.next(smem.num_stages), src += Tile::kWeightBytes) {
      char* dst = smem.stages + stage.index * smem.stage_bytes;
      uint64_t* full = smem.full + stage.index;
      mbarrier_wait(smem.empty + stage.index, stage.parity ^ 1);
      mbarrier_arrive_expect_tx(full, num_bytes);
      bulk_load(dst, src, full, first_bytes);
      if (first_bytes < num_bytes) {
        const char* next_box = src + int64_t{p.steps} * Tile::kWeightBytes - box_row * Tile::kRowBytes;
        bulk_load(dst + first_bytes, next_box, full, num_bytes - first_bytes);
      }
    }
  }
}

// One thread: `rows` rows of tokens from `row` on, a multiple of eight, as few boxes. For pairs into both CTAs.
template <Cta kCta>
__device__ __forceinline__ void load_rows(const ExpertsProductParams& p, char* dst, uint64_t* full, int step, int row,
                                          int rows) {
#pragma unroll
  for (int i = kExpertsTokenMaps - 1; i >= 0; --i) {
    const int height = 8 << i;
    const int boxes = i == kExpertsTokenMaps - 1 ? rows / height : rows / height % 2;
    for (int box = 0; box < boxes; ++box, row += height, dst += height * Tile::kRowBytes) {
      if constexpr (kCta == Cta::kAlone) {
        tma_load_3d(dst, &p.token_maps[i], full, step * Tile::kDepth, row, 0);
      } else {
        tma_load_3d_pair(dst, &p.token_maps[i], full, step * Tile::kDepth, row, 0);
      }
    }
  }
}

// One warp: the tokens of all tiles, which the previous kernel wrote (or x, gathered row by row).
template <bool kDown, Cta kCta>
__device__ __forceinline__ void produce_tokens(const ExpertsProductParams& p, const Smem& smem) {
  const int lane = threadIdx.x % kWarpSize;
  wait_for_previous_kernel();
  let_dependents_launch();
  const bool gathers = !kDown && kCta == Cta::kAlone && p.topk_ids != nullptr;
  Walk<kCta> walk(p, smem);
  Work work;
  Stage stage;
  while (walk.next(work)) {
    const int4 group = work.group;
    const int rows = (group.z + 7) / 8 * 8;
    // A pair shares the loading: the first half of the rows, or the second.
    const int half = kCta == Cta::kPaired ? (rows / 8 + 1) / 2 * 8 : rows;
    const bool second = kCta == Cta::kPaired && blockIdx.x % 2 == 1;
    const int begin = second ? half : 0, own_rows = second ? rows - half : half;
    int own_token[2] = {0, 0};  // gathering: of rows `lane` and `lane + 32`
    if (gathers) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (lane + i * kWarpSize < group.z) own_token[i] = smem.few->token_of[group.y + lane + i * kWarpSize];
      }
    }
    for (int step = 0; step < p.steps; ++step, stage.next(smem.num_stages)) {
      char* dst = smem.stages + stage.index * smem.stage_bytes + Tile::kWeightBytes;
      uint64_t* full = smem.full + stage.index;
      if (gathers) {
        mbarrier_wait(smem.empty + stage.index, stage.parity ^ 1);
        if (lane == 0) mbarrier_arrive_expect_tx(full, group.z * Tile::kRowBytes);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = lane + i * kWarpSize;
          if (row < group.z) {
            tma_load_3d(dst + row * Tile::kRowBytes, &p.token_maps[0], full, step * Tile::kDepth, own_token[i], 0);
          }
        }
      } else if (lane == 0) {
        mbarrier_wait(smem.empty + stage.index, stage.parity ^ 1);
        mbarrier_arrive_expect_tx(full, rows * Tile::kRowBytes);
        load_rows<kCta>(p, dst + begin * Tile::kRowBytes, full, step, group.y + begin, own_rows);
      }
    }
  }
}

// One warpgroup's half of a tile: kTokens columns, of which the group's are stored.
template <bool kDown, Cta kCta, int kTokens>
__device__ __forceinline__ void compute_tile(const ExpertsProductParams& p, const Smem& smem, Stage& stage,
                                             const Work& work, int half) {
  const int4 group = work.group;
  const int thread = threadIdx.x % Tile::kWarpgroup, warp = thread / kWarpSize, lane = thread % kWarpSize;
  const uint64_t weights =
      swizzle128_desc(smem_addr(smem.stages) + half * Tile::kGroupRows * Tile::kRowBytes);
  const uint64_t tokens = swizzle128_desc(smem_addr(smem.stages) + Tile::kWeightBytes);
  // A stage is free when both CTAs of a pair have used its tokens.
  const auto release = [&](int index) {
    if constexpr (kCta == Cta::kAlone) {
      if (lane == 0) mbarrier_arrive(smem.empty + index);
    } else {
      if (lane < 2) mbarrier_arrive_at(smem.empty + index, lane);
    }
  };
  float sums[kTokens / 2] = {};  // else the registers of all sizes would be alive through the whole loop of tiles
  int previous = 0;
  for (int step = 0; step < p.steps; ++step) {
    mbarrier_wait(smem.full + stage.index, stage.parity);
    const uint64_t at = stage.index * (smem.stage_bytes / 16);
    wgmma_fence_operand(sums);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < Tile::kStepsPerStage; ++k) {
      wgmma_m64_ss<kTokens>(sums, weights + at + k * 2, tokens + at + k * 2, step + k > 0);
    }
    wgmma_commit();
    wgmma_fence_operand(sums);
    if (step > 0) {
      wgmma_wait<1>();  // the step before this one
      release(previous);
    }
    previous = stage.index;
    stage.next(smem.num_stages);
  }
  wgmma_wait<0>();
  wgmma_fence_operand(sums);
  release(previous);

  // sums[4 j + 2 h + e]: weight row 16 warp + lane / 4 + 8 h of this half, token 8 j + 2 (lane % 4) + e.
  constexpr int kCols = kDown ? 64 : 32;             // output columns of this half: gate and up become one
  constexpr int kPieces = kCols / 8, kBytes = kCols * 2;  // of a turned row: 16-byte pieces, bytes
  constexpr int kTurn = kDown && kTokens > Tile::kTurnTokens ? Tile::kTurnTokens : kTokens;
  char* turn = smem.turn + half * smem.turn_bytes;
  const uint32_t turn_addr = smem_addr(turn);
  // Pieces are exchanged within 128 bytes so that eight rows meet all banks.
  const auto place = [&](int token, int piece) {
    return token * kBytes + ((piece ^ (kDown ? token & 7 : token >> 1 & 3)) << 4);
  };
  const int first_col = (kDown ? work.weight_row : work.weight_row / 2) + half * kCols;
  const int pieces = min(kPieces, work.units * (kDown ? 2 : 1) - half * kPieces);  // that the tile has
  __nv_bfloat16* out = p.out + int64_t{group.y} * p.out_width + first_col;
#pragma unroll
  for (int begin = 0; begin < kTokens; begin += kTurn) {
    constexpr int kBlocks = kTurn / 8;
    named_barrier_sync(Tile::kTurned + half, Tile::kWarpgroup);  // what was turned before has been read
    if constexpr (kDown) {
      constexpr int kAtOnce = kBlocks % 2 == 0 ? 2 : 1;
#pragma unroll
      for (int j = 0; j < kBlocks; j += kAtOnce) {
        if (begin + 8 * j >= kTokens) continue;  // known when unrolled
        uint32_t pairs[2 * kAtOnce];
#pragma unroll
        for (int i = 0; i < 2 * kAtOnce; ++i) {
          const int at = 4 * (begin / 8 + j + i / 2) + 2 * (i % 2);
          pairs[i] = pack_bf16(sums[at], sums[at + 1]);
        }
        const int token = 8 * (j + (kAtOnce == 2 ? lane / 16 : 0)) + lane % 8;
        store_turned(turn_addr + place(token, 2 * warp + lane / 8 % 2), pairs);
      }
    } else {
      constexpr int kAtOnce = kBlocks % 4 == 0 ? 4 : kBlocks % 2 == 0 ? 2 : 1;
#pragma unroll
      for (int j = 0; j < kBlocks; j += kAtOnce) {
        uint32_t pairs[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int at = 4 * (j + i);
          pairs[i] = pack_bf16(silu(sums[at]) * sums[at + 2], silu(sums[at + 1]) * sums[at + 3]);
        }
        const int token = 8 * (j + lane / 8 % kAtOnce) + lane % 8;
        store_turned(turn_addr + place(token, warp), pairs);
      }
    }
    named_barrier_sync(Tile::kTurned + half, Tile::kWarpgroup);
    const int rows = min(group.z - begin, kTurn);
    for (int i = thread; i < rows * kPieces; i += Tile::kWarpgroup) {
      const int token = i / kPieces, piece = i % kPieces;
      if (piece >= pieces) continue;
      *reinterpret_cast<uint4*>(out + int64_t{begin + token} * p.out_width + piece * 8) =
          *reinterpret_cast<const uint4*>(turn + place(token, piece));
    }
  }
}

template <bool kDown, Cta kCta, bool kHalf>
__device__ __forceinline__ void compute(const ExpertsProductParams& p, const Smem& smem) {
  const int half = threadIdx.x / Tile::kWarpgroup;
  Walk<kCta> walk(p, smem);
  Work work;
  Stage stage;
  while (walk.next(work)) {
    const auto with = [&](auto tokens) {
      compute_tile<kDown, kCta, decltype(tokens)::value>(p, smem, stage, work, half);
    };
    if constexpr (kHalf) {
      with(std::integral_constant<int, 8>{});
    } else if constexpr (kCta == Cta::kAlone) {
      switch (tile_columns<kCta>(work.group.z)) {
        case 8: with(std::integral_constant<int, 8>{}); break;
        case 16: with(std::integral_constant<int, 16>{}); break;
        case 32: with(std::integral_constant<int, 32>{}); break;
        case 64: with(std::integral_constant<int, 64>{}); break;
        case 128: with(std::integral_constant<int, 128>{}); break;
        default: with(std::integral_constant<int, 256>{});
      }
    } else {
      switch (tile_columns<kCta>(work.group.z)) {
        case 32: with(std::integral_constant<int, 32>{}); break;
        case 64: with(std::integral_constant<int, 64>{}); break;
        case 80: with(std::integral_constant<int, 80>{}); break;
        case 96: with(std::integral_constant<int, 96>{}); break;
        case 112: with(std::integral_constant<int, 112>{}); break;
        case 128: with(std::integral_constant<int, 128>{}); break;
        case 144: with(std::integral_constant<int, 144>{}); break;
        case 160: with(std::integral_constant<int, 160>{}); break;
        case 176: with(std::integral_constant<int, 176>{}); break;
        case 192: with(std::integral_constant<int, 192>{}); break;
        case 208: with(std::integral_constant<int, 208>{}); break;
        case 224: with(std::integral_constant<int, 224>{}); break;
        case 240: with(std::integral_constant<int, 240>{}); break;
        default: with(std::integral_constant<int, 256>{});
      }
    }
  }
}

template <bool kDown>
__host__ __device__ constexpr int smem_limit(bool half) {
  return half ? (kDown ? Tile::kDownHalf : Tile::kGateUpHalf) : Tile::kSmemLimit;
}

// kHalf: of half an SM, groups of up to 8 tokens.
template <bool kDown, Cta kCta, bool kHalf>
__global__ void __launch_bounds__(Tile::kThreads, kHalf ? 2 : 1)
    experts_product_kernel(const __grid_constant__ ExpertsProductParams p) {
  extern __shared__ char smem_raw[];
  __shared__ FewChoices few;
  const Layout layout(p.group_tokens, kCta, smem_limit<kDown>(kHalf));
  Smem smem;
  smem.stages = smem_raw + (Tile::kAlign - smem_addr(smem_raw) % Tile::kAlign) % Tile::kAlign;
  smem.turn = smem.stages + layout.stages * layout.stage_bytes;
  smem.full = reinterpret_cast<uint64_t*>(smem.turn + 2 * layout.turn_bytes);
  smem.empty = smem.full + Tile::kMaxStages;
  smem.few = &few;
  smem.stage_bytes = layout.stage_bytes;
  smem.turn_bytes = layout.turn_bytes;
  smem.num_stages = layout.stages;
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.token_maps[0]);
    for (int i = 0; i < layout.stages; ++i) {
      mbarrier_init(smem.full + i, 2);  // the weights' producer and the tokens'
      mbarrier_init(smem.empty + i, static_cast<int>(kCta) * 2 * Tile::kWarps);
    }
    mbarrier_init_fence();
  }
  if constexpr (kCta == Cta::kPaired) {
    cluster_sync();  // the other's barriers are ready too
  } else {
    __syncthreads();
  }
  // What the groups come from is older than the previous kernel, which let this one start when all before it had ended:
  // except for the first product of few choices. What the previous kernel wrote are tokens; their producer waits for it.
  if (!kDown && p.topk_ids != nullptr) wait_for_previous_kernel();
  if (p.topk_ids != nullptr) {
    if (threadIdx.x < kWarpSize) plan_few(p, few, !kDown && blockIdx.x == 0);
    __syncthreads();
  }
  if (threadIdx.x < Tile::kComputeThreads) {
    if constexpr (!kHalf) take_registers<Tile::kComputeRegisters>();
    compute<kDown, kCta, kHalf>(p, smem);
    __syncwarp();
  } else {
    if constexpr (!kHalf) release_registers<Tile::kProducerRegisters>();
    if (threadIdx.x == Tile::kComputeThreads) {
      produce_weights<kCta>(p, smem);
    } else if (threadIdx.x / kWarpSize == Tile::kComputeThreads / kWarpSize + 1) {
      produce_tokens<kDown, kCta>(p, smem);
    }
    __syncwarp();
  }
  if constexpr (kCta == Cta::kPaired) cluster_sync();  // the other may still copy here, and arrive
}

template <bool kDown>
cudaError_t launch(const ExpertsProductParams& p, int num_ctas, bool paired, cudaStream_t stream) {
  const bool half = p.topk_ids != nullptr && p.num_choices == p.top_k && p.group_tokens == 8;
  const int smem_bytes = Layout(p.group_tokens, paired ? Cta::kPaired : Cta::kAlone, smem_limit<kDown>(half)).total;
  if (paired) {
    return launch_kernel(experts_product_kernel<kDown, Cta::kPaired, false>, dim3((num_ctas + 1) / 2 * 2), Tile::kThreads,
                         stream, {.smem_bytes = smem_bytes, .overlaps = true, .cluster = 2}, p);
  }
  if (half) {
    return launch_kernel(experts_product_kernel<kDown, Cta::kAlone, true>, dim3(num_ctas), Tile::kThreads, stream,
                         {.smem_bytes = smem_bytes, .overlaps = true}, p);
  }
  return launch_kernel(experts_product_kernel<kDown, Cta::kAlone, false>, dim3(num_ctas), Tile::kThreads, stream,
                       {.smem_bytes = smem_bytes, .overlaps = true}, p);
}

}  // namespace

cudaError_t launch_experts_gate_up(const ExpertsProductParams& p, int num_ctas, bool paired, cudaStream_t stream) {
  return launch<false>(p, num_ctas, paired, stream);
}
cudaError_t launch_experts_down(const ExpertsProductParams& p, int num_ctas, bool paired, cudaStream_t stream) {
  return launch<true>(p, num_ctas, paired, stream);
}

}  // namespace rorqual
