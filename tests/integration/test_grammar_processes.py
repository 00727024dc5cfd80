"""Grammars are made in processes that may die: what ends one is refused, and costs nobody else anything."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from executor.constraint import Constraints, GrammarSpec
from rorqual.core.errors import InvalidRequestError, UnavailableError
from rorqual.grammar import GrammarCostError, GrammarEngine, GrammarError, json_grammar, regex_grammar, written_grammar
from rorqual.grammar_cache import OutcomeCache
from rorqual.grammar_process import Outcome
from rorqual.grammar_trial import GrammarTrial
from rorqual.grammar_worker import _Nursery
from rorqual.v1 import text_pb2
from services.tokenizer.control_tokens import ControlTokens
from services.tokenizer.grammar_job import GrammarJob, calls_of
from services.tokenizer.grammar_worker import CRASH, HOG, SLEEP
from services.tokenizer.grammars import MAX_SOURCE_BYTES, QUICK, SLOW, Grammars, check_source

FOLDER = Path(__file__).resolve().parents[2] / "models" / "tiny"
VOCAB = 8192
TOO_COMPLEX = "CONSTRAINT_TOO_COMPLEX"


def chain_of_rules(length: int) -> str:
    rules = "\n".join(f'r{i}: "x" r{i + 1} | "a"' for i in range(length))
    return f'start: r0\n{rules}\nr{length}: "b"'


def chain_of_units(length: int) -> str:
    return "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(length)) + f'\nr{length}: "b"'


def chain_of_refs(length: int, kind: str) -> dict[str, Any]:
    def link(i: int) -> dict[str, Any]:
        ref = {"$ref": f"#/$defs/a{i + 1}"}
        return {"plain": ref, "any": {"anyOf": [ref, {"type": "null"}]}, "array": {"type": "array", "items": ref}}[kind]

    return {
        "$defs": {**{f"a{i}": link(i) for i in range(length)}, f"a{length}": {"type": "string"}},
        "$ref": "#/$defs/a0",
    }


def optional(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


WRITTEN_BOMBS = {
    "repeated rules": 'root ::= a{1000}\na ::= b{1000}\nb ::= c{1000}\nc ::= "x"',
    "twenty-two bytes": 'start: ("a"~1000)~100',
    "three repetitions": 'start: (("a"~1000)~1000)~1000',
    "three smaller ones": 'start: (("a"~100)~100)~100',
    "3,000 rules": chain_of_rules(3000),
    "6,000 rules": chain_of_rules(6000),
    "5,000 unit rules": chain_of_units(5000),
    "doubling rules": "start: r0\n" + "\n".join(f'r{i}: r{i + 1} r{i + 1} | "a"' for i in range(2000)) + '\nr2000: "b"',
    "brackets": f'start: {"(" * 5000}"a"{")" * 5000}',
}
SCHEMA_BOMBS: dict[str, dict[str, Any]] = {
    "5,500 refs": chain_of_refs(5500, "plain"),
    "3,000 unions": chain_of_refs(3000, "any"),
    "3,500 arrays": chain_of_refs(3500, "array"),
    "multiples": {"allOf": [{"type": "integer", "multipleOf": n} for n in (999983, 999979, 999961)]},
    "one multiple": {"type": "integer", "multipleOf": 999983},
    "1,500 properties": optional({f"p{i}": {"type": "string"} for i in range(1500)}),
    "2,000 patterns": optional({f"p{i}": {"type": "string", "pattern": f"^[a-z]{{{i}}}$"} for i in range(2000)}),
}
BOMBS = {
    **{name: text_pb2.Constraint(grammar=text) for name, text in WRITTEN_BOMBS.items()},
    **{name: text_pb2.Constraint(json_schema=json.dumps(schema)) for name, schema in SCHEMA_BOMBS.items()},
}
INNOCENTS: list[text_pb2.Constraint] = [
    text_pb2.Constraint(regex="[a-z]{1,9}(-[0-9]+)?"),
    text_pb2.Constraint(choices=text_pb2.ChoiceList(texts=["yes", "no", "鲸"])),
    text_pb2.Constraint(grammar='root ::= "ab" | "cd"'),
    text_pb2.Constraint(json_object=True),
    text_pb2.Constraint(grammar=chain_of_rules(2000)),
    text_pb2.Constraint(json_schema=json.dumps(chain_of_refs(1000, "array"))),
    text_pb2.Constraint(json_schema=json.dumps({"type": "integer", "multipleOf": 1000})),
    text_pb2.Constraint(json_schema=json.dumps(optional({f"p{i}": {"type": "string"} for i in range(300)}))),
    text_pb2.Constraint(json_schema=json.dumps({"enum": [f"value {i}" for i in range(3000)]})),
]


@pytest.fixture(scope="module")
def plain_engine() -> GrammarEngine:
    return GrammarEngine(FOLDER / "tokenizer.json", VOCAB)


@pytest.fixture
async def grammars() -> AsyncIterator[Grammars]:
    grammars = Grammars(FOLDER, VOCAB, ControlTokens({}).ids, for_tests=True)
    grammars.start()
    yield grammars
    await grammars.stop()


async def refused(grammars: Grammars, constraint: text_pb2.Constraint) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        await grammars.compile(GrammarJob(constraint))
    return caught.value


@pytest.mark.parametrize("name", BOMBS)
async def test_what_takes_too_much_is_refused(grammars: Grammars, name: str) -> None:
    await grammars.ready()
    pid = grammars._process.pid
    error = await refused(grammars, BOMBS[name])
    assert error.reason == TOO_COMPLEX
    assert error.field.startswith(f"constraint.{BOMBS[name].WhichOneof('constraint')}")
    assert grammars._process.pid == pid, "a job may end its fork, not the process that makes them"


async def test_blank_lines_take_no_time(grammars: Grammars) -> None:
    """60 kB of them kept the interpreter for ten seconds: within the first budget, or it would be asked again."""
    outcome = await grammars._process.run_async(GrammarJob(text_pb2.Constraint(grammar="\n" * 60_000)).packed(), QUICK)
    assert outcome.reply is not None
    assert (await refused(grammars, text_pb2.Constraint(grammar="\n" * 60_000))).reason == "INVALID_CONSTRAINT"
    text, _ = await grammars.compile(GrammarJob(text_pb2.Constraint(grammar='root ::= "ab"' + "\n" * 60_000)))
    assert json.loads(text) == json.loads(written_grammar('root ::= "ab"\n'))


async def test_ten_bombs_beside_innocents(grammars: Grammars, plain_engine: GrammarEngine) -> None:
    bombs = [asyncio.create_task(refused(grammars, bomb)) for bomb in list(BOMBS.values())[:10]]
    made = await asyncio.gather(*(grammars.compile(GrammarJob(innocent)) for innocent in INNOCENTS))
    for text, _ in made:
        plain_engine.compile(text)
    assert {error.reason for error in await asyncio.gather(*bombs)} == {TOO_COMPLEX}


@pytest.mark.parametrize("job", [CRASH, HOG], ids=["a native fault", "all the memory"])
async def test_a_death_costs_one_job_only(grammars: Grammars, job: bytes) -> None:
    """A fault of the engine's own, or memory without end: others, before and behind, are answered."""
    await grammars.ready()
    pid = grammars._process.pid
    before = asyncio.create_task(grammars.compile(GrammarJob(INNOCENTS[0])))
    died = asyncio.create_task(grammars._process.run_async(job, SLOW))
    await asyncio.gather(before, grammars.compile(GrammarJob(INNOCENTS[1])))
    assert await died == Outcome(began=True)
    await grammars.compile(GrammarJob(INNOCENTS[2]))
    assert grammars._process.pid == pid


