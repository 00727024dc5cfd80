"""Executors that broke the contract, and how long each is refused."""

from __future__ import annotations

from collections import OrderedDict

FIRST_S, MOST_S = 1.0, 60.0
FORGET_AFTER_S = 600.0
"""Without another breach."""

_MOST_NAMES = 256


class Expelled:
    """By the id of the executor, which a new process draws anew: a second, then twice as long each time."""

    __slots__ = ("_by_id",)

    def __init__(self) -> None:
        self._by_id: OrderedDict[str, tuple[float, float]] = OrderedDict()  # (when, for how long), latest last

    def add(self, executor_id: str, now_s: float) -> float:
        """It broke the contract just now; for how many seconds it is refused."""
        at_s, before_s = self._by_id.pop(executor_id, (0.0, 0.0))
        wait_s = min(MOST_S, 2 * before_s) if before_s and now_s - at_s < FORGET_AFTER_S else FIRST_S
        self._by_id[executor_id] = now_s, wait_s
        if len(self._by_id) > _MOST_NAMES:
            self._by_id.popitem(last=False)
        return wait_s

    def wait_s(self, executor_id: str, now_s: float) -> float:
        """For how many seconds more it is refused; 0 or less: it may come."""
        at_s, wait_s = self._by_id.get(executor_id, (now_s, 0.0))
        return at_s + wait_s - now_s
