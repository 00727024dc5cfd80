// mla_decode.cpp: C wrappers of the decode plan and of decode attention.
#include "error.h"
#include "rorqual/mla_decode.cuh"
#include "tensor_map.h"

using rorqual::aligned;
using rorqual::Mla;

extern "C" int64_t rorqual_mla_plan_words(int32_t num_parts, int32_t batch) {
  return rorqual::plan_words(num_parts, batch);
}

extern "C" int32_t rorqual_mla_tile_rows(int32_t kernel) {
  return kernel < 0 || kernel > 2 ? 0 : rorqual::mla_tile_rows(static_cast<rorqual::MlaDecodeKernel>(kernel));
}

extern "C" int rorqual_mla_plan(const RorqualMlaPlan* a, void* stream) {
  RORQUAL_REQUIRE(a->batch >= 0 && a->batch <= rorqual::kMaxPlanBatch,
                  "mla_plan: batch must be in [0, " + std::to_string(rorqual::kMaxPlanBatch) + "], got " +
                      std::to_string(a->batch));
  RORQUAL_REQUIRE(a->num_parts >= 1 && a->num_parts <= 65535,
                  "mla_plan: num_parts must be in [1, 65535], got " + std::to_string(a->num_parts));
  RORQUAL_REQUIRE(a->split_blocks >= 0 && (a->split_blocks % 2 == 0 || a->group_splits > 1),
                  "mla_plan: split_blocks must be even and >= 0, got " + std::to_string(a->split_blocks));
  RORQUAL_REQUIRE(a->group_splits >= 1 && (a->split_blocks > 0 || a->group_splits == 1),
                  "mla_plan: group_splits must be >= 1, and 1 without split_blocks, got " +
                      std::to_string(a->group_splits));
  RORQUAL_REQUIRE(a->overhead_blocks >= 0 && a->min_units >= 0 && a->split_capacity >= 0,
                  "mla_plan: overhead_blocks, min_units and split_capacity must be >= 0");
  if (a->batch == 0) return 0;
  RORQUAL_REQUIRE(a->plan && a->kv_lens && a->q_starts, "mla_plan: plan, kv_lens and q_starts must not be NULL");
  RORQUAL_REQUIRE(aligned(a->plan, 16), "mla_plan: plan must be 16-byte aligned");
  const rorqual::MlaPlanParams p{static_cast<int*>(a->plan),
                                 static_cast<const int*>(a->kv_lens),
                                 static_cast<const int*>(a->q_starts),
                                 a->batch,
                                 a->num_parts,
                                 a->split_blocks,
                                 a->min_units,
                                 a->overhead_blocks,
                                 a->split_capacity,
                                 a->group_splits};
  return rorqual::from_cuda(rorqual::launch_mla_plan(p, static_cast<cudaStream_t>(stream)), "mla_plan");
}

