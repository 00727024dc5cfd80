// experts.cpp: C wrappers of the experts' plan, products and combination.
#include "error.h"
#include "rorqual/launch.h"
#include "tensor_map.h"

namespace {

using rorqual::aligned;
using rorqual::fail;
using bf16 = __nv_bfloat16;

constexpr int kTileRows = rorqual::kExpertsTileRows, kDepth = 64;

// 0, or RORQUAL_EINVAL with a message.
int check(const RorqualExperts* a, const std::string& name) {
  const auto text = [](int64_t value) { return std::to_string(value); };
  RORQUAL_REQUIRE(a->num_tokens >= 0, name + ": num_tokens must be >= 0, got " + text(a->num_tokens));
  RORQUAL_REQUIRE(a->num_experts >= 1 && a->num_experts <= 512,
                  name + ": num_experts must be in [1, 512], got " + text(a->num_experts));
  RORQUAL_REQUIRE(a->top_k >= 1 && a->top_k <= 32, name + ": top_k must be in [1, 32], got " + text(a->top_k));
  RORQUAL_REQUIRE(int64_t{a->num_tokens} * a->top_k <= a->row_capacity && a->row_capacity < (int64_t{1} << 31),
                  name + ": row_capacity must be in [num_tokens * top_k, 2^31), got " + text(a->row_capacity) + " for " +
                      text(a->num_tokens) + " and " + text(a->top_k));
  RORQUAL_REQUIRE(a->hidden >= kTileRows && a->hidden % kTileRows == 0,
                  name + ": hidden must be a positive multiple of 128, got " + text(a->hidden));
  RORQUAL_REQUIRE(a->width >= kDepth && a->width % kDepth == 0,
                  name + ": width must be a positive multiple of 64, got " + text(a->width));
  RORQUAL_REQUIRE(a->group_tokens >= 8 && a->group_tokens <= 256 && a->group_tokens % 8 == 0,
                  name + ": group_tokens must be a multiple of 8 in [8, 256], got " + text(a->group_tokens));
  RORQUAL_REQUIRE(!a->few || (a->num_tokens * a->top_k <= rorqual::kExpertsFewChoices && a->group_tokens <= 64),
                  name + ": few needs num_tokens * top_k <= 64 and group_tokens <= 64, got " +
                      text(a->num_tokens * a->top_k) + " and " + text(a->group_tokens));
  RORQUAL_REQUIRE(a->num_ctas >= 1, name + ": num_ctas must be >= 1, got " + text(a->num_ctas));
  RORQUAL_REQUIRE(a->x_stride >= a->hidden && a->x_stride % 8 == 0,
                  name + ": x_stride must be a multiple of 8 elements and at least hidden, got " + text(a->x_stride));
  if (a->num_tokens == 0) return 0;
  RORQUAL_REQUIRE(a->y && a->h && a->groups && a->expert_starts && a->row_of && a->chunk_counts && a->x &&
                      a->topk_ids && a->gate_up && a->down,
                  name + ": no pointer may be NULL");
  RORQUAL_REQUIRE(aligned(a->y, 16) && aligned(a->h, 16) && aligned(a->groups, 16) && aligned(a->x, 16) &&
                      aligned(a->gate_up, 16) && aligned(a->down, 16),
                  name + ": y, h, groups, x, gate_up and down must be 16-byte aligned");
  return 0;
}

// Of tokens: a map of [rows, k].
int encode(CUtensorMap* map, const void* base, int64_t k, int64_t rows, int64_t row_stride, int box_rows,
           const std::string& name) {
  const cuuint64_t dims[3] = {static_cast<cuuint64_t>(k), static_cast<cuuint64_t>(rows), 1};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_stride), static_cast<cuuint64_t>(rows * row_stride)};
  const cuuint32_t box[3] = {kDepth, static_cast<cuuint32_t>(box_rows), 1};
  return rorqual::encode_bf16_map<3>(map, base, dims, strides, box, name.c_str());
}

// Tokens in rows: boxes of 8, 16 … rows, as far as a group needs them.
int encode_rows(rorqual::ExpertsProductParams& p, const void* base, int64_t k, const RorqualExperts* a,
                const std::string& name) {
  for (int i = 0; i < rorqual::kExpertsTokenMaps && 8 << i <= a->group_tokens; ++i) {
    const int refused = encode(&p.token_maps[i], base, k, a->row_capacity, k, 8 << i, name);
    if (refused != 0) return refused;
  }
  return 0;
}

void sort_few(const RorqualExperts* a, rorqual::ExpertsProductParams& p) {
  if (!a->few) return;
  p.topk_ids = static_cast<const int*>(a->topk_ids);
  p.row_of = static_cast<int*>(a->row_of);
  p.num_choices = a->num_tokens * a->top_k;
  p.top_k = a->top_k;
  p.num_experts = a->num_experts;
}

bool paired(const RorqualExperts* a, const rorqual::ExpertsProductParams& p) {
  return a->paired && !a->few && p.weight_rows % (2 * kTileRows) == 0 && a->num_ctas >= 2;
}

}  // namespace

extern "C" int32_t rorqual_experts_plan_chunks(int32_t num_choices) {
  return num_choices > 0 ? rorqual::experts_plan_chunks(num_choices) : 0;
}

