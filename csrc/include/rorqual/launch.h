// launch.h: what the C ABI (launch/) hands to each kernel family: checked parameters and one function.
// No function allocates, synchronises or changes the current device, so a CUDA graph can capture all of them.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace rorqual {

// Strides are in elements throughout.
struct RmsNormParams {
  __nv_bfloat16* out;       // [num_rows, hidden]
  __nv_bfloat16* residual;  // [num_rows, hidden] or null; becomes x + residual, which is what is normalised
  const __nv_bfloat16* x;   // [num_rows, hidden]
  const __nv_bfloat16* weight;
  int64_t out_stride, residual_stride, x_stride;
  int num_rows, hidden;
  float eps;
};
cudaError_t launch_rms_norm(const RmsNormParams& p, cudaStream_t stream);

struct MlaStoreParams {
  __nv_bfloat16* cache;              // [num_blocks, 64, 576], blocks `cache_block_stride` apart
  __nv_bfloat16* latent_out;         // [num_tokens, 576] or null: the same rows, densely
  __nv_bfloat16* q_pe;               // [num_tokens, num_heads, 64], turned in place
  const __nv_bfloat16* c_kv;         // [num_tokens, 512]
  const __nv_bfloat16* k_pe;         // [num_tokens, 64]
  const __nv_bfloat16* norm_weight;  // [512], or null: c_kv is normalised already
  const float* cos_sin;              // [num_positions, 64]: 32 cosines, then 32 sines
  const int64_t* positions;          // [num_tokens]
  const int64_t* slot_mapping;       // [num_tokens], -1 = padding: nothing of that token is read or written
  int64_t cache_block_stride, c_kv_stride, k_pe_stride, q_pe_token_stride, q_pe_head_stride;
  int num_tokens, num_heads;  // num_heads 0: no queries
  float eps;
};
cudaError_t launch_mla_store(const MlaStoreParams& p, cudaStream_t stream);

// The plan of one decode step, shared by all layers: which part of which sequence each CTA takes. int32 words:
//   [0, 4)              number of splits, splits over capacity (0 or 1), units a part, blocks of a split (0: any)
//   [4, 4 + 4 * parts)  a part's {first sequence, first block, last sequence, end block in it}
//   then 8 * batch      a sequence's {first token, query tokens, length, blocks}, {first part that touches it, where its
//                       splits start in the workspace, number of splits, 0}
struct MlaPlanParams {
  int* plan;
  const int* kv_lens;   // [batch]
  const int* q_starts;  // [batch + 1]
  int batch, num_parts;
  int split_blocks;     // 0: cut where the load is even; else splits of exactly so many blocks
  int min_units;        // at least so many units of work a part
  int overhead_blocks;  // what starting a sequence costs, in blocks
  int split_capacity;
  int group_splits;     // > 1: the step's splits are groups of so many, or single ones where there are few groups
};
cudaError_t launch_mla_plan(const MlaPlanParams& p, cudaStream_t stream);

enum class MlaDecodeKernel : int { kNarrow16 = 0, kNarrow32 = 1, kWide64 = 2 };

struct MlaDecodeParams {
  CUtensorMap cache_map;  // of the kernel: mla_decode.cuh says which boxes
  const __nv_bfloat16* q_latent;  // [num_tokens, num_heads, 512]
  const __nv_bfloat16* q_pe;      // [num_tokens, num_heads, 64]
  __nv_bfloat16* out;             // [num_tokens, num_heads, 512]
  float* lse;                     // [num_tokens, num_heads] or null, natural logarithm, -inf for an empty row
  const int* block_tables;        // [batch, block_table_stride]
  const int* kv_lens;             // [batch]: the sequence's length, its query tokens included
  const int* q_starts;            // [batch + 1]: tokens [q_starts[s], q_starts[s + 1]) are sequence s's, its last ones
  const int* plan;
  float* partial_out;  // [split_capacity, tiles * rows of a tile, 512]
  float* partial_lse;  // [split_capacity, tiles * rows of a tile], base-2 logarithm
  float* partial_sum;  // the same; of splits that are not whole groups, whose partial_lse is the largest score,
                       // the sum of the weights, and partial_out not yet divided by it
  int64_t q_latent_token_stride, q_latent_head_stride, q_pe_token_stride, q_pe_head_stride;
  int64_t out_token_stride, out_head_stride, block_table_stride;
  int batch, num_heads, max_q_len, num_parts, num_tiles, split_blocks, split_capacity;
  int group_splits;       // > 1: splits are joined in order within groups of so many
  int partial_tile_rows;  // mla_tile_rows of the kernel
  float scale_log2;  // softmax scale * log2(e)
};
// The attention kernel of the choice, then the combination of split sequences.
cudaError_t launch_mla_decode(MlaDecodeKernel kernel, const MlaDecodeParams& p, cudaStream_t stream);
cudaError_t launch_mla_decode_narrow16(const MlaDecodeParams& p, cudaStream_t stream);  // any group_splits
cudaError_t launch_mla_decode_narrow32(const MlaDecodeParams& p, cudaStream_t stream);
cudaError_t launch_mla_decode_wide(const MlaDecodeParams& p, cudaStream_t stream);

