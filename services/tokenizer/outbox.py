"""Events on their way to a caller: gathered while the wire is busy, so that a slow caller gets fewer, larger messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from rorqual.core.errors import RorqualError
from rorqual.rpc.status import to_error_proto
from rorqual.v1 import common_pb2, text_pb2

_MAX_FRAME_BYTES = 16 * 1024 * 1024
_MAX_MERGED_BYTES = 4096
_EVENT_BYTES = 16  # what an event takes beside its own bytes


class EventsMessage(Protocol):
    """ChatResponse or CompleteResponse."""

    @property
    def events(self) -> Any: ...

    def ByteSize(self) -> int: ...


Response = TypeVar("Response", bound=EventsMessage)


class EventList(Protocol):
    """A repeated field of TextEvent that has not been sent yet."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> text_pb2.TextEvent: ...

    def add(self) -> text_pb2.TextEvent: ...


class EventSink(Protocol):
    """Where a request's events go. What is added between two awaits goes out together."""

    def events(self) -> EventList:
        """The list that the next message carries."""
        ...

    def wake(self) -> None:
        """There is something to send."""
        ...

    def end(self) -> None:
        """The last event has been added."""
        ...

    def fail(self, error: RorqualError) -> None:
        """The request failed."""
        ...


def add_text(events: EventList, choice_index: int, token_ids: bytes, kind: str | None, text: str) -> text_pb2.TextEvent:
    """Add an event of `kind` ("content", "reasoning", or None for no text), or lengthen the last one of its choice."""
    if len(events):
        last = events[-1]
        if last.choice_index == choice_index and len(last.token_ids) < _MAX_MERGED_BYTES and not last.logprobs:
            last_kind = last.WhichOneof("event")
            if kind is None and last_kind in (None, "content", "reasoning", "tool_call"):
                last.token_ids += token_ids
                return last
            if kind == last_kind or (last_kind is None and last.token_ids):
                last.token_ids += token_ids
                if kind == "content":
                    last.content += text
                elif kind == "reasoning":
                    last.reasoning += text
                return last
    event = events.add()
    event.choice_index = choice_index
    event.token_ids = token_ids
    if kind == "content":
        event.content = text
    elif kind == "reasoning":
        event.reasoning = text
    return event


def add_call(
    events: EventList, choice_index: int, token_ids: bytes, delta: text_pb2.ToolCallDelta
) -> text_pb2.TextEvent:
    """Add an event for `delta`, or lengthen the last one of its choice by the arguments of the same call."""
    if len(events) and not delta.id:
        last = events[-1]
        if (
            last.choice_index == choice_index
            and last.WhichOneof("event") == "tool_call"
            and last.tool_call.tool_call_idx == delta.tool_call_idx
            and len(last.token_ids) < _MAX_MERGED_BYTES
            and not (last.logprobs or last.tool_call.id)
        ):
            last.token_ids += token_ids
            last.tool_call.arguments_json_delta += delta.arguments_json_delta
            return last
    event = events.add()
    event.choice_index = choice_index
    event.token_ids = token_ids
    event.tool_call.CopyFrom(delta)
    return event


