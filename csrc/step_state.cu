// step_state.cu: the state of the decode set on the device: changed words in, rows prepared, tokens taken back in.
// Tiling:  scatter_words: a thread a word. step_prepare: a CTA a row. step_advance: a thread a row.
// Traffic: prepare reads a row's state, block table (4 B a 64 tokens) and embedding, and writes the latter two where the
//          step's kernels look for them; all of it a few KB a row. Latency-bound, so there is one launch for each.
// Checked against rorqual/kernels/step_state.py, word for word.
#include "rorqual/device.cuh"
#include "rorqual/launch.h"
#include "rorqual/launch_kernel.cuh"

namespace rorqual {
namespace {

// A sequence's words in the state; rorqual/kernels/step_state.py has the same numbers.
enum StateWord : int {
  kToken = 0,     // the newest token, not yet computed
  kPosition = 1,  // its position
  kLimit = 2,     // positions below it may be written
  kMaxTotal = 3,  // tokens the history may have
  kActive = 4,    // 0: it met its end
  kFirstStop = 8,
  kStops = 8,     // stop token ids, -1 where there are fewer
  kStateWords = 16
};

constexpr int kThreads = 128;

__global__ void __launch_bounds__(256) scatter_words_kernel(int* __restrict__ words, const int2* __restrict__ changes,
                                                            int num_changes) {
  wait_for_previous_kernel();
  let_dependents_launch();
  const int i = blockIdx.x * 256 + threadIdx.x;
  if (i >= num_changes) return;
  const int2 change = changes[i];  // {index, value}
  words[change.x] = change.y;
}

__global__ void __launch_bounds__(kThreads) step_prepare_kernel(const StepPrepareParams p) {
  wait_for_previous_kernel();
  let_dependents_launch();
  const int row = blockIdx.x;
  const int slot = p.slots[row];
  const int* state = p.state + int64_t{slot} * kStateWords;
  int token = 0, position = 0;
  bool active = false;
  if (slot >= 0) {
    token = state[kToken];
    position = state[kPosition];
    active = state[kActive] != 0 && position < state[kLimit];
  }
  if (threadIdx.x == 0) {
    p.active[row] = active;
    p.new_positions[row] = active ? position + 1 : 0;
  }
  if (row >= p.num_compute_rows) return;  // its token was computed by a chunk: only the choice is made here
  const int kv_len = active ? position + 1 : 0;
  const int* table = p.block_tables + int64_t{slot} * p.block_table_stride;
  if (threadIdx.x == 0) {
    p.positions[row] = active ? position : 0;
    p.slot_mapping[row] = active ? int64_t{table[position / 64]} * 64 + position % 64 : -1;
    p.kv_lens[row] = kv_len;
  }
  int* row_table = p.row_tables + row * p.row_table_stride;
  for (int block = threadIdx.x; block * 64 < kv_len; block += kThreads) row_table[block] = table[block];
  const uint4* from = reinterpret_cast<const uint4*>(p.embedding + int64_t{active ? token : 0} * p.hidden);
  uint4* to = reinterpret_cast<uint4*>(p.x + int64_t{row} * p.hidden);
  for (int v = threadIdx.x; v < p.hidden / 8; v += kThreads) to[v] = from[v];
}

__global__ void __launch_bounds__(256) step_advance_kernel(const StepAdvanceParams p) {
  wait_for_previous_kernel();
  let_dependents_launch();
  const int row = blockIdx.x * 256 + threadIdx.x;
  if (row >= p.num_rows) return;
  int result = -1;
  if (p.active[row]) {
    int* state = p.state + int64_t{p.slots[row]} * kStateWords;
    if (!p.sound[row]) {
      result = -2;
      state[kActive] = 0;
    } else {
      const int token = result = p.tokens[row];
      bool ended = state[kPosition] + 2 >= state[kMaxTotal];
#pragma unroll
      for (int i = 0; i < kStops; ++i) ended |= state[kFirstStop + i] == token;
      state[kToken] = token;
      ++state[kPosition];
      if (ended) state[kActive] = 0;
    }
  }
  p.results[row] = result;
}

__global__ void __launch_bounds__(kThreads) embed_kernel(__nv_bfloat16* __restrict__ x,                // [num_rows, hidden]
                                                         const __nv_bfloat16* __restrict__ embedding,  // [vocab, hidden]
                                                         const int* __restrict__ token_ids, int hidden) {
  wait_for_previous_kernel();
  let_dependents_launch();
  const int64_t row = blockIdx.x;
  const uint4* from = reinterpret_cast<const uint4*>(embedding + int64_t{token_ids[row]} * hidden);
  uint4* to = reinterpret_cast<uint4*>(x + row * hidden);
  for (int v = threadIdx.x; v < hidden / 8; v += kThreads) to[v] = from[v];
}

}  // namespace

cudaError_t launch_scatter_words(int* words, const int* changes, int num_changes, cudaStream_t stream) {
  return launch_kernel(scatter_words_kernel, dim3((num_changes + 255) / 256), 256, stream, {.overlaps = true}, words,
                       reinterpret_cast<const int2*>(changes), num_changes);
}

cudaError_t launch_step_prepare(const StepPrepareParams& p, cudaStream_t stream) {
  return launch_kernel(step_prepare_kernel, dim3(p.num_rows), kThreads, stream, {.overlaps = true}, p);
}

cudaError_t launch_step_advance(const StepAdvanceParams& p, cudaStream_t stream) {
  return launch_kernel(step_advance_kernel, dim3((p.num_rows + 255) / 256), 256, stream, {.overlaps = true}, p);
}

cudaError_t launch_embed(__nv_bfloat16* x, const __nv_bfloat16* embedding, const int* token_ids, int num_rows, int hidden,
                         cudaStream_t stream) {
  return launch_kernel(embed_kernel, dim3(num_rows), kThreads, stream, {.overlaps = true}, x, embedding, token_ids,
                       hidden);
}

}  // namespace rorqual
