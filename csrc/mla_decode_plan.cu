// mla_decode_plan.cu: cutting a decode step's attention into even parts, and combining split sequences.
//
// Plan. Lay the sequences end to end on a line, each `overhead_blocks` units for being started, then a unit a block
// (or, with splits of a fixed size, a unit a split or a group of splits). Part i is the stretch
// [i, i + 1) * ceil(total / parts). Where there are parts enough, no part holds two sequences: each is padded to a
// multiple of the least length that needs no more parts than there are (with splits of a fixed size, a part of that
// length holds whole splits, and a sequence's last part what is left, if it fits). Where there are fewer parts than
// sequences and whole sequences fill them nearly evenly, none is cut. Everything a part or a sequence needs to know
// follows from prefix sums by division, or from jumps of 2^k parts, so no loop is serial in the batch.
// Tiling:  one CTA for the plan; once a step, not once a layer. Traffic: 12 B a sequence. Latency-bound.
//
// With groups of splits a step's unit is a group, or a split where groups are few for the parts: who joins the splits
// of a group does not show in the bits, so this may follow the load.
//
// Combine. out = sum_k 2^(lse_k - lse) out_k over a sequence's splits k in ascending order, in float32; the same
// bits however many CTAs computed them. A sequence of one split was written by the attention kernel itself.
// Tiling:  many rows: a warp a row, eight rows a CTA. Fewer: one CTA a row, a thread four of its 512 values. Where a
//          sequence may have many splits, four CTAs share a row, and in each four groups of threads share the splits,
//          or sixteen where the rows are few too.
// Traffic: 2,052 B read a split and row, 1,024 B written a row, mostly from L2.
// Checked against rorqual/kernels/reference_paged.py::mla_decode_paged through tests/gpu.
#include "rorqual/launch_kernel.cuh"
#include "rorqual/mla_decode.cuh"

namespace rorqual {
namespace {

constexpr int kPlanThreads = 1024;

// Blocks that a sequence is read over: none when it has no query token this step.
__device__ __forceinline__ int num_kv_blocks(int kv_len, int q_len) {
  return q_len > 0 && kv_len > 0 ? (kv_len + Mla::kBlockTokens - 1) / Mla::kBlockTokens : 0;
}

// Inclusive prefix sum over the CTA; every thread brings one value.
__device__ __forceinline__ int cta_inclusive_sum(int value, int* warp_sums) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int below = __shfl_up_sync(0xffffffffu, value, offset);
    if (lane >= offset) value += below;
  }
  __syncthreads();  // the previous call's readers are done
  if (lane == kWarpSize - 1) warp_sums[warp] = value;
  __syncthreads();
  if (warp == 0) {
    int sum = warp_sums[lane];
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int below = __shfl_up_sync(0xffffffffu, sum, offset);
      if (lane >= offset) sum += below;
    }
    warp_sums[lane] = sum;
  }
  __syncthreads();
  return value + (warp > 0 ? warp_sums[warp - 1] : 0);
}

