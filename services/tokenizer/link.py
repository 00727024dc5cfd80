"""The one stream to the scheduler: it carries the choices of all requests, and outlives a scheduler.

When the scheduler is lost, every open history is sent again once it is back, with what has been generated since.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import grpc

from rorqual.core.clock import Clock
from rorqual.core.errors import InternalError, InvalidRequestError, RorqualError, UnavailableError
from rorqual.rpc.light_sleep import LightSleep
from rorqual.rpc.options import MAX_MESSAGE_BYTES
from rorqual.rpc.status import from_error_proto
from rorqual.v1 import generation_pb2, generation_pb2_grpc

_Call = grpc.aio.StreamStreamCall[
    generation_pb2.GenerationServiceSessionRequest, generation_pb2.GenerationServiceSessionResponse
]

_log = logging.getLogger(__name__)

_MAX_FRAME_BYTES = 16 * 1024 * 1024
_COMMAND_BYTES = 1024  # of a frame beside its only request
_HEARTBEAT_S = 1.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0


class Listener(Protocol):
    """One history, as the link sees it. Called on the event loop; must not block."""

    def generate_request(self) -> generation_pb2.GenerateRequest:
        """The history as it is now; called each time it is opened."""
        ...

    def on_started(self, started: generation_pb2.Started) -> None: ...

    def on_delta(self, delta: generation_pb2.TokenDelta) -> None: ...

    def on_finished(self, finished: generation_pb2.Finished) -> None: ...

    def on_error(self, error: RorqualError) -> None: ...


class UpstreamStream:
    """An open history. Its id changes with every session."""

    __slots__ = ("listener", "opened_at_s", "stream_id")

    def __init__(self, listener: Listener, opened_at_s: float) -> None:
        self.listener = listener
        self.opened_at_s = opened_at_s
        self.stream_id = 0  # 0: not sent in the present session


class SchedulerLink:
    """Opens, cancels and finishes histories on the scheduler, whatever becomes of it in between."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        peer_timeout_s: float,
        clock: Clock,
    ) -> None:
        self._channel = channel
        self._stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self._peer_timeout_s = peer_timeout_s
        self._clock = clock
        self.on_frame: Callable[[], None] = lambda: None
        """Called after each frame's events."""
        self._streams: dict[UpstreamStream, None] = {}  # in the order they were opened
        self._by_id: dict[int, UpstreamStream] = {}
        self._next_id = 1
        self._commands: list[tuple[int, UpstreamStream | None, int | None]] = []
        self._wake = asyncio.Event()
        self._sleep = LightSleep()
        self._connected = False
        self._heartbeat_due = False
        self._last_heard_s = clock.monotonic_s()
        self._down_since_s: float | None = clock.monotonic_s()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="scheduler-link")

    async def stop(self) -> None:
        """End the stream; the scheduler cancels what is still open on it."""
        self._stopping = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def open(self, listener: Listener) -> UpstreamStream:
        """Send `listener`'s history, now or when the scheduler is back."""
        stream = UpstreamStream(listener, self._clock.monotonic_s())
        self._streams[stream] = None
        if self._connected:
            self._send_open(stream)
        return stream

    def cancel(self, stream: UpstreamStream) -> None:
        """Free what `stream` holds; nothing is heard of it again."""
        self._close(stream, None)

    def finish(self, stream: UpstreamStream, num_tokens: int) -> None:
        """Its text ended after `num_tokens`; nothing is heard of it again."""
        self._close(stream, num_tokens)

    def _close(self, stream: UpstreamStream, num_tokens: int | None) -> None:
        if stream not in self._streams:
            return
        del self._streams[stream]
        if stream.stream_id and self._by_id.pop(stream.stream_id, None) is not None:
            self._commands.append((stream.stream_id, None, num_tokens))
            self._wake.set()

    def _forget(self, stream: UpstreamStream) -> None:
        self._streams.pop(stream, None)
        self._by_id.pop(stream.stream_id, None)

    def _send_open(self, stream: UpstreamStream) -> None:
        self._sleep.stir(len(self._streams))
        stream.stream_id = self._next_id
        self._next_id += 1
        self._by_id[stream.stream_id] = stream
        self._commands.append((stream.stream_id, stream, None))
        self._wake.set()

    # The connection.

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            heard_s = self._last_heard_s
            try:
                await asyncio.wait_for(self._channel.channel_ready(), 0.5)
                await self._session()
            except TimeoutError:
                pass
            except grpc.RpcError as error:
                _log.info("the scheduler's stream ended: %s", error.code())
            except Exception:
                _log.exception("the scheduler's stream failed")
            finally:
                self._lost()
            if self._last_heard_s != heard_s:
                backoff_s = _FIRST_BACKOFF_S
            self._give_up_on_the_old()
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)

    def _lost(self) -> None:
        if self._connected and not self._stopping:
            _log.warning("lost the scheduler, with %d histories open", len(self._by_id))
        self._connected = False
        self._commands.clear()
        self._by_id.clear()
        if self._down_since_s is None:
            self._down_since_s = self._clock.monotonic_s()
        for stream in self._streams:
            stream.stream_id = 0

    def _give_up_on_the_old(self) -> None:
        if self._down_since_s is None:
            return
        now_s = self._clock.monotonic_s()
        if now_s < self._down_since_s + self._peer_timeout_s:
            return
        for stream in [s for s in self._streams if now_s >= s.opened_at_s + 1.0]:
            self._forget(stream)
            stream.listener.on_error(
                UnavailableError(
                    f"the scheduler has been unreachable for {now_s - self._down_since_s:.0f} s; try again later",
                    reason="SCHEDULER_UNAVAILABLE",
                )
            )
        self.on_frame()

    async def _session(self) -> None:
        call = self._stub.Session()
        self._connected = True
        connected_at_s = self._clock.monotonic_s()
        self._heartbeat_due = True
        self._wake.set()
        for stream in self._streams:
            self._send_open(stream)
        tasks = [
            asyncio.create_task(self._read(call)),
            asyncio.create_task(self._write(call)),
            asyncio.create_task(self._watch(connected_at_s)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _watch(self, connected_at_s: float) -> None:
        """A heartbeat each second; returns when the scheduler has been silent for too long."""
        while self._clock.monotonic_s() - max(self._last_heard_s, connected_at_s) < self._peer_timeout_s:
            await asyncio.sleep(_HEARTBEAT_S)
            self._heartbeat_due = True
            self._wake.set()
        _log.warning("the scheduler has been silent for %.0f s: its stream is opened anew", self._peer_timeout_s)

    async def _write(self, call: _Call) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            commands, self._commands = self._commands, []
            if not commands and not self._heartbeat_due:
                continue
            frame = generation_pb2.GenerationServiceSessionRequest()
            if self._heartbeat_due:
                self._heartbeat_due = False
                frame.heartbeat.SetInParent()
            num_bytes = 0
            for stream_id, stream, num_tokens in commands:
                if stream is None:
                    command = frame.commands.add(stream_id=stream_id)
                    if num_tokens is None:
                        command.cancel.SetInParent()
                    else:
                        command.finish.num_tokens = num_tokens
                        command.finish.SetInParent()
                    continue
                if stream not in self._streams:
                    continue  # closed before it was sent: its close command does nothing
                request = self._request_of(stream)
                if request is None:
                    continue
                size = request.ByteSize()  # its grammar and salt may be longer than its ids
                if num_bytes and num_bytes + size > _MAX_FRAME_BYTES:
                    await call.write(frame)
                    frame = generation_pb2.GenerationServiceSessionRequest()
                    num_bytes = 0
                num_bytes += size
                frame.commands.add(stream_id=stream_id).open.CopyFrom(request)
            if frame.commands or frame.HasField("heartbeat"):
                await call.write(frame)

    def _request_of(self, stream: UpstreamStream) -> generation_pb2.GenerateRequest | None:
        """What opens `stream`; None where that cannot be written. Then it fails alone: the session goes on."""
        error: RorqualError
        try:
            request = stream.listener.generate_request()
            size = request.ByteSize()
            if size <= MAX_MESSAGE_BYTES - _COMMAND_BYTES:
                return request
            error = InvalidRequestError(
                f"the request takes {size} bytes on its way to the scheduler, {MAX_MESSAGE_BYTES - _COMMAND_BYTES} are the "
                "most: make its prompt or its constraint shorter",
                reason="REQUEST_TOO_LARGE",
            )
        except Exception:
            _log.exception("a request could not be written")
            error = InternalError("a request could not be written")
        self._forget(stream)
        stream.listener.on_error(error)
        return None

    async def _read(self, call: _Call) -> None:
        while True:
            frame = await call.read()
            if not isinstance(frame, generation_pb2.GenerationServiceSessionResponse):  # grpc.aio.EOF
                return
            self._last_heard_s = self._clock.monotonic_s()
            self._down_since_s = None
            if frame.events:
                self._sleep.stir(len(self._streams))
            self._dispatch(frame)

    def _dispatch(self, frame: generation_pb2.GenerationServiceSessionResponse) -> None:
        by_id = self._by_id
        for event in frame.events:
            stream = by_id.get(event.stream_id)
            if stream is None:
                continue  # over-run of a stream that has ended here
            listener = stream.listener
            kind = event.WhichOneof("event")
            try:
                if kind == "delta":
                    listener.on_delta(event.delta)
                elif kind == "started":
                    listener.on_started(event.started)
                elif kind == "finished":
                    self._forget(stream)
                    listener.on_finished(event.finished)
                elif kind == "error":
                    self._forget(stream)
                    listener.on_error(from_error_proto(event.error))
            except Exception:
                _log.exception("an event of a request could not be handled")
                self.cancel(stream)
                listener.on_error(InternalError("an event of the scheduler could not be handled"))
        self.on_frame()
