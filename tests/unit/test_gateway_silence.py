"""When the reader of a stream is woken to say that it is alive."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from gateway.silence import Silence
from gateway.upstream.inbox import IDLE, Inbox
from rorqual.core.errors import UnavailableError
from rorqual.v1 import text_pb2


class ManualClock:
    now_s = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def time_s(self) -> float:
        return self.now_s


class ManualLoop:
    """Its one timer fires when it is told to."""

    delay_s: float | None = None
    callback: Callable[[], None] = staticmethod(lambda: None)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Any:
        self.delay_s, self.callback = delay_s, callback
        return self

    def cancel(self) -> None:
        self.delay_s = None


def waiting(clock: ManualClock, **settings: Any) -> tuple[Inbox, asyncio.Task[Any]]:
    inbox = Inbox(clock, **settings)
    return inbox, asyncio.create_task(inbox.take())


async def settled(task: asyncio.Task[Any]) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return task.done()


async def test_a_period_after_the_last_write_and_each_period_from_then_on() -> None:
    clock, loop = ManualClock(), ManualLoop()
    inbox, taking = waiting(clock)
    silence = Silence(loop, clock, inbox, 10.0)  # type: ignore[arg-type]
    assert loop.delay_s == 10
    clock.now_s += 4
    silence.last_write_s = clock.now_s
    clock.now_s += 6
    loop.callback()
    assert loop.delay_s == 4
    assert not await settled(taking)
    clock.now_s += 4
    loop.callback()
    assert loop.delay_s == 10
    assert await taking == [IDLE]
    loop.callback()  # nobody waits: a write is under way
    assert loop.delay_s == 10
    taking = asyncio.create_task(inbox.take())
    assert not await settled(taking)
    clock.now_s += 10
    loop.callback()
    assert await taking == [IDLE]
    silence.end()
    assert loop.delay_s is None


async def test_none_where_the_period_is_0() -> None:
    clock, loop = ManualClock(), ManualLoop()
    Silence(loop, clock, Inbox(clock), 0.0).end()  # type: ignore[arg-type]
    assert loop.delay_s is None


async def test_a_sign_loses_and_hides_nothing() -> None:
    clock = ManualClock()
    inbox, taking = waiting(clock)
    assert not await settled(taking)
    inbox.idle()
    inbox.idle()
    inbox.put(0, text_pb2.TextEvent(content="a"), "content")
    inbox.fail(UnavailableError("gone"))
    first, second = await taking
    assert first is IDLE
    assert second.text == "a"
    with pytest.raises(UnavailableError):
        await inbox.take()


async def test_a_reader_of_the_whole_is_not_woken() -> None:
    inbox, taking = waiting(ManualClock(), whole=True)
    assert not await settled(taking)
    inbox.idle()
    assert not await settled(taking)
    inbox.end_stream()
    assert await taking == []
