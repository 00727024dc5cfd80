"""Step loops keep to grammars: torch's, and the GPU's with its kernels' references, over a scripted grammar."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from executor.constraint import Constraints, _Compiler
from rorqual.grammar import GrammarError
from rorqual.v1 import common_pb2
from tests.support.executor_fakes import VOCAB, Driven, admit, drop, extend, prefill
from tests.support.gpu_fakes import DrivenGpu
from tests.support.scripted_grammars import Scripted, fits

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
EOS = 96


@pytest.fixture(params=[Driven, DrivenGpu])
def d(request: pytest.FixtureRequest) -> Any:
    driven = request.param()
    driven.engine = Scripted(VOCAB, EOS)
    driven.loop.use_constraints(Constraints(driven.engine, VOCAB))
    return driven


def grammar(text: str, after: int | None = None, opening: int | None = None) -> dict[str, Any]:
    made = common_pb2.Grammar(text=text, after_token_id=after, opening_token_id=opening)
    return {"grammar": made, "stop_token_ids": [EOS]}


def run(d: Any) -> Any:
    """Until nothing is left to do, grammars compiled meanwhile."""
    for _ in range(500):
        while d.loop.run_once():
            pass
        if not d.loop._held and not d.loop._released:
            break
        time.sleep(0.01)
    return d.report()


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


def test_it_begins_after_an_opening_token(d: Any) -> None:
    """What was launched beyond it, where a loop does that, is nowhere to be seen; those beside it go on."""
    prompt, other = list(range(10)), list(range(40, 60))
    free = d.model.continuation(prompt, 40)
    assert free[5] not in free[:5]
    d.order(admit(2, other, [2], max_total=60), prefill(2, other))
    d.order(admit(1, prompt, [0], max_total=60, **grammar("1,2;3,4;5,6", opening=free[5])), prefill(1, prompt))
    r = run(d)
    assert r[1].token_ids[:6] == free[:6]
    assert fits(r[1].token_ids[6:], "1,2;3,4;5,6")
    assert (len(r[1].token_ids), r[1].finish) == (9, STOP)
    assert r[2].token_ids == d.model.continuation(other, 40)
    # One that never comes binds nothing, an end neither; one after another token counts only after it.
    d.order(admit(3, prompt, [1], max_total=40, **grammar("1,2", opening=95)), prefill(3, prompt))
    after = grammar("1,2;3,4", after=free[2], opening=free[5])
    d.order(admit(4, prompt, [3], max_total=60, **after), prefill(4, prompt))
    r = run(d)
    assert (r[3].token_ids, r[3].finish) == (free[: free.index(EOS) + 1], STOP)
    assert r[4].token_ids[:6] == free[:6]
    assert fits(r[4].token_ids[6:], "1,2;3,4")
    assert len(r[4].token_ids) == 8


def test_penalties_and_min_tokens_count_as_without_a_grammar(d: Any) -> None:
    """A sequence that joins again keeps its counts; before its grammar holds its stop tokens are as others'."""
    prompt = list(range(10))
    spec: dict[str, Any] = {"max_total": 60, "frequency_penalty": 1.5, "min_tokens": 12, "logit_bias": {EOS: 100.0}}
    d.order(admit(1, prompt, [0], stop_token_ids=[EOS], **spec), prefill(1, prompt))
    plain = run(d)[1].token_ids
    assert plain[12:] == [EOS]
    assert plain[4] not in plain[:4]
    d.order(admit(2, prompt, [1], **spec, **grammar("1,2", opening=95)), prefill(2, prompt))
    d.order(admit(3, prompt, [2], **spec, **grammar(";".join(["7,8"] * 20), opening=plain[4])), prefill(3, prompt))
    r = run(d)
    assert r[2].token_ids == plain
    assert r[3].token_ids[:5] == plain[:5]
    assert set(r[3].token_ids[5:]) <= {7, 8}
    assert len(r[3].token_ids) == 25


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


class Gated(Scripted):
    """Compiles a text once the test lets it."""

    def __init__(self) -> None:
        super().__init__(VOCAB, EOS)
        self.lock = threading.Lock()
        self.begun: list[str] = []
        self.has_begun = {text: threading.Event() for text in "abcdefghij"}
        self.may_end = {text: threading.Event() for text in "abcdefghij"}

    def compile(self, text: str) -> Any:
        name = text[-1]
        with self.lock:
            self.begun.append(name)
        self.has_begun[name].set()
        assert self.may_end[name].wait(30)
        return super().compile(text[:-1])


