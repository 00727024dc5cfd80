// mla_decode.cuh: shapes of the latent cache, the plan's layout, the walk over a part's segments, the query's load.
#pragma once
#include "rorqual/device.cuh"
#include "rorqual/launch.h"
#include "rorqual/tma.cuh"

namespace rorqual {

struct Mla {
  static constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
  static constexpr int kBlockTokens = 64;
  // A block lies in shared memory in chunks of 64 columns, 128-byte swizzled.
  static constexpr int kChunkCols = 64, kChunkRowBytes = kChunkCols * 2;
  static constexpr int kLatentChunks = kLatent / kChunkCols, kChunks = kWidth / kChunkCols;
  static constexpr int kChunkBytes = kBlockTokens * kChunkRowBytes;
  static constexpr int kBlockBytes = kChunks * kChunkBytes;
  static constexpr int kStepsPerChunk = kChunkCols / 16;   // k of one wgmma is 16
  // The narrow kernel's shared memory holds a block as [8 groups][9 chunks][8 tokens][128 bytes], so that one copy
  // fetches it, a group (9,216 consecutive bytes of the cache) at a time; the wide kernel's as
  // [9 chunks][64 tokens][128 bytes].
  static constexpr int kGroupTokens = 8, kGroups = kBlockTokens / kGroupTokens;
  static constexpr int kAtomBytes = kGroupTokens * kChunkRowBytes, kGroupBytes = kChunks * kAtomBytes;
  static constexpr int kTokenSteps = kBlockTokens / 16;
  static_assert(kChunks == 9 && kBlockBytes == 73728 && kGroups * kGroupBytes == kBlockBytes);
};

inline constexpr int kMaxPlanBatch = 8192;
// So many groups of splits, or fewer, may be computed a split at a time (and no more than there are parts).
inline constexpr int kMaxSingleGroups = 128;

// Word offsets into the plan, after its four words of header.
__host__ __device__ constexpr int plan_seqs(int num_parts) { return 4 + 4 * num_parts; }
__host__ __device__ constexpr int plan_words(int num_parts, int batch) { return plan_seqs(num_parts) + 8 * batch; }

// What the plan says of a sequence: eight words, so that one round trip to memory brings all of them.
struct SeqPlan {
  int q_start, q_len, kv_len, num_blocks;  // num_blocks: none when the sequence has no query token this step
  int first_part, first_split, num_splits;

  // Both go past L1: the plan may be read before the launch that follows its kernel has begun in earnest.
  static __device__ __forceinline__ SeqPlan load(const int* plan, int num_parts, int seq) {
    const int4* words = reinterpret_cast<const int4*>(plan + plan_seqs(num_parts)) + 2 * seq;
    const int4 a = __ldcg(words), b = __ldcg(words + 1);
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z};
  }
  __device__ __forceinline__ void store(int* plan, int num_parts, int seq) const {
    int4* words = reinterpret_cast<int4*>(plan + plan_seqs(num_parts)) + 2 * seq;
    words[0] = make_int4(q_start, q_len, kv_len, num_blocks);
    words[1] = make_int4(first_part, first_split, num_splits, 0);
  }
};

// Consecutive blocks of one sequence for one tile of its (query token, head) rows.
struct Segment {
  int seq, begin, end;    // blocks [begin, end)
  int kv_len, q_start, q_len;
  int split, num_splits;  // which split of the sequence this is; `split` counts from the workspace's start
};

// Walks the segments of a part. Every warp of a CTA walks the same ones in the same order.
class SegmentWalk {
 public:
  __device__ __forceinline__ SegmentWalk(const MlaDecodeParams& p, int part, int tile_row)
      : p_(p), tile_row_(tile_row) {
    const int4 range = __ldcg(reinterpret_cast<const int4*>(p.plan + 4) + part);
    part_ = part;
    seq_ = range.x;
    begin_ = range.y;
    last_seq_ = range.z;
    last_end_ = range.w;
    split_blocks_ = p.group_splits > 1 ? __ldcg(p.plan + 3) : p.split_blocks;
    if (seq_ < p_.batch) seq_plan_ = SeqPlan::load(p_.plan, p_.num_parts, seq_);
  }
  // Blocks of one of this step's splits; 0: any number.
  __device__ __forceinline__ int split_blocks() const { return split_blocks_; }

