"""The tokenizer service before a scripted scheduler, and what a caller hears from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from rorqual.core.config import TokenizerConfig
from rorqual.core.token_ids import unpack_token_ids
from rorqual.rpc.channel import open_channel
from rorqual.rpc.status import from_rpc_error
from rorqual.v1 import generation_pb2, text_pb2, text_pb2_grpc
from services.tokenizer.app import TokenizerApp
from services.tokenizer.decoder import decode_all
from tests.support.scripted_scheduler import Script, ScriptedScheduler
from tests.support.vocabularies import TINY_FOLDER, tiny, v4_folder

EOS = 1


@dataclass
class Stack:
    scheduler: ScriptedScheduler
    app: TokenizerApp
    stub: text_pb2_grpc.TextServiceStub
    channel: grpc.aio.Channel
    port: int
    scheduler_port: int


@asynccontextmanager
async def serving(
    script: Callable[[generation_pb2.GenerateRequest], Script],
    *,
    model: Path = TINY_FOLDER,
    exporter: InMemorySpanExporter | None = None,
    peer_timeout_s: float = 10.0,
    scheduler: ScriptedScheduler | None = None,
    **config: Any,
) -> AsyncIterator[Stack]:
    """A tokenizer before a scripted scheduler; serving by the time it is given."""
    vocab_size = 129_280 if model == v4_folder() else 8192
    scheduler = scheduler or ScriptedScheduler(script, vocab_size=vocab_size)
    port = await scheduler.start()
    app = TokenizerApp(
        TokenizerConfig(
            listen="127.0.0.1:0",
            scheduler=f"127.0.0.1:{port}",
            model=str(model),
            peer_timeout_s=peer_timeout_s,
            **config,
        ),
        span_exporter=exporter,
    )
    text_port = await app.start()
    channel = open_channel(f"127.0.0.1:{text_port}")
    try:
        await wait_for_health(channel, serving=True)
        yield Stack(scheduler, app, text_pb2_grpc.TextServiceStub(channel), channel, text_port, port)
    finally:
        await channel.close()
        await app.stop(0)
        await scheduler.stop()


async def wait_for_health(channel: grpc.aio.Channel, *, serving: bool, timeout_s: float = 10.0) -> None:
    wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    health = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service="rorqual.v1.TextService")
    async with asyncio.timeout(timeout_s):
        while (await health.Check(request, wait_for_ready=True)).status != wanted:
            await asyncio.sleep(0.02)


@dataclass
class HeardCall:
    call_id: str
    name: str
    arguments: str = ""


@dataclass
class Heard:
    """A request's events, gathered."""

    accepted: text_pb2.Accepted = field(default_factory=text_pb2.Accepted)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    content: dict[int, str] = field(default_factory=dict)
    reasoning: dict[int, str] = field(default_factory=dict)
    calls: dict[int, dict[int, HeardCall]] = field(default_factory=dict)  # by choice and index
    deltas: list[str] = field(default_factory=list)
    logprobs: list[text_pb2.TokenLogprobText] = field(default_factory=list)
    echo: list[text_pb2.PromptEcho] = field(default_factory=list)
    finished: dict[int, text_pb2.ChoiceFinished] = field(default_factory=dict)
    usage: text_pb2.Usage = field(default_factory=text_pb2.Usage)
    kinds: list[str | None] = field(default_factory=list)

    def add(self, events: Iterable[text_pb2.TextEvent]) -> None:
        for event in events:
            kind = event.WhichOneof("event")
            self.kinds.append(kind)
            index = event.choice_index
            assert index not in self.finished or kind == "usage", "an event after the choice's end"
            self.token_ids.setdefault(index, []).extend(unpack_token_ids(event.token_ids))
            self.logprobs.extend(event.logprobs)
            if kind == "accepted":
                self.accepted.CopyFrom(event.accepted)
            elif kind in ("content", "reasoning"):
                text = getattr(event, kind)
                texts = getattr(self, kind)
                texts[index] = texts.get(index, "") + text
                self.deltas.append(text)
            elif kind == "tool_call":
                self._add_call(index, event.tool_call)
            elif kind == "echo":
                self.echo.append(event.echo)
            elif kind == "finished":
                self.finished[index] = event.finished
            elif kind == "usage":
                self.usage.CopyFrom(event.usage)

    def _add_call(self, index: int, delta: text_pb2.ToolCallDelta) -> None:
        calls = self.calls.setdefault(index, {})
        if delta.tool_call_idx not in calls:
            assert delta.tool_call_idx == len(calls), "calls count up from 0"
            assert delta.id
            assert delta.name
            calls[delta.tool_call_idx] = HeardCall(delta.id, delta.name)
        else:
            assert (delta.id, delta.name) == ("", ""), "said once"
            assert delta.tool_call_idx == len(calls) - 1
        calls[delta.tool_call_idx].arguments += delta.arguments_json_delta


async def hear(call: Any, heard: Heard | None = None) -> Heard:
    heard = heard or Heard()
    while (response := await call.read()) is not grpc.aio.EOF:
        heard.add(response.events)
    return heard


def chat(content: str = "hello", **options: Any) -> text_pb2.ChatRequest:
    return text_pb2.ChatRequest(
        options=text_pb2.TextOptions(**options), messages=[text_pb2.ChatMessage(role="user", content=content)]
    )


def complete(text: str = "Once upon", *, echo: bool = False, **options: Any) -> text_pb2.CompleteRequest:
    return text_pb2.CompleteRequest(options=text_pb2.TextOptions(**options), text=text, echo=echo)


def steps(token_ids: Sequence[int], size: int = 1) -> Script:
    return Script([token_ids[n : n + size] for n in range(0, len(token_ids), size)])


def pieces(texts: Sequence[str]) -> Script:
    """One step for each text, which must be a single token or several."""
    return Script([tiny().encode(text) for text in texts])


async def failure(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await hear(call)
    return from_rpc_error(caught.value)


def tiny_text(token_ids: Sequence[int]) -> str:
    return decode_all(tiny().plain_text, token_ids)
