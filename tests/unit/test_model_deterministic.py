"""Deterministic computing: a sequence's logits have the same bits whatever else is computed, and however it is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from executor.kv_cache import LatentCache
from executor.model.batch import Form, build_batch
from executor.model.deepseek import DeepseekModel
from executor.weights import load_model
from tests.golden.checkpoints import V2, V3, YARN, random_tensors, write_checkpoint
from tests.golden.harness import Blocks, random_tokens

CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "every-expert-float32": (V3 | {"rope_parameters": YARN}, torch.float32),
    "by-expert-float32": (V2 | {"n_routed_experts": 32, "num_experts_per_tok": 2, "q_lora_rank": None}, torch.float32),
    "unmerged-float32": (V3 | {"kv_lora_rank": 200, "hidden_size": 102, "q_lora_rank": 90}, torch.float32),
    "every-expert-bfloat16": (V3, torch.bfloat16),
}
Parts = list[tuple[Sequence[int], int, torch.Tensor, Form]]


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """One thread, or as many as the test's parameter `num_threads` says."""
    callspec = getattr(request.node, "callspec", None)
    before = torch.get_num_threads()
    torch.set_num_threads(callspec.params.get("num_threads", 1) if callspec else 1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DeepseekModel]:
    made: dict[str, DeepseekModel] = {}
    for case, (config, dtype) in CASES.items():
        folder = write_checkpoint(tmp_path_factory.mktemp(case), config, random_tensors(config))
        made[case] = load_model(folder, dtype=dtype, deterministic=True)
    return made


@pytest.fixture(params=CASES)
def model(request: pytest.FixtureRequest, models: dict[str, DeepseekModel]) -> DeepseekModel:
    return models[request.param]


class Run:
    """One sequence, prompt and generated tokens given, whose logits are gathered by position."""

    def __init__(self, tokens: list[int], num_prompt: int, cache: LatentCache, blocks: Blocks) -> None:
        self.tokens, self.num_prompt = tokens, num_prompt
        self.table = blocks.take(len(tokens))
        self.computed = 0
        self.logits: dict[int, torch.Tensor] = {}

    def part(self, end: int) -> tuple[Sequence[int], int, torch.Tensor, Form]:
        form = Form.PREFILL if self.computed < self.num_prompt else Form.DECODE
        return (self.tokens[self.computed : end], self.computed, self.table, form)

    def take(self, logits: torch.Tensor, end: int) -> None:
        for row, position in zip(logits, range(self.computed, end), strict=True):
            self.logits[position] = row
        self.computed = end


def step(model: DeepseekModel, cache: LatentCache, parts: list[tuple[Run, int]]) -> None:
    """One pass that takes every (run, up to this position); all rows' logits are kept."""
    batch: Parts = [run.part(end) for run, end in parts]
    sizes = [len(tokens) for tokens, _, _, _ in batch]
    out = model.forward(build_batch(batch, range(sum(sizes))), cache)
    for (run, end), logits in zip(parts, out.logits.split(sizes), strict=True):
        run.take(logits, end)


def alone(model: DeepseekModel, tokens: list[int], num_prompt: int) -> torch.Tensor:
    """The reference: the prompt in one pass, then a token a pass, and nothing beside it."""
    cache = LatentCache(model.config, 8, dtype=model.dtype)
    run = Run(tokens, num_prompt, cache, Blocks(cache))
    step(model, cache, [(run, num_prompt)])
    for end in range(num_prompt + 1, len(tokens) + 1):
        step(model, cache, [(run, end)])
    return rows(run)


def rows(run: Run) -> torch.Tensor:
    return torch.stack([run.logits[i] for i in sorted(run.logits)])


TOKENS = random_tokens(150, seed=4)


