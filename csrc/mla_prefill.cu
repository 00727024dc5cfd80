// mla_prefill.cu: causal attention of prompts over expanded keys (192) and values (128), and the gathering of cached
// latents into the dense rows that are expanded.
//
// Scores and output take 2 * (192 + 128) FLOP a pair of query and key, so a tile of 128 queries does 131 FLOP for
// each byte of keys and values it reads: the tensor cores are the limit, and L2 feeds them.
// Tiling:  one CTA an SM takes (tile of 128 query rows, head) items off a queue, heaviest first; the plan, made on the
//          host, says which. A producer warp loads Q once an item and keys and values in two stages of 128 each
//          (48 + 2 * (48 + 32) KiB of shared memory). Two warpgroups own 64 rows each: S = Q K^T in 64 registers a
//          thread, O in 64, the weights P in 32. The scores of tile n + 1 are issued before the product of P and the
//          values of tile n, so that the softmax of one runs beside the other. On the diagonal the upper warpgroup
//          leaves out the half of the last tile that none of its rows attends to.
// Traffic: 80 KiB a tile of keys and item, from L2; Q 48 KiB and output 32 KiB an item. Heads are taken in groups whose
//          keys and values fit in L2, so HBM gives each of them about once.
// A row's bits depend on its own sequence and position only: key tiles start at multiples of 128, are taken in
// order, and a tile that is masked for a row changes none of its state, exactly. For the same reason a row that is
// carried from slab to slab (state) ends in the same bits as one that saw all keys at once.
// Tried on an H200 and left out: see docs/kernels.md.
// Checked against rorqual/kernels/reference_prefill.py.
#include "rorqual/device.cuh"
#include "rorqual/launch.h"
#include "rorqual/launch_kernel.cuh"
#include "rorqual/tma.cuh"
#include "rorqual/wgmma.cuh"

namespace rorqual {
namespace {

struct Prefill {
  static constexpr int kGroups = 2, kGroupThreads = 128, kGroupWarps = 4, kGroupRows = kPrefillGroupRows;
  static constexpr int kComputeThreads = kGroups * kGroupThreads;
  static constexpr int kThreads = kComputeThreads + kGroupThreads;  // whole warpgroups, so that one gives up registers
  static constexpr int kComputeRegisters = 232, kProducerRegisters = 40;
  static_assert(kComputeThreads * kComputeRegisters + kGroupThreads * kProducerRegisters <= 65536);
  static constexpr int kRows = kPrefillTileRows, kKeys = kPrefillTileKeys, kStages = 2;
  static_assert(kRows == kGroups * kGroupRows);
  static constexpr int kNope = 128, kRope = 64, kValue = 128;
  // Everything lies in shared memory as chunks of 64 columns; a chunk is [rows][128 bytes], 128-byte swizzled.
  static constexpr int kChunkCols = 64, kChunkRowBytes = kChunkCols * 2, kStepsPerChunk = kChunkCols / 16;
  static constexpr int kNopeChunks = kNope / kChunkCols, kKeyChunks = (kNope + kRope) / kChunkCols;
  static constexpr int kValueChunks = kValue / kChunkCols;
  static constexpr int kQueryChunkBytes = kRows * kChunkRowBytes, kKeyChunkBytes = kKeys * kChunkRowBytes;
  static constexpr int kQueryBytes = kKeyChunks * kQueryChunkBytes;
  static constexpr int kGroupChunkBytes = kGroupRows * kChunkRowBytes;  // a warpgroup's part of a chunk of Q
  static constexpr int kKeyBytes = kKeyChunks * kKeyChunkBytes, kValueBytes = kValueChunks * kKeyChunkBytes;
  static constexpr int kScores = kKeys / 2, kOut = kValue / 2;  // registers of the accumulators of 64 rows
  static constexpr int kProbs = kScores / 2;

