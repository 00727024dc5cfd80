"""The sampler against its definition, row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.logprobs import token_logprobs
from executor.random_numbers import philox_4x32_10, uniforms
from executor.sampler import Adjustment, LogitAdjuster, Sampler, SamplingSpec


def choose(
    logits: torch.Tensor, specs: list[SamplingSpec], positions: list[int], choices: list[int] | None = None
) -> list[int]:
    sampler = Sampler(logits.shape[1], max(len(specs), 1))
    for row, spec in enumerate(specs):
        sampler.set_row(row, spec, choices[row] if choices else 0)
    tokens, sound = sampler.sample(logits, np.array(positions))
    assert sound.all()
    return [int(t) for t in tokens]


def reference(logits: torch.Tensor, spec: SamplingSpec, position: int, choice: int = 0) -> int:
    """Steps 2 to 4 of the definition, word by word."""
    x = logits.double()
    if spec.temperature < 1e-5:
        return int(logits.numpy().argmax())
    p = torch.softmax((x - x.max()) / np.float32(spec.temperature), -1).float().double().numpy()
    order = np.lexsort((np.arange(p.size), -p))
    if spec.top_k:
        order = order[: spec.top_k]
    if spec.top_p < 1.0:
        whole = p[order].sum() if spec.top_k else 1.0
        keep = int((np.cumsum(p[order]) < spec.top_p * whole).sum()) + 1
        order = order[:keep]
    order = order[p[order] >= spec.min_p * p.max()]
    ids = np.sort(order)
    running = np.cumsum(p[ids])
    u = uniforms(spec.seed, choice, position, 1)[0]
    return int(ids[min(int((running <= u * running[-1]).sum()), ids.size - 1)])


def test_philox_known_vectors() -> None:
    """From Random123's kat_vectors (philox4x32-10)."""
    cases = [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ]
    for counter, key, expected in cases:
        words = tuple(np.array([word], np.uint64) for word in counter)
        got = philox_4x32_10((words[0], words[1], words[2], words[3]), key)
        assert tuple(int(word[0]) for word in got) == expected


