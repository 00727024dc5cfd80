/* abi.h: the C interface of librorqual_kernels.so. Raw device pointers, sizes and a stream; no torch.
 *
 * Every function returns 0, a cudaError_t (> 0), or a RORQUAL_E… (< 0); rorqual_last_error() then says what was
 * wrong, for the calling thread. Nothing is allocated, nothing waits for the device, and an empty batch is a
 * no-op, so every call can be captured by a CUDA graph. Strides are in elements, innermost dimensions contiguous,
 * bf16 pointers 16-byte aligned (q_pe: 4) and their strides multiples of 8 (q_pe: 2) elements.
 *
 * A change to a struct or to what a function means raises RORQUAL_ABI_VERSION; the loader refuses another one.
 */
#ifndef RORQUAL_ABI_H
#define RORQUAL_ABI_H
#include <stdint.h>

#define RORQUAL_ABI_VERSION 7
#define RORQUAL_EINVAL (-1)

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

int rorqual_abi_version(void);
const char* rorqual_last_error(void);
/* The machine code in the library, as "sm_90a". */
const char* rorqual_target(void);

typedef struct {
  void* out;           /* bf16 [num_rows, hidden] */
  void* residual;      /* bf16 [num_rows, hidden] or NULL: becomes x + residual, which is then normalised */
  const void* x;       /* bf16 [num_rows, hidden] */
  const void* weight;  /* bf16 [hidden] */
  int64_t out_stride, residual_stride, x_stride;
  int32_t num_rows, hidden;
  float eps;
} RorqualRmsNorm;
int rorqual_rms_norm(const RorqualRmsNorm* args, void* stream);

typedef struct {
  void* cache;              /* bf16 [num_blocks, 64, 576], blocks cache_block_stride apart */
  void* latent_out;         /* bf16 [num_tokens, 576] or NULL: the rows once more, contiguous */
  void* q_pe;               /* bf16 [num_tokens, num_heads, 64], turned in place */
  const void* c_kv;         /* bf16 [num_tokens, 512] */
  const void* k_pe;         /* bf16 [num_tokens, 64] */
  const void* norm_weight;  /* bf16 [512], or NULL if c_kv is normalised already */
  const void* cos_sin;      /* f32 [num_positions, 64]: 32 cosines, 32 sines */
  const void* positions;    /* i64 [num_tokens] */
  const void* slot_mapping; /* i64 [num_tokens]: block * 64 + offset; negative: padding, left alone altogether */
  int64_t cache_block_stride, c_kv_stride, k_pe_stride, q_pe_token_stride, q_pe_head_stride;
  int32_t num_tokens, num_heads;
  float eps;
} RorqualMlaStore;
int rorqual_mla_store(const RorqualMlaStore* args, void* stream);

typedef struct {
  void* plan;           /* i32 [rorqual_mla_plan_words(num_parts, batch)], written */
  const void* kv_lens;  /* i32 [batch] */
  const void* q_starts; /* i32 [batch + 1] */
  int32_t batch, num_parts;
  int32_t split_blocks; /* 0: even parts; otherwise splits of so many blocks, an even number unless group_splits > 1 */
  int32_t min_units;    /* a part is at least so many blocks (or splits) */
  int32_t overhead_blocks, split_capacity;
  int32_t group_splits; /* > 1: so many splits are joined in order before anything else, by whoever computes them */
} RorqualMlaPlan;
int64_t rorqual_mla_plan_words(int32_t num_parts, int32_t batch);
int rorqual_mla_plan(const RorqualMlaPlan* args, void* stream);

/* kernel: 0 tiles of 16 (query token, head) rows, 1 of 32, 2 of 64. */
int32_t rorqual_mla_tile_rows(int32_t kernel);

