"""What a process does about memory: a collector of cycles that runs seldom, and freed memory given back when it idles."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

_STATM = Path("/proc/self/statm")
_PAGE_BYTES = 4096
GROWTH_BYTES = 32 << 20
"""By how much a process grows before it looks for what it can give back."""
INTERVAL_S = 5.0


def collect_seldom() -> None:
    """Look for cycles seldom, and never in what exists now. Called once, when a process has started.

    At 1,024 sequences this took a third off the scheduler core's time a token; a gateway of 256 streams spent 9 % of its
    time in collections. What Python keeps free, glibc keeps too: see `give_back_memory`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def resident_bytes() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        return int(_STATM.read_text().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError):
        return 0


def collect(*, whole: bool) -> None:
    """Free what lies in cycles; not `whole`: among newer objects, which takes little time whatever is under way."""
    gc.collect(2 if whole else 1)


def trim() -> None:
    """Give the system the pages that the C library keeps for later. Without the interpreter's lock; some milliseconds."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if release is not None:
        release(0)


async def give_back_memory(
    is_idle: Callable[[], bool], *, interval_s: float = INTERVAL_S, growth_bytes: int = GROWTH_BYTES
) -> None:
    """Look each `interval_s` whether the process has grown, and give back what nobody uses. Runs until it is cancelled.

    A refused request lies in a cycle (error, traceback, frame), and with `collect_seldom` that may keep megabytes of it for
    hours; what is freed after that stays with the C library.
    """
    floor = idle_floor = resident_bytes()
    while True:
        await asyncio.sleep(interval_s)
        now, idle = resident_bytes(), is_idle()
        if now > (idle_floor if idle else floor) + growth_bytes:
            collect(whole=idle)
            await asyncio.to_thread(trim)
            floor = now = resident_bytes()
            if idle:
                idle_floor = now
        floor, idle_floor = min(floor, now), min(idle_floor, now)