@pytest.mark.parametrize(("num_prompt", "num_threads"), [(1, 1), (63, 1), (137, 1), (64, 2)])
def test_among_fifteen_others(model: DeepseekModel, num_prompt: int, num_threads: int) -> None:
    """Others of random lengths prefill and decode in the same passes, in a random order of rows."""
    assert torch.get_num_threads() == num_threads
    tokens = TOKENS[: num_prompt + 6]
    expected = alone(model, tokens, num_prompt)
    rng = random.Random(num_prompt)
    cache = LatentCache(model.config, 64, dtype=model.dtype)
    blocks = Blocks(cache, seed=1)
    target = Run(tokens, num_prompt, cache, blocks)
    others = []
    for i in range(15):
        length = rng.choice([1, 3, 15, 16, 17, 40, 64, 90])
        others.append(Run(random_tokens(length + 20, seed=50 + i), length, cache, blocks))
    while target.computed < len(tokens):
        parts: list[tuple[Run, int]] = []
        for run in [target, *others]:
            if run.computed >= len(run.tokens) or (run is not target and rng.random() < 0.2):
                continue
            parts.append((run, run.num_prompt if run.computed == 0 else run.computed + 1))
        rng.shuffle(parts)
        step(model, cache, parts)
    assert torch.equal(rows(target), expected)


@pytest.mark.parametrize("edges", [[64, 137], [64, 128, 137]])
def test_chunks(model: DeepseekModel, edges: list[int]) -> None:
    """Prefill in chunks with edges at multiples of 64, alone and beside another sequence."""
    expected = alone(model, TOKENS[:137], 137)
    for company in (False, True):
        cache = LatentCache(model.config, 16, dtype=model.dtype)
        blocks = Blocks(cache, seed=2)
        run = Run(TOKENS[:137], 137, cache, blocks)
        other = Run(random_tokens(300, seed=9), 5, cache, blocks)
        for end in edges:
            parts = [(run, end)]
            if company:
                parts.insert(0, (other, other.num_prompt if other.computed == 0 else other.computed + 1))
            step(model, cache, parts)
        assert torch.equal(rows(run), expected)


@pytest.mark.parametrize("num_prompt", [3, 100])
def test_computed_again(model: DeepseekModel, num_prompt: int) -> None:
    """A resume: the prompt by the prefill form and all generated tokens in one decode segment, in one pass; then on."""
    tokens = TOKENS[: num_prompt + 25]
    expected = alone(model, tokens, num_prompt)
    cache = LatentCache(model.config, 8, dtype=model.dtype)
    table = Blocks(cache, seed=3).take(len(tokens))
    made = num_prompt + 21
    parts: Parts = [
        (tokens[:num_prompt], 0, table, Form.PREFILL),
        (tokens[num_prompt:made], num_prompt, table, Form.DECODE),
    ]
    logits = [model.forward(build_batch(parts, range(made)), cache).logits]
    for i in range(made, len(tokens)):
        logits.append(model.forward(build_batch([(tokens[i : i + 1], i, table, Form.DECODE)]), cache).logits)
    assert torch.equal(torch.cat(logits), expected)


def test_cached_prefix(model: DeepseekModel) -> None:
    """A second request takes up the first one's blocks up to a chunk edge."""
    hit = 64
    expected = alone(model, TOKENS[:140], 140)
    cache = LatentCache(model.config, 16, dtype=model.dtype)
    blocks = Blocks(cache, seed=4)
    first = Run(TOKENS[:hit] + random_tokens(30, seed=8), hit + 30, cache, blocks)
    step(model, cache, [(first, hit + 30)])
    second = Run(TOKENS[:140], 140, cache, blocks)
    second.table = torch.cat((first.table[: hit // 64], second.table[hit // 64 :]))
    second.computed = hit
    step(model, cache, [(second, 140)])
    assert torch.equal(rows(second), expected[hit:])


def test_prefill_must_start_at_an_edge(model: DeepseekModel) -> None:
    cache = LatentCache(model.config, 4, dtype=model.dtype)
    table = Blocks(cache).take(100)
    with pytest.raises(ValueError, match="multiple of 64"):
        model.forward(build_batch([(TOKENS[10:20], 10, table, Form.PREFILL)]), cache)
