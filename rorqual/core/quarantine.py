"""Which of the requests that a process runs kills it, found by the deaths alone.

A process that dies takes all its requests along, and they are run again elsewhere: one that kills would do so again and
again. The rules:

- Every request that was in a process when it died has one death more in a row. It is *cleared*, with no death to its name,
  when it ends, or has gone CLEARED_BY positions past the furthest point that it had reached in the process that died. A
  position is whatever grows with the request's work: tokens computed, tokens delivered. What a request finds done already
  (a cached prefix) is no work of its own.
- After the second death in a row it is a *suspect*. Suspects run in groups, of about the square root of their number and
  at most MAX_GROUP. While a group has a process, nobody else enters it. When all of the group are cleared, the process is
  free for the next group, or for everybody.
- When a process dies with several suspects of a group in it, each of these is tried alone.
- A suspect is *guilty* after MIN_DEATHS deaths in a row, LONE_DEATHS of them as the only one in the process. Whoever kills
  processes from outside has to hit the same request so often before it gets past its last point once.

How long others wait: a group has a process to itself for WINDOW_S at most, doubled with each death in a row of its
members after the second, and at most MAX_WINDOW_S. Then others may enter, though the members have not been cleared: a
prompt that takes minutes to get where it died does not stand in everybody's way. Its deaths still count.

Of n suspects with one guilty among them, at most 3 further deaths find it: its group's, and two of its own.

Pure: no clock and no I/O; times are parameters, in seconds of any one clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

SUSPECT_AFTER = 2
LONE_DEATHS = 2
MIN_DEATHS = 3
CLEARED_BY = 8
"""Positions past the point of death that clear a request."""

MAX_GROUP = 8
WINDOW_S = 4.0
MAX_WINDOW_S = 256.0
PATIENCE_S = 10.0
"""How long suspects wait for a process that is empty by itself before one should be emptied for them; and how long that may
take before it is open to everybody again."""

Key = TypeVar("Key", bound=Hashable)
Process = TypeVar("Process", bound=Hashable)


@dataclass(slots=True)
class _Record(Generic[Process]):
    """A request with at least one death in a row."""

    number: int  # order of first deaths
    deaths: int = 0
    lone_deaths: int = 0
    point: int = 0  # the furthest position that it may have reached in the process that died last
    start: int = 0  # its position when it entered the process where it is now
    is_tried_alone: bool = False
    num_trials: int = 0  # groups that it was in since its last death
    is_at_large: bool = False  # its time in a group is up: it runs with everybody, though not cleared

    @property
    def is_suspect(self) -> bool:
        return self.deaths >= SUSPECT_AFTER

    @property
    def order(self) -> tuple[int, int, bool, int]:
        """Who is nearest to a verdict goes first: it is then the first in its process, and has the most time there."""
        return self.num_trials, -self.lone_deaths, not self.is_tried_alone, self.number


@dataclass(slots=True)
class _Group(Generic[Key]):
    """What has a process to itself; without members while the process is being emptied for the next group."""

    until_s: float
    members: set[Key] = field(default_factory=set)  # not yet cleared
    entered: set[Key] = field(default_factory=set)


class Quarantine(Generic[Key, Process]):
    """Requests with deaths to their name, by `Key`, and the processes that groups of them have to themselves.

    The owner says what happens (`entered`, `progressed`, `ended`, `died`, `gone`), calls `assign` for a process that is
    empty while there are `pending` suspects, and asks `admits` before it lets anybody in. Requests without a death cost
    nothing here: `progressed`, `entered` and `ended` need be called only while `watches` says so, and do nothing otherwise.
    """

    def __init__(self) -> None:
        self._records: dict[Key, _Record[Process]] = {}
        self._groups: dict[Process, _Group[Key]] = {}
        self._pending: dict[Key, None] = {}  # suspects in no group
        self._pending_since_s = 0.0
        self._num_records = 0
        self.num_guilty = 0

    # -- what happens ---------------------------------------------------------------------------------

    def watches(self, key: Key) -> bool:
        """Whether `key` has deaths to its name."""
        return key in self._records

    def entered(self, key: Key, process: Process, position: int) -> None:
        """`key` starts in `process`; `position`: what is done of it already."""
        record = self._records.get(key)
        if record is not None:
            record.start = position
            group = self._groups.get(process)
            if group is not None and key in group.members:
                group.entered.add(key)

    def progressed(self, key: Key, position: int) -> bool:
        """`key` has got to `position` in its process; True if that has just cleared it."""
        record = self._records.get(key)
        if record is None or position < max(record.point, record.start) + CLEARED_BY:
            return False
        self.ended(key)
        return True

    def ended(self, key: Key) -> None:
        """`key` is cleared, is over, or was given up: it is forgotten."""
        if self._records.pop(key, None) is None:
            return
        self._pending.pop(key, None)
        self._leave_groups(key)

    def died(self, process: Process, reached: Mapping[Key, int], now_s: float) -> list[Key]:
        """`process` has died with those of `reached` in it; the guilty, which are forgotten here.

        `reached`: for each the furthest position that it may have got to, work in progress included.
        """
        group = self._groups.pop(process, None)
        if group is not None:
            self._to_pending(group.members - reached.keys(), now_s)
        of_group = group.members & reached.keys() if group is not None else set[Key]()
        guilty: list[Key] = []
        for key, position in reached.items():
            record = self._records.get(key)
            if record is None:
                self._num_records += 1
                record = self._records[key] = _Record(self._num_records)
            record.deaths += 1
            record.point = position
            record.num_trials = 0
            record.is_at_large = False
            record.is_tried_alone = record.is_tried_alone or key in of_group
            if len(reached) == 1:
                record.lone_deaths += 1
            if record.lone_deaths >= LONE_DEATHS and record.deaths >= MIN_DEATHS:
                guilty.append(key)
            elif record.is_suspect:
                self._to_pending((key,), now_s)
        for key in guilty:
            self.ended(key)
        self.num_guilty += len(guilty)
        return guilty

    def gone(self, process: Process, now_s: float) -> None:
        """`process` has left by itself, or by a fault that is not its requests': nobody's death."""
        group = self._groups.pop(process, None)
        if group is not None:
            self._to_pending(group.members, now_s)

    # -- who runs where -------------------------------------------------------------------------------

    @property
    def pending(self) -> list[Key]:
        """Suspects that no process was assigned to, the next first."""
        return sorted(self._pending, key=lambda key: self._records[key].order)

    @property
    def has_pending(self) -> bool:
        return bool(self._pending)

    @property
    def is_watching(self) -> bool:
        """Whether anybody has deaths to its name."""
        return bool(self._records)

    def is_pending(self, key: Key) -> bool:
        """Whether `key` must not run before it is assigned a process."""
        return key in self._pending

    def is_isolated(self, key: Key) -> bool:
        """Whether `key` may run only in a process that is held for it, now or later."""
        record = self._records.get(key)
        return record is not None and record.is_suspect and not record.is_at_large

    def has_members(self, process: Process) -> bool:
        """Whether `process` is held for a group that has been chosen."""
        group = self._groups.get(process)
        return group is not None and bool(group.members)

    def is_held(self, process: Process) -> bool:
        """Whether `process` is a group's alone, or is being emptied for one."""
        return process in self._groups

    @property
    def is_holding(self) -> bool:
        """Whether any process is a group's alone, or is being emptied for one."""
        return bool(self._groups)

    def admits(self, key: Key, process: Process) -> bool:
        """Whether `key` may enter `process` now."""
        if key in self._pending:
            return False
        group = self._groups.get(process)
        if group is not None:
            return key in group.members
        return not self.is_isolated(key)

    def assign(self, process: Process, now_s: float, fits: Callable[[Key], bool] = lambda key: True) -> list[Key]:
        """The next group of suspects, which `process` is held for; empty, and not held, where none is pending.

        Nobody may be in `process` now. `fits`: whether a suspect could run there at all.
        """
        self._groups.pop(process, None)
        pending = [key for key in self.pending if fits(key)]
        if not pending:
            return []
        size = 1 if self._is_for_itself(pending[0]) else min(MAX_GROUP, math.ceil(math.sqrt(len(pending))))
        members = pending[:1] + [key for key in pending[1:] if not self._is_for_itself(key)][: size - 1]
        most_deaths = 0
        for key in members:
            del self._pending[key]
            self._records[key].num_trials += 1
            most_deaths = max(most_deaths, self._records[key].deaths)
        window_s = min(MAX_WINDOW_S, WINDOW_S * 2.0 ** min(most_deaths - SUSPECT_AFTER, 16))
        self._groups[process] = _Group(now_s + window_s, set(members))
        self._pending_since_s = now_s
        return members

    def close(self, process: Process, now_s: float) -> None:
        """Hold `process` for the next group, which is assigned when it is empty; not for longer than PATIENCE_S."""
        self._groups[process] = _Group(now_s + PATIENCE_S)
        self._pending_since_s = now_s

    def wants_a_process(self, now_s: float) -> bool:
        """Whether suspects have waited so long, and none is being tried, that a process should be emptied for them."""
        return bool(self._pending) and not self._groups and now_s >= self._pending_since_s + PATIENCE_S

    def postpone(self, now_s: float) -> None:
        """No process could be emptied: the suspects wait for as long again."""
        self._pending_since_s = now_s

    def expire(self, now_s: float) -> list[Process]:
        """Give back to everybody the processes whose group's time is up, and say which."""
        expired = [process for process, group in self._groups.items() if group.until_s <= now_s]
        for process in expired:
            group = self._groups.pop(process)
            for key in group.members & group.entered:
                self._records[key].is_at_large = True
            self._to_pending(group.members - group.entered, now_s)
        return expired

    def next_s(self) -> float | None:
        """When `expire` or `wants_a_process` will have something to say."""
        times = [group.until_s for group in self._groups.values()]
        if self._pending and not self._groups:
            times.append(self._pending_since_s + PATIENCE_S)
        return min(times, default=None)

    # -- inside ---------------------------------------------------------------------------------------

    def _is_for_itself(self, key: Key) -> bool:
        record = self._records[key]
        return record.is_tried_alone or record.lone_deaths > 0

    def _to_pending(self, keys: Iterable[Key], now_s: float) -> None:
        for key in keys:
            if not self._pending:
                self._pending_since_s = now_s
            self._pending[key] = None

    def _leave_groups(self, key: Key) -> None:
        for process, group in self._groups.items():
            if key in group.members:
                group.members.discard(key)
                group.entered.discard(key)
                if not group.members:
                    del self._groups[process]
                return

    # -- invariants, for tests ------------------------------------------------------------------------

    def check(self) -> None:
        """AssertionError unless each suspect is in one place."""
        grouped = [key for group in self._groups.values() for key in group.members]
        assert len(grouped) == len(set(grouped))
        for key, record in self._records.items():
            places = (key in self._pending) + (key in grouped) + (record.is_suspect and record.is_at_large)
            assert places == record.is_suspect, f"{key!r}: {record}"
        assert self._pending.keys() <= self._records.keys()
