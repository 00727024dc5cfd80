// mla_prefill.cpp: C wrappers of prefill attention and of the gathering of latents.
#include <algorithm>

#include "error.h"
#include "rorqual/device.cuh"
#include "rorqual/launch.h"
#include "tensor_map.h"

using rorqual::aligned;

namespace {

// Keys and values of a group of heads should leave room in 50 to 60 MB of L2 for what streams through it.
constexpr int64_t kGroupBytes = int64_t{32} << 20;

int heads_in_l2(int num_heads, int num_keys) {
  const int64_t bytes_per_head = int64_t{num_keys} * 256 * 2;
  return static_cast<int>(std::clamp<int64_t>(kGroupBytes / bytes_per_head, 1, num_heads));
}

}  // namespace

extern "C" int rorqual_mla_prefill(const RorqualMlaPrefill* a, void* stream) {
  RORQUAL_REQUIRE(a->num_heads >= 1 && a->num_heads <= 1024,
                  "mla_prefill: num_heads must be in [1, 1024], got " + std::to_string(a->num_heads));
  RORQUAL_REQUIRE(a->num_tiles >= 0 && int64_t{a->num_tiles} * a->num_heads < (int64_t{1} << 31),
                  "mla_prefill: num_tiles must be >= 0, and num_tiles * num_heads below 2^31, got " +
                      std::to_string(a->num_tiles) + " tiles");
  RORQUAL_REQUIRE(a->heads_per_group >= 0,
                  "mla_prefill: heads_per_group must be >= 0, got " + std::to_string(a->heads_per_group));
  RORQUAL_REQUIRE(a->softmax_scale > 0.f,
                  "mla_prefill: softmax_scale must be > 0, got " + std::to_string(a->softmax_scale));
  if (a->num_tiles == 0) return 0;
  RORQUAL_REQUIRE(a->num_tokens >= 1 && a->num_keys >= 1,
                  "mla_prefill: tiles need tokens and keys, got " + std::to_string(a->num_tokens) + " and " +
                      std::to_string(a->num_keys));
  RORQUAL_REQUIRE(a->out && a->plan && a->q && a->kv && a->k_pe, "mla_prefill: only lse and state may be NULL");
  RORQUAL_REQUIRE(aligned(a->out, 16) && aligned(a->q, 16) && aligned(a->kv, 16) && aligned(a->k_pe, 16) &&
                      aligned(a->state, 16) && aligned(a->plan, 4),
                  "mla_prefill: q, kv, k_pe, out and state must be 16-byte aligned, plan 4-byte");
  RORQUAL_REQUIRE(a->q_token_stride % 8 == 0 && a->q_head_stride % 8 == 0 && a->kv_token_stride % 8 == 0 &&
                      a->kv_head_stride % 8 == 0 && a->k_pe_stride % 8 == 0 && a->out_token_stride % 8 == 0 &&
                      a->out_head_stride % 8 == 0,
                  "mla_prefill: strides must be multiples of 8 elements");

  rorqual::MlaPrefillParams p{};
  const auto rows_map = [&](CUtensorMap* map, const void* base, int width, int heads, int rows, int64_t head_stride,
                            int64_t row_stride, int box_rows) {
    const cuuint64_t dims[3] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(heads),
                                static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[2] = {static_cast<cuuint64_t>(head_stride), static_cast<cuuint64_t>(row_stride)};
    const cuuint32_t box[3] = {64, 1, static_cast<cuuint32_t>(box_rows)};
    return rorqual::encode_bf16_map<3>(map, base, dims, strides, box, "mla_prefill");
  };
  int refused = rows_map(&p.q_map, a->q, 192, a->num_heads, a->num_tokens, a->q_head_stride, a->q_token_stride,
                         rorqual::kPrefillGroupRows);
  if (refused == 0) {
    refused = rows_map(&p.kv_map, a->kv, 256, a->num_heads, a->num_keys, a->kv_head_stride, a->kv_token_stride,
                       rorqual::kPrefillTileKeys);
  }
  if (refused == 0) {
    refused = rows_map(&p.k_pe_map, a->k_pe, 64, 1, a->num_keys, a->k_pe_stride, a->k_pe_stride,
                       rorqual::kPrefillTileKeys);
  }
  if (refused != 0) return refused;
  p.out = static_cast<__nv_bfloat16*>(a->out);
  p.lse = static_cast<float*>(a->lse);
  p.state = static_cast<float*>(a->state);
  p.queue = static_cast<int*>(a->plan);
  p.tiles = p.queue + 8;
  p.out_token_stride = a->out_token_stride;
  p.out_head_stride = a->out_head_stride;
  p.num_tiles = a->num_tiles;
  p.num_heads = a->num_heads;
  p.heads_per_group =
      a->heads_per_group == 0 ? heads_in_l2(a->num_heads, a->num_keys) : std::min(a->heads_per_group, a->num_heads);
  p.scale_log2 = a->softmax_scale * rorqual::kLog2E;

  int device = 0, num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return rorqual::from_cuda(error, "mla_prefill");
  const int num_ctas = std::min(a->num_tiles * a->num_heads, num_sms);
  return rorqual::from_cuda(rorqual::launch_mla_prefill(p, num_ctas, static_cast<cudaStream_t>(stream)), "mla_prefill");
}

extern "C" int rorqual_gather_latents(const RorqualGatherLatents* a, void* stream) {
  RORQUAL_REQUIRE(a->batch >= 0 && a->num_rows >= 0 && a->key_begin >= 0,
                  "gather_latents: batch, num_rows and key_begin must be >= 0");
  if (a->batch == 0 || a->num_rows == 0) return 0;
  RORQUAL_REQUIRE(a->out && a->cache && a->block_tables && a->k_starts, "gather_latents: no pointer may be NULL");
  RORQUAL_REQUIRE(aligned(a->out, 16) && aligned(a->cache, 16) && a->cache_block_stride % 8 == 0,
                  "gather_latents: out and cache must be 16-byte aligned, the block stride a multiple of 8 elements");
  const rorqual::GatherLatentsParams p{static_cast<__nv_bfloat16*>(a->out),
                                       static_cast<const __nv_bfloat16*>(a->cache),
                                       static_cast<const int*>(a->block_tables),
                                       static_cast<const int*>(a->k_starts),
                                       a->cache_block_stride,
                                       a->block_table_stride,
                                       a->num_rows,
                                       a->batch,
                                       a->key_begin};
  return rorqual::from_cuda(rorqual::launch_gather_latents(p, static_cast<cudaStream_t>(stream)), "gather_latents");
}
