// sampling.cu: one pass over the logits of a step: tokens and log-probabilities of all rows but those that need more than
// their few hundred best tokens, which sampling_select.cu finishes. The definition: rorqual/kernels/reference_sampling.py.
// Tiling:  a warp reduces a unit of 1024 tokens in registers (8 vectors of 16 bytes a lane, all in flight at once): its
//          best token, and of a row that draws the sum of exp(l / T - largest). 8 units a CTA. The last CTA of a row to
//          arrive combines: a warp takes the best, or finds the unit and then the token that the random number hits.
// Cuts:    the largest of each lane's 32 tokens (a set) goes to memory. A histogram of them bounds the k-th best token from
//          below; the sets that reach the bound are read again, their tokens above it listed, and a token's rank and the
//          weight before it come from comparing it with all others in the list. Log-probabilities' alternatives likewise.
// Order:   sums of units run in an order that the vocabulary's size alone decides, sums of weights are in fixed point, CTAs
//          are counted with integers: the launch leaves no trace in a row's bits.
// Traffic: the row once, 32 bytes a unit written and read; cut rows 128 bytes a unit more and a few sets. HBM-bound from
//          about 32 rows on; latency before.
#include "rorqual/launch_kernel.cuh"
#include "rorqual/sampling.cuh"

namespace rorqual {
namespace {

constexpr int kScanWarps = 8, kScanThreads = kScanWarps * kWarpSize;
constexpr int kMaxPerLane = kMaxUnits / kWarpSize;
constexpr int kSetBins = 2048, kBinShift = 18;  // 32 bins for each power of two of the weight
constexpr uint32_t kLastBin = kSetBins - 1;
constexpr int kMaxSets = 1024, kMaxEntries = 512;
constexpr int kMostWanted = 256;   // a larger top_k is not looked for here
constexpr int kNucleusGuess = 160;  // sets that a nucleus is looked for in

struct alignas(16) PickShared {
  uint64 entries[kMaxEntries];  // listed tokens: distance from the best, then id; they sort in the order of the definition
  uint64 weights[kMaxEntries];  // in fixed point
  uint32_t bins[kSetBins];
  uint16_t sets[kMaxSets];
  uint64 warp_weights[kScanWarps];
  double warp_sums[kScanWarps], before, target;  // of a plain row: the sum of the units before `unit`, u of the whole
  uint32_t warp_counts[kScanWarps];
  int unit;
  uint32_t num_sets, num_entries, bin, last;
  int token;
  bool sound;
  RowStats stats;
};

// One warp combines a row's units and writes what a greedy row has chosen, or that nothing can be chosen. `only_best`: a
// greedy row of which nothing else is asked. A plain row learns in which unit its token lies.
__device__ void combine(const SampleParams& p, const SamplingRow& row, int r, const UnitStats* units, bool only_best,
                        PickShared& s, int lane) {
  const int per_lane = (p.num_units + kWarpSize - 1) / kWarpSize, first = lane * per_lane;
  uint64 bests[kMaxPerLane], best = 0;
  double sums[kMaxPerLane];
  uint32_t raw_key = 0;
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) {
    const bool exists = i < per_lane && first + i < p.num_units;
    bests[i] = exists ? __ldcg(&units[first + i].best) : 0;
    raw_key = max(raw_key, exists ? __ldcg(&units[first + i].raw_key) : 0);
    sums[i] = exists && !only_best ? __ldcg(&units[first + i].sum) : 0.;
  }
#pragma unroll
  for (int i = 0; i < kMaxPerLane; ++i) best = max(best, bests[i]);
  const uint32_t own_key = static_cast<uint32_t>(best >> 32);
  const uint32_t key = __reduce_max_sync(0xffffffffu, own_key);
  const uint32_t not_id = __reduce_max_sync(0xffffffffu, own_key == key ? static_cast<uint32_t>(best) : 0u);
  raw_key = __reduce_max_sync(0xffffffffu, raw_key);
  const bool sound = is_finite_key(key) && is_finite_key(raw_key);
  const int token = p.targets != nullptr ? p.targets[r] : static_cast<int>(~not_id);
  if (lane == 0) {
    p.todo[r] = 0;
    s.sound = sound;
    if (p.targets == nullptr && (row.greedy || !sound)) write_choice(p, row, r, token, sound);
  }
  if (only_best || !sound) return;
  double total = 0., raw_total = 0.;
  if (row.num_logprobs >= 0) {
    const float largest = key_float(raw_key);
    for (int u = first; u < min(first + per_lane, p.num_units); ++u) {
      raw_total += __ldcg(&units[u].raw_sum) * expf(fmaxf(key_float(__ldcg(&units[u].raw_key)), -1e30f) - largest);
    }
    raw_total = warp_sum_f64(raw_total);
  }
  if (!row.greedy) {
    const Divisor temperature(row.temperature);
    const float largest = temperature.divide(key_float(key));
    double own = 0.;
#pragma unroll
    for (int i = 0; i < kMaxPerLane; ++i) {
      if (i >= per_lane) continue;
      sums[i] *= expf(temperature.divide(key_float(static_cast<uint32_t>(bests[i] >> 32))) - largest);
      own += sums[i];
    }
    const double inclusive = warp_inclusive_sum(own, lane);
    total = __shfl_sync(0xffffffffu, inclusive, kWarpSize - 1);
    if (!row.truncated) {
      const double target = philox_uniform(row.seed, row.choice, row.position) * total;
      const uint32_t above = __ballot_sync(0xffffffffu, own > 0. && inclusive > target);
      double running = inclusive - own, before = running;
      int unit = first;
      bool found = false;
#pragma unroll
      for (int i = 0; i < kMaxPerLane; ++i) {
        if (!found && sums[i] > 0.) {
          unit = first + i;
          before = running;
        }
        running += sums[i];
        found |= running > target;
      }
      if (lane == (above != 0 ? __ffs(above) - 1 : 0)) {
        s.unit = unit;
        s.before = before;
        s.target = target;
      }
    }
  }
  if (lane == 0) s.stats = {uint64{key} << 32 | not_id, raw_key, token, total, raw_total};
}

// What a CTA does with a row whose units are combined: cuts, and log-probabilities. Whatever is listed is listed in any
// order; only its set matters.
struct Pick {
  const SampleParams& p;
  PickShared& s;
  const SamplingRow& row;
  const float* logits;
  Divisor temperature;
  float largest;  // of l / temperature
  int thread, lane, warp;

