"""A client that goes away is cancelled at the tokenizer at once; one that reads slowly harms nobody."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gateway.upstream import inbox as inbox_module
from tests.support.running_gateway import CHAT, RunningGateway, running_gateway, sse_events
from tests.support.scripted_tokenizer import Script, ScriptedTokenizer, event, finish, say, scripted_tokenizer

WAIT_S = 5.0


def held_after(num_steps: int) -> Any:
    """A script that stops after `num_steps` steps, for ever."""
    never = asyncio.Event()
    return lambda request: Script(say(*"abcdef").steps, gate=lambda i: never if i >= num_steps else None)


@pytest.fixture
async def tokenizer() -> AsyncIterator[ScriptedTokenizer]:
    async with scripted_tokenizer() as tokenizer:
        yield tokenizer


@pytest.fixture
async def http(tokenizer: ScriptedTokenizer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer.address) as http:
        yield http


def post(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw


async def send(http: RunningGateway, raw: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
    writer.write(raw)
    await writer.drain()
    return reader, writer


async def slow_client(http: RunningGateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that holds little of what it has not read."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32 * 1024)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", http.port))
    return await asyncio.open_connection(sock=connection, limit=2**14)


async def cancelled(tokenizer: ScriptedTokenizer, num: int = 1) -> None:
    async with asyncio.timeout(WAIT_S):
        while len(tokenizer.cancelled) < num:
            tokenizer.cancel_seen.clear()
            await tokenizer.cancel_seen.wait()
    assert tokenizer.num_streams == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_steps", [0, 2])
@pytest.mark.parametrize("reset", [False, True])
async def test_the_cancel_reaches_the_tokenizer(
    http: RunningGateway, tokenizer: ScriptedTokenizer, stream: bool, num_steps: int, reset: bool
) -> None:
    tokenizer.script = held_after(num_steps)
    reader, writer = await send(http, post("/v1/chat/completions", {**CHAT, "stream": stream}))
    async with asyncio.timeout(WAIT_S):
        await tokenizer.request_seen.wait()
        if stream and num_steps:
            await reader.readuntil(b'"content":"a')
    if reset:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort() if reset else writer.close()
    await cancelled(tokenizer)
    assert tokenizer.cancelled == [tokenizer.requests[0].options.request_id]
    async with asyncio.timeout(WAIT_S):
        while await http.metric("rorqual_client_disconnects_total") != 1:
            await asyncio.sleep(0.01)
    assert await http.metric("rorqual_http_requests_in_flight") == 1
    assert not http.gateway.context.running
    tokenizer.script = lambda request: say("on")
    assert (await http.client.post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_abandoned_is_freed_without_a_search_for_cycles(
    http: RunningGateway, tokenizer: ScriptedTokenizer, stream: bool
) -> None:
    """The gateway looks for cycles seldom: what each abort leaves to that search would fill the memory meanwhile."""

    def num_inboxes() -> int:
        # The young alone: all that was there before is old, and takes the loop seconds to look through.
        return sum(isinstance(thing, inbox_module.Inbox) for thing in gc.get_objects(generation=0))

    tokenizer.script = held_after(1)
    gc.collect()
    gc.disable()
    try:
        _, writer = await send(http, post("/v1/chat/completions", {**CHAT, "stream": stream}))
        await tokenizer.request_seen.wait()
        async with asyncio.timeout(WAIT_S):
            while num_inboxes() != 1:
                await asyncio.sleep(0.01)
            writer.close()
            await cancelled(tokenizer)
            while num_inboxes() != 0:
                await asyncio.sleep(0.01)
    finally:
        gc.enable()


async def test_all_prompts_and_choices_are_cancelled(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = held_after(0)
    body = {"model": "scripted", "prompt": ["a", "b", "c"], "n": 2, "stream": True}
    _, writer = await send(http, post("/v1/completions", body))
    async with asyncio.timeout(WAIT_S):
        while tokenizer.num_streams < 3:
            await asyncio.sleep(0.01)
    writer.close()
    await cancelled(tokenizer, 3)


async def test_one_choice_that_fails_ends_the_others(http: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    from rorqual.v1 import common_pb2

    never = asyncio.Event()

    def script(request: Any) -> Script:
        if request.text == "bad":
            return Script([], refuse=common_pb2.Error(code=3, reason="PROMPT_TOO_LONG", message="too long"))
        return Script([[finish(0)]], gate=lambda i: never)

    tokenizer.script = script
    response = await http.client.post("/v1/completions", json={"model": "scripted", "prompt": ["ok", "bad", "ok"]})
    assert response.status_code == 400
    await cancelled(tokenizer, 2)


async def test_a_client_that_leaves_before_its_request_is_whole(
    http: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    raw = post("/v1/chat/completions", CHAT)
    _, writer = await send(http, raw[:-5])
    writer.close()
    assert (await http.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
    assert len(tokenizer.requests) == 1


async def test_the_deadline_ends_a_request(tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = held_after(2)
    async with running_gateway(tokenizer.address, request_timeout_s=0.3) as http:
        whole = await http.client.post("/v1/chat/completions", json=CHAT)
        assert whole.status_code == 408
        assert whole.json()["error"]["code"] == "deadline_exceeded"
        streamed = await http.client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        assert sse_events(streamed.text)[-1]["error"]["type"] == "timeout_error"
    await cancelled(tokenizer, 2)


async def test_a_slow_reader_gets_all_in_fewer_larger_chunks_and_others_go_on(
    http: RunningGateway, tokenizer: ScriptedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.openai.serve.PAUSE_S", 0.001)
    num_tokens, text = 4000, "0123456789" * 100
    slow = Script(
        [*([event(0, [7], content=text)] for _ in range(num_tokens)), [finish(0)]],
        gate=lambda i: None if i % 50 else _breathe(),
    )
    tokenizer.script = lambda request: slow if request.options.max_tokens == 1 else say("quick")
    reader, writer = await slow_client(http)
    writer.write(post("/v1/chat/completions", {**CHAT, "stream": True, "max_tokens": 1}))
    async with asyncio.timeout(20):
        while tokenizer.num_streams or not tokenizer.requests:
            assert (await http.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        body = await _dechunk(reader)
    events = sse_events(body)
    assert events[-1] == "[DONE]"
    deltas = [e["choices"][0]["delta"].get("content", "") for e in events[:-1]]
    assert "".join(deltas) == text * num_tokens
    assert max(map(len, deltas)) > 10 * len(text)
    assert await http.metric("rorqual_slow_client_pauses_total") >= 1
    writer.close()


def _breathe() -> asyncio.Event:
    """An event that lets the loop run before it is set."""
    ready = asyncio.Event()
    asyncio.get_running_loop().call_later(0.001, ready.set)
    return ready


async def _dechunk(reader: asyncio.StreamReader) -> str:
    await reader.readuntil(b"\r\n\r\n")
    parts: list[bytes] = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        parts.append(await reader.readexactly(size))
        await reader.readexactly(2)
    return b"".join(parts).decode()


async def test_a_reader_that_never_reads_is_given_up(
    http: RunningGateway, tokenizer: ScriptedTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inbox_module.Inbox.__init__, "__kwdefaults__", {
        "num_streams": 1, "whole": False, "max_backlog_bytes": 100_000
    })  # fmt: skip
    text = "0123456789" * 1000
    tokenizer.script = lambda request: Script(
        [[event(0, [7], content=text)] for _ in range(5000)], gate=lambda i: None if i % 20 else _breathe()
    )
    reader, writer = await slow_client(http)
    writer.write(post("/v1/chat/completions", {**CHAT, "stream": True}))
    await cancelled(tokenizer)
    async with asyncio.timeout(20):
        events = sse_events(await _dechunk(reader))
    assert events[-1]["error"]["code"] == "slow_client"
    assert await http.metric("rorqual_slow_clients_total") == 1
    writer.close()
