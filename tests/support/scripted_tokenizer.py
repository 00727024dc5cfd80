"""A TextService for tests that answers scripted events, resumes included, without a model or a vocabulary."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from rorqual.core.token_ids import pack_token_ids, unpack_token_ids
from rorqual.rpc.server import RpcServer
from rorqual.v1 import common_pb2, text_pb2, text_pb2_grpc

MODEL = "scripted"
FINGERPRINT = bytes(range(32))
EOS = 1

TextRequest = text_pb2.ChatRequest | text_pb2.CompleteRequest
Step = list[text_pb2.TextEvent]  # what one token causes, or a choice's end


@dataclass
class Script:
    """How one request is answered."""

    steps: list[Step]
    num_prompt_tokens: int = 3
    num_cached_tokens: int = 0
    num_reasoning_tokens: int = 0
    error: common_pb2.Error | None = None  # ends the stream after the steps, in place of the usage
    refuse: common_pb2.Error | None = None  # ends it before it is accepted
    queue: asyncio.Event | None = None  # awaited before it is accepted or refused
    gate: Callable[[int], asyncio.Event | None] = lambda step_idx: None  # awaited before a step
    delay_s: float = 0.0  # before each step
    together: bool = False  # all steps in one message
    kills_at: int | None = None  # the step before which every session breaks, as if the process had died; -1: at once


def event(choice: int = 0, token_ids: Iterable[int] = (), **kind: Any) -> text_pb2.TextEvent:
    """One event, e.g. event(0, [7], content="hi")."""
    return text_pb2.TextEvent(choice_index=choice, token_ids=pack_token_ids(token_ids), **kind)


def finish(
    choice: int = 0, token_ids: Iterable[int] = (), reason: int = common_pb2.FINISH_REASON_STOP, **more: Any
) -> text_pb2.TextEvent:
    """The end of a choice."""
    return event(choice, token_ids, finished=text_pb2.ChoiceFinished(reason=reason, **more))  # type: ignore[arg-type]


def logprob(
    token: str, value: float | None, token_id: int = 0, top: Sequence[tuple[str, float]] = ()
) -> text_pb2.TokenLogprobText:
    """One position's log-probability."""
    return text_pb2.TokenLogprobText(
        token=token,
        token_bytes=token.encode(),
        logprob=value,
        token_id=token_id,
        top=[text_pb2.TokenLogprobText(token=t, token_bytes=t.encode(), logprob=v) for t, v in top],
    )


def say(*texts: str, n: int = 1, reasoning: Sequence[str] = (), length: bool = False) -> Script:
    """Each of `reasoning`, then each text, is one token of every choice; then an end-of-sequence token ends it."""
    steps: list[Step] = []
    for position, text in enumerate(reasoning):
        steps += [[event(choice, [1000 + position], reasoning=text)] for choice in range(n)]
    for position, text in enumerate(texts):
        steps += [[event(choice, [100 + position], content=text)] for choice in range(n)]
    for choice in range(n):
        steps.append(
            [finish(choice, reason=common_pb2.FINISH_REASON_LENGTH)]
            if length
            else [finish(choice, [EOS], stop_token_id=EOS)]
        )
    return Script(steps, num_reasoning_tokens=len(reasoning) * n)


