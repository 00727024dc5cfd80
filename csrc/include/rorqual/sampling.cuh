// sampling.cuh: what the two sampling kernels share: keys of floats, a row's parameters, its adjusted logits, Philox.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "rorqual/device.cuh"
#include "rorqual/launch.h"

namespace rorqual {

using uint64 = unsigned long long;

inline constexpr int kUnit = 1024;        // tokens that one warp reduces: the sums' fixed blocks
inline constexpr int kUnitVecs = kUnit / (4 * kWarpSize);
inline constexpr int kMaxUnits = 256;      // a vocabulary has at most so many
inline constexpr float kGreedyBelow = 1e-5f;
inline constexpr int kMaxTop = 20;        // alternatives a row reports at most
inline constexpr uint32_t kStopBit = 1u << 30, kPromptBit = 1u << 31, kCountMask = kStopBit - 1;
inline constexpr uint32_t kKeyInf = 0xff800000u, kKeyNegInf = 0x007fffffu;

// What a unit, or a row, has been reduced to. Sums are of exp(x - the largest x).
struct UnitStats {
  uint64 best;       // key of the largest adjusted logit, then ~id: the lowest among equals wins
  uint32_t raw_key;  // of the largest logit before any adjustment
  uint32_t unused;
  double sum;        // x = adjusted logit / temperature; only of rows that draw
  double raw_sum;    // x = logit; only of rows that report log-probabilities
};
struct RowStats {
  uint64 best;
  uint32_t raw_key;
  int32_t token;  // chosen, unless kTodoChoose
  double sum, raw_sum;
};
inline constexpr uint32_t kTodoChoose = 1, kTodoReport = 2;

// Weights are exp(l / T - largest): in (0, 1], 1 for the likeliest. They are added up in fixed point, exactly.
inline constexpr float kFixedScale = 0x1p45f, kLeastWeight = 0x1p-46f;  // below kLeastWeight: 0
inline constexpr uint32_t kOneBits = 0x3f800000u;
__device__ __forceinline__ uint64 fixed_weight(float w) { return __float2ull_rn(w * kFixedScale); }
// 0 for weight 1, larger for less.
__device__ __forceinline__ uint32_t weight_distance(float w) { return kOneBits - __float_as_uint(w); }
__device__ __forceinline__ float distance_weight(uint32_t d) { return __uint_as_float(kOneBits - d); }

// The order of floats as the order of integers; -0 and +0 are one, NaN is above infinity.
__device__ __forceinline__ uint32_t float_key(float x) {
  const uint32_t bits = __float_as_uint(x + 0.f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float key_float(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
__device__ __forceinline__ bool is_finite_key(uint32_t key) { return key > kKeyNegInf && key < kKeyInf; }
__device__ __forceinline__ float max_nan(float a, float b) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}

// x / divisor rounded to nearest, for a correctly rounded reciprocal (Markstein). -inf becomes a large negative number.
struct Divisor {
  float value, reciprocal;
  __device__ explicit Divisor(float d) : value(d), reciprocal(1.f / d) {}
  __device__ __forceinline__ float divide(float x) const {
    x = fmaxf(x, -1e30f);
    const float quotient = x * reciprocal;
    return fmaf(fmaf(-quotient, value, x), reciprocal, quotient);
  }
};

__device__ __forceinline__ double warp_sum_f64(double x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(0xffffffffu, x, mask);
  return x;
}
template <class T>
__device__ __forceinline__ T warp_inclusive_sum(T x, int lane) {
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const T below = __shfl_up_sync(0xffffffffu, x, offset);
    if (lane >= offset) x += below;
  }
  return x;
}

// Philox-4x32-10 with counter (position, choice, 0) and key seed: 53 bits in [0, 1), as executor/random_numbers.py.
__device__ __forceinline__ double philox_uniform(uint64 seed, uint32_t choice, uint64 position) {
  uint32_t x0 = static_cast<uint32_t>(position), x1 = static_cast<uint32_t>(position >> 32), x2 = choice, x3 = 0;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64 a = uint64{x0} * 0xD2511F53u, b = uint64{x2} * 0xCD9E8D57u;
    x0 = static_cast<uint32_t>(b >> 32) ^ x1 ^ k0;
    x1 = static_cast<uint32_t>(b);
    x2 = static_cast<uint32_t>(a >> 32) ^ x3 ^ k1;
    x3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<double>((uint64{x0 >> 5} << 26) | (x1 >> 6)) * 0x1p-53;
}

// What leads to a row's parameters: read ahead of the logits and not looked at before them, so that nothing waits.
struct RowHead {
  int index;  // the slot, or the target
  int flag = 1;
  int64_t position = 0;

  __device__ __forceinline__ RowHead(const SampleParams& p, int row)
      : index((p.targets != nullptr ? p.targets : p.slots)[row]) {
    if (p.active != nullptr) {
      flag = p.active_bytes == 1 ? static_cast<const uint8_t*>(p.active)[row] : static_cast<const int32_t*>(p.active)[row];
    }
    if (p.positions != nullptr) {
      position = p.positions_bytes == 8 ? static_cast<const int64_t*>(p.positions)[row]
                                        : static_cast<const int32_t*>(p.positions)[row];
    }
  }
  __device__ __forceinline__ bool active() const { return index >= 0 && flag != 0; }
};

// One row's parameters, read once by every thread.
struct SamplingRow {
  bool active = false, greedy = true, truncated = false, adjusted = false;
  float temperature = 1.f, top_p = 1.f, min_p = 0.f;
  int top_k = 0, num_logprobs = -1;
  uint64 seed = 0, position = 0;
  uint32_t choice = 0;
  const float* bias = nullptr;     // [pool_stride], with `state`
  uint32_t* state = nullptr;       // [pool_stride]
  const uint32_t* mask = nullptr;  // [mask_stride]
  bool no_stop = false;            // too early for a stop token
  float presence = 0.f, frequency = 0.f, repetition = 1.f;

  __device__ __forceinline__ SamplingRow(const SampleParams& p, int row) : SamplingRow(p, RowHead(p, row)) {}
  __device__ __forceinline__ SamplingRow(const SampleParams& p, const RowHead& head) : active(head.active()) {
    if (p.targets != nullptr) {
      num_logprobs = p.num_top;
      return;
    }
    if (!active) return;
    const int4* record = reinterpret_cast<const int4*>(p.records) + int64_t{head.index} * 4;
    const int4 a = record[0], b = record[1], c = record[2], d = record[3];
    const int64_t at = head.position;
    temperature = __int_as_float(a.x);
    top_p = __int_as_float(a.y);
    top_k = a.z < p.vocab_size ? a.z : 0;
    min_p = fminf(__int_as_float(a.w), 1.f);
    seed = uint64{static_cast<uint32_t>(b.x)} | uint64{static_cast<uint32_t>(b.y)} << 32;
    position = static_cast<uint64>(at);
    choice = static_cast<uint32_t>(b.z);
    if (p.out_logprobs != nullptr) num_logprobs = min(b.w, kMaxTop);
    greedy = !(temperature >= kGreedyBelow);
    truncated = !greedy && (top_p < 1.f || top_k > 0 || min_p > 0.f);
    if (c.x >= 0 && p.bias != nullptr) {
      bias = p.bias + c.x * p.pool_stride;
      state = p.states + c.x * p.pool_stride;
      no_stop = at - c.z < c.w;
      presence = __int_as_float(d.x);
      frequency = __int_as_float(d.y);
      repetition = __int_as_float(d.z);
    }
    if (c.y >= 0 && p.masks != nullptr) mask = p.masks + c.y * p.mask_stride;
    adjusted = bias != nullptr || mask != nullptr;
  }

  __device__ __forceinline__ float adjust_one(float x, float added, uint32_t s) const {
    x = __fadd_rn(x, added);
    if (s == 0) return x;
    if ((s & ~kStopBit) != 0 && repetition != 1.f) x = x > 0.f ? Divisor(repetition).divide(x) : __fmul_rn(x, repetition);
    const uint32_t count = s & kCountMask;
    if (count != 0) {
      x = __fsub_rn(x, __fadd_rn(__fmul_rn(static_cast<float>(count), frequency), presence));
    }
    return (s & kStopBit) != 0 && no_stop ? neg_inf() : x;
  }

  // The logit of one token as the choice sees it.
  __device__ __forceinline__ float adjust_at(float x, int id) const {
    if (bias != nullptr) x = adjust_one(x, bias[id], state[id]);
    return mask != nullptr && (mask[id / 32] >> (id % 32) & 1) == 0 ? neg_inf() : x;
  }

  // The logits of tokens id … id + 3 as the choice sees them; id is a multiple of 4 below the vocabulary's size.
  __device__ __forceinline__ float4 adjust(float4 x, int id) const {
    if (bias != nullptr) {
      const float4 added = *reinterpret_cast<const float4*>(bias + id);
      const uint4 s = *reinterpret_cast<const uint4*>(state + id);
      x.x = adjust_one(x.x, added.x, s.x);
      x.y = adjust_one(x.y, added.y, s.y);
      x.z = adjust_one(x.z, added.z, s.z);
      x.w = adjust_one(x.w, added.w, s.w);
    }
    if (mask != nullptr) {
      const uint32_t bits = mask[id / 32] >> (id % 32);
      if ((bits & 1) == 0) x.x = neg_inf();
      if ((bits & 2) == 0) x.y = neg_inf();
      if ((bits & 4) == 0) x.z = neg_inf();
      if ((bits & 8) == 0) x.w = neg_inf();
    }
    return x;
  }
};

// The weight below which no cut keeps a token, from the row's parameters and the sum of its weights.
__device__ __forceinline__ float least_weight(const SamplingRow& row, double sum, int vocab_size) {
  float least = kLeastWeight;
  // All tokens lighter than this weigh less than what lies beyond the nucleus.
  if (row.top_p < 1.f && row.top_k <= 0) {
    least = fmaxf(least, 0.999f * (1.f - row.top_p) * static_cast<float>(sum) / static_cast<float>(vocab_size));
  }
  // (Beside top_k, top_p's share is of the top k's mass, which min_p must not have cut before.)
  if (row.top_k <= 0 || row.top_p >= 1.f) least = fmaxf(least, row.min_p);
  return least;
}
// The weight that the nucleus must reach; `whole` is what its share is of.
__device__ __forceinline__ uint64 nucleus_weight(float top_p, double whole) {
  const double share = ceil(static_cast<double>(top_p) * whole);
  return share < 1. ? 1 : static_cast<uint64>(share);
}
// The running weight that the chosen token is the first to exceed.
__device__ __forceinline__ uint64 target_weight(double u, uint64 whole) {
  return min(static_cast<uint64>(u * static_cast<double>(whole)), whole - 1);
}

// Logits of tokens id … id + 3 of a row; `beyond` where there is no such token.
__device__ __forceinline__ float4 load_logits(const float* row, int id, int vocab_size, bool vectors, float beyond) {
  if (vectors && id + 3 < vocab_size) return *reinterpret_cast<const float4*>(row + id);
  return make_float4(id < vocab_size ? row[id] : beyond, id + 1 < vocab_size ? row[id + 1] : beyond,
                     id + 2 < vocab_size ? row[id + 2] : beyond, id + 3 < vocab_size ? row[id + 3] : beyond);
}

__device__ __forceinline__ void write_choice(const SampleParams& p, const SamplingRow& row, int r, int token,
                                             bool sound) {
  p.out_tokens[r] = sound ? token : 0;
  p.out_sound[r] = sound;
  if (sound && row.state != nullptr) row.state[token] += 1;  // every reader of this row is done
}

}  // namespace rorqual
