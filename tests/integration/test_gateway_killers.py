"""A request that kills the tokenizers that serve it: it fails, alone, and everybody else is answered right."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gateway.upstream.link import SessionLink
from rorqual.core.clock import SystemClock
from rorqual.core.errors import RorqualError
from rorqual.core.quarantine import MAX_GROUP
from rorqual.rpc.channel import open_channel
from rorqual.v1 import text_pb2, text_pb2_grpc
from tests.support.running_gateway import CHAT, RunningGateway, running_gateway, sse_events
from tests.support.scripted_tokenizer import Script, ScriptedTokenizer, say

NUM_INNOCENTS = 64
NUM_TOKENS = 40


def killer_and_innocents(kills_at: int) -> Any:
    """The chat's text says which it is; an innocent's answer repeats it."""

    def script(request: Any) -> Script:
        text = request.messages[0].content
        answer = say(*(f"{text}:{i} " for i in range(NUM_TOKENS)))
        answer.delay_s = 0.002
        if text == "killer":
            answer.kills_at = kills_at
        return answer

    return script


@contextlib.asynccontextmanager
async def tokenizers(count: int, script: Any) -> AsyncIterator[list[ScriptedTokenizer]]:
    made = [ScriptedTokenizer(script) for _ in range(count)]
    for tokenizer in made:
        await tokenizer.start()
    try:
        yield made
    finally:
        for tokenizer in made:
            await tokenizer.stop()


async def ask(http: RunningGateway, text: str, **fields: Any) -> httpx.Response:
    body = {**CHAT, "messages": [{"role": "user", "content": text}], **fields}
    return await http.client.post("/v1/chat/completions", json=body)


def content(response: httpx.Response, *, stream: bool) -> str:
    assert response.status_code == 200, response.text
    if not stream:
        return str(response.json()["choices"][0]["message"]["content"])
    events = sse_events(response.text)
    assert events[-1] == "[DONE]"
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events[:-1])


def whole(text: str) -> str:
    return "".join(f"{text}:{i} " for i in range(NUM_TOKENS))


@pytest.mark.parametrize("kills_at", [-1, 0, 5])
@pytest.mark.parametrize("num_tokenizers", [1, 2, 5])
async def test_one_killer_among_many(num_tokenizers: int, kills_at: int) -> None:
    async with (
        tokenizers(num_tokenizers, killer_and_innocents(kills_at)) as replicas,
        running_gateway(*(tokenizer.address for tokenizer in replicas)) as http,
        asyncio.timeout(60),
    ):
        while not all(replica.usable for replica in http.gateway.replicas.replicas):
            await asyncio.sleep(0.01)
        asking = [asyncio.create_task(ask(http, f"whale {n}", stream=n % 2 == 0)) for n in range(NUM_INNOCENTS)]
        killing = asyncio.create_task(ask(http, "killer"))
        while sum(tokenizer.num_deaths for tokenizer in replicas) < 2:
            await asyncio.sleep(0.005)
        late = [asyncio.create_task(ask(http, f"calf {n}")) for n in range(3)]  # they come while suspects are tried
        guilty = await killing
        assert guilty.status_code == 500
        error = guilty.json()["error"]
        assert error["code"] == "request_kills_tokenizer"
        assert "is not sent again" in error["message"]
        assert guilty.headers["x-should-retry"] == "false"
        for n, response in enumerate(await asyncio.gather(*asking)):
            assert content(response, stream=n % 2 == 0) == whole(f"whale {n}")
        for n, response in enumerate(await asyncio.gather(*late)):
            assert content(response, stream=False) == whole(f"calf {n}")
        assert not http.gateway.replicas.isolation.is_active
        # Two deaths among everybody, one in its group, two alone.
        assert 3 <= sum(tokenizer.num_deaths for tokenizer in replicas) <= 5
        assert sum(len(tokenizer.beside_killers) for tokenizer in replicas) <= 5
        if num_tokenizers == 1:
            assert all(beside < MAX_GROUP for beside in replicas[0].beside_killers[2:])
            assert replicas[0].beside_killers[-2:] == [0, 0]


async def test_a_killer_alone_is_not_sent_a_fourth_time() -> None:
    async with (
        tokenizers(1, killer_and_innocents(-1)) as (tokenizer,),
        running_gateway(tokenizer.address) as http,
        asyncio.timeout(30),
    ):
        response = await ask(http, "killer")
        assert (response.status_code, response.json()["error"]["code"]) == (500, "request_kills_tokenizer")
        assert tokenizer.num_deaths == 3
        assert content(await ask(http, "whale"), stream=False) == whole("whale")


async def test_two_killers_are_both_found() -> None:
    async with (
        tokenizers(2, killer_and_innocents(-1)) as replicas,
        running_gateway(*(tokenizer.address for tokenizer in replicas)) as http,
        asyncio.timeout(60),
    ):
        asking = [asyncio.create_task(ask(http, f"whale {n}")) for n in range(20)]
        killers = [asyncio.create_task(ask(http, "killer")) for _ in range(2)]
        assert [response.status_code for response in await asyncio.gather(*killers)] == [500, 500]
        for n, response in enumerate(await asyncio.gather(*asking)):
            assert content(response, stream=False) == whole(f"whale {n}")


async def test_a_suspect_that_is_given_up_leaves_nobody_waiting() -> None:
    """The killer's client goes away while suspects are tried."""
    async with (
        tokenizers(1, killer_and_innocents(-1)) as (tokenizer,),
        running_gateway(tokenizer.address) as http,
        asyncio.timeout(30),
    ):
        asking = [asyncio.create_task(ask(http, f"whale {n}")) for n in range(20)]
        killing = asyncio.create_task(ask(http, "killer"))
        while tokenizer.num_deaths < 2:
            await asyncio.sleep(0.005)
        killing.cancel()
        for n, response in enumerate(await asyncio.gather(*asking)):
            assert content(response, stream=False) == whole(f"whale {n}")
        assert not http.gateway.replicas.isolation.is_active