  __device__ __forceinline__ float weight(float x) const { return expf(temperature.divide(x) - largest); }
  __device__ __forceinline__ uint32_t bin_of(float w) const { return min(weight_distance(w) >> kBinShift, kLastBin); }

  // Lists the tokens of the sets' best bins: up to the one that makes `want` sets (0: any number), or up to `limit`.
  // False: there is no room for them.
  template <bool kAdjusted>
  __device__ bool list_best(const uint32_t* set_keys, uint32_t want, uint32_t limit) {
    const int num_sets = p.num_units * kWarpSize;
    for (int i = thread; i < kSetBins; i += kScanThreads) s.bins[i] = 0;
    if (thread == 0) {
      s.num_sets = s.num_entries = 0;
      s.bin = kLastBin;
    }
    __syncthreads();
    if (want > 0) {
#pragma unroll 8
      for (int i = thread; i < num_sets; i += kScanThreads) {
        const uint32_t bin = bin_of(weight(key_float(__ldcg(set_keys + i))));
        if (bin <= limit) atomicAdd(&s.bins[bin], 1u);
      }
      __syncthreads();
      constexpr int kOwn = kSetBins / kScanThreads;
      uint32_t own = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) own += s.bins[thread * kOwn + i];
      uint32_t inclusive = warp_inclusive_sum(own, lane);
      if (lane == kWarpSize - 1) s.warp_counts[warp] = inclusive;
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kScanWarps; ++i) inclusive += i < warp ? s.warp_counts[i] : 0;
      uint32_t running = inclusive - own;
      if (running < want && inclusive >= want) {
        int bin = thread * kOwn;
        while (running + s.bins[bin] < want) running += s.bins[bin++];
        s.bin = bin;
      }
      __syncthreads();
    }
    limit = min(limit, s.bin);
#pragma unroll 8
    for (int i = thread; i < num_sets; i += kScanThreads) {
      if (bin_of(weight(key_float(__ldcg(set_keys + i)))) <= limit) {
        const uint32_t at = atomicAdd(&s.num_sets, 1u);
        if (at < kMaxSets) s.sets[at] = static_cast<uint16_t>(i);
      }
    }
    __syncthreads();
    const int listed = static_cast<int>(s.num_sets);
    if (listed > kMaxSets) return false;
#pragma unroll 2
    for (int i = thread; i < listed * kUnitVecs; i += kScanThreads) {
      const int id = set_vector(s.sets[i / kUnitVecs], i % kUnitVecs);
      if (id >= p.vocab_size) continue;
      float4 v = load_logits(logits, id, p.vocab_size, p.vectors, neg_inf());
      if (kAdjusted && row.adjusted) v = row.adjust(v, id);
      const float x[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float w = weight(x[j]);
        if (bin_of(w) > limit || id + j >= p.vocab_size) continue;
        const uint32_t at = atomicAdd(&s.num_entries, 1u);
        if (at >= kMaxEntries) continue;
        const uint32_t d = kAdjusted ? weight_distance(w) : s.stats.raw_key - float_key(x[j]);
        s.entries[at] = uint64{d} << 32 | static_cast<uint32_t>(id + j);
        if (kAdjusted) s.weights[at] = fixed_weight(w);
      }
    }
    __syncthreads();
    return s.num_entries <= kMaxEntries;
  }

  // The first token of vector `vec` of a set: lane set % 32 of unit set / 32.
  static __device__ __forceinline__ int set_vector(int set, int vec) {
    return set / kWarpSize * kUnit + vec * 4 * kWarpSize + set % kWarpSize * 4;
  }

  __device__ uint64 cta_sum(uint64 x) {
    x = warp_inclusive_sum(x, lane);
    __syncthreads();
    if (lane == kWarpSize - 1) s.warp_weights[warp] = x;
    __syncthreads();
    uint64 sum = 0;
#pragma unroll
    for (int i = 0; i < kScanWarps; ++i) sum += s.warp_weights[i];
    return sum;
  }

  // Step 4 of the definition for a row that is not cut: the token of s.unit at which the running sum exceeds the target.
  __device__ void draw() {
    static_assert(kUnit == 4 * kScanThreads);
    const int id = s.unit * kUnit + thread * 4;
    float4 v = load_logits(logits, id, p.vocab_size, p.vectors, neg_inf());
    if (row.adjusted && id < p.vocab_size) v = row.adjust(v, id);
    const float w[4] = {weight(v.x), weight(v.y), weight(v.z), weight(v.w)};
    const double own = static_cast<double>((w[0] + w[1]) + (w[2] + w[3]));
    double inclusive = warp_inclusive_sum(own, lane);
    if (thread == 0) s.token = -1;
    if (lane == kWarpSize - 1) s.warp_sums[warp] = inclusive;
    __syncthreads();
    double base = s.before;
    for (int i = 0; i < warp; ++i) base += s.warp_sums[i];
    inclusive += base;
    double running = __shfl_up_sync(0xffffffffu, inclusive, 1);
    if (lane == 0) running = base;
    int last_possible = -1;
    bool found = false;
    const bool here = running <= s.target && s.target < inclusive;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      running += w[i];
      if (!found && w[i] > 0.f) last_possible = id + i;
      found |= w[i] > 0.f && here && running > s.target;
    }
    if (here) s.token = last_possible;
    __syncthreads();
    // Where rounding leaves nothing above the target: the last that is possible.
    if (s.token >= 0) return;
    __syncthreads();
    if (last_possible >= 0) atomicMax(&s.token, last_possible);
    __syncthreads();
  }

  // Steps 3 and 4 of the definition. False: the list does not hold all that is kept.
  __device__ bool choose(const uint32_t* set_keys) {
    const bool counted = row.top_k > 0, shared = row.top_p < 1.f;
    if (row.top_k > kMostWanted) return false;
    const uint32_t limit = weight_distance(least_weight(row, s.stats.sum, p.vocab_size)) >> kBinShift;
    if (!list_best<true>(set_keys, counted ? row.top_k : shared ? kNucleusGuess : 0, limit)) return false;
    constexpr int kOwn = kMaxEntries / kScanThreads;
    const int count = static_cast<int>(s.num_entries);
    uint64 entry[kOwn], w[kOwn], before[kOwn], own = 0;
    int rank[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = thread + i * kScanThreads;
      entry[i] = at < count ? s.entries[at] : 0;  // nothing is before it
      w[i] = at < count ? s.weights[at] : 0;
      before[i] = 0;
      rank[i] = 0;
    }
    for (int j = 0; j < count; ++j) {
      const uint64 other = s.entries[j], other_weight = s.weights[j];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (other < entry[i]) {
          ++rank[i];
          before[i] += other_weight;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (counted && rank[i] >= row.top_k) w[i] = 0;
      own += w[i];
    }
    const uint64 listed = cta_sum(own);  // (with barriers: everyone has read the weights)
    own = 0;
    const uint64 need =
        nucleus_weight(row.top_p, counted ? static_cast<double>(listed) : s.stats.sum * static_cast<double>(kFixedScale));
    if (shared && !counted && listed < need && s.bin <= limit) return false;  // with all up to the limit, rounding is why
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int at = thread + i * kScanThreads;
      if ((shared && before[i] >= need) || distance_weight(static_cast<uint32_t>(entry[i] >> 32)) < row.min_p) w[i] = 0;
      if (at < count) s.weights[at] = w[i];
      own += w[i];
    }
    const uint64 target = target_weight(philox_uniform(row.seed, row.choice, row.position), cta_sum(own));
    uint64 lower[kOwn] = {};  // weight of lower ids
    for (int j = 0; j < count; ++j) {
      const uint32_t other = static_cast<uint32_t>(s.entries[j]);
      const uint64 other_weight = s.weights[j];
#pragma unroll
      for (int i = 0; i < kOwn; ++i) lower[i] += other < static_cast<uint32_t>(entry[i]) ? other_weight : 0;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (lower[i] <= target && target - lower[i] < w[i]) s.token = static_cast<int>(static_cast<uint32_t>(entry[i]));
    }
    __syncthreads();
    return true;
  }

  // Log-probability, rank and alternatives of `token`. False: too many equals to list.
  __device__ bool report(const uint32_t* set_keys, int r, int token) {
    const int num_top = min(row.num_logprobs, p.vocab_size);
    const float best = key_float(s.stats.raw_key), own = logits[token];
    if (num_top > 0 && !list_best<false>(set_keys, num_top, kLastBin)) return false;
    const double log_sum = log(s.stats.raw_sum);
    const auto logprob = [&](float x) { return static_cast<float>(static_cast<double>(x - best) - log_sum); };
    const int count = num_top > 0 ? static_cast<int>(s.num_entries) : 0;
    for (int at = thread; at < count; at += kScanThreads) {
      const uint64 entry = s.entries[at];
      int rank = 0;
      for (int j = 0; j < count; ++j) rank += s.entries[j] < entry;
      if (rank < num_top) {
        p.out_top_ids[r * kMaxTop + rank] = static_cast<int>(static_cast<uint32_t>(entry));
        p.out_top_logprobs[r * kMaxTop + rank] = logprob(key_float(s.stats.raw_key - static_cast<uint32_t>(entry >> 32)));
      }
    }
    if (thread >= num_top && thread < kMaxTop) {
      p.out_top_ids[r * kMaxTop + thread] = -1;
      p.out_top_logprobs[r * kMaxTop + thread] = neg_inf();
    }
    // Larger logits lie in sets whose largest is larger.
    const uint32_t own_key = float_key(own);
    uint32_t larger = 0;
    if (own_key != s.stats.raw_key) {
      const int num_sets = p.num_units * kWarpSize;
      if (thread == 0) s.num_sets = 0;
      __syncthreads();
#pragma unroll 8
      for (int i = thread; i < num_sets; i += kScanThreads) {
        if (__ldcg(set_keys + i) > own_key) {
          const uint32_t at = atomicAdd(&s.num_sets, 1u);
          if (at < kMaxSets) s.sets[at] = static_cast<uint16_t>(i);
        }
      }
      __syncthreads();
      const int listed = static_cast<int>(s.num_sets);
      const bool all = listed > kMaxSets;
#pragma unroll 4
      for (int i = thread; i < (all ? num_sets : listed) * kUnitVecs; i += kScanThreads) {
        const int id = set_vector(all ? i / kUnitVecs : s.sets[i / kUnitVecs], i % kUnitVecs);
        const float4 x = load_logits(logits, id, p.vocab_size, p.vectors, neg_inf());
        larger += (x.x > own) + (x.y > own) + (x.z > own) + (x.w > own);
      }
    }
    larger = static_cast<uint32_t>(cta_sum(larger));
    if (thread == 0) {
      p.out_logprobs[r] = logprob(own);
      p.out_ranks[r] = static_cast<int>(larger) + 1;
    }
    return true;
  }
};

