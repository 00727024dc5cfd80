// sampling_select.cu: rows that sampling.cu could not settle among their few hundred best tokens: wide nuclei, large top_k,
// thousands of equals. Other rows cost a look at one word.
// Tiling:  a cluster of 8 CTAs a row; each keeps its eighth of the row in shared memory. A cut is found by a radix search
//          over the distance from the best (of weights' bits, or of logits' keys), 11 bits a level: each CTA counts its
//          tokens and adds up their weights by digit, the cluster adds the bins up, and every CTA finds the digit where the
//          cut lies.
// Order:   weights are added in fixed point, so that sums are exact and come out the same in whatever order they are made.
// Skipped: tokens that no cut can keep (beyond the k-th best of the units' best, or in a tail too light to matter) take
//          part in nothing, and units that hold only such tokens are not read.
// Traffic: at most the row once for the choice and once for log-probabilities. Latency-bound: two cluster barriers a level.
#include <cooperative_groups.h>

#include "rorqual/launch_kernel.cuh"
#include "rorqual/sampling.cuh"

namespace rorqual {
namespace {

namespace cg = cooperative_groups;

constexpr int kCtas = 8, kThreads = 256, kWarps = kThreads / kWarpSize;
constexpr int kDigitBits = 11, kBins = 1 << kDigitBits;
constexpr int kOwnBins = kBins / kCtas, kGroups = kOwnBins / kWarpSize;  // bins that a CTA adds up, in groups of 32
static_assert(kGroups * kCtas == 2 * kWarpSize);                         // a lane looks at two groups
constexpr int kTile = 4 * kWarpSize;                                     // tokens a warp takes at once
constexpr int kChunkStep = kWarps * kTile;                               // a CTA's tokens: a multiple
static_assert(kChunkStep % kUnit == 0);
static_assert(kOwnBins <= kThreads && kMaxUnits <= kThreads);
constexpr uint32_t kAll = 0xffffffffu;
constexpr int kMaxRowsInFlight = 64;

// A prefix of the tokens in order of distance d, then id: all with d < last, and the first `ties` of those with d == last.
struct Cut {
  uint32_t last, ties;
  uint64 weight;  // of the prefix
};

struct alignas(16) Shared {
  uint32_t counts[kBins], low[kBins], high[kBins];  // own tokens by digit; weight = high * 2^32 + low
  uint32_t sum_counts[kOwnBins];                    // the cluster's, of bins [rank * kOwnBins, …)
  uint64 sum_weights[kOwnBins];
  uint32_t group_counts[kGroups];
  uint64 group_weights[kGroups];
  uint64 warp_weights[kWarps];  // of kept tokens, ties apart, of each warp's segment
  uint32_t warp_ties[kWarps], ties_before[kWarps];
  uint64 top[kWarpSize];  // of CTA 0: the alternatives, d then id
  uint32_t num_top, rank;
  Cut cut;
  uint32_t digit, bin_count, reached;
  uint64 bin_weight, counted, weight_before;
  int token;
  uint32_t bound;
  uint32_t unit_keys[kMaxUnits];
};

struct Select {
  const SampleParams& p;
  Shared& s;
  float* values;  // [chunk]: weights, or logits, of tokens [begin, begin + chunk); NaN: none, or not read
  int chunk, begin, lane, warp, cta;
  cg::cluster_group cluster;

  // What candidates are compared with.
  float cutoff;          // candidates are >= it
  uint32_t largest_key;  // of logits

  template <bool kWeights>
  __device__ __forceinline__ uint32_t distance(float x) const {
    return kWeights ? weight_distance(x) : largest_key - float_key(x);
  }

  // visit(value, id) for the tokens of this warp's segment, in a lane's order of ids.
  template <class Visit>
  __device__ __forceinline__ void for_candidates(const Visit& visit) const {
    const int segment = chunk / kWarps;
    for (int i = warp * segment + lane * 4; i < (warp + 1) * segment; i += kTile) {
      const float4 x = *reinterpret_cast<const float4*>(values + i);
      if (x.x >= cutoff) visit(x.x, begin + i);
      if (x.y >= cutoff) visit(x.y, begin + i + 1);
      if (x.z >= cutoff) visit(x.z, begin + i + 2);
      if (x.w >= cutoff) visit(x.w, begin + i + 3);
    }
  }