typedef struct {
  const void* q_latent;     /* bf16 [num_tokens, num_heads, 512] */
  const void* q_pe;         /* bf16 [num_tokens, num_heads, 64], 16-byte aligned, strides multiples of 8 */
  const void* cache;        /* bf16 [num_blocks, 64, 576] */
  void* out;                /* bf16 [num_tokens, num_heads, 512] */
  void* lse;                /* f32 [num_tokens, num_heads] or NULL */
  const void* block_tables; /* i32 [batch, >= ceil(kv_len / 64)] */
  const void* kv_lens;      /* i32 [batch]: length, this step's query tokens included; 0: no output but zeros */
  const void* q_starts;     /* i32 [batch + 1]; each sequence has q_starts[s + 1] - q_starts[s] <= max_q_len tokens */
  const void* plan;
  void* partial_out;        /* f32 [split_capacity, num_tiles * tile rows, 512] */
  void* partial_lse;        /* f32 [split_capacity, num_tiles * tile rows], twice with group_splits > 1 */
  int64_t q_latent_token_stride, q_latent_head_stride, q_pe_token_stride, q_pe_head_stride;
  int64_t out_token_stride, out_head_stride, block_table_stride, cache_block_stride, num_blocks;
  int32_t batch, num_heads, max_q_len, num_parts, split_blocks, split_capacity, kernel;
  int32_t group_splits;     /* as planned; more than 1 only with kernel 0 */
  float softmax_scale;
} RorqualMlaDecode;
/* The plan, the block tables and the cache's blocks before this step's tokens may be read before the stream's previous
 * kernel has ended: they must have been written before rorqual_mla_plan was called. */
int rorqual_mla_decode(const RorqualMlaDecode* args, void* stream);

typedef struct {
  void* topk_ids;     /* i32 [num_tokens, top_k + num_shared], best first, the lower index first among equals */
  void* topk_weights; /* f32 [num_tokens, top_k + num_shared] */
  const void* logits; /* f32 [num_tokens, num_experts] */
  const void* bias;   /* f32 [num_experts] or NULL: added for the ranking, not to the weights */
  int64_t logits_stride;
  int32_t num_tokens, num_experts, top_k;
  int32_t num_groups, topk_group; /* equal: no limit by groups */
  int32_t sigmoid;                /* 1: sigmoid scores; 0: softmax */
  int32_t group_by_two;           /* 1: a group ranks by the sum of its two best; 0: by its best */
  int32_t normalize;              /* 1: divide the weights by their sum */
  int32_t num_shared;             /* further columns, last: experts num_experts, num_experts + 1 ... with weight 1 */
  float scale;                    /* then multiply them */
} RorqualMoeRoute;
int rorqual_moe_route(const RorqualMoeRoute* args, void* stream);

typedef struct {
  void* expert_starts;  /* i32 [num_experts + 1], multiples of row_alignment */
  void* choice_of;      /* i32 [>= num_choices + num_experts * (row_alignment - 1)], -1 = padding */
  void* row_of;         /* i32 [num_choices], -1 = no expert */
  void* counts;         /* i32 [num_experts], scratch */
  const void* topk_ids; /* i32 [num_choices]; outside [0, num_experts): no expert */
  int32_t num_choices, num_experts, row_alignment;
} RorqualMoePermute;
int rorqual_moe_permute(const RorqualMoePermute* args, void* stream);

/* ---- experts ---- */

/* One layer's experts. plan, gate_up and down are called in this order on one stream, with nothing in between. */
typedef struct {
  void* y;             /* bf16 [row_capacity, hidden]: the choices' outputs, in expert order; gate_up uses it too */
  void* h;             /* bf16 [row_capacity, width] */
  void* groups;        /* i32 [1 + num_experts + row_capacity / 8, 4], 16-byte aligned, for plan */
  void* expert_starts; /* i32 [num_experts + 1], for plan */
  void* row_of;        /* i32 [num_tokens, top_k], written: a choice's row, -1 where topk_ids is no expert */
  void* chunk_counts;  /* i32 [rorqual_experts_plan_chunks(num_tokens * top_k), num_experts], scratch */
  const void* x;        /* bf16 [num_tokens, hidden] */
  const void* topk_ids; /* i32 [num_tokens, top_k] */
  const void* gate_up;  /* bf16 [num_experts, 2 * width, hidden], gate and up rows alternating by eight, in boxes */
  const void* down;     /* bf16 [num_experts, hidden, width], in boxes: [128, 64] each, k innermost, one after the other, */
                        /*   rows of 128 bytes, a row's eight pieces of 16 bytes at piece ^ (row % 8) */
  int64_t x_stride, row_capacity; /* rows: >= num_tokens * top_k */
  int32_t num_tokens, top_k, num_experts;
  int32_t hidden, width; /* multiples of 128 and of 64 */
  int32_t group_tokens;  /* tokens of a tile at most: a multiple of 8 in [8, 256] */
  int32_t few;           /* 1: at most 64 choices, which the products sort themselves, taking rows of x one by one;
                          *    group_tokens <= 64; plan does nothing */
  int32_t paired;        /* 1: two CTAs share a group's tokens, where the weight's rows are a multiple of 256; not if few */
  int32_t even;          /* 1: all CTAs take as many weight rows, for when memory is the limit; not if paired */
  int32_t num_ctas;      /* multiprocessors to use */
} RorqualExperts;
int32_t rorqual_experts_plan_chunks(int32_t num_choices);
int rorqual_experts_plan(const RorqualExperts* args, void* stream);
int rorqual_experts_gate_up(const RorqualExperts* args, void* stream);
int rorqual_experts_down(const RorqualExperts* args, void* stream);