// The whole last CTA of a row that draws or reports log-probabilities.
__device__ void pick(const SampleParams& p, const SamplingRow& row, PickShared& s, int r) {
  const int thread = threadIdx.x, lane = thread % kWarpSize, warp = thread / kWarpSize;
  const float* logits = p.logits + r * p.logits_stride;
  if (!s.sound) {
    if (row.num_logprobs >= 0 && thread < kMaxTop) {
      const float nan = __uint_as_float(0x7fffffffu);
      if (thread == 0) {
        p.out_logprobs[r] = nan;
        p.out_ranks[r] = 0;
      }
      p.out_top_ids[r * kMaxTop + thread] = -1;
      p.out_top_logprobs[r * kMaxTop + thread] = nan;
    }
    return;
  }
  const int64_t first_set = int64_t{r} * p.num_units * kWarpSize;
  uint32_t todo = 0;
  if (!row.greedy) {
    const Divisor temperature(row.temperature);
    Pick chooser{p, s, row, logits, temperature, temperature.divide(key_float(static_cast<uint32_t>(s.stats.best >> 32))),
                 thread, lane, warp};
    if (!row.truncated) {
      chooser.draw();
    } else if (!chooser.choose(p.set_keys + first_set)) {
      todo = kTodoChoose | (row.num_logprobs >= 0 ? kTodoReport : 0);
    }
    if (thread == 0 && todo == 0) {
      write_choice(p, row, r, s.token, true);
      s.stats.token = s.token;
    }
    __syncthreads();
  }
  if (todo == 0 && row.num_logprobs >= 0) {
    Pick reporter{p, s, row, logits, Divisor(1.f), key_float(s.stats.raw_key), thread, lane, warp};
    const uint32_t* keys = row.adjusted ? p.raw_set_keys : p.set_keys;
    if (!reporter.report(keys + first_set, r, s.stats.token)) todo = kTodoReport;
  }
  if (thread == 0 && todo != 0) {
    p.todo[r] = todo;
    static_cast<RowStats*>(p.rows)[r] = s.stats;
  }
}

