"""Numbers at the edges of what the wire carries: a sequence's record has them right, or the sequence faults alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from executor.orders import read_sampling
from executor.sampler import Sampler
from rorqual.kernels.reference_sampling import RECORD
from rorqual.kernels.sampling import pack_record
from rorqual.v1 import common_pb2
from tests.support.executor_fakes import VOCAB, Driven, admit, prefill
from tests.support.gpu_fakes import DrivenGpu

UINT32S = [0, 1, 20, 21, VOCAB - 1, VOCAB, 2**31 - 1, 2**31, 2**32 - 1]
UINT64S = [0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
_TINY, _MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)
_DENORMAL = float(np.finfo(np.float32).smallest_subnormal)
_SIZES = [0.0, _DENORMAL, _TINY, 1e-5, 0.5, 1.0, 1.0000001192092896, 100.0, _MAX, math.inf]
FLOATS = [*_SIZES, *(-size for size in _SIZES), math.nan]
EDGES: dict[str, list[Any]] = {
    "seed": UINT64S,
    **dict.fromkeys(("top_k", "min_tokens", "logprobs", "prompt_logprobs"), UINT32S),
    "stop_token_ids": [[i] for i in UINT32S] + [UINT32S],
    "logit_bias": [{token_id: 1.0} for token_id in UINT32S] + [{3: value} for value in FLOATS],
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), FLOATS
    ),
}
PROMPT = [5, 6, 7, 8, 9, 5, 6]
# With each of them: where nothing is drawn most parameters are not looked at, and where nothing is cut neither.
BESIDE: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 3, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "stop_token_ids": [1], "min_tokens": 2},
]


def means_nothing(name: str, value: Any) -> bool:
    """Whether the contract (common.proto) excludes it beyond a mere range."""
    values = list(value.values()) if name == "logit_bias" else value if name == "stop_token_ids" else [value]
    if not all(math.isfinite(v) for v in values):
        return True
    match name:
        case "temperature":
            return bool(value < 0)
        case "top_p" | "min_p":
            return not 0 <= value <= 1
        case "repetition_penalty":
            return not 1e-9 <= value <= 1e9
        case "presence_penalty" | "frequency_penalty" | "logit_bias":
            return any(abs(v) > 1e9 for v in values)
        case "logprobs" | "prompt_logprobs":
            return bool(value > 20)
    return False


@pytest.mark.parametrize("make", [Driven, DrivenGpu])
@pytest.mark.parametrize("name", EDGES)
def test_an_edge_is_right_or_faults_alone(make: Any, name: str) -> None:
    d = make(max_num_seqs=16, max_num_batched_tokens=512)
    innocent = list(range(10))
    expected = d.model.continuation(innocent, 12)
    for beside in BESIDE:
        d.reset()
        d.order(admit(0, innocent, [0], max_total=22), prefill(0, innocent))
        cases = list(enumerate(EDGES[name], 1))
        for seq_id, value in cases:
            spec = {**beside, name: value}
            d.order(admit(seq_id, PROMPT, [seq_id], max_total=len(PROMPT) + 6, **spec), prefill(seq_id, PROMPT))
        d.run()
        r = d.report()
        assert not d.errors
        assert r[0].token_ids == expected
        for seq_id, value in cases:
            mine = r[seq_id]
            assert bool(mine.finish) != bool(mine.fault), (name, value)
            if means_nothing(name, value):
                assert (mine.reason, mine.token_ids) == ("INTERNAL", []), (name, value)
                assert name.split("_", maxsplit=1)[0] in mine.fault
            else:
                assert mine.token_ids, (name, value, mine.fault)
                assert all(0 <= token_id < VOCAB for token_id in mine.token_ids)
                # (A row's bits do not depend on the rows beside it: that it is right is that nothing was cut off it.)
                if name == "min_tokens" and value >= 6:
                    assert len(mine.token_ids) == 6
                if name == "top_k" and value >= VOCAB:
                    assert mine.token_ids == r[cases[0][0]].token_ids  # as with 0: off


@pytest.mark.parametrize("name", ["seed", "top_k", "min_tokens", "choice_index", "logprobs"])
def test_both_records_hold_the_edges_of_counts(name: str) -> None:
    sampler = Sampler(VOCAB, 1)
    for value in UINT64S if name == "seed" else UINT32S:
        choice_index = value if name == "choice_index" else 0
        given = {} if name == "choice_index" else {name: value}
        spec = read_sampling(common_pb2.SamplingParams(**given))
        record = pack_record(spec, choice_index, num_prompt_tokens=7).view(RECORD)[0]
        sampler.set_row(0, spec, choice_index)
        match name:
            case "seed":
                assert int(record["seed"]) == int(sampler._seed[0]) == value
            case "choice_index":
                assert int(record["choice_index"]) == int(sampler._choice_index[0]) == value
            case "top_k":
                assert int(record["top_k"]) == min(value, 2**31 - 1)
                assert int(sampler._top_k[0]) == (value if value < VOCAB else 0)
            case "min_tokens":
                assert int(record["min_tokens"]) == min(value, 2**31 - 1)
            case "logprobs":
                assert int(record["num_logprobs"]) == min(value, 20)


def test_both_records_hold_the_edges_of_floats() -> None:
    sampler = Sampler(VOCAB, 1)
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        for value in FLOATS:
            spec = read_sampling(common_pb2.SamplingParams(**{name: value}))
            record = pack_record(spec, 0).view(RECORD)[0]
            sampler.set_row(0, spec, 0)
            sent = np.float32(value)
            if name == "temperature" and spec.temperature < 1e-5:
                sent = np.float32(0.0)
            np.testing.assert_equal(np.float32(record[name]), sent)


def test_a_logit_that_its_temperature_makes_infinite_is_not_sound() -> None:
    sampler = Sampler(VOCAB, 2)
    for row in range(2):
        spec = read_sampling(common_pb2.SamplingParams(temperature=0.5, top_k=3, seed=1))
        sampler.set_row(row, spec, 0)
    logits = torch.zeros(2, VOCAB)
    logits[0, 5], logits[1, 6] = 2e38, 1e38
    tokens, sound = sampler.sample(logits, np.array([4, 4]))
    assert sound.tolist() == [False, True]
    assert tokens[1] == 6