  static constexpr int kKeyOffset = kQueryBytes;
  static constexpr int kValueOffset = kKeyOffset + kStages * kKeyBytes;
  static constexpr int kItemBytes = 64;  // the tile's words, then the head
  static constexpr int kItemOffset = kValueOffset + kStages * kValueBytes;  // one for each warpgroup
  static constexpr int kBarrierOffset = kItemOffset + kGroups * kItemBytes;
  static constexpr int kSmemBytes = kBarrierOffset + (2 * kGroups + 4 * kStages) * 8;
  static_assert(kKeyOffset % 1024 == 0 && kValueOffset % 1024 == 0 && kSmemBytes + 1024 <= 232448);
  static constexpr int kHeadWord = kPrefillTileWords;

  static constexpr int kBarrierGroup = 1;  // + warpgroup
};

struct PrefillBarriers {
  uint64_t *q_full, *q_empty;                      // [kGroups]
  uint64_t *k_full, *k_empty, *v_full, *v_empty;  // [kStages]
};

__device__ __forceinline__ void produce(const MlaPrefillParams& p, char* smem, const PrefillBarriers& barriers) {
  using T = Prefill;
  const int lane = threadIdx.x % kWarpSize;
  const int num_items = p.num_tiles * p.num_heads;
  const auto shared_item = [&](int g) {
    return reinterpret_cast<volatile int*>(smem + T::kItemOffset + g * T::kItemBytes);
  };
  uint32_t step = 0, num_taken = 0;  // key tiles and items so far
  for (int item = blockIdx.x; item < num_items; ++num_taken) {
    // Every item adds one, so whoever draws the last number leaves the queue as it was found.
    int drawn = 0;
    if (lane == 0) {
      drawn = atomicAdd(p.queue, 1);
      if (drawn == num_items - 1) *p.queue = 0;
    }
    const int items_per_group = p.num_tiles * p.heads_per_group;
    const int first_head = item / items_per_group * p.heads_per_group;
    const int group_heads = min(p.heads_per_group, p.num_heads - first_head);
    const int in_group = item % items_per_group;
    const int tile = in_group / group_heads, head = first_head + in_group % group_heads;
    const int word = lane < kPrefillTileWords ? p.tiles[tile * kPrefillTileWords + lane] : head;
    const int q_row = __shfl_sync(0xffffffffu, word, 0);
    const int kv_row = __shfl_sync(0xffffffffu, word, 3);
    const int key_begin = __shfl_sync(0xffffffffu, word, 4);
    const int key_end = __shfl_sync(0xffffffffu, word, 5);

    const auto load_keys = [&](uint32_t at, int first_key) {
      const uint32_t stage = at % T::kStages, phase = at / T::kStages % 2;
      mbarrier_wait(&barriers.k_empty[stage], phase ^ 1);
      if (lane == 0) {
        uint64_t* full = &barriers.k_full[stage];
        char* dst = smem + T::kKeyOffset + stage * T::kKeyBytes;
        mbarrier_arrive_expect_tx(full, T::kKeyBytes);
#pragma unroll
        for (int c = 0; c < T::kNopeChunks; ++c) {
          tma_load_3d(dst + c * T::kKeyChunkBytes, &p.kv_map, full, c * T::kChunkCols, head, kv_row + first_key);
        }
        tma_load_3d(dst + T::kNopeChunks * T::kKeyChunkBytes, &p.k_pe_map, full, 0, 0, kv_row + first_key);
      }
      __syncwarp();
    };
    const auto load_values = [&](uint32_t at, int first_key) {
      const uint32_t stage = at % T::kStages, phase = at / T::kStages % 2;
      mbarrier_wait(&barriers.v_empty[stage], phase ^ 1);
      if (lane == 0) {
        uint64_t* full = &barriers.v_full[stage];
        char* dst = smem + T::kValueOffset + stage * T::kValueBytes;
        mbarrier_arrive_expect_tx(full, T::kValueBytes);
#pragma unroll
        for (int c = 0; c < T::kValueChunks; ++c) {
          tma_load_3d(dst + c * T::kKeyChunkBytes, &p.kv_map, full, T::kNope + c * T::kChunkCols, head,
                      kv_row + first_key);
        }
      }
      __syncwarp();
    };

    load_keys(step, key_begin);  // its slot is free before Q's is
#pragma unroll
    for (int g = 0; g < T::kGroups; ++g) {
      mbarrier_wait(&barriers.q_empty[g], num_taken % 2 ^ 1);
      // Every lane arrives for the word that it has written; lane 0 also for Q.
      if (lane <= T::kHeadWord) shared_item(g)[lane] = word;
      if (lane > 0) mbarrier_arrive(&barriers.q_full[g]);
      if (lane == 0) {
        mbarrier_arrive_expect_tx(&barriers.q_full[g], T::kQueryBytes / T::kGroups);
#pragma unroll
        for (int c = 0; c < T::kKeyChunks; ++c) {
          tma_load_3d(smem + c * T::kQueryChunkBytes + g * T::kGroupChunkBytes, &p.q_map, &barriers.q_full[g],
                      c * T::kChunkCols, head, q_row + g * T::kGroupRows);
        }
      }
      __syncwarp();
    }
    for (int key = key_begin + T::kKeys; key < key_end; key += T::kKeys, ++step) {
      load_keys(step + 1, key);
      load_values(step, key - T::kKeys);
    }
    load_values(step, key_begin + (key_end - 1 - key_begin) / T::kKeys * T::kKeys);
    ++step;
    item = static_cast<int>(gridDim.x) + __shfl_sync(0xffffffffu, drawn, 0);
  }
#pragma unroll
  for (int g = 0; g < T::kGroups; ++g) {
    mbarrier_wait(&barriers.q_empty[g], num_taken % 2 ^ 1);
    if (lane == 0) shared_item(g)[T::kHeadWord] = -1;
    mbarrier_arrive(&barriers.q_full[g]);
  }
}

// The running softmax of a thread's two rows, 16 warp + group and the one 8 below it. Maxima are those of the unscaled
// scores and agree within a quad; sums are of the thread's own columns until the end.
struct RunningSoftmax {
  float max[2], sum[2];

