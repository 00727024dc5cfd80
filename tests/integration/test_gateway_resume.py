"""A tokenizer that is lost in the middle of streams: the client sees no gap and no repeat."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rorqual.core.token_ids import unpack_token_ids
from rorqual.v1 import common_pb2
from tests.support.running_gateway import CHAT, RunningGateway, running_gateway, sse_events
from tests.support.scripted_tokenizer import Script, ScriptedTokenizer, say, scripted_tokenizer

TEXTS = [f"<{i}>" for i in range(12)]


class Gated:
    """A script that stops at a step until it is let go; later attempts run through."""

    def __init__(self, stop_at: int, *, n: int = 1) -> None:
        self.reached = asyncio.Event()
        self._never = asyncio.Event()
        self._stop_at = stop_at
        self._n = n

    def __call__(self, request: Any) -> Script:
        script = say(*TEXTS, n=self._n, reasoning=["r1", "r2"])
        if request.options.attempt == 0:
            script.gate = self._gate
        return script

    def _gate(self, step_idx: int) -> asyncio.Event | None:
        if step_idx < self._stop_at:
            return None
        self.reached.set()
        return self._never


async def ask(http: RunningGateway, *, stream: bool, n: int = 1) -> Any:
    body = {**CHAT, "stream": stream, "n": n, "seed": 5}
    response = await http.client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return sse_events(response.text) if stream else response.json()


def joined(events: list[Any], n: int) -> list[tuple[str, str, list[str]]]:
    """Reasoning, content and finish reasons of each choice."""
    assert events[-1] == "[DONE]"
    out = []
    for index in range(n):
        choices = [c for e in events[:-1] for c in e["choices"] if c["index"] == index]
        out.append(
            (
                "".join(c["delta"].get("reasoning_content", "") for c in choices),
                "".join(c["delta"].get("content", "") for c in choices),
                [c["finish_reason"] for c in choices if c["finish_reason"]],
            )
        )
    return out


async def break_when(gated: Gated, how: Any, *tokenizers: ScriptedTokenizer) -> None:
    async with asyncio.timeout(10):
        await gated.reached.wait()
        for tokenizer in tokenizers:
            await tokenizer.flushed()
    result = how()
    if result is not None:
        await result


@pytest.mark.parametrize("stop_at", [0, 1, 5, 14, 15])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_broken_session_is_resumed_after_the_tokens_held(stop_at: int, stream: bool) -> None:
    async with scripted_tokenizer() as tokenizer, running_gateway(tokenizer.address) as http:
        tokenizer.script = gated = Gated(min(stop_at, 14))
        breaking = asyncio.create_task(break_when(gated, tokenizer.break_sessions, tokenizer))
        answer = await ask(http, stream=stream)
        await breaking
        if stream:
            assert joined(answer, 1) == [("r1r2", "".join(TEXTS), ["stop"])]
        else:
            assert answer["choices"][0]["message"]["content"] == "".join(TEXTS)
            assert answer["usage"]["completion_tokens"] == 15
        first, second = (request.options for request in tokenizer.requests)
        assert (first.attempt, second.attempt) == (0, 1)
        assert not first.HasField("resume")
        assert second.request_id == first.request_id
        assert second.time_left_us < first.time_left_us
        resume = second.resume
        held = [list(unpack_token_ids(c.token_ids)) for c in resume.choices]
        expected = [1000, 1001, *range(100, 112)][: min(stop_at, 14)]
        assert held == ([expected] if expected else [])
        assert (resume.num_prompt_tokens, resume.seed, resume.template_time_unix_s) == (3, 77, 1_700_000_000)
        assert (len(resume.prompt_digest), resume.queue_time_us) == (32, 1234)


async def test_another_replica_takes_over_at_once() -> None:
    async with (
        scripted_tokenizer() as one,
        scripted_tokenizer() as two,
        running_gateway(one.address, two.address) as http,
    ):
        async with asyncio.timeout(10):
            while not all(r.usable for r in http.gateway.replicas.replicas):
                await asyncio.sleep(0.01)
        gated = Gated(7, n=3)
        one.script = two.script = gated

        def kill() -> Any:
            return (one if one.requests else two).stop()

        breaking = asyncio.create_task(break_when(gated, kill, one, two))
        assert joined(await ask(http, stream=True, n=3), 3) == [("r1r2", "".join(TEXTS), ["stop"])] * 3
        await breaking
        assert len(one.requests) == len(two.requests) == 1
        second = next(r for r in (one.requests[0], two.requests[0]) if r.options.attempt == 1)
        counts = {c.choice_index: len(c.token_ids) // 4 for c in second.options.resume.choices}
        assert counts == {0: 3, 1: 2, 2: 2}


async def test_a_replica_that_comes_back_resumes() -> None:
    async with scripted_tokenizer() as tokenizer, running_gateway(tokenizer.address) as http:
        tokenizer.script = gated = Gated(4)

        async def crash() -> None:
            await tokenizer.stop()
            await asyncio.sleep(0.5)
            await tokenizer.restart()

        breaking = asyncio.create_task(break_when(gated, crash))
        assert joined(await ask(http, stream=True), 1) == [("r1r2", "".join(TEXTS), ["stop"])]
        await breaking


async def test_a_chain_that_is_not_ready_queues_a_resume() -> None:
    async with scripted_tokenizer() as tokenizer, running_gateway(tokenizer.address) as http:
        tokenizer.script = gated = Gated(4)

        async def crash() -> None:
            await tokenizer.stop()
            tokenizer._server = tokenizer._make_server()
            await tokenizer.start(serving=False)

        breaking = asyncio.create_task(break_when(gated, crash))
        assert joined(await ask(http, stream=True), 1) == [("r1r2", "".join(TEXTS), ["stop"])]
        await breaking


async def test_a_replica_that_never_comes_back_ends_the_stream_with_its_cause() -> None:
    async with scripted_tokenizer() as tokenizer, running_gateway(tokenizer.address, peer_timeout_s=1.1) as http:
        for stream in (True, False):
            tokenizer.script = gated = Gated(4)
            breaking = asyncio.create_task(break_when(gated, tokenizer.stop, tokenizer))
            response = await http.client.post("/v1/chat/completions", json={**CHAT, "stream": stream})
            await breaking
            if stream:
                last = sse_events(response.text)[-1]
                assert response.status_code == 200
            else:
                assert response.status_code == 503
                last = response.json()
            assert last["error"]["type"] == "service_unavailable"
            assert tokenizer.address in last["error"]["message"]
            if stream:
                await tokenizer.restart()
                await http.gateway.replicas.acquire("", until_s=1e12)
                async with asyncio.timeout(10):
                    while not http.gateway.replicas.ready:
                        await asyncio.sleep(0.01)


async def test_a_request_whose_sessions_end_again_and_again_by_the_peers_wish_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.upstream.stream.MAX_FRUITLESS_ATTEMPTS", 3)
    async with scripted_tokenizer() as tokenizer, running_gateway(tokenizer.address) as http:
        never = asyncio.Event()
        restarts = []

        async def end() -> None:
            await tokenizer.stop()
            await tokenizer.restart()

        def script(request: Any) -> Script:
            restarts.append(
                asyncio.get_running_loop().call_later(0.01, lambda: restarts.append(asyncio.ensure_future(end())))
            )
            return Script(say("x").steps, gate=lambda i: never)

        tokenizer.script = script
        response = await http.client.post("/v1/chat/completions", json=CHAT)
        assert response.status_code == 503
        assert len(tokenizer.requests) == 4
        assert not http.gateway.replicas.isolation.is_active


async def test_a_silent_session_counts_as_lost() -> None:
    async with (
        scripted_tokenizer() as one,
        scripted_tokenizer() as two,
        running_gateway(one.address, two.address, peer_timeout_s=2.0) as http,
    ):
        one.heartbeat_s = two.heartbeat_s = 0.1
        async with asyncio.timeout(10):
            while not all(r.usable for r in http.gateway.replicas.replicas):
                await asyncio.sleep(0.01)
        gated = Gated(4)
        one.script = two.script = gated

        def hang() -> None:
            (one if one.requests else two).silent = True

        breaking = asyncio.create_task(break_when(gated, hang, one, two))
        assert joined(await ask(http, stream=True), 1) == [("r1r2", "".join(TEXTS), ["stop"])]
        await breaking


async def test_a_replica_that_cannot_serve_is_left_for_one_that_can() -> None:
    async with scripted_tokenizer() as one, scripted_tokenizer() as two:
        refusal = common_pb2.Error(code=14, reason="SCHEDULER_UNAVAILABLE", message="no scheduler")
        one.script = lambda request: Script([], refuse=refusal)
        async with running_gateway(one.address, two.address) as http:
            async with asyncio.timeout(10):
                while not all(r.usable for r in http.gateway.replicas.replicas):
                    await asyncio.sleep(0.01)
            for _ in range(4):
                assert (await http.client.post("/v1/chat/completions", json=CHAT)).status_code == 200
            assert one.requests
            assert len(two.requests) == 4


async def test_load_is_spread() -> None:
    async with scripted_tokenizer() as one, scripted_tokenizer() as two:
        never = asyncio.Event()
        one.script = two.script = lambda request: Script(say("x").steps, gate=lambda i: never)
        async with running_gateway(one.address, two.address) as http:
            async with asyncio.timeout(10):
                while not all(r.usable for r in http.gateway.replicas.replicas):
                    await asyncio.sleep(0.01)
            asking = [asyncio.create_task(http.client.post("/v1/chat/completions", json=CHAT)) for _ in range(10)]
            async with asyncio.timeout(10):
                while one.num_streams + two.num_streams < 10:
                    await asyncio.sleep(0.01)
            assert (one.num_streams, two.num_streams) == (5, 5)
            never.set()
            assert [r.status_code for r in await asyncio.gather(*asking)] == [200] * 10