class CallOutbox(Generic[Response]):
    """The events of one request on a call of its own."""

    def __init__(self, response_type: Callable[[], Response]) -> None:
        self._response_type = response_type
        self._response = response_type()
        self._ended = False
        self._error: RorqualError | None = None
        self._wake = asyncio.Event()

    def events(self) -> EventList:
        events: EventList = self._response.events
        return events

    def wake(self) -> None:
        self._wake.set()

    def end(self) -> None:
        self._ended = True
        self._wake.set()

    def fail(self, error: RorqualError) -> None:
        self._error = error
        self.end()

    async def responses(self) -> AsyncIterator[Response]:
        """Messages, until the request has ended. Raises what it failed with, after what came before."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._response.events:
                response, self._response = self._response, self._response_type()
                if response.ByteSize() <= _MAX_FRAME_BYTES:
                    yield response
                else:
                    for run in _split_events(response.events):
                        part = self._response_type()
                        part.events.extend(run)
                        yield part
            if self._ended and not self._response.events:
                if self._error is not None:
                    raise self._error
                return


class SessionOutbox:
    """The events of all requests of a session: one frame a flush."""

    def __init__(self) -> None:
        self._frame = text_pb2.TextServiceSessionResponse()
        self._entries: dict[int, text_pb2.TextStreamEvents] = {}
        self._wake = asyncio.Event()
        self._closed = False

    def sink(self, stream_id: int, on_end: Callable[[int], None]) -> SessionSink:
        return SessionSink(self, stream_id, on_end)

    def entry(self, stream_id: int) -> text_pb2.TextStreamEvents:
        """What the next frame carries for a stream."""
        entry = self._entries.get(stream_id)
        if entry is None:
            entry = self._entries[stream_id] = self._frame.streams.add()
            entry.stream_id = stream_id
        return entry

    def wake(self) -> None:
        self._wake.set()

    def heartbeat(self) -> None:
        self._frame.heartbeat.CopyFrom(common_pb2.Heartbeat())
        self._wake.set()

    def close(self) -> None:
        """End the frames after what has been gathered."""
        self._closed = True
        self._wake.set()

    async def frames(self) -> AsyncIterator[text_pb2.TextServiceSessionResponse]:
        """Frames, until `close`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            frame, self._frame = self._frame, text_pb2.TextServiceSessionResponse()
            self._entries.clear()
            if frame.streams or frame.HasField("heartbeat"):
                if frame.ByteSize() <= _MAX_FRAME_BYTES:
                    yield frame
                else:
                    for part in _split(frame):
                        yield part
            if self._closed and not self._entries:
                return


class SessionSink:
    """One request's place in a session's outbox."""

    __slots__ = ("_on_end", "_outbox", "_stream_id")

    def __init__(self, outbox: SessionOutbox, stream_id: int, on_end: Callable[[int], None]) -> None:
        self._outbox = outbox
        self._stream_id = stream_id
        self._on_end = on_end

    def events(self) -> EventList:
        return self._outbox.entry(self._stream_id).events

    def wake(self) -> None:
        self._outbox.wake()

    def end(self) -> None:
        self._outbox.wake()
        self._on_end(self._stream_id)

    def fail(self, error: RorqualError) -> None:
        self._outbox.entry(self._stream_id).error.CopyFrom(to_error_proto(error))
        self.end()


def _split(frame: text_pb2.TextServiceSessionResponse) -> Iterator[text_pb2.TextServiceSessionResponse]:
    """`frame` as several, each under the limit as far as single events allow. A stream's error follows its last events."""
    part = text_pb2.TextServiceSessionResponse()
    if frame.HasField("heartbeat"):
        part.heartbeat.CopyFrom(frame.heartbeat)
    size = 0
    for entry in frame.streams:
        here = part.streams.add(stream_id=entry.stream_id)
        for event in entry.events:
            own = event.ByteSize() + _EVENT_BYTES
            if size and size + own > _MAX_FRAME_BYTES:
                yield part
                part = text_pb2.TextServiceSessionResponse()
                here = part.streams.add(stream_id=entry.stream_id)
                size = 0
            here.events.append(event)
            size += own
        if entry.HasField("error"):
            here.error.CopyFrom(entry.error)
            size += entry.error.ByteSize()
        size += _EVENT_BYTES
    yield part


def _split_events(events: Any) -> Iterator[list[text_pb2.TextEvent]]:
    """`events` in runs under the limit, as far as single ones allow."""
    run: list[text_pb2.TextEvent] = []
    size = 0
    for event in events:
        own = event.ByteSize() + _EVENT_BYTES
        if run and size + own > _MAX_FRAME_BYTES:
            yield run
            run, size = [], 0
        run.append(event)
        size += own
    yield run
