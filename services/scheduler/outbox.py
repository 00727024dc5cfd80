"""What waits for one caller's wire: stream events that merge while it is busy."""

from __future__ import annotations

import asyncio

from .stream_events import StreamEvent, StreamFailed, StreamTokens

_EVENT_BYTES = 64
_ENTRY_BYTES = 216
"""Of a token's log-probabilities, with 21 alternatives."""
_MOST_EVENTS = 4096
"""In one frame; the rest goes into the next."""
MAX_FRAME_BYTES = 16 << 20
"""Of the events of a frame, encoded, unless a single one is larger: a quarter of what one message may have."""


class Outbox:
    """Events of one session (or call), in order, taken when the wire is free.

    A slow caller gets fewer, larger deltas: what waits is at most one delta a stream, beside its start and end, and
    nobody else waits for it.
    """

    __slots__ = ("_closed", "_error", "_events", "_heartbeat_due", "_last", "_ready")

    def __init__(self) -> None:
        self._events: list[tuple[int, StreamEvent]] = []
        self._last: dict[int, int] = {}  # stream id -> index of its last delta, which a further one may join
        self._ready = asyncio.Event()
        self._heartbeat_due = False
        self._closed = False
        self._error: BaseException | None = None

    def push(self, stream_id: int, event: StreamEvent) -> None:
        """Append an event of the caller's stream `stream_id`."""
        events = self._events
        if isinstance(event, StreamTokens):
            num_events = len(events)
            at = self._last.setdefault(stream_id, num_events)
            if at != num_events:
                earlier = events[at][1]
                assert isinstance(earlier, StreamTokens)
                events[at] = stream_id, _merged(earlier, event)
                return
        if not events:  # (while any waits, it is set)
            self._ready.set()
        events.append((stream_id, event))

    def beat(self) -> None:
        """A heartbeat goes out, alone if nothing else does."""
        self._heartbeat_due = True
        self._ready.set()

    def close(self) -> None:
        """After what waits, the end."""
        self._closed = True
        self._ready.set()

    def fail(self, error: BaseException) -> None:
        """`take` raises `error`, now."""
        if self._error is None:
            self._error = error
        self._ready.set()

    async def take(self) -> tuple[list[tuple[int, StreamEvent]], bool] | None:
        """What has gathered, and whether a heartbeat is due; waits until there is anything. None at the end."""
        await self._ready.wait()
        if self._error is not None:
            raise self._error
        events, beat = self._events, self._heartbeat_due
        if not events and not beat:
            return None  # closed
        num = _num_in_frame(events)
        self._events, self._last, self._heartbeat_due = events[num:], {}, False
        if not self._events and not self._closed:
            self._ready.clear()
        return events[:num] if self._events else events, beat


def _num_in_frame(events: list[tuple[int, StreamEvent]]) -> int:
    """How many of the first events go into one frame."""
    num_bytes = 0
    for i, (_, event) in enumerate(events[:_MOST_EVENTS]):
        if isinstance(event, StreamTokens):
            num_bytes += len(event.token_ids) + _EVENT_BYTES
            num_bytes += _ENTRY_BYTES * (len(event.logprobs or ()) + len(event.prompt_logprobs or ()))
        elif isinstance(event, StreamFailed):
            num_bytes += 4 * len(event.error.message) + 1024
        else:
            num_bytes += _EVENT_BYTES
        if num_bytes > MAX_FRAME_BYTES and i:
            return i
    return min(len(events), _MOST_EVENTS)


def _merged(earlier: StreamTokens, later: StreamTokens) -> StreamTokens:
    token_ids = earlier.token_ids if isinstance(earlier.token_ids, bytearray) else bytearray(earlier.token_ids)
    token_ids += later.token_ids
    if earlier.logprobs is None and later.logprobs is None and later.prompt_logprobs is None:
        return earlier._replace(token_ids=token_ids)
    return StreamTokens(
        earlier.stream_id,
        token_ids,
        [*(earlier.logprobs or ()), *(later.logprobs or ())] or None,
        [*(earlier.prompt_logprobs or ()), *(later.prompt_logprobs or ())] or None,
    )