extern "C" int rorqual_mla_decode(const RorqualMlaDecode* a, void* stream) {
  RORQUAL_REQUIRE(a->batch >= 0 && a->batch <= rorqual::kMaxPlanBatch,
                  "mla_decode: batch must be in [0, " + std::to_string(rorqual::kMaxPlanBatch) + "], got " +
                      std::to_string(a->batch));
  RORQUAL_REQUIRE(a->num_heads >= 1 && a->num_heads <= 128,
                  "mla_decode: num_heads must be in [1, 128], got " + std::to_string(a->num_heads));
  RORQUAL_REQUIRE(a->max_q_len >= 1 && a->max_q_len <= 8,
                  "mla_decode: max_q_len must be in [1, 8], got " + std::to_string(a->max_q_len));
  RORQUAL_REQUIRE(a->kernel >= 0 && a->kernel <= 2,
                  "mla_decode: kernel must be in [0, 2], got " + std::to_string(a->kernel));
  RORQUAL_REQUIRE(a->num_parts >= 1 && a->num_parts <= 65535,
                  "mla_decode: num_parts must be in [1, 65535], got " + std::to_string(a->num_parts));
  RORQUAL_REQUIRE(a->softmax_scale > 0.f,
                  "mla_decode: softmax_scale must be > 0, got " + std::to_string(a->softmax_scale));
  RORQUAL_REQUIRE(a->split_blocks >= 0 && (a->split_blocks % 2 == 0 || a->group_splits > 1),
                  "mla_decode: split_blocks must be even and >= 0, got " + std::to_string(a->split_blocks));
  RORQUAL_REQUIRE(a->group_splits == 1 || (a->group_splits > 1 && a->split_blocks > 0 && a->kernel == 0),
                  "mla_decode: group_splits must be 1, or more with split_blocks and kernel 0, got " +
                      std::to_string(a->group_splits));
  if (a->batch == 0) return 0;
  RORQUAL_REQUIRE(a->q_latent && a->q_pe && a->cache && a->out && a->block_tables && a->kv_lens && a->q_starts &&
                      a->plan && a->partial_out && a->partial_lse,
                  "mla_decode: only lse may be NULL");
  RORQUAL_REQUIRE(a->num_blocks >= 1, "mla_decode: num_blocks must be >= 1, got " + std::to_string(a->num_blocks));
  RORQUAL_REQUIRE(aligned(a->q_latent, 16) && aligned(a->q_pe, 16) && aligned(a->cache, 16) && aligned(a->out, 16) &&
                      aligned(a->plan, 16) && aligned(a->partial_out, 16),
                  "mla_decode: q_latent, q_pe, cache, out, plan and partial_out must be 16-byte aligned");
  RORQUAL_REQUIRE(a->q_latent_token_stride % 8 == 0 && a->q_latent_head_stride % 8 == 0 &&
                      a->q_pe_token_stride % 8 == 0 && a->q_pe_head_stride % 8 == 0 && a->out_token_stride % 8 == 0 &&
                      a->out_head_stride % 8 == 0 && a->cache_block_stride % 8 == 0,
                  "mla_decode: strides must be multiples of 8 elements");

  using bf16 = __nv_bfloat16;
  rorqual::MlaDecodeParams p{};
  const auto kernel = static_cast<rorqual::MlaDecodeKernel>(a->kernel);
  const auto num_blocks = static_cast<cuuint64_t>(a->num_blocks);
  const auto block_stride = static_cast<cuuint64_t>(a->cache_block_stride);
  int refused;
  if (kernel == rorqual::MlaDecodeKernel::kWide64) {  // columns, tokens, blocks
    const cuuint64_t dims[3] = {Mla::kWidth, Mla::kBlockTokens, num_blocks}, strides[2] = {Mla::kWidth, block_stride};
    const cuuint32_t box[3] = {Mla::kChunkCols, Mla::kBlockTokens, 1};
    refused = rorqual::encode_bf16_map<3>(&p.cache_map, a->cache, dims, strides, box, "mla_decode");
  } else {  // columns of a chunk, tokens of a group, chunks, groups, blocks
    const cuuint64_t dims[5] = {Mla::kChunkCols, Mla::kGroupTokens, Mla::kChunks, Mla::kGroups, num_blocks};
    const cuuint64_t strides[4] = {Mla::kWidth, Mla::kChunkCols, Mla::kGroupTokens * Mla::kWidth, block_stride};
    const cuuint32_t box[5] = {Mla::kChunkCols, Mla::kGroupTokens, Mla::kChunks, Mla::kGroups, 1};
    refused = rorqual::encode_bf16_map<5>(&p.cache_map, a->cache, dims, strides, box, "mla_decode");
  }
  if (refused != 0) return refused;

  p.q_latent = static_cast<const bf16*>(a->q_latent);
  p.q_pe = static_cast<const bf16*>(a->q_pe);
  p.out = static_cast<bf16*>(a->out);
  p.lse = static_cast<float*>(a->lse);
  p.block_tables = static_cast<const int*>(a->block_tables);
  p.kv_lens = static_cast<const int*>(a->kv_lens);
  p.q_starts = static_cast<const int*>(a->q_starts);
  p.plan = static_cast<const int*>(a->plan);
  p.partial_out = static_cast<float*>(a->partial_out);
  p.partial_lse = static_cast<float*>(a->partial_lse);
  p.q_latent_token_stride = a->q_latent_token_stride;
  p.q_latent_head_stride = a->q_latent_head_stride;
  p.q_pe_token_stride = a->q_pe_token_stride;
  p.q_pe_head_stride = a->q_pe_head_stride;
  p.out_token_stride = a->out_token_stride;
  p.out_head_stride = a->out_head_stride;
  p.block_table_stride = a->block_table_stride;
  p.batch = a->batch;
  p.num_heads = a->num_heads;
  p.max_q_len = a->max_q_len;
  p.num_parts = a->num_parts;
  p.partial_tile_rows = rorqual::mla_tile_rows(kernel);
  p.num_tiles = (a->num_heads * a->max_q_len + p.partial_tile_rows - 1) / p.partial_tile_rows;
  p.split_blocks = a->split_blocks;
  p.split_capacity = a->split_capacity;
  p.group_splits = a->group_splits;
  p.partial_sum = p.partial_lse + int64_t{a->split_capacity} * p.num_tiles * p.partial_tile_rows;
  p.scale_log2 = a->softmax_scale * rorqual::kLog2E;
  return rorqual::from_cuda(rorqual::launch_mla_decode(kernel, p, static_cast<cudaStream_t>(stream)), "mla_decode");
}