__global__ void __launch_bounds__(kPlanThreads, 1) mla_plan_kernel(const MlaPlanParams p) {
  extern __shared__ int starts[];  // [batch + 1]: where a sequence starts on the line
  __shared__ int warp_sums[kWarpSize], parts_needed[kWarpSize];
  __shared__ alignas(8) int blocks_of_seq[kPlanThreads];
  const auto num_blocks_of = [&](int seq) {
    return num_kv_blocks(p.kv_lens[seq], p.q_starts[seq + 1] - p.q_starts[seq]);
  };
  int split_blocks = p.split_blocks * p.group_splits;  // of this step
  const auto splits_of = [&](int num_blocks) { return (num_blocks + split_blocks - 1) / split_blocks; };
  // Parts of at most `length` blocks that a sequence on its own takes. All but the last hold whole splits.
  const auto parts_of = [&](int num_blocks, int length) {
    const int whole = split_blocks > 0 ? length / split_blocks * split_blocks : length;
    return num_blocks > 0 ? 1 + (max(num_blocks - length, 0) + whole - 1) / whole : 0;
  };
  int part_blocks = 0;  // of the parts that a unit is, where splits have a fixed size and no part holds two sequences
  const auto units_of = [&](int num_blocks) {
    return part_blocks > 0 ? parts_of(num_blocks, part_blocks) : split_blocks > 0 ? splits_of(num_blocks) : num_blocks;
  };

  // A sequence on the line: `overhead`, then its units, up to a multiple of `multiple`.
  int overhead = p.overhead_blocks, total = 0;
  const auto lay_out = [&](int multiple) {
    total = 0;
    for (int first = 0; first < p.batch; first += kPlanThreads) {
      const int seq = first + threadIdx.x;
      const int num_blocks = seq < p.batch ? num_blocks_of(seq) : 0, units = units_of(num_blocks);
      const int cost = units > 0 ? (units + overhead + multiple - 1) / multiple * multiple : 0;
      const int end = total + cta_inclusive_sum(cost, warp_sums);
      if (seq < p.batch) starts[seq] = end - cost;
      if (first == 0) blocks_of_seq[threadIdx.x] = num_blocks;
      __syncthreads();
      total += warp_sums[kWarpSize - 1];
    }
    if (threadIdx.x == 0) starts[p.batch] = total;
    __syncthreads();
  };
  lay_out(1);
  if (p.group_splits > 1 && total > 0 && total <= min(p.num_parts, kMaxSingleGroups)) {
    const int groups = total;
    split_blocks = p.split_blocks;
    lay_out(1);
    // How long the busiest CTA takes, in blocks: a split on its own costs about one more, and the combination four.
    const int single_blocks = (total + p.num_parts - 1) / p.num_parts * (p.split_blocks + 1) + 4;
    if (total > p.split_capacity || single_blocks * groups >= total * p.split_blocks) {
      split_blocks *= p.group_splits;
      lay_out(1);
    }
  }
  int part_units = max(max((total + p.num_parts - 1) / p.num_parts, p.min_units), 1);

  // Where no part need hold two sequences, and none is longer for it, none does.
  if (p.batch <= min(p.num_parts, kPlanThreads)) {
    const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
    // The least length at which the parts suffice is in [low, high], or is more than `longest`. Each round, every warp
    // tries one length.
    const int longest = part_units * max(split_blocks, 1);
    int low = max(max((total - p.batch * overhead + p.num_parts - 1) / p.num_parts, p.min_units), 1);
    if (split_blocks > 0) low = max(p.min_units, 1) * split_blocks;
    int high = longest + 1;
    while (low < high) {
      const int width = high - low, length = low + width * warp / kWarpSize;
      int parts = 0;
      for (int seq = lane; seq < p.batch; seq += kWarpSize) parts += parts_of(blocks_of_seq[seq], length);
      parts = __reduce_add_sync(0xffffffffu, parts);
      if (lane == 0) parts_needed[warp] = parts;
      __syncthreads();
      const uint32_t enough = __ballot_sync(0xffffffffu, parts_needed[lane] <= p.num_parts);
      __syncthreads();
      const int first = enough != 0 ? __ffs(enough) - 1 : kWarpSize;  // the first warp whose length is enough
      const int old_low = low;
      if (first > 0) low = old_low + width * (first - 1) / kWarpSize + 1;
      if (first < kWarpSize) high = old_low + width * first / kWarpSize;
    }
    if (low <= longest) {
      overhead = 0;
      if (split_blocks > 0) {
        part_blocks = low;
        part_units = 1;
      } else {
        part_units = low;
      }
      lay_out(part_units);
    }
  }

  // Where parts are fewer than sequences, whole sequences may still fill them about evenly: each part takes as many as
  // fit into an even part's length, or up to a sixteenth more. A cut would cost a partial result, its combination and a
  // second start.
  int2* jumps = reinterpret_cast<int2*>(blocks_of_seq);  // .x: the sequence 2^k parts on; .y: the same of the next round
  bool whole = false;
  if (p.split_blocks == 0 && p.num_parts < p.batch && p.batch < kPlanThreads / 2) {
    const int seq = threadIdx.x;
    for (int more = 1; more <= 4 && !whole; ++more) {
      const int room = part_units + part_units * more / 64;
      __syncthreads();
      if (seq <= p.batch) {
        int low = seq, high = p.batch + 1;  // starts[low] - starts[seq] <= room
        while (high - low > 1) {
          const int middle = (low + high) / 2;
          if (starts[middle] - starts[seq] <= room) {
            low = middle;
          } else {
            high = middle;
          }
        }
        jumps[seq].x = low;
      }
      int at = 0;  // of thread i: the first sequence of part i
      for (int bit = 1; bit <= p.num_parts; bit *= 2) {
        __syncthreads();
        if (seq <= p.num_parts && (seq & bit) != 0) at = jumps[at].x;
        if (seq <= p.batch) jumps[seq].y = jumps[jumps[seq].x].x;
        __syncthreads();
        if (seq <= p.batch) jumps[seq].x = jumps[seq].y;
      }
      whole = __syncthreads_or(seq == p.num_parts && at == p.batch);
      if (whole && seq <= p.num_parts) jumps[seq].y = at;
    }
    __syncthreads();
  }

  // The sequence that holds point x of the line, and the first block at or after it.
  const int unit_blocks = part_blocks > 0 ? part_blocks / split_blocks * split_blocks : max(split_blocks, 1);
  const auto locate = [&](int64_t x) {
    if (x >= total) return make_int2(p.batch, 0);
    int low = 0, high = p.batch;  // starts[low] <= x < starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (starts[middle] <= x) {
        low = middle;
      } else {
        high = middle;
      }
    }
    const int unit = max(static_cast<int>(x) - starts[low] - overhead, 0);
    return make_int2(low, unit * unit_blocks);
  };
  for (int part = threadIdx.x; part < p.num_parts; part += kPlanThreads) {
    const int2 begin = whole ? make_int2(jumps[part].y, 0) : locate(int64_t{part} * part_units);
    const int2 end = whole ? make_int2(jumps[part + 1].y, 0) : locate(int64_t{part + 1} * part_units);
    reinterpret_cast<int4*>(p.plan + 4)[part] = make_int4(begin.x, begin.y, end.x, end.y);
  }

  int base = 0;
  for (int first = 0; first < p.batch; first += kPlanThreads) {
    const int seq = first + threadIdx.x;
    SeqPlan own{};
    if (seq < p.batch) {
      own.q_start = p.q_starts[seq];
      own.q_len = p.q_starts[seq + 1] - own.q_start;
      own.kv_len = p.kv_lens[seq];
      own.num_blocks = num_kv_blocks(own.kv_len, own.q_len);
      if (own.num_blocks > 0) {
        const int start = starts[seq] + overhead;
        own.first_part = start / part_units;
        own.num_splits = split_blocks > 0 ? splits_of(own.num_blocks)
                         : whole          ? 1
                                          : (start + own.num_blocks - 1) / part_units - own.first_part + 1;
      }
    }
    own.first_split = base + cta_inclusive_sum(own.num_splits, warp_sums) - own.num_splits;
    if (seq < p.batch) own.store(p.plan, p.num_parts, seq);
    __syncthreads();
    base += warp_sums[kWarpSize - 1];
  }
  if (threadIdx.x == 0) {
    p.plan[0] = base;
    p.plan[1] = base > p.split_capacity;
    p.plan[2] = part_units;
    p.plan[3] = split_blocks;
  }
  __threadfence();  // the kernel after this one may read the plan before it waits for this one's end
}