  __device__ __forceinline__ bool next(Segment& s) {
    while (seq_ <= last_seq_ && seq_ < p_.batch) {
      const int end = seq_ == last_seq_ ? min(last_end_, seq_plan_.num_blocks) : seq_plan_.num_blocks;
      if (begin_ < end && tile_row_ < seq_plan_.q_len * p_.num_heads) {
        const int split = split_blocks_ > 0 ? begin_ / split_blocks_ : part_ - seq_plan_.first_part;
        s.seq = seq_;
        s.begin = begin_;
        s.end = split_blocks_ > 0 ? min(end, (split + 1) * split_blocks_) : end;
        s.kv_len = seq_plan_.kv_len;
        s.q_start = seq_plan_.q_start;
        s.q_len = seq_plan_.q_len;
        s.split = seq_plan_.first_split + split;
        s.num_splits = seq_plan_.num_splits;
        begin_ = s.end;
        return true;
      }
      ++seq_;
      begin_ = 0;
      if (seq_ < p_.batch) seq_plan_ = SeqPlan::load(p_.plan, p_.num_parts, seq_);
    }
    return false;
  }

 private:
  const MlaDecodeParams& p_;
  SeqPlan seq_plan_;
  int tile_row_, part_, seq_, begin_, last_seq_, last_end_, split_blocks_;
};

// Splits of a group are joined one after the other: what came before has the largest score `max`, the sum of weights
// and the sums of values relative to it, and so has the next split. Who joins them, the attention kernel or the
// combination, must not show in the bits, so nothing here is left to the compiler to contract.
struct SplitJoin {
  float max, old_weight, new_weight;
  __device__ __forceinline__ SplitJoin(float old_max, float next_max, float scale_log2) : max(fmaxf(old_max, next_max)) {
    const float base = max == neg_inf() ? 0.f : max;  // no -inf is subtracted from itself
    old_weight = exp2_approx(__fmul_rn(__fsub_rn(old_max, base), scale_log2));
    new_weight = exp2_approx(__fmul_rn(__fsub_rn(next_max, base), scale_log2));
  }
  __device__ __forceinline__ float operator()(float old_sum, float next_sum) const {
    return __fmaf_rn(next_sum, new_weight, __fmul_rn(old_sum, old_weight));
  }
};
__device__ __forceinline__ float lse_of(float max, float sum, float scale_log2) {
  return sum == 0.f ? neg_inf() : __fmaf_rn(max, scale_log2, log2f(sum));
}
__device__ __forceinline__ float inverse_of(float sum) { return sum > 0.f ? __fdiv_rn(1.f, sum) : sum; }  // keeps a NaN

// The block ids of a segment, in order: lane l of a warp reads every 32nd, one round ahead of their use.
class BlockIds {
 public:
  __device__ __forceinline__ void start(const MlaDecodeParams& p, const Segment& s) {
    table_ = p.block_tables + s.seq * p.block_table_stride;
    begin_ = s.begin;
    end_ = s.end;
    ids_ = read(begin_);
    next_ids_ = read(begin_ + kWarpSize);
  }
  // Called by the whole warp for every block of the segment, in order.
  __device__ __forceinline__ int id(int block) {
    const int ahead = (block - begin_) % kWarpSize;
    if (ahead == 0 && block > begin_) {
      ids_ = next_ids_;
      next_ids_ = read(block + kWarpSize);
    }
    return __shfl_sync(0xffffffffu, ids_, ahead);
  }

