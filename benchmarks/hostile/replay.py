"""Runs one attack with innocents beside it, and says what it cost: outcome, deaths, their worst wait, memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.soak.client import wait_healthy
from benchmarks.soak.memory import MemoryLog

from .attacks import Attack
from .innocents import InnocentProcess
from .target import Target

RECOVER_S = 60.0
"""Within which the server is well again after an attack."""
HANGS_MS = 1000.0
"""An innocent that waits so long waits because of the attack."""


@dataclass
class Result:
    """`faults`: all that was wrong; none is a parried attack. Times are the innocents' worst, in ms."""

    name: str
    took_s: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    died: dict[str, int] = field(default_factory=dict)
    innocents: dict[str, Any] = field(default_factory=dict)
    mib_before: dict[str, float] = field(default_factory=dict)
    mib_after: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def line(self) -> str:
        """For people."""
        memory = ", ".join(
            f"{name} {self.mib_before.get(name, 0):.0f} -> {mib:.0f}"
            for name, mib in self.mib_after.items()
            if abs(mib - self.mib_before.get(name, 0)) >= 10
        )
        waits = " / ".join(f"{self.innocents.get(key, 0):,.0f}" for key in ("gap_ms", "first_ms", "short_ms"))
        text = f"{'ok' if not self.faults else 'WRONG':5} {self.name:18} {self.took_s:5.1f} s  {waits:>24} ms  {self.statuses}"
        text += f"  MiB: {memory}" if memory else ""
        text += f"  died: {self.died}" if self.died else ""
        return text + "".join(f"\n      {fault}" for fault in self.faults)


class _Processes:
    """Which processes a stack has had: each further one of a name is a death."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._seen: dict[str, set[int]] = {}
        self._look()

    def _look(self) -> None:
        if self._target.stack is not None:
            for name, pid in self._target.stack.pids.items():
                self._seen.setdefault(name, set()).add(pid)

    async def watch(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(0.05)

    def died(self) -> dict[str, int]:
        """Deaths by process since the watch began."""
        self._look()
        stack = self._target.stack
        alive = stack.pids if stack is not None else {}
        deaths = {name: len(pids) - (name in alive) for name, pids in self._seen.items()}
        return {name: count for name, count in deaths.items() if count}


async def replay(attack: Attack, target: Target, innocents: InnocentProcess, stall_s: float = 0.0) -> Result:
    """Run it to its end or for `within_s`, and wait until the server is well.

    `stall_s`: how long an innocent may wait for a token or an answer; 0 for as long as it takes.
    """
    result, processes, memory = Result(attack.name), _Processes(target), MemoryLog()
    target.take()
    await asyncio.to_thread(innocents.take)
    result.mib_before = await _mib(target, memory)
    watching = asyncio.create_task(processes.watch())
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(attack.within_s):
            await attack.run(target)
    except TimeoutError:
        target.fault(f"it had not ended after {attack.within_s:g} s")
    except Exception as error:  # whatever a broken server does to an attacker is the attack's outcome
        target.fault(f"the attacker was stopped by {error!r}")
    result.took_s = round(time.monotonic() - started_s, 1)
    if not await wait_healthy(target.url, RECOVER_S):
        target.fault(f"not healthy within {RECOVER_S:g} s afterwards")
    else:
        await _nothing_left(target)
    watching.cancel()
    result.innocents = await _taken(innocents)
    result.died = processes.died()
    result.mib_after = await _mib(target, memory)
    result.statuses, result.faults = target.take()
    if unasked := set(result.died) - attack.may_die:
        result.faults.append(f"died: {', '.join(sorted(unasked))}")
    failures = result.innocents["failures"]
    if attack.innocents_may:
        failures = [failure for failure in failures if not failure.startswith(f"status {attack.innocents_may}")]
    result.faults += [f"an innocent failed: {failure}" for failure in failures[:3]]
    # (Deaths that were asked for, and places that are all taken, cost what they cost.)
    is_bound = stall_s and not attack.may_die and not attack.innocents_may
    for key, what in (
        ("gap_ms", "a stream stood still"),
        ("first_ms", "a first token"),
        ("short_ms", "a short answer"),
    ):
        if is_bound and result.innocents[key] > 1000 * stall_s:
            result.faults.append(f"an innocent waited: {what}, {result.innocents[key] / 1000:.1f} s")
    return result


async def _taken(innocents: InnocentProcess, timeout_s: float = 20.0) -> dict[str, Any]:
    """What they met; where one failed or hangs, until they are served again: it is of this attack, not of the next."""
    taken = await asyncio.to_thread(innocents.take)
    end_s = time.monotonic() + timeout_s
    while (taken["failures"] or taken["hangs_ms"] > HANGS_MS) and time.monotonic() < end_s:
        await asyncio.sleep(0.2)
        more = await asyncio.to_thread(innocents.take)
        taken["failures"] += more["failures"]
        taken |= {key: max(taken[key], more[key]) for key in ("gap_ms", "first_ms", "short_ms")}
        taken["hangs_ms"] = more["hangs_ms"]
        if more["whole"] and not more["failures"] and more["hangs_ms"] <= HANGS_MS:
            break
    return taken


async def _nothing_left(target: Target, timeout_s: float = 20.0) -> None:
    """The attackers' requests are gone from the scheduler: what runs is at most the innocents' two."""
    if not target.scheduler_address:
        return
    end_s = time.monotonic() + timeout_s
    running = waiting = -1
    while time.monotonic() < end_s:
        with contextlib.suppress(Exception):  # while it is restarted it does not answer
            info = await target.info()
            running, waiting = info.num_running, info.num_waiting
            if running <= 2 and waiting <= 2:
                return
        await asyncio.sleep(0.1)
    target.fault(f"left behind after {timeout_s:g} s: {running} running, {waiting} waiting")


async def _mib(target: Target, memory: MemoryLog) -> dict[str, float]:
    if target.stack is None:
        return {}
    with contextlib.suppress(psutil.Error):
        await asyncio.to_thread(memory.take, target.stack.pids)
    return memory.last_mib()