// The weights of a row's splits, as a warp computes them from the logarithms (base 2) of their sums.
class SplitWeights {
 public:
  // Starts reading: split k's logarithm is lses[k * stride]; the warp first wants the weights from split `begin` on.
  __device__ __forceinline__ SplitWeights(const float* lses, int stride, int num_splits, int begin)
      : lses_(lses), stride_(stride), num_splits_(num_splits), begin_(begin), lane_(threadIdx.x % kWarpSize) {
    lane_lse_ = read(lane_);
    begin_lse_ = read(begin + lane_);
  }
  // The logarithm of the row's sum; false: no split has seen a token. Called by the whole warp.
  __device__ __forceinline__ bool finish() {
    if (num_splits_ == 1) {  // what follows would say the same
      lse = __shfl_sync(0xffffffffu, lane_lse_, 0);
      return lse != neg_inf();
    }
    float max_lse = lane_lse_;
    bool any_nan = lane_lse_ != lane_lse_;  // which fmaxf does not keep
#pragma unroll 1
    for (int k = lane_ + kWarpSize; k < num_splits_; k += kWarpSize) {
      const float split_lse = read(k);
      max_lse = fmaxf(max_lse, split_lse);
      any_nan |= split_lse != split_lse;
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) max_lse = fmaxf(max_lse, __shfl_xor_sync(0xffffffffu, max_lse, mask));
    any_nan = __any_sync(0xffffffffu, any_nan);
    if (max_lse == neg_inf() && !any_nan) return false;
    float sum = lane_ < num_splits_ ? exp2_approx(__fsub_rn(lane_lse_, max_lse)) : 0.f;
#pragma unroll 1
    for (int k = lane_ + kWarpSize; k < num_splits_; k += kWarpSize) sum += exp2_approx(__fsub_rn(read(k), max_lse));
    lse = __fadd_rn(max_lse, log2f(warp_sum(sum)));
    return true;
  }
  // Lane l's: the weight of split from + l.
  __device__ __forceinline__ float of_lanes(int from) const {
    return exp2_approx(__fsub_rn(from == begin_ ? begin_lse_ : read(from + lane_), lse));
  }
  float lse = neg_inf();

