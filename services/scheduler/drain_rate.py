"""How fast the queue has drained lately, and so how long a newcomer would wait in it."""

from __future__ import annotations

import math
from collections import deque
from typing import TypeAlias

Work: TypeAlias = tuple[int, int, int]
"""What waits, in three measures: requests, tokens of their histories, and tokens they may grow to."""

_MOST_SAMPLES = 256
_MOST_AGE_S = 60.0
_FEWEST_DEPARTURES = 16
"""Fewer say nothing about a rate."""


class DrainRate:
    """Departures from a queue that was never empty in between: `note` each, `clear` when the queue is empty.

    Requests differ, and which of them wait is known, but not what bounds the service: sequences, prefill or memory. So
    a wait is estimated in each measure of `Work`, and the shortest estimate counts.
    """

    __slots__ = ("_departures", "_sum")

    def __init__(self) -> None:
        self._sum: Work = (0, 0, 0)
        self._departures: deque[tuple[float, Work]] = deque()  # (time, all that had left by then)

    def note(self, work: Work, now_s: float) -> None:
        """One left the queue: to run, or for good."""
        a, b, c = self._sum
        self._sum = a + work[0], b + work[1], c + work[2]
        self._departures.append((now_s, self._sum))
        if len(self._departures) > _MOST_SAMPLES:
            self._departures.popleft()

    def clear(self) -> None:
        """What was measured says nothing about what comes."""
        self._departures.clear()

    def least_wait_s(self, ahead: Work, now_s: float) -> float | None:
        """A wait that it takes at the very least until `ahead` has left the queue; None where that is uncertain.

        Of departures at random times, n are seen where up to n + 3 sqrt(n) could have been. A standstill now does not
        count as slowness: it may be over at once.
        """
        self._forget(now_s)
        num_seen = len(self._departures) - 1
        if num_seen < _FEWEST_DEPARTURES:
            return None
        (first_s, before), (last_s, after) = self._departures[0], self._departures[-1]
        fastest = 1.0 + 3.0 / math.sqrt(num_seen)
        waits = [
            left / (fastest * (done_after - done_before)) * (last_s - first_s)
            for left, done_before, done_after in zip(ahead, before, after, strict=True)
            if done_after > done_before
        ]
        return min(waits)

    def wait_s(self, num_ahead: int, now_s: float) -> float | None:
        """The likely wait behind `num_ahead` requests; None where nothing has left the queue yet."""
        self._forget(now_s)
        num_seen = len(self._departures) - 1
        if num_seen < 1:
            return None
        return num_ahead / num_seen * (now_s - self._departures[0][0])

    def _forget(self, now_s: float) -> None:
        while self._departures and self._departures[0][0] < now_s - _MOST_AGE_S:
            self._departures.popleft()