async def test_when_the_process_itself_dies_another_takes_its_place(grammars: Grammars) -> None:
    await grammars.compile(GrammarJob(INNOCENTS[0]))
    pid = grammars._process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await grammars.compile(GrammarJob(INNOCENTS[1]))
    assert grammars._process.pid not in (None, pid)


@pytest.mark.parametrize("num_deaths", [1, 2])
async def test_a_job_under_way_when_the_process_itself_dies_is_not_to_blame(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch, num_deaths: int
) -> None:
    await grammars.ready()  # its own job is over
    job, inner = GrammarJob(INNOCENTS[0]), GrammarJob.packed
    monkeypatch.setattr(GrammarJob, "packed", lambda self: SLEEP if self is job else inner(self))
    asking = asyncio.create_task(grammars.compile(job))
    for number in range(num_deaths):
        await until(lambda: grammars._process.pid and forks_of(grammars._process.pid))
        if number == num_deaths - 1:
            monkeypatch.undo()  # from here on others get what it is
        os.kill(grammars._process.pid or 0, signal.SIGKILL)
        await until(lambda pid=grammars._process.pid: grammars._process.pid != pid)
    if num_deaths == 2:
        with pytest.raises(UnavailableError):
            await asking
    else:
        await until(lambda: grammars._process.pid and forks_of(grammars._process.pid))  # it is tried again
        asking.cancel()
    assert not len(grammars._cache)


