// elementwise.cpp: C wrappers of rms_norm and mla_store.
#include "error.h"
#include "rorqual/launch.h"

using rorqual::aligned;

extern "C" int rorqual_rms_norm(const RorqualRmsNorm* a, void* stream) {
  RORQUAL_REQUIRE(a->num_rows >= 0, "rms_norm: num_rows must be >= 0, got " + std::to_string(a->num_rows));
  RORQUAL_REQUIRE(a->hidden >= 8 && a->hidden <= 16384 && a->hidden % 8 == 0,
                  "rms_norm: hidden must be a multiple of 8 in [8, 16384], got " + std::to_string(a->hidden));
  if (a->num_rows == 0) return 0;
  RORQUAL_REQUIRE(a->out && a->x && a->weight, "rms_norm: out, x and weight must not be NULL");
  RORQUAL_REQUIRE(aligned(a->out, 16) && aligned(a->residual, 16) && aligned(a->x, 16) && aligned(a->weight, 16),
                  "rms_norm: pointers must be 16-byte aligned");
  RORQUAL_REQUIRE(a->out_stride % 8 == 0 && a->residual_stride % 8 == 0 && a->x_stride % 8 == 0,
                  "rms_norm: row strides must be multiples of 8 elements");
  using bf16 = __nv_bfloat16;
  const rorqual::RmsNormParams params{
      static_cast<bf16*>(a->out), static_cast<bf16*>(a->residual),    static_cast<const bf16*>(a->x),
      static_cast<const bf16*>(a->weight), a->out_stride, a->residual_stride, a->x_stride, a->num_rows, a->hidden, a->eps};
  return rorqual::from_cuda(rorqual::launch_rms_norm(params, static_cast<cudaStream_t>(stream)), "rms_norm");
}

extern "C" int rorqual_mla_store(const RorqualMlaStore* a, void* stream) {
  RORQUAL_REQUIRE(a->num_tokens >= 0 && a->num_heads >= 0,
                  "mla_store: num_tokens and num_heads must be >= 0, got " + std::to_string(a->num_tokens) + " and " +
                      std::to_string(a->num_heads));
  if (a->num_tokens == 0) return 0;
  RORQUAL_REQUIRE(a->cache && a->c_kv && a->k_pe && a->cos_sin && a->positions && a->slot_mapping,
                  "mla_store: cache, c_kv, k_pe, cos_sin, positions and slot_mapping must not be NULL");
  RORQUAL_REQUIRE(a->num_heads == 0 || a->q_pe, "mla_store: q_pe must not be NULL when num_heads > 0");
  RORQUAL_REQUIRE(aligned(a->cache, 16) && aligned(a->latent_out, 16) && aligned(a->c_kv, 16) &&
                      aligned(a->norm_weight, 16) && aligned(a->k_pe, 4) && aligned(a->q_pe, 4),
                  "mla_store: cache, latent_out, c_kv and norm_weight must be 16-byte aligned, k_pe and q_pe 4-byte");
  RORQUAL_REQUIRE(a->cache_block_stride % 8 == 0 && a->c_kv_stride % 8 == 0 && a->k_pe_stride % 2 == 0 &&
                      a->q_pe_token_stride % 2 == 0 && a->q_pe_head_stride % 2 == 0,
                  "mla_store: strides of cache and c_kv must be multiples of 8 elements, of k_pe and q_pe even");
  using bf16 = __nv_bfloat16;
  rorqual::MlaStoreParams p{};
  p.cache = static_cast<bf16*>(a->cache);
  p.latent_out = static_cast<bf16*>(a->latent_out);
  p.q_pe = static_cast<bf16*>(a->q_pe);
  p.c_kv = static_cast<const bf16*>(a->c_kv);
  p.k_pe = static_cast<const bf16*>(a->k_pe);
  p.norm_weight = static_cast<const bf16*>(a->norm_weight);
  p.cos_sin = static_cast<const float*>(a->cos_sin);
  p.positions = static_cast<const int64_t*>(a->positions);
  p.slot_mapping = static_cast<const int64_t*>(a->slot_mapping);
  p.cache_block_stride = a->cache_block_stride;
  p.c_kv_stride = a->c_kv_stride;
  p.k_pe_stride = a->k_pe_stride;
  p.q_pe_token_stride = a->q_pe_token_stride;
  p.q_pe_head_stride = a->q_pe_head_stride;
  p.num_tokens = a->num_tokens;
  p.num_heads = a->num_heads;
  p.eps = a->eps;
  return rorqual::from_cuda(rorqual::launch_mla_store(p, static_cast<cudaStream_t>(stream)), "mla_store");
}