  // Turns scores into weights, and says by what the rows' earlier output must be multiplied.
  template <int kCount>
  __device__ __forceinline__ void update(float (&scores)[kCount], float (&rescale)[2], float scale_log2) {
    float tile_max[4] = {scores[0], scores[2], scores[4], scores[6]};  // two chains a row
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      float& into = tile_max[i % 4 / 2 + i / 4 % 2 * 2];
      into = fmaxf(into, scores[i]);
    }
    float shift[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float new_max = fmaxf(tile_max[h], tile_max[h + 2]);
      new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(0xffffffffu, new_max, 2));
      new_max = fmaxf(new_max, max[h]);
      // A row that has seen nothing yet keeps a finite base, so that no -inf is subtracted from itself.
      const float base = new_max == neg_inf() ? 0.f : new_max;
      rescale[h] = exp2_approx((max[h] - base) * scale_log2);  // exactly one if the maximum has not grown
      shift[h] = base * scale_log2;
      max[h] = new_max;
    }
    float tile_sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      scores[i] = exp2_approx(fmaf(scores[i], scale_log2, -shift[i % 4 / 2]));
      tile_sum[i % 4 / 2 + i / 4 % 2 * 2] += scores[i];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) sum[h] = fmaf(sum[h], rescale[h], tile_sum[h] + tile_sum[h + 2]);
  }
};

// ptxas moves a wait for products up to the first moment it may, and then the softmax no longer runs beside them.
// It does not move it over this, which does nothing: no sum of weights is negative.
__device__ __forceinline__ void hold_until(float sum) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.f32 p, %0, 0f00000000;\n@p trap;\n}" ::"f"(sum));
}

// Lane q of a quad gets the four lanes' words q, in the lanes' order.
__device__ __forceinline__ void transpose_in_quad(uint32_t (&words)[4], int quad) {
#pragma unroll
  for (int step = 1; step <= 2; step *= 2) {
    const bool upper = (quad & step) != 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t& low = words[step == 1 ? 2 * i : i];
      uint32_t& high = words[step == 1 ? 2 * i + 1 : i + 2];
      const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? low : high, step);
      low = upper ? other : low;
      high = upper ? high : other;
    }
  }
}

