"""Time as a parameter, so that tests and simulators set it."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What a part needs to know of time."""

    def monotonic_s(self) -> float:
        """Seconds that only grow, from an arbitrary start."""
        ...

    def time_s(self) -> float:
        """Unix time in seconds."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def time_s(self) -> float:
        return time.time()