 private:
  __device__ __forceinline__ float read(int split) const {
    return split < num_splits_ ? lses_[int64_t{split} * stride_] : neg_inf();
  }
  const float* lses_;
  int stride_, num_splits_, begin_, lane_;
  float lane_lse_, begin_lse_;
};

__device__ __forceinline__ void add_weighted(float4& sum, float weight, const float4& x) {
  sum.x = __fmaf_rn(weight, x.x, sum.x);
  sum.y = __fmaf_rn(weight, x.y, sum.y);
  sum.z = __fmaf_rn(weight, x.z, sum.z);
  sum.w = __fmaf_rn(weight, x.w, sum.w);
}
__device__ __forceinline__ void add_up(float4& sum, const float4& x) {
  sum = make_float4(__fadd_rn(sum.x, x.x), __fadd_rn(sum.y, x.y), __fadd_rn(sum.z, x.z), __fadd_rn(sum.w, x.w));
}
__device__ __forceinline__ float4 all_of(float x) { return make_float4(x, x, x, x); }
// What a row gets whose splits the workspace does not hold: never something that looks like a result.
__device__ __forceinline__ float no_result() { return __int_as_float(0x7fffffff); }

// Four values of a row, the `value`-th four.
__device__ __forceinline__ void store_out(const MlaDecodeParams& p, int64_t token, int head, int value,
                                          const float4& x) {
  uint2* to = reinterpret_cast<uint2*>(p.out + token * p.out_token_stride + head * p.out_head_stride);
  to[value] = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
}