  // The k-th largest of `unit_keys`, which at least k tokens reach; 0 if there are fewer units.
  __device__ uint32_t kth_unit_key(int k) {
    if (threadIdx.x == 0) s.bound = 0;
    __syncthreads();
    if (k <= p.num_units && threadIdx.x < p.num_units) {
      const uint32_t own = s.unit_keys[threadIdx.x];
      int before = 0;
      for (int u = 0; u < p.num_units; ++u) {
        const uint32_t other = s.unit_keys[u];
        before += other > own || (other == own && u < static_cast<int>(threadIdx.x));
      }
      if (before == k - 1) s.bound = own;
    }
    __syncthreads();
    return s.bound;
  }

  // Finds the end of the prefix that holds `need` tokens, or weighs `need`, among candidates with d <= range.
  template <bool kByWeight, bool kWeights>
  __device__ Cut search(uint64 need, uint32_t range) {
    int low = 32 - __clz(range);  // digits below this bit are still open
    uint32_t prefix = 0;
    uint64 weight_before = 0;
    while (true) {
      const int shift = max(low - kDigitBits, 0);
      for (int i = threadIdx.x; i < kBins; i += kThreads) {
        s.counts[i] = 0;
        if constexpr (kWeights) s.low[i] = s.high[i] = 0;
      }
      __syncthreads();
      const uint32_t first = static_cast<uint32_t>(uint64{prefix} << (low - shift));
      for_candidates([&](float x, int) {
        const uint32_t d = distance<kWeights>(x);
        if (d > range || (uint64{d} >> low) != prefix) return;
        const uint32_t digit = (d >> shift) - first;
        atomicAdd(&s.counts[digit], 1u);
        if constexpr (kWeights) {
          const uint64 w = fixed_weight(x);
          const uint32_t w_low = static_cast<uint32_t>(w);
          const uint32_t carry = atomicAdd(&s.low[digit], w_low) + w_low < w_low;
          const uint32_t w_high = static_cast<uint32_t>(w >> 32) + carry;
          if (w_high != 0) atomicAdd(&s.high[digit], w_high);
        }
      });
      cluster.sync();
      add_up_bins<kWeights>();
      cluster.sync();
      if (warp == 0) find_digit<kByWeight, kWeights>(need);
      __syncthreads();
      weight_before += s.weight_before;
      if (!s.reached) return {range, kAll, weight_before};
      need -= s.counted;
      prefix = first + s.digit;
      low = shift;
      const uint32_t bin_count = s.bin_count;
      const uint64 bin_weight = s.bin_weight;
      const uint32_t last = static_cast<uint32_t>(min(((uint64{prefix} + 1) << shift) - 1, uint64{range}));
      if (bin_count == 1 || (!kByWeight && need == bin_count)) return {last, kAll, weight_before + bin_weight};
      if (shift == 0) {
        const uint64 each = kWeights ? bin_weight / bin_count : 0;  // equal tokens, equal weights
        const uint64 ties = kByWeight ? (need + each - 1) / each : need;
        return {last, ties >= bin_count ? kAll : static_cast<uint32_t>(ties), weight_before + ties * each};
      }
    }
  }

  template <bool kWeights>
  __device__ void add_up_bins() {
    if (threadIdx.x >= kOwnBins) return;
    uint32_t count = 0;
    uint64 weight = 0;
#pragma unroll
    for (int r = 0; r < kCtas; ++r) {
      const Shared& other = *cluster.map_shared_rank(&s, r);
      const int bin = cta * kOwnBins + threadIdx.x;
      count += other.counts[bin];
      if constexpr (kWeights) weight += other.low[bin] + (uint64{other.high[bin]} << 32);
    }
    s.sum_counts[threadIdx.x] = count;
    s.sum_weights[threadIdx.x] = weight;
    count = __reduce_add_sync(0xffffffffu, count);
    if constexpr (kWeights) weight = warp_inclusive_sum(weight, lane);
    if (lane == kWarpSize - 1) {
      s.group_counts[warp] = count;
      s.group_weights[warp] = weight;
    }
  }

