"""A loop that sleeps lightly does so while something stirs, and not for long after."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

import pytest

from rorqual.rpc.light_sleep import FEW, LIGHT_S, TICK_S, LightSleep


class VirtualLoop:
    """Timers alone, on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 5.0
        self.timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.num_wakes = 0

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.timers, (self.now_s + delay_s, len(self.timers), callback, args))

    def run_until(self, when_s: float) -> None:
        while self.timers and self.timers[0][0] <= when_s:
            self.now_s, _, callback, args = heapq.heappop(self.timers)
            self.num_wakes += 1
            callback(*args)
        self.now_s = when_s


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> VirtualLoop:
    loop = VirtualLoop()
    monkeypatch.setattr("rorqual.rpc.light_sleep.asyncio.get_running_loop", lambda: loop)
    return loop


def test_ticks_until_nothing_has_stirred_for_a_while(loop: VirtualLoop) -> None:
    sleep = LightSleep()
    sleep.stir(1)
    loop.run_until(5.0 + LIGHT_S / 2)
    assert len(loop.timers) == 1
    sleep.stir(FEW)
    sleep.stir(0)
    assert len(loop.timers) == 1  # one tick at a time, however often it stirs
    loop.run_until(5.0 + 1.4 * LIGHT_S)
    assert len(loop.timers) == 1
    loop.run_until(5.0 + 2 * LIGHT_S)
    assert not loop.timers
    assert loop.num_wakes == pytest.approx(1.5 * LIGHT_S / TICK_S, abs=2)


def test_begins_anew(loop: VirtualLoop) -> None:
    sleep = LightSleep()
    for start_s in (5.0, 50.0):
        loop.run_until(start_s)
        assert not loop.timers
        sleep.stir(1)
        loop.run_until(start_s + LIGHT_S / 2)
        assert loop.timers
        loop.run_until(start_s + 2 * LIGHT_S)
    assert not loop.timers


def test_many_requests_need_no_ticks(loop: VirtualLoop) -> None:
    sleep = LightSleep()
    sleep.stir(FEW + 1)
    assert not loop.timers
    sleep.stir(FEW)
    for step in range(1, 20):
        loop.run_until(5.0 + step * LIGHT_S / 10)
        sleep.stir(FEW + 1)
    assert not loop.timers  # they go on no longer for what stirs beside them
