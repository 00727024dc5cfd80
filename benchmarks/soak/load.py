"""The mixed load on a running server: workers that ask and check, a killer beside them, and what came of it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rorqual.launch import Stack
from rorqual.launch.stack import Event

from .answers import Wrong, read
from .client import Broken, Cut, post, wait_healthy
from .memory import MemoryLog
from .mix import Case, again, draw

KEPT_FAILURES = 8
DROP_SHARE = 0.2
PROBE_SHARE = 0.15


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """What to do for how long. `kinds`: of `mix.KINDS`. `victims`: processes to kill, one every `kill_every_s` or so."""

    load_s: float
    concurrency: int
    kinds: tuple[str, ...]
    probes: Sequence[Case] = ()
    victims: tuple[str, ...] = ()
    kill_every_s: float = 20.0
    recover_s: float = 20.0  # within which a killed process is back; no kill comes so near the end
    answer_s: float = 120.0  # within which every answer must be whole
    seed: int = 0


@dataclass
class Outcome:
    """Counts so far."""

    requests: int = 0
    failed: int = 0
    dropped: int = 0
    probed: int = 0
    output_tokens: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    deaths: Counter[str] = field(default_factory=Counter)  # that nobody asked for
    recovery_s: list[float] = field(default_factory=list)
    first_failures: list[dict[str, Any]] = field(default_factory=list)

    def fail(self, kind: str, what: str, body: Any = None) -> None:
        self.failed += 1
        if len(self.first_failures) < KEPT_FAILURES:
            shown = json.dumps(body, ensure_ascii=False)[:500] if body is not None else ""
            self.first_failures.append({"kind": kind, "what": what[:500], "body": shown})
            print(f"failed: {kind}: {what[:300]}", file=sys.stderr, flush=True)


class Deaths:
    """A stack's events, told apart: deaths that were asked for, and the others."""

    def __init__(self) -> None:
        self.died: Counter[str] = Counter()
        self.ready: Counter[str] = Counter()

    def __call__(self, event: Event) -> None:
        if event.kind == "died":
            self.died[event.name] += 1
        elif event.kind == "ready":
            self.ready[event.name] += 1


class Load:
    """One run of a plan on the server at `url`. Without a stack nothing is killed and no memory is read."""

    def __init__(self, url: str, plan: LoadPlan, stack: Stack | None = None, deaths: Deaths | None = None) -> None:
        self.outcome = Outcome()
        self.memory = MemoryLog()
        self._url, self._plan, self._stack, self._deaths = url, plan, stack, deaths or Deaths()
        self._expected: dict[int, str] = {}
        self._deadline_s = 0.0

    async def run(self) -> None:
        """Record the probes' texts, load until the plan's time is over, and let what is under way end."""
        self._expected = {i: await self._text_of(probe) for i, probe in enumerate(self._plan.probes)}
        self._deadline_s = time.monotonic() + self._plan.load_s
        beside = [asyncio.create_task(self._watch())]
        if self._stack is not None and self._plan.victims:
            beside.append(asyncio.create_task(self._kill_at_random()))
        try:
            await asyncio.gather(*(self._work(number) for number in range(self._plan.concurrency)))
        finally:
            for task in beside:
                task.cancel()
            results = await asyncio.gather(*beside, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        self.outcome.deaths = self._deaths.died - self.outcome.kills
        if self.outcome.deaths:
            self.outcome.fail("process", f"processes died that nobody killed: {dict(self.outcome.deaths)}")

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _text_of(self, probe: Case) -> str:
        """A probe's text on the unloaded server. Raises Wrong or Broken: there is nothing to compare with then."""
        answer = read(probe.path, await post(self._url, probe.path, probe.body, timeout_s=self._plan.answer_s))
        probe.verify(answer)
        return answer.text

    async def _work(self, number: int) -> None:
        rng = random.Random(f"{self._plan.seed} {number}")
        while time.monotonic() < self._deadline_s:
            probe = rng.randrange(len(self._expected)) if self._expected and rng.random() < PROBE_SHARE else None
            if probe is None:
                case = draw(rng, self._plan.kinds)
            else:
                case = again(self._plan.probes[probe], stream=rng.random() < 0.5)
            cut = Cut(rng.randrange(1, 30), rng.uniform(0.01, 0.4)) if rng.random() < DROP_SHARE else None
            await self._ask(case, cut, probe)
            if self._stack is not None and self._stack.error is not None:
                self.outcome.fail("process", f"the stack ended: {self._stack.error}")
                return

    async def _ask(self, case: Case, cut: Cut | None, probe: int | None) -> None:
        outcome = self.outcome
        outcome.requests += 1
        outcome.kinds[case.kind] += 1
        try:
            reply = await post(self._url, case.path, case.body, cut=cut, timeout_s=self._plan.answer_s)
            if reply.cut and (reply.status in (0, 200)):
                outcome.dropped += 1
                return
            answer = read(case.path, reply)
            case.verify(answer)
            outcome.output_tokens += answer.num_output_tokens
            if probe is not None:
                outcome.probed += 1
                if answer.text != self._expected[probe]:
                    raise Wrong(f"changed tokens: {answer.text!r} was {self._expected[probe]!r}")
        except (Wrong, Broken) as error:
            outcome.fail(case.kind, str(error), case.body)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            outcome.fail(case.kind, f"an answer that cannot be read: {error!r}", case.body)

    # --- beside them ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Memory every few seconds, and a line about how it goes."""
        every_s = max(0.5, min(5.0, self._plan.load_s / 60))
        shown_s = started_s = time.monotonic()
        while True:
            if self._stack is not None:
                await asyncio.to_thread(self.memory.take, self._stack.pids)
            if time.monotonic() - shown_s >= 10:
                shown_s, o = time.monotonic(), self.outcome
                print(
                    f"{shown_s - started_s:6.0f} s  {o.requests} requests, {o.dropped} dropped, {o.failed} failed, "
                    f"kills {dict(o.kills)}, MiB {self.memory.last_mib()}",
                    file=sys.stderr,
                    flush=True,
                )
            await asyncio.sleep(every_s)

    async def _kill_at_random(self) -> None:
        """SIGKILL, each victim once a round in an order drawn anew; the next only when the last is back."""
        assert self._stack is not None
        rng = random.Random(f"{self._plan.seed} kills")
        round_: list[str] = []
        while True:
            await asyncio.sleep(self._plan.kill_every_s * rng.uniform(0.5, 1.5))
            if time.monotonic() + self._plan.recover_s > self._deadline_s:
                return
            round_ = round_ or rng.sample(self._plan.victims, len(self._plan.victims))
            victim = round_.pop()
            pid = self._stack.pids.get(victim)
            if pid is None:
                continue  # it died by itself just now, which is counted
            num_ready, killed_s = self._deaths.ready[victim], time.monotonic()
            self.outcome.kills[victim] += 1
            os.kill(pid, signal.SIGKILL)
            while self._deaths.ready[victim] == num_ready and time.monotonic() < killed_s + self._plan.recover_s:
                await asyncio.sleep(0.05)
            left_s = killed_s + self._plan.recover_s - time.monotonic()
            if left_s <= 0 or not await wait_healthy(self._url, left_s):
                self.outcome.fail("process", f"{victim} was not back within {self._plan.recover_s:g} s of its kill")
            self.outcome.recovery_s.append(time.monotonic() - killed_s)
