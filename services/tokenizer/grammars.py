"""Grammars of requests: asked of a process that may die, remembered, and dropped when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rorqual.core.errors import InternalError, InvalidRequestError, QueueFullError, UnavailableError
from rorqual.grammar_bounds import MAX_GRAMMAR_BYTES
from rorqual.grammar_cache import OutcomeCache
from rorqual.grammar_process import Budget, GrammarProcess
from rorqual.v1 import text_pb2

from .grammar_job import PING, GrammarJob, GrammarMade, too_complex

_log = logging.getLogger(__name__)

MAX_WAITING = 1024
"""Requests that wait for their grammars; further ones are refused."""
MAX_SOURCE_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Of a constraint as it was sent: indentation, escapes and empty lines may make it longer than its grammar."""
QUICK = Budget(cpu_s=0.25, wall_s=2.0)
"""What every grammar gets at first: nearly all take milliseconds of it, and none waits for those that take seconds."""
SLOW = Budget(cpu_s=2.0, wall_s=10.0)
"""What those that overran it get. A search for the place at fault gets as much again."""
_MAX_QUICK = 2  # processes at once
_MAX_SLOW = 2


def check_source(constraint: text_pb2.Constraint) -> None:
    """CONSTRAINT_TOO_COMPLEX for a constraint that is too long to be looked at. Takes no time."""
    if constraint.ByteSize() > MAX_SOURCE_BYTES:
        kind = constraint.WhichOneof("constraint")
        place = f"constraint.{kind}" if kind else "constraint"
        raise InvalidRequestError(
            f"{place}: it has more than {MAX_SOURCE_BYTES >> 10} KiB", reason="CONSTRAINT_TOO_COMPLEX", field=place
        )


class _Asked:
    """A job under way, and how many wait for it."""

    __slots__ = ("num_waiting", "task")

    def __init__(self, task: asyncio.Task[GrammarMade]) -> None:
        self.task = task
        self.num_waiting = 0


class Grammars:
    """Lives on one event loop. Nothing of a constraint is read in this process."""

    def __init__(
        self, folder: Path, vocab_size: int, control_tokens: Mapping[str, int], *, for_tests: bool = False
    ) -> None:
        self._process = GrammarProcess(
            "services.tokenizer.grammar_worker",
            {
                "folder": str(folder.resolve()),
                "vocab_size": vocab_size,
                "control_tokens": dict(control_tokens),
                "for_tests": for_tests,
            },
        )
        self._folder = folder
        self._cache: OutcomeCache[GrammarMade] = OutcomeCache()
        self._asked: dict[bytes, _Asked] = {}
        self._quick = asyncio.Semaphore(_MAX_QUICK)
        self._slow = asyncio.Semaphore(_MAX_SLOW)
        self._num_waiting = 0
        self._looking: asyncio.Task[None] | None = None
        self.is_available = True
        """Whether this checkpoint has an engine; taken for granted until `ready` has returned."""

    def start(self) -> None:
        """Load the engine, in the other process, so that no request waits for it."""
        self._process.start()
        self._looking = asyncio.create_task(self._look(), name="grammar-engine")

    async def ready(self) -> None:
        """Returns once `is_available` is known."""
        if self._looking is not None and not self._looking.done():
            await asyncio.shield(self._looking)

    async def stop(self) -> None:
        """End the process, and with it what is under way."""
        self._process.close()
        tasks: list[asyncio.Task[object]] = [asked.task for asked in self._asked.values()]
        if self._looking is not None:
            tasks.append(self._looking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        try:
            outcome = await self._process.run_async(PING, SLOW)
        except OSError as error:
            _log.error("the process for grammars cannot be started: %s", error)
            return
        if outcome.reply:
            self.is_available = False
            _log.warning(
                "structured output is refused: no grammar engine for %s (%s)", self._folder, outcome.reply.decode()
            )

    async def compile(self, job: GrammarJob) -> tuple[str, int | None]:
        """(the grammar's text, known to compile and to be followed; the token that opens what it holds for).

        INVALID_CONSTRAINT, INVALID_TOOLS or CONSTRAINT_TOO_COMPLEX, with the place at fault; QUEUE_FULL. Equal jobs are
        done once; when all who wait for one are cancelled it ends at once.
        """
        packed = job.packed()
        key = OutcomeCache.key(packed)
        made = self._cache.get(key)
        if made is not None:
            return made.given()
        if self._num_waiting >= MAX_WAITING:
            raise QueueFullError(f"{MAX_WAITING} requests wait for their grammars already; try again later")
        asked = self._asked.get(key)
        if asked is None:
            asked = self._asked[key] = _Asked(asyncio.create_task(self._make(job, packed, key)))
        asked.num_waiting += 1
        self._num_waiting += 1
        try:
            made = await asyncio.shield(asked.task)
        finally:
            self._num_waiting -= 1
            asked.num_waiting -= 1
            if not asked.num_waiting:
                if self._asked.get(key) is asked:
                    del self._asked[key]
                asked.task.cancel()
        return made.given()

    async def _make(self, job: GrammarJob, packed: bytes, key: bytes) -> GrammarMade:
        made, lasts = await self._try(packed)
        if made is None and job.any_object_helps:
            made, lasts = await self._try(replace(job, any_object=True).packed())
        if made is None:
            made = too_complex(f"constraint.{job.constraint.WhichOneof('constraint')}" if job.constraint else "tools")
        if made.reason == InternalError.reason:
            _log.error("a grammar could not be made: %s", made.message)
        elif lasts:
            self._cache.put(key, made, sys.getsizeof(made.text) + sys.getsizeof(made.message))
        return made

    async def _try(self, packed: bytes) -> tuple[GrammarMade | None, bool]:
        """(what was made, None where it took too much; whether that would be so another time)."""
        for budget, places in ((QUICK, self._quick), (SLOW, self._slow)):
            async with places:
                try:
                    outcome = await self._process.run_async(packed, budget)
                except OSError as error:
                    raise UnavailableError(f"no process for a grammar can be started ({error}); try again") from error
            if outcome.is_lost or not outcome.began:
                raise UnavailableError("the process for grammars does not start, or ends; try again later")
            if outcome.reply is not None:
                return GrammarMade.unpacked(outcome.reply), True
            if not (outcome.overran or outcome.is_late):
                break
        return (GrammarMade.unpacked(outcome.interim) if outcome.interim else None), not outcome.is_late
