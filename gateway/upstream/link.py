"""One TextService.Session to one tokenizer replica, carrying all requests that were placed there."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Collection
from typing import Any, Protocol

import grpc

from rorqual.core.clock import Clock
from rorqual.core.errors import InvalidRequestError, RorqualError, UnavailableError
from rorqual.rpc.light_sleep import LightSleep
from rorqual.rpc.options import MAX_MESSAGE_BYTES
from rorqual.rpc.status import from_rpc_error
from rorqual.v1 import text_pb2

from .isolation import Suspect

_log = logging.getLogger(__name__)

MAX_FRAME_BYTES = MAX_MESSAGE_BYTES // 4
"""A frame takes no further command beyond this; a single larger one goes alone."""

MAX_COMMAND_BYTES = MAX_MESSAGE_BYTES - 64 * 1024

HEARTBEAT_PERIOD_S = 1.0
_ENDED_BY_STOP = "Cancelling all calls"
"""What gRPC says of a call whose server was told to stop."""

_NEVER_THERE = "failed to connect"
"""How it begins where there was no server: what was to be sent has met nobody."""

PEER_SILENT = "PEER_SILENT"  # reason of a session that ended for want of heartbeats


def core_of(message: str) -> str:
    """The innermost of the causes that gRPC wraps: "…; last error: UNKNOWN: ipv4:…: Connection refused"."""
    return message.rpartition(": ")[2].lower() if "last error: " in message else message


Session = grpc.aio.StreamStreamCall[text_pb2.TextServiceSessionRequest, text_pb2.TextServiceSessionResponse]


class Reader(Suspect, Protocol):
    """Whoever opened a stream on a link."""

    def on_message(self, message: text_pb2.TextStreamEvents) -> None: ...

    def on_lost(self, error: RorqualError, *, died: bool) -> None:
        """The session ended before the stream did. `died`: not by the peer's own wish."""
        ...


OnEnd = Callable[["SessionLink", "list[Reader]", bool], None]