extern "C" int rorqual_experts_plan(const RorqualExperts* a, void* stream) {
  const int refused = check(a, "experts_plan");
  if (refused != 0 || a->num_tokens == 0) return refused;
  if (a->few) return 0;
  const rorqual::ExpertsPlanParams p{static_cast<int*>(a->expert_starts),
                                     static_cast<int4*>(a->groups),
                                     static_cast<int*>(a->row_of),
                                     static_cast<int*>(a->chunk_counts),
                                     static_cast<const int*>(a->topk_ids),
                                     a->num_tokens * a->top_k,
                                     a->top_k,
                                     a->num_experts,
                                     a->group_tokens};
  return rorqual::from_cuda(rorqual::launch_experts_plan(p, static_cast<cudaStream_t>(stream)), "experts_plan");
}

extern "C" int rorqual_experts_gate_up(const RorqualExperts* a, void* stream) {
  int refused = check(a, "experts_gate_up");
  if (refused != 0 || a->num_tokens == 0) return refused;
  const auto on = static_cast<cudaStream_t>(stream);
  rorqual::ExpertsProductParams p{};
  if (a->few) {
    refused = encode(&p.token_maps[0], a->x, a->hidden, a->num_tokens, a->x_stride, 1, "experts_gate_up");
  } else {
    const rorqual::ExpertsSortParams sort{static_cast<bf16*>(a->y),          static_cast<const bf16*>(a->x),
                                          static_cast<const int*>(a->row_of), a->x_stride,
                                          a->num_tokens,                      a->top_k,
                                          a->hidden};
    const cudaError_t error = rorqual::launch_experts_sort(sort, on);
    if (error != cudaSuccess) return rorqual::from_cuda(error, "experts_gate_up");
    refused = encode_rows(p, a->y, a->hidden, a, "experts_gate_up");
  }
  if (refused != 0) return refused;
  p.weight = static_cast<const bf16*>(a->gate_up);
  p.out = static_cast<bf16*>(a->h);
  p.groups = static_cast<const int4*>(a->groups);
  p.weight_rows = 2 * a->width;
  p.steps = a->hidden / kDepth;
  p.out_width = a->width;
  p.group_tokens = a->group_tokens;
  p.even = a->even != 0;
  sort_few(a, p);
  return rorqual::from_cuda(rorqual::launch_experts_gate_up(p, a->num_ctas, paired(a, p), on), "experts_gate_up");
}

extern "C" int rorqual_experts_down(const RorqualExperts* a, void* stream) {
  int refused = check(a, "experts_down");
  if (refused != 0 || a->num_tokens == 0) return refused;
  rorqual::ExpertsProductParams p{};
  refused = encode_rows(p, a->h, a->width, a, "experts_down");
  if (refused != 0) return refused;
  p.weight = static_cast<const bf16*>(a->down);
  p.out = static_cast<bf16*>(a->y);
  p.groups = static_cast<const int4*>(a->groups);
  p.weight_rows = a->hidden;
  p.steps = a->width / kDepth;
  p.out_width = a->hidden;
  p.group_tokens = a->group_tokens;
  p.even = a->even != 0;
  sort_few(a, p);
  return rorqual::from_cuda(rorqual::launch_experts_down(p, a->num_ctas, paired(a, p), static_cast<cudaStream_t>(stream)),
                            "experts_down");
}

extern "C" int rorqual_experts_combine(const RorqualExpertsCombine* a, void* stream) {
  RORQUAL_REQUIRE(a->num_tokens >= 0, "experts_combine: num_tokens must be >= 0, got " + std::to_string(a->num_tokens));
  RORQUAL_REQUIRE(a->top_k >= 1 && a->top_k <= 32,
                  "experts_combine: top_k must be in [1, 32], got " + std::to_string(a->top_k));
  RORQUAL_REQUIRE(a->hidden >= 8 && a->hidden <= 16384 && a->hidden % 8 == 0,
                  "experts_combine: hidden must be a multiple of 8 in [8, 16384], got " + std::to_string(a->hidden));
  if (a->num_tokens == 0) return 0;
  RORQUAL_REQUIRE(a->residual && a->y && a->row_of && a->topk_weights && (!a->normed || a->norm_weight),
                  "experts_combine: only normed and norm_weight may be NULL, norm_weight only if normed is");
  RORQUAL_REQUIRE(aligned(a->residual, 16) && aligned(a->normed, 16) && aligned(a->norm_weight, 16) && aligned(a->y, 16),
                  "experts_combine: residual, normed, norm_weight and y must be 16-byte aligned");
  RORQUAL_REQUIRE(a->residual_stride % 8 == 0 && a->normed_stride % 8 == 0,
                  "experts_combine: row strides must be multiples of 8 elements");
  const rorqual::ExpertsCombineParams p{static_cast<bf16*>(a->residual),
                                        static_cast<bf16*>(a->normed),
                                        static_cast<const bf16*>(a->norm_weight),
                                        static_cast<const bf16*>(a->y),
                                        static_cast<const int*>(a->row_of),
                                        static_cast<const float*>(a->topk_weights),
                                        a->residual_stride,
                                        a->normed_stride,
                                        a->num_tokens,
                                        a->top_k,
                                        a->hidden,
                                        a->eps};
  return rorqual::from_cuda(rorqual::launch_experts_combine(p, static_cast<cudaStream_t>(stream)), "experts_combine");
}
