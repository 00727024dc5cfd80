"""Our float32 model against transformers' on random weights: every routing, rope and projection of the family."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.model.deepseek import DeepseekModel
from executor.weights import load_model

from .checkpoints import V2, V3, YARN
from .harness import (
    Served,
    decode_logits,
    greedy,
    oracle,
    prefill_in_chunks,
    prefill_logits,
    random_tokens,
    save,
    serve,
)

TOLERANCE = 3e-5
"""Of logits whose largest is about 4. Float32 rounds at 6e-8; sums over up to 88 terms in another order, three layers
deep, differ by a few hundred roundings at worst. Measured over all cases: 5e-6 at most."""

COARSE_EPS = {"rms_norm_eps": 0.01}
"""Large enough to show which norms take it: those of the latents have 1e-6 whatever the configuration says."""

CASES: dict[str, dict[str, Any]] = {
    "v3-qlora-groups-yarn": V3 | {"rope_parameters": YARN},
    "v3-full-q-one-group": V3 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "v3-two-dense-two-shared-bias": V3
    | {"first_k_dense_replace": 2, "n_shared_experts": 2, "attention_bias": True, "num_hidden_layers": 4}
    | COARSE_EPS,
    "v3-rope-in-halves": V3 | {"rope_interleave": False},
    "v3-many-experts": V3 | {"n_routed_experts": 32, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
    "v2-lite-greedy": V2 | {"q_lora_rank": None, "n_shared_experts": 2} | COARSE_EPS,
    "v2-group-limited-yarn": V2
    | {
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "v2-yarn-without-mscale": V2 | {"rope_parameters": {k: v for k, v in YARN.items() if not k.startswith("mscale")}},
}
LENGTH = 67  # over a block's edge, and prime


@dataclass(frozen=True)
class Pair:
    oracle: Any
    ours: DeepseekModel
    tokens: list[int]
    logits: torch.Tensor  # the oracle's, [LENGTH, vocab]


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    model = oracle(CASES[request.param])
    folder = save(model, tmp_path_factory.mktemp(request.param))
    tokens = random_tokens(LENGTH, seed=1)
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0]
    return Pair(model, load_model(folder, dtype=torch.float32), tokens, logits)


def assert_same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=0, atol=TOLERANCE)
    assert torch.equal(ours.argmax(-1), expected.argmax(-1))


def test_whole_prompt(pair: Pair) -> None:
    assert pair.logits.abs().max() > 1  # else the tolerance says nothing
    assert_same(prefill_logits(pair.ours, pair.tokens, [LENGTH]), pair.logits)


def test_token_by_token(pair: Pair) -> None:
    assert_same(decode_logits(pair.ours, pair.tokens), pair.logits)


def test_every_chunk_size(pair: Pair) -> None:
    """Sixty-six copies of the prompt, cut in chunks of 1, 2, … 66, share the passes."""
    for logits in prefill_in_chunks(pair.ours, pair.tokens, range(1, LENGTH)):
        assert_same(logits, pair.logits)


def test_sequences_join_and_leave(pair: Pair) -> None:
    """Nine requests share batches that mix prefill and decode; blocks are reused while others run."""
    lengths = [(5, 12), (67, 4), (1, 20), (64, 9), (130, 6), (63, 3), (65, 8), (40, 10), (9, 15)]
    sequences = [
        Served(random_tokens(num_prompt, seed=10 + i), num_tokens, joins=i * 2, chunks=[7, 64, 1, 30])
        for i, (num_prompt, num_tokens) in enumerate(lengths)
    ]
    mixed = serve(pair.ours, sequences, num_blocks=14)
    assert mixed > 5
    for seq in sequences:
        assert seq.made == greedy(pair.oracle, seq.prompt, seq.num_tokens)


@pytest.mark.parametrize("max_shard_size", ["20KB", "100KB"])
def test_shards_through_the_index(max_shard_size: str, tmp_path: Path) -> None:
    model = oracle(CASES["v3-qlora-groups-yarn"])
    save(model, tmp_path, max_shard_size=max_shard_size)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = random_tokens(30, seed=2)
    with torch.inference_mode():
        expected = model(torch.tensor([tokens])).logits[0]
    assert_same(prefill_logits(load_model(tmp_path, dtype=torch.float32), tokens, [30]), expected)