/* Directly behind experts_down on its stream, or behind work that has nothing to do with these tensors. */
typedef struct {
  void* residual;           /* bf16 [num_tokens, hidden]: becomes residual + the weighted sum, rounded once */
  void* normed;             /* bf16 [num_tokens, hidden] or NULL: RMSNorm of the new residual times norm_weight */
  const void* norm_weight;  /* bf16 [hidden] or NULL */
  const void* y;            /* bf16 [rows, hidden] */
  const void* row_of;       /* i32 [num_tokens, top_k], negative: no expert */
  const void* topk_weights; /* f32 [num_tokens, top_k] */
  int64_t residual_stride, normed_stride;
  int32_t num_tokens, top_k, hidden;
  float eps;
} RorqualExpertsCombine;
int rorqual_experts_combine(const RorqualExpertsCombine* args, void* stream);


/* ---- prefill ---- */

/* Causal attention of packed sequences. The plan is i32 [8 + 8 * num_tiles]: a word that must be zero and is zero
 * again afterwards (so one call at a time uses a plan), seven unused, then for each tile of at most 128 query rows,
 * heaviest first: its first row of q; its number of rows; how many of the sequence's keys its first row attends to (a
 * row more, a key more); the row of kv where the sequence's key 0 would lie (negative if a slab begins later); the keys
 * [begin, end) it reads now, begin a multiple of 128; the end of the keys that kv holds for the sequence; 1 (it begins
 * here, else it goes on from state) + 2 (it ends here: out is written, else state). */
typedef struct {
  void* out;         /* bf16 [num_tokens, num_heads, 128] */
  void* lse;         /* f32 [num_tokens, num_heads] or NULL */
  void* state;       /* f32 [num_tokens, num_heads, 136]; may be NULL if every tile begins and ends in this call */
  void* plan;
  const void* q;     /* bf16 [num_tokens, num_heads, 192] */
  const void* kv;    /* bf16 [num_keys, num_heads, 256]: of each head 128 of key, then 128 of value */
  const void* k_pe;  /* bf16 [num_keys, 64]: the last 64 of every head's key */
  int64_t q_token_stride, q_head_stride, kv_token_stride, kv_head_stride, k_pe_stride, out_token_stride;
  int64_t out_head_stride;
  int32_t num_tokens, num_keys, num_heads, num_tiles;
  int32_t heads_per_group; /* heads taken together, so that their keys and values stay in L2; 0: chosen by num_keys */
  float softmax_scale;
} RorqualMlaPrefill;
int rorqual_mla_prefill(const RorqualMlaPrefill* args, void* stream);

typedef struct {
  void* out;                /* bf16 [num_rows, 576]; rows from k_starts[batch] on are left alone */
  const void* cache;        /* bf16 [num_blocks, 64, 576] */
  const void* block_tables; /* i32 [batch, *] */
  const void* k_starts;     /* i32 [batch + 1]: rows [k_starts[s], k_starts[s + 1]) are sequence s's */
  int64_t cache_block_stride, block_table_stride;
  int32_t num_rows, batch;
  int32_t key_begin;        /* the position of every sequence's first row */
} RorqualGatherLatents;
int rorqual_gather_latents(const RorqualGatherLatents* args, void* stream);


/* ---- sampling ---- */
/* A row's parameters lie in the record of its slot, 16 words of 32 bits:
 *   temperature f32 (below 1e-5: greedy), top_p f32, top_k i32 (0: off), min_p f32, seed u64, choice_index u32,
 *   num_logprobs i32 (-1: none), adjust_idx i32 (-1: none), mask_idx i32 (-1: none), num_prompt_tokens i32,
 *   min_tokens i32, presence, frequency, repetition penalty f32, unused. */