  // Warp 0: the first bin up to which the bins count, or weigh, `need`.
  template <bool kByWeight, bool kWeights>
  __device__ void find_digit(uint64 need) {
    uint32_t count[2];
    uint64 weight[2], value[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int group = lane * 2 + i;
      const Shared& other = *cluster.map_shared_rank(&s, group / kGroups);
      count[i] = other.group_counts[group % kGroups];
      weight[i] = kWeights ? other.group_weights[group % kGroups] : 0;
      value[i] = kByWeight ? weight[i] : count[i];
    }
    uint64 inclusive = warp_inclusive_sum(value[0] + value[1], lane);
    uint64 weights = kWeights ? warp_inclusive_sum(weight[0] + weight[1], lane) : 0;
    const uint32_t reach = __ballot_sync(0xffffffffu, inclusive >= need);
    if (reach == 0) {
      if (lane == kWarpSize - 1) {
        s.reached = 0;
        s.weight_before = weights;
      }
      return;
    }
    const int source = __ffs(reach) - 1;
    uint64 before = inclusive - value[0] - value[1], weight_before = weights - weight[0] - weight[1];
    int group = lane * 2;
    if (before + value[0] < need) {
      ++group;
      before += value[0];
      weight_before += weight[0];
    }
    group = __shfl_sync(0xffffffffu, group, source);
    before = __shfl_sync(0xffffffffu, before, source);
    weight_before = __shfl_sync(0xffffffffu, weight_before, source);

    const Shared& other = *cluster.map_shared_rank(&s, group / kGroups);
    const int bin = group % kGroups * kWarpSize + lane;
    const uint32_t bin_count = other.sum_counts[bin];
    const uint64 bin_weight = kWeights ? other.sum_weights[bin] : 0;
    const uint64 bin_value = kByWeight ? bin_weight : bin_count;
    inclusive = before + warp_inclusive_sum(bin_value, lane);
    weights = weight_before + (kWeights ? warp_inclusive_sum(bin_weight, lane) : 0);
    if (lane == __ffs(__ballot_sync(0xffffffffu, inclusive >= need)) - 1) {
      s.reached = 1;
      s.digit = group * kWarpSize + lane;
      s.counted = inclusive - bin_value;
      s.weight_before = weights - bin_weight;
      s.bin_count = bin_count;
      s.bin_weight = bin_weight;
    }
  }

  // How a token stands to the cut: kept, one of the equals at its end, or out.
  enum Standing { kOut, kTie, kKept };
  template <bool kWeights>
  __device__ __forceinline__ Standing standing(float x, const Cut& cut) const {
    const uint32_t d = distance<kWeights>(x);
    return d < cut.last || (d == cut.last && cut.ties == kAll) ? kKept : d == cut.last ? kTie : kOut;
  }