constexpr int mla_tile_rows(MlaDecodeKernel kernel) {
  return kernel == MlaDecodeKernel::kNarrow16 ? 16 : kernel == MlaDecodeKernel::kNarrow32 ? 32 : 64;
}

struct MoeRouteParams {
  int* topk_ids;        // [num_tokens, top_k + num_shared], best first
  float* topk_weights;  // [num_tokens, top_k + num_shared]
  const float* logits;  // [num_tokens, num_experts]
  const float* bias;    // [num_experts] or null: added for the ranking, not to the weights
  int64_t logits_stride;
  int num_tokens, num_experts, top_k;
  int num_groups, group_size, topk_group;  // topk_group == num_groups: no limit
  bool sigmoid;                            // else softmax
  bool group_by_two;                       // a group's rank is the sum of its two best, else its best
  bool normalize;
  float scale;
  int num_shared;  // further columns behind the top_k: experts num_experts, num_experts + 1 … with weight 1
};
cudaError_t launch_moe_route(const MoeRouteParams& p, cudaStream_t stream);

struct MoePermuteParams {
  int* counts;          // [num_experts], scratch
  int* expert_starts;   // [num_experts + 1]: rows of expert e are [starts[e], starts[e + 1]), padding last
  int* choice_of;       // [rows]: which choice a row is, -1 for padding; rows from starts[num_experts] on: untouched
  int* row_of;          // [num_choices]: the inverse; -1 where topk_ids is no expert
  const int* topk_ids;  // [num_choices]
  int num_choices, num_experts, row_alignment;
};
cudaError_t launch_moe_permute(const MoePermuteParams& p, cudaStream_t stream);

// ---- experts ----

// Weight rows of a tile of the grouped products; a width is a multiple of half of it, hidden of all of it.
inline constexpr int kExpertsTileRows = 128;

// So many choices, or fewer, the products sort themselves.
inline constexpr int kExpertsFewChoices = 64;
inline constexpr int kExpertsTokenMaps = 5;

// Choices in expert order, cut into groups of one expert's rows.
struct ExpertsPlanParams {
  int* expert_starts;   // [num_experts + 1]
  int4* groups;         // [1 + groups]: {number of groups, 0, 0, 0}, then {expert, first row, rows, 0}
  int* row_of;          // [num_choices]: a choice's row; -1 where topk_ids is no expert
  int* chunk_counts;    // [experts_plan_chunks(num_choices), num_experts], scratch
  const int* topk_ids;  // [num_tokens, top_k]
  int num_choices, top_k, num_experts;
  int group_tokens;  // rows of a group at most, a multiple of 8
};
int experts_plan_chunks(int num_choices);
cudaError_t launch_experts_plan(const ExpertsPlanParams& p, cudaStream_t stream);

// x in the rows' order.
struct ExpertsSortParams {
  __nv_bfloat16* sorted;   // [num_tokens * top_k, hidden]
  const __nv_bfloat16* x;  // [num_tokens, hidden]
  const int* row_of;       // [num_tokens, top_k]
  int64_t x_stride;
  int num_tokens, top_k, hidden;
};
cudaError_t launch_experts_sort(const ExpertsSortParams& p, cudaStream_t stream);

struct ExpertsProductParams {
  CUtensorMap weight_map;  // [num_experts, weight rows, k] in boxes of kExpertsTileRows x 64
  CUtensorMap token_maps[kExpertsTokenMaps];  // [rows, k] in boxes of 8, 16 … x 64; few choices: the first, of 1 x 64, x
  // [num_experts, weight_rows, 64 * steps] as boxes of kExpertsTileRows x 64, one after the other, k innermost, each as it
  // lies in shared memory: rows of 128 bytes, a row's eight pieces of 16 bytes at piece ^ (row % 8).
  const __nv_bfloat16* weight;
  __nv_bfloat16* out;    // [rows, out_width]
  const int4* groups;    // the plan's
  int weight_rows, steps;
  int out_width, group_tokens;
  bool even;  // every CTA takes as many weight rows as the others, for when memory is the limit
  // Few choices: these instead of a plan, and x gathered row by row. Otherwise topk_ids is null, and tokens lie in rows.
  const int* topk_ids;  // [num_tokens, top_k]
  int* row_of;          // [num_tokens, top_k], written by the first product
  int num_choices, top_k, num_experts;
};
// silu(gate) * up, of the weight's alternating rows; and the plain product, which starts before its tokens are there.
// paired: two CTAs take neighbouring tiles and share their tokens; weight_rows must be a multiple of two tiles', and
// nothing is gathered.
cudaError_t launch_experts_gate_up(const ExpertsProductParams& p, int num_ctas, bool paired, cudaStream_t stream);
cudaError_t launch_experts_down(const ExpertsProductParams& p, int num_ctas, bool paired, cudaStream_t stream);

