"""When a stream has been silent for so long that its client should hear that it is alive."""

from __future__ import annotations

import asyncio

from rorqual.core.clock import Clock

from .upstream.inbox import Inbox

COMMENT = b": keep-alive\n\n"
"""A comment, which every reader of events skips (WHATWG, Server-sent events, 9.2.6)."""


class Silence:
    """Wakes the reader of `inbox` with IDLE each `period_s` after the last write; 0: never.

    One timer a stream, which looks at the last write when it fires: a write costs an assignment.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock, inbox: Inbox, period_s: float) -> None:
        self.last_write_s = clock.monotonic_s()
        self._loop = loop
        self._clock = clock
        self._inbox = inbox
        self._period_s = period_s
        self._timer: asyncio.TimerHandle | None = loop.call_later(period_s, self._look) if period_s else None

    def _look(self) -> None:
        now_s = self._clock.monotonic_s()
        left_s = self.last_write_s + self._period_s - now_s
        if left_s <= 0:
            self._inbox.idle()
            left_s = self._period_s
        self._timer = self._loop.call_later(left_s, self._look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