  // Step 4: the token at which the running weight of what the cut and min_p keep exceeds u of the whole. All CTAs call
  // it; all know the token afterwards.
  __device__ int choose(const Cut& cut, float min_p, double u) {
    uint64 kept = 0;
    uint32_t ties = 0;
    for_candidates([&](float x, int) {
      const Standing is = standing<true>(x, cut);
      if (is == kOut || x < min_p) return;
      if (is == kKept) kept += fixed_weight(x);
      if (is == kTie) ++ties;
    });
    kept = warp_inclusive_sum(kept, lane);
    ties = __reduce_add_sync(0xffffffffu, ties);
    if (lane == kWarpSize - 1) {
      s.warp_weights[warp] = kept;
      s.warp_ties[warp] = ties;
    }
    cluster.sync();
    if (warp == 0) {
      const uint64 each = cut.ties == kAll ? 0 : fixed_weight(distance_weight(cut.last));
      constexpr int kOwn = kCtas * kWarps / kWarpSize;  // segments of the row that a lane looks at
      uint64 weights[kOwn];
      uint32_t counts[kOwn], sum = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int segment = lane * kOwn + i;
        const Shared& other = *cluster.map_shared_rank(&s, segment / kWarps);
        weights[i] = other.warp_weights[segment % kWarps];
        counts[i] = other.warp_ties[segment % kWarps];
        sum += counts[i];
      }
      uint32_t ties_before[kOwn];
      uint32_t before = warp_inclusive_sum(sum, lane) - sum;
      uint64 own = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        ties_before[i] = before;
        const uint32_t left = cut.ties > before ? cut.ties - before : 0;
        if (cut.ties != kAll) weights[i] += each * min(left, counts[i]);
        before += counts[i];
        own += weights[i];
      }
      const uint64 inclusive = warp_inclusive_sum(own, lane);
      const uint64 whole = __shfl_sync(0xffffffffu, inclusive, kWarpSize - 1);
      const uint64 target = target_weight(u, whole);
      const int source = __ffs(__ballot_sync(0xffffffffu, inclusive > target)) - 1;
      uint64 running = inclusive - own, running_before = running;
      int segment = 0;
      uint32_t tie_index = 0;
      bool found = false;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (!found && running + weights[i] > target) {
          found = true;
          segment = lane * kOwn + i;
          tie_index = ties_before[i];
          running_before = running;
        }
        running += weights[i];
      }
      segment = __shfl_sync(0xffffffffu, segment, source);
      tie_index = __shfl_sync(0xffffffffu, tie_index, source);
      running_before = __shfl_sync(0xffffffffu, running_before, source);
      if (segment / kWarps == cta) {
        const int token = find_in_segment(cut, min_p, segment % kWarps, running_before, tie_index, target);
        if (lane < kCtas) cluster.map_shared_rank(&s, lane)->token = token;
      }
    }
    cluster.sync();
    return s.token;
  }

  // Warp 0 walks a segment, 128 tokens at a time in the order of ids.
  __device__ int find_in_segment(const Cut& cut, float min_p, int segment, uint64 before, uint32_t tie_index,
                                 uint64 target) const {
    const int length = chunk / kWarps;
    int last_possible = 0;
    for (int i = segment * length + lane * 4; i < (segment + 1) * length; i += kTile) {
      const float4 v = *reinterpret_cast<const float4*>(values + i);
      const float x[4] = {v.x, v.y, v.z, v.w};
      Standing is[4];
      uint32_t ties = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        is[j] = x[j] >= cutoff && x[j] >= min_p ? standing<true>(x[j], cut) : kOut;
        ties += is[j] == kTie;
      }
      const uint32_t tie_end = tie_index + warp_inclusive_sum(ties, lane);
      uint32_t tie = tie_end - ties;
      uint64 w[4], own = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool kept = is[j] == kKept || (is[j] == kTie && tie < cut.ties);
        tie += is[j] == kTie;
        w[j] = kept ? fixed_weight(x[j]) : 0;
        own += w[j];
      }
      const uint64 inclusive = before + warp_inclusive_sum(own, lane);
      const uint32_t above = __ballot_sync(0xffffffffu, inclusive > target);
      if (above != 0) {
        uint64 running = inclusive - own;
        int token = begin + i;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          running += w[j];
          if (running <= target) token = begin + i + j + 1;
        }
        return __shfl_sync(0xffffffffu, token, __ffs(above) - 1);
      }
      before = __shfl_sync(0xffffffffu, inclusive, kWarpSize - 1);
      tie_index = __shfl_sync(0xffffffffu, tie_end, kWarpSize - 1);
      last_possible = begin + i;
    }
    return last_possible;  // not reached: the segment was chosen because its weight exceeds the target
  }

  // The tokens that the cut keeps, at most 32, into CTA 0's list.
  __device__ void collect(const Cut& cut) {
    uint32_t ties = 0;
    if (cut.ties != kAll) {
      for_candidates([&](float x, int) { ties += distance<false>(x) == cut.last; });
      ties = __reduce_add_sync(0xffffffffu, ties);
    }
    if (lane == 0) s.warp_ties[warp] = ties;
    cluster.sync();
    if (warp == 0) {
      constexpr int kOwn = kCtas * kWarps / kWarpSize;
      uint32_t counts[kOwn], sum = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int segment = lane * kOwn + i;
        counts[i] = cluster.map_shared_rank(&s, segment / kWarps)->warp_ties[segment % kWarps];
        sum += counts[i];
      }
      uint32_t before = warp_inclusive_sum(sum, lane) - sum;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int segment = lane * kOwn + i;
        if (segment / kWarps == cta) s.ties_before[segment % kWarps] = before;
        before += counts[i];
      }
    }
    __syncthreads();
    Shared& first = *cluster.map_shared_rank(&s, 0);
    const auto keep = [&](float x, int id) {
      first.top[atomicAdd(&first.num_top, 1u) % kWarpSize] = uint64{distance<false>(x)} << 32 | static_cast<uint32_t>(id);
    };
    const int length = chunk / kWarps;
    uint32_t tie_index = s.ties_before[warp];
    for (int i = warp * length + lane * 4; i < (warp + 1) * length; i += kTile) {
      const float4 v = *reinterpret_cast<const float4*>(values + i);
      const float x[4] = {v.x, v.y, v.z, v.w};
      uint32_t own_ties = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) own_ties += x[j] >= cutoff && standing<false>(x[j], cut) == kTie;
      const uint32_t tie_end = tie_index + warp_inclusive_sum(own_ties, lane);
      uint32_t tie = tie_end - own_ties;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Standing is = x[j] >= cutoff ? standing<false>(x[j], cut) : kOut;
        if (is == kKept || (is == kTie && tie < cut.ties)) keep(x[j], begin + i + j);
        tie += is == kTie;
      }
      tie_index = __shfl_sync(0xffffffffu, tie_end, kWarpSize - 1);
    }
    cluster.sync();
  }

  // This CTA's tokens, of the units whose entry in `unit_keys` is at least `least`.
  template <class Load>
  __device__ void load(uint32_t least, const Load& load_four) {
    const float nan = __uint_as_float(0x7fffffffu);
#pragma unroll 4
    for (int i = threadIdx.x * 4; i < chunk; i += kThreads * 4) {
      const int id = begin + i;
      float4 x = make_float4(nan, nan, nan, nan);
      if (id < p.vocab_size && s.unit_keys[id / kUnit] >= least) x = load_four(id);
      *reinterpret_cast<float4*>(values + i) = x;
    }
    __syncthreads();
  }

  __device__ int choose_truncated(const SamplingRow& row, const RowStats& stats, const float* logits,
                                  const UnitStats* units) {
    const Divisor temperature(row.temperature);
    const float largest = temperature.divide(key_float(static_cast<uint32_t>(stats.best >> 32)));
    const auto weight = [&](float x) { return expf(temperature.divide(x) - largest); };
    for (int u = threadIdx.x; u < p.num_units; u += kThreads) {
      s.unit_keys[u] = __float_as_uint(weight(key_float(static_cast<uint32_t>(units[u].best >> 32))));
    }
    __syncthreads();
    cutoff = least_weight(row, stats.sum, p.vocab_size);
    if (row.top_k > 0) cutoff = fmaxf(cutoff, __uint_as_float(kth_unit_key(row.top_k)));
    load(__float_as_uint(cutoff), [&](int id) {
      float4 x = load_logits(logits, id, p.vocab_size, p.vectors, neg_inf());
      if (row.adjusted) x = row.adjust(x, id);
      return make_float4(weight(x.x), weight(x.y), weight(x.z), weight(x.w));
    });
    Cut cut{weight_distance(cutoff), kAll, 0};
    double whole = stats.sum * static_cast<double>(kFixedScale);
    if (row.top_k > 0) {
      cut = search<false, true>(row.top_k, cut.last);
      whole = static_cast<double>(cut.weight);
    }
    if (row.top_p < 1.f) cut = search<true, true>(nucleus_weight(row.top_p, whole), cut.last);
    return choose(cut, row.min_p, philox_uniform(row.seed, row.choice, row.position));
  }

  __device__ void report(const SamplingRow& row, const RowStats& stats, const float* logits, const UnitStats* units, int r,
                         int token) {
    for (int u = threadIdx.x; u < p.num_units; u += kThreads) s.unit_keys[u] = units[u].raw_key;
    if (threadIdx.x == 0) s.num_top = s.rank = 0;
    __syncthreads();
    const int num_top = min(row.num_logprobs, p.vocab_size);
    largest_key = stats.raw_key;
    const float best = key_float(largest_key), own = logits[token];
    const uint32_t bound = num_top > 0 ? kth_unit_key(num_top) : largest_key;
    cutoff = bound == 0 ? neg_inf() : key_float(bound);
    load(min(bound, float_key(own)), [&](int id) {
      return load_logits(logits, id, p.vocab_size, p.vectors, __uint_as_float(0x7fffffffu));
    });
    uint32_t larger = 0;
    const float candidates_from = cutoff;
    cutoff = own;
    for_candidates([&](float x, int) { larger += x > own; });
    cutoff = candidates_from;
    larger = __reduce_add_sync(0xffffffffu, larger);
    cluster.sync();  // CTA 0 has cleared its counts
    if (lane == 0 && larger != 0) atomicAdd(&cluster.map_shared_rank(&s, 0)->rank, larger);
    if (num_top > 0) collect(search<false, false>(num_top, largest_key - float_key(cutoff)));
    else cluster.sync();
    if (cta != 0 || warp != 0) return;
    const double log_sum = log(stats.raw_sum);
    const auto logprob = [&](float x) { return static_cast<float>(static_cast<double>(x - best) - log_sum); };
    if (lane == 0) {
      p.out_logprobs[r] = logprob(own);
      p.out_ranks[r] = static_cast<int>(s.rank) + 1;
    }
    uint64 entry = lane < num_top ? s.top[lane] : ~uint64{0};
    int place = 0;
    for (int i = 0; i < num_top; ++i) place += s.top[i] < entry;
    if (lane < num_top) {
      p.out_top_ids[r * kMaxTop + place] = static_cast<int>(static_cast<uint32_t>(entry));
      p.out_top_logprobs[r * kMaxTop + place] = logprob(key_float(largest_key - static_cast<uint32_t>(entry >> 32)));
    } else if (lane < kMaxTop) {
      p.out_top_ids[r * kMaxTop + lane] = -1;
      p.out_top_logprobs[r * kMaxTop + lane] = neg_inf();
    }
  }
};

