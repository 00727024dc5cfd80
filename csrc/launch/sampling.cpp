// sampling.cpp: C wrapper of the sampler.
#include "error.h"
#include "rorqual/launch.h"

namespace {

constexpr int kMaxVocab = 262144, kMaxRows = 65535;

struct Workspace {
  int64_t todo, rows, units, set_keys, raw_set_keys, bytes;  // where they begin; the arrivals come first
};
Workspace workspace_of(int64_t num_rows, int vocab_size) {
  const auto round_up = [](int64_t x) { return (x + 255) / 256 * 256; };
  Workspace w{};
  const int64_t num_units = num_rows * rorqual::sample_num_units(vocab_size);
  w.todo = round_up(num_rows * 4);
  w.rows = w.todo + round_up(num_rows * 4);
  w.units = w.rows + round_up(num_rows * rorqual::sample_row_bytes());
  w.set_keys = w.units + round_up(num_units * rorqual::sample_unit_bytes());
  w.raw_set_keys = w.set_keys + round_up(num_units * 128);
  w.bytes = w.raw_set_keys + round_up(num_units * 128);
  return w;
}

}  // namespace

extern "C" int rorqual_sample(const RorqualSample* a, void* stream) {
  RORQUAL_REQUIRE(a->num_rows >= 0 && a->num_rows <= kMaxRows,
                  "sample: num_rows must be in [0, 65535], got " + std::to_string(a->num_rows));
  RORQUAL_REQUIRE(a->vocab_size >= 1 && a->vocab_size <= kMaxVocab,
                  "sample: vocab_size must be in [1, 262144], got " + std::to_string(a->vocab_size));
  RORQUAL_REQUIRE(a->workspace_rows >= a->num_rows, "sample: the workspace is for " + std::to_string(a->workspace_rows) +
                                                        " rows, got " + std::to_string(a->num_rows));
  if (a->num_rows == 0) return 0;
  RORQUAL_REQUIRE(a->logits && a->workspace, "sample: logits and workspace must not be NULL");
  RORQUAL_REQUIRE(rorqual::aligned(a->workspace, 16), "sample: workspace must be 16-byte aligned");
  RORQUAL_REQUIRE(a->logits_stride >= a->vocab_size,
                  "sample: logits_stride " + std::to_string(a->logits_stride) + " is less than vocab_size " +
                      std::to_string(a->vocab_size));
  RORQUAL_REQUIRE(!a->out_logprobs || (a->out_ranks && a->out_top_ids && a->out_top_logprobs),
                  "sample: out_logprobs goes with out_ranks, out_top_ids and out_top_logprobs");
  if (a->targets) {
    RORQUAL_REQUIRE(a->out_logprobs, "sample: targets ask for out_logprobs");
    RORQUAL_REQUIRE(a->num_top >= 0 && a->num_top <= 20,
                    "sample: num_top must be in [0, 20], got " + std::to_string(a->num_top));
  } else {
    RORQUAL_REQUIRE(a->out_tokens && a->out_sound && a->slots && a->positions && a->records,
                    "sample: out_tokens, out_sound, slots, positions and records must not be NULL");
    RORQUAL_REQUIRE(rorqual::aligned(a->records, 16), "sample: records must be 16-byte aligned");
    RORQUAL_REQUIRE(a->positions_bytes == 4 || a->positions_bytes == 8,
                    "sample: positions_bytes must be 4 or 8, got " + std::to_string(a->positions_bytes));
    RORQUAL_REQUIRE(!a->active || a->active_bytes == 1 || a->active_bytes == 4,
                    "sample: active_bytes must be 1 or 4, got " + std::to_string(a->active_bytes));
    RORQUAL_REQUIRE(!a->bias == !a->states, "sample: bias goes with states");
    RORQUAL_REQUIRE(!a->bias || (rorqual::aligned(a->bias, 16) && rorqual::aligned(a->states, 16) &&
                                 a->pool_stride % 4 == 0 && a->pool_stride >= a->vocab_size),
                    "sample: bias and states must be 16-byte aligned, pool_stride a multiple of 4 of at least "
                    "vocab_size, got " + std::to_string(a->pool_stride));
    RORQUAL_REQUIRE(!a->masks || a->mask_stride >= (a->vocab_size + 31) / 32,
                    "sample: mask_stride " + std::to_string(a->mask_stride) + " is less than a bit a token");
  }
  const Workspace w = workspace_of(a->workspace_rows, a->vocab_size);
  RORQUAL_REQUIRE(a->workspace_bytes >= w.bytes, "sample: the workspace needs " + std::to_string(w.bytes) +
                                                     " bytes, got " + std::to_string(a->workspace_bytes));
  char* base = static_cast<char*>(a->workspace);
  rorqual::SampleParams p{};
  p.out_tokens = static_cast<int*>(a->out_tokens);
  p.out_sound = static_cast<uint8_t*>(a->out_sound);
  p.out_logprobs = static_cast<float*>(a->out_logprobs);
  p.out_ranks = static_cast<int*>(a->out_ranks);
  p.out_top_ids = static_cast<int*>(a->out_top_ids);
  p.out_top_logprobs = static_cast<float*>(a->out_top_logprobs);
  p.arrivals = reinterpret_cast<uint32_t*>(base);
  p.todo = reinterpret_cast<uint32_t*>(base + w.todo);
  p.rows = base + w.rows;
  p.set_keys = reinterpret_cast<uint32_t*>(base + w.set_keys);
  p.raw_set_keys = reinterpret_cast<uint32_t*>(base + w.raw_set_keys);
  p.units = base + w.units;
  p.logits = static_cast<const float*>(a->logits);
  p.slots = static_cast<const int*>(a->slots);
  p.positions = a->targets ? nullptr : a->positions;
  p.active = a->targets ? nullptr : a->active;
  p.targets = static_cast<const int*>(a->targets);
  p.records = static_cast<const int*>(a->records);
  p.bias = static_cast<const float*>(a->bias);
  p.states = static_cast<uint32_t*>(a->states);
  p.masks = static_cast<const uint32_t*>(a->masks);
  p.logits_stride = a->logits_stride;
  p.pool_stride = a->pool_stride;
  p.mask_stride = a->mask_stride;
  p.num_rows = a->num_rows;
  p.vocab_size = a->vocab_size;
  p.num_units = rorqual::sample_num_units(a->vocab_size);
  p.positions_bytes = a->positions_bytes;
  p.active_bytes = a->active_bytes;
  p.num_top = a->num_top;
  p.vectors = a->logits_stride % 4 == 0 && rorqual::aligned(a->logits, 16);
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const int scan = rorqual::from_cuda(rorqual::launch_sample_scan(p, cuda_stream), "sample");
  if (scan != 0) return scan;
  return rorqual::from_cuda(rorqual::launch_sample_select(p, cuda_stream), "sample");
}
