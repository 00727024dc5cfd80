"""The numpy form of the sampling kernels, against the CPU sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from executor.logprobs import token_logprobs
from executor.random_numbers import uniforms
from executor.sampler import Adjustment, LogitAdjuster, Sampler, SamplingSpec
from rorqual.kernels import reference_sampling as reference
from rorqual.kernels import sampling

CPU = torch.device("cpu")
SPECS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_p": 0.9},
    {"top_k": 7},
    {"min_p": 0.1},
    {"temperature": 1.7, "top_p": 0.8, "top_k": 30, "min_p": 0.02},
    {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"repetition_penalty": 1.5, "logit_bias": {3: 4.0, 10: -100.0}},
    {"temperature": 0.0, "logit_bias": {5: 50.0}, "stop_token_ids": (5, 9), "min_tokens": 3},
]


def test_records_are_64_bytes_and_the_columns_are_views_of_them() -> None:
    assert reference.RECORD.itemsize == 64
    columns = sampling.make_sampling_columns(3, CPU)
    assert columns.top_p.tolist() == [1.0] * 3
    assert columns.num_logprobs.tolist() == columns.adjust_idx.tolist() == columns.mask_idx.tolist() == [-1] * 3
    spec = SamplingSpec(
        temperature=0.5, top_p=0.25, top_k=9, min_p=0.125, seed=2**64 - 5, min_tokens=4, logprobs=3,
        presence_penalty=0.5, frequency_penalty=-1.0, repetition_penalty=2.0,
    )  # fmt: skip
    packed = sampling.pack_record(spec, 6, num_prompt_tokens=11, adjust_idx=1, mask_idx=2)
    assert packed.dtype == np.int32
    assert packed.shape == (sampling.RECORD_WORDS,)
    columns.records[1] = torch.from_numpy(packed)
    found = {name: getattr(columns, name)[1].item() for name in reference.RECORD.names or () if name != "unused"}
    assert found == {
        "temperature": 0.5, "top_p": 0.25, "top_k": 9, "min_p": 0.125, "seed": -5, "choice_index": 6,
        "num_logprobs": 3, "adjust_idx": 1, "mask_idx": 2, "num_prompt_tokens": 11, "min_tokens": 4,
        "presence_penalty": 0.5, "frequency_penalty": -1.0, "repetition_penalty": 2.0,
    }  # fmt: skip


def test_random_numbers_are_the_samplers() -> None:
    for seed, choice, position in ((0, 0, 0), (2**64 - 1, 2**32 - 1, 2**40 + 3), (123456789, 2, 77)):
        assert reference.uniform(seed, choice, position) == uniforms(seed, choice, position, 1)[0]


@pytest.mark.parametrize("vocab_size", [12, 300])
def test_tokens_are_the_samplers(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    specs = [SamplingSpec(seed=int(rng.integers(2**63)), **options) for options in SPECS for _ in range(6)]
    num_rows, num_prompt = len(specs), 4
    prompts = rng.integers(0, vocab_size, (num_rows, num_prompt))
    columns = sampling.make_sampling_columns(num_rows, CPU)
    pool = sampling.AdjustPool(num_rows, vocab_size, CPU)
    workspace = sampling.make_sampling_workspace(num_rows, vocab_size, CPU)
    sampler, adjusters = Sampler(vocab_size, num_rows), []
    for r, spec in enumerate(specs):
        sampler.set_row(r, spec, 1)
        adjusters.append(LogitAdjuster(spec, vocab_size))
        adjusters[r].observe(prompts[r], num_prompt)
        adjust_idx = r if sampling.needs_adjustment(spec) else -1
        if adjust_idx >= 0:
            pool.set_row(r, spec, prompts[r])
        columns.records[r] = torch.from_numpy(
            sampling.pack_record(spec, 1, num_prompt_tokens=num_prompt, adjust_idx=adjust_idx)
        )
    tokens, sound = torch.zeros(num_rows, dtype=torch.int32), torch.zeros(num_rows, dtype=torch.uint8)
    for step in range(5):
        logits = torch.from_numpy(rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32))
        positions = torch.full((num_rows,), num_prompt + step)
        sampling.sample(
            logits, torch.arange(num_rows, dtype=torch.int32), positions, None, columns, pool, None, workspace,
            tokens, sound,
        )  # fmt: skip
        adjustments = [Adjustment(r, a, step) for r, a in enumerate(adjusters) if a.is_active(step)]
        want, want_sound = sampler.sample(logits, positions.numpy(), adjustments)
        assert tokens.tolist() == want.tolist()
        assert sound.tolist() == want_sound.tolist()
        for r, token in enumerate(want.tolist()):
            adjusters[r].observe([token])


def test_masked_tokens_are_impossible_and_unsound_rows_have_token_zero() -> None:
    vocab_size = 70
    columns, workspace = sampling.make_sampling_columns(3, CPU), sampling.make_sampling_workspace(3, vocab_size, CPU)
    mask = sampling.MaskPool(2, vocab_size, CPU)
    mask.set_row(0, np.array([0, 1 << 5, 0], np.int32))
    mask.set_row(1, np.zeros(3, np.int32))
    columns.mask_idx[:2] = torch.tensor([0, 1], dtype=torch.int32)
    logits = torch.zeros((3, vocab_size))
    logits[2, 4] = torch.nan
    tokens, sound = torch.full((3,), -1, dtype=torch.int32), torch.full((3,), 9, dtype=torch.uint8)
    slots, positions = torch.arange(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    sampling.sample(logits, slots, positions, None, columns, None, mask, workspace, tokens, sound)
    assert tokens.tolist() == [37, 0, 0]
    assert sound.tolist() == [1, 0, 0]


def test_logprobs_are_the_samplers() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 3, (6, 90)).astype(np.float32)
    targets = rng.integers(0, 90, 6)
    out, workspace = sampling.make_logprob_buffers(6, CPU), sampling.make_sampling_workspace(6, 90, CPU)
    sampling.prompt_logprobs(torch.from_numpy(logits), torch.from_numpy(targets.astype(np.int32)), 4, workspace, out)
    for r, want in enumerate(token_logprobs(logits, targets, 4)):
        assert out.ranks[r] == want.rank
        assert out.top_ids[r].tolist() == [*want.top_token_ids, *[-1] * 16]
        assert out.logprobs[r].item() == pytest.approx(want.logprob, abs=1e-5)
        assert out.top_logprobs[r, :4].tolist() == pytest.approx(want.top_logprobs, abs=1e-5)


def test_what_sample_refuses() -> None:
    columns, workspace = sampling.make_sampling_columns(2, CPU), sampling.make_sampling_workspace(2, 8, CPU)
    good: dict[str, Any] = {
        "logits": torch.zeros((2, 8)), "slots": torch.zeros(2, dtype=torch.int32),
        "positions": torch.zeros(2, dtype=torch.int64), "active": None, "columns": columns, "adjust": None,
        "mask": None, "workspace": workspace, "out_tokens": torch.zeros(2, dtype=torch.int32),
        "out_sound": torch.zeros(2, dtype=torch.uint8),
    }  # fmt: skip
    sampling.sample(**good)
    for name, value, message in (
        ("logits", torch.zeros((2, 8), dtype=torch.bfloat16), "logits: needs torch.float32"),
        ("slots", torch.zeros(3, dtype=torch.int32), r"slots: needs shape \[2\], got \[3\]"),
        ("positions", torch.zeros(2), "positions: needs torch.int32 or torch.int64"),
        ("active", torch.zeros(2), "active: needs torch.uint8, torch.bool or torch.int32"),
        ("adjust", sampling.AdjustPool(1, 9, CPU), "adjust: is for a vocabulary of 9, the logits have 8"),
        ("out_tokens", torch.zeros(1, dtype=torch.int32), "out_tokens: needs 2 rows, got 1"),
        ("workspace", sampling.make_sampling_workspace(1, 8, CPU), "workspace: is for 1 rows of 8, got 2 of 8"),
        ("logprobs", sampling.make_logprob_buffers(1, CPU), "logprobs: needs 2 rows, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            sampling.sample(**{**good, name: value})
