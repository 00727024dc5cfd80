"""What a process does about memory: a collector of cycles that runs seldom, and freed memory given back when it idles."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

IDLE_S = 2.0
"""Without work, before memory is given back."""


def collect_seldom() -> None:
    """Look for cycles seldom, and never in what exists now. Called once, when a process has started.

    At 1,024 sequences this took a third off the scheduler core's time a token; a gateway of 256 streams spent 9 % of its
    time in collections. What Python keeps free, glibc keeps too: see `IdleTrim`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def give_back_memory() -> None:
    """Collect cycles, and hand memory that is free to the operating system, where the C library can: glibc's malloc_trim.

    Takes some milliseconds for each 100 MB.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):  # another C library
        return


class IdleTrim:
    """Gives memory back once after each time of work, when that has been over for IDLE_S. Asked about once a second."""

    def __init__(self, give_back: Callable[[], None] = give_back_memory) -> None:
        self._give_back = give_back
        self._is_due = False
        self._idle_since_s: float | None = None

    def note(self, *, is_busy: bool, now_s: float) -> None:
        """`is_busy`: whether there is work now, or was since this was asked last."""
        if is_busy:
            self._is_due, self._idle_since_s = True, None
        elif self._is_due:
            if self._idle_since_s is None:
                self._idle_since_s = now_s
            elif now_s - self._idle_since_s >= IDLE_S:
                self._is_due, self._idle_since_s = False, None
                self._give_back()