// Many rows of few splits: a warp takes a row, a lane four times four of its values. The first two splits of a row are
// under way at once, and mostly there are no more.
template <int kRows, int kMinCtas>
__global__ void __launch_bounds__(kRows * kWarpSize, kMinCtas)
mla_combine_rows_kernel(const __grid_constant__ MlaDecodeParams p) {
  constexpr int kVecs = Mla::kLatent / 4 / kWarpSize;
  const int lane = threadIdx.x % kWarpSize, row = blockIdx.x * kRows + threadIdx.x / kWarpSize, seq = blockIdx.y;
  // The plan is older than the attention kernel, which is what may still run.
  const SeqPlan seq_plan = SeqPlan::load(p.plan, p.num_parts, seq);
  const int first = seq_plan.first_split, num_splits = seq_plan.num_splits;
  // Who has nothing to combine goes while the attention kernel still runs; but this kernel must not end before that
  // one, so one CTA stays in any case.
  const bool idle = row >= seq_plan.q_len * p.num_heads || num_splits == 1;
  if (idle && blockIdx.x + blockIdx.y > 0) return;
  wait_for_previous_kernel();
  let_dependents_launch();
  if (idle) return;

  const int query = row / p.num_heads, head = row - query * p.num_heads;
  const int64_t token = seq_plan.q_start + query;
  const auto store = [&](const float4 (&x)[kVecs], float lse) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) store_out(p, token, head, lane + v * kWarpSize, x[v]);
    if (p.lse != nullptr && lane == 0) p.lse[token * p.num_heads + head] = lse * (1.f / kLog2E);
  };
  const auto fill = [](float4 (&x)[kVecs], float value) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) x[v] = all_of(value);
  };
  float4 sum[kVecs], x[2][kVecs];
  if (num_splits == 0 || first + num_splits > p.split_capacity) {
    fill(sum, num_splits == 0 ? 0.f : no_result());
    return store(sum, num_splits == 0 ? neg_inf() : no_result());
  }
  const int rows = p.num_tiles * p.partial_tile_rows;
  const int64_t first_row = int64_t{first} * rows + row;
  const float4* values = reinterpret_cast<const float4*>(p.partial_out + first_row * Mla::kLatent) + lane;
  const auto load = [&](float4 (&to)[kVecs], int split) {
#pragma unroll
    for (int v = 0; v < kVecs; ++v) to[v] = values[int64_t{split} * rows * (Mla::kLatent / 4) + v * kWarpSize];
  };
  load(x[0], 0);
  load(x[1], 1);
  SplitWeights weights(p.partial_lse + first_row, rows, num_splits, 0);
  const bool some = weights.finish();
  float lane_weight = weights.of_lanes(0);
  const auto add = [&](const float4 (&next)[kVecs], int split) {
    const float weight = __shfl_sync(0xffffffffu, lane_weight, split % kWarpSize);
#pragma unroll
    for (int v = 0; v < kVecs; ++v) add_weighted(sum[v], weight, next[v]);
  };
  fill(sum, 0.f);
  add(x[0], 0);
  add(x[1], 1);
#pragma unroll 1
  for (int split = 2; split < num_splits; ++split) {
    if (split % kWarpSize == 0) lane_weight = weights.of_lanes(split);
    load(x[0], split);
    add(x[0], split);
  }
  if (!some) fill(sum, 0.f);
  store(sum, weights.lse);
}

// Fewer rows: a CTA takes kCols values of a row; its kGroups groups of kCols / 4 threads share the splits. kAhead
// values of a thread are under way at once, the first ones while the weights are computed. (The bound of one CTA
// matters: without it ptxas stops at 40 registers, spills, and halves the loads in flight.)
template <int kCols, int kGroups>
__global__ void __launch_bounds__(kCols / 4 * kGroups, 1)
mla_combine_kernel(const __grid_constant__ MlaDecodeParams p) {
  constexpr int kGroupThreads = kCols / 4, kSlices = Mla::kLatent / kCols, kAhead = 8;
  static_assert(kGroupThreads % kWarpSize == 0);
  const int head = blockIdx.x / kSlices, slice = blockIdx.x % kSlices, query = blockIdx.y, seq = blockIdx.z;
  const SeqPlan seq_plan = SeqPlan::load(p.plan, p.num_parts, seq);
  const int first = seq_plan.first_split, num_splits = seq_plan.num_splits;
  const bool idle = query >= seq_plan.q_len || num_splits == 1;
  if (idle && blockIdx.x + blockIdx.y + blockIdx.z > 0) return;  // one stays: see above
  wait_for_previous_kernel();
  let_dependents_launch();
  if (idle) return;

  const int group = threadIdx.x / kGroupThreads;
  const int value = slice * kGroupThreads + threadIdx.x % kGroupThreads;  // which four of the row's values
  const int64_t token = seq_plan.q_start + query;
  float4 sum = all_of(0.f);
  float lse = neg_inf();
  if (first + num_splits > p.split_capacity) {
    lse = no_result();
    sum = all_of(no_result());
  } else if (num_splits > 0) {
    const int rows = p.num_tiles * p.partial_tile_rows;
    const int64_t first_row = int64_t{first} * rows + query * p.num_heads + head;
    const float4* values = reinterpret_cast<const float4*>(p.partial_out + first_row * Mla::kLatent) + value;
    const int per_group = (num_splits + kGroups - 1) / kGroups;
    const int begin = group * per_group, end = min(begin + per_group, num_splits);
    float4 x[kAhead];
    const auto load = [&](int from) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (from + k < end) x[k] = values[int64_t{from + k} * rows * (Mla::kLatent / 4)];
      }
    };
    load(begin);
    SplitWeights weights(p.partial_lse + first_row, rows, num_splits, begin);
    if (weights.finish()) {
      lse = weights.lse;
      float lane_weight = 0.f;
      for (int from = begin; from < end; from += kAhead) {
        const int from_lane = (from - begin) % kWarpSize;
        if (from_lane == 0) lane_weight = weights.of_lanes(from);
        if (from > begin) load(from);
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const float weight = __shfl_sync(0xffffffffu, lane_weight, from_lane + k);
          if (from + k < end) add_weighted(sum, weight, x[k]);
        }
      }
    }
  }
  if constexpr (kGroups > 1) {
    __shared__ float4 others[kGroups - 1][kGroupThreads];
    if (group > 0) others[group - 1][threadIdx.x % kGroupThreads] = sum;
    __syncthreads();
    if (group > 0) return;
#pragma unroll
    for (int g = 0; g < kGroups - 1; ++g) add_up(sum, others[g][threadIdx.x]);
  }
  store_out(p, token, head, value, sum);
  if (p.lse != nullptr && value == 0) p.lse[token * p.num_heads + head] = lse * (1.f / kLog2E);
}