// residual += the weighted sum of a token's rows, in order of choice; then RMSNorm of it, if wanted.
struct ExpertsCombineParams {
  __nv_bfloat16* residual;           // [num_tokens, hidden]
  __nv_bfloat16* normed;             // [num_tokens, hidden] or null
  const __nv_bfloat16* norm_weight;  // [hidden] or null
  const __nv_bfloat16* y;            // [rows, hidden]
  const int* row_of;                 // [num_tokens, top_k]; -1: nothing
  const float* topk_weights;         // [num_tokens, top_k]
  int64_t residual_stride, normed_stride;
  int num_tokens, top_k, hidden;
  float eps;
};
cudaError_t launch_experts_combine(const ExpertsCombineParams& p, cudaStream_t stream);


// ---- prefill ----
inline constexpr int kPrefillGroupRows = 64, kPrefillTileRows = 128, kPrefillTileKeys = 128;
inline constexpr int kPrefillTileWords = 8;     // words of a tile in the plan, in abi.h
inline constexpr int kPrefillStateWords = 136;  // 128 of output, 4 partial sums, the maximum, 3 unused
inline constexpr int kPrefillFirst = 1, kPrefillLast = 2;

struct MlaPrefillParams {
  CUtensorMap q_map;     // [num_tokens, num_heads, 192], boxes of 64 rows of 64 columns
  CUtensorMap kv_map;    // [num_keys, num_heads, 256], boxes of 128 rows of 64 columns
  CUtensorMap k_pe_map;  // [num_keys, 1, 64], the same
  __nv_bfloat16* out;    // [num_tokens, num_heads, 128]
  float* lse;            // [num_tokens, num_heads] or null, natural logarithm
  float* state;          // [num_tokens, num_heads, 136]; null if every tile is first and last
  const int* tiles;      // [num_tiles, 8]
  int* queue;            // one word, zero; zero again afterwards
  int64_t out_token_stride, out_head_stride;
  int num_tiles, num_heads, heads_per_group;
  float scale_log2;  // softmax scale * log2(e)
};
cudaError_t launch_mla_prefill(const MlaPrefillParams& p, int num_ctas, cudaStream_t stream);

struct GatherLatentsParams {
  __nv_bfloat16* out;          // [num_rows, 576]
  const __nv_bfloat16* cache;  // [num_blocks, 64, 576]
  const int* block_tables;     // [batch, block_table_stride]
  const int* k_starts;         // [batch + 1]
  int64_t cache_block_stride, block_table_stride;
  int num_rows, batch, key_begin;
};
cudaError_t launch_gather_latents(const GatherLatentsParams& p, cudaStream_t stream);


// ---- sampling ----
struct SampleParams {
  int* out_tokens;        // [num_rows]
  uint8_t* out_sound;     // [num_rows]
  float* out_logprobs;    // [num_rows] or null: no log-probabilities; the three below go with it
  int* out_ranks;         // [num_rows]
  int* out_top_ids;       // [num_rows, 20]
  float* out_top_logprobs;
  uint32_t* arrivals;     // [num_rows], zero before and after
  uint32_t* todo;         // [num_rows]: what the first kernel leaves to the second
  void* units;            // UnitStats [num_rows, num_units]
  void* rows;             // RowStats [num_rows], of rows with something to do
  uint32_t* set_keys;     // [num_rows, num_units, 32]: the largest of each lane's 32 tokens, adjusted
  uint32_t* raw_set_keys; // the same before the adjustment, of adjusted rows
  const float* logits;    // [num_rows, logits_stride]
  const int* slots;       // [num_rows]
  const void* positions;  // [num_rows]
  const void* active;     // [num_rows] or null
  const int* targets;     // [num_rows] or null: report these tokens' log-probabilities, choose nothing
  const int* records;     // [max_seqs, 16]
  const float* bias;      // [*, pool_stride] or null
  uint32_t* states;       // [*, pool_stride]: bit 31 in the prompt, bit 30 a stop token, below: times generated
  const uint32_t* masks;  // [*, mask_stride] or null
  int64_t logits_stride, pool_stride, mask_stride;
  int num_rows, vocab_size, num_units, positions_bytes, active_bytes, num_top;
  bool vectors;           // rows begin at multiples of 16 bytes
};
// The first kernel settles nearly every row; the second, rows whose cut lies beyond a few hundred tokens.
cudaError_t launch_sample_scan(const SampleParams& p, cudaStream_t stream);
cudaError_t launch_sample_select(const SampleParams& p, cudaStream_t stream);
int sample_num_units(int vocab_size);
int64_t sample_unit_bytes();
int64_t sample_row_bytes();