// S = Q K^T, started: 64 rows of Q by the first kKeys of a tile of keys.
template <int kKeys>
__device__ __forceinline__ void start_scores(float (&scores)[kKeys / 2], uint64_t q_desc, uint64_t k_desc) {
  using T = Prefill;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < T::kKeyChunks * T::kStepsPerChunk; ++k) {
    const int chunk = k / T::kStepsPerChunk, inner = k % T::kStepsPerChunk * 32;
    const uint64_t q_at = q_desc + (chunk * T::kQueryChunkBytes + inner) / 16;
    const uint64_t k_at = k_desc + (chunk * T::kKeyChunkBytes + inner) / 16;
    if constexpr (kKeys == T::kKeys) {
      wgmma_m64n128k16_ss<0, 0>(scores, q_at, k_at, k > 0);
    } else {
      static_assert(kKeys == 64);
      wgmma_m64n64k16_ss<0, 0>(scores, q_at, k_at, k > 0);
    }
  }
  wgmma_commit();
}

// O += P V, started: the weights of 64 rows by the first kKeys of a tile of values.
template <int kKeys>
__device__ __forceinline__ void start_output(float (&out)[Prefill::kOut], const uint32_t (&probs)[Prefill::kProbs],
                                             uint64_t v_desc) {
  using T = Prefill;
  wgmma_fence_operand(out);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    wgmma_m64n128k16_rs<1>(out, probs[4 * k], probs[4 * k + 1], probs[4 * k + 2], probs[4 * k + 3],
                           v_desc + k * 16 * T::kChunkRowBytes / 16, 1);
  }
  wgmma_commit();
}

