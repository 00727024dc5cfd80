"""The GPU's model, with each kernel's torch reference in its place, against the executor's own model in float32."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from executor.gpu.backend import GpuBackend
from executor.kv_cache import LatentCache
from executor.memory import MemoryMeter
from executor.model.batch import Form, build_batch
from executor.model.config import ModelConfig, parse_config
from executor.model.deepseek import DeepseekModel
from executor.order_loop import StepLimits
from executor.orders import read_batch
from executor.weights import build_model
from executor.weights.random_weights import RandomWeights
from executor.weights.source import TensorSource, open_source
from rorqual.core.config import ExecutorConfig
from rorqual.v1 import executor_pb2
from tests.golden.checkpoints import V2, V3, YARN
from tests.support.executor_fakes import Received, admit, prefill

TINY = Path(__file__).resolve().parents[2] / "models" / "tiny"
CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 211,
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_nextn_predict_layers": 0,
}
V2_LITE = {"q_lora_rank": None, "n_shared_experts": 2, "topk_method": "greedy", "rope_scaling": YARN}


class Small:
    """A backend on a CPU, driven without its thread."""

    def __init__(self, source: TensorSource, *, deterministic: bool = False) -> None:
        config = ExecutorConfig(max_num_seqs=4, max_num_batched_tokens=132, deterministic=deterministic)
        backend = GpuBackend(source, config, 512)
        backend.kv_room(config, MemoryMeter.of(CPU))
        cache = LatentCache(backend.config, 24, dtype=torch.bfloat16)
        cache.fill_(float("nan"))
        limits = StepLimits(
            vocab_size=backend.config.vocab_size,
            max_model_len=512,
            max_num_seqs=4,
            max_num_batched_tokens=132,
            deterministic=deterministic,
        )
        self.loop = backend.make_loop(cache, limits, traced=False)
        self.received = Received()
        self.batch_ids = itertools.count(1)

    def order(self, *orders: executor_pb2.Order) -> None:
        batch = executor_pb2.OrderBatch(batch_id=next(self.batch_ids), orders=list(orders))
        self.loop.submit(read_batch(batch))

    def run(self) -> Received:
        while self.loop.run_once():
            pass
        report = self.loop.outbox.take()
        assert report is not None
        self.received.add(report)
        return self.received


def random_source(raw: dict[str, object]) -> tuple[RandomWeights, ModelConfig]:
    config = parse_config(raw, "test")
    return RandomWeights(config, seed=3, dtype=torch.bfloat16, device=CPU), config


def oracle_logits(model: DeepseekModel, history: list[int]) -> torch.Tensor:
    """float32 [len(history), vocab]."""
    cache = LatentCache(model.config, 8, dtype=torch.float32)
    batch = build_batch([(history, 0, torch.arange(8), Form.PREFILL)], list(range(len(history))))
    return model.forward(batch, cache).logits


def shortfall(model: DeepseekModel, prompt: list[int], made: list[int]) -> torch.Tensor:
    """By how much each generated token's logit misses the largest, in units of the row's standard deviation."""
    logits = oracle_logits(model, prompt + made)[len(prompt) - 1 : -1]
    own = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
    return (logits.max(dim=1).values - own) / logits.std(dim=1)


@pytest.mark.parametrize(
    "raw",
    [V3 | SIZES, V2 | SIZES | V2_LITE, V3 | SIZES | {"rope_interleave": False, "attention_bias": True}],
    ids=["v3", "v2-lite", "half-and-half rope, biases"],
)
def test_tokens_are_the_float32_models_choice(raw: dict[str, object]) -> None:
    source, config = random_source(raw)
    model = build_model(RandomWeights(config, seed=3, dtype=torch.float32, device=CPU))
    small = Small(source)
    prompts = [[(7 * i + s) % 211 for i in range(n)] for s, n in enumerate((100, 3, 65), 1)]
    small.order(
        admit(1, prompts[0], [5, 0, 9], max_total=106),
        prefill(1, prompts[0], 0, 64),
        prefill(1, prompts[0], 64, 100),
        admit(2, prompts[1], [7], max_total=9),
        prefill(2, prompts[1]),
        admit(3, prompts[2], [1, 2], max_total=71),
        prefill(3, prompts[2]),
    )
    received = small.run()
    for seq_id, prompt in enumerate(prompts, 1):
        made = received[seq_id].token_ids
        assert len(made) == 6
        assert not received[seq_id].fault
        # BF16 holds 8 bits: over three layers logits are off by a few per cent of their deviation.
        assert shortfall(model, prompt, made).max() < 0.15


def test_the_embedded_model_says_what_it_says_on_a_cpu() -> None:
    prompt = [(11 * i + 5) % 4000 for i in range(40)]
    with open_source(TINY, dtype=torch.bfloat16, device=CPU) as source:
        small = Small(source)
    with open_source(TINY, dtype=torch.float32, device=CPU) as source:
        model = build_model(source)
    small.order(admit(1, prompt, [0, 1], max_total=52), prefill(1, prompt))
    made = small.run()[1].token_ids
    assert len(made) == 12
    assert shortfall(model, prompt, made).max() < 0.15


def test_log_probabilities_are_the_models() -> None:
    source, config = random_source(V3 | SIZES)
    model = build_model(RandomWeights(config, seed=3, dtype=torch.float32, device=CPU))
    small = Small(source)
    prompt = [(7 * i) % 211 for i in range(90)]
    small.order(
        admit(1, prompt, [5, 0], max_total=94, logprobs=3, prompt_logprobs=2),
        prefill(1, prompt, 0, 64),
        prefill(1, prompt, 64, 90),
    )
    entry = small.run()[1]
    history = prompt + entry.token_ids
    want = oracle_logits(model, history).log_softmax(dim=1)
    assert len(entry.prompt_logprobs) == 89
    assert len(entry.logprobs) == 4
    for position, item in enumerate(entry.prompt_logprobs + entry.logprobs, 1):
        assert item.token_id == history[position]
        assert item.logprob == pytest.approx(float(want[position - 1, history[position]]), abs=0.1)
        assert len(item.top_logprobs) == (2 if position < 90 else 3)
        assert item.top_logprobs[0] == pytest.approx(float(want[position - 1].max()), abs=0.1)


def test_deterministic_tokens_survive_a_resume_and_company() -> None:
    source, _ = random_source(V3 | SIZES)
    prompt, other = [(7 * i) % 211 for i in range(70)], [(5 * i) % 211 for i in range(33)]
    alone = Small(source, deterministic=True)
    alone.order(admit(1, prompt, [0, 1], max_total=90, temperature=1.0, seed=5), prefill(1, prompt))
    made = alone.run()[1].token_ids
    resumed = Small(source, deterministic=True)
    history = prompt + made[:7]
    resumed.order(
        admit(2, other, [6, 7], max_total=60),
        prefill(2, other),
        admit(1, history, [0, 1], num_prompt=70, max_total=90, temperature=1.0, seed=5),
        prefill(1, history, 0, 64),
        prefill(1, history, 64, 77),
    )
    assert resumed.run()[1].token_ids == made[7:]


def test_penalties_count_what_was_generated() -> None:
    source, _ = random_source(V3 | SIZES)
    small = Small(source)
    prompt = [3, 4, 5]
    small.order(admit(1, prompt, [0], max_total=33, frequency_penalty=2.0, presence_penalty=2.0), prefill(1, prompt))
    made = small.run()[1].token_ids
    assert len(set(made)) == len(made)  # the model's logits lie within less than 4 of each other
    biased = Small(source)
    biased.order(admit(1, prompt, [0], max_total=13, logit_bias={17: 100.0}), prefill(1, prompt))
    assert biased.run()[1].token_ids == [17] * 10
