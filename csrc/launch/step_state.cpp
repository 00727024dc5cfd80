// step_state.cpp: C wrappers of the kernels that keep the decode set's state.
#include "error.h"
#include "rorqual/launch.h"

using bf16 = __nv_bfloat16;
using rorqual::aligned;

extern "C" int rorqual_scatter_words(const RorqualScatterWords* a, void* stream) {
  RORQUAL_REQUIRE(a->num_changes >= 0, "scatter_words: num_changes must be >= 0, got " + std::to_string(a->num_changes));
  if (a->num_changes == 0) return 0;
  RORQUAL_REQUIRE(a->words && a->changes, "scatter_words: words and changes must not be NULL");
  RORQUAL_REQUIRE(aligned(a->changes, 8), "scatter_words: changes must be 8-byte aligned");
  return rorqual::from_cuda(
      rorqual::launch_scatter_words(static_cast<int*>(a->words), static_cast<const int*>(a->changes), a->num_changes,
                                    static_cast<cudaStream_t>(stream)),
      "scatter_words");
}

extern "C" int rorqual_step_prepare(const RorqualStepPrepare* a, void* stream) {
  RORQUAL_REQUIRE(a->num_rows >= 0 && a->num_compute_rows >= 0 && a->num_compute_rows <= a->num_rows,
                  "step_prepare: 0 <= num_compute_rows <= num_rows, got " + std::to_string(a->num_compute_rows) + " of " +
                      std::to_string(a->num_rows));
  RORQUAL_REQUIRE(a->hidden >= 8 && a->hidden % 8 == 0,
                  "step_prepare: hidden must be a multiple of 8, got " + std::to_string(a->hidden));
  if (a->num_rows == 0) return 0;
  RORQUAL_REQUIRE(a->slots && a->state && a->block_tables && a->embedding && a->new_positions && a->active,
                  "step_prepare: slots, state, block_tables, embedding, new_positions and active must not be NULL");
  RORQUAL_REQUIRE(a->num_compute_rows == 0 || (a->x && a->positions && a->slot_mapping && a->kv_lens && a->row_tables),
                  "step_prepare: x, positions, slot_mapping, kv_lens and row_tables must not be NULL");
  RORQUAL_REQUIRE(aligned(a->embedding, 16) && aligned(a->x, 16), "step_prepare: embedding and x must be 16-byte aligned");
  const rorqual::StepPrepareParams p{static_cast<const int*>(a->slots),
                                     static_cast<const int*>(a->state),
                                     static_cast<const int*>(a->block_tables),
                                     static_cast<const bf16*>(a->embedding),
                                     static_cast<bf16*>(a->x),
                                     static_cast<int64_t*>(a->positions),
                                     static_cast<int64_t*>(a->slot_mapping),
                                     static_cast<int*>(a->kv_lens),
                                     static_cast<int*>(a->row_tables),
                                     static_cast<int*>(a->new_positions),
                                     static_cast<uint8_t*>(a->active),
                                     a->block_table_stride,
                                     a->row_table_stride,
                                     a->num_rows,
                                     a->num_compute_rows,
                                     a->hidden};
  return rorqual::from_cuda(rorqual::launch_step_prepare(p, static_cast<cudaStream_t>(stream)), "step_prepare");
}

extern "C" int rorqual_step_advance(const RorqualStepAdvance* a, void* stream) {
  RORQUAL_REQUIRE(a->num_rows >= 0, "step_advance: num_rows must be >= 0, got " + std::to_string(a->num_rows));
  if (a->num_rows == 0) return 0;
  RORQUAL_REQUIRE(a->state && a->slots && a->tokens && a->sound && a->active && a->results,
                  "step_advance: no pointer may be NULL");
  const rorqual::StepAdvanceParams p{static_cast<int*>(a->state),          static_cast<const int*>(a->slots),
                                     static_cast<const int*>(a->tokens),   static_cast<const uint8_t*>(a->sound),
                                     static_cast<const uint8_t*>(a->active), static_cast<int*>(a->results), a->num_rows};
  return rorqual::from_cuda(rorqual::launch_step_advance(p, static_cast<cudaStream_t>(stream)), "step_advance");
}

extern "C" int rorqual_embed(const RorqualEmbed* a, void* stream) {
  RORQUAL_REQUIRE(a->num_rows >= 0, "embed: num_rows must be >= 0, got " + std::to_string(a->num_rows));
  RORQUAL_REQUIRE(a->hidden >= 8 && a->hidden % 8 == 0,
                  "embed: hidden must be a multiple of 8, got " + std::to_string(a->hidden));
  if (a->num_rows == 0) return 0;
  RORQUAL_REQUIRE(a->x && a->embedding && a->token_ids, "embed: no pointer may be NULL");
  RORQUAL_REQUIRE(aligned(a->embedding, 16) && aligned(a->x, 16), "embed: embedding and x must be 16-byte aligned");
  return rorqual::from_cuda(
      rorqual::launch_embed(static_cast<bf16*>(a->x), static_cast<const bf16*>(a->embedding),
                            static_cast<const int*>(a->token_ids), a->num_rows, a->hidden,
                            static_cast<cudaStream_t>(stream)),
      "embed");
}