__global__ void __cluster_dims__(kCtas) __launch_bounds__(kThreads, 2) sample_select_kernel(const SampleParams p,
                                                                                         int chunk) {
  extern __shared__ __align__(16) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  float* values = reinterpret_cast<float*>(memory + sizeof(Shared));
  const cg::cluster_group cluster = cg::this_cluster();
  const int lane = threadIdx.x % kWarpSize, cta = static_cast<int>(cluster.block_rank());
  const int clusters = gridDim.x / kCtas;
  let_dependents_launch();
  wait_for_previous_kernel();
  for (int from = blockIdx.x / kCtas; from < p.num_rows; from += clusters * kWarpSize) {
    // Lane i looks at row from + i * clusters: is anything left to do?
    const int own = from + lane * clusters;
    for (uint32_t left = __ballot_sync(0xffffffffu, own < p.num_rows && p.todo[own] != 0); left != 0; left &= left - 1) {
      const int r = from + (__ffs(left) - 1) * clusters;
      const uint32_t todo = p.todo[r];
      const SamplingRow row(p, r);
      const RowStats stats = static_cast<const RowStats*>(p.rows)[r];
      const float* logits = p.logits + r * p.logits_stride;
      const UnitStats* units = static_cast<const UnitStats*>(p.units) + int64_t{r} * p.num_units;
      Select select{p,   s, values, chunk, cta * chunk, lane, static_cast<int>(threadIdx.x) / kWarpSize, cta, cluster,
                    0.f, 0};
      int token = stats.token;
      if (todo & kTodoChoose) {
        token = select.choose_truncated(row, stats, logits, units);
        if (cta == 0 && threadIdx.x == 0) write_choice(p, row, r, token, true);
        __syncthreads();
      }
      if (todo & kTodoReport) select.report(row, stats, logits, units, r, token);
      cluster.sync();  // nobody looks into this CTA's memory any more
    }
  }
}

}  // namespace

cudaError_t launch_sample_select(const SampleParams& p, cudaStream_t stream) {
  const int per_cta = (p.vocab_size + kCtas - 1) / kCtas;
  const int chunk = (per_cta + kChunkStep - 1) / kChunkStep * kChunkStep;
  const int clusters = p.num_rows < kMaxRowsInFlight ? p.num_rows : kMaxRowsInFlight;
  return launch_kernel(sample_select_kernel, dim3(clusters * kCtas), kThreads, stream,
                       {.smem_bytes = static_cast<int>(sizeof(Shared)) + chunk * 4, .overlaps = true}, p, chunk);
}

}  // namespace rorqual
