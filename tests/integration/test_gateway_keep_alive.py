"""A stream that is silent says that it is alive: in the queue, before the first token and between tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import anthropic
import httpx
import openai
import pytest

from gateway.asgi import Exchange
from rorqual.v1 import common_pb2
from tests.support.running_gateway import CHAT, RunningGateway, running_gateway
from tests.support.scripted_tokenizer import Script, ScriptedTokenizer, say, scripted_tokenizer

WAIT_S = 20.0
PERIOD_S = 0.02
COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {**CHAT, "max_tokens": 8},
}


def sign_of(path: str) -> bytes:
    return PING if path == "/v1/messages" else COMMENT


@pytest.fixture
async def tokenizer() -> AsyncIterator[ScriptedTokenizer]:
    async with scripted_tokenizer() as tokenizer:
        yield tokenizer


@pytest.fixture
async def http(tokenizer: ScriptedTokenizer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(tokenizer.address, keep_alive_s=PERIOD_S) as http:
        yield http


@dataclass
class Signs:
    """Lets what waits go on: the first gate after two signs, the second after four, the third two after "Hello"."""

    gates: list[asyncio.Event] = field(default_factory=list)
    num: int = 0
    num_before_hello: int | None = None

    def see(self, events: bytes) -> None:
        if b"Hello" in events:
            self.num_before_hello = self.num
        elif events in (COMMENT, PING):
            self.num += 1
            since_hello = 0 if self.num_before_hello is None else self.num - self.num_before_hello
            for gate, is_time in zip(self.gates, (self.num >= 2, self.num >= 4, since_hello >= 2), strict=False):
                if is_time:
                    gate.set()


@pytest.fixture
def signs(monkeypatch: pytest.MonkeyPatch) -> Signs:
    signs = Signs()
    write = Exchange.write

    async def seen(self: Exchange, events: bytes) -> None:
        await write(self, events)
        signs.see(events)

    monkeypatch.setattr(Exchange, "write", seen)
    return signs


def held(signs: Signs) -> Script:
    """Silent in the queue, before the first token and before the second, until signs have come."""
    queue, first, second = signs.gates = [asyncio.Event() for _ in range(3)]
    signs.num, signs.num_before_hello = 0, None
    gates = {0: first, 1: second}
    return Script(say("Hello", " world").steps, queue=queue, gate=gates.get)


async def streamed(http: RunningGateway, path: str) -> tuple[int, bytes]:
    async with asyncio.timeout(WAIT_S):
        response = await http.client.post(path, json={**BODIES[path], "stream": True})
    return response.status_code, response.content


@pytest.mark.parametrize("path", BODIES)
async def test_a_silent_stream_says_that_it_is_alive(
    http: RunningGateway, tokenizer: ScriptedTokenizer, signs: Signs, path: str
) -> None:
    tokenizer.script = lambda request: held(signs)
    status, content = await streamed(http, path)
    assert status == 200
    sign = sign_of(path)
    blocks = [block + b"\n\n" for block in content.split(b"\n\n")[:-1]]
    assert blocks[:2] == [sign, sign]
    first, second = (next(i for i, block in enumerate(blocks) if word in block) for word in (b"Hello", b" world"))
    assert blocks[:first].count(sign) >= 4
    assert blocks[first:second].count(sign) >= 2
    assert all(block.startswith((b"data: ", b"event: ")) for block in blocks if block != sign)


async def test_real_clients_read_over_them(http: RunningGateway, tokenizer: ScriptedTokenizer, signs: Signs) -> None:
    tokenizer.script = lambda request: held(signs)
    async with (
        asyncio.timeout(WAIT_S),
        openai.AsyncOpenAI(base_url=f"{http.url}/v1", api_key="any", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=http.url, api_key="any", max_retries=0) as other,
    ):
        chunks = await client.chat.completions.create(**CHAT, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks if chunk.choices])
        assert (text, signs.num >= 6) == ("Hello world", True)
        completion = await client.completions.create(model="scripted", prompt="hi", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in completion if chunk.choices]) == "Hello world"
        assert signs.num >= 6
        async with client.responses.stream(model="scripted", input="hi") as events:
            assert (await events.get_final_response()).output_text == "Hello world"
        assert signs.num >= 6
        async with other.messages.stream(**CHAT, max_tokens=8) as message:
            assert await message.get_final_text() == "Hello world"
        assert signs.num >= 6


QUEUE_FULL = common_pb2.Error(code=8, reason="QUEUE_FULL", message="the queue is full")


@pytest.mark.parametrize("path", BODIES)
async def test_a_refusal_after_a_sign_is_an_error_event(
    http: RunningGateway, tokenizer: ScriptedTokenizer, signs: Signs, path: str
) -> None:
    gate = asyncio.Event()
    signs.gates = [gate]
    tokenizer.script = lambda request: Script([], queue=gate, refuse=QUEUE_FULL)
    status, content = await streamed(http, path)
    assert status == 200
    assert content.startswith(sign_of(path))
    assert b"the queue is full" in content.split(b"\n\n")[-2]


@pytest.mark.parametrize("path", BODIES)
async def test_a_refusal_before_a_sign_is_a_status(tokenizer: ScriptedTokenizer, path: str) -> None:
    tokenizer.script = lambda request: Script([], refuse=QUEUE_FULL)
    async with running_gateway(tokenizer.address) as http:
        status, content = await streamed(http, path)
    assert status == 429
    assert "the queue is full" in json.loads(content)["error"]["message"]


async def test_waiting_for_a_tokenizer_is_waiting_too(tokenizer: ScriptedTokenizer, signs: Signs) -> None:
    gate = asyncio.Event()
    signs.gates = [gate]
    await tokenizer.stop()
    async with running_gateway(tokenizer.address, wait=False, keep_alive_s=PERIOD_S) as http:
        answer = asyncio.create_task(streamed(http, "/v1/chat/completions"))
        async with asyncio.timeout(WAIT_S):
            await gate.wait()
            await tokenizer.restart()
            status, content = await answer
    assert status == 200
    assert content.startswith(COMMENT * 2)
    assert content.endswith(b"data: [DONE]\n\n")


async def test_no_tokenizer_is_a_503_before_a_sign_and_an_event_after() -> None:
    async with running_gateway("127.0.0.1:1", wait=False, peer_timeout_s=1.01, keep_alive_s=0) as http:
        status, content = await streamed(http, "/v1/chat/completions")
        assert status == 503
        code = json.loads(content)["error"]["code"]
    async with running_gateway("127.0.0.1:1", wait=False, peer_timeout_s=1.01, keep_alive_s=PERIOD_S) as http:
        status, content = await streamed(http, "/v1/chat/completions")
    assert status == 200
    assert content.startswith(COMMENT)
    assert json.loads(content.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]["code"] == code


async def test_a_whole_answer_has_no_signs(http: RunningGateway, tokenizer: ScriptedTokenizer, signs: Signs) -> None:
    gate = asyncio.Event()
    tokenizer.script = lambda request: Script(say("Hello").steps, queue=gate)
    answer = asyncio.create_task(http.client.post("/v1/chat/completions", json=CHAT))
    await tokenizer.request_seen.wait()
    await asyncio.sleep(5 * PERIOD_S)  # whatever was going to be written had the time
    gate.set()
    response: httpx.Response = await answer
    assert response.status_code == 200
    assert response.json()["choices"][0]["message"]["content"] == "Hello"
    assert signs.num == 0