typedef struct {
  void* out_tokens;       /* i32 [num_rows]; rows that are not active are left alone in every output */
  void* out_sound;        /* u8 [num_rows]; 0: NaN or infinity, nothing was chosen, the token is 0 */
  void* out_logprobs;     /* f32 [num_rows], or NULL: none, nor the next three. NaN for a row that is not sound */
  void* out_ranks;        /* i32 [num_rows] */
  void* out_top_ids;      /* i32 [num_rows, 20], -1 from the number wanted on */
  void* out_top_logprobs; /* f32 [num_rows, 20] */
  void* workspace;        /* about workspace_rows * (72 + 288 * ceil(vocab_size / 1024)) + 1536 bytes, zero before the first
                             call; calls that share one must not overlap */
  const void* logits;     /* f32 [num_rows, vocab_size] */
  const void* slots;      /* i32 [num_rows]; negative: not active. No slot twice */
  const void* positions;  /* i32 or i64 [num_rows]: number of tokens before the new one */
  const void* active;     /* u8 or i32 [num_rows], or NULL: all */
  const void* targets;    /* i32 [num_rows], or NULL. Given: log-probabilities of these tokens (negative: none) with
                             num_top alternatives, nothing is chosen, slots … masks are not read */
  const void* records;    /* i32 [max_seqs, 16], 16-byte aligned */
  const void* bias;       /* f32 [*, pool_stride], 16-byte aligned, pool_stride a multiple of 4, or NULL: no pool */
  void* states;           /* i32 [*, pool_stride]: bit 31 occurs in the prompt, bit 30 is a stop token, below: how
                             often it was generated, counted up for the chosen token */
  const void* masks;      /* i32 [*, mask_stride]: bit i % 32 of word i / 32 set: token i is allowed. Or NULL */
  int64_t workspace_bytes, logits_stride, pool_stride, mask_stride;
  int32_t num_rows, vocab_size; /* vocab_size <= 262,144 */
  int32_t workspace_rows;       /* what the workspace was made for, >= num_rows */
  int32_t positions_bytes, active_bytes, num_top;
} RorqualSample;
int rorqual_sample(const RorqualSample* args, void* stream);


/* ---- step state ---- */

typedef struct {
  void* words;         /* i32 */
  const void* changes; /* i32 [num_changes, 2]: index into words, new value; no index twice */
  int32_t num_changes;
} RorqualScatterWords;
int rorqual_scatter_words(const RorqualScatterWords* args, void* stream);

/* State of a sequence, 16 words: token, position, limit, max_total, active, 3 unused, 8 stop token ids (-1: none). */
typedef struct {
  const void* slots;        /* i32 [num_rows]: a row's place in the state; -1 = padding */
  const void* state;        /* i32 [num_slots, 16] */
  const void* block_tables; /* i32 [num_slots, block_table_stride] */
  const void* embedding;    /* bf16 [vocab, hidden] */
  void* x;                  /* bf16 [num_compute_rows, hidden] */
  void* positions;          /* i64 [num_compute_rows] */
  void* slot_mapping;       /* i64 [num_compute_rows]; -1 where a row does not run (its end, or its limit, is reached) */
  void* kv_lens;            /* i32 [num_compute_rows]; 0 there */
  void* row_tables;         /* i32 [num_compute_rows, row_table_stride] */
  void* new_positions;      /* i32 [num_rows]: the position of the token to be chosen */
  void* active;             /* u8 [num_rows] */
  int64_t block_table_stride, row_table_stride;
  int32_t num_rows;         /* rows that choose a token */
  int32_t num_compute_rows; /* the first of them, whose newest token is computed in this step's decode form */
  int32_t hidden;
} RorqualStepPrepare;
int rorqual_step_prepare(const RorqualStepPrepare* args, void* stream);

typedef struct {
  void* state;        /* i32 [num_slots, 16] */
  const void* slots;  /* i32 [num_rows] */
  const void* tokens; /* i32 [num_rows]: chosen */
  const void* sound;  /* u8 [num_rows]: 0 where there was nothing to choose from */
  const void* active; /* u8 [num_rows] */
  void* results;      /* i32 [num_rows]: the token; -1: the row did not run; -2: not sound, and ended */
  int32_t num_rows;
} RorqualStepAdvance;
int rorqual_step_advance(const RorqualStepAdvance* args, void* stream);

