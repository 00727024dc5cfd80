"""Memory of each process of a stack over time, and how fast it grows."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil

LEAST_SAMPLES = 4


class Sample(NamedTuple):
    at_s: float
    pid: int
    mib: float


def held_mib(process: psutil.Process) -> float:
    """What a process holds, its share of shared pages in proportion (PSS); its resident set where the kernel has no PSS."""
    try:
        with open(f"/proc/{process.pid}/smaps_rollup") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    except (OSError, StopIteration):
        return float(process.memory_info().rss) / 2**20


@dataclass
class MemoryLog:
    """Samples by process; what a process started itself (grammar workers, say) is its "NAME.children"."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def take(self, pids: Mapping[str, int]) -> None:
        """One sample of each process that runs."""
        now_s = time.monotonic()
        for name, pid in pids.items():
            try:
                process = psutil.Process(pid)
                mib, children = held_mib(process), process.children(recursive=True)
                below = sum(held_mib(child) for child in children)
            except (psutil.Error, OSError):
                continue  # it, or a child, ended meanwhile
            self.samples.setdefault(name, []).append(Sample(now_s, pid, mib))
            if children or f"{name}.children" in self.samples:
                self.samples.setdefault(f"{name}.children", []).append(Sample(now_s, pid, below))

    def last_mib(self) -> dict[str, float]:
        return {name: round(rows[-1].mib, 1) for name, rows in self.samples.items()}

    def mib_per_min(self) -> dict[str, float]:
        """Slope over the last two thirds of each process's longest life; processes with few samples are left out."""
        slopes = {name: slope_per_min(longest_life(rows)) for name, rows in self.samples.items()}
        return {name: round(slope, 3) for name, slope in slopes.items() if slope is not None}


def longest_life(rows: list[Sample]) -> list[Sample]:
    """The samples of the process id that was seen the longest: one that was killed begins anew."""
    by_pid: dict[int, list[Sample]] = {}
    for row in rows:
        by_pid.setdefault(row.pid, []).append(row)
    return max(by_pid.values(), key=lambda life: life[-1].at_s - life[0].at_s, default=[])


def slope_per_min(life: list[Sample]) -> float | None:
    """Least squares over the last two thirds, in MiB a minute; None where fewer than LEAST_SAMPLES are left."""
    rows = life[len(life) // 3 :]
    if len(rows) < LEAST_SAMPLES:
        return None
    mean_s = sum(row.at_s for row in rows) / len(rows)
    mean_mib = sum(row.mib for row in rows) / len(rows)
    spread = sum((row.at_s - mean_s) ** 2 for row in rows)
    return 60 * sum((row.at_s - mean_s) * (row.mib - mean_mib) for row in rows) / spread if spread else None
