"""A gateway's session: many requests on one stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from rorqual.core.errors import InternalError, InvalidRequestError, PreconditionError, RorqualError
from rorqual.v1 import text_pb2

from .engine import TextEngine, TextRequest
from .outbox import SessionOutbox, SessionSink
from .run import TextRun

_log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0


class UsedIds:
    """Which stream ids a session has seen, in little memory where they count up."""

    __slots__ = ("_beyond", "_first", "_next")

    def __init__(self) -> None:
        self._first = self._next = -1  # all of [first, next) are used
        self._beyond: set[int] = set()

    def add(self, stream_id: int) -> bool:
        """False where `stream_id` was added before."""
        if self._first < 0:
            self._first = self._next = stream_id
        if self._first <= stream_id < self._next or stream_id in self._beyond:
            return False
        self._beyond.add(stream_id)
        while self._next in self._beyond:
            self._beyond.remove(self._next)
            self._next += 1
        return True


class TextSession:
    """Owns the requests that its stream opened; `close` cancels what is left of them."""

    def __init__(self, engine: TextEngine) -> None:
        self._engine = engine
        self._outbox = SessionOutbox()
        self._used_ids = UsedIds()
        self._preparing: dict[int, asyncio.Task[None]] = {}
        self._runs: dict[int, TextRun] = {}
        self._half_closed = False
        self._closed = False
        self._heartbeat: asyncio.TimerHandle | None = None

    async def read(self, commands: AsyncIterator[text_pb2.TextServiceSessionRequest]) -> None:
        """Obey commands until the caller sends no more; requests then under way are still served to their end.

        PreconditionError for a stream id used twice: it ends the session.
        """
        try:
            async for request in commands:
                for command in request.commands:
                    self._obey(command)
        except BaseException:
            self.close()
            self._outbox.close()
            raise
        self._half_closed = True
        self._end_if_idle()

    async def frames(self) -> AsyncIterator[text_pb2.TextServiceSessionResponse]:
        """What the caller is sent."""
        self._beat()
        async for frame in self._outbox.frames():
            yield frame

    def close(self) -> None:
        """The stream has ended: so do its requests."""
        self._closed = True
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        for task in self._preparing.values():
            task.cancel()
        for run in list(self._runs.values()):
            run.cancel()
        self._runs.clear()

    def _beat(self) -> None:
        if not self._closed:
            self._outbox.heartbeat()
            self._heartbeat = asyncio.get_running_loop().call_later(_HEARTBEAT_S, self._beat)

    def _obey(self, command: text_pb2.TextCommand) -> None:
        stream_id = command.stream_id
        kind = command.WhichOneof("command")
        if kind == "cancel":
            if task := self._preparing.pop(stream_id, None):
                task.cancel()
            if run := self._runs.pop(stream_id, None):
                run.cancel()
            self._end_if_idle()
            return
        if not self._used_ids.add(stream_id):
            raise PreconditionError(
                f"stream id {stream_id} was used before in this session: draw a new one for each request",
                reason="STREAM_ID_REUSED",
                metadata={"stream_id": str(stream_id)},
            )
        sink = self._outbox.sink(stream_id, self._on_end)
        if kind == "chat":
            request: TextRequest = command.chat
        elif kind == "complete":
            request = command.complete
        else:
            sink.fail(InvalidRequestError("the command is empty or of a newer protocol", reason="UNKNOWN_COMMAND"))
            return
        self._preparing[stream_id] = asyncio.create_task(self._start(stream_id, request, sink))

    async def _start(self, stream_id: int, request: TextRequest, sink: SessionSink) -> None:
        try:
            run = await self._engine.start(request, sink, parent=None, time_left_s=None)
        except RorqualError as error:
            self._preparing.pop(stream_id, None)
            sink.fail(error)
        except Exception:
            _log.exception("a request could not be prepared")
            self._preparing.pop(stream_id, None)
            sink.fail(InternalError("a request could not be prepared"))
        else:
            self._preparing.pop(stream_id, None)
            if run.is_done:
                self._end_if_idle()
            else:
                self._runs[stream_id] = run

    def _on_end(self, stream_id: int) -> None:
        self._runs.pop(stream_id, None)
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._half_closed and not self._preparing and not self._runs:
            self._outbox.close()
