"""GenerationService: callers' streams, one a call or many a session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

from google.protobuf.message import DecodeError

from rorqual.core.errors import InvalidRequestError, PreconditionError
from rorqual.telemetry import context_from_pairs, context_from_proto
from rorqual.v1 import generation_pb2, generation_pb2_grpc

from .engine import Engine
from .events import Cancel, Event, FinishEarly
from .outbox import Outbox
from .peer import Peer
from .rpc_calls import Context, on_done
from .stream_events import StreamFailed, StreamFinished
from .wire import fill_frame, model_to_proto, response_from_event

_Frame: TypeAlias = generation_pb2.GenerationServiceSessionResponse


class UsedIds:
    """Which ids were used. Ids that count up take no room, whatever their number."""

    __slots__ = ("_end", "_others", "_start")

    def __init__(self) -> None:
        self._start = self._end = 0  # all of [start, end) are used
        self._others: set[int] = set()

    def add(self, new_id: int) -> bool:
        """False if it was used before."""
        if self._start <= new_id < self._end or new_id in self._others:
            return False
        if self._start == self._end:
            self._start = self._end = new_id
        self._others.add(new_id)
        while self._end in self._others:
            self._others.discard(self._end)
            self._end += 1
        return True


class _Session(Peer):
    """One tokenizer replica: its commands in, its frames out."""

    def __init__(self, engine: Engine, name: str) -> None:
        super().__init__(name, engine.now_s(), must_beat=False)  # until its first heartbeat: simple clients send none
        self._outbox = Outbox()
        self._engine = engine
        self._owner = engine.new_owner()
        self._used = UsedIds()
        self._live: dict[int, int] = {}  # the caller's stream id -> the engine's
        self._half_closed = False

    def beat(self) -> None:
        self._outbox.beat()

    def fail(self, error: BaseException | None) -> None:
        self.closed = True
        if error is not None:
            self._outbox.fail(error)
        else:
            self._outbox.close()

    async def read(self, requests: AsyncIterator[generation_pb2.GenerationServiceSessionRequest]) -> None:
        """Commands until the caller has no more."""
        try:
            async for request in requests:
                self.last_heard_s = self._engine.now_s()
                if request.HasField("heartbeat"):
                    self.must_beat = True
                if request.commands:
                    self._take(request)
            self._half_closed = True
            self._close_if_done()
        except asyncio.CancelledError:
            raise
        except DecodeError as error:
            self.fail(InvalidRequestError(f"a message of Session is none of rorqual.v1's: {error}"))
        except Exception as error:
            self.fail(error)

    def _take(self, request: generation_pb2.GenerationServiceSessionRequest) -> None:
        """The commands of a frame. Where one ends the session, what came before it holds, and ends with the session."""
        events: list[Event] = []
        try:
            self._read_commands(request, events)
        finally:
            self._engine.submit(events)

    def _read_commands(self, request: generation_pb2.GenerationServiceSessionRequest, events: list[Event]) -> None:
        for command in request.commands:
            kind, local_id = command.WhichOneof("command"), command.stream_id
            if kind == "open":
                if not self._used.add(local_id):
                    raise PreconditionError(
                        f"stream id {local_id} is used twice in this session", reason="STREAM_ID_REUSED"
                    )
                opened = self._engine.prepare_open(
                    command.open, self._outbox, local_id, context_from_proto(command.open.trace), self._owner
                )
                if opened is not None:
                    self._live[local_id] = opened.stream_id
                    events.append(opened)
            elif local_id in self._live:
                if kind == "cancel":
                    events.append(Cancel(self._live[local_id]))
                elif kind == "finish":
                    events.append(FinishEarly(self._live[local_id], command.finish.num_tokens))

    async def next_frame(self) -> _Frame | None:
        taken = await self._outbox.take()
        if taken is None:
            return None
        events, beat = taken
        frame = _Frame()
        fill_frame(frame, events)
        for local_id, event in events:
            if isinstance(event, (StreamFinished, StreamFailed)):
                self._live.pop(local_id, None)
        if beat:
            frame.heartbeat.SetInParent()
        self._close_if_done()
        return frame

    def _close_if_done(self) -> None:
        if self._half_closed and not self._live:
            self._outbox.close()

    def end(self) -> None:
        """The stream is gone: so is whatever it had opened. Idempotent."""
        live, self._live = list(self._live.values()), {}
        self._engine.cancel(live)


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Token histories in, token events out."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        outbox = Outbox()
        parent = context_from_proto(request.trace) or context_from_pairs(context.invocation_metadata())
        opened = self._engine.prepare_open(request, outbox, 0, parent)
        if opened is not None:
            # Also when the call ends while this generator is suspended in a write.
            on_done(context, lambda: self._engine.cancel((opened.stream_id,)))
            self._engine.submit((opened,))
        try:
            while True:
                taken = await outbox.take()
                if taken is None:
                    return
                for _, event in taken[0]:
                    response = response_from_event(event)  # raises the failure of a request
                    if response is not None:
                        yield response
                    if isinstance(event, StreamFinished):
                        return
        finally:
            if opened is not None:
                self._engine.cancel((opened.stream_id,))

    async def Session(
        self, request_iterator: AsyncIterator[generation_pb2.GenerationServiceSessionRequest], context: Context
    ) -> AsyncIterator[_Frame]:
        session = _Session(self._engine, f"session of {context.peer()}")
        self._engine.register(session)
        on_done(context, session.end)
        reader = asyncio.create_task(session.read(request_iterator))
        try:
            while (frame := await session.next_frame()) is not None:
                yield frame
        finally:
            reader.cancel()
            self._engine.unregister(session)
            session.end()

    async def GetServerInfo(
        self, request: generation_pb2.GetServerInfoRequest, context: Context
    ) -> generation_pb2.GetServerInfoResponse:
        occupancy = self._engine.core.occupancy()
        response = generation_pb2.GetServerInfoResponse(
            num_executors=occupancy.num_executors,
            num_running=occupancy.num_running,
            num_waiting=occupancy.num_waiting,
            num_total_blocks=occupancy.num_total_blocks,
            num_free_blocks=occupancy.num_free_blocks,
            num_granted_unwritten_blocks=occupancy.num_granted_unwritten_blocks,
        )
        if self._engine.num_answering() and self._engine.core.model is not None:
            response.model.CopyFrom(model_to_proto(self._engine.core.model))
        return response
