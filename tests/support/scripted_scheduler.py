"""A GenerationService for tests that answers scripted token ids, without a model: what a tokenizer replica talks to.

    scheduler = ScriptedScheduler(lambda request: Script([[5, 6], [7]]))
    port = await scheduler.start()

The tokens of a script are those after the prompt; a history that already holds some continues after them. A script
ends at a stop token, at max_tokens or with its last token. `pause` holds the steps, `lose` breaks every session as a
crash would, `stop` and another `start` on the same port are a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from rorqual.core.errors import RorqualError, UnavailableError
from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.rpc.server import RpcServer
from rorqual.rpc.status import to_error_proto
from rorqual.v1 import common_pb2, generation_pb2, generation_pb2_grpc

MODEL = "scripted"
HEARTBEAT_S = 1.0


@dataclass(frozen=True)
class Script:
    """What one choice is answered with."""

    steps: Sequence[Sequence[int]]  # tokens of each step
    num_cached_tokens: int = 0
    queue_time_us: int = 0
    error: RorqualError | None = None  # after the last step, in place of Finished
    logprob: Callable[[int], common_pb2.TokenLogprobs] | None = None  # of a token; default: -0.5
    finish_reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_LENGTH  # where the steps run out

    @property
    def tokens(self) -> list[int]:
        return [token_id for step in self.steps for token_id in step]


@dataclass
class Running:
    """One open history."""

    stream_id: int
    request: generation_pb2.GenerateRequest
    script: Script
    sent: int  # tokens of the script, those of the history included
    started: bool = False

    def step(self) -> Iterable[generation_pb2.GenerationEvent]:
        """The events of the next step."""
        request, script = self.request, self.script
        if not self.started:
            self.started = True
            yield self._event(
                started=generation_pb2.Started(
                    num_cached_tokens=script.num_cached_tokens,
                    queue_time_us=script.queue_time_us,
                    seed=request.sampling.seed,
                )
            )
        begin = 0
        chunk: list[int] = []
        for step in script.steps:
            if begin + len(step) > self.sent:
                chunk = list(step)[max(0, self.sent - begin) :]
                break
            begin += len(step)
        room = request.max_tokens - self.sent if request.HasField("max_tokens") else len(chunk)
        chunk = chunk[: max(0, room)]
        stop = next((n for n, t in enumerate(chunk) if t in set(request.sampling.stop_token_ids)), None)
        if stop is not None:
            chunk = chunk[: stop + 1]
        first = self.sent == 0
        if not chunk and first and request.sampling.HasField("prompt_logprobs"):
            delta = generation_pb2.TokenDelta()
            prompt = unpack_token_ids(request.token_ids)[1 : request.num_prompt_tokens]
            delta.prompt_logprobs.extend(self._logprobs(t, request.sampling.prompt_logprobs) for t in prompt)
            yield self._event(delta=delta)
        if chunk:
            self.sent += len(chunk)
            delta = generation_pb2.TokenDelta(token_ids=pack_token_ids(chunk))
            if request.sampling.HasField("logprobs"):
                delta.logprobs.extend(self._logprobs(token_id, request.sampling.logprobs) for token_id in chunk)
            if first and request.sampling.HasField("prompt_logprobs"):
                prompt = unpack_token_ids(request.token_ids)[1 : request.num_prompt_tokens]
                delta.prompt_logprobs.extend(self._logprobs(t, request.sampling.prompt_logprobs) for t in prompt)
            yield self._event(delta=delta)
        at_limit = request.HasField("max_tokens") and self.sent >= request.max_tokens
        if stop is not None or at_limit or self.sent >= len(script.tokens):
            if script.error is not None and stop is None and not at_limit:
                yield self._event(error=to_error_proto(script.error))
                return
            finished = generation_pb2.Finished(
                reason=common_pb2.FINISH_REASON_STOP
                if stop is not None
                else common_pb2.FINISH_REASON_LENGTH
                if at_limit
                else script.finish_reason,
                num_cached_tokens=script.num_cached_tokens,
                queue_time_us=script.queue_time_us,
                num_generated_tokens=self.sent,
            )
            if stop is not None:
                finished.stop_token_id = chunk[stop]
            yield self._event(finished=finished)

    def _logprobs(self, token_id: int, num_top: int) -> common_pb2.TokenLogprobs:
        if self.script.logprob is not None:
            return self.script.logprob(token_id)
        return common_pb2.TokenLogprobs(
            token_id=token_id,
            logprob=-0.5,
            rank=1,
            top_token_ids=pack_token_ids([token_id][:num_top]),
            top_logprobs=[-0.5][:num_top],
        )

    def _event(self, **kind: Any) -> generation_pb2.GenerationEvent:
        return generation_pb2.GenerationEvent(stream_id=self.stream_id, **kind)


@dataclass
class Seen:
    """What the scheduler was told, in order."""

    opened: list[generation_pb2.GenerateRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)  # request ids
    finished: list[tuple[str, int]] = field(default_factory=list)  # request id, num_tokens
    num_sessions: int = 0


class ScriptedScheduler(generation_pb2_grpc.GenerationServiceServicer):
    """Serves `script(request)` for each history that is opened. A step for all of them, then a frame."""

    def __init__(
        self,
        script: Callable[[generation_pb2.GenerateRequest], Script],
        *,
        vocab_size: int = 8192,
        max_model_len: int = 4096,
        model: str = MODEL,
    ) -> None:
        self.script = script
        self.model: common_pb2.ModelInfo | None = common_pb2.ModelInfo(
            takes_grammars=True, name=model, vocab_size=vocab_size, max_model_len=max_model_len, fingerprint=bytes(32)
        )
        self.seen = Seen()
        self.running: dict[tuple[int, int], Running] = {}  # (session, stream id)
        self.silent = False
        self.port = 0
        self._server: RpcServer | None = None
        self._steps_left: int | None = None  # None: as many as there are
        self._changed = asyncio.Condition()
        self._sessions: dict[int, asyncio.Event] = {}

    async def start(self, port: int = 0) -> int:
        """Serve on 127.0.0.1; a restart takes the port it had."""
        self._server = RpcServer(
            f"127.0.0.1:{port or self.port}",
            lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server),
            ["rorqual.v1.GenerationService"],
        )
        self.port = await self._server.start()
        await self._server.set_serving(True)
        return self.port

    async def stop(self) -> None:
        """As a crash: every connection is gone at once."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def lose(self) -> None:
        """Break every session; the server goes on listening."""
        for lost in self._sessions.values():
            lost.set()
        async with self._changed:
            self._changed.notify_all()

    async def pause(self, after_steps: int = 0) -> None:
        """Take so many more steps of each session, then none until `go_on`."""
        async with self._changed:
            self._steps_left = after_steps
            self._changed.notify_all()

    async def go_on(self) -> None:
        async with self._changed:
            self._steps_left = None
            self._changed.notify_all()

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until `condition` holds; it is asked again after each command and step."""

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(condition)

        await asyncio.wait_for(wait(), timeout_s)

    async def GetServerInfo(
        self, request: generation_pb2.GetServerInfoRequest, context: Any
    ) -> generation_pb2.GetServerInfoResponse:
        return generation_pb2.GetServerInfoResponse(model=self.model, num_running=len(self.running))

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        running = self._open(0, request)
        while True:
            for event in running.step():
                kind = event.WhichOneof("event")
                if kind == "error":
                    raise UnavailableError(event.error.message)
                assert kind is not None
                yield generation_pb2.GenerateResponse(**{kind: getattr(event, kind)})
                if kind == "finished":
                    return
            await asyncio.sleep(0)

    async def Session(
        self, request_iterator: AsyncIterator[generation_pb2.GenerationServiceSessionRequest], context: Any
    ) -> AsyncIterator[generation_pb2.GenerationServiceSessionResponse]:
        self.seen.num_sessions += 1
        session = self.seen.num_sessions
        lost = self._sessions[session] = asyncio.Event()
        reader = asyncio.create_task(self._read(session, request_iterator))
        try:
            yield generation_pb2.GenerationServiceSessionResponse(heartbeat=common_pb2.Heartbeat())
            while True:
                try:
                    async with self._changed, asyncio.timeout(HEARTBEAT_S):
                        await self._changed.wait_for(
                            lambda: lost.is_set() or (self._steps_left != 0 and bool(self._of(session)))
                        )
                except TimeoutError:
                    if not self.silent:
                        yield generation_pb2.GenerationServiceSessionResponse(heartbeat=common_pb2.Heartbeat())
                    continue
                if lost.is_set():
                    raise UnavailableError("the scheduler crashed")
                frame = generation_pb2.GenerationServiceSessionResponse()
                if self._steps_left is not None:
                    self._steps_left -= 1
                for key in self._of(session):
                    events = list(self.running[key].step())
                    frame.events.extend(events)
                    if events and events[-1].WhichOneof("event") in ("finished", "error"):
                        del self.running[key]
                if self.silent:
                    continue
                yield frame
                async with self._changed:
                    self._changed.notify_all()
                await asyncio.sleep(0)
        finally:
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.RpcError):
                await reader
            for key in self._of(session):
                self.seen.cancelled.append(self.running.pop(key).request.request_id)
            del self._sessions[session]
            async with self._changed:
                self._changed.notify_all()

    def _of(self, session: int) -> list[tuple[int, int]]:
        return [key for key in self.running if key[0] == session]

    async def _read(
        self, session: int, requests: AsyncIterator[generation_pb2.GenerationServiceSessionRequest]
    ) -> None:
        async for request in requests:
            for command in request.commands:
                key = (session, command.stream_id)
                kind = command.WhichOneof("command")
                if kind == "open":
                    self.running[key] = self._open(command.stream_id, command.open)
                elif (running := self.running.pop(key, None)) is None:
                    continue
                elif kind == "cancel":
                    self.seen.cancelled.append(running.request.request_id)
                elif kind == "finish":
                    self.seen.finished.append((running.request.request_id, command.finish.num_tokens))
            async with self._changed:
                self._changed.notify_all()

    def _open(self, stream_id: int, request: generation_pb2.GenerateRequest) -> Running:
        copy = generation_pb2.GenerateRequest()
        copy.CopyFrom(request)
        self.seen.opened.append(copy)
        generated = len(request.token_ids) // 4 - request.num_prompt_tokens
        return Running(stream_id, copy, self.script(copy), generated)