__global__ void __launch_bounds__(kScanWarps* kWarpSize, 3) sample_scan_kernel(const SampleParams p) {
  __shared__ PickShared s;
  const int lane = threadIdx.x % kWarpSize, unit = (blockIdx.x * blockDim.x + threadIdx.x) / kWarpSize, r = blockIdx.y;
  const float* logits = p.logits + r * p.logits_stride;
  let_dependents_launch();
  wait_for_previous_kernel();
  const RowHead head(p, r);
  const int first = unit * kUnit + lane * 4;
  float4 x[kUnitVecs];
  if (p.vectors && (unit + 1) * kUnit <= p.vocab_size) {
#pragma unroll
    for (int j = 0; j < kUnitVecs; ++j) x[j] = *reinterpret_cast<const float4*>(logits + first + j * 4 * kWarpSize);
  } else {
#pragma unroll
    for (int j = 0; j < kUnitVecs; ++j) {
      x[j] = load_logits(logits, first + j * 4 * kWarpSize, p.vocab_size, false, neg_inf());
    }
  }
  const SamplingRow row(p, head);
  if (!row.active) {
    if (blockIdx.x == 0 && threadIdx.x == 0) p.todo[r] = 0;
    return;
  }
  const bool picks = !row.greedy || row.num_logprobs >= 0, cut = row.truncated || row.num_logprobs >= 0;
  const int64_t set = (int64_t{r} * p.num_units + unit) * kWarpSize + lane;

  const auto lane_max = [&] {
    float m = neg_inf();
#pragma unroll
    for (int j = 0; j < kUnitVecs; ++j) m = max_nan(max_nan(max_nan(max_nan(m, x[j].x), x[j].y), x[j].z), x[j].w);
    return m;
  };
  float own_max = lane_max();
  uint32_t raw_key = __reduce_max_sync(0xffffffffu, float_key(own_max)), key = raw_key;
  // Sum of exp(x / T - largest / T) over the unit.
  const auto exp_sum = [&](float temperature, uint32_t of_key) {
    const Divisor divisor(temperature);
    const float largest = divisor.divide(key_float(of_key));
    double sum = 0.;
#pragma unroll
    for (int j = 0; j < kUnitVecs; ++j) {
      sum += static_cast<double>((expf(divisor.divide(x[j].x) - largest) + expf(divisor.divide(x[j].y) - largest)) +
                                 (expf(divisor.divide(x[j].z) - largest) + expf(divisor.divide(x[j].w) - largest)));
    }
    return of_key == kKeyNegInf ? 0. : warp_sum_f64(sum);
  };
  double sum = 0., raw_sum = 0.;
  if (row.num_logprobs >= 0) raw_sum = exp_sum(1.f, raw_key);
  if (row.adjusted) {
    if (row.num_logprobs >= 0 && unit < p.num_units) p.raw_set_keys[set] = float_key(own_max);
#pragma unroll
    for (int j = 0; j < kUnitVecs; ++j) {
      const int id = first + j * 4 * kWarpSize;
      if (id < p.vocab_size) x[j] = row.adjust(x[j], id);
    }
    own_max = lane_max();
    key = __reduce_max_sync(0xffffffffu, float_key(own_max));
  }
  if (cut && unit < p.num_units) p.set_keys[set] = float_key(own_max);
  if (!row.greedy) sum = exp_sum(row.temperature, key);

  // The lowest id that has the largest value; a NaN has none.
  const float largest = key_float(key);
  int own_id = 0x7fffffff;
  if (own_max == largest) {
#pragma unroll
    for (int j = kUnitVecs - 1; j >= 0; --j) {
      const int id = first + j * 4 * kWarpSize;
      if (x[j].w == largest) own_id = id + 3;
      if (x[j].z == largest) own_id = id + 2;
      if (x[j].y == largest) own_id = id + 1;
      if (x[j].x == largest) own_id = id;
    }
  }
  const int best_id = __reduce_min_sync(0xffffffffu, own_id);
  UnitStats* units = static_cast<UnitStats*>(p.units) + int64_t{r} * p.num_units;
  if (lane == 0 && unit < p.num_units) {
    units[unit] = {uint64{key} << 32 | static_cast<uint32_t>(~best_id), raw_key, 0, sum, raw_sum};
  }
  const bool only_best = row.greedy && row.num_logprobs < 0 && row.state == nullptr;
  __syncthreads();
  if (!picks && threadIdx.x >= kWarpSize) return;
  const SamplingRow again(p, r);  // kept in registers through the pass, all of it would cost occupancy
  if (threadIdx.x < kWarpSize) {
    uint32_t last = 1;
    if (gridDim.x > 1) {
      if (lane == 0) {
        __threadfence();
        last = atomicAdd(p.arrivals + r, 1) == gridDim.x - 1;
        if (last) p.arrivals[r] = 0;
        __threadfence();
      }
      last = __shfl_sync(0xffffffffu, last, 0);
      __syncwarp();
    }
    if (last) combine(p, again, r, units, only_best, s, lane);
    if (!picks) return;
    if (lane == 0) s.last = last;
  }
  __syncthreads();
  if (s.last) pick(p, again, s, r);
}

}  // namespace

int sample_num_units(int vocab_size) { return (vocab_size + kUnit - 1) / kUnit; }
int64_t sample_unit_bytes() { return sizeof(UnitStats); }
int64_t sample_row_bytes() { return sizeof(RowStats); }

cudaError_t launch_sample_scan(const SampleParams& p, cudaStream_t stream) {
  const dim3 grid((p.num_units + kScanWarps - 1) / kScanWarps, p.num_rows);
  return launch_kernel(sample_scan_kernel, grid, kScanWarps * kWarpSize, stream, {.overlaps = true}, p);
}

}  // namespace rorqual
