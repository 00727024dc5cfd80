"""The cheap ones of the known attacks, on a whole stack: parried, nobody dies, and innocents beside them are served."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.hostile.attacks import ATTACKS, Attack
from benchmarks.hostile.innocents import InnocentProcess
from benchmarks.hostile.replay import Result, replay
from benchmarks.hostile.target import Target

SHORT = [attack for attack in ATTACKS.values() if attack.short]


@pytest.fixture(scope="module")
def target(stack: Any) -> Target:
    return Target(stack.url, stack.text_address, stack.scheduler_address, stack)


@pytest.fixture(scope="module")
def innocents(target: Target) -> Iterator[InnocentProcess]:
    process = InnocentProcess(target.url)
    yield process
    process.close()


@pytest.mark.parametrize("attack", SHORT, ids=lambda attack: attack.name)
def test_it_is_parried(attack: Attack, target: Target, innocents: InnocentProcess) -> None:
    result = asyncio.run(replay(attack, target, innocents))
    assert not result.faults, result.line


def replay_one(run: Any, target: Target, innocents: InnocentProcess) -> Result:
    return asyncio.run(replay(Attack("planted", "", run, within_s=10), target, innocents))


def test_a_wrong_status_is_noticed(target: Target, innocents: InnocentProcess) -> None:
    async def served_where_it_should_be_refused(t: Target) -> None:
        t.expect("it", await t.status("/v1/completions", {"prompt": "x", "max_tokens": 1}), (400,))

    result = replay_one(served_where_it_should_be_refused, target, innocents)
    assert result.faults == ["it: 200, right is 400"]


def test_an_attacker_that_is_stopped_is_noticed(target: Target, innocents: InnocentProcess) -> None:
    async def breaks(t: Target) -> None:
        raise ConnectionResetError("gone")

    assert replay_one(breaks, target, innocents).faults == ["the attacker was stopped by ConnectionResetError('gone')"]


def test_a_death_and_an_innocent_that_failed_are_noticed(target: Target) -> None:
    class Witness:
        """Innocents that have seen a stream end early, and are served again after that."""

        def __init__(self) -> None:
            self._failures = [[], ["the stream ended without [DONE]"]]  # before the attack, and by its end

        def take(self) -> dict[str, Any]:
            failures = self._failures.pop(0) if self._failures else []
            waits = {"hangs_ms": 0.0, "gap_ms": 7000.0, "first_ms": 0.0, "short_ms": 0.0}
            return {"whole": 1, "failures": failures, **waits}

    class Losing:
        """A stack whose executor is another each time one looks."""

        def __init__(self) -> None:
            self._pid = 10**9

        @property
        def pids(self) -> dict[str, int]:
            self._pid += 1
            return {"executor": self._pid}

    async def nothing(t: Target) -> None:
        return None

    losing: Any = Losing()
    witness: Any = Witness()
    attacked = Target(target.url, stack=losing)
    result = asyncio.run(replay(Attack("planted", "", nothing, within_s=10), attacked, witness, stall_s=5))
    assert result.died["executor"] > 0
    assert result.faults == [
        "died: executor",
        "an innocent failed: the stream ended without [DONE]",
        "an innocent waited: a stream stood still, 7.0 s",
    ]
