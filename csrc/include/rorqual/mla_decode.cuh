// mla_decode.cuh: shapes of the latent cache, the plan's layout, and the walk over a part's segments.
#pragma once
#include "rorqual/device.cuh"
#include "rorqual/launch.h"

namespace rorqual {

struct Mla {
  static constexpr int kLatent = 512, kRope = 64, kWidth = kLatent + kRope;
  static constexpr int kBlockTokens = 64;
  // A block lies in shared memory as chunks of 64 columns; a chunk is [64 tokens][128 bytes], 128-byte swizzled.
  static constexpr int kChunkCols = 64, kChunkRowBytes = kChunkCols * 2;
  static constexpr int kLatentChunks = kLatent / kChunkCols, kChunks = kWidth / kChunkCols;
  static constexpr int kChunkBytes = kBlockTokens * kChunkRowBytes;
  static constexpr int kBlockBytes = kChunks * kChunkBytes;
  static constexpr int kStepsPerChunk = kChunkCols / 16;   // k of one wgmma is 16
  static constexpr int kTokenSteps = kBlockTokens / 16;
  static_assert(kChunks == 9 && kBlockBytes == 73728);
};

inline constexpr int kMaxPlanBatch = 8192;

// Word offsets into the plan, after its four words of header.
__host__ __device__ constexpr int plan_first_parts(int num_parts) { return 4 + 4 * num_parts; }
__host__ __device__ constexpr int plan_split_starts(int num_parts, int batch) {
  return plan_first_parts(num_parts) + batch;
}
__host__ __device__ constexpr int plan_words(int num_parts, int batch) {
  return plan_split_starts(num_parts, batch) + batch + 1;
}

// Blocks that sequence `seq` is read over: none when it has no query token this step.
__device__ __forceinline__ int num_kv_blocks(int kv_len, int q_len) {
  return q_len > 0 && kv_len > 0 ? (kv_len + Mla::kBlockTokens - 1) / Mla::kBlockTokens : 0;
}

// Consecutive blocks of one sequence for one tile of its (query token, head) rows.
struct Segment {
  int seq, begin, end;    // blocks [begin, end)
  int kv_len, q_start, q_len;
  int split, num_splits;  // which split of the sequence this is; `split` counts from the workspace's start
};

// Walks the segments of a part. Every warp of a CTA walks the same ones in the same order.
class SegmentWalk {
 public:
  __device__ __forceinline__ SegmentWalk(const MlaDecodeParams& p, int part, int tile_row) : p_(p), tile_row_(tile_row) {
    const int4 range = *reinterpret_cast<const int4*>(p.plan + 4 + 4 * part);
    part_ = part;
    seq_ = range.x;
    begin_ = range.y;
    last_seq_ = range.z;
    last_end_ = range.w;
  }

  __device__ __forceinline__ bool next(Segment& s) {
    while (seq_ <= last_seq_ && seq_ < p_.batch) {
      const int kv_len = p_.kv_lens[seq_];
      const int q_start = p_.q_starts[seq_];
      const int q_len = p_.q_starts[seq_ + 1] - q_start;
      const int num_blocks = num_kv_blocks(kv_len, q_len);
      const int end = seq_ == last_seq_ ? min(last_end_, num_blocks) : num_blocks;
      if (begin_ >= end || tile_row_ >= q_len * p_.num_heads) {
        ++seq_;
        begin_ = 0;
        continue;
      }
      const int* split_starts = p_.plan + plan_split_starts(p_.num_parts, p_.batch);
      const int first_split = split_starts[seq_];
      const int split_in_seq = p_.split_blocks > 0
                                   ? begin_ / p_.split_blocks
                                   : part_ - p_.plan[plan_first_parts(p_.num_parts) + seq_];
      s.seq = seq_;
      s.begin = begin_;
      s.end = p_.split_blocks > 0 ? min(end, (begin_ / p_.split_blocks + 1) * p_.split_blocks) : end;
      s.kv_len = kv_len;
      s.q_start = q_start;
      s.q_len = q_len;
      s.split = first_split + split_in_seq;
      s.num_splits = split_starts[seq_ + 1] - first_split;
      begin_ = s.end;
      return true;
    }
    return false;
  }

 private:
  const MlaDecodeParams& p_;
  int tile_row_, part_, seq_, begin_, last_seq_, last_end_;
};

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

// Copies the tile's query rows [tile_row, tile_row + kRows) into swizzled shared memory, chunk by chunk of
// [kRows][128 bytes]; rows beyond the sequence's become zero. Threads `thread` of `num_threads` take part.
template <int kRows>
__device__ __forceinline__ void load_query(char* q_smem, const MlaDecodeParams& p, const Segment& s, int tile_row,
                                           int thread, int num_threads) {
  constexpr int kVecs = Mla::kWidth * 2 / 16, kLatentVecs = Mla::kLatent * 2 / 16, kVecsPerRow = 8;
  static_assert(kRows * kVecs % 128 == 0);
#pragma unroll 9
  for (int i = thread; i < kRows * kVecs; i += num_threads) {
    const int r = i / kVecs, v = i % kVecs;
    const Row row(p, s, tile_row + r);
    uint4 value = make_uint4(0, 0, 0, 0);
    if (row.valid) {
      value = v < kLatentVecs
                  ? reinterpret_cast<const uint4*>(p.q_latent + row.token * p.q_latent_token_stride +
                                                   row.head * p.q_latent_head_stride)[v]
                  : reinterpret_cast<const uint4*>(p.q_pe + row.token * p.q_pe_token_stride +
                                                   row.head * p.q_pe_head_stride)[v - kLatentVecs];
    }
    char* chunk = q_smem + v / kVecsPerRow * (kRows * Mla::kChunkRowBytes);
    *reinterpret_cast<uint4*>(chunk + r * Mla::kChunkRowBytes + ((v % kVecsPerRow) ^ (r % 8)) * 16) = value;
  }
}

// Clears the latent of the block's tokens from `first_token` on: what the cache holds there may be anything,
// and 0 * NaN is NaN. Their scores are masked, so only the value columns matter.
__device__ __forceinline__ void clear_tail(char* block_smem, int first_token, int first_chunk, int num_chunks, int thread,
                                           int num_threads) {
  const int num_vecs = (Mla::kBlockTokens - first_token) * 8;
  for (int i = thread; i < num_vecs * num_chunks; i += num_threads) {
    const int chunk = first_chunk + i / num_vecs, v = i % num_vecs;
    reinterpret_cast<uint4*>(block_smem + chunk * Mla::kChunkBytes + first_token * Mla::kChunkRowBytes)[v] =
        make_uint4(0, 0, 0, 0);
  }
}

}  // namespace rorqual