__device__ __forceinline__ void compute(const MlaPrefillParams& p, char* smem, const PrefillBarriers& barriers) {
  using T = Prefill;
  // From one lane for all: it makes what follows from it, descriptors above all, uniform in the compiler's eyes too.
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / T::kGroupThreads, 0);
  const int thread = threadIdx.x % T::kGroupThreads;
  const int warp = thread / kWarpSize, lane = thread % kWarpSize, group = lane / 4, quad = lane % 4;
  const int own_row = warpgroup * T::kGroupRows + 16 * warp + group;  // of the tile; the other one is 8 below
  const volatile int* item = reinterpret_cast<const volatile int*>(smem + T::kItemOffset + warpgroup * T::kItemBytes);
  const uint64_t q_desc = swizzle128_desc(smem_addr(smem) + warpgroup * T::kGroupChunkBytes);
  const uint64_t k_desc = swizzle128_desc(smem_addr(smem) + T::kKeyOffset);
  const uint64_t v_desc = swizzle128_desc(smem_addr(smem) + T::kValueOffset, T::kKeyChunkBytes);
  const auto key_desc = [&](uint32_t at) { return k_desc + at % T::kStages * (T::kKeyBytes / 16); };
  const auto value_desc = [&](uint32_t at) { return v_desc + at % T::kStages * (T::kValueBytes / 16); };
  const auto wait = [](uint64_t* full, uint32_t at) { mbarrier_wait(&full[at % T::kStages], at / T::kStages % 2); };
  const auto release = [&](uint64_t* empty) {
    if (lane == 0) mbarrier_arrive(empty);
  };

  uint32_t step = 0;
  for (uint32_t num_taken = 0;; ++num_taken) {
    mbarrier_wait(&barriers.q_full[warpgroup], num_taken % 2);
    const int head = item[T::kHeadWord];
    if (head < 0) break;
    const int q_row = item[0], num_rows = item[1], first_limit = item[2];
    const int key_begin = item[4], key_end = item[5], valid_end = item[6], flags = item[7];
    const int num_steps = (key_end - key_begin + T::kKeys - 1) / T::kKeys;
    if (num_rows <= warpgroup * T::kGroupRows) {  // none of the rows are this warpgroup's
      for (int n = 0; n < num_steps; ++n, ++step) {
        wait(barriers.k_full, step);
        release(&barriers.k_empty[step % T::kStages]);
        wait(barriers.v_full, step);
        release(&barriers.v_empty[step % T::kStages]);
      }
      mbarrier_arrive(&barriers.q_empty[warpgroup]);
      continue;
    }
    // Row r of the tile attends to keys [0, first_limit + r). Up to here all of this warpgroup's rows attend to all.
    const int all_limit = first_limit + warpgroup * T::kGroupRows;
    const int limit = first_limit + own_row;
    const bool carried_in = (flags & kPrefillFirst) == 0;
    float* const state = p.state + (int64_t{q_row + own_row} * p.num_heads + head) * kPrefillStateWords;
    const int64_t state_step = int64_t{8} * p.num_heads * kPrefillStateWords;

    RunningSoftmax softmax{{neg_inf(), neg_inf()}, {0.f, 0.f}};
    float out[T::kOut];
#pragma unroll
    for (int i = 0; i < T::kOut; ++i) out[i] = 0.f;
    if (carried_in) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (own_row + 8 * h >= num_rows) continue;
        const float* from = state + h * state_step;
#pragma unroll
        for (int j = 0; j < T::kValue / 8; ++j) {
          const float2 pair = *reinterpret_cast<const float2*>(from + 8 * j + 2 * quad);
          out[4 * j + 2 * h] = pair.x;
          out[4 * j + 2 * h + 1] = pair.y;
        }
        softmax.sum[h] = from[T::kValue + quad];
        softmax.max[h] = from[T::kValue + 4];
      }
    }

    float rescale[2] = {1.f, 1.f};
    uint32_t probs[T::kProbs];
    // scores[4j + 2h + e]: row own_row + 8 h, key first_key + 8 j + 2 quad + e.
    const auto mask = [&]<int kCount>(float(&scores)[kCount], int first_key) {
      if (first_key + 2 * kCount <= all_limit) return;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const int key = first_key + i / 4 * 8 + 2 * quad + i % 2;
        if (key >= limit + i % 4 / 2 * 8) scores[i] = neg_inf();
      }
    };
    const auto rescale_out = [&] {
      // A row's maximum seldom grows once a few tiles are seen, and a product with one changes nothing.
      if (__any_sync(0xffffffffu, rescale[0] != 1.f || rescale[1] != 1.f)) {
#pragma unroll
        for (int i = 0; i < T::kOut; ++i) out[i] *= rescale[i % 4 / 2];
      }
    };
    const auto pack = [&]<int kCount>(const float(&scores)[kCount]) {
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) probs[i] = pack_bf16(scores[2 * i], scores[2 * i + 1]);
    };
    const auto first_tile = [&]<int kKeys>() {
      float scores[kKeys / 2];
      wait(barriers.k_full, step);
      wgmma_fence_operand(scores);
      start_scores<kKeys>(scores, q_desc, key_desc(step));
      wgmma_wait<0>();
      wgmma_fence_operand(scores);
      release(&barriers.k_empty[step % T::kStages]);
      mask(scores, key_begin);
      softmax.update(scores, rescale, p.scale_log2);
      if (carried_in) rescale_out();
      pack(scores);
    };
    // The scores of tile n beside the output of tile n - 1.
    const auto next_tile = [&]<int kKeys>(int n) {
      float scores[kKeys / 2];
      wait(barriers.k_full, step + 1);
      wgmma_fence_operand(scores);
      start_scores<kKeys>(scores, q_desc, key_desc(step + 1));
      wait(barriers.v_full, step);
      start_output<T::kKeys>(out, probs, value_desc(step));
      wgmma_wait<1>();
      wgmma_fence_operand(scores);
      release(&barriers.k_empty[(step + 1) % T::kStages]);
      mask(scores, key_begin + n * T::kKeys);
      softmax.update(scores, rescale, p.scale_log2);
      hold_until(softmax.sum[0] + softmax.sum[1]);
      wgmma_wait<0>();
      wgmma_fence_operand(out);
      release(&barriers.v_empty[step % T::kStages]);
      rescale_out();
      pack(scores);
      ++step;
    };
    const int last_key = key_begin + (num_steps - 1) * T::kKeys;
    // On the diagonal the upper rows attend to no key of the last tile's second half.
    const bool half = all_limit + T::kGroupRows - 1 <= last_key + T::kKeys / 2;
    if (half && num_steps == 1) {
      first_tile.template operator()<T::kKeys / 2>();
    } else {
      first_tile.template operator()<T::kKeys>();
    }
    for (int n = 1; n < num_steps - half; ++n) next_tile.template operator()<T::kKeys>(n);
    if (half && num_steps > 1) next_tile.template operator()<T::kKeys / 2>(num_steps - 1);
    mbarrier_arrive(&barriers.q_empty[warpgroup]);  // all scores are done, and this thread has read the item's words

    wait(barriers.v_full, step);
    if (last_key + T::kKeys > valid_end) {
      // What lies beyond the sequence may be anything, and 0 * NaN is NaN. Both warpgroups clear it, each for itself.
      char* values = smem + T::kValueOffset + step % T::kStages * T::kValueBytes;
      const int first = valid_end - last_key, num_vecs = (T::kKeys - first) * (T::kChunkRowBytes / 16);
      for (int i = thread; i < num_vecs * T::kValueChunks; i += T::kGroupThreads) {
        reinterpret_cast<uint4*>(values + i / num_vecs * T::kKeyChunkBytes + first * T::kChunkRowBytes)[i % num_vecs] =
            make_uint4(0, 0, 0, 0);
      }
      fence_proxy_async();
      named_barrier_sync(T::kBarrierGroup + warpgroup, T::kGroupThreads);
    }
    if (half) {
      start_output<T::kKeys / 2>(out, probs, value_desc(step));
      wgmma_wait<0>();
      wgmma_fence_operand(out);
    } else {
      start_output<T::kKeys>(out, probs, value_desc(step));
      wgmma_wait<0>();
      wgmma_fence_operand(out);
    }
    release(&barriers.v_empty[step % T::kStages]);
    ++step;

    if ((flags & kPrefillLast) != 0) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = softmax.sum[h];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const bool there = own_row + 8 * h < num_rows;
        const float inverse = sum > 0.f ? 1.f / sum : sum;  // keeps a NaN
        const int64_t row = q_row + own_row + 8 * h;
        __nv_bfloat16* dst = p.out + row * p.out_token_stride + head * p.out_head_stride + 8 * quad;