typedef struct {
  void* x;               /* bf16 [num_rows, hidden] */
  const void* embedding; /* bf16 [vocab, hidden] */
  const void* token_ids; /* i32 [num_rows] */
  int32_t num_rows, hidden;
} RorqualEmbed;
int rorqual_embed(const RorqualEmbed* args, void* stream);


/* ---- linear ---- */

/* out[b, t] = x[b, t] weight[b]^T (+ bias) (+ residual[t]). Products of bf16 are added in float32 and rounded once.
 * The weight and the bias are read before the stream's previous kernel ends: nothing still running may write them. */
typedef struct {
  void* out;            /* bf16 or f32 [batch, num_tokens, out_features] */
  const void* x;        /* bf16 [batch, num_tokens, in_features] */
  const void* weight;   /* bf16 [batch, out_features, in_features], contiguous */
  const void* bias;     /* bf16 [out_features] or NULL */
  const void* residual; /* bf16 [num_tokens, out_features] or NULL; batch 1 only */
  int64_t out_token_stride, out_batch_stride, x_token_stride, x_batch_stride, residual_stride;
  int32_t num_tokens, out_features, in_features, batch;
  int32_t out_float32; /* 0: bf16 */
  int32_t silu_mul;    /* 1: rows of the weight are 8 of the gate, 8 of the other, …; out is silu(gate) * other, half as wide */
  int32_t tile_rows;   /* of the weight. 8 (not with silu_mul), 16, 32 or 0 (chosen here): for at most 16 tokens, and
                          in_features in multiples of 64; 64 or 128: for any */
  int32_t tile_tokens; /* with 64 rows 16, 32 or 64; with 128 rows 64, 128, 192 or 256; else unused */
  int32_t split;       /* tiles: how many share one's in_features, 1 to 8 */
  int32_t parts;       /* of in_features, each a sum, added in order: a row's bits depend on it and on parts alone. 0: split.
                          Tiles: a multiple of split, but for tiles of 64 rows and 128 x 192 no other one; at most 8 and
                          ceil(in_features / 64). Else 0 (another order) or 8 */
} RorqualLinear;
int rorqual_linear(const RorqualLinear* args, void* stream);

/* out = x weight^T + beta out by cuBLAS, which this library neither links nor loads. */
typedef struct {
  void* gemm_ex;       /* the address of cublasGemmEx */
  void* handle;        /* a cublasHandle_t of this thread, whose stream is this call's; host pointer mode */
  void* out;           /* bf16 or f32 [num_tokens, out_features] */
  const void* x;       /* bf16 [num_tokens, in_features] */
  const void* weight;  /* bf16 [out_features, in_features], contiguous */
  int64_t out_stride, x_stride;
  int32_t num_tokens, out_features, in_features;
  int32_t out_float32; /* 0: bf16 */
  float beta;
} RorqualGemm;
int rorqual_gemm(const RorqualGemm* args, void* stream);


/* ---- layers ---- */

/* A function of this header, with its arguments. */
typedef struct {
  int (*function)(const void* args, void* stream);
  const void* args;
  void* stream;
} RorqualLaunch;

/* Where some launch's arguments hold an address that every layer has its own of. */
typedef struct {
  void** field;
  int32_t pointer; /* which of a layer's pointers belongs there */
} RorqualOwnPointer;

/* The same launches for several layers in turn, which differ in addresses alone. */
typedef struct {
  const RorqualLaunch* launches;
  const RorqualOwnPointer* own_pointers;
  void* const* pointers; /* [num_layers, num_pointers] */
  int32_t num_launches, num_own_pointers, num_layers, num_pointers;
} RorqualRunLayers;
/* Sets each layer's own pointers and makes the launches, each on its stream. Ends at the first that fails, and returns
 * what it returned. */
int rorqual_run_layers(const RorqualRunLayers* args, void* stream);

/* What is launched on `other` from here on waits for what was launched on `stream` so far. */
typedef struct {
  void* event; /* a cudaEvent_t, which may be used again at once */
  void* other; /* a cudaStream_t */
} RorqualStreamWait;
int rorqual_stream_wait(const RorqualStreamWait* args, void* stream);


#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
#endif