class Reader:
    """A stream that only listens."""

    num_tokens = 0
    model = ""

    def __init__(self) -> None:
        self.lost: list[bool] = []

    def on_message(self, message: text_pb2.TextStreamEvents) -> None: ...

    def on_lost(self, error: RorqualError, *, died: bool) -> None:
        self.lost.append(died)

    def move(self) -> None: ...

    def convict(self) -> None: ...


@pytest.mark.parametrize(
    ("end", "died"),
    [
        (ScriptedTokenizer.break_sessions, True),
        (ScriptedTokenizer.stop, False),  # it was told to
        (None, False),  # nobody was there: the machine refused the connection
    ],
)
async def test_only_a_peer_that_was_there_can_die(end: Any, died: bool) -> None:
    async with tokenizers(1, killer_and_innocents(-1)) as (tokenizer,), asyncio.timeout(30):
        if end is None:
            await tokenizer.stop()
        ended: list[tuple[int, bool]] = []
        async with open_channel(tokenizer.address) as channel:
            link = SessionLink(
                tokenizer.address,
                text_pb2_grpc.TextServiceStub(channel).Session,
                peer_timeout_s=5.0,
                clock=SystemClock(),
                on_end=lambda link, readers, died: ended.append((len(readers), died)),
            )
            reader = Reader()
            command = text_pb2.TextCommand()
            command.chat.messages.add(role="user", content="whale")
            link.open(reader, command)
            running = asyncio.create_task(link.run())
            if end is not None:
                while not tokenizer.requests:
                    await asyncio.sleep(0.002)
                if (stopping := end(tokenizer)) is not None:
                    await stopping
            await running
        assert reader.lost == [died]
        assert [was_death for _, was_death in ended] == [died]
        if end is not None:
            assert ended[0][0] == 1
