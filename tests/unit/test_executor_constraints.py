"""Step loops keep to grammars: torch's, and the GPU's with its kernels' references, over a scripted grammar."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from executor.constraint import Constraints
from rorqual.grammar import GrammarError
from rorqual.v1 import common_pb2
from tests.support.executor_fakes import VOCAB, Driven, admit, drop, extend, prefill
from tests.support.gpu_fakes import DrivenGpu

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
EOS = 96


class Steps:
    """A matcher of the sequences in which each token is one of the next set; the last set may be left out."""

    def __init__(self, sets: list[set[int]], optional: bool) -> None:
        self._sets, self._optional, self._at, self._is_bad = sets, optional, 0, False

    def consume_token(self, token_id: int) -> bool:
        self._is_bad = self._is_bad or self._at >= len(self._sets) or token_id not in self._sets[self._at]
        self._at += 1
        return not self._is_bad

    def compute_bitmask(self) -> bytes:
        bits = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
        bits[list(self._sets[self._at] if self._at < len(self._sets) else ())] = 1
        return np.packbits(bits, bitorder="little").tobytes()

    def is_accepting(self) -> bool:
        return self._at >= len(self._sets) - self._optional

    def is_stopped(self) -> bool:
        return self._is_bad or self._at == len(self._sets)

    def is_error(self) -> bool:
        return self._is_bad


class Scripted:
    """An engine whose grammars are written "1,2;5,6;" for one of 1 and 2, then one of 5 and 6."""

    end_id = EOS

    def __init__(self) -> None:
        self.may_compile = threading.Event()
        self.may_compile.set()

    def compile(self, text: str) -> Any:
        self.may_compile.wait(10)
        if text == "bad":
            raise GrammarError("it is bad")
        sets = [{int(i) for i in part.split(",")} for part in text.rstrip("?").split(";")]
        return Steps(sets, text.endswith("?"))


@pytest.fixture(params=[Driven, DrivenGpu])
def d(request: pytest.FixtureRequest) -> Any:
    driven = request.param()
    driven.engine = Scripted()
    driven.loop.use_constraints(Constraints(driven.engine, VOCAB))
    return driven


def grammar(text: str, after: int | None = None) -> dict[str, Any]:
    return {"grammar": common_pb2.Grammar(text=text, after_token_id=after), "stop_token_ids": [EOS]}


def run(d: Any) -> Any:
    """Until nothing is left to do, grammars compiled meanwhile."""
    for _ in range(500):
        while d.loop.run_once():
            pass
        if not d.loop._held and not d.loop._released:
            break
        time.sleep(0.01)
    return d.report()


def fits(token_ids: list[int], text: str) -> bool:
    sets = [{int(i) for i in part.split(",")} for part in text.rstrip("?").split(";")]
    return len(token_ids) <= len(sets) and all(t in s for t, s in zip(token_ids, sets, strict=False))


TEXT = ";".join(",".join(str(i * 5 + j) for j in range(4)) for i in range(8))


def test_tokens_are_allowed_ones_and_the_end_is_a_stop(d: Any) -> None:
    prompt = list(range(70))
    d.order(
        admit(1, prompt, [0, 1], max_total=100, **grammar(TEXT)), prefill(1, prompt, 0, 64), prefill(1, prompt, 64, 70)
    )
    r = run(d)
    assert len(r[1].token_ids) == 8
    assert fits(r[1].token_ids, TEXT)
    assert r[1].finish == STOP


def test_free_sequences_beside_it_are_as_they_would_be(d: Any) -> None:
    a, b, c = list(range(10)), list(range(40, 60)), list(range(20, 30))
    d.order(admit(1, a, [0], max_total=40), prefill(1, a))
    d.step(2)
    d.order(
        admit(2, b, [1], max_total=60, **grammar(TEXT)), prefill(2, b), admit(3, c, [2], max_total=30), prefill(3, c)
    )
    r = run(d)
    assert r[1].token_ids == d.model.continuation(a, 30)
    assert r[3].token_ids == d.model.continuation(c, 20)
    assert fits(r[2].token_ids, TEXT)
    assert [r[i].finish for i in (1, 2, 3)] == [LENGTH, STOP, LENGTH]


def test_a_stop_token_only_where_the_grammar_may_end(d: Any) -> None:
    """The bias draws the end of sequence as strongly as it can."""
    prompt = list(range(10))
    d.order(admit(1, prompt, [0], logit_bias={EOS: 100.0}, **grammar("1,2;3,4;5,6?")), prefill(1, prompt))
    r = run(d)
    assert fits(r[1].token_ids[:2], "1,2;3,4")
    assert r[1].token_ids[2:] == [EOS]
    assert r[1].finish == STOP


def test_min_tokens_yields_to_the_end(d: Any) -> None:
    prompt = list(range(10))
    d.order(admit(1, prompt, [0], min_tokens=9, **grammar("1,2;3,4;5,6?")), prefill(1, prompt))
    r = run(d)
    assert fits(r[1].token_ids, "1,2;3,4;5,6")
    assert len(r[1].token_ids) == 3
    assert r[1].finish == STOP


def test_it_begins_after_a_token(d: Any) -> None:
    prompt = list(range(10))
    free = d.model.continuation(prompt, 3)
    d.order(admit(1, prompt, [0], **grammar("1,2;3,4", after=free[2])), prefill(1, prompt))
    r = run(d)
    assert r[1].token_ids[:3] == free
    assert fits(r[1].token_ids[3:], "1,2;3,4")
    assert len(r[1].token_ids) == 5


@pytest.mark.parametrize("cached", [0, 64])
def test_a_history_that_was_generated_rebuilds_it(d: Any, cached: int) -> None:
    prompt = list(range(60))
    d.order(admit(1, prompt, [0, 1], max_total=100, **grammar(TEXT)), prefill(1, prompt))
    made = run(d)[1].token_ids
    for cut in range(1, 9):
        history = prompt + made[:cut]
        first = min(cached, len(history) - 1) // 64 * 64
        d.order(
            admit(10 + cut, history, [0, 1] if first else [2, 3], num_prompt=60, num_cached=first, known=history[:first],
                  max_total=100, **grammar(TEXT)),
            prefill(10 + cut, history, first, len(history)),
        )  # fmt: skip
        r = run(d)
        assert r[10 + cut].token_ids == made[cut:]
        assert r[10 + cut].finish == STOP


def test_one_that_pauses_at_its_limit_goes_on(d: Any) -> None:
    prompt = list(range(60))
    d.order(admit(1, prompt, [0], limit=63, max_total=100, **grammar(TEXT)), prefill(1, prompt))
    assert len(run(d)[1].token_ids) == 4
    d.order(extend(1, [1], 100))
    r = run(d)
    assert len(r[1].token_ids) == 8
    assert fits(r[1].token_ids, TEXT)
    assert r[1].finish == STOP


def test_only_its_own_sequence_waits_for_a_grammar(d: Any) -> None:
    d.engine.may_compile.clear()
    a, b, c = list(range(10)), list(range(20)), list(range(30))
    d.order(
        admit(1, a, [0], **grammar(TEXT)), prefill(1, a),
        admit(2, b, [1], max_total=24), prefill(2, b),
        admit(3, c, [2], **grammar(TEXT)), prefill(3, c),
    )  # fmt: skip
    d.run()
    r = d.report()
    assert r[2].token_ids == d.model.continuation(b, 4)
    assert not r[1].token_ids
    d.order(drop(3))
    d.engine.may_compile.set()
    r = run(d)
    assert len(r[1].token_ids) == 8
    assert not d.loop._held


def test_a_bad_grammar_and_a_history_that_does_not_fit_end_their_sequence_alone(d: Any) -> None:
    a, b, c = list(range(10)), list(range(20)), list(range(30))
    d.order(
        admit(1, a, [0], **grammar("bad")), prefill(1, a),
        admit(2, [*b, 90], [1], num_prompt=20, **grammar(TEXT)), prefill(2, [*b, 90]),
        admit(3, c, [2], max_total=34), prefill(3, c),
    )  # fmt: skip
    r = run(d)
    assert "it is bad" in r[1].fault
    assert "90" in r[2].fault
    assert r[3].token_ids == d.model.continuation(c, 4)