// The same where splits have groups: the groups are combined, and before that, where the splits were computed one by
// one, the splits of each joined as the attention kernel joins them. Of the groups, every fourth is added to one of
// four sums, and these in order. A CTA takes kCols values of a row, with a warp or more for each of kThreadGroups of
// the sums; of a row with one group alone a single CTA takes all. What a thread reads of kBuffers groups is under way
// at once.
template <int kCols, int kThreadGroups, int kBuffers, int kMinCtas>
__global__ void __launch_bounds__(kCols / 4 * kThreadGroups, kMinCtas)
mla_combine_groups_kernel(const __grid_constant__ MlaDecodeParams p) {
  constexpr int kGroupThreads = kCols / 4, kSlices = Mla::kLatent / kCols, kThreads = kGroupThreads * kThreadGroups;
  constexpr int kSums = 4, kOwnSums = kSums / kThreadGroups, kAhead = 8;
  constexpr int kUnroll = kOwnSums > kBuffers ? kOwnSums : kBuffers;
  static_assert(kGroupThreads % kWarpSize == 0 && kUnroll % kOwnSums == 0 && kUnroll % kBuffers == 0);
  static_assert(kThreadGroups == 1 || kThreads == Mla::kLatent / 4);  // for one_group
  __shared__ float single_lse[kMaxSingleGroups], single_inverse[kMaxSingleGroups];
  const int head = blockIdx.x / kSlices, slice = blockIdx.x % kSlices, query = blockIdx.y, seq = blockIdx.z;
  const SeqPlan seq_plan = SeqPlan::load(p.plan, p.num_parts, seq);
  const bool single = __ldcg(p.plan + 3) == p.split_blocks;
  const int first = seq_plan.first_split, num_splits = seq_plan.num_splits;
  const bool one_group = kThreadGroups > 1 && single && num_splits <= p.group_splits;
  const bool idle = query >= seq_plan.q_len || num_splits == 1 || (one_group && slice > 0);
  if (idle && blockIdx.x + blockIdx.y + blockIdx.z > 0) return;  // one stays: see above
  wait_for_previous_kernel();
  let_dependents_launch();
  if (idle) return;

  const int thread_group = one_group ? 0 : threadIdx.x / kGroupThreads;
  // Which four of the row's values.
  const int value = one_group ? threadIdx.x : slice * kGroupThreads + threadIdx.x % kGroupThreads;
  const int64_t token = seq_plan.q_start + query;
  float4 sums[kOwnSums];
#pragma unroll
  for (int i = 0; i < kOwnSums; ++i) sums[i] = all_of(0.f);
  float lse = neg_inf();
  if (first + num_splits > p.split_capacity) {
    lse = no_result();
    sums[0] = all_of(no_result());
  } else if (num_splits > 0) {
    const int rows = p.num_tiles * p.partial_tile_rows;
    const int64_t first_row = int64_t{first} * rows + query * p.num_heads + head;
    const float* maxima = p.partial_lse + first_row;  // or logarithms of sums
    const float* split_sums = p.partial_sum + first_row;
    const float4* values = reinterpret_cast<const float4*>(p.partial_out + first_row * Mla::kLatent) + value;
    const int split_stride = rows * (Mla::kLatent / 4);
    if (single) {
      const int per_group = p.group_splits, num_groups = (num_splits + per_group - 1) / per_group;
      float4 x[kBuffers][kAhead];
      float max_of[kBuffers][kAhead];
      const auto load = [&](float4 (&to)[kAhead], float (&max_to)[kAhead], int from, int end) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          if (from + k < end) {
            to[k] = values[int64_t{from + k} * split_stride];
            max_to[k] = maxima[int64_t{from + k} * rows];
          }
        }
      };
      const auto end_of = [&](int g) { return min((g + 1) * per_group, num_splits); };
#pragma unroll
      for (int i = 0; i < kBuffers; ++i) {
        const int g = thread_group + i * kThreadGroups;
        load(x[i], max_of[i], g * per_group, end_of(g));
      }
      for (int g = threadIdx.x; g < num_groups; g += kThreads) {
        float max = neg_inf(), sum = 0.f;
        for (int from = g * per_group; from < end_of(g); from += kAhead) {
          float next_max[kAhead], next_sum[kAhead];
#pragma unroll
          for (int k = 0; k < kAhead; ++k) {
            if (from + k < end_of(g)) {
              next_max[k] = maxima[int64_t{from + k} * rows];
              next_sum[k] = split_sums[int64_t{from + k} * rows];
            }
          }
#pragma unroll
          for (int k = 0; k < kAhead; ++k) {
            if (from + k < end_of(g)) {
              const SplitJoin join(max, next_max[k], p.scale_log2);
              max = join.max;
              sum = join(sum, next_sum[k]);
            }
          }
        }
        single_lse[g] = lse_of(max, sum, p.scale_log2);
        single_inverse[g] = inverse_of(sum);
      }
      __syncthreads();
      SplitWeights weights(single_lse, 1, num_groups, 0);
      if (weights.finish()) {
        lse = weights.lse;
        float lane_weight = 0.f;
        for (int base = 0; base < num_groups; base += kUnroll * kThreadGroups) {
          if (base % kWarpSize == 0) lane_weight = weights.of_lanes(base);
#pragma unroll
          for (int i = 0; i < kUnroll; ++i) {
            const int g = base + thread_group + i * kThreadGroups, buffer = i % kBuffers;
            if (g >= num_groups) break;
            float4 joined = all_of(0.f);
            float max = neg_inf();
            for (int from = g * per_group; from < end_of(g); from += kAhead) {
              if (from > g * per_group) load(x[buffer], max_of[buffer], from, end_of(g));
#pragma unroll
              for (int k = 0; k < kAhead; ++k) {
                if (from + k >= end_of(g)) break;
                const SplitJoin join(max, max_of[buffer][k], p.scale_log2);
                max = join.max;
                joined = make_float4(join(joined.x, x[buffer][k].x), join(joined.y, x[buffer][k].y),
                                     join(joined.z, x[buffer][k].z), join(joined.w, x[buffer][k].w));
              }
            }
            const int next = g + kBuffers * kThreadGroups;
            if (next < num_groups) load(x[buffer], max_of[buffer], next * per_group, end_of(next));
            const float inverse = single_inverse[g];
            add_weighted(sums[i % kOwnSums], __shfl_sync(0xffffffffu, lane_weight, g % kWarpSize),
                         make_float4(__fmul_rn(joined.x, inverse), __fmul_rn(joined.y, inverse),
                                     __fmul_rn(joined.z, inverse), __fmul_rn(joined.w, inverse)));
          }
        }
      }
    } else {
      float4 x[kAhead];
      const auto load = [&](int from) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
          if (from + i * kThreadGroups < num_splits) x[i] = values[int64_t{from + i * kThreadGroups} * split_stride];
        }
      };
      load(thread_group);
      SplitWeights weights(maxima, rows, num_splits, 0);
      if (weights.finish()) {
        lse = weights.lse;
        float lane_weight = 0.f;
        for (int base = 0; base < num_splits; base += kAhead * kThreadGroups) {
          if (base % kWarpSize == 0) lane_weight = weights.of_lanes(base);
          if (base > 0) load(base + thread_group);
#pragma unroll
          for (int i = 0; i < kAhead; ++i) {
            const int g = base + thread_group + i * kThreadGroups;
            const float weight = __shfl_sync(0xffffffffu, lane_weight, g % kWarpSize);
            if (g < num_splits) add_weighted(sums[i % kOwnSums], weight, x[i]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int i = 1; i < kOwnSums; ++i) add_up(sums[0], sums[i]);
  if constexpr (kThreadGroups > 1) {
    static_assert(kOwnSums == 1);
    __shared__ float4 others[kThreadGroups - 1][kGroupThreads];
    if (thread_group > 0) others[thread_group - 1][threadIdx.x % kGroupThreads] = sums[0];
    if (one_group) {
      add_up(sums[0], all_of(0.f));  // as below
    } else {
      __syncthreads();
      if (thread_group > 0) return;
#pragma unroll
      for (int i = 0; i < kThreadGroups - 1; ++i) add_up(sums[0], others[i][threadIdx.x]);
    }
  }
  store_out(p, token, head, value, sums[0]);
  if (p.lse != nullptr && value == 0) p.lse[token * p.num_heads + head] = lse * (1.f / kLog2E);
}

}  // namespace

cudaError_t launch_mla_plan(const MlaPlanParams& p, cudaStream_t stream) {
  mla_plan_kernel<<<1, kPlanThreads, (p.batch + 1) * sizeof(int), stream>>>(p);
  return cudaGetLastError();
}

cudaError_t launch_mla_decode(MlaDecodeKernel kernel, const MlaDecodeParams& p, cudaStream_t stream) {
  cudaError_t error = kernel == MlaDecodeKernel::kNarrow16   ? launch_mla_decode_narrow16(p, stream)
                      : kernel == MlaDecodeKernel::kNarrow32 ? launch_mla_decode_narrow32(p, stream)
                                                             : launch_mla_decode_wide(p, stream);
  if (error != cudaSuccess) return error;
  // How many CTAs a row and how many threads share its splits follows from how many splits a sequence can have. Where
  // equal bits are promised, no choice that depends on the batch may show in them.
  const int rows = p.num_heads * p.max_q_len * p.batch, splits = p.split_blocks > 0 ? 1 : p.num_parts / p.batch + 1;
  const auto launch = [&](auto kernel, dim3 grid, int threads) {
    return launch_kernel(kernel, grid, threads, stream, {.overlaps = true}, p);
  };
  const auto launch_slices = [&](auto kernel, int cols, int groups) {
    return launch(kernel, dim3(p.num_heads * (Mla::kLatent / cols), p.max_q_len, p.batch), cols / 4 * groups);
  };
  if (p.group_splits > 1) {
    if (rows <= 64) return launch_slices(mla_combine_groups_kernel<128, 4, 2, 3>, 128, 4);
    if (rows <= 256) return launch_slices(mla_combine_groups_kernel<128, 4, 1, 5>, 128, 4);
    return launch_slices(mla_combine_groups_kernel<512, 1, 1, 5>, 512, 1);
  }
  if (splits >= 32 && rows <= 32) return launch_slices(mla_combine_kernel<128, 16>, 128, 16);
  if (splits >= 16) return launch_slices(mla_combine_kernel<128, 4>, 128, 4);
  if (rows < 1024) return launch_slices(mla_combine_kernel<512, 1>, 512, 1);
  constexpr int kRows = 8;
  const dim3 grid((p.num_heads * p.max_q_len + kRows - 1) / kRows, p.batch);
  return launch(mla_combine_rows_kernel<kRows, 4>, grid, kRows * kWarpSize);
}

}  // namespace rorqual