def test_random_numbers_are_a_function_of_seed_choice_and_position() -> None:
    # Fixed for ever: a resume on another version must draw the same.
    assert uniforms(0, 0, 0, 2).tolist() == [0.39904647231489565, 0.9722412032044762]
    assert uniforms(2**64 - 1, 3, 1000, 1).tolist() == [0.20791883947301382]
    assert uniforms(7, 2, 64, 64)[5] == uniforms(7, 2, 69, 1)[0]
    assert len({uniforms(s, c, p, 1)[0] for s in (1, 2**32) for c in (0, 1) for p in (0, 2**31, 5)}) == 12
    many = uniforms(5, 0, 0, 100_000)
    assert 0 <= many.min() < many.max() < 1
    assert abs(many.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.01


SPEC = st.builds(
    SamplingSpec,
    temperature=st.sampled_from([0.0, 0.1, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
    top_k=st.sampled_from([0, 1, 5, 40, 300, 10**6]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**64 - 1),
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_row_follows_the_definition_and_is_alone(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([2, 97, 128, 1000, 8192]))
    rows = data.draw(st.integers(1, 6))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    scale = data.draw(st.sampled_from([0.0, 0.5, 4.0, 30.0]))
    x = (rng.standard_normal((rows, vocab)) * scale).astype(np.float32)
    if data.draw(st.booleans()):
        x = np.round(x)  # ties
    logits = torch.from_numpy(x)
    specs = [data.draw(SPEC) for _ in range(rows)]
    positions = [data.draw(st.integers(1, 2**20)) for _ in range(rows)]
    together = choose(logits, specs, positions)
    order = rng.permutation(rows)
    shuffled = choose(logits[torch.from_numpy(order)], [specs[i] for i in order], [positions[i] for i in order])
    assert [together[i] for i in order] == shuffled
    for i in range(rows):
        assert choose(logits[i : i + 1], [specs[i]], [positions[i]]) == [together[i]]
        expected = reference(logits[i], specs[i], positions[i])
        if together[i] != expected:  # the reference's softmax has other last bits: an edge must be very near
            _assert_near_an_edge(logits[i], specs[i], positions[i], together[i])


def _assert_near_an_edge(logits: torch.Tensor, spec: SamplingSpec, position: int, token: int) -> None:
    """A slightly other u or top_p would give `token`."""
    x = logits.double()
    p = torch.softmax((x - x.max()) / np.float32(spec.temperature), -1).numpy()
    order = np.lexsort((np.arange(p.size), -p))
    u = uniforms(spec.seed, 0, position, 1)[0]
    if spec.top_k:
        order = order[: spec.top_k]
    whole = p[order].sum() if spec.top_k else 1.0
    keep = int((np.cumsum(p[order]) < spec.top_p * whole).sum()) + 1 if spec.top_p < 1 else order.size
    for count in {max(keep - 1, 1), keep, keep + 1}:
        kept = order[:count]
        kept = np.sort(kept[p[kept] >= spec.min_p * p.max() * (1 - 1e-5)])
        running = np.cumsum(p[kept]) / p[kept].sum()
        if token in kept:
            at = int(np.flatnonzero(kept == token)[0])
            if (running[at - 1] if at else 0.0) - 1e-5 <= u <= running[at] + 1e-5:
                return
    raise AssertionError(f"token {token} is not what the definition allows at u = {u}")


@pytest.mark.parametrize("kwargs", [{}, {"top_p": 0.9}, {"top_k": 8}, {"min_p": 0.2}])
def test_frequencies_are_those_of_the_distribution(kwargs: dict[str, Any]) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5, 1.5, -3.0, 0.1, 0.2, -0.5]])
    sampler = Sampler(10, 1)
    sampler.set_row(0, SamplingSpec(temperature=0.8, seed=3, **kwargs), 0)
    n = 2000
    counts = np.zeros(10)
    for position in range(n):
        counts[sampler.sample(logits, np.array([position]))[0][0]] += 1
    p = torch.softmax(logits[0].double() / 0.8, -1).numpy()
    order = np.argsort(-p)
    keep = np.ones(10, bool)
    if "top_p" in kwargs:
        keep[order[int((np.cumsum(p[order]) < 0.9).sum()) + 1 :]] = False
    if "top_k" in kwargs:
        keep[order[8:]] = False
    if "min_p" in kwargs:
        keep = p >= 0.2 * p.max()
    p = np.where(keep, p, 0) / p[keep].sum()
    assert (counts[~keep] == 0).all()
    assert np.abs(counts / n - p).max() < 4 * math.sqrt(0.25 / n)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.zeros(3, 50)
    logits[1, [7, 30]] = 2.0
    assert choose(logits, [SamplingSpec(temperature=0.0)] * 3, [1, 2, 3]) == [0, 7, 0]
    assert choose(logits[1:2], [SamplingSpec(top_k=1)], [1]) == [7]


def test_greedy_draws_nothing() -> None:
    """No seed, position, top_p or top_k changes a greedy row, and as little a temperature that is nearly none."""
    logits = torch.from_numpy(np.random.default_rng(4).standard_normal((1, 300)).astype(np.float32))
    expected = int(logits.argmax())
    for temperature in (0.0, 1e-45, 1e-6):
        for number in range(20):
            spec = SamplingSpec(temperature=temperature, seed=number, top_p=0.1 + number / 25, top_k=number)
            assert choose(logits, [spec], [number]) == [expected]


def test_moving_a_row_moves_all_of_it() -> None:
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((2, 200)).astype(np.float32))
    spec = SamplingSpec(temperature=1.3, top_p=0.8, top_k=50, min_p=0.01, seed=9)
    expected = choose(logits[1:], [spec], [77], [2])
    sampler = Sampler(200, 4)
    sampler.set_row(3, spec, 2)
    sampler.move_row(3, 0)
    assert sampler.sample(logits[1:], np.array([77]))[0].tolist() == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_that_are_not_finite_have_no_token_and_disturb_no_other(bad: float) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).standard_normal((4, 300)).astype(np.float32))
    specs = [SamplingSpec(seed=i, top_p=0.9 if i % 2 else 1.0) for i in range(4)]
    expected = choose(logits, specs, [5, 6, 7, 8])
    broken = logits.clone()
    broken[1, 299], broken[2, 0] = bad, bad
    sampler = Sampler(300, 4)
    for row, spec in enumerate(specs):
        sampler.set_row(row, spec, 0)
    tokens, sound = sampler.sample(broken, np.array([5, 6, 7, 8]))
    assert sound.tolist() == [True, False, False, True]
    assert [tokens[0], tokens[3]] == [expected[0], expected[3]]
    single = logits[:1].clone()
    single[0, 1:] = -math.inf  # one possible token is sound
    assert choose(single, [SamplingSpec(seed=1)], [1]) == [0]