@pytest.mark.parametrize("what", ["no process", "no descriptor"])
def test_a_job_that_cannot_have_a_fork_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    def fail() -> int:
        raise BlockingIOError("Resource temporarily unavailable")

    control, theirs = socket.socketpair()
    nursery = _Nursery(theirs, lambda body, tell: b"")
    ours, job = socket.socketpair()
    with control, theirs, ours:
        if what == "no process":
            monkeypatch.setattr(os, "fork", fail)
        with job:
            if what == "no process":
                socket.send_fds(control, [b"j"], [job.fileno()])
            else:
                control.send(b"j")
        try:
            assert nursery._begin()
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            nursery._woken.close()
            nursery._wakes.close()
        ours.settimeout(5)
        assert ours.recv(1) == b""  # which says that it did not begin
        assert not nursery._jobs


def forks_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_work_ends_when_nobody_waits_for_it(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ask for the same; the fork lives as long as one of them waits, and what was queued never begins."""
    await grammars.ready()
    pid = grammars._process.pid
    assert pid is not None
    await until(lambda: not forks_of(pid))
    endless = text_pb2.Constraint(grammar="endless")
    monkeypatch.setattr(GrammarJob, "packed", lambda job: b"\0sleep" if job.constraint == endless else b"\0crash")
    one, other = (asyncio.create_task(grammars.compile(GrammarJob(endless))) for _ in range(2))
    await until(lambda: len(forks_of(pid)) == 1)
    fork = forks_of(pid)
    one.cancel()
    await asyncio.gather(one, return_exceptions=True)
    assert forks_of(pid) == fork
    other.cancel()
    await until(lambda: not forks_of(pid))
    assert not grammars._asked


async def test_equal_constraints_are_made_once(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    run, jobs = grammars._process.run_async, []

    async def counting(job: bytes, budget: Any) -> Outcome:
        jobs.append(job)
        return await run(job, budget)

    monkeypatch.setattr(grammars._process, "run_async", counting)
    await grammars.ready()
    bomb = BOMBS["6,000 rules"]
    for _ in range(2):
        made = await asyncio.gather(*(grammars.compile(GrammarJob(INNOCENTS[0])) for _ in range(5)))
        assert len(set(made)) == 1
        await asyncio.gather(*(refused(grammars, bomb) for _ in range(5)))
    assert len(jobs) == 2


async def test_a_tool_that_is_not_strict_falls_back_to_any_object(grammars: Grammars) -> None:
    def calls(strict: bool) -> text_pb2.ChatRequest:
        deep = {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/a0"}},
            "$defs": SCHEMA_BOMBS["3,500 arrays"]["$defs"],
        }
        tool = text_pb2.Tool(name="f", parameters_json=json.dumps(deep), strict=strict)
        return calls_of(text_pb2.ChatRequest(tools=[tool], tool_choice=text_pb2.ToolChoice(function_name="f")))

    text, _ = await grammars.compile(GrammarJob(None, calls(strict=False), "deepseek-v3"))
    assert "a3500" not in text
    with pytest.raises(InvalidRequestError) as caught:
        await grammars.compile(GrammarJob(None, calls(strict=True), "deepseek-v3"))
    assert (caught.value.reason, caught.value.field) == (TOO_COMPLEX, "tools")


def test_a_constraint_that_is_too_long_is_not_looked_at() -> None:
    with pytest.raises(InvalidRequestError, match="KiB") as caught:
        check_source(text_pb2.Constraint(choices=text_pb2.ChoiceList(texts=["x" * MAX_SOURCE_BYTES])))
    assert (caught.value.reason, caught.value.field) == (TOO_COMPLEX, "constraint.choices")


@pytest.mark.parametrize("ids", [[], [0], [7, 8, 300], [2, 9, 63, 64, 8191], list(range(VOCAB))])
def test_the_tokens_that_are_tried_are_allowed(plain_engine: GrammarEngine, ids: list[int]) -> None:
    mask = sum(1 << i for i in {*ids, plain_engine.end_id}).to_bytes(VOCAB // 8, "little")
    allowed = [i for i in ids if i != plain_engine.end_id]
    tried = plain_engine._some_of(mask, 16)
    assert tried[:8] == allowed[:8]
    assert set(tried) <= set(allowed)
    assert len(tried) == min(16, len(allowed))


def test_a_trial_in_a_thread_says_what_compiling_would() -> None:
    trial = GrammarTrial(FOLDER, VOCAB)
    try:
        for text in (regex_grammar("ab+"), json_grammar({"type": "object"})):
            trial(text)
        with pytest.raises(GrammarError, match="Unsatisfiable"):
            trial(json_grammar({"allOf": [{"type": "string"}, {"type": "integer"}]}))
        for bomb in (
            written_grammar(WRITTEN_BOMBS["6,000 rules"]),
            written_grammar(WRITTEN_BOMBS["three smaller ones"]),
        ):
            for _ in range(2):
                with pytest.raises(GrammarCostError):
                    trial(bomb)
        assert len(trial._cache) == 5
    finally:
        trial.close()


def test_a_text_that_could_not_be_tried_is_not_to_blame() -> None:
    trial = GrammarTrial(FOLDER, VOCAB)
    trial.close()
    constraints = Constraints(GrammarEngine(FOLDER / "tokenizer.json", VOCAB), VOCAB, trial=trial)
    ready = threading.Event()
    constraints.on_ready = ready.set
    constraint = constraints.begin(GrammarSpec(regex_grammar("ab+")), (), 0)
    assert ready.wait(20)
    assert constraint.allowed(0) is None
    assert constraint.reason == "INTERNAL"


def test_the_process_ends_with_its_parent() -> None:
    """Killed, so that it has no time to say so."""
    code = (
        "from pathlib import Path; from rorqual.grammar_trial import GrammarTrial; import time\n"
        f"trial = GrammarTrial(Path({str(FOLDER)!r}), {VOCAB})\n"
        "trial.start(); print(trial._process.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watched = os.pidfd_open(pid)
        parent.kill()
        parent.wait()
        assert select.select([watched], [], [], 20)[0], "the worker outlives its parent"
        os.close(watched)


def test_outcomes_are_bounded_by_entries_and_bytes() -> None:
    cache: OutcomeCache[str] = OutcomeCache(max_entries=3, max_bytes=3000)
    for name in "abcd":
        cache.put(cache.key(name.encode()), name, 10)
    assert [cache.get(cache.key(name.encode())) for name in "abcd"] == [None, "b", "c", "d"]
    cache.put(cache.key(b"e"), "e", 2300)
    assert [cache.get(cache.key(name.encode())) for name in "bcde"] == [None, None, "d", "e"]
    cache.put(cache.key(b"f"), "f", 3000)
    assert cache.get(cache.key(b"f")) is None
    assert cache.num_bytes <= 3000
