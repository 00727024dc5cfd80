"""What goes wrong in handling one sequence ends that sequence alone: torch's step loop, and the GPU's on a CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor import step_loop
from executor.gpu import sampling as gpu_sampling
from executor.sampler import LogitAdjuster
from rorqual.v1 import common_pb2
from tests.support.executor_fakes import VOCAB, Driven, admit, extend, label, prefill
from tests.support.gpu_fakes import DrivenGpu

LENGTH = common_pb2.FINISH_REASON_LENGTH
BAD = 1


@pytest.fixture(params=[Driven, DrivenGpu])
def d(request: pytest.FixtureRequest) -> Any:
    return request.param()


class Planted(Exception):
    """What a test makes go wrong."""


def fails_for(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, is_bad: Callable[..., bool]) -> None:
    """`owner.name` does its work and then raises, where `is_bad` says so of its arguments."""
    inner = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        if is_bad(*args):
            raise Planted("went wrong")
        return result

    monkeypatch.setattr(owner, name, outer)


def others_run_on(d: Any, **bad: Any) -> Any:
    """Three sequences, the second of which meets what is planted; then as many as there are rows, in the rows it left."""
    prompts = {0: list(range(10)), BAD: list(range(20, 50)), 2: list(range(40, 60))}
    expected = {seq_id: d.model.continuation(prompt, 12) for seq_id, prompt in prompts.items()}
    for seq_id, prompt in prompts.items():
        mine = {"max_total": len(prompt) + 12, **(bad if seq_id == BAD else {})}
        d.order(admit(seq_id, prompt, [seq_id], **mine), prefill(seq_id, prompt))
    d.run()
    r = d.report()
    assert not d.errors
    for seq_id in (0, 2):
        assert (r[seq_id].token_ids, r[seq_id].finish, r[seq_id].fault) == (expected[seq_id], LENGTH, "")
    assert not r[BAD].finish
    assert r[BAD].fault
    for seq_id in range(10, 18):
        d.order(admit(seq_id, prompts[0], [seq_id], max_total=22), prefill(seq_id, prompts[0]))
    d.run()
    for seq_id in range(10, 18):
        assert d.report()[seq_id].token_ids == expected[0]
    assert not d.loop._rows.num_rows
    assert not d.loop._sequences
    return r[BAD]


def of_bad(sequence: Any) -> bool:
    return bool(sequence.seq_id == BAD)


def test_its_admission(d: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_for(monkeypatch, LogitAdjuster, "__init__", lambda self, spec, *_: spec.seed == 77)
    bad = others_run_on(d, seed=77)
    assert (bad.reason, bad.computed) == ("INTERNAL", 0)
    assert "Planted" in bad.fault


def test_cached_tokens_outside_the_vocabulary(d: Any) -> None:
    prompt = [2**32 - 1, *range(69)]
    d.order(
        admit(5, prompt, [8, 9], num_cached=64, known=prompt[:64], presence_penalty=1.0), prefill(5, prompt, 64, 70)
    )
    d.run()
    assert d.report()[5].reason == "INTERNAL"
    others_run_on(d, presence_penalty=1.0, logit_bias={3: float("nan"), 5: 1.0})


@pytest.mark.parametrize("token_id", [VOCAB, 2**31, 2**32 - 1])
def test_a_token_outside_the_vocabulary(d: Any, token_id: int) -> None:
    prompt = [1, 2, token_id, 3]
    d.order(admit(5, prompt, [9], prompt_logprobs=1), prefill(5, prompt))
    d.run()
    assert str(token_id) in d.report()[5].fault
    assert d.report()[5].reason == "INTERNAL"
    d.model.poison = {40}
    assert others_run_on(d, logit_bias={40: 100.0}).reason == "NUMERICAL_FAULT"


def test_its_joining_of_the_decode_set(d: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_for(monkeypatch, d.loop._rows, "add", of_bad)
    bad = others_run_on(d)
    assert (bad.reason, bad.token_ids) == ("INTERNAL", [])


def test_a_step_that_nobody_is_left_for_does_not_run(d: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_for(monkeypatch, d.loop._rows, "add", of_bad)
    d.order(admit(BAD, [1, 2], [0]), prefill(BAD, [1, 2]))
    d.run()
    assert d.report()[BAD].fault
    assert d.loop.step_running_us() == 0


def test_its_joining_after_a_pause(d: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, other = list(range(60)), list(range(10))
    d.order(admit(5, prompt, [8], limit=62, max_total=90), prefill(5, prompt))
    d.run()
    assert len(d.report()[5].token_ids) == 3
    fails_for(monkeypatch, d.loop._rows, "add", lambda sequence: sequence.seq_id == 5)
    d.order(extend(5, [9], 90), admit(6, other, [10], max_total=20), prefill(6, other))
    d.run()
    assert d.report()[5].reason == "INTERNAL"
    assert d.report()[6].token_ids == d.model.continuation(other, 10)


def test_what_its_penalties_make_of_a_token(d: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fails_for(monkeypatch, LogitAdjuster, "observe", lambda self, ids, *_: self._spec.seed == 77 and len(ids) == 1)
    assert others_run_on(d, seed=77, presence_penalty=1.0).reason == "INTERNAL"


def test_the_change_of_its_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_for(monkeypatch, LogitAdjuster, "adjust", lambda self, *_: self._spec.seed == 77)
    bad = others_run_on(Driven(), seed=77, presence_penalty=1.0)
    assert (bad.reason, bad.token_ids) == ("INTERNAL", [])


def test_its_log_probabilities(d: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(d, DrivenGpu):
        fails_for(monkeypatch, gpu_sampling._HostLogprobs, "entry", lambda self, row, token_id, num_top: num_top == 7)
    else:
        fails_for(monkeypatch, step_loop, "token_logprobs", lambda logits, ids, num_top: num_top == 7)
    beside = list(range(5))
    d.order(admit(7, beside, [7], max_total=15, logprobs=3), prefill(7, beside))
    assert others_run_on(d, logprobs=7).reason == "INTERNAL"
    r = d.report()[7]
    assert (r.token_ids, len(r.logprobs)) == (d.model.continuation(beside, 10), 10)


def test_its_prompts_log_probabilities(d: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(d, DrivenGpu):
        fails_for(monkeypatch, gpu_sampling.PromptLogprobs, "item", lambda self: of_bad(self.sequence))
    else:
        fails_for(monkeypatch, step_loop, "_prompt_logprobs", lambda chunk, logits: of_bad(chunk.sequence))
    assert others_run_on(d, prompt_logprobs=1).reason == "INTERNAL"


def test_log_probabilities_of_its_prompt_that_are_no_numbers(d: Any) -> None:
    """They must not reach the scheduler, which ends the link of an executor that reports such."""
    if isinstance(d, DrivenGpu):
        pytest.skip("its model of a GPU poisons no prompt")
    d.model.poison.add(25)
    bad = others_run_on(d, prompt_logprobs=1)
    assert (bad.reason, bad.prompt_logprobs) == ("NUMERICAL_FAULT", [])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("of the device"), RuntimeError("CUDA error: unspecified")])
def test_an_error_of_the_device_is_nobodys_alone(d: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(LogitAdjuster, "observe", fail)
    d.order(admit(1, [1, 2], [0], presence_penalty=1.0), prefill(1, [1, 2]))
    with pytest.raises(type(error)):
        d.run()


def test_labels_on_the_wire_of_a_sequence_that_faulted_are_not_taken(d: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(90)) * 2
    fails_for(monkeypatch, d.loop._rows, "add", of_bad)
    d.order(admit(BAD, prompt, [0, 1, 2]), prefill(BAD, prompt))
    d.run()
    hashes = [hashlib.sha256(bytes([i])).digest() for i in range(3)]
    d.order(label([0, 1], hashes[:2]), label([5], hashes[2:]))
    d.run()
    assert [entry.block_id for entry in d.loop.inventory.entries()] == [5]
    d.order(admit(2, prompt, [1, 3, 4], max_total=len(prompt) + 2), prefill(2, prompt), label([1, 0], hashes[:2]))
    d.run()
    assert d.report()[2].finish == LENGTH
    assert {entry.block_id for entry in d.loop.inventory.entries()} == {5, 1}