class SessionLink:
    """Frames down, frames up. Commands gather while the wire is busy and leave together."""

    def __init__(
        self,
        address: str,
        open_session: Callable[[], Session],
        *,
        peer_timeout_s: float,
        clock: Clock,
        on_first_frame: Callable[[], None] = lambda: None,
        on_end: OnEnd = lambda link, readers, died: None,
    ) -> None:
        """`on_end`: is told the readers that were in the session when it ended, and whether the peer died, before they are."""
        self.address = address
        self._open_session = open_session
        self._peer_timeout_s = peer_timeout_s
        self._clock = clock
        self._readers: dict[int, Reader] = {}
        self._ids = itertools.count(1)
        self._commands: list[text_pb2.TextCommand] = []
        self._wanted = asyncio.Event()
        self._sleep = LightSleep()
        self._beat_due = False
        self._on_first_frame = on_first_frame
        self._on_end = on_end
        self._died = False
        self._peer_beats = False
        self._heard_s = clock.monotonic_s()
        self.heard = False  # a frame has come
        self.closed = False

    @property
    def num_streams(self) -> int:
        """Requests that live on this link."""
        return len(self._readers)

    @property
    def readers(self) -> Collection[Reader]:
        """Those of the streams that live on this link."""
        return self._readers.values()

    @property
    def silent_s(self) -> float:
        """How long nothing came, from a peer whose heartbeat is due each second; 0 before its first."""
        return self._clock.monotonic_s() - self._heard_s if self._peer_beats else 0.0

    def open(self, reader: Reader, command: text_pb2.TextCommand) -> int:
        """Send `command` (chat or complete) under a fresh stream id, which is returned.

        Raises InvalidRequestError where it is larger than a message may be.
        """
        stream_id = command.stream_id = next(self._ids)
        size = command.ByteSize()
        if size > MAX_COMMAND_BYTES:
            raise InvalidRequestError(
                f"the request takes {size} bytes between our services, and at most {MAX_COMMAND_BYTES} fit: shorten it",
                reason="REQUEST_TOO_LARGE",
            )
        self._readers[stream_id] = reader
        self._send(command)
        return stream_id

    def cancel(self, stream_id: int) -> None:
        """The reader wants no more; an ended stream's cancel does nothing."""
        if self._readers.pop(stream_id, None) is not None:
            self._send(text_pb2.TextCommand(stream_id=stream_id, cancel=text_pb2.CancelText()))

    def forget(self, stream_id: int) -> None:
        """The stream has ended by itself."""
        self._readers.pop(stream_id, None)

    def _send(self, command: text_pb2.TextCommand) -> None:
        if not self.closed:
            self._commands.append(command)
            self._wanted.set()
            self._sleep.stir(len(self._readers))

    async def run(self) -> RorqualError:
        """Carry frames until the session ends. Returns why it did, after every reader was told."""
        call = self._open_session()
        tasks = [asyncio.ensure_future(work(call)) for work in (self._read, self._write, self._pulse)]
        cause: RorqualError = UnavailableError(f"the session with tokenizer {self.address} was closed")
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            cause = self._cause_of(done.pop().exception())
        finally:
            self.closed = True
            for task in tasks:
                task.cancel()
            call.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            readers, self._readers = self._readers, {}
            unsent = {command.stream_id for command in self._commands}
            self._on_end(self, [reader for stream_id, reader in readers.items() if stream_id not in unsent], self._died)
            for reader in readers.values():
                reader.on_lost(cause, died=self._died)
        return cause

    def _cause_of(self, error: BaseException | None) -> RorqualError:
        if error is None:
            return UnavailableError(f"tokenizer {self.address} closed the session")
        # A peer that fell silent may hang over a request for ever: the next one would too.
        details = (error.details() or "") if isinstance(error, grpc.aio.AioRpcError) else ""
        self._died = details != _ENDED_BY_STOP and not details.startswith(_NEVER_THERE)
        if isinstance(error, grpc.RpcError):
            return UnavailableError(f"tokenizer {self.address} is lost: {core_of(from_rpc_error(error).message)}")
        if isinstance(error, RorqualError):
            return error
        _log.error("the session with %s broke", self.address, exc_info=error)
        return UnavailableError(f"the session with tokenizer {self.address} broke")

    async def _read(self, call: Session) -> None:
        """Ends with the session: by return where its status is OK, else by the status."""
        readers = self._readers
        frame: Any
        while (frame := await call.read()) is not grpc.aio.EOF:
            self._heard_s = self._clock.monotonic_s()
            self._peer_beats = self._peer_beats or frame.HasField("heartbeat")
            if not self.heard:
                self.heard = True
                self._on_first_frame()
            if frame.streams:
                self._sleep.stir(len(readers))
            for message in frame.streams:
                reader = readers.get(message.stream_id)
                if reader is not None:
                    reader.on_message(message)

    async def _write(self, call: Session) -> None:
        """One frame after another, each of what gathered meanwhile. A failed write ends by the reader's cause."""
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                while self._commands or self._beat_due:
                    frame = text_pb2.TextServiceSessionRequest(commands=self._next_commands())
                    if self._beat_due:
                        frame.heartbeat.SetInParent()
                        self._beat_due = False
                    await call.write(frame)
        except (grpc.RpcError, asyncio.InvalidStateError):
            await asyncio.Event().wait()

    def _next_commands(self) -> list[text_pb2.TextCommand]:
        """What fits one frame, in order; one at least, where any waits."""
        total, count = 0, 0
        for command in self._commands:
            total += command.ByteSize()
            if count and total > MAX_FRAME_BYTES:
                break
            count += 1
        chosen, self._commands = self._commands[:count], self._commands[count:]
        return chosen

    async def _pulse(self, call: Session) -> None:
        """Say each second that we live, and take the peer's silence for death."""
        while True:
            await asyncio.sleep(HEARTBEAT_PERIOD_S)
            silent_s = self.silent_s
            if silent_s > self._peer_timeout_s:
                raise UnavailableError(
                    f"tokenizer {self.address} has been silent for {silent_s:.0f} s", reason=PEER_SILENT
                )
            self._beat_due = True
            self._wanted.set()