def rest_of(script: Script, held: dict[int, int]) -> list[Step]:
    """The steps after the `held` tokens of each choice; a choice's end is always said."""
    rest: list[Step] = []
    seen: dict[int, int] = {}
    for step in script.steps:
        choice = step[0].choice_index
        seen[choice] = seen.get(choice, 0) + sum(len(e.token_ids) // 4 for e in step)
        ends = any(e.WhichOneof("event") == "finished" for e in step)
        before_tokens = seen[choice] == 0 and not held.get(choice)  # an echo
        if seen[choice] > held.get(choice, 0) or ends or before_tokens:
            copies: Step = []
            for original in step:
                copy = text_pb2.TextEvent()
                copy.CopyFrom(original)
                if seen[choice] <= held.get(choice, 0):
                    copy.token_ids = b""
                copies.append(copy)
            rest.append(copies)
    return rest


@dataclass
class _Live:
    """A session: its streams and what waits to be written."""

    context: grpc.aio.ServicerContext[Any, Any]
    out: asyncio.Queue[text_pb2.TextStreamEvents] = field(default_factory=asyncio.Queue)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    broken: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedTokenizer(text_pb2_grpc.TextServiceServicer):
    """Serves on a free port. `script` maps each request to its answer and may be replaced at any time."""

    def __init__(
        self, script: Callable[[TextRequest], Script] = lambda request: say("Hello", " world"), *, port: int = 0
    ) -> None:
        self.script = script
        self.models = [common_pb2.ModelInfo(name=MODEL, max_model_len=4096, vocab_size=8192, fingerprint=FINGERPRINT)]
        self.missing = ""  # what ListModels names
        self.requests: list[TextRequest] = []  # as they came, resumes too
        self.cancelled: list[str] = []  # request ids
        self.cancel_seen = asyncio.Event()
        self.request_seen = asyncio.Event()
        self.num_sessions = 0
        self.num_deaths = 0  # by scripts that kill
        self.beside_killers: list[int] = []  # how many other requests there were, each time a killer came
        self.num_frames = 0  # of commands
        self.heartbeat_s = 1.0
        self.silent = False  # a hung process: heartbeats and events stop, connections stay
        self._live: list[_Live] = []
        self._listen = f"127.0.0.1:{port}"
        self._server = self._make_server()
        self.port = 0

    def _make_server(self) -> RpcServer:
        return RpcServer(
            self._listen,
            lambda server: text_pb2_grpc.add_TextServiceServicer_to_server(self, server),
            ["rorqual.v1.TextService"],
        )

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_streams(self) -> int:
        """Requests that play now."""
        return sum(len(live.tasks) for live in self._live)

    async def start(self, *, serving: bool = True) -> str:
        self.port = await self._server.start()
        self._listen = self.address
        await self._server.set_serving(serving)
        return self.address

    async def set_serving(self, serving: bool) -> None:
        await self._server.set_serving(serving)

    async def stop(self) -> None:
        """End at once, as a crash would; `restart` opens the same port again."""
        await self._server.stop(0.0)

    async def restart(self) -> None:
        self._server = self._make_server()
        await self.start()

    async def flushed(self) -> None:
        """Returns once all that was said has been written, and had time to be read."""
        while any(not live.out.empty() for live in self._live):
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.05)

    def break_sessions(self) -> None:
        """Every open session ends with a status; the server stays."""
        for live in self._live:
            live.broken.set()

    def _die(self) -> None:
        self.num_deaths += 1
        self.break_sessions()

    async def ListModels(self, request: text_pb2.ListModelsRequest, context: Any) -> text_pb2.ListModelsResponse:
        return text_pb2.ListModelsResponse(models=self.models, created_unix_s=1_700_000_000, missing=self.missing)

    async def Tokenize(self, request: text_pb2.TokenizeRequest, context: Any) -> text_pb2.TokenizeResponse:
        """A token a character: its code point."""
        text = request.text if request.HasField("text") else "".join(m.content for m in request.chat.messages)
        strings = list(text) if request.return_token_strings else []
        return text_pb2.TokenizeResponse(
            token_ids=pack_token_ids(map(ord, text)), max_model_len=4096, token_strings=strings
        )

    async def Detokenize(self, request: text_pb2.DetokenizeRequest, context: Any) -> text_pb2.DetokenizeResponse:
        return text_pb2.DetokenizeResponse(text="".join(map(chr, unpack_token_ids(request.token_ids))))

    async def Session(
        self, request_iterator: AsyncIterator[text_pb2.TextServiceSessionRequest], context: Any
    ) -> AsyncIterator[text_pb2.TextServiceSessionResponse]:
        self.num_sessions += 1
        live = _Live(context)
        self._live.append(live)
        reading = asyncio.create_task(self._read(request_iterator, live))
        try:
            yield text_pb2.TextServiceSessionResponse(heartbeat=common_pb2.Heartbeat())
            while not live.broken.is_set():
                frame = await self._next_frame(live)
                if frame is not None and not self.silent:
                    yield frame
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the test")
        finally:
            self._live.remove(live)
            reading.cancel()
            for task in live.tasks.values():
                task.cancel()

    async def _next_frame(self, live: _Live) -> text_pb2.TextServiceSessionResponse | None:
        """What has gathered, or a heartbeat; None where the session is to break."""
        get = asyncio.ensure_future(live.out.get())
        broken = asyncio.ensure_future(live.broken.wait())
        try:
            await asyncio.wait((get, broken), timeout=self.heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if live.broken.is_set():
                return None
            if not get.done():
                return text_pb2.TextServiceSessionResponse(heartbeat=common_pb2.Heartbeat())
            frame = text_pb2.TextServiceSessionResponse(streams=[get.result()])
            while not live.out.empty():
                frame.streams.append(live.out.get_nowait())
            return frame
        finally:
            get.cancel()
            broken.cancel()

    async def _read(self, frames: AsyncIterator[text_pb2.TextServiceSessionRequest], live: _Live) -> None:
        async for frame in frames:
            self.num_frames += bool(frame.commands)
            for command in frame.commands:
                which = command.WhichOneof("command")
                if which == "cancel":
                    task = live.tasks.pop(command.stream_id, None)
                    if task is not None:
                        task.cancel()
                        self.cancelled.append(task.get_name())
                        self.cancel_seen.set()
                    continue
                request: TextRequest = getattr(command, which or "chat")
                self.requests.append(request)
                self.request_seen.set()
                live.tasks[command.stream_id] = asyncio.create_task(
                    self._play(command.stream_id, request, live), name=request.options.request_id
                )

    async def _play(self, stream_id: int, request: TextRequest, live: _Live) -> None:
        script = self.script(request)
        options = request.options

        def send(events: Iterable[text_pb2.TextEvent] = (), error: common_pb2.Error | None = None) -> None:
            live.out.put_nowait(text_pb2.TextStreamEvents(stream_id=stream_id, events=events, error=error))

        try:
            if script.queue is not None:
                await script.queue.wait()
            if script.kills_at is not None:
                self.beside_killers.append(self.num_streams - 1)
            if script.kills_at == -1:
                self._die()
                return
            if script.refuse is not None:
                send(error=script.refuse)
                return
            send([self._accepted(script, request)])
            held = {c.choice_index: len(c.token_ids) // 4 for c in options.resume.choices}
            steps = rest_of(script, held)
            if script.together:
                steps = [[e for step in steps for e in step]]
            for step_idx, step in enumerate(steps):
                if step_idx == script.kills_at:
                    self._die()
                    return
                gate = script.gate(step_idx)
                if gate is not None:
                    await gate.wait()
                if script.delay_s:
                    await asyncio.sleep(script.delay_s)
                send(step)
            if script.error is not None:
                send(error=script.error)
            else:
                send([text_pb2.TextEvent(usage=self._usage(script))])
        finally:
            if live.tasks.get(stream_id) is asyncio.current_task():
                del live.tasks[stream_id]

    def _accepted(self, script: Script, request: TextRequest) -> text_pb2.TextEvent:
        options = request.options
        digest = hashlib.blake2b(str(script.num_prompt_tokens).encode(), digest_size=32).digest()
        accepted = text_pb2.Accepted(
            num_prompt_tokens=script.num_prompt_tokens,
            prompt_digest=digest,
            seed=options.resume.seed if options.HasField("resume") else 77,
            template_time_unix_s=1_700_000_000,
            model=MODEL,
            num_cached_tokens=script.num_cached_tokens,
            queue_time_us=1234,
        )
        if options.return_prompt_token_ids:
            accepted.prompt_token_ids = pack_token_ids(range(script.num_prompt_tokens))
        return text_pb2.TextEvent(accepted=accepted)

    def _usage(self, script: Script) -> text_pb2.Usage:
        return text_pb2.Usage(
            num_prompt_tokens=script.num_prompt_tokens,
            num_cached_tokens=script.num_cached_tokens,
            num_generated_tokens=sum(len(e.token_ids) // 4 for step in script.steps for e in step),
            num_reasoning_tokens=script.num_reasoning_tokens,
            queue_time_us=1234,
        )


@contextlib.asynccontextmanager
async def scripted_tokenizer(
    script: Callable[[TextRequest], Script] | None = None,
) -> AsyncIterator[ScriptedTokenizer]:
    """A tokenizer that serves within the block."""
    tokenizer = ScriptedTokenizer(script) if script is not None else ScriptedTokenizer()
    await tokenizer.start()
    try:
        yield tokenizer
    finally:
        await tokenizer.stop()