// ---- step state ----

struct StepPrepareParams {
  const int* slots;           // [num_rows]: the sequence's place in the state, -1 = padding
  const int* state;           // [num_slots, 16], words as in step_state.cu
  const int* block_tables;    // [num_slots, block_table_stride]
  const __nv_bfloat16* embedding;  // [vocab, hidden]
  __nv_bfloat16* x;           // [num_compute_rows, hidden]
  int64_t* positions;         // [num_compute_rows]
  int64_t* slot_mapping;      // [num_compute_rows], -1 where the row does not run
  int* kv_lens;               // [num_compute_rows], 0 where the row does not run
  int* row_tables;            // [num_compute_rows, row_table_stride]
  int* new_positions;         // [num_rows]: position of the token that the row will choose
  uint8_t* active;            // [num_rows]
  int64_t block_table_stride, row_table_stride;
  int num_rows, num_compute_rows, hidden;
};
cudaError_t launch_step_prepare(const StepPrepareParams& p, cudaStream_t stream);

struct StepAdvanceParams {
  int* state;            // [num_slots, 16]
  const int* slots;      // [num_rows]
  const int* tokens;     // [num_rows]
  const uint8_t* sound;  // [num_rows]
  const uint8_t* active; // [num_rows]
  int* results;          // [num_rows]: the token, -1 = the row did not run, -2 = its logits were not finite
  int num_rows;
};
cudaError_t launch_step_advance(const StepAdvanceParams& p, cudaStream_t stream);

cudaError_t launch_scatter_words(int* words, const int* changes, int num_changes, cudaStream_t stream);
cudaError_t launch_embed(__nv_bfloat16* x, const __nv_bfloat16* embedding, const int* token_ids, int num_rows, int hidden,
                         cudaStream_t stream);


// ---- linear ----

struct LinearParams {
  void* out;                      // bf16 or float [batch, num_tokens, out_features]; with silu_mul half as wide
  const __nv_bfloat16* x;         // [batch, num_tokens, in_features]
  const __nv_bfloat16* weight;    // [batch, out_features, in_features]; never written while kernels run
  const __nv_bfloat16* bias;      // [out_features] or null
  const __nv_bfloat16* residual;  // [num_tokens, out_features] or null
  int64_t out_token_stride, out_batch_stride, x_token_stride, x_batch_stride, residual_stride;
  int num_tokens, out_features, in_features, batch;
  bool out_float32;
  bool silu_mul;  // rows of the weight: 8 of the gate, 8 of what it gates, and so on
};
constexpr int kLinearTileDepth = 64;   // in_features of a line of a box
constexpr int kLinearRowsBlocks = 8;  // lines of a row that a stage of the kernel of few tokens holds
// At most 16 tokens, in_features a multiple of 64; tile_rows (of the weight) 8, 16 or 32, with silu_mul not 8. The
// map: [batch, in_features / 64, out_features, 64], boxes of [1, min(8, in_features / 64), tile_rows, 64]. in_parts: added
// as linear_tiles.cu adds eight parts.
int choose_linear_rows(const LinearParams& p, int num_sms);
cudaError_t launch_linear_rows(const LinearParams& p, const CUtensorMap& weight, int tile_rows, int num_sms,
                               bool in_parts, cudaStream_t stream);
struct LinearTileMaps {
  CUtensorMap weight, x;
};
// tile_rows x tile_tokens: 64 x 16, 32, 64; 128 x 64, 128, 192, 256. parts: of in_features; split: CTAs that share a tile,
// each with parts / split parts, which are more than one only where the tile joins them.
bool linear_tile_exists(int tile_rows, int tile_tokens);
bool linear_tile_joins(int tile_rows, int tile_tokens);
cudaError_t launch_linear_tiles(const LinearParams& p, const LinearTileMaps& maps, int tile_rows, int tile_tokens,
                                int split, int parts, cudaStream_t stream);


}  // namespace rorqual
