// sampling.cu: one pass over the logits of a step: the tokens of greedy and of plain rows (temperature alone), and
// what sampling_select.cu needs to know of the others. The definition is the docstring of executor/sampler.py.
// Tiling:  a warp reduces a unit of 1024 tokens in registers (8 vectors of 16 bytes a lane, all in flight at once): its
//          best token, and of a row that draws the sum of exp(l / T - largest). 8 units a CTA. The last CTA of a row to
//          arrive combines: one warp takes the best, or finds the unit and then the token that the random number hits.
// Order:   every sum runs in an order that the vocabulary's size alone decides; CTAs are counted with integers.
// Traffic: the row once, 32 bytes a unit written and read. HBM-bound from about 32 rows on; latency before.
#include "rorqual/launch_kernel.cuh"
#include "rorqual/sampling.cuh"

namespace rorqual {
namespace {

constexpr int kScanWarps = 8;

// The token of a unit at which the running sum exceeds `target`; `before` is the sum of the units before it.
__device__ int draw_in_unit(const SampleParams& p, const SamplingRow& row, const float* logits, int unit, float largest,
                            double before, double target, int lane) {
  static_assert(kUnit == kWarpSize * kWarpSize);
  const Divisor temperature(row.temperature);
  const auto weight = [&](float x) { return expf(temperature.divide(x) - largest); };
  const int first = unit * kUnit + lane * kWarpSize;  // a lane sums 32 neighbours; then each lane takes one of 32
  double own = 0.;
#pragma unroll 1
  for (int id = first; id < first + kWarpSize; id += kWarpSize / 2) {
    constexpr int kVecs = kUnitVecs / 2;
    float4 x[kVecs];
#pragma unroll
    for (int j = 0; j < kVecs; ++j) x[j] = load_logits(logits, id + j * 4, p.vocab_size, p.vectors, neg_inf());
#pragma unroll
    for (int j = 0; j < kVecs; ++j) {
      if (row.adjusted && id + j * 4 < p.vocab_size) x[j] = row.adjust(x[j], id + j * 4);
      own += static_cast<double>((weight(x[j].x) + weight(x[j].y)) + (weight(x[j].z) + weight(x[j].w)));
    }
  }
  double inclusive = before + warp_inclusive_sum(own, lane);
  // Where rounding leaves nothing above the target: the last that is possible, here and below.
  const auto hit = [&](bool possible) {
    const uint32_t above = __ballot_sync(0xffffffffu, possible && inclusive > target);
    const uint32_t any = __ballot_sync(0xffffffffu, possible);
    return above != 0 ? __ffs(above) - 1 : max(31 - __clz(any), 0);
  };
  const int source = hit(own > 0.);
  before = __shfl_sync(0xffffffffu, inclusive - own, source);
  const int id = unit * kUnit + source * kWarpSize + lane;
  float w = 0.f;
  if (id < p.vocab_size) w = weight(row.adjusted ? row.adjust_at(logits[id], id) : logits[id]);
  inclusive = before + warp_inclusive_sum(static_cast<double>(w), lane);
  return unit * kUnit + source * kWarpSize + hit(w > 0.f);
}

// One warp combines a row's units. `only_best`: a greedy row, of which nothing else is asked.
__device__ void finish_row(const SampleParams& p, int r, const UnitStats* units, bool only_best, int lane) {
  const int per_lane = (p.num_units + kWarpSize - 1) / kWarpSize;
  const int first = min(lane * per_lane, p.num_units), end = min(first + per_lane, p.num_units);
  uint64 best = 0;
  uint32_t raw_key = 0;
#pragma unroll 4
  for (int u = first; u < end; ++u) {
    best = max(best, __ldcg(&units[u].best));
    raw_key = max(raw_key, __ldcg(&units[u].raw_key));
  }
  const uint32_t own_key = static_cast<uint32_t>(best >> 32);
  const uint32_t key = __reduce_max_sync(0xffffffffu, own_key);
  const uint32_t not_id = __reduce_max_sync(0xffffffffu, own_key == key ? static_cast<uint32_t>(best) : 0u);
  raw_key = __reduce_max_sync(0xffffffffu, raw_key);
  const bool sound = is_finite_key(key) && is_finite_key(raw_key);
  int token = static_cast<int>(~not_id);
  if (only_best) {
    if (lane == 0) {
      p.out_tokens[r] = sound ? token : 0;
      p.out_sound[r] = sound;
    }
    return;
  }
  RowStats& stats = static_cast<RowStats*>(p.rows)[r];
  if (lane == 0) {
    stats.best = uint64{key} << 32 | not_id;
    stats.raw_key = raw_key;
    stats.sound = sound;
  }
  const SamplingRow row(p, r);  // again: kept in registers through the pass, it would cost occupancy
  double total = 0.;
  if (sound && row.num_logprobs >= 0) {
    double raw_total = 0.;
    const float largest = key_float(raw_key);
    for (int u = first; u < end; ++u) {
      raw_total += __ldcg(&units[u].raw_sum) * expf(fmaxf(key_float(__ldcg(&units[u].raw_key)), -1e30f) - largest);
    }
    raw_total = warp_sum_f64(raw_total);
    if (lane == 0) stats.raw_sum = raw_total;
  }
  if (sound && !row.greedy) {
    const Divisor temperature(row.temperature);
    const float largest = temperature.divide(key_float(key));
    const auto unit_sum = [&](int u) {
      const float own = temperature.divide(key_float(static_cast<uint32_t>(__ldcg(&units[u].best) >> 32)));
      return __ldcg(&units[u].sum) * expf(own - largest);
    };
    double own = 0.;
#pragma unroll 2
    for (int u = first; u < end; ++u) own += unit_sum(u);
    const double inclusive = warp_inclusive_sum(own, lane);
    total = __shfl_sync(0xffffffffu, inclusive, kWarpSize - 1);
    if (!row.truncated) {
      const double target = philox_uniform(row.seed, row.choice, row.position) * total;
      const uint32_t above = __ballot_sync(0xffffffffu, own > 0. && inclusive > target);
      const int source = above != 0 ? __ffs(above) - 1 : 0;
      double before = inclusive - own;
      int unit = first;
      if (lane == source) {
        double running = before;
#pragma unroll 1
        for (int u = first; u < end; ++u) {
          const double sum = unit_sum(u);
          if (sum > 0.) {
            unit = u;
            before = running;
          }
          running += sum;
          if (running > target) break;
        }
      }
      unit = __shfl_sync(0xffffffffu, unit, source);
      before = __shfl_sync(0xffffffffu, before, source);
      token = draw_in_unit(p, row, p.logits + r * p.logits_stride, unit, largest, before, target, lane);
    }
  }
  if (lane == 0) {
    if (p.targets != nullptr) {
      token = p.targets[r];
    } else if (!row.truncated || !sound) {
      write_choice(p, row, r, token, sound);
    }
    stats.token = row.truncated ? -1 : token;
    stats.sum = total;
  }
}

__global__ void __launch_bounds__(kScanWarps* kWarpSize, 3) sample_scan_kernel(const SampleParams p) {
  const int lane = threadIdx.x % kWarpSize, unit = (blockIdx.x * blockDim.x + threadIdx.x) / kWarpSize, r = blockIdx.y;
  const float* logits = p.logits + r * p.logits_stride;
  let_dependents_launch();
  wait_for_previous_kernel();
  const int first = unit * kUnit + lane * 4;
  float4 x[kUnitVecs];
#pragma unroll
  for (int j = 0; j < kUnitVecs; ++j) {
    x[j] = load_logits(logits, first + j * 4 * kWarpSize, p.vocab_size, p.vectors, neg_inf());
  }
  const SamplingRow row(p, r);
  if (!row.active) return;

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
#pragma unroll
    for (int j = 0; j < kUnitVecs; ++j) {
      const int id = first + j * 4 * kWarpSize;
      if (id < p.vocab_size) x[j] = row.adjust(x[j], id);
    }
    own_max = lane_max();
    key = __reduce_max_sync(0xffffffffu, float_key(own_max));
  }
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
  if (threadIdx.x >= kWarpSize) return;
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
  if (last) finish_row(p, r, units, only_best, lane);
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
