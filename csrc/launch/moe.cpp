// moe.cpp: C wrappers of the router and of the permutation.
#include "error.h"
#include "rorqual/launch.h"

extern "C" int rorqual_moe_route(const RorqualMoeRoute* a, void* stream) {
  RORQUAL_REQUIRE(a->num_tokens >= 0, "moe_route: num_tokens must be >= 0, got " + std::to_string(a->num_tokens));
  RORQUAL_REQUIRE(a->num_experts >= 1 && a->num_experts <= 512,
                  "moe_route: num_experts must be in [1, 512], got " + std::to_string(a->num_experts));
  RORQUAL_REQUIRE(a->num_groups >= 1 && a->num_groups <= 32 && a->num_experts % a->num_groups == 0,
                  "moe_route: num_groups must be in [1, 32] and divide num_experts, got " +
                      std::to_string(a->num_groups) + " and " + std::to_string(a->num_experts));
  RORQUAL_REQUIRE(a->topk_group >= 1 && a->topk_group <= a->num_groups,
                  "moe_route: topk_group must be in [1, num_groups = " + std::to_string(a->num_groups) + "], got " +
                      std::to_string(a->topk_group));
  const int group_size = a->num_experts / a->num_groups;
  RORQUAL_REQUIRE(a->top_k >= 1 && a->top_k <= 32 && a->top_k <= a->topk_group * group_size,
                  "moe_route: top_k must be in [1, 32] and at most the experts of topk_group groups (" +
                      std::to_string(a->topk_group * group_size) + "), got " + std::to_string(a->top_k));
  RORQUAL_REQUIRE(!a->group_by_two || a->topk_group == a->num_groups || group_size >= 2,
                  "moe_route: groups that rank by their two best need two experts");
  RORQUAL_REQUIRE(a->num_shared >= 0 && a->top_k + a->num_shared <= 32,
                  "moe_route: num_shared must be >= 0 and top_k + num_shared at most 32, got " +
                      std::to_string(a->num_shared) + " and " + std::to_string(a->top_k));
  if (a->num_tokens == 0) return 0;
  RORQUAL_REQUIRE(a->topk_ids && a->topk_weights && a->logits, "moe_route: only bias may be NULL");
  const rorqual::MoeRouteParams p{static_cast<int*>(a->topk_ids),
                                  static_cast<float*>(a->topk_weights),
                                  static_cast<const float*>(a->logits),
                                  static_cast<const float*>(a->bias),
                                  a->logits_stride,
                                  a->num_tokens,
                                  a->num_experts,
                                  a->top_k,
                                  a->num_groups,
                                  group_size,
                                  a->topk_group,
                                  a->sigmoid != 0,
                                  a->group_by_two != 0,
                                  a->normalize != 0,
                                  a->scale,
                                  a->num_shared};
  return rorqual::from_cuda(rorqual::launch_moe_route(p, static_cast<cudaStream_t>(stream)), "moe_route");
}

extern "C" int rorqual_moe_permute(const RorqualMoePermute* a, void* stream) {
  RORQUAL_REQUIRE(a->num_choices >= 0, "moe_permute: num_choices must be >= 0, got " + std::to_string(a->num_choices));
  RORQUAL_REQUIRE(a->num_experts >= 1 && a->num_experts <= 512,
                  "moe_permute: num_experts must be in [1, 512], got " + std::to_string(a->num_experts));
  RORQUAL_REQUIRE(a->row_alignment >= 1,
                  "moe_permute: row_alignment must be >= 1, got " + std::to_string(a->row_alignment));
  RORQUAL_REQUIRE(a->expert_starts && a->counts && (a->num_choices == 0 || (a->choice_of && a->row_of && a->topk_ids)),
                  "moe_permute: no pointer may be NULL");
  const rorqual::MoePermuteParams p{static_cast<int*>(a->counts),
                                    static_cast<int*>(a->expert_starts),
                                    static_cast<int*>(a->choice_of),
                                    static_cast<int*>(a->row_of),
                                    static_cast<const int*>(a->topk_ids),
                                    a->num_choices,
                                    a->num_experts,
                                    a->row_alignment};
  return rorqual::from_cuda(rorqual::launch_moe_permute(p, static_cast<cudaStream_t>(stream)), "moe_permute");
}