 private:
  __device__ __forceinline__ int read(int first) const {
    const int block = first + static_cast<int>(threadIdx.x % kWarpSize);
    return block < end_ ? __ldcg(table_ + block) : 0;
  }
  const int* table_ = nullptr;
  int begin_ = 0, end_ = 0, ids_ = 0, next_ids_ = 0;
};

// The first block that this step's tokens may have been written to: those before it are older than the plan, and may
// be read while the previous kernel of the stream still runs.
__device__ __forceinline__ int first_new_block(const Segment& s) {
  return max(s.kv_len - s.q_len, 0) / Mla::kBlockTokens;
}

// Row `row` of a sequence is head row % num_heads of its query token row / num_heads. It attends to positions
// [0, limit): the last query token to all of kv_len, the one before it to one less.
struct Row {
  int token, head, limit;  // limit 0: beyond the sequence's rows, or before its start
  __device__ __forceinline__ Row(const MlaDecodeParams& p, const Segment& s, int row) {
    const int query = row / p.num_heads;
    token = s.q_start + query;
    head = row - query * p.num_heads;
    limit = query < s.q_len ? max(s.kv_len - s.q_len + 1 + query, 0) : 0;
    valid = query < s.q_len;
  }
  bool valid;
};

// Starts copying the tile's query rows [tile_row, tile_row + kRows) into swizzled shared memory, chunk by chunk of
// [kRows][128 bytes]; rows beyond the sequence's become zero. Warp `warp` of `num_warps` takes part; each of its
// threads then calls finish_query(), and a barrier among the threads must follow.
template <int kRows>
__device__ __forceinline__ void start_query(char* q_smem, const MlaDecodeParams& p, const Segment& s, int tile_row,
                                            int warp, int num_warps) {
  constexpr int kVecs = Mla::kWidth / 8, kLatentVecs = Mla::kLatent / 8, kVecsPerChunk = 8;
  const int lane = threadIdx.x % kWarpSize;
  for (int r = warp; r < kRows; r += num_warps) {
    const Row row(p, s, tile_row + r);
    const __nv_bfloat16* latent = p.q_latent + row.token * p.q_latent_token_stride + row.head * p.q_latent_head_stride;
    const __nv_bfloat16* pe = p.q_pe + row.token * p.q_pe_token_stride + row.head * p.q_pe_head_stride;
    char* dst = q_smem + r * Mla::kChunkRowBytes;
#pragma unroll
    for (int first = 0; first < kVecs; first += kWarpSize) {
      const int v = first + lane;
      if (v >= kVecs) break;
      const __nv_bfloat16* src = v < kLatentVecs ? latent + v * 8 : pe + (v - kLatentVecs) * 8;
      copy_async_16(dst + v / kVecsPerChunk * (kRows * Mla::kChunkRowBytes) + ((v % kVecsPerChunk) ^ (r % 8)) * 16,
                    row.valid ? src : p.q_latent, row.valid);
    }
  }
}
__device__ __forceinline__ void finish_query() {
  copy_async_wait();
  fence_proxy_async();
}

// Clears the latent of the block's tokens from `first_token` on: what the cache holds there may be anything,
// and 0 * NaN is NaN. Their scores are masked, so only the value columns matter. kGroupBytes: from one group of eight
// tokens to the next in shared memory; kChunkBytes: from one chunk of columns to the next.
template <int kGroupBytes, int kChunkBytes>
__device__ __forceinline__ void clear_tail(char* block_smem, int first_token, int thread, int num_threads) {
  const int num_vecs = (Mla::kBlockTokens - first_token) * 8;
  for (int i = thread; i < num_vecs * Mla::kLatentChunks; i += num_threads) {
    const int chunk = i / num_vecs, v = i % num_vecs, token = first_token + v / 8;
    char* row = block_smem + token / 8 * kGroupBytes + chunk * kChunkBytes + token % 8 * Mla::kChunkRowBytes;
    reinterpret_cast<uint4*>(row)[v % 8] = make_uint4(0, 0, 0, 0);
  }
}

}  // namespace rorqual
