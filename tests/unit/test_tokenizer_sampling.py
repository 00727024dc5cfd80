"""Sampling parameters: impossible ones refused by field, unset ones filled from the checkpoint."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rorqual.core.errors import InvalidRequestError
from rorqual.v1 import common_pb2, text_pb2
from services.tokenizer.sampling import check_options, filled_sampling


def options(sampling: dict[str, Any] | None = None, **fields: Any) -> text_pb2.TextOptions:
    return text_pb2.TextOptions(sampling=common_pb2.SamplingParams(**(sampling or {})), **fields)


@pytest.mark.parametrize(
    ("bad", "field", "reason"),
    [
        (options({"temperature": -0.1}), "sampling.temperature", "INVALID_SAMPLING"),
        (options({"temperature": math.nan}), "sampling.temperature", "INVALID_SAMPLING"),
        (options({"temperature": math.inf}), "sampling.temperature", "INVALID_SAMPLING"),
        (options({"top_p": 0.0}), "sampling.top_p", "INVALID_SAMPLING"),
        (options({"top_p": 1.1}), "sampling.top_p", "INVALID_SAMPLING"),
        (options({"min_p": -0.1}), "sampling.min_p", "INVALID_SAMPLING"),
        (options({"presence_penalty": 2.1}), "sampling.presence_penalty", "INVALID_SAMPLING"),
        (options({"frequency_penalty": -2.1}), "sampling.frequency_penalty", "INVALID_SAMPLING"),
        (options({"repetition_penalty": 0.0}), "sampling.repetition_penalty", "INVALID_SAMPLING"),
        (options({"logprobs": 21}), "sampling.logprobs", "INVALID_SAMPLING"),
        (options({"prompt_logprobs": 21}), "sampling.prompt_logprobs", "INVALID_SAMPLING"),
        (options({"logit_bias": {5: 100.5}}), "sampling.logit_bias", "INVALID_SAMPLING"),
        (options({"logit_bias": {8192: 1.0}}), "sampling.logit_bias", "TOKEN_OUT_OF_RANGE"),
        (options({"stop_token_ids": [1, 8192]}), "sampling.stop_token_ids", "TOKEN_OUT_OF_RANGE"),
        (options({"stop_token_ids": range(300)}), "sampling.stop_token_ids", "INVALID_STOP"),
        (options({"min_tokens": 5}, max_tokens=4), "sampling.min_tokens", "INVALID_SAMPLING"),
        (options(max_tokens=0), "max_tokens", "INVALID_SAMPLING"),
        (options(num_choices=129), "num_choices", "INVALID_SAMPLING"),
        (options(stop=["a"] * 17), "stop", "INVALID_STOP"),
        (options(stop=["a", ""]), "stop[1]", "INVALID_STOP"),
        (options(stop=["é" * 513]), "stop[0]", "INVALID_STOP"),
    ],
)
def test_refused_by_field(bad: text_pb2.TextOptions, field: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_options(bad, vocab_size=8192, allow_no_tokens=False)
    assert (caught.value.field, caught.value.reason) == (field, reason)
    assert field.rsplit(".", maxsplit=1)[-1] in caught.value.message or field == "num_choices"


def test_edges_are_taken() -> None:
    good = options(
        {
            "temperature": 0.0,
            "top_p": 1.0,
            "min_p": 0.0,
            "presence_penalty": -2.0,
            "frequency_penalty": 2.0,
            "repetition_penalty": 0.01,
            "logprobs": 20,
            "logit_bias": {8191: -100.0},
            "min_tokens": 4,
        },
        max_tokens=4,
        num_choices=128,
        stop=["a" * 1024] * 16,
    )
    check_options(good, vocab_size=8192, allow_no_tokens=False)
    check_options(options(max_tokens=0), vocab_size=8192, allow_no_tokens=True)
    check_options(text_pb2.TextOptions(), vocab_size=8192, allow_no_tokens=False)


def test_defaults_fill_what_is_unset_only() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    filled = filled_sampling(options({"temperature": 0.0, "stop_token_ids": [9, 5]}), defaults, (1, 5), 7)
    assert filled.temperature == 0.0
    assert filled.top_p == pytest.approx(0.95)
    assert (filled.top_k, filled.seed) == (20, 7)
    assert not filled.HasField("min_p")
    assert list(filled.stop_token_ids) == [1, 5, 9]


def test_ignore_eos_leaves_only_the_callers_stop_tokens() -> None:
    assert list(filled_sampling(options({"stop_token_ids": [9]}, ignore_eos=True), {}, (1,), 7).stop_token_ids) == [9]
