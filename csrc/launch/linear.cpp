// linear.cpp: C wrapper of the matrix products, which also makes the tiles' tensor maps.
#include <algorithm>

#include "error.h"
#include "rorqual/launch.h"
#include "tensor_map.h"

using rorqual::aligned;

extern "C" int rorqual_linear(const RorqualLinear* a, void* stream) {
  RORQUAL_REQUIRE(a->num_tokens >= 0 && a->batch >= 1 && a->batch <= 65535,
                  "linear: num_tokens must be >= 0 and batch in [1, 65535], got " + std::to_string(a->num_tokens) +
                      " and " + std::to_string(a->batch));
  RORQUAL_REQUIRE(a->in_features >= 8 && a->in_features % 8 == 0 && a->out_features >= 8 && a->out_features % 8 == 0,
                  "linear: in_features and out_features must be multiples of 8, >= 8, got " +
                      std::to_string(a->in_features) + " and " + std::to_string(a->out_features));
  RORQUAL_REQUIRE(!a->silu_mul || (a->out_features % 16 == 0 && !a->bias && !a->residual),
                  "linear: silu_mul needs out_features in multiples of 16, and neither bias nor residual");
  RORQUAL_REQUIRE(!a->residual || a->batch == 1, "linear: a residual needs batch 1, got " + std::to_string(a->batch));
  if (a->num_tokens == 0) return 0;
  RORQUAL_REQUIRE(a->out && a->x && a->weight, "linear: out, x and weight must not be NULL");
  RORQUAL_REQUIRE(aligned(a->out, 16) && aligned(a->x, 16) && aligned(a->weight, 16) && aligned(a->bias, 16) &&
                      aligned(a->residual, 16),
                  "linear: pointers must be 16-byte aligned");
  RORQUAL_REQUIRE(a->x_token_stride % 8 == 0 && a->x_batch_stride % 8 == 0 && a->out_token_stride % 8 == 0 &&
                      a->out_batch_stride % 8 == 0 && a->residual_stride % 8 == 0,
                  "linear: strides must be multiples of 8 elements");
  using bf16 = __nv_bfloat16;
  rorqual::LinearParams p{};
  p.out = a->out;
  p.x = static_cast<const bf16*>(a->x);
  p.weight = static_cast<const bf16*>(a->weight);
  p.bias = static_cast<const bf16*>(a->bias);
  p.residual = static_cast<const bf16*>(a->residual);
  p.out_token_stride = a->out_token_stride;
  p.out_batch_stride = a->out_batch_stride;
  p.x_token_stride = a->x_token_stride;
  p.x_batch_stride = a->x_batch_stride;
  p.residual_stride = a->residual_stride;
  p.num_tokens = a->num_tokens;
  p.out_features = a->out_features;
  p.in_features = a->in_features;
  p.batch = a->batch;
  p.out_float32 = a->out_float32 != 0;
  p.silu_mul = a->silu_mul != 0;
  const auto cuda_stream = static_cast<cudaStream_t>(stream);

  const cuuint64_t in = a->in_features, out = a->out_features, tokens = a->num_tokens, batch = a->batch;
  const cuuint32_t depth = rorqual::kLinearTileDepth;
  if (a->tile_rows < 64) {
    RORQUAL_REQUIRE(a->num_tokens <= 16 && in % depth == 0,
                    "linear: the kernel of few tokens takes at most 16, and in_features in multiples of 64, got " +
                        std::to_string(a->num_tokens) + " and " + std::to_string(in));
    int device, num_sms;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return rorqual::from_cuda(error, "linear");
    const int rows = a->tile_rows == 0 ? rorqual::choose_linear_rows(p, num_sms) : a->tile_rows;
    RORQUAL_REQUIRE((rows == 8 && !p.silu_mul) || rows == 16 || rows == 32,
                    "linear: tile_rows must be 0, 8 (not with silu_mul), 16, 32, 64 or 128, got " +
                        std::to_string(rows));
    RORQUAL_REQUIRE(a->parts == 0 || (a->parts == 8 && a->in_features >= 8 * rorqual::kLinearTileDepth),
                    "linear: the kernel of few tokens takes no parts, or 8 of at least 512 in_features, got " +
                        std::to_string(a->parts) + " of " + std::to_string(in));
    const cuuint32_t blocks = std::min<int>(rorqual::kLinearRowsBlocks, a->in_features / depth);
    CUtensorMap weight;
    if (const int code = rorqual::encode_bf16_map<4>(&weight, a->weight, {depth, out, in / depth, batch},
                                                     {in, depth, out * in},
                                                     {depth, static_cast<cuuint32_t>(rows), blocks, 1}, "linear")) {
      return code;
    }
    return rorqual::from_cuda(rorqual::launch_linear_rows(p, weight, rows, num_sms, a->parts == 8, cuda_stream),
                              "linear");
  }
  RORQUAL_REQUIRE(rorqual::linear_tile_exists(a->tile_rows, a->tile_tokens),
                  "linear: tiles are 64 x 16, 32, 64 or 128 x 64, 128, 192, 256, got " + std::to_string(a->tile_rows) +
                      " x " + std::to_string(a->tile_tokens));
  const int blocks = (a->in_features + rorqual::kLinearTileDepth - 1) / rorqual::kLinearTileDepth;
  const int parts = a->parts == 0 ? a->split : a->parts;
  RORQUAL_REQUIRE(a->split >= 1 && parts >= a->split && parts <= 8 && parts <= blocks && parts % a->split == 0,
                  "linear: split must be in [1, 8], parts a multiple of it, and leave no part without any of " +
                      std::to_string(blocks) + " blocks, got " + std::to_string(a->split) + " and " +
                      std::to_string(parts));
  RORQUAL_REQUIRE(parts == a->split || rorqual::linear_tile_joins(a->tile_rows, a->tile_tokens),
                  "linear: tiles of 128 x " + std::to_string(a->tile_tokens) + " need as many parts as split, got " +
                      std::to_string(parts) + " and " + std::to_string(a->split));
  rorqual::LinearTileMaps maps;
  // A stride over a single row or batch is never taken, but must still be one.
  const cuuint64_t x_token_stride = tokens == 1 ? in : a->x_token_stride;
  const cuuint64_t x_batch_stride = batch == 1 ? in : a->x_batch_stride;
  if (const int code = rorqual::encode_bf16_map<3>(&maps.weight, a->weight, {in, out, batch}, {in, out * in},
                                                   {depth, static_cast<cuuint32_t>(a->tile_rows), 1}, "linear")) {
    return code;
  }
  if (const int code =
          rorqual::encode_bf16_map<3>(&maps.x, a->x, {in, tokens, batch}, {x_token_stride, x_batch_stride},
                                      {depth, static_cast<cuuint32_t>(a->tile_tokens), 1}, "linear")) {
    return code;
  }
  return rorqual::from_cuda(
      rorqual::launch_linear_tiles(p, maps, a->tile_rows, a->tile_tokens, a->split, parts, cuda_stream), "linear");
}