def test_adjustments_follow_the_definition() -> None:
    spec = SamplingSpec(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={0: 1.0, 3: -100.0, 99: 5.0},
        stop_token_ids=(5, 88),
        min_tokens=4,
    )
    adjuster = LogitAdjuster(spec, 8)
    adjuster.observe([1, 2, 2], num_prompt=2)  # prompt 1 2, generated 2
    adjuster.observe([2, 0])
    x = np.array([1.0, 2.0, -1.0, 0.0, 4.0, 9.0, 1.0, 1.0], np.float32)
    adjuster.adjust(x, 3)
    assert x.tolist() == [2.0 / 2 - 0.75, 1.0, -2.0 - 1.0, -100.0, 4.0, -math.inf, 1.0, 1.0]
    y = np.full(8, 3.0, np.float32)
    adjuster.adjust(y, 4)
    assert y[5] == 3.0
    assert adjuster.is_active(100)
    rests = LogitAdjuster(SamplingSpec(stop_token_ids=(1,), min_tokens=2), 8)
    assert [rests.is_active(n) for n in (0, 1, 2)] == [True, True, False]
    assert not LogitAdjuster(SamplingSpec(stop_token_ids=(1,)), 8).is_active(0)


def test_adjusting_leaves_the_logits_of_others_and_the_input_alone() -> None:
    logits = torch.from_numpy(np.random.default_rng(3).standard_normal((3, 64)).astype(np.float32))
    before = logits.clone()
    sampler = Sampler(64, 3)
    for row in range(3):
        sampler.set_row(row, SamplingSpec(temperature=0.0), 0)
    best = int(logits[1].argmax())
    adjuster = LogitAdjuster(SamplingSpec(logit_bias={best: -100.0}), 64)
    tokens, _ = sampler.sample(logits, np.array([1, 1, 1]), [Adjustment(1, adjuster, 0)])
    assert torch.equal(logits, before)
    assert tokens[1] == logits[1].topk(2).indices[1]
    assert tokens[0] == logits[0].argmax()
    impossible = LogitAdjuster(SamplingSpec(stop_token_ids=tuple(range(64)), min_tokens=1), 64)
    assert not sampler.sample(logits, np.array([1, 1, 1]), [Adjustment(2, impossible, 0)])[1][2]


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([3, 64, 1001]), st.integers(0, 20))
def test_logprobs_are_those_of_log_softmax(seed: int, rows: int, vocab: int, num_top: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.round(rng.standard_normal((rows, vocab)) * 3, 1).astype(np.float32)
    ids = rng.integers(0, vocab, rows)
    exact = torch.log_softmax(torch.from_numpy(x).double(), -1).numpy()
    together = token_logprobs(x, ids, num_top)
    for i, entry in enumerate(together):
        assert token_logprobs(x[i : i + 1], ids[i : i + 1], num_top) == [entry]
        assert entry.token_id == ids[i]
        assert abs(entry.logprob - exact[i, ids[i]]) < 1e-5
        assert entry.rank == 1 + (x[i] > x[i, ids[i]]).sum()
        order = np.lexsort((np.arange(vocab), -x[i]))[:num_top]
        assert list(entry.top_token_ids) == order.tolist()
        assert np.allclose(entry.top_logprobs, exact[i, order], atol=1e-5)
        assert entry.with_top(2).top_token_ids == entry.top_token_ids[:2]