#pragma unroll
        for (int j = 0; j < T::kValue / 8; j += 4) {
          uint32_t pairs[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            pairs[i] = pack_bf16(out[4 * (j + i) + 2 * h] * inverse, out[4 * (j + i) + 2 * h + 1] * inverse);
          }
          transpose_in_quad(pairs, quad);
          if (there) *reinterpret_cast<uint4*>(dst + 8 * j) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        if (p.lse != nullptr && there && quad == 0) {
          p.lse[row * p.num_heads + head] = (softmax.max[h] * p.scale_log2 + log2f(sum)) * (1.f / kLog2E);
        }
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (own_row + 8 * h >= num_rows) continue;
        float* to = state + h * state_step;
#pragma unroll
        for (int j = 0; j < T::kValue / 8; ++j) {
          *reinterpret_cast<float2*>(to + 8 * j + 2 * quad) =
              make_float2(out[4 * j + 2 * h], out[4 * j + 2 * h + 1]);
        }
        to[T::kValue + quad] = softmax.sum[h];
        if (quad == 0) to[T::kValue + 4] = softmax.max[h];
      }
    }
  }
}

__global__ void __launch_bounds__(Prefill::kThreads, 1) mla_prefill_kernel(const __grid_constant__ MlaPrefillParams p) {
  using T = Prefill;
  extern __shared__ char smem_raw[];
  char* smem = smem_raw + (1024 - smem_addr(smem_raw) % 1024) % 1024;
  uint64_t* bars = reinterpret_cast<uint64_t*>(smem + T::kBarrierOffset);
  uint64_t* stage_bars = bars + 2 * T::kGroups;
  const PrefillBarriers barriers{bars,
                                 bars + T::kGroups,
                                 stage_bars,
                                 stage_bars + T::kStages,
                                 stage_bars + 2 * T::kStages,
                                 stage_bars + 3 * T::kStages};
  if (threadIdx.x == 0) {
    tma_prefetch_map(&p.q_map);
    tma_prefetch_map(&p.kv_map);
    tma_prefetch_map(&p.k_pe_map);
    for (int g = 0; g < T::kGroups; ++g) {
      mbarrier_init(&barriers.q_full[g], kWarpSize);
      mbarrier_init(&barriers.q_empty[g], T::kGroupThreads);
    }
    for (int stage = 0; stage < T::kStages; ++stage) {
      mbarrier_init(&barriers.k_full[stage], 1);
      mbarrier_init(&barriers.v_full[stage], 1);
      mbarrier_init(&barriers.k_empty[stage], T::kGroups * T::kGroupWarps);
      mbarrier_init(&barriers.v_empty[stage], T::kGroups * T::kGroupWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_dependents_launch();
  if (threadIdx.x < T::kComputeThreads) {
    take_registers<T::kComputeRegisters>();
    compute(p, smem, barriers);
  } else {
    release_registers<T::kProducerRegisters>();
    if (threadIdx.x < T::kComputeThreads + kWarpSize) produce(p, smem, barriers);
  }
}

// Sixteen rows a CTA; a thread moves four of their 1,152 vectors of 16 bytes.
struct Gather {
  static constexpr int kVecs = 576 * 2 / 16, kRows = 16, kVecsPerThread = 4, kThreads = 288;
  static_assert(kThreads * kVecsPerThread == kRows * kVecs);
};

__global__ void __launch_bounds__(Gather::kThreads) gather_latents_kernel(const GatherLatentsParams p) {
  __shared__ const uint4* source[Gather::kRows];  // null: the row belongs to no sequence
  wait_for_previous_kernel();
  let_dependents_launch();
  const int first_row = blockIdx.x * Gather::kRows;
  if (threadIdx.x < Gather::kRows) {
    const int row = first_row + threadIdx.x;
    const uint4* from = nullptr;
    if (row < p.num_rows && row < p.k_starts[p.batch]) {
      int seq = 0, end = p.batch;  // the last sequence that starts at or before the row
      while (end - seq > 1) {
        const int middle = (seq + end) / 2;
        if (p.k_starts[middle] <= row) {
          seq = middle;
        } else {
          end = middle;
        }
      }
      const int position = p.key_begin + row - p.k_starts[seq];
      const int block = p.block_tables[seq * p.block_table_stride + position / 64];
      from = reinterpret_cast<const uint4*>(p.cache + block * p.cache_block_stride) + position % 64 * Gather::kVecs;
    }
    source[threadIdx.x] = from;
  }
  __syncthreads();
  uint4 value[Gather::kVecsPerThread];
  bool there[Gather::kVecsPerThread];
#pragma unroll
  for (int i = 0; i < Gather::kVecsPerThread; ++i) {
    const int at = i * Gather::kThreads + threadIdx.x, row = at / Gather::kVecs;
    there[i] = source[row] != nullptr;
    if (there[i]) value[i] = source[row][at % Gather::kVecs];
  }
  uint4* to = reinterpret_cast<uint4*>(p.out) + int64_t{first_row} * Gather::kVecs;
#pragma unroll
  for (int i = 0; i < Gather::kVecsPerThread; ++i) {
    if (there[i]) to[i * Gather::kThreads + threadIdx.x] = value[i];
  }
}

}  // namespace

cudaError_t launch_mla_prefill(const MlaPrefillParams& p, int num_ctas, cudaStream_t stream) {
  return launch_kernel(mla_prefill_kernel, dim3(num_ctas), Prefill::kThreads, stream,
                       {.smem_bytes = Prefill::kSmemBytes + 1024, .overlaps = true}, p);  // room to align the first atom
}

cudaError_t launch_gather_latents(const GatherLatentsParams& p, cudaStream_t stream) {
  const dim3 grid((p.num_rows + Gather::kRows - 1) / Gather::kRows);
  return launch_kernel(gather_latents_kernel, grid, Gather::kThreads, stream, {.overlaps = true}, p);
}

}  // namespace rorqual