def gated(d: Any) -> Gated:
    engine = d.engine = Gated()
    d.loop.use_constraints(Constraints(engine, VOCAB))  # type: ignore[arg-type]
    return engine


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("make", [Driven, DrivenGpu])
def test_a_history_is_computed_before_its_grammar_is_compiled(make: Any, num_tokens: int, deterministic: bool) -> None:
    """It is reported at once; what follows is what would have, had the grammar been there; nothing counts twice."""
    prompt = [(7 * i) % 90 for i in range(num_tokens)]
    blocks = list(range(num_tokens // 64 + 2))
    spec: dict[str, Any] = {"max_total": num_tokens + 20, "frequency_penalty": 1.5, "repetition_penalty": 1.3}
    spec |= {"prompt_logprobs": 2, "logprobs": 1, **grammar(TEXT + "a", opening=None)}
    edges = [*range(0, num_tokens, 128), num_tokens]

    def orders(seq_id: int, at: int) -> list[Any]:
        chunks = [prefill(seq_id, prompt, start, end) for start, end in itertools.pairwise(edges)]
        return [admit(seq_id, prompt, [at + block for block in blocks], **spec), *chunks]

    d = make(deterministic=deterministic)
    engine = gated(d)
    d.order(*orders(1, 0))
    d.run()
    r = d.report()
    assert (r[1].computed, r[1].token_ids) == (num_tokens, [])
    assert len(r[1].prompt_logprobs) == num_tokens - 1
    later = [5, 6, 7]
    d.order(admit(2, later, [10], max_total=9), prefill(2, later))
    d.run()
    assert d.report()[2].token_ids == d.model.continuation(later, 6)
    engine.may_end["a"].set()
    admission, *chunks = orders(3, 20)
    d.order(admission)
    d.run()
    assert d.loop._sequences[3].constraint._future.result(30)
    d.order(*chunks)
    r = run(d)
    assert r[1].token_ids == r[3].token_ids
    assert r[1].prompt_logprobs == r[3].prompt_logprobs
    assert r[1].logprobs == r[3].logprobs
    assert (r[1].finish, len(r[1].token_ids)) == (STOP, 8)
    if deterministic and make is DrivenGpu:
        assert {form for position, form in d.model.forms if position < num_tokens} == {"prefill"}


def test_one_compile_holds_up_no_other_and_a_dropped_one_is_not_begun(d: Any) -> None:
    engine = gated(d)
    prompt = list(range(10))
    workers = d.loop._constraints._compiler._pool._max_workers
    names = "abcdefghij"[:workers]
    for i, name in enumerate(names):
        d.order(admit(i, prompt, [i], max_total=40, **grammar(TEXT + name)), prefill(i, prompt))
        # The same text again: it takes no second worker.
        d.order(admit(20 + i, prompt, [20 + i], max_total=40, **grammar(TEXT + name)), prefill(20 + i, prompt))
        d.run()
        assert engine.has_begun[name].wait(30)
    d.order(admit(50, prompt, [50], max_total=40, **grammar(TEXT + "j")), prefill(50, prompt))
    d.run()
    d.order(drop(50), drop(20))
    d.run()
    for name in names:
        engine.may_end[name].set()
    d.loop._constraints._compiler._pool.shutdown(wait=True)
    r = run(d)
    assert not d.loop._held
    assert sorted(engine.begun) == sorted([*names, *names[1:]])
    for i in range(workers):
        assert len(r[i].token_ids) == 8
        assert len(r[20 + i].token_ids) == (8 if i else 0)
    assert not r[50].token_ids


def test_a_trial_comes_before_each_text_is_compiled(d: Any) -> None:
    tried: list[str] = []

    def trial(text: str) -> None:
        tried.append(text)
        if text == "1,2;3,4":
            raise GrammarError("it is too deep")

    d.loop.use_constraints(Constraints(d.engine, VOCAB, trial=trial))
    a, b = list(range(10)), list(range(20))
    d.order(
        admit(1, a, [0], **grammar("1,2;3,4")), prefill(1, a), admit(2, b, [1], **grammar("5,6;7,8")), prefill(2, b)
    )
    r = run(d)
    assert "too deep" in r[1].fault
    assert r[1].reason == "CONSTRAINT_TOO_COMPLEX"
    assert fits(r[2].token_ids, "5,6;7,8")
    assert sorted(tried) == ["1,2;3,4", "5,6;7,8"]


def test_a_bad_grammar_and_a_history_that_does_not_fit_end_their_sequence_alone(d: Any) -> None:
    a, b, c = list(range(10)), list(range(20)), list(range(30))
    d.order(
        admit(1, a, [0], **grammar("bad")), prefill(1, a),
        admit(2, [*b, 90], [1], num_prompt=20, **grammar(TEXT)), prefill(2, [*b, 90]),
        admit(3, c, [2], max_total=34), prefill(3, c),
    )  # fmt: skip
    r = run(d)
    assert "it is bad" in r[1].fault
    assert r[1].reason == r[2].reason == "CONSTRAINT_TOO_COMPLEX"
    assert "90" in r[2].fault
    assert r[3].token_ids == d.model.continuation(c, 4)


def test_a_thread_that_could_not_be_started_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool queues its work before it starts a thread, so a text may be worked on twice: that does no harm."""
    made: Any = object()
    compiler = _Compiler(SimpleNamespace(compile=lambda text: made), None)  # type: ignore[arg-type]

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError):
            compiler.begin("x")
    assert compiler.begin("x").result(timeout=10) is made
